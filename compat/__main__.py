"""Run verl's own code over TransferQueue and over the service, and print the differences: `make compat`.

Each part runs twice in each environment, once over each system: the same program and the same environment except for
PYTHONPATH and TQ_ADDRESS. Both runs are recorded and the records compared; the exit code is 1 for any difference.
TransferQueue's own examples run over the service only; a failing example is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from compat.differences import compared_count, differences, records
from compat.environments import ROOT, TENSORDICT_VERSIONS, System, environment, run_program, service, transfer_queue
from compat.trainer.recording import AGENT

_SYSTEMS = ("transfer_queue", "service")
_SHOWN_DIFFERENCES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A program that runs over both systems.

    Attributes:
        module: module of the program; its first argument is the directory of the record.
        arguments: the other arguments.
        concurrent: roles of its processes whose calls come in any order.
        systems: the systems it runs over; a program that checks its own results needs only one.
    """

    module: str
    arguments: tuple[str, ...] = ()
    concurrent: frozenset[str] = frozenset()
    systems: tuple[str, ...] = _SYSTEMS


PARTS = {
    "calls": Part(module="compat.calls"),
    "examples": Part(module="compat.examples", systems=("service",)),
    **{
        kind: Part(module="compat.trainer.run", arguments=(kind,), concurrent=frozenset({AGENT}))
        for kind in ("text", "multimodal")
    },
}


def _compare(title: str, part: Part, directory: Path) -> int:
    """Print the differences between the two records of a part, and return the number of unwanted ones."""
    left, right = (records(directory / system) for system in _SYSTEMS)
    found = list(differences(left, right, concurrent=part.concurrent))
    unwanted = [difference for difference in found if not difference.purpose]
    print(f"{title}: {compared_count(left):,} calls compared, {len(unwanted):,} differences", flush=True)
    for purpose, count in Counter(difference.purpose for difference in found if difference.purpose).items():
        print(f"  {count} on purpose: {purpose}")
    if unwanted:
        print("  (call, place, TransferQueue, service)")
    for difference in unwanted[:_SHOWN_DIFFERENCES]:
        print(f"  {difference}")
    if len(unwanted) > _SHOWN_DIFFERENCES:
        print(f"  and {len(unwanted) - _SHOWN_DIFFERENCES:,} more")
    return len(unwanted)


def _system(name: str, python: Path, directory: Path) -> AbstractContextManager[System]:
    if name == "transfer_queue":
        return nullcontext(transfer_queue())
    return service(python, directory, "--checkpoint-dir", str(directory / "checkpoints"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, record and compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m compat", description=__doc__)
    parser.add_argument("--tensordict", nargs="+", default=TENSORDICT_VERSIONS, metavar="VERSION")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=_SYSTEMS,
        default=_SYSTEMS,
        help="systems to run; the others use earlier records",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "compat-output", help="directory for records and logs")
    given = parser.parse_args(arguments)
    difference_count = 0
    for version in given.tensordict:
        python = environment(version).python()
        for name in given.parts:
            part, directory = PARTS[name], given.output / f"tensordict-{version}" / name
            for system_name in given.systems:
                if system_name not in part.systems:
                    continue
                with _system(system_name, python, directory) as system:
                    record = directory / system_name
                    run_program(part.module, *part.arguments, python=python, system=system, record=record)
            if part.systems != _SYSTEMS:
                print(f"tensordict {version}, {name}: all passed over {', '.join(part.systems)}", flush=True)
            elif all((directory / system).exists() for system in _SYSTEMS):
                difference_count += _compare(f"tensordict {version}, {name}", part, directory)
    return 1 if difference_count else 0


if __name__ == "__main__":
    sys.exit(main())
