"""What a service keeps does not grow with the partitions that it had: all that their cycle makes goes with them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import tracemalloc
import types
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from live_server import AnyClient, StartServer

import tq_service as tq
from tq_service.client_probes import Collected
from tq_service.machine.state_machine import IdempotencyCache
from tq_service.serving.history import ChangeHistory

_NOT_FOLLOWED = (
    type, types.ModuleType, types.FrameType, types.CodeType, threading.Thread, asyncio.AbstractEventLoop,
    IdempotencyCache,  # its answers go by their age
    Collected,  # left in the context by a trainer loop of another test; at most 4,096 stages
)  # fmt: skip


def reachable(root: object) -> Iterator[object]:
    """Yield all objects that one holds, itself included."""
    globals_of_modules = {id(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    seen, left = {id(root)}, [root]
    while left:
        each = left.pop()
        yield each
        for other in gc.get_referents(each):
            if id(other) not in seen and id(other) not in globals_of_modules and not isinstance(other, _NOT_FOLLOWED):
                seen.add(id(other))
                left.append(other)


def entries(root: object) -> Counter[str]:
    """Return how many entries the containers have that an object holds, by type."""
    found: Counter[str] = Counter()
    for each in reachable(root):
        if isinstance(each, ChangeHistory):  # it keeps the names of the last million samples that are gone
            found["deque"] -= len(each._gone)
            removed = [array for gone in each._gone for array in gone.removed or () if array is not None]
            found["ndarray"] -= sum(array.size for array in removed)
        if isinstance(each, dict | list | set | deque):
            found[type(each).__name__] += len(each)
        elif isinstance(each, np.ndarray):
            found["ndarray"] += each.size
    return found


def cycle(client: AnyClient, number: int) -> None:
    """Use a partition as a step of training does, by all kinds of calls, and clear it."""
    name, asks = f"train@step_{number}", {"partition_id": f"train@step_{number}", "max_wait": 0.0}
    keys = [f"{number}-{row}" for row in range(8)]
    client.create_partition(name, max_bytes=1 << 20, admissions=[tq.Admission("ranks", 100)])
    client.put(name,
        {"x": torch.arange(8), "text": list("abcdefgh")}, keys=keys, groups=list("aabbccdd"),
        group_size=2, custom_meta={"version": np.full(8, number), "tag": list("abcdefgh")},
    )  # fmt: skip
    for at in range(3):
        rows, _ = client.lookup_samples(name, keys[:: at + 1])
        client.put(rows, {f"y{at}": torch.zeros(rows.size)})
    worker = client.get_meta(**asks, task_name="reward", data_fields=["x"], batch_size=8, lease=60.0)
    client.put(worker, {"reward": torch.zeros(8)})
    client.ack(worker.select_samples(range(4)))
    client.release(worker.select_samples(range(4, 6)))
    named = {**asks, "task_name": "named", "data_fields": ["x"], "batch_size": 4, "claim_name": f"claim {number}"}
    client.get_meta(**named)
    ranked = {"task_name": "ranks", "data_fields": ["x"], "batch_size": 2, "dp_size": 2, "batch_index": 0}
    for dp_rank in range(2):
        client.get_data(client.get_meta(**asks, **ranked, dp_rank=dp_rank))
    waits = client.get_meta(**asks, task_name="reward", data_fields=["never"], batch_size=8, explain=True)
    assert waits.status == "not_yet"
    with pytest.raises(tq.errors.StaleEpochError):
        client.get_meta(**asks, task_name=f"eval {number}", data_fields=["x"], batch_size=1, epoch=3)
    with pytest.raises(tq.errors.InvalidArgumentError):
        client.get_meta(**asks, task_name="odd", data_fields=["x"], batch_size=1, where=[("tag", ">", 1)])
    assert (
        client.get_meta(
            partition_id=f"none {number}", task_name="t", data_fields=["x"], batch_size=1, max_wait=0.0
        ).size
        == 0
    )
    client.describe_partition(name)
    client.status()
    client.reset_consumption(name, "ranks")
    client.seal_partition(name)
    client.clear_samples(name, keys=keys[:4])
    client.clear_partition(name)


@pytest.mark.parametrize("kind", [pytest.param("memory", marks=pytest.mark.nightly), "split"])
def test_nothing_is_kept_of_partitions_that_were_cleared(start_server: StartServer, kind: str) -> None:
    servers = [start_server()] if kind == "memory" else [start_server(role="controller")]
    if kind == "split":
        servers.append(start_server(role="storage", controller=servers[0].address))
    client = servers[0].client()
    numbers = itertools.count()

    def kept(count: int) -> list[Counter[str]]:
        for number in itertools.islice(numbers, count):
            cycle(client, number)
        while client.storage_stat(servers[-1].address).used_bytes:
            pass
        servers[0].settle()
        gc.collect()
        return [entries(server.app) for server in servers]

    for few, many in zip(kept(8), kept(24), strict=True):
        assert {name: (few[name], many[name]) for name in many if many[name] > few[name] + 16} == {}


@pytest.mark.nightly
def test_little_is_kept_of_each_put_after_its_sample_is_cleared(start_server: StartServer) -> None:
    server = start_server()
    client = server.client(gathers_puts=False)

    def put_and_clear(count: int) -> None:
        for number in range(count):
            client.put("alone", {"x": np.full((1, 8), number, np.float32)})
        client.clear_partition("alone")
        while client.storage_stat(server.address).used_bytes:
            pass
        server.settle()
        gc.collect()

    put_and_clear(1_500)  # so that tables have grown
    object_count = len(gc.get_objects())
    tracemalloc.start()
    put_and_clear(1_000)
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(gc.get_objects()) - object_count < 1_500  # its answer, which is kept for retries
    assert traced_bytes / 1_000 < 700
