"""How much does an object cost in each object store, compared with a put and a get of the same size over the network?

The object stores are those of the contract suite, with servers on this machine. This compares the work for its cores,
not networks or disks. Each round puts and gets objects of one size, one at a time, in all object stores and in the
service.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks.engines import ENGINES, Engine, start_engines
from benchmarks.harness import Options, interleave_async, main, median, median_ratio, run_async
from benchmarks.report import Cell, Report
from tq_service.objects.base import ObjectStore, make_object_store
from tq_service.testing import ServiceProcess

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
_TURN_BYTES = 16 * MIB
_MOST_OBJECTS_A_TURN = 16
_PARTITION = "objects"


class _Objects:
    """Puts and gets in one object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._put_count = 0

    async def __call__(self, data: memoryview) -> tuple[float, float]:
        """Return the seconds of a put and of a get."""
        count = _count(len(data))
        names = [f"bench/{self._put_count + number}" for number in range(count)]
        self._put_count += count
        into = memoryview(bytearray(len(data)))
        times = [time.perf_counter()]
        for name in names:
            await self._store.put(name, [data], copies=1)
        times.append(time.perf_counter())
        for name in names:
            await self._store.read(name, into)
        times.append(time.perf_counter())
        while names := await self._store.remove(names):  # noqa: ASYNC110  (nothing is set when a lease ends)
            await asyncio.sleep(0.2)
        return (times[1] - times[0]) / count, (times[2] - times[1]) / count


class _Service:
    """Puts and gets of a service that shares no memory with its client."""

    def __init__(self, client: tq.AsyncClient) -> None:
        self._client = client

    async def __call__(self, data: memoryview) -> tuple[float, float]:
        """Return the seconds of a put and of a get."""
        count = _count(len(data))
        tensor = torch.from_numpy(np.frombuffer(data, np.uint8)).reshape(-1, 32 * KIB)
        times = [time.perf_counter()]
        metas = [await self._client.put(_PARTITION, {"x": tensor}) for _ in range(count)]
        times.append(time.perf_counter())
        for meta in metas:
            await self._client.get_data(meta)
        times.append(time.perf_counter())
        await self._client.clear_partition(_PARTITION)
        return (times[1] - times[0]) / count, (times[2] - times[1]) / count


def _count(size: int) -> int:
    return max(1, min(_MOST_OBJECTS_A_TURN, _TURN_BYTES // size))


async def _measure(options: Options, address: str, engines: dict[str, Engine]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(tq.AsyncClient(address, timeout=60.0))
        calls: dict[str, Callable[[memoryview], Awaitable[Any]]] = {"service, over the wire": _Service(client)}
        for name, engine in engines.items():
            store = make_object_store(engine.url)
            await store.open("127.0.0.1", 0)
            stack.push_async_callback(store.aclose)
            calls[name] = _Objects(store)
        for text, size in SIZES.items():
            data = memoryview(bytearray(np.random.default_rng(0).bytes(size)))
            cases = {name: partial(call, data) for name, call in calls.items()}
            times = await interleave_async(cases, options.repeats)
            puts = {name: [put for put, _ in each] for name, each in times.items()}
            gets = {name: [get for _, get in each] for name, each in times.items()}
            own = next(iter(times))
            for name in times:
                row: list[Cell] = [text, name]
                for seconds in (puts, gets):
                    row += [median(seconds[name]) * 1e3, median_ratio(seconds[own], seconds[name])]
                rows.append(row)
    return rows


def run(options: Options) -> Report:
    """Measure."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines, missing = start_engines(
            stack, directory, [name for name in ENGINES if name != "pool" and "stand_in" not in name]
        )
        server = stack.enter_context(ServiceProcess("--shared-memory", "off"))
        rows = run_async(_measure(options, server.address, engines))
    return Report(
        name="object_stores",
        question="How much does an object cost in each object store, compared with the same bytes in the service?",
        columns=["bytes", "engine", "put, ms", "rate beside the service", "get, ms", "rate beside the service"],
        rows=rows,
        notes=[
            "one call at a time; servers of object stores are on this machine; one copy; a file is synced",
            "rate beside the service: 2 is twice as fast in the same run; the service's put includes a commit",
            *(f"{name}: {reason}" for name, reason in missing.items()),
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
