"""Kills the service or the calling process with SIGKILL, at the same moments in each run.

A process announces its next call (`reached`). If that is the moment of a fault, the victim is killed a little later,
while the call is in flight. The demo enables faults through a directory, in which it also keeps the process id of the
service. Each fault occurs once and leaves a file with its time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from compat.trainer.recording import AGENT, RUN_VARIABLE, TRAINER, role

DIRECTORY_VARIABLE = "TQ_COMPAT_FAULTS"
SERVICE_PID_FILE = "service.pid"
SERVICE, CALLER = "service", "caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A moment of a run, and the process to kill.

    Attributes:
        title: description of the moment for people.
        run: name of the run.
        role: role of the process whose calls are counted.
        call: name of its next call.
        number: how many such calls the process has made, including this one; each process counts separately.
        victim: SERVICE, or CALLER for the process that makes the call.
        delay_seconds: from the beginning of the call to the kill.
    """

    title: str
    run: str
    role: str
    call: str
    number: int
    victim: str = SERVICE
    delay_seconds: float = 0.003

    @property
    def file_name(self) -> str:
        """Name of the file with the time of the kill."""
        return f"{self.run}-{self.role}-{self.call}-{self.number}"


# Faults of `compat.demo`: two runs; the first ends in step 3.
FAULTS = (
    Fault(title="step 1: agents put answers", run="run1", role=AGENT, call="async_kv_batch_put", number=6),
    Fault(title="step 2: a rank reads its batch", run="run1", role="rank-0", call="client.async_get_data", number=6),
    Fault(title="step 2: a checkpoint is written", run="run1", role=TRAINER, call="save_checkpoint", number=1),
    Fault(title="step 3: second update of three", run="run1", role="rank-1", call="train", number=8, victim=CALLER),
    Fault(title="resuming: it is restored", run="run2", role=TRAINER, call="load_checkpoint", number=1),
    Fault(title="step 4: a rank puts what it has", run="run2", role="rank-1", call="client.async_put", number=3),
    Fault(title="step 5: the trainer takes a batch", run="run2", role=TRAINER, call="kv_clear", number=15),
)

_counts: Counter[str] = Counter()


def reached(call: str) -> None:
    """Count the next call of this process, and schedule the kill if a fault is enabled for it."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        return
    _counts[call] += 1
    where = (os.environ[RUN_VARIABLE], role(), call, _counts[call])
    for fault in FAULTS:
        if (fault.run, fault.role, fault.call, fault.number) == where:
            threading.Timer(fault.delay_seconds, inject, [fault, Path(directory)]).start()


def inject(fault: Fault, directory: Path) -> None:
    """Kill the victim of a fault unless the fault has already occurred."""
    try:
        file = (directory / fault.file_name).open("x")
    except FileExistsError:  # another process of this role was first
        return
    victim = os.getpid() if fault.victim == CALLER else int((directory / SERVICE_PID_FILE).read_text())
    with file:
        file.write(str(time.time()))
    os.kill(victim, signal.SIGKILL)
