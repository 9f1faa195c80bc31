"""Where does the processor time of a claim and of a put of one sample go, stage by stage?

Functions of the service and of the client get timers, in processes of this benchmark only. The time of a stage excludes
the stages within it; each timer adds half a microsecond to the enclosing stage. Time outside all stages is gRPC and the
event loop. The times of gRPC's threads come from the kernel (Linux).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, main, median, run_async
from benchmarks.report import Cell, Report
from benchmarks.stage_timers import CLIENT_STAGES, StageTimers
from tq_service.testing import ServiceProcess

_TASK_COUNT: Final = 64
_CALL_COUNT, _QUICK_CALL_COUNT = 6_400, 640
_BATCH_SIZE: Final = 8
_ROW: Final = {"x": np.arange(1)}
_POLL_SECONDS: Final = 0.005
_LEAST_MICROSECONDS: Final = 0.1

Stage = tuple[str, str]  # process and stage name


class _Service:
    """A service with timers."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "stages.json"
        command = [sys.executable, "-m", "benchmarks.stage_timers", str(self._path)]
        self.process = ServiceProcess(command=command)

    async def seconds(self) -> Counter[Stage]:
        """Return the seconds of each stage, and of each kind of thread except the main one."""
        self._path.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self._path.exists():  # noqa: ASYNC110  (a file of another process)
            await asyncio.sleep(_POLL_SECONDS)
        totals = json.loads(self._path.read_text())
        found = Counter({("service", stage): float(spent) for stage, (_, spent) in totals.items()})
        return found + _threads("service", self.process.pid, staged=sum(found.values()))


def _threads(process: str, pid: int, *, staged: float) -> Counter[Stage]:
    """Return the processor seconds of a process's threads, those of its stages subtracted from the main thread."""
    found: Counter[Stage] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent = int((thread / "schedstat").read_text().split()[0]) / 1e9
            name = (thread / "comm").read_text().strip()
        except FileNotFoundError:  # it has ended
            continue
        if int(thread.name) == pid:
            found[process, "main thread: gRPC, event loop"] = spent - staged
        else:
            found[process, f"other threads: {name}"] += spent
    return found


async def _together(call_count: int, call: Callable[[int, int], Awaitable[object]]) -> None:
    """Make calls from all tasks concurrently, one at a time in each task."""

    async def one(task: int) -> None:
        for number in range(call_count // _TASK_COUNT):
            await call(task, number)

    await asyncio.gather(*map(one, range(_TASK_COUNT)))


async def _measure(options: Options) -> list[list[Cell]]:
    timers = StageTimers()
    timers.wrap_all(CLIENT_STAGES)
    call_count = _QUICK_CALL_COUNT if options.quick else _CALL_COUNT
    own_pid = threading.main_thread().native_id or 0
    found: dict[str, list[Counter[Stage]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        service = _Service(Path(directory))
        with service.process:
            async with tq.AsyncClient(service.process.address, gathers_puts=False) as client:
                await client.put("claimed", {"x": np.arange(call_count * _BATCH_SIZE)})

                async def seconds() -> Counter[Stage]:
                    own = Counter({("client", stage): spent for stage, (_, spent) in timers.totals().items()})
                    return await service.seconds() + own + _threads("client", own_pid, staged=sum(own.values()))

                def claims() -> Callable[[int, int], Awaitable[object]]:
                    task_name = secrets.token_hex(8)
                    return lambda rank, number: client.get_meta(
                        partition_id="claimed", task_name=task_name, data_fields=["x"], batch_size=_BATCH_SIZE,
                        dp_rank=rank, dp_size=_TASK_COUNT, batch_index=number,
                    )  # fmt: skip

                def puts() -> Callable[[int, int], Awaitable[object]]:
                    partition_id = secrets.token_hex(8)
                    return lambda _task, _number: client.put(partition_id, _ROW)

                for kind, new_calls in (("claim", claims), ("put", puts)):
                    for round_number in range(options.repeats + 1):
                        calls, before = new_calls(), await seconds()
                        await _together(call_count, calls)
                        after = await seconds()
                        after.subtract(before)
                        if round_number:
                            found.setdefault(kind, []).append(after)
    return [row for kind, rounds in found.items() for row in _rows(kind, rounds, call_count)]


def _rows(kind: str, rounds: list[Counter[Stage]], call_count: int) -> list[list[Cell]]:
    """Return the median microseconds per call of each stage, and the sums for both processes."""
    stages = dict.fromkeys(stage for each in rounds for stage in each)
    spent = {stage: median([each[stage] for each in rounds]) / call_count * 1e6 for stage in stages}
    rows: list[list[Cell]] = []
    for process in ("service", "client"):
        own = {what: value for (where, what), value in spent.items() if where == process}
        rows += [[kind, process, what, value] for what, value in own.items() if value >= _LEAST_MICROSECONDS]
        rows.append([kind, process, "all", sum(own.values())])
    return rows


def run(options: Options) -> Report:
    """Measure."""
    return Report(
        name="stages",
        question="Where does the processor time of a claim and of a put of one sample go, stage by stage?",
        columns=["call", "process", "stage", "processor time, µs a call"],
        rows=run_async(_measure(options)),
        notes=[
            f"{_TASK_COUNT} tasks of one client process, each making one call at a time; claims of ranks,  "
            f"{_BATCH_SIZE} samples each; puts that are not gathered",
            "a stage excludes the stages within it; a timer adds about 0.5 µs",
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
