"""Reading the records of a snapshot one after the other, each of the kind that is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from tq_service.domain.tables.column import FrozenColumn
from tq_service.durable.record_file import damaged, read_records
from tq_service.durable.snapshot_columns import decode_column
from tq_service.errors import SnapshotDamagedError
from tq_service.v1 import snapshot_pb2 as pb


class SnapshotReader:
    """A place in a snapshot.

    Attributes:
        count: number of records before it.
        at: where the next record begins, in bytes; that of the last one at the end of the file.
    """

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.at = 0
        self._path = path
        self._records = read_records(path)
        self._data: bytes | None = None
        self._record: pb.SnapshotRecord | None = None
        self._advance()

    @property
    def kind(self) -> str | None:
        """Kind of the next record; None at the end of the file."""
        if self._data is None:
            return None
        if self._record is None:
            self._record = pb.SnapshotRecord.FromString(self._data)
        return self._record.WhichOneof("content")

    def take(self, kind: str) -> Any:
        """Return the next record, which is of this kind.

        Raises:
            SnapshotDamagedError: it is of another, or damaged.
        """
        got = self.kind
        if got != kind:
            raise self.damaged(f"expected a record of kind {kind!r}, got {got or 'the end of the file'!r}")
        content = getattr(self._record, kind)
        self._take()
        return content

    def take_bytes(self) -> bytes:
        """Return the next record, which is bytes of a block.

        Raises:
            SnapshotDamagedError: the file ends here, or the record is damaged.
        """
        if self._data is None:
            raise self.damaged("expected bytes of a block, got the end of the file")
        data = self._data
        self._take()
        return data

    def column(self, size: int, dtype: DTypeLike) -> FrozenColumn:
        """Return the next column, of which it is known how many values it has, and of which type."""
        return decode_column(lambda: self.take("column"), size, dtype)

    def damaged(self, what: str) -> SnapshotDamagedError:
        """Return the error for the place that is being read."""
        return damaged(self._path, self.at, what)

    def _take(self) -> None:
        self.count += 1
        self._advance()

    def _advance(self) -> None:
        self._data = self._record = None
        found = next(self._records, None)
        if found is not None:
            self.at, self._data = found
