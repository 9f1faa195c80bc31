"""Slices of rows: the bytes to select from each row of a column, and the shape of the resulting column.

The storage service slices rows, because row lengths are stored only there. If several storage services store the
extents of a cell, a client joins the extents and slices the cell itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, Layout
from tq_service.v1.storage_service_pb2 import IndexRange
from tq_service.v1.storage_service_pb2 import RowSlice as RowSliceMessage
from tq_service.wire.columns import MAX_ROWS, ColumnShape, row_shapes
from tq_service.wire.metadata import NO_INTEGERS, Indexes, decode_integers, expand_runs, fill_packed

TO_THE_END: Final = 2**63 - 1
"""Stop value of a range that extends to the end of the row."""

MOST_PIECES: Final = 1 << 23
"""Maximum number of pieces per column. Each piece uses 24 bytes. A slice of dimension 1 has one piece per token."""

_LARGEST_UNIT_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCut:
    """The requested part of each row (see `RowSlice` in the protocol).

    Attributes:
        starts: start of each range in dimension 0.
        stops: stop of each range in dimension 0.
        range_counts: number of ranges per row, as an array of shape `(n,)`. Empty if all ranges apply to every row.
        chunks: indexes of the requested chunks of each row. Empty if ranges are requested instead.
        chunk_count: number of chunks per row, or 0 if ranges are requested.
        align: number that must divide every chunk length.
        second: start and stop of the range in dimension 1. None selects the entire dimension.
    """

    starts: Indexes = field(default_factory=lambda: np.zeros(1, np.int64))
    stops: Indexes = field(default_factory=lambda: np.full(1, TO_THE_END, np.int64))
    range_counts: Indexes = field(default_factory=NO_INTEGERS.copy)
    chunks: tuple[int, ...] = ()
    chunk_count: int = 0
    align: int = 1
    second: tuple[int, int] | None = None

    @classmethod
    def from_proto(cls, message: RowSliceMessage, row_count: int) -> RowCut:
        """Decode a message that requests a cut of `row_count` rows.

        Raises:
            InvalidArgumentError: the message is inconsistent.
        """
        starts, stops = (decode_integers(values) for values in (message.starts, message.stops))
        counts = decode_integers(message.range_counts)
        if starts.size != stops.size:
            raise _wrong(message, f"{starts.size} starts and {stops.size} stops; expected as many starts as stops")
        if message.chunk_count or message.chunks:
            if starts.size or counts.size:
                raise _wrong(message, "both ranges and chunks; set only one of them")
            most, align = max(message.chunks, default=0), message.align or 1
            if not message.chunks or not most < message.chunk_count <= MAX_ROWS or align > MAX_ROWS:
                raise _wrong(
                    message,
                    f"chunks {list(message.chunks[:5])} of {message.chunk_count}, aligned to {align}; expected at "
                    f"least one chunk, each less than chunk_count; chunk_count and align may be at most {MAX_ROWS}",
                )
        elif counts.size and (counts.size != row_count or int(counts.sum()) != starts.size):
            raise _wrong(
                message,
                f"range_counts for {counts.size} rows with a sum of {int(counts.sum())}; expected {row_count} rows "
                f"with a sum of {starts.size}, the number of starts",
            )
        range_count = starts.size if counts.size else max(starts.size, len(message.chunks)) * row_count
        if range_count > MOST_PIECES:
            raise InvalidArgumentError(
                f"the slice of {', '.join(map(repr, message.field_names))} has {range_count} ranges over all rows; "
                f"expected at most {MOST_PIECES}. Get fewer rows per call",
                field="slices",
                metadata={"got": str(range_count), "limit": str(MOST_PIECES)},
            )
        plain = cls()
        return cls(
            starts=starts if starts.size or counts.size else plain.starts,
            stops=stops if stops.size or counts.size else plain.stops,
            range_counts=counts,
            chunks=tuple(message.chunks),
            chunk_count=message.chunk_count,
            align=message.align or 1,
            second=(message.second.start, message.second.stop) if message.HasField("second") else None,
        )

    def to_proto(self, field_names: Sequence[str]) -> RowSliceMessage:
        """Encode the cut as a protobuf message for the given fields."""
        message = RowSliceMessage(field_names=field_names)
        if self.chunk_count:
            message.chunks.extend(self.chunks)
            message.chunk_count, message.align = self.chunk_count, self.align
        else:
            fill_packed(message, "starts", self.starts)
            fill_packed(message, "stops", self.stops)
            fill_packed(message, "range_counts", self.range_counts.astype(np.uint32))
        if self.second is not None:
            message.second.CopyFrom(IndexRange(start=self.second[0], stop=self.second[1]))
        return message

    def select(self, positions: Indexes) -> RowCut:
        """Return the cut for the rows at `positions`, in that order."""
        counts = self.range_counts
        if not counts.size:
            return self
        at = expand_runs((np.cumsum(counts) - counts)[positions], counts[positions])
        return replace(self, starts=self.starts[at], stops=self.stops[at], range_counts=counts[positions])

    def chunk_lengths(self, lengths: Indexes) -> Indexes:
        """Return the chunk length for each row. The last chunks of a row may be shorter."""
        return -(-lengths // (self.chunk_count * self.align)) * self.align

    def ranges(self, lengths: Indexes) -> tuple[Indexes, Indexes, Indexes]:
        """Return the row, start and end of each requested range for rows of the given lengths."""
        if self.chunk_count:
            chunks = np.array(self.chunks, np.int64)
            owners = np.repeat(np.arange(lengths.size), chunks.size)
            sizes, longest = self.chunk_lengths(lengths)[owners], lengths[owners]
            begins = np.minimum(np.tile(chunks, lengths.size) * sizes, longest)
            return owners, begins, np.minimum(begins + sizes, longest)
        if self.range_counts.size:
            owners = np.repeat(np.arange(lengths.size), self.range_counts)
            starts, stops = self.starts, self.stops
        else:
            owners = np.repeat(np.arange(lengths.size), self.starts.size)
            starts, stops = np.tile(self.starts, lengths.size), np.tile(self.stops, lengths.size)
        longest = lengths[owners]
        begins, ends = _resolved(starts, longest), _resolved(stops, longest)
        return owners, begins, np.maximum(begins, ends)

    def cut_shape(self, spec: FieldSpec) -> tuple[int, ...] | None:
        """Return the shape of the resulting rows, with -1 for sizes that can vary, or None if it is unknown."""
        shape = list(spec.row_shape or ())
        if not shape:
            return None
        if shape[0] >= 0:
            if self.range_counts.size:
                return None
            _, begins, ends = self.ranges(np.array(shape[:1], np.int64))
            shape[0] = int((ends - begins).sum())
        if self.second is not None and len(shape) > 1:
            first, last = self._second_range(shape[1])
            shape[1] = last - first
        return tuple(shape)

    def _second_range(self, size: int) -> tuple[int, int]:
        start, stop = self.second or (0, TO_THE_END)
        first, last, _ = slice(start, stop).indices(size)
        return first, max(first, last)


def _resolved(bounds: Indexes, lengths: Indexes) -> Indexes:
    """Resolve range bounds like Python slices. Negative bounds count from the end, and all bounds are clipped."""
    return np.clip(np.where(bounds < 0, bounds + lengths, bounds), 0, lengths)


def _wrong(message: RowSliceMessage, problem: str) -> InvalidArgumentError:
    names = ", ".join(map(repr, message.field_names))
    return InvalidArgumentError(f"the slice of {names} has {problem}", field="slices")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPieces:
    """The requested bytes of a column's rows, as contiguous pieces.

    Attributes:
        column: name, dtype, layout and row shape of the resulting column.
        rows: row index of each piece, as an array of shape `(m,)`.
        starts: offset of each piece within the bytes of its row, as an array of shape `(m,)`.
        sizes: size of each piece in bytes, as an array of shape `(m,)`. Sizes may be 0.
        unit: a number of bytes that evenly divides the size of every piece and the distance between any two pieces in a
            put.
    """

    column: ColumnShape
    rows: Indexes
    starts: Indexes
    sizes: Indexes
    unit: int


def cut_rows(
    column: ColumnShape, cut: RowCut, extent_counts: Indexes = NO_INTEGERS, extent_lengths: Indexes = NO_INTEGERS
) -> RowPieces:
    """Return the pieces that a cut selects from the rows of a column.

    Args:
        column: header that describes the complete rows of the column.
        cut: part to select from each row.
        extent_counts: number of extents in each cell, if the column's rows are extents. Each resulting row is then a
            cell.
        extent_lengths: number of items in dimension 0 of each extent that belong to the cell.

    Raises:
        InvalidArgumentError: the rows of the field cannot be sliced as requested.
    """
    spec = column.spec
    _check_cut(spec, cut, is_joined=extent_counts.size > 0)
    shapes = row_shapes(spec, column.extents, column.row_count)
    kept = shapes[:, 0]
    firsts = np.arange(column.row_count)
    if extent_counts.size:
        kept, firsts = np.minimum(kept, extent_lengths), np.cumsum(extent_counts) - extent_counts
        cells = shapes[firsts]
        cells[:, 0] = np.add.reduceat(kept, firsts)
    else:
        cells = shapes
    lengths = cells[:, 0].copy()
    rows, begins, ends = cut.ranges(lengths)
    cut_lengths = np.bincount(rows, ends - begins, lengths.size).astype(np.int64)
    if extent_counts.size:
        offsets = np.cumsum(kept) - kept  # extent offsets, made relative to the first extent of the cell below
        offsets -= np.repeat(offsets[firsts], extent_counts)
        counts = extent_counts[rows]
        _check_piece_count(spec, int(counts.sum()))
        rows = expand_runs(firsts[rows], counts)
        begins, ends = (np.clip(np.repeat(bounds, counts) - offsets[rows], 0, kept[rows]) for bounds in (begins, ends))
    starts, sizes, width, unit = _byte_ranges(column, cut, shapes, rows, (begins, ends))
    if width is not None:  # one piece per item in dimension 0
        rows = np.repeat(rows, ends - begins)
    return RowPieces(
        column=_cut_column(column, cells, cut_lengths, width, is_joined=extent_counts.size > 0),
        rows=rows,
        starts=starts,
        sizes=sizes,
        unit=unit,
    )


def _check_cut(spec: FieldSpec, cut: RowCut, *, is_joined: bool) -> None:
    shape = spec.row_shape or ()
    problem = ""
    if spec.layout is Layout.OBJECT:
        problem = "objects cannot be sliced; request the field without a slice"
    elif not shape:
        problem = "its rows are single values; request the field without a slice"
    elif cut.second is not None and (len(shape) < 2 or shape[1] < 0):
        problem = "a slice of the second dimension requires the same size in all rows; slice only the first dimension"
    elif is_joined and -1 in shape[1:]:
        problem = "only cells that differ solely in the first dimension can be joined; omit its extent_counts"
    if problem:
        raise InvalidArgumentError(
            f"field {spec.name!r} is {spec.describe()}, and {problem}",
            field="slices",
            metadata={"field_name": spec.name},
        )


def _byte_ranges(
    column: ColumnShape, cut: RowCut, shapes: Indexes, rows: Indexes, bounds: tuple[Indexes, Indexes]
) -> tuple[Indexes, Indexes, int | None, int]:
    """Return each range's start and size in bytes, the width of dimension 1 (None if not sliced), and the unit."""
    spec, (begins, ends) = column.spec, bounds
    shape = spec.row_shape or ()
    item_bytes = (shapes[:, 1:].prod(axis=1) * spec.itemsize)[rows]
    fixed_bytes = math.prod(size for size in shape[1:] if size >= 0) * spec.itemsize
    if cut.second is None or cut._second_range(shape[1]) == (0, shape[1]):
        return begins * item_bytes, (ends - begins) * item_bytes, None, _as_unit(fixed_bytes, spec)
    first, last = cut._second_range(shape[1])
    counts = ends - begins
    _check_piece_count(spec, int(counts.sum()))
    strides = np.repeat(item_bytes, counts)
    steps = strides // max(shape[1], 1)
    starts = expand_runs(begins, counts) * strides + first * steps
    unit = fixed_bytes // max(shape[1], 1) * math.gcd(shape[1], last - first)
    return starts, (last - first) * steps, last - first, _as_unit(unit, spec)


def _check_piece_count(spec: FieldSpec, piece_count: int) -> None:
    if piece_count > MOST_PIECES:
        raise InvalidArgumentError(
            f"the slice of field {spec.name!r} has {piece_count} pieces; expected at most {MOST_PIECES}. Get fewer "
            "rows per call",
            field="slices",
            metadata={"field_name": spec.name, "got": str(piece_count), "limit": str(MOST_PIECES)},
        )


def _as_unit(unit_bytes: int, spec: FieldSpec) -> int:
    return unit_bytes if 0 < unit_bytes <= _LARGEST_UNIT_BYTES else spec.itemsize


def _cut_column(
    column: ColumnShape, cells: Indexes, cut_lengths: Indexes, width: int | None, *, is_joined: bool
) -> ColumnShape:
    shape = list(column.spec.row_shape or ())
    shapes = cells.copy()
    shapes[:, 0] = cut_lengths
    is_alike = shape[0] >= 0 and not is_joined and bool((cut_lengths == cut_lengths[:1]).all())
    shape[0] = int(cut_lengths[0]) if is_alike and cut_lengths.size else -1
    if width is not None:
        shapes[:, 1] = shape[1] = width
    spec = replace(column.spec, layout=Layout.JAGGED if -1 in shape else Layout.DENSE, row_shape=tuple(shape))
    return ColumnShape(
        spec=spec,
        row_count=cut_lengths.size,
        extents=shapes[:, list(spec.ragged_dims)] if spec.ragged_dims else None,
        value_bytes=int(shapes.prod(axis=1).sum()) * spec.itemsize,
        whole_lengths=cells[:, 0].copy(),
    )
