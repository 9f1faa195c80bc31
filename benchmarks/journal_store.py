"""What does it take to write a record down, and to have all back after a kill, in stores that could hold the journal?

SQLite, LMDB, RocksDB and a plain file are measured in an environment of their own, in turn with the journal of the
service, which is plain files with all that a journal needs besides: checksums that run over the numbers, files that
follow each other, commits that wait together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Options, interleave, main, median, median_ratio
from benchmarks.peer import Peer, peer
from benchmarks.peer_environment import STORES
from benchmarks.report import Aim, Cell, Report
from benchmarks.store_work import after_kill, commit_seconds, run_if_asked
from tq_service.durable.state_store import Stream
from tq_service.journal.file_backend import FileBackend
from tq_service.journal.log import Log

_OTHERS = ("plain file", "SQLite", "LMDB", "RocksDB")
_OURS = "the journal"
# Bytes of a record, records in a commit, and commits in a measurement without and with fsync.
CASES = ((300, 1, 2_000, 100), (4_096, 1, 2_000, 100), (262_144, 1, 100, 20), (300, 16, 500, 100), (300, 64, 200, 50))
_QUICK_FRACTION = 20
_MOST_MICROSECONDS = 15.0
_MOST_MEGABYTES = 10.0


class JournalStore:
    """The journal, as the other stores are asked."""

    def __init__(self, directory: Path, sync: bool) -> None:
        self._journal = Log(FileBackend(directory, sync=sync))
        self._found = sum(1 for _ in self._journal.read(0))

    def commit(self, records: Sequence[bytes]) -> None:
        """Write."""
        for record in records:
            self._journal.append(Stream.CHANGES, record)
        self._journal.flush()

    def read(self) -> int:
        """Return how many records were there when it was opened: it reads them then."""
        return self._found

    def close(self) -> None:
        """Close."""
        self._journal.close()


def _label(case: tuple[int, int, int, int], sync: bool) -> str:
    record_bytes, group, _, _ = case
    size = f"{record_bytes // 1024} KiB" if record_bytes >= 1024 else f"{record_bytes} B"
    return f"{group} x {size}{', fsync' if sync else ''}: μs a record"


def _commit_row(case: tuple[int, int, int, int], sync: bool, stores: Peer, options: Options) -> list[list[Cell]]:
    """Return a row with p50, and for single small records one with p99."""
    record_bytes, group, count, sync_count = case
    count = max(10, (sync_count if sync else count) // (_QUICK_FRACTION if options.quick else 1))
    work = {"sync": sync, "record_bytes": record_bytes, "group": group, "count": count}
    sides: dict[str, Callable[[], list[float]]] = {_OURS: partial(commit_seconds, JournalStore, **work)}
    if stores.is_there:
        sides |= {name: partial(stores.ask, "commits", store=name, **work) for name in _OTHERS}
    runs = interleave(sides, options.repeats)

    def cells(percentile: int) -> list[Cell]:
        repeats = {name: [float(np.percentile(one, percentile)) / group * 1e6 for one in runs[name]] for name in runs}
        ratio = median_ratio(repeats[_OURS], repeats["SQLite"]) if stores.is_there else None
        return [*(median(repeats[name]) if name in repeats else None for name in (*_OTHERS, _OURS)), ratio]

    label = _label(case, sync)
    rows: list[list[Cell]] = [[label, *cells(50)]]
    if case[:2] == CASES[0][:2]:
        rows.append([f"{label}, p99", *cells(99)])
    return rows


def _kill_rows(stores: Peer, options: Options) -> list[list[Cell]]:
    ours = partial(after_kill, JournalStore, "benchmarks.journal_store", _OURS)
    sides: dict[str, Callable[[], dict[str, Any]]] = {_OURS: ours}
    if stores.is_there:
        sides |= {name: partial(stores.ask, "after_kill", store=name) for name in _OTHERS}
    runs = interleave(sides, 1 if options.quick else options.repeats)
    rows: list[list[Cell]] = []
    for label, key, factor in (
        ("20,000 x 300 B back after a kill: ms", "seconds", 1e3),
        ("on disk after the kill: MB", "killed_bytes", 1e-6),
        ("on disk when closed: MB", "rest_bytes", 1e-6),
    ):
        values = {name: [factor * run[key] for run in runs[name]] for name in runs}
        ratio = median_ratio(values[_OURS], values["SQLite"]) if stores.is_there else None
        rows.append([label, *(median(values[name]) if name in values else None for name in (*_OTHERS, _OURS)), ratio])
    return rows


def run(options: Options) -> Report:
    """Measure."""
    with peer(STORES, "benchmarks.stores_peer", options) as stores:
        rows = [row for sync in (False, True) for case in CASES for row in _commit_row(case, sync, stores, options)]
        kill_rows = _kill_rows(stores, options)
        microseconds, megabytes = (row[1 + len(_OTHERS)] for row in (rows[0], kill_rows[1]))
        rows += kill_rows
        return Report(
            name="journal_store",
            question="What does it take to write a record down, and to have all back after a kill?",
            columns=["", *_OTHERS, _OURS, "journal / SQLite"],
            rows=rows,
            notes=[
                "p50 of commits that follow each other, each of the records named, divided by their number",
                "without fsync, what is committed is with the operating system and survives any kill; after a loss of "
                "power, LMDB's database may be damaged then, the others' end with an earlier record",
                "the plain file has lengths and CRC-32, and nothing else: no store can be faster",
                "back after a kill: opened and all records read, after a process that committed them one by one",
                *stores.notes,
            ],
            aims=[
                Aim(
                    what="one record of 300 B written down by the journal, μs",
                    measured=float(microseconds) if isinstance(microseconds, int | float) else None,
                    wanted=_MOST_MICROSECONDS,
                    at_least=False,
                ),
                Aim(
                    what="20,000 records of 300 B on disk after a kill, MB",
                    measured=float(megabytes) if isinstance(megabytes, int | float) else None,
                    wanted=_MOST_MEGABYTES,
                    at_least=False,
                ),
            ],
            without=stores.absent,
        )


if __name__ == "__main__" and not run_if_asked({_OURS: JournalStore}):
    sys.exit(main(run))
