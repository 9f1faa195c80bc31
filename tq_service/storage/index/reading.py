"""Reads cells in the requested order, either by copying them or through shared memory, and compacts puts.

    runs of rows -> spans of blobs, with a header for each column -> views of local blobs, bytes copied by threads, or
    slices of shared memory that a client on the same host maps

A read may cover thousands of single-row puts. For each put, the code therefore only collects a few attributes in a
list. Puts whose columns have the same spec are then processed together, by joining their small tables.

Compaction plans the move, allocates a blob, copies the live cells, and replaces the old put. Cells that were freed
during the copy are afterward freed in the new put as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError, PutNotFoundError, TqError
from tq_service.schema import FieldSpec, check_passed_on
from tq_service.storage.blobs.memory import Blob, SharedMemory
from tq_service.storage.index.put import PutCells, Rows, RowSet, StoredColumn, StoredPut
from tq_service.v1.storage_service_pb2 import RowSlice, SharedColumn
from tq_service.wire.columns import (
    DEFAULT_FRAME_BYTES,
    MAX_ROWS,
    MOST_FRAME_PARTS,
    ColumnShape,
    Extents,
    extent_count,
    extents_as,
    fixed_row_bytes,
    merge_specs,
)
from tq_service.wire.metadata import CellRuns, expand_runs
from tq_service.wire.slices import RowCut, cut_rows

_FEW_CELLS: Final = 1 << 16
_SMALL_BYTES: Final = 1024
_FEW_UNITS: Final = 128  # up to this number of units per slice, copying units in NumPy is faster than slicing in Python
_FEW_SLICES: Final = 16
_BLOCK_BYTES: Final = 256 << 10  # block size for scattered slices; copying a block takes about 2 ms
_PIECE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 8 << 10  # reading this many extra bytes costs about as much as a separate read
_LARGEST_WINDOW_BYTES: Final = 8 << 20
# Reads have their own threads, so a slow disk does not block other work.
_THREADS: Final = ThreadPoolExecutor(4, thread_name_prefix="tq-read")
# Tables of columns with up to this many rows are copied into one joined table. Larger tables are used in place.
_SMALL_TABLE_ROWS: Final = 64
# Below these sizes, sending bytes is faster than sending and mapping a file descriptor, or than copying slices one by
# one.
_LEAST_COLUMN_BYTES: Final = 64 << 10
_LEAST_MEAN_SLICE_BYTES: Final = 4 << 10
_MOST_NAMED: Final = 5

Runs: TypeAlias = Rows | slice
"""A selection of runs: an array of their positions, or a slice that selects all runs."""

Octets: TypeAlias = NDArray[np.uint8]
Unreadable: TypeAlias = Callable[[bytes, Blob, OSError], TqError]
"""A function that records a put's blob as unreadable and returns the error for the reader."""

_ALL: Final = slice(None)


def open_reading(
    puts: Mapping[bytes, StoredPut],
    runs: Sequence[CellRuns],
    put_ids: Sequence[bytes],
    unreadable: Unreadable,
    slices: Sequence[RowSlice] = (),
) -> Reading:
    """Find the cells of a read, and pin their blobs; see `StorageEngine.open_read`."""
    row_count, owned = _owned(runs, len(put_ids))
    cuts = _cuts(slices, runs, row_count)
    held = _held(puts, put_ids, owned)
    return Reading(held, _find_spans(runs, held, put_ids, owned, cuts), row_count, put_ids, unreadable)


async def open_reading_in_thread(
    puts: Mapping[bytes, StoredPut],
    runs: Sequence[CellRuns],
    put_ids: Sequence[bytes],
    unreadable: Unreadable,
    slices: Sequence[RowSlice] = (),
) -> Reading:
    """Like `open_reading`, but finds the cells in a thread to avoid blocking the event loop.

    If cells are freed during this call, they are still read.
    """
    loop = asyncio.get_running_loop()
    row_count, owned = await loop.run_in_executor(_THREADS, _owned, runs, len(put_ids))
    cuts = await loop.run_in_executor(_THREADS, _cuts, slices, runs, row_count)
    held = {index: put.snapshot() for index, put in _held(puts, put_ids, owned).items()}
    for put in held.values():
        put.values.pin()
    try:
        spans = await loop.run_in_executor(_THREADS, _find_spans, runs, held, put_ids, owned, cuts)
        return Reading(held, spans, row_count, put_ids, unreadable)
    finally:  # it is safe to unpin here, because a thread that is still running reads only snapshots and their tables
        for put in held.values():
            put.values.unpin()


def is_light_read(runs: Sequence[CellRuns], slices: Sequence[RowSlice] = ()) -> bool:
    """Return whether a read covers few enough cells to find them on the event loop."""
    if any(part.HasField("second") for part in slices):
        return False  # such a slice creates a separate piece for each token
    range_count = sum(max(len(part.starts), len(part.chunks)) for part in slices)
    row_count = sum(fields.row_count * len(fields.field_names) for fields in runs)
    return row_count * max(range_count, 1) <= _FEW_CELLS


def _cuts(slices: Sequence[RowSlice], runs: Sequence[CellRuns], row_count: int) -> dict[str, RowCut]:
    """For each field that is not read in full, return the requested parts of its rows.

    Raises:
        InvalidArgumentError: a slice is invalid, its field is not read, or its field has two slices.
    """
    joined = [name for fields in runs if fields.extent_counts.size for name in fields.field_names]
    cuts: dict[str, RowCut] = {}
    if not slices and not joined:
        return cuts
    names = {name for fields in runs for name in fields.field_names}
    for part in slices:
        cut = RowCut.from_proto(part, row_count)
        for name in part.field_names:
            if name not in names or name in cuts:
                problem = "has two slices; send one" if name in cuts else "has a slice but is not read; omit the slice"
                raise InvalidArgumentError(f"field {name!r} {problem}", field="slices", metadata={"field_name": name})
            cuts[name] = cut
    return dict.fromkeys(joined, RowCut()) | cuts


def _owned(runs: Sequence[CellRuns], put_count: int) -> tuple[int, list[tuple[list[int], Rows]]]:
    """Return the number of requested rows, and the result of `_owners` for each group of fields."""
    return _check_runs(runs, put_count), [_owners(fields.put_indexes) for fields in runs]


def _held(
    puts: Mapping[bytes, StoredPut], put_ids: Sequence[bytes], owned: Sequence[tuple[list[int], Rows]]
) -> dict[int, StoredPut]:
    held = {}
    for index in dict.fromkeys(chain.from_iterable(used for used, _ in owned)):
        put = puts.get(put_ids[index])
        if put is None:
            check_passed_on("put_ids", put_ids[index])
            raise PutNotFoundError(
                f"put {put_ids[index].hex()} does not exist: it was never completed, expired without a commit, or was "
                "cleared or overwritten; locate the samples again",
                metadata={"put_id": put_ids[index].hex()},
            )
        held[index] = put
    return held


def _find_spans(
    runs: Sequence[CellRuns],
    held: Mapping[int, StoredPut],
    put_ids: Sequence[bytes],
    owned: Sequence[tuple[list[int], Rows]],
    cuts: Mapping[str, RowCut],
) -> list[Spans]:
    spans: list[Spans] = []
    for fields, (used, owners) in zip(runs, owned, strict=True):
        finder = SpanFinder(fields, [held[index] for index in used], [put_ids[index] for index in used], owners)
        spans.extend(finder.find(name, cuts.get(name)) for name in fields.field_names)
    return spans


def _check_runs(runs: Sequence[CellRuns], put_count: int) -> int:
    """Validate the runs, and return the number of requested rows."""
    names = [name for fields in runs for name in fields.field_names]
    if not names or len(set(names)) != len(names):
        raise InvalidArgumentError(
            f"runs list the fields {names}; expected at least one field and no duplicates", field="runs"
        )
    row_counts = {fields.field_names: _count_rows(fields, put_count) for fields in runs}
    if len(set(row_counts.values())) > 1:
        got = "; ".join(f"{', '.join(names)}: {count}" for names, count in row_counts.items())
        raise InvalidArgumentError(
            f"row counts differ between fields ({got}). Request the same rows of every field", field="runs"
        )
    return next(iter(row_counts.values()))


def _count_rows(fields: CellRuns, put_count: int) -> int:
    puts, firsts, counts = fields.put_indexes, fields.first_rows, fields.row_counts
    what = f"runs of {', '.join(fields.field_names)}"
    if not len(puts) == len(firsts) == len(counts):
        raise InvalidArgumentError(
            f"{what} have {len(puts)} puts, {len(firsts)} first rows and {len(counts)} counts; expected one of each "
            "per run",
            field="runs",
        )
    if not len(puts):
        raise InvalidArgumentError(f"{what} are empty; request at least one row", field="runs")
    if int(puts.min()) < 0 or int(puts.max()) >= put_count:
        raise InvalidArgumentError(f"{what} refer to a put that is not among the {put_count} listed puts", field="runs")
    if int(counts.min()) < 1 or int(counts.max()) > MAX_ROWS or int(counts.sum()) > MAX_ROWS:
        raise InvalidArgumentError(
            f"{what} must have 1 to {MAX_ROWS} rows each, and at most {MAX_ROWS} rows in total", field="runs"
        )
    return _count_cells(fields, what) if fields.extent_counts.size else int(counts.sum())


def _count_cells(fields: CellRuns, what: str) -> int:
    """Validate runs in which each row is an extent of a cell, and return the number of cells."""
    counts, lengths = fields.extent_counts, fields.extent_lengths
    row_count = int(fields.row_counts.sum())
    if int(counts.min()) < 1 or int(counts.sum()) != row_count or len(lengths) != row_count:
        raise InvalidArgumentError(
            f"{what} have {int(counts.sum())} extents in extent_counts and {len(lengths)} extent_lengths; expected "
            f"{row_count} of each (the number of rows), and at least 1 extent per cell",
            field="runs",
        )
    return len(counts)


def _owners(put_indexes: Rows) -> tuple[list[int], Rows]:
    """Return the distinct puts of the runs, and each run's index into the list of these puts."""
    if (put_indexes == put_indexes[0]).all():
        return [int(put_indexes[0])], np.zeros(len(put_indexes), np.int64)
    used, owners = np.unique(put_indexes, return_inverse=True)
    return used.tolist(), owners


class Reading(AbstractContextManager["Reading"]):
    """A read in progress. The bytes of its cells do not change until `close`, even if cells are freed or moved.

    Attributes:
        row_count: number of rows to read.
        headers: shapes of the columns, in the requested order.
    """

    def __init__(
        self,
        held: Mapping[int, StoredPut],
        spans: Sequence[Spans],
        row_count: int,
        put_ids: Sequence[bytes],
        unreadable: Unreadable,
    ) -> None:
        self.row_count = row_count
        self.headers = tuple(span.column for span in spans)
        self._spans = spans
        self._blobs = {index: put.values for index, put in held.items()}
        self._put_ids = put_ids
        self._unreadable = unreadable
        self._work: asyncio.Future[Any] | None = None
        for blob in self._blobs.values():
            blob.pin()

    async def parts(self, without: Collection[int] = ()) -> AsyncIterator[Iterable[memoryview]]:
        """Yield, in order, the bytes of all columns except `without`. Each part is valid only until the next iteration.

        If all blobs are in memory and there are few slices, a single part is yielded without waiting. Otherwise,
        threads read the parts.

        Raises:
            DataLossError: bytes cannot be read.
            UnavailableError: bytes are temporarily unavailable.
        """
        chunks = self.chunks(without)
        if all(blob.is_local for blob in self._blobs.values()) and (
            sum(len(span.sizes) for span in self._spans) <= MOST_FRAME_PARTS
        ):
            yield chunks
            return
        loop = asyncio.get_running_loop()
        while True:
            self._work = work = loop.run_in_executor(_THREADS, _next_part, chunks)
            try:
                part = await asyncio.shield(work)
            except UnreadableError as error:
                raise self.note_unreadable(error) from error.cause
            if not part:
                return
            yield part

    def chunks(self, without: Collection[int] = ()) -> Iterator[memoryview]:
        """Yield the bytes of all columns not in `without`, valid until `close`. Blocks if any blobs are in files."""
        for index, span in enumerate(self._spans):
            if index not in without:
                yield from self._column_chunks(span)

    def value_bytes(self, without: Collection[int] = ()) -> int:
        """Return the total size in bytes of all columns not in `without`."""
        return sum(column.value_bytes for index, column in enumerate(self.headers) if index not in without)

    async def gather_list(self, without: Collection[int] = ()) -> GatherList:
        """Return the slices of all columns not in `without`. Threads may use the slices until `close`."""
        spans = [span for index, span in enumerate(self._spans) if index not in without]
        if sum(len(span.sizes) for span in spans) <= MOST_FRAME_PARTS:
            return GatherList(self._blobs, spans)
        self._work = work = asyncio.get_running_loop().run_in_executor(_THREADS, GatherList, self._blobs, spans)
        return await asyncio.shield(work)

    def note_unreadable(self, error: UnreadableError) -> TqError:
        """Record that a put's bytes could not be read, and return the error for the reader."""
        put_id = next(self._put_ids[index] for index, blob in self._blobs.items() if blob is error.blob)
        return self._unreadable(put_id, error.blob, error.cause)

    def shared_part(self, *, with_regions: bool) -> tuple[list[SharedMemory], list[SharedColumn]]:
        """Return the columns that are entirely in shared memory and whose slices are large enough to be worth mapping.

        Args:
            with_regions: whether to include columns stored in regions. If false, only columns in sealed memory are
                included.

        Returns:
            The memory that contains the columns, pinned until `close`, and each column's position in this memory.
        """
        memories: dict[SharedMemory, int] = {}  # index of each memory in the result
        columns = []
        for index, span in enumerate(self._spans):
            if span.column.value_bytes >= max(_LEAST_COLUMN_BYTES, _LEAST_MEAN_SLICE_BYTES * len(span.sizes)):
                distinct, put_of = np.unique(span.put_indexes, return_inverse=True)
                shared = [self._blobs[put].shared for put in distinct.tolist()]
                found = [each for each in shared if each is not None and (with_regions or not each.number)]
                if len(found) == len(shared):
                    own = np.array([memories.setdefault(each, len(memories)) for each in found])
                    columns.append(
                        SharedColumn(
                            column_index=index,
                            memory_indexes=own[put_of].tolist(),
                            starts=span.starts.tolist(),
                            sizes=span.sizes.tolist(),
                        )
                    )
        return list(memories), columns

    def close(self) -> None:
        """Unpin the blobs that contain the cells. Idempotent."""
        blobs, self._blobs, self._spans = self._blobs, {}, ()

        def unpin(work: asyncio.Future[Any] | None = None) -> None:
            if work is not None and not work.cancelled():
                work.exception()  # no caller waits for the result anymore
            for blob in blobs.values():
                blob.unpin()

        if self._work is None or self._work.done():
            unpin()
        else:
            self._work.add_done_callback(unpin)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _column_chunks(self, span: Spans) -> Iterator[memoryview]:
        puts, starts, sizes, unit = span.put_indexes, span.starts, span.sizes, span.unit
        blobs = {put: self._blobs[put] for put in np.unique(puts).tolist()}
        if _are_scattered(sizes, unit) or not all(blob.is_local for blob in blobs.values()):
            for some in _blocks(puts, starts, sizes, unit):
                yield _gathered(blobs, *some, unit)
            return
        views = {put: blob.view() for put, blob in blobs.items()}
        for put, start, end in zip(puts.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
            yield views[put][start:end]


class GatherList:
    """The slices of memory or files that make up concatenated columns. Any byte range can be looked up.

    A gather list may be used in any thread while its blobs are pinned.

    Args:
        blobs: blobs that contain the slices, by put index.
        spans: spans of the columns.

    Attributes:
        is_local: whether all slices are in this process's memory.
    """

    def __init__(self, blobs: Mapping[int, Blob], spans: Sequence[Spans]) -> None:
        self._blobs = blobs
        self._puts = np.concatenate([span.put_indexes for span in spans])
        self._starts = np.concatenate([span.starts for span in spans])
        self._sizes = np.concatenate([span.sizes for span in spans])
        self._ends = np.cumsum(self._sizes)
        self.is_local = all(blob.is_local for blob in blobs.values())
        self._addresses = self._starts
        if self.is_local:
            used, owners = np.unique(self._puts, return_inverse=True)
            bases = [np.frombuffer(blobs[put].view(), np.uint8).ctypes.data for put in used.tolist()]
            self._addresses = _integers(bases)[owners] + self._starts

    def _clip(self, values: Rows, start: int, end: int) -> tuple[Rows, Rows]:
        """Clip the slices to a range, and return the starts (or addresses) and sizes of the slices that remain."""
        first, last = self._between(start, end)
        values, sizes = values[first:last].copy(), self._sizes[first:last].copy()
        skipped = start - (int(self._ends[first]) - int(sizes[0]))
        values[0] += skipped
        sizes[0] -= skipped
        sizes[-1] -= int(self._ends[last - 1]) - end
        return values, sizes

    def _between(self, start: int, end: int) -> tuple[int, int]:
        """Return the index of the first slice in a range, and the index after the last slice."""
        return int(np.searchsorted(self._ends, start, "right")), int(np.searchsorted(self._ends, end, "left")) + 1

    def addresses(self, start: int, end: int) -> tuple[Rows, Rows]:
        """Return the addresses and sizes of the slices in a range. Requires `is_local`."""
        return self._clip(self._addresses, start, end)

    def chunks(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, gathered into blocks.

        Raises:
            UnreadableError: the bytes cannot be read.
        """
        first, last = self._between(start, end)
        for some in _blocks(self._puts[first:last], *self._clip(self._starts, start, end), 1):
            yield _gathered(self._blobs, *some, 1)


def _next_part(chunks: Iterator[memoryview]) -> list[memoryview]:
    """Return as many chunks as fit in a frame, or an empty list if there are no more chunks."""
    part, size = [], 0
    for chunk in chunks:
        part.append(chunk)
        size += len(chunk)
        if size >= DEFAULT_FRAME_BYTES or len(part) == MOST_FRAME_PARTS:
            break
    return part


def _gathered(blobs: Mapping[int, Blob], puts: Rows, starts: Rows, sizes: Rows, unit: int) -> memoryview:
    """Gather slices into one buffer. Slices are copied put by put, and then reordered if necessary."""
    together = np.empty(int(sizes.sum()), np.uint8)
    by_put = np.argsort(puts, kind="stable")
    bounds = np.flatnonzero(np.diff(puts[by_put])) + 1
    at = 0
    for some in np.split(by_put, bounds):
        size = int(sizes[some].sum())
        gather(blobs[int(puts[some[0]])], starts[some], sizes[some], together[at : at + size], unit)
        at += size
    if not bounds.size or bool((by_put[1:] > by_put[:-1]).all()):
        return together.data
    in_order, begins = np.empty_like(together), np.empty_like(starts)
    begins[by_put] = np.cumsum(sizes[by_put]) - sizes[by_put]
    _gather_from(together, begins, sizes, in_order, unit)
    return in_order.data


def _join_neighbours(puts: Rows, starts: Rows, sizes: Rows) -> tuple[Rows, Rows, Rows]:
    """Merge adjacent slices. Return the puts, starts and sizes of the resulting slices."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The location of a column's bytes, as slices.

    Each slice is defined by a put and by a start and size in the put's blob.

    Slice sizes, and the distances between starts within the same put, are multiples of `unit` bytes.
    """

    column: ColumnShape
    put_indexes: Rows
    starts: Rows
    sizes: Rows
    unit: int


class SpanFinder:
    """Finds the spans of fields that share the same runs.

    Args:
        runs: the runs to read.
        puts: the distinct puts that contain the runs.
        put_ids: ids of the puts, for error messages.
        owners: for each run, the index of its put in `puts`.

    Raises:
        InvalidArgumentError: a run extends beyond the rows of its put.
    """

    def __init__(self, runs: CellRuns, puts: Sequence[StoredPut], put_ids: Sequence[bytes], owners: Rows) -> None:
        self._runs = runs
        self._puts = puts
        self._put_ids = put_ids
        self._owners = owners
        self._row_count = int(runs.row_counts.sum())
        self._targets = np.cumsum(runs.row_counts) - runs.row_counts
        self._positions: list[tuple[list[RowSet], Rows]] = []
        limits = self._of_runs([put.row_count for put in puts]) - runs.row_counts
        wrong = np.flatnonzero((runs.first_rows < 0) | (runs.first_rows > limits))
        if wrong.size:
            first, count, put = (int(of_run[wrong[0]]) for of_run in (runs.first_rows, runs.row_counts, owners))
            raise InvalidArgumentError(
                f"rows {first} to {first + count - 1} are outside put {put_ids[put].hex()}, which has "
                f"{puts[put].row_count} rows",
                field="runs",
            )

    def find(self, name: str, cut: RowCut | None = None) -> Spans:
        """Return the spans and the header of a field, either for full rows or for the requested parts of rows.

        Raises:
            FieldNotFoundError: one of the puts never contained the requested field.
            PutNotFoundError: a cell was freed.
            FieldMismatchError: the field's specs in different puts are incompatible.
            InvalidArgumentError: the field's rows cannot be sliced as requested.
        """
        columns = [put.column(name, put_id) for put, put_id in zip(self._puts, self._put_ids, strict=True)]
        merged = merge_specs(list({id(column.spec): column.spec for column in columns}.values()))
        positions = self._find_rows(name, [column.row_set for column in columns])
        starts, sizes = np.empty_like(positions), np.empty_like(positions)
        width = extent_count(merged)
        extents = np.empty((self._row_count, width), np.int64) if width else None
        for numbers in _alike(columns):
            some = _ALL if len(numbers) == len(columns) else self._runs_of(numbers)
            counts = self._runs.row_counts[some]
            spec = columns[numbers[0]].spec
            row_bytes = fixed_row_bytes(spec)
            found = None
            if row_bytes is not None:
                starts[some], sizes[some] = positions[some] * row_bytes, counts * row_bytes
            else:
                starts[some], sizes[some], found = self._cut(columns, numbers, some, positions[some])
            row_count = self._row_count if some is _ALL else int(counts.sum())
            widened = extents_as(merged, spec, found, row_count)
            if extents is not None and widened is not None:
                extents[_ALL if some is _ALL else expand_runs(self._targets[some], counts)] = widened
        starts += self._of_runs([column.values_at for column in columns])
        shape = ColumnShape(spec=merged, row_count=self._row_count, extents=extents, value_bytes=int(sizes.sum()))
        if cut is not None:
            return self._cut_rows(shape, starts, cut)
        return Spans(shape, *_join_neighbours(self._runs.put_indexes, starts, sizes), _unit_of(merged))

    def _cut_rows(self, column: ColumnShape, starts: Rows, cut: RowCut) -> Spans:
        """Return the spans of the requested parts of rows, given the start of each run's values."""
        runs = self._runs
        pieces = cut_rows(column, cut, runs.extent_counts, runs.extent_lengths)
        offsets = column.row_offsets()[:-1]
        row_starts = np.repeat(starts - offsets[self._targets], runs.row_counts) + offsets
        puts = np.repeat(runs.put_indexes, runs.row_counts)[pieces.rows]
        found = _join_neighbours(puts, row_starts[pieces.rows] + pieces.starts, pieces.sizes)
        return Spans(pieces.column, *found, pieces.unit)

    def _find_rows(self, name: str, row_sets: list[RowSet]) -> Rows:
        """Return the position of each run among the stored rows. Results are cached for each list of row sets."""
        for known, found in self._positions:
            if known == row_sets:
                return found
        firsts, counts = self._runs.first_rows, self._runs.row_counts
        positions = firsts.copy()
        for number, row_set in enumerate(row_sets):
            if row_set.rows is not None or row_set.live is not None:
                some = self._runs_of([number])
                positions[some] = row_set.positions(firsts[some], counts[some])
        self._check_found(name, positions)
        self._positions.append((row_sets, positions))
        return positions

    def _check_found(self, name: str, positions: Rows) -> None:
        gone = np.flatnonzero(positions < 0)
        if not gone.size:
            return
        put = int(self._owners[gone[0]])
        gone = gone[self._owners[gone] == put][:_MOST_NAMED]
        firsts, lasts = self._runs.first_rows[gone], (self._runs.first_rows + self._runs.row_counts - 1)[gone]
        rows = ", ".join(
            f"{first}" if first == last else f"{first}-{last}"
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        )
        raise PutNotFoundError(
            f"field {name!r} of put {self._put_ids[put].hex()}: rows within {rows} were cleared or overwritten; "
            "get the rows again",
            metadata={"put_id": self._put_ids[put].hex(), "field_name": name},
        )

    def _cut(
        self, columns: Sequence[StoredColumn], numbers: Sequence[int], some: Runs, positions: Rows
    ) -> tuple[Rows, Rows, Extents]:
        """Return each run's start in the column's values, each run's size, and the extents of all rows."""
        tables = [columns[number].table(self._puts[number].tables()) for number in numbers]
        stored = [columns[number].row_set.stored_count for number in numbers]
        width = extent_count(columns[numbers[0]].spec)
        counts = self._runs.row_counts[some]
        if len(tables) == 1:
            joined, rows_at = tables[0], positions
            extents_at = positions * width + (stored[0] + 1)
        else:
            joined = np.concatenate(tables)
            place = np.zeros(len(columns), np.int64)
            place[numbers] = np.arange(len(numbers))
            owners = place[self._owners[some]]
            lengths = _integers([len(table) for table in tables])
            tables_at = (np.cumsum(lengths) - lengths)[owners]
            rows_at = tables_at + positions
            extents_at = tables_at + (_integers(stored) + 1)[owners] + positions * width
        begins = joined[rows_at]
        sizes = joined[rows_at + counts] - begins
        return begins, sizes, joined[expand_runs(extents_at, counts * width)].reshape(-1, width)

    def _of_runs(self, values: list[int]) -> Rows | int:
        """Return, for each run, the value of the run's put, or a single value if there is only one put."""
        return values[0] if len(values) == 1 else _integers(values)[self._owners]

    def _runs_of(self, numbers: Sequence[int]) -> Rows:
        """Return the positions of the runs that belong to the puts with the given numbers."""
        order, bounds = self._by_put
        parts = [order[bounds[number] : bounds[number + 1]] for number in numbers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @cached_property
    def _by_put(self) -> tuple[Rows, list[int]]:
        """Positions of all runs, ordered by put, and the boundaries between different puts' runs in this order."""
        order = np.argsort(self._owners, kind="stable")
        bounds = np.searchsorted(self._owners[order], np.arange(len(self._puts) + 1))
        return order, bounds.tolist()


def _alike(columns: Sequence[StoredColumn]) -> list[list[int]]:
    """Group put numbers by column spec. A column with a large table gets a group of its own."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, column in enumerate(columns):
        is_large = column.row_set.stored_count > _SMALL_TABLE_ROWS and fixed_row_bytes(column.spec) is None
        groups.setdefault((id(column.spec), number if is_large else -1), []).append(number)
    return list(groups.values())


def _integers(values: list[int]) -> Rows:
    return np.array(values, np.int64)


# Copying slices of blobs. Slices in files, and many or scattered slices, are copied in threads.


class UnreadableError(Exception):
    """The bytes of a blob cannot be read."""

    def __init__(self, blob: Blob, cause: OSError) -> None:
        super().__init__(blob, cause)
        self.blob = blob
        self.cause = cause


def _unit_of(spec: FieldSpec) -> int:
    """Return a number of bytes that evenly divides both the size and the start offset of every row in a field."""
    row_bytes = fixed_row_bytes(spec)
    return row_bytes if row_bytes and row_bytes <= _SMALL_BYTES else spec.itemsize


def _are_scattered(sizes: Rows, unit: int) -> bool:
    """Return whether slices are so numerous and small that gathering them is cheaper than creating a view of each."""
    mean_most = min(_SMALL_BYTES, _FEW_UNITS * unit)
    return len(sizes) >= _FEW_SLICES and int(sizes.sum()) < mean_most * len(sizes)


def _blocks(puts: Rows, starts: Rows, sizes: Rows, unit: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Split slices into blocks, each gathered in a single step. Large slices are split at unit boundaries.

    Args:
        puts: for each slice, the put that contains it.
        starts: start of each slice in its put's blob.
        sizes: size of each slice in bytes.
        unit: common divisor of the sizes, in bytes (see `gather`).

    Yields:
        For each block, the puts, starts and sizes of its slices.
    """
    most_bytes = max((_BLOCK_BYTES if _are_scattered(sizes, unit) else _PIECE_BYTES) // unit, 1) * unit
    counts = -(-sizes // most_bytes)
    if (counts > 1).any():
        pieces = expand_runs(np.zeros_like(counts), counts) * most_bytes
        puts, starts = np.repeat(puts, counts), np.repeat(starts, counts) + pieces
        sizes = np.minimum(np.repeat(sizes, counts) - pieces, most_bytes)
    ends = np.cumsum(sizes)
    first = done = 0
    while first < len(sizes):
        last = max(int(np.searchsorted(ends, done + most_bytes, "right")), first + 1)
        yield puts[first:last], starts[first:last], sizes[first:last]
        first, done = last, int(ends[last - 1])


def gather(blob: Blob, starts: Rows, sizes: Rows, target: Octets, unit: int = 1) -> None:
    """Copy slices of a blob to consecutive positions in `target`. Safe to call in any thread while the blob is pinned.

    Args:
        blob: the blob to read.
        starts: start of each slice. The distances between starts are multiples of `unit`.
        sizes: size of each slice in bytes, a multiple of `unit`.
        target: memory whose size equals the total size of the slices.
        unit: common divisor of the slice sizes, in bytes.

    Raises:
        UnreadableError: the bytes cannot be read.
    """
    if blob.is_local:
        _gather_from(np.frombuffer(blob.view(), np.uint8), starts, sizes, target, unit)
        return
    first = int(starts.min())
    window_bytes = int((starts + sizes).max()) - first
    try:
        if len(sizes) > 1 and window_bytes <= min(_LARGEST_WINDOW_BYTES, max(target.size, _READ_BYTES * len(sizes))):
            window = np.empty(window_bytes, np.uint8)
            blob.read_into(window.data, first)
            _gather_from(window, starts - first, sizes, target, unit)
            return
        ends = np.cumsum(sizes)
        targets = (target.data[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True))
        blob.read_slices(zip(starts.tolist(), targets, strict=True))
    except TqError:  # a TqError may also be an OSError
        raise
    except OSError as error:
        raise UnreadableError(blob, error) from error


def _gather_from(source: Octets, starts: Rows, sizes: Rows, target: Octets, unit: int) -> None:
    """Copy slices of memory into `target` one after another; see `gather`."""
    if _are_scattered(sizes, unit):
        base = int(starts[0]) % unit
        table = source[base : base + (source.size - base) // unit * unit].reshape(-1, unit)
        rows = expand_runs((starts - base) // unit, sizes // unit)
        # With mode "raise", NumPy would create an additional copy of the rows.
        np.take(table, rows, axis=0, out=target.reshape(-1, unit), mode="clip")
        return
    at = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        target[at : at + size] = source[start : start + size]
        at += size


# Compaction


class Move:
    """The compaction of a put. Threads copy the put's live cells to a smaller put.

    Args:
        put_id: id of the put.
        put: current state of the put. Its blob must stay pinned until the move ends.

    Attributes:
        put_id: id of the put.
        freed: cells of the put that were freed during the move.
        is_given_up: whether copying should stop because the put was removed or the engine was closed.
    """

    def __init__(self, put_id: bytes, put: StoredPut) -> None:
        self.put_id = put_id
        self._put = put.snapshot()
        self._spans: dict[str, Spans] = {}
        self.freed: list[PutCells] = []
        self.is_given_up = False

    def plan(self) -> StoredPut:
        """Return a put that contains only the live cells. The new put is not stored in a blob yet."""
        put = self._put
        columns: dict[str, StoredColumn | None] = dict.fromkeys(put.columns)
        for row_set in put.row_sets():
            kept, names = row_set.compacted(), tuple(put.members(row_set))
            rows = np.arange(put.row_count) if kept.rows is None else kept.rows
            runs = CellRuns.of_rows(names, np.zeros_like(rows), rows)
            finder = SpanFinder(runs, [put], [b""], runs.put_indexes)
            for name in names:
                shape = (spans := finder.find(name)).column
                self._spans[name], columns[name] = spans, StoredColumn(shape.spec, kept, shape.value_bytes)
        return StoredPut(
            columns, put.row_count, put.partition_id, for_existing_rows=put.for_existing_rows, owner=put.owner
        )

    def copy(self, smaller: StoredPut) -> None:
        """Copy tables and values. Stop early if the move has been abandoned.

        Args:
            smaller: the put returned by `plan`, now placed in a blob.

        Raises:
            UnreadableError: the old blob cannot be read.
            OSError: the new blob cannot be written.
        """
        found = [self._spans[column.spec.name] for column in smaller.left_columns()]
        smaller.fill_tables([spans.column for spans in found])
        blob, at = smaller.values, smaller.values_at
        if at and not blob.is_local:
            blob.write_from(smaller.tables(), 0)
        space = np.frombuffer(blob.view(), np.uint8) if blob.is_local else None
        for spans in found:
            unit = spans.unit
            for _, starts, sizes in _blocks(spans.put_indexes, spans.starts, spans.sizes, unit):
                if self.is_given_up:
                    return
                size = int(sizes.sum())
                piece = np.empty(size, np.uint8) if space is None else space[at : at + size]
                gather(self._put.values, starts, sizes, piece, unit)
                if space is None:
                    blob.write_from(piece.data, at)
                at += size
