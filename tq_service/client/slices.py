"""Defines slices of rows, describes them in requests to storage services, and completes the fetched slices.

Storage services slice the rows. The client adds fill values to make the shares of all ranks equally long, and adds
columns with the positions of the items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tq_service.client.padding import fill_pattern, lengthen
from tq_service.dataplane.receiving import Received
from tq_service.errors import FieldMismatchError, InvalidArgumentError
from tq_service.schema import FieldSpec, Layout
from tq_service.wire.columns import ColumnShape, with_ragged_dim
from tq_service.wire.mapping import Bytes
from tq_service.wire.metadata import NO_INTEGERS, Indexes, expand_runs
from tq_service.wire.slices import TO_THE_END, RowCut, cut_rows

RowRange: TypeAlias = tuple[int | None, int | None] | slice
"""A range with a start and a stop, as in a Python slice. Steps are not supported."""

CpLayout: TypeAlias = Literal["contiguous", "zigzag"]
"""How a row is split among context-parallel ranks: each rank gets one chunk, or two chunks from opposite ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """The part to fetch from each row of a field. The storage service slices the rows and sends only this part.

    For the first dimension (tokens), set at most one of `ranges`, `by_row` and `chunks`. For the second dimension, such
    as the layers in routed experts `(tokens, layers, k)`, set `layers`. If no argument is set for a dimension, the
    entire dimension is fetched. Ranges have the semantics of Python slices: negative bounds count from the end of the
    row, and bounds beyond the row are clipped.

    Attributes:
        ranges: `(start, stop)` for all rows, or a sequence of such ranges, which are concatenated in order.
        by_row: the ranges for each row of the batch, each in the same form as `ranges`. An integer array of shape `(n,
            2)` or `(n, ranges, 2)` is also accepted.
        chunks: indexes of the chunks to fetch, which are concatenated in order. Each row is split into `chunk_count`
            chunks of equal length. The last chunks may be shorter or empty.
        chunk_count: number of chunks per row, used with `chunks`.
        align: chunk lengths are rounded up to a multiple of this number.
        layers: range `(start, stop)` in the second dimension. This dimension must have the same size in all rows.
        fill: value that pads short chunks, so that all ranks get shares of equal length. Requires `chunks`. If None,
            chunks are not padded.
        positions: name of an additional int64 column that contains the position of each fetched or filled item in its
            row. If the name is empty, no such column is added.

    Raises:
        InvalidArgumentError: the arguments contradict each other.
    """

    ranges: RowRange | Sequence[RowRange] | None = None
    by_row: Any = None
    chunks: Sequence[int] = ()
    chunk_count: int = 0
    align: int = 1
    layers: RowRange | None = None
    fill: Any = None
    positions: str = ""

    def __post_init__(self) -> None:
        given = [self.ranges is not None, self.by_row is not None, bool(self.chunk_count or len(self.chunks))]
        if sum(given) > 1:
            raise _wrong("more than one of ranges, by_row and chunks", "at most one of them")
        if given[2] and not (len(self.chunks) and all(0 <= chunk < self.chunk_count for chunk in self.chunks)):
            raise _wrong(f"chunks {list(self.chunks)} of {self.chunk_count}", "chunk numbers from 0 to chunk_count - 1")
        if self.align < 1:
            raise _wrong(f"align {self.align}", "at least 1")
        if self.fill is not None and not given[2]:
            raise _wrong("fill without chunks", "both. To pad rows to a given length, use padded")

    @classmethod
    def share(
        cls,
        cp_rank: int,
        cp_size: int,
        layout: CpLayout = "zigzag",
        *,
        align: int = 1,
        fill: Any = None,
        positions: str = "",
    ) -> RowSlice:
        """Return the slice that selects one rank's share in a context-parallel group.

        Args:
            cp_rank: rank in the context-parallel group.
            cp_size: number of ranks in the group.
            layout: "contiguous" assigns chunk i of `cp_size` chunks to rank i. "zigzag" assigns chunks i and `2 *
                cp_size - 1 - i` of `2 * cp_size` chunks to rank i. This balances the work of causal attention.
            align: see `RowSlice.align`.
            fill: see `RowSlice.fill`.
            positions: see `RowSlice.positions`.
        """
        if layout not in get_args(CpLayout):
            raise _wrong(f"layout {layout!r}", "'contiguous' or 'zigzag'")
        if not 0 <= cp_rank < cp_size:
            raise _wrong(f"cp_rank {cp_rank} of {cp_size}", "cp_rank from 0 to cp_size - 1")
        is_zigzag = layout == "zigzag"
        return cls(
            chunks=(cp_rank, 2 * cp_size - 1 - cp_rank) if is_zigzag else (cp_rank,),
            chunk_count=2 * cp_size if is_zigzag else cp_size,
            align=align,
            fill=fill,
            positions=positions,
        )


SliceGiven: TypeAlias = RowSlice | RowRange | Sequence[Any] | Any
"""A slice of a field: a `RowSlice`, a `(start, stop)` pair or a slice for all rows, or a list as in `by_row`."""


def _wrong(got: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"slices has {got}; expected {expected}", field="slices")


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices requested by one call.

    Attributes:
        given: the slices passed to the call, keyed by field.
        cuts: the slices in the form sent to storage services, keyed by field. Fields with the same `RowSlice` share a
            cut.
    """

    given: Mapping[str, RowSlice]
    cuts: Mapping[str, RowCut]

    @classmethod
    def of(cls, slices: Mapping[str, SliceGiven] | None, row_count: int) -> Slices | None:
        """Convert the `slices` argument of a call that reads `row_count` rows. Return None if there are no slices.

        Raises:
            InvalidArgumentError: a value is not a slice, or specifies ranges for a different number of rows.
        """
        if not slices:
            return None
        if not isinstance(slices, Mapping):
            raise _wrong(f"type {type(slices).__name__}", "a mapping of field names to slices")
        given = {name: _row_slice(each) for name, each in slices.items()}
        known: dict[int, RowCut] = {}
        for name, each in given.items():
            if id(each) not in known:
                known[id(each)] = _cut_of(name, each, row_count)
        return cls(given, {name: known[id(each)] for name, each in given.items()})

    @property
    def is_by_row(self) -> bool:
        """Whether ranges are set per row. If so, a sample that is requested twice can have two different slices."""
        return any(cut.range_counts.size for cut in self.cuts.values())

    def with_heads(self, lengths: Mapping[str, int]) -> Slices:
        """Add slices that truncate the rows of the fields in `lengths`."""
        heads = {length: RowSlice(ranges=(0, length)) for length in lengths.values()}
        cuts = {length: _cut_of("", head, 0) for length, head in heads.items()}
        return Slices(
            {**self.given, **{name: heads[length] for name, length in lengths.items()}},
            {**self.cuts, **{name: cuts[length] for name, length in lengths.items()}},
        )

    def check(self, wanted: Sequence[str]) -> None:
        """Check that all sliced fields are fetched, and that no position column has the same name as a field.

        Raises:
            InvalidArgumentError: a sliced field is not fetched, or a position column has the same name as a field.
        """
        for name, each in self.given.items():
            if name not in wanted:
                raise InvalidArgumentError(
                    f"slices has field {name!r}, which is not fetched; expected any of {', '.join(map(repr, wanted))}",
                    field="slices",
                    metadata={"field_name": name},
                )
            if each.positions in wanted:
                raise _wrong(f"positions={each.positions!r}, which is the name of a field", "a different name")

    def cut_spec(self, spec: FieldSpec) -> FieldSpec:
        """Return a field's spec after its rows have been sliced.

        Raises:
            InvalidArgumentError: the field's rows cannot be sliced.
        """
        cut = self.cuts.get(spec.name)
        if cut is None:
            return spec
        if spec.layout is Layout.OBJECT or spec.row_shape == ():
            what = "objects" if spec.layout is Layout.OBJECT else "scalar rows"
            raise InvalidArgumentError(
                f"slices has field {spec.name!r} ({spec.describe()}), but {what} cannot be sliced; expected a field of "
                "tensors with one or more dimensions. Omit the field from slices",
                field="slices",
                metadata={"field_name": spec.name},
            )
        spec = with_ragged_dim(spec)  # a jagged field remains jagged, even if all rows of a put have the same shape
        shape = cut.cut_shape(spec)
        if shape is not None and self.given[spec.name].fill is not None and shape[0] >= 0 and spec.row_shape:
            shape = (self._filled(cut, np.array(spec.row_shape[:1], np.int64))[0], *shape[1:])
        return replace(spec, row_shape=shape)

    def position_specs(self, specs: Sequence[FieldSpec]) -> list[FieldSpec]:
        """Return the specs of the sliced fields' position columns."""
        found: dict[str, FieldSpec] = {}
        for spec in specs:
            name = self.given[spec.name].positions if spec.name in self.given else ""
            if name:
                found[name] = FieldSpec(name, "int64", spec.layout, (spec.row_shape or (-1,))[:1])
        return list(found.values())

    def finish(self, received: Sequence[Received]) -> list[Received]:
        """Pad the columns' rows with fill values, and add the position columns.

        Raises:
            FieldMismatchError: two fields share one position column, but their slices have different positions.
        """
        columns: list[Received] = []
        positions: dict[str, tuple[str, Received]] = {}
        for column, values in received:
            name = column.spec.name
            each, lengths = self.given.get(name), column.whole_lengths
            if each is None or lengths is None:
                columns.append((column, values))
                continue
            cut = self.cuts[name]
            part = column, values
            if each.fill is not None:
                part = _filled_up(column, values, self._filled(cut, lengths), each.fill)
            columns.append(part)
            if each.positions:
                found = self._positions(part[0], each, cut, lengths)
                first, known = positions.setdefault(each.positions, (name, found))
                if not _are_alike(known, found):
                    raise FieldMismatchError(
                        f"fields {first!r} and {name!r} share column {each.positions!r}, but their slices have "
                        f"different positions because their rows differ in length. Use one position column per field",
                        field="slices",
                        metadata={
                            "field_name": name,
                            "got": f"{found[0].value_bytes // 8} positions",
                            "expected": f"the {known[0].value_bytes // 8} positions of {first}",
                        },
                    )
        return [*columns, *(found for _, found in positions.values())]

    @staticmethod
    def _filled(cut: RowCut, lengths: Indexes) -> Indexes:
        return cut.chunk_lengths(lengths) * len(cut.chunks)

    def _positions(self, column: ColumnShape, each: RowSlice, cut: RowCut, lengths: Indexes) -> Received:
        if each.fill is None:
            owners, begins, ends = cut.ranges(lengths)
        else:
            sizes = cut.chunk_lengths(lengths)
            owners = np.repeat(np.arange(lengths.size), len(cut.chunks))
            begins = np.tile(np.array(cut.chunks, np.int64), lengths.size) * sizes[owners]
            ends = begins + sizes[owners]
        counts = np.bincount(owners, ends - begins, lengths.size).astype(np.int64)
        full = ends > begins
        values = expand_runs(begins[full], (ends - begins)[full]) if full.any() else NO_INTEGERS
        is_dense = column.extents is None
        spec = FieldSpec(
            each.positions,
            "int64",
            Layout.DENSE if is_dense else Layout.JAGGED,
            (int(counts[0]),) if is_dense else (-1,),
        )
        shape = ColumnShape(
            spec=spec,
            row_count=lengths.size,
            extents=None if is_dense else counts.reshape(-1, 1),
            value_bytes=values.nbytes,
        )
        return shape, np.ascontiguousarray(values).view(np.uint8)


def _are_alike(one: Received, other: Received) -> bool:
    if one[0].extents is None or other[0].extents is None:
        return one[0].spec == other[0].spec and np.array_equal(one[1], other[1])
    return np.array_equal(one[0].extents, other[0].extents) and np.array_equal(one[1], other[1])


def _filled_up(column: ColumnShape, values: Bytes, lengths: Indexes, fill: Any) -> Received:
    """Extend each row of a column in its first dimension to its entry in `lengths`, an array of shape `(n,)`."""
    shape = list(column.spec.row_shape or ())
    pattern = fill_pattern(column.spec, fill)
    if column.extents is None:
        shape[0] = int(lengths[0]) if lengths.size else 0
    elif column.spec.ragged_dims != (0,):
        raise InvalidArgumentError(
            f"slices sets a fill value for field {column.spec.name!r}, which is {column.spec.describe()}; expected a "
            "field whose rows differ only in their first dimension. Omit fill",
            field="slices",
            metadata={"field_name": column.spec.name},
        )
    item_bytes = column.spec.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    if (column.row_bytes() != lengths * item_bytes).any():
        values = lengthen(column, values, lengths * item_bytes, pattern)
    spec = replace(column.spec, row_shape=tuple(shape))
    extents = None if column.extents is None else lengths.reshape(-1, 1)
    return replace(column, spec=spec, extents=extents, value_bytes=values.size), values


def cut_received(received: Received, cut: RowCut) -> Received:
    """Slice rows that were received in full, and return the requested parts."""
    column, values = received
    pieces = cut_rows(column, cut)
    starts = column.row_offsets()[pieces.rows] + pieces.starts
    full = pieces.sizes > 0
    bounds = zip(starts[full].tolist(), (starts + pieces.sizes)[full].tolist(), strict=True)
    parts = [values[start:end] for start, end in bounds]
    return pieces.column, np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _row_slice(given: SliceGiven) -> RowSlice:
    if isinstance(given, RowSlice):
        return given
    if isinstance(given, slice) or (isinstance(given, tuple) and _is_range(given)):
        return RowSlice(ranges=given)
    return RowSlice(by_row=given)


def _is_range(given: Any) -> bool:
    return isinstance(given, slice) or (
        isinstance(given, tuple | list) and len(given) == 2 and all(map(_is_bound, given))
    )


def _is_bound(value: Any) -> bool:
    return value is None or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def _cut_of(name: str, given: RowSlice, row_count: int) -> RowCut:
    second = None if given.layers is None else _bounds(name, given.layers)
    if given.chunk_count:
        return RowCut(chunks=tuple(given.chunks), chunk_count=given.chunk_count, align=given.align, second=second)
    if given.by_row is None:
        ranges = [(None, None)] if given.ranges is None else given.ranges
        starts, stops = _columns(name, [ranges] if _is_range(ranges) else ranges)
        return RowCut(starts=starts, stops=stops, second=second)
    counts, starts, stops = _by_row(name, given.by_row)
    if counts.size != row_count:
        raise _wrong(f"ranges of {counts.size} rows for field {name!r}", f"one for each of {row_count} rows")
    return RowCut(starts=starts, stops=stops, range_counts=counts, second=second)


def _by_row(name: str, given: Any) -> tuple[Indexes, Indexes, Indexes]:
    """Return the number of ranges per row, and the starts and stops of all ranges."""
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        bounds = np.asarray(given)
        if bounds.dtype.kind not in "iu" or bounds.ndim not in (2, 3) or bounds.shape[-1] != 2:
            raise _wrong(
                f"an array of {bounds.dtype} with shape {list(bounds.shape)} for field {name!r}",
                "an integer array of shape (n, 2) or (n, ranges, 2)",
            )
        bounds = bounds.reshape(bounds.shape[0], -1, 2).astype(np.int64)
        counts = np.full(bounds.shape[0], bounds.shape[1], np.int64)
        return counts, bounds[:, :, 0].reshape(-1), bounds[:, :, 1].reshape(-1)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _wrong(f"{given!r} for field {name!r}", "(start, stop), a list with one such pair per row, or a RowSlice")
    rows = [[row] if _is_range(row) else row for row in given]
    for row in rows:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise _wrong(f"{row!r} for a row of field {name!r}", "(start, stop), or a list of such pairs")
    starts, stops = _columns(name, [each for row in rows for each in row])
    return np.array([len(row) for row in rows], np.int64), starts, stops


def _columns(name: str, ranges: Any) -> tuple[Indexes, Indexes]:
    bounds = np.array([_bounds(name, each) for each in ranges], np.int64).reshape(-1, 2)
    return bounds[:, 0].copy(), bounds[:, 1].copy()


def _bounds(name: str, given: Any) -> tuple[int, int]:
    if not _is_range(given):
        raise _wrong(f"{given!r} for field {name!r}", "(start, stop), each an integer or None")
    if isinstance(given, slice):
        if given.step not in (None, 1):
            raise _wrong(f"a step of {given.step} for field {name!r}", "no step. Apply the step to the fetched range")
        given = given.start, given.stop
    start, stop = given
    if not (_is_bound(start) and _is_bound(stop)):
        raise _wrong(f"{given!r} for field {name!r}", "(start, stop), each an integer or None")
    low, high = 0 if start is None else int(start), TO_THE_END if stop is None else int(stop)
    return max(min(low, TO_THE_END), -TO_THE_END), max(min(high, TO_THE_END), -TO_THE_END)
