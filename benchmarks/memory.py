"""How much server memory do samples take, compared with their bytes, and how much is returned after a clear?

Resident memory of a separate server for each case, before and after. Bytes go over the network: memory that is shared
with clients belongs to no single process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import psutil

import tq_service as tq
from benchmarks.harness import Options, main, median, run_async
from benchmarks.report import Cell, Report
from tq_service.testing import ServiceProcess

SAMPLE_COUNT = 131_072
_GROUP_SIZE = 8
_SETTLED_SECONDS = 0.2
_MIB = 2**20
_PARTITION = "memory"

Load = Callable[[tq.AsyncClient], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Samples and the bytes that they consist of.

    Attributes:
        load: puts the samples.
        sample_count: number of samples.
        least_bytes: total bytes of their columns.
    """

    load: Load
    sample_count: int
    least_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    """Resident bytes above those of the empty server: with the samples, after a clear, and after putting them again."""

    loaded: float
    cleared: float
    again: float


def _samples(count: int, *, keys: bool = False, groups: bool = False, claimed: bool = False) -> _Case:
    """Return a case of samples of one int64 each, in one put."""
    names = [f"prompt-{row:012d}" for row in range(count)]
    group_names = [f"group-{row // _GROUP_SIZE:012d}" for row in range(count)]

    async def load(client: tq.AsyncClient) -> None:
        more = {"groups": group_names, "group_size": _GROUP_SIZE} if groups else {}
        meta = [{"total_lengths": row, "score": 0.5} for row in range(count)] if groups else None
        await client.put(_PARTITION, {"x": np.arange(count)}, keys=names if keys else None, custom_meta=meta, **more)
        if claimed:
            asks = {"partition_id": _PARTITION, "task_name": "train", "data_fields": ["x"], "batch_size": 1_024}
            for batch_index in range(count // 1_024):
                await client.get_meta(**asks, dp_rank=0, dp_size=1, batch_index=batch_index)

    least = 8 * count
    least += sum(map(len, names)) if keys else 0
    least += sum(map(len, group_names)) // _GROUP_SIZE + (8 + 8 + 8) * count if groups else 0
    return _Case(load=load, sample_count=count, least_bytes=least + (8 * count if claimed else 0))


def _puts(size_bytes: int, count: int, worker_count: int) -> _Case:
    """Return a case of puts of one sample each, of the given size, by concurrent workers."""
    row = np.zeros((1, size_bytes // 4), np.float32)

    async def load(client: tq.AsyncClient) -> None:
        async def work(number: int) -> None:
            for _ in range(number, count, worker_count):
                await client.put(_PARTITION, {"x": row})

        await asyncio.gather(*map(work, range(worker_count)))

    return _Case(load=load, sample_count=count, least_bytes=size_bytes * count)


async def _grow(case: _Case, address: str, pid: int) -> _Growth:
    async def settled() -> int:
        await asyncio.sleep(_SETTLED_SECONDS)
        return int(psutil.Process(pid).memory_info().rss)

    async with tq.AsyncClient(address, timeout=120.0) as client:
        await client.put("first", {"x": np.zeros(1)})  # leaves out memory for the very first put
        await client.get_meta(partition_id="first", task_name="t", data_fields=["x"], batch_size=1)
        before = await settled()
        seen = []
        for _ in range(2):
            await case.load(client)
            seen.append(await settled() - before)
            await client.clear_partition(_PARTITION)
            seen.append(await settled() - before)
    return _Growth(loaded=seen[0], cleared=seen[1], again=seen[2])


def _measured(case: _Case) -> _Growth:
    with ServiceProcess("--shared-memory", "off") as server:
        return run_async(_grow(case, server.address, server.pid))


def _cases(options: Options) -> dict[str, _Case]:
    count, part = (SAMPLE_COUNT // 16, 8) if options.quick else (SAMPLE_COUNT, 1)
    cases = {
        "samples of 8 B in one put": _samples(count),
        "the same, with keys": _samples(count, keys=True),
        "with keys, groups, custom_meta": _samples(count, keys=True, groups=True),
        "samples of 8 B in one put, claimed": _samples(count, claimed=True),
        "puts of 2 KiB": _puts(2_048, 2_048 // part, 32),
    }
    if not options.quick:
        cases |= {
            "puts of 1 MiB": _puts(_MIB, 64, 1),
            "puts of 64 MiB": _puts(64 * _MIB, 4, 1),
            "puts of 64 MiB, all at once": _puts(64 * _MIB, 4, 4),
        }
    return cases


def run(options: Options) -> Report:
    """Measure."""
    cases = _cases(options)
    growths: dict[str, list[_Growth]] = {name: [] for name in cases}
    for _ in range(1 if options.quick else options.repeats):  # each with a new server: none is warm
        for name, case in cases.items():
            growths[name].append(_measured(case))
    rows: list[list[Cell]] = []
    for name, case in cases.items():
        loaded, cleared, again = (
            median([getattr(growth, what) for growth in growths[name]]) for what in ("loaded", "cleared", "again")
        )
        a_sample = [case.least_bytes / case.sample_count, loaded / case.sample_count]
        rows.append([name, case.sample_count, *a_sample, loaded / case.least_bytes, cleared / loaded, again / loaded])
    return Report(
        name="memory",
        question="How much server memory do samples take, and how much is returned after a clear?",
        columns=["what", "samples", "bytes a sample, at least", "resident", "resident / least", "left after a clear",
                 "put again"],
        rows=rows,
        notes=[
            "bytes per sample equal MB (10^6 bytes) per million samples",
            "at least: bytes of the tensors, of keys and group names, 8 for each number and for the claim of a sample",
            "left after a clear, and put again after it: resident memory above that of the empty server, as a share of "
            "that with the samples; the server keeps freed memory for the next puts",
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(run))
