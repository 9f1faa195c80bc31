"""Starts the processes of a crowd and speaks with them; see `benchmarks.waiting_crowd`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import ROOT

PROCESS_COUNT = 4
CONNECTIONS_A_PROCESS = 4
_STOP_SECONDS = 10.0


class CrowdProcesses:
    """Clients spread over processes."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._taken: dict[str, list[tuple[int, float]]] = {}

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    def join(self, address: str, name: str, count: int, *, ranked: bool) -> None:
        """Have `count` clients ask for the samples of partition and task `name`, in equal parts of the processes."""
        part = count // len(self._processes)
        for number, process in enumerate(self._processes):
            where = {"address": address, "partition_id": name, "task_name": name}
            ranks = {"first_rank": number * part, "dp_size": part * len(self._processes)} if ranked else {}
            self._tell(process, "join", {**where, **ranks, "count": part, "connections": CONNECTIONS_A_PROCESS})

    def got_count(self, name: str) -> int:
        """Return how many samples the clients of a task have got since the last `take`."""
        return sum(self._tell(process, "count", name) for process in self._processes)

    def take(self, name: str) -> list[tuple[int, float]]:
        """Return what the clients of a task have got since the last time: global index and monotonic seconds."""
        answers = [self._tell(process, "take", name) for process in self._processes]
        return [(index, seconds) for answer in answers for index, seconds in answer]

    def ended_count(self, name: str) -> int:
        """Return how many clients of a task have seen its end."""
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
