"""The load of `soak`: an hour of a training job without the pauses for its GPUs.

It has partitions that live for one step, created and cleared one after another under new names, and a long-lived one
that is cleared sample by sample. Producers, reward workers with leases and DP ranks use the network and shared memory.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

import tq_service as tq

PRODUCER_COUNT = 8
RANK_COUNT = 8
GROUP_SIZE = 8
GROUPS_OF_A_PRODUCER = 2
SAMPLES_OF_A_STEP = PRODUCER_COUNT * GROUPS_OF_A_PRODUCER * GROUP_SIZE
BATCH_COUNT = 2
BATCH_SIZE = SAMPLES_OF_A_STEP // RANK_COUNT // BATCH_COUNT
STEPS_AT_ONCE = 2
_ROW_LENGTH = 4_096
_LARGE_ROW_LENGTH = 1 << 16
_LARGE_ROW_COUNT = 16


class Load:
    """Makes the load until the time is over.

    Attributes:
        step_count: steps done.
        sample_count: samples put, claimed, fetched and cleared.
    """

    def __init__(self, client: tq.AsyncClient) -> None:
        self.step_count = 0
        self.sample_count = 0
        self._client = client
        self._numbers = itertools.count()
        self._rows = np.random.default_rng(17).random((GROUP_SIZE, _ROW_LENGTH)).astype(np.float32)
        self._large_rows = np.zeros((_LARGE_ROW_COUNT, _LARGE_ROW_LENGTH), np.float32)

    async def run(self, seconds: float) -> None:
        """Make the load for some time, then finish the started work."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(STEPS_AT_ONCE):
                group.create_task(self._repeat(self._step, until))
            group.create_task(self._repeat(self._replay, until))

    @staticmethod
    async def _repeat(work: Callable[[], Coroutine[Any, Any, None]], until: float) -> None:
        while time.monotonic() < until:
            await work()

    async def _step(self) -> None:
        """One partition from its first put to its clear."""
        partition_id = f"step-{next(self._numbers)}"
        async with asyncio.TaskGroup() as group:
            for producer in range(PRODUCER_COUNT):
                group.create_task(self._produce(partition_id, producer))
            group.create_task(self._reward(partition_id))
            for rank in range(RANK_COUNT):
                group.create_task(self._train(partition_id, rank))
        await self._client.clear_partition(partition_id)
        self.step_count += 1
        self.sample_count += SAMPLES_OF_A_STEP

    async def _produce(self, partition_id: str, producer: int) -> None:
        for number in range(GROUPS_OF_A_PRODUCER):
            name = f"prompt-{producer}-{number}"
            lengths = [_ROW_LENGTH - 8 * row for row in range(GROUP_SIZE)]
            await self._client.put(
                partition_id,
                {
                    "input_ids": [row[:length] for row, length in zip(self._rows, lengths, strict=True)],
                    "text": [f"answer {row} to {name}" for row in range(GROUP_SIZE)],
                },
                keys=[f"{name}-{row}" for row in range(GROUP_SIZE)],
                groups=[name] * GROUP_SIZE,
                group_size=GROUP_SIZE,
                custom_meta=[{"total_lengths": length} for length in lengths],
            )

    async def _reward(self, partition_id: str) -> None:
        done = 0
        while done < SAMPLES_OF_A_STEP:
            meta = await self._client.get_meta(
                partition_id=partition_id, task_name="reward", data_fields=["text"], batch_size=SAMPLES_OF_A_STEP,
                min_batch_size=1, lease=60.0,
            )  # fmt: skip
            await self._client.put(meta, {"reward": np.zeros(meta.size, np.float32)})
            await self._client.ack(meta)
            done += meta.size

    async def _train(self, partition_id: str, rank: int) -> None:
        for batch_index in range(BATCH_COUNT):
            meta = await self._client.get_meta(
                partition_id=partition_id, task_name="train", data_fields=["input_ids", "reward"],
                batch_size=BATCH_SIZE, dp_rank=rank, dp_size=RANK_COUNT, batch_index=batch_index,
                sampler="seqlen_balanced",
            )  # fmt: skip
            await self._client.get_data(meta)

    async def _replay(self) -> None:
        """Put into the long-lived partition and clear used samples."""
        await self._client.put("replay", {"x": self._large_rows})
        meta = await self._client.get_meta(
            partition_id="replay", task_name="train", data_fields=["x"], batch_size=_LARGE_ROW_COUNT
        )
        await self._client.get_data(meta)
        await self._client.clear_samples(meta)
        self.sample_count += _LARGE_ROW_COUNT
