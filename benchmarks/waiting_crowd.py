"""Many clients in one process, which wait for samples one by one: the crowd of `waiting_clients`.

Commands come as lines of JSON on stdin and are answered by one line each on stdout; times are of the system's
monotonic clock, which all processes share.

    {"join": {...}}        clients begin to ask, each until the end of the partition; see `Crowd.join`
    {"count": task}        how many samples the clients of a task have got
    {"take": task}         what they have got since the last time, [[global_index, seconds], ...]
    {"ended": task}        how many clients of a task have seen its end
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import tq_service as tq
from benchmarks.harness import run_async

_MAX_WAIT_SECONDS = 600.0


@dataclass(slots=True)
class _Got:
    """What the clients of one task have got."""

    samples: list[tuple[int, float]] = field(default_factory=list)
    ended_count: int = 0
    failed: str | None = None


class Crowd:
    """The clients of this process."""

    def __init__(self) -> None:
        self._clients: list[tq.AsyncClient] = []
        self._members: set[asyncio.Task[None]] = set()
        self._got: dict[str, _Got] = {}

    async def close(self) -> None:
        """End all clients."""
        for member in self._members:
            member.cancel()
        for client in self._clients:
            await client.aclose()

    def join(
        self, *, address: str, partition_id: str, task_name: str, count: int, connections: int, first_rank: int = 0,
        dp_size: int = 0,
    ) -> None:  # fmt: skip
        """Have `count` clients ask for one sample after the other, as ranks from `first_rank` on where `dp_size` is."""
        got = self._got.setdefault(task_name, _Got())
        clients = [tq.AsyncClient(address) for _ in range(connections)]
        self._clients += clients
        asks = {"partition_id": partition_id, "task_name": task_name, "data_fields": ["x"], "batch_size": 1}
        for number, client in zip(range(count), itertools.cycle(clients)):
            rank = {"dp_rank": first_rank + number, "dp_size": dp_size} if dp_size else {}
            member = asyncio.ensure_future(_consume(client, {**asks, **rank}, got))
            self._members.add(member)
            member.add_done_callback(self._members.discard)

    def count(self, task_name: str) -> int:
        """Return how many samples the clients of a task have got since the last `take`."""
        got = self._got[task_name]
        if got.failed is not None:
            raise RuntimeError(got.failed)
        return len(got.samples)

    def take(self, task_name: str) -> list[tuple[int, float]]:
        """Return what the clients of a task have got since the last time."""
        got = self._got[task_name]
        samples, got.samples = got.samples, []
        return samples

    def ended(self, task_name: str) -> int:
        """Return how many clients of a task have seen its end."""
        return self._got[task_name].ended_count


async def _consume(client: tq.AsyncClient, asks: dict[str, Any], got: _Got) -> None:
    for batch_index in itertools.count():
        if "dp_rank" in asks:
            asks["batch_index"] = batch_index
        try:
            meta = await client.get_meta(**asks, max_wait=_MAX_WAIT_SECONDS)
        except tq.TqError as error:
            got.failed = f"{type(error).__name__}: {error}"
            return
        now = time.monotonic()
        if meta.status == "end":
            got.ended_count += 1
            return
        got.samples.extend((index, now) for index in meta.global_indexes)


async def _serve() -> None:
    loop, crowd = asyncio.get_running_loop(), Crowd()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ((verb, argument),) = json.loads(line).items()
        if verb == "join":
            answer: object = crowd.join(**argument)
        else:
            answer = {"count": crowd.count, "take": crowd.take, "ended": crowd.ended}[verb](argument)
        print(json.dumps(answer), flush=True)
    await crowd.close()


if __name__ == "__main__":
    run_async(_serve())
