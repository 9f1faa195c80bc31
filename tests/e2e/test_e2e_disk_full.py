"""A disk that is full: producers are told to come back, consumers go on, and it ends by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tq_service as tq
from tq_service.testing import ServiceProcess

MIB = 1 << 20
# The service leaves 256 MiB free for what frees space.
DISK_BYTES = 320 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("only root may mount a small disk")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def durability() -> str:
    return "process"


@pytest.fixture
def server(small_disk: Path, durability: str) -> Iterator[ServiceProcess]:
    flags = ["--data-dir", str(small_disk / "data"), "--durability", durability, "--max-bytes", "1GiB"]
    with ServiceProcess(*flags) as server:
        yield server


def fill(small_disk: Path) -> Path:
    """Leave no space on the disk."""
    path = small_disk / "somebody-elses"
    with path.open("wb") as file:
        for size in (MIB, 4096):
            try:
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
            except OSError:
                continue
    return path


def put_until_full(client: tq.Client) -> int:
    """Put 2 MiB at a time until there is no space; return how many were put."""
    for count in range(DISK_BYTES // (2 * MIB) + 1):
        try:
            client.put("train", {"x": torch.full((1, 1 << 19), float(count))})
        except tq.errors.DiskFullError as error:
            assert error.retry_after_seconds is not None
            return count
    raise AssertionError("more was put than the disk has")


def test_consumers_go_on_and_what_they_clear_frees_space(server: ServiceProcess) -> None:
    with tq.Client(server.address, timeout=30.0) as client:
        count = put_until_full(client)
        assert count >= 4
        for number in range(count):
            meta = client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=1)
            assert bool((client.get_data(meta)["x"] == number).all())
        assert client.clear_samples("train", global_indexes=range(count - 1)) == count - 1
        again = client.put("train", {"x": torch.full((1, 1 << 19), 7.0)})
        assert bool((client.get_data(again)["x"] == 7.0).all())
        server.restart()
        assert bool((client.get_data(again)["x"] == 7.0).all())
        assert client.check_consumption("train", "t").consumed_count == count


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_it_goes_on_by_itself_once_there_is_space(server: ServiceProcess, small_disk: Path) -> None:
    with tq.Client(server.address, timeout=30.0) as client:
        first = client.put("train", {"x": torch.arange(4)})
        somebody_elses = fill(small_disk)
        with pytest.raises(tq.errors.DiskFullError) as caught:
            client.put("large", {"x": torch.zeros(1, 1 << 19)})
        assert caught.value.retry_after_seconds is not None
        assert client.get_data(first)["x"].tolist() == [0, 1, 2, 3]
        claimed = client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=4)
        assert claimed.global_indexes == first.global_indexes
        assert [partition.partition_id for partition in client.list_partitions()] == ["train"]
        somebody_elses.unlink()
        while True:
            try:
                large = client.put("large", {"x": torch.ones(1, 1 << 19)})
                break
            except tq.errors.DiskFullError as error:
                assert error.retry_after_seconds is not None
        server.restart()
        assert bool((client.get_data(large)["x"] == 1).all())
        assert client.get_data(claimed)["x"].tolist() == [0, 1, 2, 3]
