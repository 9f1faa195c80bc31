"""Many clients that wait for samples one by one: the crowd of `waiting_clients`, and the processes that run it.

Each process reads commands as lines of JSON on stdin and answers each with one line on stdout. Times come from the
system's monotonic clock, which all processes share.

    {"join": {...}}        start clients that claim until the end of the partition; see `Crowd.join`
    {"count": task}        number of samples that the clients of a task have got
    {"take": task}         samples since the last `take`, [[global_index, seconds], ...]
    {"ended": task}        number of clients of a task that have seen its end
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tq_service as tq
from benchmarks.harness import ROOT, run_async

PROCESS_COUNT = 4
CONNECTIONS_A_PROCESS = 4
_STOP_SECONDS = 10.0
_MAX_WAIT_SECONDS = 600.0


@dataclass(slots=True)
class _Got:
    """The samples that the clients of one task have got."""

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
        """Start `count` clients that claim one sample after another; with `dp_size`, as ranks from `first_rank` on."""
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
        """Return the number of samples that the clients of a task have got since the last `take`."""
        got = self._got[task_name]
        if got.failed is not None:
            raise RuntimeError(got.failed)
        return len(got.samples)

    def take(self, task_name: str) -> list[tuple[int, float]]:
        """Return the samples that the clients of a task have got since the last `take`."""
        got = self._got[task_name]
        samples, got.samples = got.samples, []
        return samples

    def ended(self, task_name: str) -> int:
        """Return the number of clients of a task that have seen its end."""
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


class CrowdProcesses:
    """Clients spread over processes."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    def join(self, address: str, name: str, count: int, *, ranked: bool) -> None:
        """Start `count` clients for the samples of partition and task `name`, split equally among the processes."""
        part = count // len(self._processes)
        for number, process in enumerate(self._processes):
            where = {"address": address, "partition_id": name, "task_name": name}
            ranks = {"first_rank": number * part, "dp_size": part * len(self._processes)} if ranked else {}
            self._tell(process, "join", {**where, **ranks, "count": part, "connections": CONNECTIONS_A_PROCESS})

    def got_count(self, name: str) -> int:
        """Return the number of samples that the clients of a task have got since the last `take`."""
        return sum(self._tell(process, "count", name) for process in self._processes)

    def take(self, name: str) -> list[tuple[int, float]]:
        """Return global index and monotonic seconds of the samples of a task since the last `take`."""
        answers = [self._tell(process, "take", name) for process in self._processes]
        return [(index, seconds) for answer in answers for index, seconds in answer]

    def ended_count(self, name: str) -> int:
        """Return the number of clients of a task that have seen its end."""
        return sum(self._tell(process, "ended", name) for process in self._processes)

    @staticmethod
    def _tell(process: subprocess.Popen[str], verb: str, argument: object) -> Any:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process of the crowd was started without pipes")
        print(json.dumps({verb: argument}), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the crowd ended with exit code {process.wait()}; its log is above")
        return json.loads(line)


@contextmanager
def running_crowd() -> Iterator[CrowdProcesses]:
    """Run the processes until the block ends."""
    command = [sys.executable, "-m", "benchmarks.waiting_crowd"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in range(PROCESS_COUNT)]
    try:
        yield CrowdProcesses(processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(_STOP_SECONDS)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


if __name__ == "__main__":
    run_async(_serve())
