"""Run verl's own trainer while the service and a worker are killed with `kill -9` in mid-step: `make demo-verl`.

Three records are made: over TransferQueue and over the service without kills, and over the service with the kills of
`compat.trainer.faults`. The program prints the lost prompts, the samples trained twice, whether the trained bytes
equal those of the record without kills, the seconds to resume, and the times of both systems. The exit code is 1 if a
prompt is lost, a sample is trained twice, bytes differ, or a call fails.

Each record has two runs of verl; the second resumes from verl's checkpoint of step 2. The first ends there if it is not
killed, and otherwise in step 3, when its worker is killed. Either way the work in progress at the checkpoint is
restarted.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compat.environments import ROOT, TENSORDICT_VERSIONS, environment, run_program, system_at, transfer_queue
from compat.outcome import end_of, equal_batch_count, failed_calls, median_seconds, outage, prompts, training
from compat.trainer.faults import DIRECTORY_VARIABLE, FAULTS, SERVICE, SERVICE_PID_FILE
from tq_service.testing import ServiceProcess

_TRAINER = "compat.trainer.run"
_CHECKPOINT_STEP, _ALL_STEPS = 2, 6
_DOWN_SECONDS = 1.0
_WATCH_SECONDS = 0.01
_TRANSFER_QUEUE, _UNBROKEN, _BROKEN = "transfer_queue", "unbroken", "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recovery:
    """When an ended service was restarted, and when it was reachable again, in seconds since the epoch."""

    started_at: float
    listening_at: float


@contextmanager
def _durable_service(
    directory: Path, faults: Path, kill_every: float | None
) -> Iterator[tuple[ServiceProcess, list[_Recovery]]]:
    """Run a service that is restarted whenever it ends, until the block ends.

    Args:
        directory: directory for its data, its checkpoints and its log; emptied first.
        faults: directory for the file with its process id; emptied first.
        kill_every: average seconds between kills; None: no kills.

    Yields:
        The service, and its restarts so far.
    """
    for made in (directory, faults):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    checkpoints = ("--checkpoint-dir", str(directory / "checkpoints"))
    service = ServiceProcess(
        "--durability", "process", *checkpoints, data_dir=directory / "data", log=directory / "service.log"
    )
    recoveries: list[_Recovery] = []
    is_over = threading.Event()

    def start() -> float:
        service.start()
        (faults / SERVICE_PID_FILE).write_text(str(service.pid))
        return time.monotonic() + (random.uniform(0, 2 * kill_every) if kill_every else math.inf)

    def watch(run_until: float) -> None:
        while not is_over.wait(_WATCH_SECONDS):
            if time.monotonic() > run_until:
                service.kill()
            if service.exit_code is not None:
                time.sleep(_DOWN_SECONDS)
                started_at = time.time()
                run_until = start()
                recoveries.append(_Recovery(started_at=started_at, listening_at=time.time()))

    watching = threading.Thread(target=watch, args=[start()])
    watching.start()
    try:
        yield service, recoveries
    finally:
        is_over.set()
        watching.join()
        service.stop()


def _record(name: str, python: Path, output: Path, kill_every: float | None) -> list[_Recovery]:
    """Make one of the three records; return the restarts of the service."""
    stops = (_ALL_STEPS, _ALL_STEPS) if name == _BROKEN else (_CHECKPOINT_STEP, _ALL_STEPS)
    arguments = ["text", *(["--may-fail"] if name == _BROKEN else []), "--stops", *map(str, stops)]
    if name == _TRANSFER_QUEUE:
        run_program(_TRAINER, *arguments, python=python, system=transfer_queue(), record=output / name)
        return []
    faults = output / f"{name}-faults"
    with _durable_service(output / f"{name}-service", faults, kill_every if name == _BROKEN else None) as (
        service,
        recoveries,
    ):
        run_program(
            _TRAINER,
            *arguments,
            python=python,
            system=system_at(service.address, python),
            record=output / name,
            variables={DIRECTORY_VARIABLE: str(faults)} if name == _BROKEN else {},
        )
    return recoveries


def _print_kills(output: Path, recoveries: Sequence[_Recovery]) -> bool:
    """Print the effects of the kills; return whether every kill happened and no call failed."""
    is_right = True
    print(f"\n{'killed with kill -9':43}{'back':>8}{'first answer':>15}{'step done':>12}{'calls met':>12}")
    for fault in FAULTS:
        file = output / f"{_BROKEN}-faults" / fault.file_name
        killed_at = float(file.read_text()) if file.exists() else None
        recovery = next((r for r in recoveries if killed_at is not None and r.started_at > killed_at), None)
        title = f"{'service' if fault.victim == SERVICE else 'worker':8} {fault.title:34}"
        if killed_at is None or (fault.victim == SERVICE and recovery is None):
            is_right = False
            print(f"{title} did not happen")
        elif fault.victim == SERVICE and recovery is not None:
            seen = outage(output / _BROKEN, since=killed_at, until=recovery.started_at)
            print(
                f"{title}{recovery.listening_at - killed_at:6.1f} s{seen.answered_seconds:13.1f} s"
                f"{seen.step_seconds:10.1f} s{seen.met_count:12}"
            )
        else:
            ended, restored = (
                end_of(call, output / _BROKEN, after=killed_at) - killed_at for call in ("close", "load_checkpoint")
            )
            step = outage(output / _BROKEN, since=killed_at, until=killed_at + restored).step_seconds
            print(f"{title}{'-':>8}{'-':>15}{step:10.1f} s{'-':>12}")
            print(f"{'':9}verl's run ends after {ended:.1f} s; the next one has the queue again after {restored:.1f} s")
    failed = failed_calls(output / _BROKEN)
    print(f"kills of the service    {len(recoveries)}")
    print(f"calls that failed       {len(failed)}")
    print("".join(f"  {call}\n" for call in failed), end="")
    return is_right and not failed


def _print_training(output: Path) -> bool:
    """Print lost, twice trained and changed samples; return whether nothing was found."""
    unbroken, broken = training(output / _UNBROKEN), training(output / _BROKEN)
    found = prompts(output / _BROKEN, broken)
    equal_count = equal_batch_count(unbroken, broken)
    counts = {"trained": found.trained, "waiting at the end": found.waiting, "dropped by verl": found.dropped}
    print(
        f"\nprompts                 {len(found.taken)}: {', '.join(f'{len(n)} {name}' for name, n in counts.items())}"
    )
    print(f"prompts lost            {len(found.lost)}")
    print(f"samples trained         {len(broken.samples)}")
    print(f"samples trained twice   {len(broken.trained_twice)}")
    print(f"batches equal           {equal_count} of {unbroken.batch_count}, {broken.byte_count:,} bytes")
    print(f"batches trained again   {broken.lost_batch_count}, whose weights were lost with the worker")
    is_equal = equal_count == unbroken.batch_count == broken.batch_count
    return is_equal and not found.lost and not broken.trained_twice


def _print_times(output: Path) -> None:
    theirs, ours = (median_seconds(output / name) for name in (_TRANSFER_QUEUE, _UNBROKEN))
    print(f"\n{'median of':10}{'calls':>8}{'TransferQueue 0.1.11':>24}{'tq_service, durable':>23}{'ratio':>9}")
    for kind, (count, seconds) in ours.items():
        other = theirs[kind][1]
        print(f"{kind:10}{count:8}{other * 1e3:21.1f} ms{seconds * 1e3:20.1f} ms{other / seconds:9.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the records and print the results; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m compat.demo", description=__doc__)
    names = (_TRANSFER_QUEUE, _UNBROKEN, _BROKEN)
    parser.add_argument(
        "--runs", nargs="+", choices=names, default=names, help="records to make; earlier ones are used for the rest"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "compat-output" / "demo", help="directory for records and logs"
    )
    parser.add_argument(
        "--kill-every", type=float, metavar="SECONDS", help="average seconds between additional kills at random moments"
    )
    given = parser.parse_args(arguments)
    python = environment(TENSORDICT_VERSIONS[0]).python()
    recoveries: list[_Recovery] = []
    for name in given.runs:
        print(f"{name}: some minutes", flush=True)
        recoveries = _record(name, python, given.output, given.kill_every) or recoveries
    is_right = _print_kills(given.output, recoveries) if _BROKEN in given.runs else True
    made = {name for name in names if (given.output / name).exists()}
    if {_UNBROKEN, _BROKEN} <= made:
        is_right &= _print_training(given.output)
    if {_TRANSFER_QUEUE, _UNBROKEN} <= made:
        _print_times(given.output)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
