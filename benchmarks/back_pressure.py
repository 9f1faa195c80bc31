"""Under a sustained overload: do producers wait, is anything lost, and how much memory does the server take?

Producers put as fast as they can; one consumer takes a batch, reads it, clears it and pauses. Bytes go over the network
or through memory shared with the clients. Shared memory belongs to no single process, so its size is taken from the
storage service's figures.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import psutil

import tq_service as tq
from benchmarks.harness import Options, main, median, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

_MIB = 2**20
_PARTITION = "train"
_TASK = "update_actor"
_QUOTA_BYTES = 1024 * _MIB
_ROW_BYTES = _MIB
_PUT_ROWS = 8
_PRODUCER_COUNT = 6
_REST_SECONDS = 0.01
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """The limit on the producers: flags of the server and settings of the partition."""

    flags: tuple[str, ...] = ()
    max_bytes: int | None = None
    admissions: tuple[tq.Admission, ...] = ()


@dataclass(slots=True)
class _Seen:
    """Measurements of one run: peaks in bytes and samples, seconds in puts, and the consumed samples."""

    resident_bytes: float = 0
    stored_bytes: float = 0
    partition_bytes: float = 0
    left_count: float = 0
    call_seconds: float = 0
    run_seconds: float = 0
    consumed: list[int] = field(default_factory=list)


async def _produce(address: str, put_count: int, seen: _Seen) -> None:
    row = {"x": np.zeros((_PUT_ROWS, _ROW_BYTES), np.uint8)}
    async with tq.AsyncClient(address, timeout=300.0) as client:
        for _ in range(put_count):
            began_at = time.perf_counter()
            await client.put(_PARTITION, row)
            seen.call_seconds += time.perf_counter() - began_at


async def _consume(address: str, count: int, seen: _Seen) -> None:
    async with tq.AsyncClient(address, timeout=300.0) as client:
        while len(seen.consumed) < count:
            meta = await client.get_meta(
                partition_id=_PARTITION, task_name=_TASK, data_fields=["x"], batch_size=8, max_wait=60.0
            )
            await client.get_data(meta)
            seen.consumed += meta.global_indexes
            await client.clear_samples(meta)
            await asyncio.sleep(_REST_SECONDS)


async def _watch(address: str, pid: int, seen: _Seen, *, is_shared: bool) -> None:
    process = psutil.Process(pid)

    def own() -> int:
        return int(process.memory_full_info().uss if is_shared else process.memory_info().rss)

    before = own()
    async with tq.AsyncClient(address, timeout=60.0) as client:
        while True:
            stat, shown = await client.storage_stat(), await client.describe_partition(_PARTITION)
            resident = own() - before + (stat.used_bytes if is_shared else 0)
            seen.resident_bytes = max(seen.resident_bytes, resident)
            seen.stored_bytes = max(seen.stored_bytes, stat.used_bytes)
            seen.partition_bytes = max(seen.partition_bytes, shown.used_bytes)
            cleared = shown.summary.inserted_count - shown.summary.present_count
            consumed = sum(task.consumed_count for task in shown.tasks)
            seen.left_count = max(seen.left_count, shown.live_count - (consumed - cleared))
            await asyncio.sleep(_LOOK_SECONDS)


async def _overload(case: _Case, address: str, pid: int, put_count: int) -> _Seen:
    seen = _Seen()
    async with tq.AsyncClient(address, timeout=60.0) as client:
        await client.put("first", {"x": np.zeros(1)})  # leaves out memory for the very first put
        await client.clear_partition("first")
        await client.create_partition(_PARTITION, max_bytes=case.max_bytes, admissions=case.admissions)
    watching = asyncio.create_task(_watch(address, pid, seen, is_shared="off" not in case.flags))
    began_at = time.perf_counter()
    producers = [asyncio.create_task(_produce(address, put_count, seen)) for _ in range(_PRODUCER_COUNT)]
    await _consume(address, _PRODUCER_COUNT * put_count * _PUT_ROWS, seen)
    await asyncio.gather(*producers)
    seen.run_seconds = time.perf_counter() - began_at
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching  # raises the error that ended it early, if any
    return seen


def _measured(case: _Case, put_count: int) -> _Seen:
    with ServiceProcess("--max-bytes", str(_QUOTA_BYTES), *case.flags) as server:
        return run_async(_overload(case, server.address, server.pid, put_count))


def run(options: Options) -> Report:
    """Measure."""
    put_count = 4 if options.quick else 48
    wire, shared = ("--shared-memory", "off"), ("--shared-memory", "on")
    half, limit = _QUOTA_BYTES // 2, 64
    cases = {
        "quota of the service, wire": _Case(flags=wire),
        "quota of the service, shared memory": _Case(flags=shared),
        "quota of the partition, wire": _Case(flags=wire, max_bytes=half),
        "quota of the partition, shared memory": _Case(flags=shared, max_bytes=half),
        "64 samples ahead, wire": _Case(flags=wire, admissions=(tq.Admission(_TASK, limit),)),
    }
    expected = list(range(_PRODUCER_COUNT * put_count * _PUT_ROWS))
    rows: list[list[Cell]] = []
    worst, lost = 0.0, 0
    for name, case in cases.items():
        runs = [_measured(case, put_count) for _ in range(1 if options.quick else 3)]
        resident = max(seen.resident_bytes for seen in runs) / _QUOTA_BYTES
        waited = median([seen.call_seconds / seen.run_seconds / _PRODUCER_COUNT for seen in runs])
        lost += sum(sorted(seen.consumed) != expected for seen in runs)
        worst = max(worst, resident)
        rows.append([
            name, len(expected) * _ROW_BYTES / _QUOTA_BYTES, resident,
            max(seen.stored_bytes for seen in runs) / _QUOTA_BYTES,
            max(seen.partition_bytes for seen in runs) / half if case.max_bytes else None,
            max(seen.left_count for seen in runs) / limit if case.admissions else None,
            waited, sum(sorted(seen.consumed) == expected for seen in runs) / len(runs),
        ])  # fmt: skip
    return Report(
        name="back_pressure",
        question="Under a sustained overload: do producers wait, is anything lost, how much memory is taken?",
        columns=[
            "what bounds the producers", "put in all / quota", "memory / quota", "stored / quota",
            "partition / its bound", "samples left / bound", "share of time in put", "runs with each sample once",
        ],
        rows=rows,
        aims=[
            Aim(what="most memory of the server / quota", measured=worst, wanted=1.10, at_least=False),
            Aim(what="runs that lost a sample or delivered one twice", measured=lost, wanted=0, at_least=False),
        ],
        notes=[
            f"{_PRODUCER_COUNT} producers put {_PUT_ROWS} MiB at a time as fast as they can, and one consumer pauses "
            f"{_REST_SECONDS * 1000:g} ms after each batch; quota {_QUOTA_BYTES // _MIB} MiB. Memory: the peak growth "
            "of resident memory; with shared memory, the server's private memory plus the stored bytes. New samples "
            "may use nine tenths of the quota. Over the network, gRPC takes about 100 MiB more for the streams of "
            "seven connections, whatever the quota.",
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(run))
