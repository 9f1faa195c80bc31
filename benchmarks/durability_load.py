"""The same load on services of different durability: claims, small puts and large ones, as rates."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

import tq_service as tq

PRODUCER_COUNT = 8
RANK_COUNT = 8
BATCH_SIZE = 8
_SAMPLE_COUNT = 32_768
_CLAIM_COUNT = 1_536
_STEP_COUNT = 96
_SMALL_PUT_COUNT = 512
SMALL_ROW_BYTES = 2_048
_TENSOR_BYTES = 16 << 20
_TENSOR_ROW_COUNT = 64

Rate = Callable[[], Awaitable[float]]


class Load:
    """The kinds of load on one service; each returns a rate.

    Args:
        client: client of the service.
        part: divisor of the number of calls.
        tensor_bytes: size of a large put.
        large_puts_each: consecutive large puts of each producer.
        before_clear: awaited after timing, before the data is cleared.
    """

    def __init__(
        self,
        client: tq.AsyncClient,
        part: int,
        *,
        tensor_bytes: int = _TENSOR_BYTES,
        large_puts_each: int = 1,
        before_clear: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._client = client
        self._part = part
        self._numbers = itertools.count()
        self._tensor = _tensor(tensor_bytes)
        self._large_puts_each = large_puts_each
        self._before_clear = before_clear

    async def start(self) -> None:
        """Put the samples for claims."""
        await self._client.put("claims", {"x": np.arange(_SAMPLE_COUNT)})

    async def _clear(self, partition_id: str) -> None:
        if self._before_clear is not None:
            await self._before_clear()
        await self._client.clear_partition(partition_id)

    async def _claim(self, partition_id: str, task: str, rank: int, batch_index: int) -> None:
        meta = await self._client.get_meta(
            partition_id=partition_id, task_name=task, data_fields=["x"], batch_size=BATCH_SIZE, dp_rank=rank,
            dp_size=RANK_COUNT, batch_index=batch_index,
        )  # fmt: skip
        if meta.size != BATCH_SIZE:
            raise RuntimeError(f"got {meta.size} samples, expected {BATCH_SIZE}")

    async def ranked_claims(self) -> float:
        """Claims per second by ranks, of stored samples."""
        task, count = f"task-{next(self._numbers)}", _CLAIM_COUNT // RANK_COUNT // self._part

        async def consume(rank: int) -> None:
            for batch_index in range(count):
                await self._claim("claims", task, rank, batch_index)

        return await _rate(map(consume, range(RANK_COUNT)), count * RANK_COUNT)

    async def queue_claims(self) -> float:
        """Claims per second by queue workers, each a separate change."""
        task, count = f"task-{next(self._numbers)}", _CLAIM_COUNT // RANK_COUNT // self._part

        async def consume(_worker: int) -> None:
            for _ in range(count):
                await self._client.get_meta(
                    partition_id="claims", task_name=task, data_fields=["x"], batch_size=BATCH_SIZE
                )

        return await _rate(map(consume, range(RANK_COUNT)), count * RANK_COUNT)

    async def steps(self) -> float:
        """Claims per second while producers put the claimed samples, one put for each batch of all ranks."""
        partition_id, count = f"steps-{next(self._numbers)}", _STEP_COUNT // self._part
        data = {"x": np.zeros((RANK_COUNT * BATCH_SIZE, SMALL_ROW_BYTES // 8))}

        async def produce(producer: int) -> None:
            for _ in range(producer, count, PRODUCER_COUNT):
                await self._client.put(partition_id, data)

        async def consume(rank: int) -> None:
            for batch_index in range(count):
                await self._claim(partition_id, "train", rank, batch_index)

        work = [*map(produce, range(PRODUCER_COUNT)), *map(consume, range(RANK_COUNT))]
        rate = await _rate(work, count * RANK_COUNT)
        await self._clear(partition_id)
        return rate

    async def small_puts(self) -> float:
        """Puts per second of one sample each."""
        partition_id, count = f"small-{next(self._numbers)}", _SMALL_PUT_COUNT // PRODUCER_COUNT // self._part
        data = {"x": np.zeros((1, SMALL_ROW_BYTES // 8))}

        async def produce(_producer: int) -> None:
            for _ in range(count):
                await self._client.put(partition_id, data)

        rate = await _rate(map(produce, range(PRODUCER_COUNT)), count * PRODUCER_COUNT)
        await self._clear(partition_id)
        return rate

    async def large_puts(self) -> float:
        """GB/s of producers that put tensors; earlier ones were cleared."""
        count = PRODUCER_COUNT // self._part

        async def produce(_producer: int) -> None:
            for _ in range(self._large_puts_each):
                await self._client.put("large", {"x": self._tensor})

        amount = count * self._large_puts_each * self._tensor.nbytes / 1e9
        rate = await _rate(map(produce, range(count)), amount)
        await self._clear("large")
        return rate


@cache
def _tensor(size_bytes: int) -> np.ndarray[Any, Any]:
    """Return rows of random numbers, the same for all loads of a process."""
    return np.random.default_rng(17).random((_TENSOR_ROW_COUNT, size_bytes // _TENSOR_ROW_COUNT // 8))


async def _rate(work: Iterable[Awaitable[None]], amount: float) -> float:
    """Return the amount per second; all work has ended, even if some of it raises."""
    started = time.perf_counter()
    for error in await asyncio.gather(*work, return_exceptions=True):
        if error is not None:
            raise error
    return amount / (time.perf_counter() - started)
