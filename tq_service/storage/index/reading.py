"""Reading cells in the order asked for: headers first, then bytes, as views on local blobs or as stores send them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from types import TracebackType
from typing import Final

import numpy as np

from tq_service.errors import InvalidArgumentError, PutNotFoundError
from tq_service.storage.blobs.base import Blob
from tq_service.storage.cells import ReadRuns, Rows, expand_runs
from tq_service.storage.index.spans import SpanFinder, Spans
from tq_service.storage.index.stored_put import StoredPut
from tq_service.wire.columns import MAX_ROWS, fixed_row_bytes

_GATHER_BELOW_BYTES: Final = 1024
_GATHER_FROM_SLICES: Final = 16
_GATHER_BLOCK_BYTES: Final = 1 << 20


class Reading:
    """Cells being read. What it reads stays as it is until `close`, whatever is freed or moved meanwhile.

    Attributes:
        row_count: number of rows.
        headers: the columns, in the order asked for.
    """

    def __init__(self, blobs: Mapping[int, Blob], spans: Sequence[Spans], row_count: int) -> None:
        self.row_count = row_count
        self.headers = tuple(span.column for span in spans)
        self._spans = spans
        self._blobs = dict(blobs)
        for blob in self._blobs.values():
            blob.pin()

    async def parts(self, without: Collection[int] = ()) -> AsyncIterator[Iterable[memoryview]]:
        """Yield the bytes of all columns in order, but for those left out, as chunks to be used before the next part.

        Where all of them have a local view there is one part, and nothing is waited for.
        """
        if all(blob.store.local_view for blob in self._blobs.values()):
            yield self.chunks(without)
            return
        for index, span in enumerate(self._spans):
            if index in without:
                continue
            slices = zip(*(array.tolist() for array in _join_neighbours(span)), strict=True)
            for put, some in groupby(slices, key=itemgetter(0)):
                blob = self._blobs[put]
                async for data in blob.store.read(blob, [(start, size) for _, start, size in some]):
                    yield (data,)

    def chunks(self, without: Collection[int] = ()) -> Iterator[memoryview]:
        """Yield the same as views, valid until `close`; only where all blobs have a local view."""
        for index, span in enumerate(self._spans):
            if index not in without:
                yield from self._column_chunks(span)

    def slices(self, column_index: int) -> tuple[Rows, Rows, Rows]:
        """Return what makes up a column: the puts of its slices, where they start in their blobs, and their sizes."""
        return _join_neighbours(self._spans[column_index])

    def blob(self, put_index: int) -> Blob:
        """Return the blob of the values of a put; it stays until `close`."""
        return self._blobs[put_index]

    def close(self) -> None:
        """Let go of what was read; a second call does nothing."""
        blobs, self._blobs, self._spans = self._blobs, {}, ()
        for blob in blobs.values():
            blob.unpin()

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _column_chunks(self, span: Spans) -> Iterator[memoryview]:
        puts, starts, sizes = _join_neighbours(span)
        row_bytes = fixed_row_bytes(span.column.spec)
        small = len(starts) >= _GATHER_FROM_SLICES and int(sizes.sum()) < _GATHER_BELOW_BYTES * len(starts)
        if row_bytes and small:
            bounds = np.flatnonzero(puts[1:] != puts[:-1]) + 1
            for some in np.split(np.arange(len(puts)), bounds) if len(bounds) * 4 < len(puts) else ():
                yield from self._gathered(self._blobs[int(puts[some[0]])], starts[some], sizes[some], row_bytes)
            if len(bounds) * 4 < len(puts):
                return
        views = {put: self._blobs[put].view() for put in np.unique(puts).tolist()}
        for put, start, end in zip(puts.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
            yield views[put][start:end]

    def _gathered(self, blob: Blob, starts: Rows, sizes: Rows, row_bytes: int) -> Iterator[memoryview]:
        """Yield scattered rows of a dense column copied together, since many tiny views cost more than the copy."""
        base = int(starts[0]) % row_bytes
        held = np.frombuffer(blob.view(), np.uint8)[base:]
        table = held[: len(held) // row_bytes * row_bytes].reshape(-1, row_bytes)
        rows = expand_runs((starts - base) // row_bytes, sizes // row_bytes)
        block = max(_GATHER_BLOCK_BYTES // row_bytes, 1)
        for first in range(0, len(rows), block):
            yield np.take(table, rows[first : first + block], axis=0).reshape(-1).data


def _join_neighbours(span: Spans) -> tuple[Rows, Rows, Rows]:
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


def open_reading(puts: Mapping[bytes, StoredPut], runs: Sequence[ReadRuns], put_ids: Sequence[bytes]) -> Reading:
    """Find the cells of a read and pin their blobs; see `StorageEngine.open_read`."""
    row_count = _check_runs(runs, len(put_ids))
    held: dict[int, StoredPut] = {}
    spans: list[Spans] = []
    for fields in runs:
        used, owners = _owners(fields.put_indexes)
        for index in used:
            if index not in held:
                held[index] = _find_put(puts, put_ids[index])
        finder = SpanFinder(fields, [held[index] for index in used], [put_ids[index] for index in used], owners)
        spans.extend(finder.find(name) for name in fields.field_names)
    return Reading({index: put.values for index, put in held.items()}, spans, row_count)


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


def _owners(put_indexes: Rows) -> tuple[list[int], Rows]:
    """Return the puts of runs, each once, and for each run the position of its put among them."""
    if (put_indexes == put_indexes[0]).all():
        return [int(put_indexes[0])], np.zeros(len(put_indexes), np.int64)
    used, owners = np.unique(put_indexes, return_inverse=True)
    return used.tolist(), owners
