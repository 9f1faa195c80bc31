"""Runs TransferQueue's own tutorials and recipes, unchanged, on a cluster of two nodes; each must succeed.

Runs in an environment where `transfer_queue` is the service's. The programs come from TransferQueue's wheel; this
repository does not contain a copy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import ray

from compat.cluster import two_nodes

_DIRECTORIES = ("tutorial", "recipe")
_EXAMPLE_COUNT = 8
_MOST_SECONDS = 300


def examples() -> list[Path]:
    """Return the programs in the installed wheel.

    Raises:
        RuntimeError: their number is not the expected one.
    """
    files = metadata.files("TransferQueue") or []
    found = [Path(str(file.locate())) for file in files if file.parts[0] in _DIRECTORIES and file.suffix == ".py"]
    if len(found) != _EXAMPLE_COUNT:
        raise RuntimeError(f"TransferQueue's wheel has {len(found)} examples; expected {_EXAMPLE_COUNT}: {found}")
    return sorted(found)


def _ended(program: Path, address: str, directory: Path) -> int | str:
    """Run a program with its output in a file of the directory; return its exit code, or a text if it timed out."""
    with (directory / f"{program.stem}.log").open("w") as output:
        try:
            return subprocess.run(
                [sys.executable, str(program)],
                cwd=directory,
                env={**os.environ, "RAY_ADDRESS": address},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_MOST_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"still running after {_MOST_SECONDS} s"


def _wait_for_its_actors() -> None:
    """Wait until the actors of an ended program are gone; otherwise the next one would join its run."""
    while ray.util.list_named_actors(all_namespaces=True):
        time.sleep(0.2)


def main() -> int:
    """Run all examples, and return 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="directory for the output of each program")
    given = parser.parse_args()
    failed = False
    with two_nodes() as address:
        ray.init(address=address, log_to_driver=False, logging_level="error")
        for program in examples():
            ended = _ended(program, address, given.record.absolute())
            print(f"{program.stem}: {ended}", flush=True)
            failed |= ended != 0
            _wait_for_its_actors()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
