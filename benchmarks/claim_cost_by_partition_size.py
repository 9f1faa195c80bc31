"""Does a claim cost more in a large partition, or in a long-lived one, than in a small new one?

One client claims 8 samples at a time, as a queue worker and as the only rank of a task. It claims in the order of the
samples, and in the order of a number or a text in their custom_meta.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, interleave_async, main, median, p50_p99, run_async
from benchmarks.report import Aim, Plot, Report
from tq_service.testing import ServiceProcess

SAMPLE_COUNTS = (1_024, 65_536, 1_000_000)
BATCH_SIZE = 8
MODES = ("queue", "ranked")

_CLAIMS_A_REPEAT = 1_024 // BATCH_SIZE
_LIVED = "lived"
_LIVE_COUNT = 1_024
_PUT_COUNT = 65_536
_ORDERS = ("number", "text")
_ORDERED = " samples, in the order of a "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Seconds of the claims of one repeat; the first of a new task is kept separately."""

    first: float | None
    others: list[float]


class _Consumer:
    """One task of one partition."""

    def __init__(self, client: tq.AsyncClient, partition_id: str, mode: str, *, order_by: Sequence[str] = ()) -> None:
        self._client = client
        self._order_by = order_by
        self._partition_id = partition_id
        self._task = secrets.token_hex(8)
        self._is_ranked = mode == "ranked"
        self._batch_indexes = itertools.count()

    async def claim(self, batch_size: int = BATCH_SIZE) -> float:
        """Claim a batch; return its seconds."""
        rank = {"dp_rank": 0, "dp_size": 1, "batch_index": next(self._batch_indexes)} if self._is_ranked else {}
        started = time.perf_counter()
        meta = await self._client.get_meta(
            partition_id=self._partition_id,
            task_name=self._task,
            data_fields=["x"],
            batch_size=batch_size,
            max_wait=120.0 if self._order_by else 0.0,  # the first claim in an order sorts all samples
            order_by=self._order_by,
            **rank,
        )
        elapsed = time.perf_counter() - started
        if meta.size != batch_size:
            raise RuntimeError(f"got {meta.size} samples, expected {batch_size}")
        return elapsed

    async def claims(self, count: int) -> list[float]:
        return [await self.claim() for _ in range(count)]


async def _fill(client: tq.AsyncClient, partition_id: str, count: int) -> None:
    for start in range(0, count, _PUT_COUNT):
        x = np.arange(start, min(start + _PUT_COUNT, count))
        values = np.random.default_rng(start).integers(0, 1_000_000, x.size).tolist()
        entries = [dict(zip(_ORDERS, (value, f"sample-{value}"), strict=True)) for value in values]
        await client.put(partition_id, {"x": x}, custom_meta=entries)


async def _in_new_task(client: tq.AsyncClient, partition_id: str, mode: str, order_by: Sequence[str] = ()) -> _Times:
    consumer = _Consumer(client, partition_id, mode, order_by=order_by)
    return _Times(first=await consumer.claim(), others=await consumer.claims(_CLAIMS_A_REPEAT - 1))


async def _in_old_task(consumer: _Consumer) -> _Times:
    return _Times(first=None, others=await consumer.claims(_CLAIMS_A_REPEAT - 1))


class _LivedPartition:
    """A partition with 1,024 live samples after many more: put, claimed by two tasks and cleared."""

    def __init__(self, client: tq.AsyncClient) -> None:
        self._client = client
        self._consumers = {mode: _Consumer(client, _LIVED, mode) for mode in MODES}

    async def live(self, sample_count: int) -> None:
        for _ in range(sample_count // _LIVE_COUNT):
            meta = await self._put()
            for consumer in self._consumers.values():
                await consumer.claim(_LIVE_COUNT)
            await self._client.clear_samples(meta)

    async def times(self, mode: str) -> _Times:
        meta = await self._put()
        times = await self._consumers[mode].claims(_CLAIMS_A_REPEAT)
        for other, consumer in self._consumers.items():
            if other != mode:
                await consumer.claim(_LIVE_COUNT)
        await self._client.clear_samples(meta)
        return _Times(first=None, others=times[1:])

    async def _put(self) -> tq.BatchMeta:
        return await self._client.put(_LIVED, {"x": np.arange(_LIVE_COUNT)})


async def _measure(options: Options, address: str) -> Report:
    counts = SAMPLE_COUNTS[:2] if options.quick else SAMPLE_COUNTS
    gone_count = counts[-1]
    rows: list[list[str | float | None]] = []
    async with tq.AsyncClient(address, timeout=120.0) as client:
        for count in counts:
            await _fill(client, str(count), count)
        lived = _LivedPartition(client)
        await lived.live(gone_count)
        for mode in MODES:
            cases: dict[str, Callable[[], Awaitable[_Times]]] = {
                f"{count:,} samples": partial(_in_new_task, client, str(count), mode) for count in counts
            }
            largest = str(counts[-1])
            for order in _ORDERS:
                cases[f"{counts[-1]:,}{_ORDERED}{order}"] = partial(_in_new_task, client, largest, mode, [order])
            consumed_count = counts[-1] // 2
            consumer = _Consumer(client, str(counts[-1]), mode)
            await consumer.claim(consumed_count)
            cases[f"{counts[-1]:,} samples, half of them consumed"] = partial(_in_old_task, consumer)
            cases[f"{_LIVE_COUNT:,} samples, {gone_count:,} cleared before"] = partial(lived.times, mode)
            times = await interleave_async(cases, options.repeats)
            rows += _rows(mode, times)
    return _report(rows, counts)


def _rows(mode: str, times: dict[str, list[_Times]]) -> list[list[str | float | None]]:
    rows: list[list[str | float | None]] = []
    small = [median(repeat.others) for repeat in next(iter(times.values()))]
    small_first = median([repeat.first or 0.0 for repeat in next(iter(times.values()))]) * 1e3
    for label, repeats in times.items():
        p50, p99 = p50_p99([repeat.others for repeat in repeats])
        ratio = median([median(repeat.others) / base for repeat, base in zip(repeats, small, strict=True)])
        firsts = [repeat.first * 1e3 for repeat in repeats if repeat.first is not None]
        first = median(firsts) if firsts else None
        rows.append([mode, label, p50, p99, ratio, first, None if first is None else first / small_first])
    return rows


def _report(rows: list[list[str | float | None]], counts: tuple[int, ...]) -> Report:
    largest = f"{counts[-1]:,} samples"
    series = {
        mode: [(count, row[2]) for count in counts for row in rows if row[:2] == [mode, f"{count:,} samples"]]
        for mode in MODES
    }
    return Report(
        name="claim_cost_by_partition_size",
        question="Does a claim cost more in a large partition, or in a long-lived one, than in a small new one?",
        columns=[
            "mode",
            "partition",
            "p50, ms",
            "p99, ms",
            "p50 / that at 1,024",
            "first claim of a task, ms",
            "first / that at 1,024",
        ],
        rows=rows,
        notes=[
            f"claims of {BATCH_SIZE} samples by one client, one at a time, {_CLAIMS_A_REPEAT} per repeat",
            "p50 and p99 leave out the first claim of a task, which creates it; its median is shown separately",
        ],
        aims=[
            Aim(
                what=f"{row[0]}, {row[1]}: ratio",
                measured=float(row[4] or 0),
                wanted=2.0 if _ORDERED in str(row[1]) else 1.2,
                at_least=False,
            )
            for row in rows
            if row[1] != f"{counts[0]:,} samples" and str(row[1]).startswith((largest, f"{_LIVE_COUNT:,} samples,"))
        ]
        + [
            Aim(what=f"{row[0]}, {row[1]}: first claim", measured=float(row[6] or 0), wanted=2.0, at_least=False)
            for row in rows
            if row[1] == largest
        ],
        plots=[
            Plot(
                name="claim_cost_by_partition_size",
                title="Latency of a claim, p50",
                x_label="samples in the partition",
                y_label="ms",
                series=series,
                log_x=True,
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess() as server:
        return run_async(_measure(options, server.address))


if __name__ == "__main__":
    sys.exit(main(run))
