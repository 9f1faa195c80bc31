"""Runs in an environment with LMDB and RocksDB: commits records to them, to SQLite and to a plain file.

Each as it would be used for a journal. SQLite: WAL mode, no checkpoints while commits are timed, one connection that
has the file for itself; FULL with fsync, NORMAL without. LMDB: records appended in order of their keys; MDB_NOSYNC
without fsync, with which a loss of power may leave a database that cannot be read. RocksDB: its own settings; groups in
a WriteBatch. The plain file has a length and a CRC-32 before each record: what none of the stores can be faster than.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peer_program import Commands, serve
from benchmarks.store_work import Store, after_kill, commit_seconds, run_if_asked

_MAP_BYTES = 4 * 2**30
_HEAD = struct.Struct("<II")


class PlainFile:
    """A file that is appended to."""

    def __init__(self, directory: Path, sync: bool) -> None:
        self._file = (directory / "journal").open("a+b", buffering=0)
        self._sync = sync

    def commit(self, records: Sequence[bytes]) -> None:
        """Write."""
        self._file.write(b"".join(_HEAD.pack(len(record), zlib.crc32(record)) + record for record in records))
        if self._sync:
            os.fdatasync(self._file.fileno())

    def read(self) -> int:
        """Read."""
        self._file.seek(0)
        data, offset, count = self._file.read(), 0, 0
        while offset < len(data):
            size, crc = _HEAD.unpack_from(data, offset)
            record = data[offset + _HEAD.size : offset + _HEAD.size + size]
            if zlib.crc32(record) != crc:
                raise RuntimeError(f"record {count} is damaged")
            offset, count = offset + _HEAD.size + size, count + 1
        return count

    def close(self) -> None:
        """Close."""
        self._file.close()


class Sqlite:
    """A table with the record's number as its primary key."""

    def __init__(self, directory: Path, sync: bool) -> None:
        self._connection = sqlite3.connect(directory / "journal.sqlite3", isolation_level=None)
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "wal_autocheckpoint = 0"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS records "
            "(number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, record BLOB NOT NULL)"
        )
        self._number = 0

    def commit(self, records: Sequence[bytes]) -> None:
        """Write."""
        rows = [(self._number + i, zlib.crc32(record), record) for i, record in enumerate(records, start=1)]
        self._number += len(rows)
        if len(rows) == 1:
            self._connection.execute("INSERT INTO records VALUES (?, ?, ?)", rows[0])
            return
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
        self._connection.execute("COMMIT")

    def read(self) -> int:
        """Read."""
        rows = self._connection.execute("SELECT crc, record FROM records ORDER BY number")
        return sum(zlib.crc32(record) == crc for crc, record in rows)

    def close(self) -> None:
        """Close."""
        self._connection.close()


class Lmdb:
    """A tree in memory-mapped pages."""

    def __init__(self, directory: Path, sync: bool) -> None:
        import lmdb

        self._environment: Any = lmdb.open(str(directory), map_size=_MAP_BYTES, sync=sync, metasync=sync)
        self._number = 0

    def commit(self, records: Sequence[bytes]) -> None:
        """Write."""
        with self._environment.begin(write=True) as transaction:
            for record in records:
                self._number += 1
                value = zlib.crc32(record).to_bytes(4, "little") + record
                transaction.put(self._number.to_bytes(8, "big"), value, append=True)

    def read(self) -> int:
        """Read."""
        with self._environment.begin() as transaction:
            values = (value for _, value in transaction.cursor())
            return sum(zlib.crc32(value[4:]) == int.from_bytes(value[:4], "little") for value in values)

    def close(self) -> None:
        """Close."""
        self._environment.close()


class RocksDb:
    """A log-structured merge tree with a write-ahead log."""

    def __init__(self, directory: Path, sync: bool) -> None:
        from rocksdict import Options, Rdict, WriteBatch, WriteOptions

        self._batch = WriteBatch
        self._database: Any = Rdict(str(directory), Options(raw_mode=True))
        self._options = WriteOptions()
        self._options.sync = sync
        self._number = 0

    def commit(self, records: Sequence[bytes]) -> None:
        """Write."""
        batch = self._batch(raw_mode=True)
        for record in records:
            self._number += 1
            batch.put(self._number.to_bytes(8, "big"), record)
        self._database.write(batch, self._options)

    def read(self) -> int:
        """Read; its blocks have checksums of their own."""
        return sum(1 for _ in self._database.values())

    def close(self) -> None:
        """Close."""
        self._database.close()


STORES: dict[str, type[Store]] = {"plain file": PlainFile, "SQLite": Sqlite, "LMDB": Lmdb, "RocksDB": RocksDb}


def _commits(store: str, **work: Any) -> list[float]:
    return commit_seconds(STORES[store], **work)


def _after_kill(store: str) -> dict[str, Any]:
    return after_kill(STORES[store], "benchmarks.stores_peer", store)


@contextmanager
def _started() -> Iterator[Commands]:
    yield {
        "versions": lambda: {
            "SQLite": sqlite3.sqlite_version,
            "lmdb": version("lmdb"),
            "rocksdict": version("rocksdict"),
        },
        "commits": _commits,
        "after_kill": _after_kill,
    }


if __name__ == "__main__" and not run_if_asked(dict(STORES)):
    serve(_started())
