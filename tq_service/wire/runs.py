"""Many integers in messages, and what they name as runs of neighbours: indexes of samples, rows of puts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.v1 import metadata_pb2 as pb

Indexes = NDArray[np.int64]

_FEW_VALUES: Final = 64
_LEAST_MEAN_LENGTH: Final = 4
_BYTES_TYPE: Final = 2  # of a field, in the encoding of protobuf: a packed one has its values as bytes
_VARINT_BITS: Final = 7
_MOST_INDEXES: Final = 2**31  # a few bytes must not make a reader reserve whatever they say


def decode_integers(values: Sequence[int]) -> Indexes:
    """Return a repeated field of integers as an array `(n,)`.

    Numpy can read long fields in protobuf's buffers, which costs a copy; finding that out costs more than a few values.
    """
    count = len(values)
    return np.fromiter(values, np.int64, count) if count <= _FEW_VALUES else np.array(values, np.int64)


def fill_packed(message: Any, field: str, values: NDArray[Any]) -> None:
    """Fill a repeated field of numbers of 4 or 8 bytes, or of truth values, that has none yet.

    Its values lie in a message as they do in an array, so that many of them are copied at once.
    """
    if values.size <= _FEW_VALUES:
        getattr(message, field).extend(values.tolist())
        return
    number = message.DESCRIPTOR.fields_by_name[field].number
    data: Any = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    message.MergeFromString(b"".join((_varint(number << 3 | _BYTES_TYPE), _varint(data.nbytes), data)))


def _varint(value: int) -> bytes:
    parts = []
    while value >> _VARINT_BITS:
        parts.append(value & ~(-1 << _VARINT_BITS) | 1 << _VARINT_BITS)
        value >>= _VARINT_BITS
    return bytes([*parts, value])


def expand_runs(firsts: Indexes, counts: Indexes) -> Indexes:
    """Return every number of runs, run after run: firsts (3, 8), counts (2, 1) give (3, 4, 8)."""
    if firsts.size == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def runs_of(values: Indexes) -> tuple[Indexes, Indexes]:
    """Return the runs of neighbours that values are: (3, 4, 8) gives firsts (3, 8) and counts (2, 1)."""
    starts, counts = _runs_at(np.diff(values) != 1, values.size)
    return values[starts], counts


def _runs_at(breaks: NDArray[np.bool_], count: int) -> tuple[Indexes, Indexes]:
    """Return where runs of `count` values start, and their lengths; `breaks` says of all but the first if one does."""
    starts = np.flatnonzero(np.concatenate(([count > 0], breaks)))
    return starts, np.diff(starts, append=count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellRuns:
    """The cells of fields that were put together, as runs of neighbouring rows in the order wanted.

    Attributes:
        field_names: the fields that share the runs.
        put_indexes: `(runs,)`, which of the puts that are named beside the runs.
        first_rows: `(runs,)`, the first row of each in its put.
        row_counts: `(runs,)`, the number of rows of each.
    """

    field_names: tuple[str, ...]
    put_indexes: Indexes
    first_rows: Indexes
    row_counts: Indexes

    @classmethod
    def from_proto(cls, message: pb.CellRuns) -> CellRuns:
        """Return the runs of a message; they may be anything."""
        return cls(
            field_names=tuple(message.field_names),
            put_indexes=decode_integers(message.put_indexes),
            first_rows=decode_integers(message.first_rows),
            row_counts=decode_integers(message.row_counts),
        )

    @classmethod
    def of_rows(cls, field_names: tuple[str, ...], puts: Indexes, rows: Indexes) -> CellRuns:
        """Return the runs of cells given one by one: the put `(n,)` and the row in it `(n,)`."""
        starts, counts = _runs_at((np.diff(puts) != 0) | (np.diff(rows) != 1), rows.size)
        return cls(field_names=field_names, put_indexes=puts[starts], first_rows=rows[starts], row_counts=counts)

    def to_proto(self) -> pb.CellRuns:
        """Return the runs as a message."""
        message = pb.CellRuns(field_names=self.field_names)
        for name in ("put_indexes", "first_rows", "row_counts"):
            fill_packed(message, name, getattr(self, name).astype(np.uint32))
        return message

    @property
    def row_count(self) -> int:
        """Number of cells of each field."""
        return int(self.row_counts.sum())

    def expand(self) -> tuple[Indexes, Indexes]:
        """Return the cells one by one: the put `(n,)` and the row in it `(n,)`."""
        return np.repeat(self.put_indexes, self.row_counts), expand_runs(self.first_rows, self.row_counts)


def set_indexes(message: pb.BatchMeta, indexes: Indexes | range) -> None:
    """Name the samples of a batch, which has none yet."""
    if isinstance(indexes, range):
        if len(indexes) > _FEW_VALUES:
            message.index_ranges.first_indexes.append(indexes.start)
            message.index_ranges.index_counts.append(len(indexes))
        else:
            message.global_indexes.extend(indexes)
        return
    if indexes.size > _FEW_VALUES:
        firsts, counts = runs_of(indexes)
        if firsts.size * _LEAST_MEAN_LENGTH <= indexes.size:
            message.index_ranges.first_indexes.extend(firsts.tolist())
            message.index_ranges.index_counts.extend(counts.tolist())
            return
    message.global_indexes.extend(indexes.tolist())


def read_indexes(message: pb.BatchMeta) -> Indexes:
    """Return the samples of a batch, in order.

    Raises:
        InvalidArgumentError: both forms, ranges that are none, or too many samples.
    """
    if not message.HasField("index_ranges"):
        return decode_integers(message.global_indexes)
    firsts = decode_integers(message.index_ranges.first_indexes)
    counts = decode_integers(message.index_ranges.index_counts)
    if message.global_indexes or firsts.size != counts.size or bool((counts < 1).any()):
        raise InvalidArgumentError(
            f"index_ranges has {firsts.size} first_indexes and {counts.size} index_counts beside "
            f"{len(message.global_indexes)} global_indexes; send as many index_counts as first_indexes, each 1 or "
            f"more, and no global_indexes",
            field="index_ranges",
        )
    if float(counts.sum(dtype=np.float64)) > _MOST_INDEXES:
        raise InvalidArgumentError(
            f"index_ranges names more than {_MOST_INDEXES} samples; ask for fewer", field="index_ranges"
        )
    return expand_runs(firsts, counts)
