"""Moving the live cells of a put into a smaller blob, for stores that can free parts.

planned -> a blob allocated -> copied -> in place of the put, without the cells freed during the copy
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from xxhash import xxh3_64

from tq_service.storage.cells import PutCells, Rows
from tq_service.storage.index.put import StoredColumn, StoredPut, table_bytes
from tq_service.storage.index.reading import blocks, gather, unit_of
from tq_service.wire.columns import fixed_row_bytes
from tq_service.wire.metadata import runs_of

_Moved: TypeAlias = tuple[StoredColumn, StoredColumn, Rows]
"""A column, the smaller one that it becomes, and the positions of its rows that are kept."""


class Move:
    """One put that is moved. Threads plan and copy, while cells of the put are read and freed.

    Args:
        put: the put; its blob has to be pinned until the end.

    Attributes:
        freed: cells of the put that were freed during the move.
        is_given_up: whether the copy is no longer needed.
    """

    def __init__(self, put: StoredPut) -> None:
        self._put = put.snapshot()
        self._columns: list[_Moved] = []
        self.freed: list[PutCells] = []
        self.is_given_up = False

    def plan(self) -> StoredPut:
        """Return the smaller put with the live cells only; it still has to be placed."""
        put = self._put
        kept = {id(row_set): row_set.live_positions() for row_set in put.row_sets()}
        row_sets = {id(row_set): row_set.compacted() for row_set in put.row_sets()}
        moved: dict[str, StoredColumn | None] = dict.fromkeys(put.columns)
        for name, column in put.columns.items():
            if column is not None:
                positions = kept[id(column.row_set)]
                value_bytes = column.bytes_of(put, positions) - len(positions) * table_bytes(column.spec)
                moved[name] = target = StoredColumn(column.spec, row_sets[id(column.row_set)], value_bytes)
                self._columns.append((column, target, positions))
        return StoredPut(
            moved, put.row_count, put.partition_id, for_existing_rows=put.for_existing_rows, owner=put.owner
        )

    def copy(self, smaller: StoredPut) -> int | None:
        """Copy tables and values, unless it is given up; return the checksum of a blob with a number.

        Args:
            smaller: what `plan` returned, placed.

        Raises:
            UnreadableError: the old blob cannot be read.
            OSError: the new one cannot be written.
        """
        blob, tables = smaller.values, smaller.tables()
        smaller.live_bytes = self._put.live_bytes
        for source, target, positions in self._columns:
            if fixed_row_bytes(source.spec) is None:
                offsets = source.offsets(self._put.tables())
                moved = target.offsets(tables)
                moved[0] = 0
                np.cumsum(offsets[positions + 1] - offsets[positions], out=moved[1:])
                target.extents(tables)[:] = source.extents(self._put.tables())[positions]
        digest = xxh3_64(tables) if blob.number else None
        if smaller.values_at and not blob.is_local:
            blob.write_from(tables, 0)
        at = smaller.values_at
        space = np.frombuffer(blob.view(), np.uint8) if blob.is_local else None
        for starts, sizes, unit in self._pieces():
            if self.is_given_up:
                return None
            size = int(sizes.sum())
            piece = np.empty(size, np.uint8) if space is None else space[at : at + size]
            gather(self._put.values, starts, sizes, piece, unit)
            if space is None:
                blob.write_from(piece.data, at)
            if digest is not None:
                digest.update(piece.data)
            at += size
        return None if digest is None else digest.intdigest()

    def _pieces(self) -> Iterator[tuple[Rows, Rows, int]]:
        """Yield the slices of the old blob that are kept, some at a time, with the unit they are made up of."""
        for source, _, positions in self._columns:
            firsts, counts = runs_of(positions)
            row_bytes = fixed_row_bytes(source.spec)
            if row_bytes is not None:
                starts, sizes = firsts * row_bytes, counts * row_bytes
            else:
                offsets = source.offsets(self._put.tables())
                starts = offsets[firsts]
                sizes = offsets[firsts + counts] - starts
            full = sizes > 0
            starts, sizes, unit = starts[full] + source.values_at, sizes[full], unit_of(source.spec)
            for _, some_starts, some_sizes in blocks(np.zeros_like(starts), starts, sizes, unit):
                yield some_starts, some_sizes, unit
