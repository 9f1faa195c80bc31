"""A service started on a data directory with one damaged file: what it gives is right, or it says what is wrong."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES, damage
from fuzz_messages import EXAMPLES
from live_server import AnyClient, LiveServer, LoopThread

import tq_service as tq

SAMPLES = 24
LARGE_BYTES = 96 << 10
ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 4}
RANKED: dict[str, Any] = {**ASKS, "dp_rank": 0, "dp_size": 1}


def value(index: int) -> torch.Tensor:
    """Return a sample: every third one is so large that it lies in a segment."""
    size = LARGE_BYTES if index % 3 == 0 else 40
    return torch.arange(size, dtype=torch.int32).add(index).to(torch.uint8)


def serve(loop: LoopThread, directory: Path) -> LiveServer:
    return LiveServer(
        loop, data_dir=directory, durability="process", shared_memory="off", storage_id="kept", max_bytes=64 << 20
    )


@pytest.fixture(scope="module")
def image(loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tq.BatchMeta]]:
    """A directory as a kill leaves it, with a snapshot, journals and segments; and the claims that were handed out."""
    directory = tmp_path_factory.mktemp("data")
    with serve(loop_thread, directory / "live") as server:
        client = server.client()
        claims = []
        for index in range(SAMPLES):
            client.put("train", {"x": [value(index)]}, keys=[f"k{index}"])
            if index % 4 == 3:
                claims.append(client.get_meta(**RANKED, batch_index=index // 4))
            if index in {9, 17}:
                loop_thread.run(server.app.state_store.take_snapshot())
        shutil.copytree(directory / "live", directory / "image", ignore=shutil.ignore_patterns("*.partial"))
    return directory / "image", claims


def check(client: AnyClient, claims: list[tq.BatchMeta], is_told: bool) -> None:
    """Check that what is there is right; what is not may be missing only where that was told."""
    found, missing = client.lookup_samples("train", [f"k{index}" for index in range(SAMPLES)])
    assert list(found.keys) == [f"k{index}" for index in range(len(found.keys))], "samples from the middle are missing"
    assert not missing or is_told
    lost = set()
    for index in range(len(found.keys)):
        try:
            batch = client.get_data("train", keys=[f"k{index}"])
        except tq.errors.DataLossError as error:
            assert error.metadata["global_indexes"] == str(index)
            lost.add(index)
        else:
            assert batch["x"][0].equal(value(index)), f"wrong bytes of k{index}"
    assert not lost or is_told
    for number, claim in enumerate(claims[: len(found.keys) // 4]):
        assert client.get_meta(**RANKED, batch_index=number, max_wait=0).global_indexes == claim.global_indexes


def test_an_image_without_damage(
    image: tuple[Path, list[tq.BatchMeta]], loop_thread: LoopThread, tmp_path: Path
) -> None:
    names = {path.name.split("-")[0] for path in image[0].rglob("*") if path.is_file()}
    assert {"journal", "snapshot"} <= names
    with serve(loop_thread, shutil.copytree(image[0], tmp_path / "copy")) as server:
        check(server.client(), image[1], is_told=False)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files(
    image: tuple[Path, list[tq.BatchMeta]],
    loop_thread: LoopThread,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    caplog.set_level(logging.WARNING)
    for seed in range(max(2, EXAMPLES // 20)):
        directory = shutil.copytree(image[0], tmp_path / f"copy-{seed}")
        what = damage(directory, kind, random.Random(f"data {kind} {seed}"))
        caplog.clear()
        try:
            server = serve(loop_thread, directory)
        except (tq.TqError, OSError) as error:
            assert len(str(error)) > 30, what
        else:
            with server:
                try:
                    check(server.client(), image[1], is_told=bool(caplog.records) or "seg" in what)
                except tq.errors.PartitionNotFoundError:
                    assert caplog.records, f"{what}: everything is gone, without a word"
                except BaseException as error:
                    error.add_note(what)
                    raise
        shutil.rmtree(directory)
