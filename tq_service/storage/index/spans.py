"""Finding cells: where the runs of a read lie in the blobs of their puts, and what cuts them into rows.

A read may touch thousands of puts of one row each. So what is done for each put is kept to a few attributes in a list;
the rest is done for all puts at once whose columns are of one spec, with their tables joined where those are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tq_service.errors import InvalidArgumentError, PutNotFoundError
from tq_service.storage.cells import ReadRuns, Rows, expand_runs
from tq_service.storage.index.stored_put import RowSet, StoredColumn, StoredPut
from tq_service.wire.columns import (
    ColumnShape,
    Extents,
    extent_count,
    fixed_row_bytes,
    merge_specs,
    widen_extents,
)

# Tables of columns of up to so many rows are joined, which copies them; larger ones are looked into where they are.
_SMALL_TABLE_ROWS: Final = 64
_MOST_NAMED_RUNS: Final = 5

Runs = Rows | slice
"""Which of the runs: their positions, or all of them."""

_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The bytes of one column that is read: for each run, its put, and its first byte and size in the put's blob."""

    column: ColumnShape
    put_indexes: Rows
    starts: Rows
    sizes: Rows


class SpanFinder:
    """Finds the runs that some fields share.

    Args:
        runs: what is read.
        puts: the puts that the runs are in, each once.
        put_ids: their names, for errors.
        owners: for each run its position in `puts`.

    Raises:
        InvalidArgumentError: a run goes beyond the rows of its put.
    """

    def __init__(self, runs: ReadRuns, puts: Sequence[StoredPut], put_ids: Sequence[bytes], owners: Rows) -> None:
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

    def find(self, name: str) -> Spans:
        """Return where the runs of a field are, with its header.

        Raises:
            FieldNotFoundError: a put never had the field.
            PutNotFoundError: a cell was freed.
            FieldMismatchError: puts hold different kinds of it.
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
            widened = widen_extents(found, spec, merged, row_count)
            if extents is not None and widened is not None:
                extents[_ALL if some is _ALL else expand_runs(self._targets[some], counts)] = widened
        starts += self._of_runs([column.values_at for column in columns])
        shape = ColumnShape(spec=merged, row_count=self._row_count, extents=extents, value_bytes=int(sizes.sum()))
        return Spans(shape, self._runs.put_indexes, starts, sizes)

    def _find_rows(self, name: str, row_sets: list[RowSet]) -> Rows:
        """Return the position of each run among the stored rows; fields that were freed alike share the search."""
        for known, found in self._positions:
            if known == row_sets:
                return found
        firsts, counts = self._runs.first_rows, self._runs.row_counts
        positions: Rows = firsts - self._of_runs([row_set.base for row_set in row_sets])
        ends = self._of_runs([row_set.stored_count for row_set in row_sets]) - counts
        positions[(positions < 0) | (positions > ends)] = -1
        for number, row_set in enumerate(row_sets):
            if row_set.kept is not None or row_set.live is not None:
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
        gone = gone[self._owners[gone] == put][:_MOST_NAMED_RUNS]
        firsts, lasts = self._runs.first_rows[gone], (self._runs.first_rows + self._runs.row_counts - 1)[gone]
        rows = ", ".join(
            f"{first}" if first == last else f"{first}-{last}"
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        )
        raise PutNotFoundError(
            f"field {name!r} of put {self._put_ids[put].hex()}: rows in {rows} were cleared or overwritten; get the "
            "rows anew"
        )

    def _cut(
        self, columns: Sequence[StoredColumn], numbers: Sequence[int], some: Runs, positions: Rows
    ) -> tuple[Rows, Rows, Extents]:
        """Return where runs begin in the values of their columns, their sizes, and the extents of their rows."""
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
        """Return for each run the value of its put; one number where there is one put."""
        return values[0] if len(values) == 1 else _integers(values)[self._owners]

    def _runs_of(self, numbers: Sequence[int]) -> Rows:
        """Return the positions of the runs of some puts."""
        order, bounds = self._by_put
        parts = [order[bounds[number] : bounds[number + 1]] for number in numbers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @cached_property
    def _by_put(self) -> tuple[Rows, list[int]]:
        """The runs ordered by put, and where in this order those of each put begin and end."""
        order = np.argsort(self._owners, kind="stable")
        bounds = np.searchsorted(self._owners[order], np.arange(len(self._puts) + 1))
        return order, bounds.tolist()


def _alike(columns: Sequence[StoredColumn]) -> list[list[int]]:
    """Return the puts by number, together those whose columns have one spec and no large table."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, column in enumerate(columns):
        is_large = column.row_set.stored_count > _SMALL_TABLE_ROWS and fixed_row_bytes(column.spec) is None
        groups.setdefault((id(column.spec), number if is_large else -1), []).append(number)
    return list(groups.values())


def _integers(values: list[int]) -> Rows:
    return np.array(values, np.int64)
