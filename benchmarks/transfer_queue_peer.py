"""Runs in TransferQueue's environment: its controller and two storage units on Ray, and a client that makes the load.

Settings that give the peer its best performance:
- its low-level asynchronous client, awaited from one long-lived event loop as its documentation asks. This avoids the
  keys of the KV interface, and the thread of the synchronous client;
- the SimpleStorage backend with two units, its default; polling mode: the controller never sleeps;
- `SequentialSampler`, its default and the cheapest one;
- no limit on the stored samples, no metrics, and the variables that `benchmarks.peer_environment` sets: a pool of
  sockets large enough for all ranks, as many threads as cores, and only errors in the log;
- puts without keys, tags or metadata; numbers in two-dimensional columns, which it stores faster than one-dimensional.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient

from benchmarks.peer_program import Commands, serve
from benchmarks.ray_cluster import ray_cluster

_UNIT_COUNT = 2
# Each of its actors requests one core from Ray, and so does the controller.
_ACTOR_COUNT = _UNIT_COUNT + 1
_POLL_SECONDS = 1.0
# Its data bypasses Ray's object store.
_OBJECT_STORE_BYTES = 80 << 20
_CONFIG = {
    "controller": {"polling_mode": True, "sampler": "SequentialSampler"},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"num_data_storage_units": _UNIT_COUNT, "total_storage_size": None},
    },
}


class _Load:
    """The commands; each returns its measurements, in seconds."""

    def __init__(self, client: Any, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner
        self._tasks = (f"task-{number}" for number in itertools.count())
        self._data: dict[str, Any] = {}

    def commands(self) -> Commands:
        return {
            "versions": _versions,
            "fill": self.fill,
            "insert": self.insert,
            "claims": self.claims,
            "fetch": self.fetch,
            "check_consumption": self.check_consumption,
            "wake_up": self.wake_up,
            "load": self.load,
            "round_trip": self.round_trip,
        }

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    def fill(self, partition_id: str, sample_count: int) -> None:
        """Put samples of one int64 into a partition that stays."""
        self._run(self._client.async_put(_numbers(sample_count), partition_id=partition_id))

    def insert(self, sample_count: int) -> float:
        """Return the seconds of one put of samples into a separate partition, which is then cleared."""
        data = _numbers(sample_count)
        started = time.perf_counter()
        self._run(self._client.async_put(data, partition_id="insert"))
        seconds = time.perf_counter() - started
        self._run(self._client.async_clear_partition("insert"))
        return seconds

    def claims(
        self, partition_id: str, rank_count: int, claim_count: int, batch_size: int, consumed_count: int
    ) -> float:
        """Return the seconds of concurrent claims by the ranks of a new task, after some samples were consumed."""
        return float(self._run(self._claims(partition_id, rank_count, claim_count, batch_size, consumed_count)))

    async def _claims(
        self, partition_id: str, rank_count: int, claim_count: int, batch_size: int, consumed_count: int
    ) -> float:
        task = next(self._tasks)
        await self._claim(partition_id, task, consumed_count)

        async def consume() -> None:
            for _ in range(claim_count // rank_count):
                await self._claim(partition_id, task, batch_size)

        started = time.perf_counter()
        await asyncio.gather(*(consume() for _ in range(rank_count)))
        return time.perf_counter() - started

    async def _claim(self, partition_id: str, task: str, batch_size: int) -> None:
        meta = await self._client.async_get_meta(
            data_fields=["x"], batch_size=batch_size, partition_id=partition_id, mode="fetch", task_name=task
        )
        if meta.size != batch_size:
            raise RuntimeError(f"got {meta.size} samples, expected {batch_size}")

    def fetch(self, partition_id: str, batch_size: int, repeats: int) -> list[float]:
        """Return the seconds of consecutive claims of a new task."""
        return list(self._run(self._fetch(partition_id, batch_size, repeats)))

    async def _fetch(self, partition_id: str, batch_size: int, repeats: int) -> list[float]:
        task = next(self._tasks)
        times = [time.perf_counter()]
        for _ in range(repeats):
            await self._claim(partition_id, task, batch_size)
            times.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(times)]

    def check_consumption(self, partition_id: str, repeats: int) -> list[float]:
        """Return the seconds of each check of whether a task has consumed the partition."""
        return list(self._run(self._check_consumption(partition_id, repeats)))

    async def _check_consumption(self, partition_id: str, repeats: int) -> list[float]:
        task = next(self._tasks)
        await self._claim(partition_id, task, 1)
        times = [time.perf_counter()]
        for _ in range(repeats):
            if await self._client.async_check_consumption_status(task, partition_id):
                raise RuntimeError("consumed, expected not consumed")
            times.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(times)]

    def wake_up(self, count: int) -> list[float]:
        """Return the seconds from the start of each put of one sample until a waiting consumer has claimed it.

        The consumer waits like `StreamingDataset`: it claims, and sleeps for a second if nothing is ready. The put
        comes at a random moment of that second.
        """
        return list(self._run(self._wake_up(count)))

    async def _wake_up(self, count: int) -> list[float]:
        task, row, times = next(self._tasks), _numbers(1), []
        await self._client.async_put(row, partition_id="wake_up")
        await self._claim("wake_up", task, 1)
        for _ in range(count):
            served = asyncio.ensure_future(self._served("wake_up", task))
            await asyncio.sleep(random.uniform(0.0, _POLL_SECONDS))
            started = time.perf_counter()
            await self._client.async_put(row, partition_id="wake_up")
            times.append(await served - started)
        await self._client.async_clear_partition("wake_up")
        return times

    async def _served(self, partition_id: str, task: str) -> float:
        """Return the time of the claim of a sample."""
        while True:
            meta = await self._client.async_get_meta(
                data_fields=["x"], batch_size=1, partition_id=partition_id, mode="fetch", task_name=task
            )
            if meta.size:
                return time.perf_counter()
            await asyncio.sleep(_POLL_SECONDS)

    def load(self, name: str, row_lengths: list[int]) -> None:
        """Create float32 rows of these lengths for `round_trip`: dense if all are equal, otherwise jagged."""
        if len(set(row_lengths)) == 1:
            data = torch.rand(len(row_lengths), row_lengths[0])
        else:
            rows = torch.split(torch.rand(sum(row_lengths)), row_lengths)
            data = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        self._data[name] = TensorDict({"x": data}, batch_size=[len(row_lengths)])

    def round_trip(self, name: str) -> tuple[float, float]:
        """Return the seconds of a put and of a get of the loaded rows; the partition is cleared."""
        return tuple(self._run(self._round_trip(self._data[name])))

    async def _round_trip(self, data: TensorDict) -> tuple[float, float]:
        times = [time.perf_counter()]
        meta = await self._client.async_put(data, partition_id="bulk")
        times.append(time.perf_counter())
        back = await self._client.async_get_data(meta)
        times.append(time.perf_counter())
        if not torch.equal(back["x"].values().flatten()[-1], _values(data["x"]).flatten()[-1]):
            raise RuntimeError("the get returned other values than the put sent")
        await self._client.async_clear_partition("bulk")
        return times[1] - times[0], times[2] - times[1]


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("TransferQueue", "ray", "torch", "tensordict")}


def _numbers(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count).unsqueeze(-1)}, batch_size=[count])


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.values() if tensor.is_nested else tensor


@contextmanager
def _started() -> Iterator[Commands]:
    with ray_cluster(cpu_count=_ACTOR_COUNT, object_store_bytes=_OBJECT_STORE_BYTES), asyncio.Runner() as runner:
        config = transfer_queue.init(OmegaConf.create(_CONFIG))
        client = AsyncTransferQueueClient("benchmark", config.controller.zmq_info)
        client.initialize_storage_manager("SimpleStorage", config.backend.SimpleStorage)
        yield _Load(client, runner).commands()
        client.close()
        transfer_queue.close()


if __name__ == "__main__":
    serve(_started())
