"""Reading the records of a snapshot one after the other, each of the kind that is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from tq_service.domain.column import FrozenColumn
from tq_service.durable.record_file import damaged, read_records
from tq_service.durable.snapshot_columns import decode_column
from tq_service.errors import SnapshotDamagedError
from tq_service.v1 import snapshot_pb2 as pb


class SnapshotReader:
    """A place in a snapshot.

    Attributes:
        kind: of the next record; None at the end of the file.
        count: number of records before it.
    """

    def __init__(self, path: Path) -> None:
        self.kind: str | None = None
        self.count = -1
        self._path = path
        self._records = read_records(path)
        self._next: tuple[int, pb.SnapshotRecord] | None = None
        self._at = 0
        self._advance()

    def take(self, kind: str) -> Any:
        """Return the next record, which is of this kind.

        Raises:
            SnapshotDamagedError: it is of another, or damaged.
        """
        if self._next is None or self.kind != kind:
            raise self.damaged(f"expected a record of kind {kind!r}, got {self.kind or 'the end of the file'!r}")
        record = self._next[1]
        self._advance()
        return getattr(record, kind)

    def column(self, size: int, dtype: DTypeLike) -> FrozenColumn:
        """Return the next column, of which it is known how many values it has, and of which type."""
        return decode_column(lambda: self.take("column"), size, dtype)

    def damaged(self, what: str) -> SnapshotDamagedError:
        """Return the error for the place that is being read."""
        return damaged(self._path, self._at, what)

    def _advance(self) -> None:
        self._at = 0 if self._next is None else self._next[0]
        found = next(self._records, None)
        self.count += 1
        if found is None:
            self._next = self.kind = None
            return
        self._next = found[0], pb.SnapshotRecord.FromString(found[1])
        self.kind = self._next[1].WhichOneof("content")
