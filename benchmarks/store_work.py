"""What is asked of a store that could hold the journal: commits of records, and all of them back after a kill.

The standard library only: this runs where our package is not, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

KILLED_RECORDS, KILLED_RECORD_BYTES = 20_000, 300


class Store(Protocol):
    """Numbered records in a directory; created, or opened again."""

    def __init__(self, directory: Path, sync: bool) -> None: ...

    def commit(self, records: Sequence[bytes]) -> None:
        """Return once the records are written, with `sync` on the disk."""
        ...

    def read(self) -> int:
        """Read all records; return how many there are."""
        ...

    def close(self) -> None:
        """Let go of all files."""
        ...


def commit_seconds(kind: type[Store], *, sync: bool, record_bytes: int, group: int, count: int) -> list[float]:
    """Return the seconds that each of `count` commits takes, in a directory of its own."""
    records = [os.urandom(record_bytes) for _ in range(group)]
    with tempfile.TemporaryDirectory() as directory:
        store = kind(Path(directory), sync)
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            store.commit(records)
            seconds.append(time.perf_counter() - started)
        store.close()
    return seconds


def fill_and_die(kind: type[Store], directory: Path) -> None:
    """Commit records one by one, and be killed; runs in a process of its own."""
    store = kind(directory, sync=False)
    for _ in range(KILLED_RECORDS):
        store.commit([os.urandom(KILLED_RECORD_BYTES)])
    os.kill(os.getpid(), signal.SIGKILL)


def after_kill(kind: type[Store], module: str, name: str) -> dict[str, Any]:
    """Let a process fill a store and be killed; return what it leaves, and how long it takes to have all back.

    Args:
        kind: of the store.
        module: that calls `fill_and_die` when it is run with `name` and a directory.
        name: of the store.
    """
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-m", module, name, directory], check=False)
        killed_bytes = _bytes_in(Path(directory))
        started = time.perf_counter()
        store = kind(Path(directory), sync=False)
        count = store.read()
        seconds = time.perf_counter() - started
        store.close()
        if count != KILLED_RECORDS:
            raise RuntimeError(f"{name} has {count} records after a kill, of {KILLED_RECORDS} that were committed")
        return {"seconds": seconds, "killed_bytes": killed_bytes, "rest_bytes": _bytes_in(Path(directory))}


def _bytes_in(directory: Path) -> int:
    return sum(
        512 * path.stat().st_blocks for path in directory.rglob("*") if path.is_file() and path.name != "reserve"
    )


def run_if_asked(kinds: dict[str, Callable[..., Store]]) -> bool:
    """Do what `after_kill` runs a module for; return whether it was run for that."""
    if len(sys.argv) != 3:
        return False
    fill_and_die(kinds[sys.argv[1]], Path(sys.argv[2]))  # type: ignore[arg-type]
    return True
