"""What the samples of a group share, over kills, checkpoints and storage services that are taken over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import LiveServer, LoopThread

import tq_service as tq
from tq_service.testing import ServiceProcess

GROUPS, SIZE = 6, 4
FIELDS = [tq.FieldSpec("image", scope="group"), tq.FieldSpec("prompt", scope="group")]
CLAIM: dict[str, Any] = {"partition_id": "train", "task_name": "train", "data_fields": ["tokens", "image", "prompt"]}
RANKS: dict[str, Any] = {"batch_size": 8, "dp_rank": 0, "dp_size": 1, "max_wait": 20.0}


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what another process or thread does."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(first: int, count: int) -> list[str]:
    return [f"g{group}" for group in range(first, first + count)]


def image_of(group: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 100 + group), dtype=torch.uint8, generator=torch.Generator().manual_seed(group))


def put_shared(client: tq.Client, first: int, count: int) -> None:
    groups = range(first, first + count)
    data = {"image": [image_of(group) for group in groups], "prompt": [f"prompt {group}" for group in groups]}
    client.put_groups("train", data, groups=names(first, count))


def put(client: tq.Client, first: int, count: int) -> None:
    """Put samples of groups, and what they share: for one half before, for the other half after the samples."""
    put_shared(client, first, count // 2)
    groups = [name for name in names(first, count) for _ in range(SIZE)]
    tokens = torch.arange(first * SIZE, (first + count) * SIZE)
    client.put("train", {"tokens": tokens}, groups=groups, group_size=SIZE)
    put_shared(client, first + count // 2, count - count // 2)


def check(client: tq.Client, first: int, count: int) -> None:
    """Read the samples of groups, and compare them bit for bit."""
    rows = range(first * SIZE, (first + count) * SIZE)
    batch = client.get_data("train", global_indexes=list(rows))
    assert batch["tokens"].tolist() == list(rows)
    assert list(batch["prompt"]) == [f"prompt {row // SIZE}" for row in rows]
    for row, image in zip(rows, batch["image"].unbind(), strict=True):
        assert torch.equal(image, image_of(row // SIZE))


def facts(client: tq.Client) -> Any:
    description = client.describe_partition("train")
    return [(each.spec, each.produced_count) for each in description.fields], description.used_bytes


@pytest.mark.nightly
def test_it_is_there_after_kills_and_goes_with_its_samples(tmp_path: Path) -> None:
    with ServiceProcess("--data-dir", str(tmp_path)) as service, tq.Client(service.address, timeout=60.0) as client:
        client.create_partition("train", fields=FIELDS)
        put(client, 0, GROUPS)
        first = client.get_meta(**CLAIM, **RANKS, batch_index=0)
        put_shared(client, GROUPS, 1)  # of a group whose samples are still to come
        client.put_groups("train", {"prompt": ["prompt 0"]}, groups=["g0"], existing=True)
        before = facts(client)
        service.kill()
        service.restart()
        assert facts(client) == before
        check(client, 0, GROUPS)
        assert client.get_meta(**CLAIM, **RANKS, batch_index=0).global_indexes == first.global_indexes
        client.put("train", {"tokens": torch.arange(SIZE)}, groups=names(GROUPS, 1) * SIZE)
        found = client.get_data("train", global_indexes=[GROUPS * SIZE])
        assert torch.equal(found["image"].unbind()[0], image_of(GROUPS))
        client.clear_samples("train", global_indexes=range(2, (GROUPS + 1) * SIZE))
        service.kill()
        service.restart()
        check_one = client.get_data("train", global_indexes=[0, 1])
        assert list(check_one["prompt"]) == ["prompt 0"] * 2
        client.clear_samples("train", global_indexes=[0, 1])
        assert client.describe_partition("train").used_bytes == 0
        until(lambda: client.storage_stat().used_bytes == 0)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 1), (0, 2)])
def test_a_checkpoint_has_it_once(loop_thread: LoopThread, tmp_path: Path, before: int, after: int) -> None:
    with ExitStack() as stack:

        def start(storage_count: int) -> Any:
            role = {"role": "controller"} if storage_count else {}
            server = stack.enter_context(LiveServer(loop_thread, checkpoint_dir=tmp_path, **role))
            for number in range(storage_count):
                storage_id = f"s{number}-{storage_count}"
                where = {"role": "storage", "controller": server.address, "storage_id": storage_id}
                stack.enter_context(LiveServer(loop_thread, **where))
            until(lambda: server.app.controller.storages.count >= storage_count)
            return server.client()

        client = start(before)
        client.create_partition("train", fields=FIELDS)
        put(client, 0, GROUPS)
        put_shared(client, GROUPS, 2)
        fields, value_bytes = facts(client)
        client.put_groups("train", {"image": [image_of(1)]}, groups=["g1"])  # in a put of its own
        assert client.checkpoint("one").value_bytes == value_bytes
        client = start(after)
        client.restore("one")
        assert facts(client) == (fields, value_bytes)
        check(client, 0, GROUPS)
        batch = client.get_meta(**CLAIM, **RANKS, batch_index=0)
        assert batch.global_indexes == list(range(8))
        tokens = torch.arange(2 * SIZE)
        client.put("train", {"tokens": tokens}, groups=[*names(GROUPS, 2)] * SIZE, group_size=SIZE)
        assert client.get_data("train", global_indexes=[25])["prompt"][0] == f"prompt {GROUPS + 1}"
        client.clear_samples("train", global_indexes=range(0, (GROUPS + 2) * SIZE))
        assert client.describe_partition("train").used_bytes == 0


def test_a_storage_service_that_takes_puts_over_has_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        controller = stack.enter_context(ServiceProcess("--role", "controller", "--data-dir", str(tmp_path / "data")))
        mirror = ["--mirror", f"file://{tmp_path}/mirror", "--max-bytes", "256MiB"]
        role = ["--role", "storage", "--controller", controller.address]
        one = stack.enter_context(ServiceProcess(*role, "--storage-id", "one", *mirror))
        client = stack.enter_context(tq.Client(controller.address, timeout=60.0))
        client.create_partition("train", fields=FIELDS)
        put(client, 0, GROUPS)
        used_bytes = client.describe_partition("train").used_bytes
        stack.enter_context(ServiceProcess(*role, "--storage-id", "two", *mirror))
        one.kill()
        check(client, 0, GROUPS)
        client.clear_samples("train", global_indexes=[0, 1, 2])
        put_shared(client, 1, 1)
        controller.kill()
        controller.restart()
        check(client, 1, GROUPS - 1)
        assert client.describe_partition("train").used_bytes == used_bytes - 3 * 8
        assert client.get_data("train", global_indexes=[3])["prompt"][0] == "prompt 0"
