"""How fast are puts, gets and lists by key in place of TransferQueue, from 1 and 16 Ray actors, compared with it?

Both sides run the same program in the same environment, `kv_calls_program.py`; only the package that it imports as
`transfer_queue` differs. They run in turn, one at a time: waiting actors take about 0.5 GB each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Options, interleave, main, median, median_ratio
from benchmarks.peer import Program, peer, program
from benchmarks.peer_environment import TRANSFER_QUEUE
from benchmarks.report import Aim, Cell, Report
from tq_service.compat.transfer_queue import SITE
from tq_service.testing import ServiceProcess

_ACTOR_COUNTS = (1, 16)
_SAMPLE_COUNT, _LISTED_COUNT = 512, 20_000
_MODULE = "benchmarks.kv_calls_program"
_PUT, _GET, _LIST, _SIZE = "kv_batch_put", "kv_batch_get", "kv_list", "MB"
_WANTED = {_PUT: 3.0, _GET: 3.0, _LIST: 1.0}
_OURS, _PEER = "ours", TRANSFER_QUEUE.name
# Of each run; the first of each call is not counted, and the median of the others is taken.
_CALLS_A_RUN = 4

# For each call and number of actors the seconds, and the MB that each actor puts.
Found = dict[tuple[str, int], float]


def run(options: Options) -> Report:
    """Measure."""
    actor_counts = _ACTOR_COUNTS[:1] if options.quick else _ACTOR_COUNTS
    with peer(TRANSFER_QUEUE, _MODULE, options) as transfer_queue:
        notes, absent = transfer_queue.notes, transfer_queue.absent
    runs: dict[str, list[Found]] = {_OURS: [], _PEER: []}
    if not absent:  # our side needs its environment too
        python = TRANSFER_QUEUE.python()
        cases: dict[str, Callable[[], Found]] = {
            _OURS: partial(_run_ours, python, actor_counts),
            _PEER: partial(_run, python, {}, actor_counts),
        }
        runs = interleave(cases, options.repeats)
    return _report(runs, actor_counts, notes, absent)


def _run_ours(python: Path, actor_counts: tuple[int, ...]) -> Found:
    with ServiceProcess() as service:
        place = {"PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]), "TQ_ADDRESS": service.address}
        return _run(python, place, actor_counts)


def _run(python: Path, place: Mapping[str, str], actor_counts: tuple[int, ...]) -> Found:
    """Return the measurements of one run of the program."""
    with program(_MODULE, python=str(python), variables={**TRANSFER_QUEUE.variables, **place}) as running:
        (megabytes,) = running.ask("prepare", actor_count=max(actor_counts), sample_count=_SAMPLE_COUNT)
        running.ask("fill", key_count=_LISTED_COUNT)
        found: Found = {(_SIZE, 1): megabytes, (_LIST, 1): _calls(running, "list", key_count=_LISTED_COUNT)[0]}
        for count in actor_counts:
            found[_PUT, count], found[_GET, count] = _calls(running, "round_trip", actor_count=count)
        return found


def _calls(running: Program, command: str, **arguments: object) -> list[float]:
    times = [running.ask(command, **arguments) for _ in range(_CALLS_A_RUN)][1:]
    return [median(each) for each in zip(*times, strict=True)]


def _report(
    runs: Mapping[str, list[Found]], actor_counts: tuple[int, ...], notes: list[str], absent: list[str]
) -> Report:
    calls = [(call, count) for count in _ACTOR_COUNTS for call in (_PUT, _GET)] + [(_LIST, 1)]
    rows: list[list[Cell]] = []
    ratios: dict[tuple[str, int], float] = {}
    for call, count in calls if runs[_OURS] else ():
        if count not in actor_counts:
            continue
        seconds = {name: [found[call, count] for found in runs[name]] for name in (_OURS, _PEER)}
        ratios[call, count] = median_ratio(seconds[_PEER], seconds[_OURS])
        milliseconds = [1e3 * median(seconds[name]) for name in (_OURS, _PEER)]
        rows.append([_what(call), count, *milliseconds, ratios[call, count]])
    sizes = {round(found[_SIZE, 1]) for found in [*runs[_OURS], *runs[_PEER]]}
    if len(sizes) > 1:
        raise RuntimeError(f"actors put different sizes, in MB: {sizes}; expected equal ones")
    return Report(
        name="kv_calls",
        question="How fast are puts, gets and lists by key in TransferQueue's place?",
        columns=["call", "actors", "ours, ms", "TransferQueue, ms", "TransferQueue / ours"],
        rows=rows,
        notes=[
            f"each actor puts {_SAMPLE_COUNT} samples with 27 fields ({sum(sizes)} MB) and gets them, all  "
            "at the same time: from the first start to the last end; kv_list by the driver",
            "2 storage units on TransferQueue's side; one service in memory on ours",
            *notes,
        ],
        aims=[
            Aim(
                what=f"time of {_what(call)} from {count} process{'es' if count > 1 else ''}, TransferQueue / ours",
                measured=ratios.get((call, count)),
                wanted=_WANTED[call],
            )
            for call, count in calls
        ],
        without=absent,
    )


def _what(call: str) -> str:
    return f"{call}, {_LISTED_COUNT:,} keys" if call == _LIST else call


if __name__ == "__main__":
    sys.exit(main(run))
