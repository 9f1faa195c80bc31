"""Reading cells in the order asked for: headers first, then bytes as views on the puts' memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import numpy as np

from tq_service.errors import InvalidArgumentError, PutNotFoundError
from tq_service.storage.cells import ReadRuns, Rows, expand_runs
from tq_service.storage.pool import RegionPool
from tq_service.storage.region import Region
from tq_service.storage.stored_put import StoredColumn, StoredPut
from tq_service.wire.columns import (
    MAX_ROWS,
    ColumnShape,
    Extents,
    extent_count,
    fixed_row_bytes,
    merge_specs,
    widen_extents,
)

_GATHER_BELOW_BYTES: Final = 1024
_GATHER_FROM_SLICES: Final = 16
_GATHER_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """The bytes of one column that is read: for each run, its put, and its first byte and size in the put's region."""

    column: ColumnShape
    put_indexes: Rows
    starts: Rows
    sizes: Rows


class Reading:
    """Cells being read. What it reads stays as it is until `close`, whatever is freed or moved meanwhile.

    Attributes:
        row_count: number of rows.
        headers: the columns, in the order asked for.
    """

    def __init__(
        self, pool: RegionPool, regions: Mapping[int, Region], spans: Sequence[_Spans], row_count: int
    ) -> None:
        self.row_count = row_count
        self.headers = tuple(span.column for span in spans)
        self._spans = spans
        self._pool = pool
        self._regions = dict(regions)
        for region in self._regions.values():
            pool.pin(region)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of all columns in order; the views are valid until `close`."""
        for span in self._spans:
            yield from self._column_chunks(span)

    def close(self) -> None:
        """Let go of what was read; a second call does nothing."""
        regions, self._regions, self._spans = self._regions, {}, ()
        for region in regions.values():
            self._pool.unpin(region)

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _column_chunks(self, span: _Spans) -> Iterator[memoryview]:
        puts, starts, sizes = _join_neighbours(span)
        row_bytes = fixed_row_bytes(span.column.spec)
        small = len(starts) >= _GATHER_FROM_SLICES and int(sizes.sum()) < _GATHER_BELOW_BYTES * len(starts)
        if row_bytes and small:
            bounds = np.flatnonzero(puts[1:] != puts[:-1]) + 1
            for some in np.split(np.arange(len(puts)), bounds) if len(bounds) * 4 < len(puts) else ():
                yield from self._gathered(self._regions[int(puts[some[0]])], starts[some], sizes[some], row_bytes)
            if len(bounds) * 4 < len(puts):
                return
        views = {put: self._regions[put].view() for put in np.unique(puts).tolist()}
        for put, start, end in zip(puts.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
            yield views[put][start:end]

    def _gathered(self, region: Region, starts: Rows, sizes: Rows, row_bytes: int) -> Iterator[memoryview]:
        """Yield scattered rows of a dense column copied together, since many tiny views cost more than the copy."""
        base = int(starts[0]) % row_bytes
        held = region.array()[base:]
        table = held[: len(held) // row_bytes * row_bytes].reshape(-1, row_bytes)
        rows = expand_runs((starts - base) // row_bytes, sizes // row_bytes)
        block = max(_GATHER_BLOCK_BYTES // row_bytes, 1)
        for first in range(0, len(rows), block):
            yield np.take(table, rows[first : first + block], axis=0).reshape(-1).data


def _join_neighbours(span: _Spans) -> tuple[Rows, Rows, Rows]:
    """Return put, start and size of the slices to read: runs that follow each other in memory are one."""
    puts, starts, sizes = span.put_indexes, span.starts, span.sizes
    if not sizes.all():
        full = sizes > 0
        puts, starts, sizes = puts[full], starts[full], sizes[full]
    if len(sizes) < 2:
        return puts, starts, sizes
    follows = (puts[1:] == puts[:-1]) & (starts[1:] == starts[:-1] + sizes[:-1])
    if not follows.any():
        return puts, starts, sizes
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return puts[heads], starts[heads], np.add.reduceat(sizes, heads)


def open_reading(
    pool: RegionPool, puts: Mapping[bytes, StoredPut], runs: Sequence[ReadRuns], put_ids: Sequence[bytes]
) -> Reading:
    """Find the cells of a read and pin their memory; see `StorageEngine.open_read`."""
    row_count = _check_runs(runs, len(put_ids))
    held: dict[int, StoredPut] = {}
    spans: list[_Spans] = []
    for fields in runs:
        groups = _group_by_put(fields.put_indexes)
        for index, _ in groups:
            if index not in held:
                held[index] = _find_put(puts, put_ids[index])
        resolver = _Resolver(fields, groups, held, put_ids, row_count)
        spans.extend(resolver.resolve(name) for name in fields.field_names)
    return Reading(pool, {index: put.region for index, put in held.items()}, spans, row_count)


def _find_put(puts: Mapping[bytes, StoredPut], put_id: bytes) -> StoredPut:
    put = puts.get(put_id)
    if put is None:
        raise PutNotFoundError(
            f"put {put_id.hex()} is not here: never completed, expired without a commit, or cleared; get the rows anew"
        )
    return put


def _check_runs(runs: Sequence[ReadRuns], put_count: int) -> int:
    """Return the number of rows asked for."""
    names = [name for fields in runs for name in fields.field_names]
    if not names or len(set(names)) != len(names):
        raise InvalidArgumentError(f"expected at least one field, each once; got {names}", field="runs")
    row_counts = {fields.field_names: _count_rows(fields, put_count) for fields in runs}
    if len(set(row_counts.values())) > 1:
        got = "; ".join(f"{', '.join(names)}: {count}" for names, count in row_counts.items())
        raise InvalidArgumentError(f"row counts differ between fields ({got}); ask for the same rows", field="runs")
    return next(iter(row_counts.values()))


def _count_rows(fields: ReadRuns, put_count: int) -> int:
    puts, firsts, counts = fields.put_indexes, fields.first_rows, fields.row_counts
    what = f"runs of {', '.join(fields.field_names)}"
    if not len(puts) == len(firsts) == len(counts):
        raise InvalidArgumentError(
            f"{what} have {len(puts)} puts, {len(firsts)} first rows and {len(counts)} counts; give one of each for "
            "each run",
            field="runs",
        )
    if not len(puts):
        raise InvalidArgumentError(f"{what} are empty; ask for at least one row", field="runs")
    if int(puts.min()) < 0 or int(puts.max()) >= put_count:
        raise InvalidArgumentError(f"{what} name a put outside the {put_count} puts given", field="runs")
    if int(counts.min()) < 1 or int(counts.max()) > MAX_ROWS or int(counts.sum()) > MAX_ROWS:
        raise InvalidArgumentError(f"{what} must have 1 to {MAX_ROWS} rows each and together", field="runs")
    return int(counts.sum())


def _group_by_put(put_indexes: Rows) -> list[tuple[int, Rows | slice]]:
    """Return each put with the positions of its runs."""
    if (put_indexes == put_indexes[0]).all():
        return [(int(put_indexes[0]), slice(None))]
    order = np.argsort(put_indexes, kind="stable")
    bounds = np.flatnonzero(np.diff(put_indexes[order])) + 1
    return [(int(put_indexes[some[0]]), some) for some in np.split(order, bounds)]


class _Resolver:
    """Turns the runs that some fields share into places in memory."""

    def __init__(
        self,
        fields: ReadRuns,
        groups: list[tuple[int, Rows | slice]],
        puts: Mapping[int, StoredPut],
        put_ids: Sequence[bytes],
        row_count: int,
    ) -> None:
        self._fields = fields
        self._groups = groups
        self._puts = puts
        self._put_ids = put_ids
        self._row_count = row_count
        self._targets = np.cumsum(fields.row_counts) - fields.row_counts
        self._positions: dict[int, Rows] = {}
        for index, some in groups:
            put = puts[index]
            firsts, counts = fields.first_rows[some], fields.row_counts[some]
            wrong = (firsts < 0) | (firsts > put.row_count - counts)
            if wrong.any():
                first, count = int(firsts[wrong][0]), int(counts[wrong][0])
                raise InvalidArgumentError(
                    f"rows {first} to {first + count - 1} are outside put {put_ids[index].hex()}, which has "
                    f"{put.row_count} rows",
                    field="runs",
                )

    def resolve(self, name: str) -> _Spans:
        """Return where the runs of a field are, with its header."""
        columns = [self._puts[index].column(name, self._put_ids[index]) for index, _ in self._groups]
        merged = merge_specs([column.spec for column in columns])
        width = extent_count(merged)
        extents = np.empty((self._row_count, width), np.int64) if width else None
        starts = np.empty(len(self._fields.first_rows), np.int64)
        sizes = np.empty_like(starts)
        for (index, some), column in zip(self._groups, columns, strict=True):
            region = self._puts[index].region
            positions = self._find(name, index, some, column)
            counts = self._fields.row_counts[some]
            row_bytes = fixed_row_bytes(column.spec)
            if row_bytes is not None:
                starts[some] = column.values_at + positions * row_bytes
                sizes[some] = counts * row_bytes
                found = None
            else:
                offsets = column.offsets(region)
                firsts = offsets[positions]
                starts[some] = column.values_at + firsts
                sizes[some] = offsets[positions + counts] - firsts
                found = _extents_of(column.extents(region), positions, counts)
            found = widen_extents(found, column.spec, merged, int(counts.sum()))
            if extents is not None and found is not None:
                self._place(extents, some, counts, found)
        shape = ColumnShape(spec=merged, row_count=self._row_count, extents=extents, value_bytes=int(sizes.sum()))
        return _Spans(shape, self._fields.put_indexes, starts, sizes)

    def _find(self, name: str, index: int, some: Rows | slice, column: StoredColumn) -> Rows:
        """Return the positions of runs in memory; fields that were freed alike share the search."""
        known = self._positions.get(id(column.row_set))
        if known is not None:
            return known
        firsts, counts = self._fields.first_rows[some], self._fields.row_counts[some]
        if len(firsts) == 1:
            positions = np.array([column.row_set.position(int(firsts[0]), int(counts[0]))], np.int64)
        else:
            positions = column.row_set.positions(firsts, counts)
        gone = np.flatnonzero(positions < 0)
        if gone.size:
            runs = ", ".join(
                f"{first}" if count == 1 else f"{first}-{first + count - 1}"
                for first, count in zip(firsts[gone[:5]].tolist(), counts[gone[:5]].tolist(), strict=True)
            )
            raise PutNotFoundError(
                f"field {name!r} of put {self._put_ids[index].hex()}: rows in {runs} were cleared or overwritten; get "
                "the rows anew"
            )
        self._positions[id(column.row_set)] = positions
        return positions

    def _place(self, extents: Extents, some: Rows | slice, counts: Rows, found: Extents) -> None:
        targets = self._targets[some]
        if isinstance(some, slice):
            extents[:] = found
        elif len(targets) == 1:
            extents[int(targets[0]) : int(targets[0]) + len(found)] = found
        else:
            extents[expand_runs(targets, counts)] = found


def _extents_of(stored: Extents, positions: Rows, counts: Rows) -> Extents:
    if len(positions) == 1:
        return stored[int(positions[0]) : int(positions[0]) + int(counts[0])]
    return stored[expand_runs(positions, counts)]
