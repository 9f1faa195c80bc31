"""Moving what is live of a put into a smaller region."""

from __future__ import annotations

import numpy as np

from tq_service.storage.blobs.pool import RegionPool
from tq_service.storage.blobs.region import Region
from tq_service.storage.cells import Rows
from tq_service.storage.index.stored_put import RowSet, StoredColumn, StoredPut, table_bytes
from tq_service.wire.columns import fixed_row_bytes


def compact(put: StoredPut, pool: RegionPool) -> StoredPut:
    """Return the put with its live cells only, in a new region; the old region is left to the caller."""
    columns = {name: column for name, column in put.columns.items() if column is not None}
    kept = {id(row_set): row_set.live_positions() for row_set in put.row_sets()}
    sizes = {name: column.bytes_of(put.region, kept[id(column.row_set)]) for name, column in columns.items()}
    tables = {
        name: 0 if fixed_row_bytes(column.spec) is not None else _table_size(column, kept[id(column.row_set)])
        for name, column in columns.items()
    }
    base_tables = {name: max(size - 8, 0) for name, size in tables.items()}
    values_start = sum(tables.values())
    region = pool.take(values_start + sum(sizes[name] - base_tables[name] for name in columns))
    row_sets = {id(row_set): RowSet.of_rows(row_set.rows_at(kept[id(row_set)])) for row_set in put.row_sets()}
    moved: dict[str, StoredColumn | None] = dict.fromkeys(put.columns)
    table_at, values_at = 0, values_start
    for name, column in columns.items():
        positions = kept[id(column.row_set)]
        value_bytes = sizes[name] - base_tables[name]
        placed = StoredColumn(column.spec, row_sets[id(column.row_set)], table_at, values_at, value_bytes)
        if tables[name]:
            _move_ragged(column, put.region, placed, region, positions)
        else:
            _move_dense(column, put.region, placed, region, positions)
        table_at += tables[name]
        values_at += value_bytes
        moved[name] = placed
    return StoredPut(
        region, moved, put.row_count, put.partition_id, put.live_bytes, for_existing_rows=put.for_existing_rows
    )


def _table_size(column: StoredColumn, positions: Rows) -> int:
    return len(positions) * table_bytes(column.spec) + 8


def _move_dense(source: StoredColumn, old: Region, target: StoredColumn, new: Region, positions: Rows) -> None:
    row_bytes = fixed_row_bytes(source.spec)
    if not row_bytes:
        return
    rows = old.array()[source.values_at :][: source.row_set.stored_count * row_bytes].reshape(-1, row_bytes)
    space = new.array()[target.values_at :][: len(positions) * row_bytes].reshape(-1, row_bytes)
    np.take(rows, positions, axis=0, out=space, mode="clip")  # "raise" would copy once more


def _move_ragged(source: StoredColumn, old: Region, target: StoredColumn, new: Region, positions: Rows) -> None:
    offsets = source.offsets(old)
    starts, ends = offsets[positions], offsets[positions + 1]
    moved = target.offsets(new)
    moved[0] = 0
    np.cumsum(ends - starts, out=moved[1:])
    target.extents(new)[:] = source.extents(old)[positions]
    heads = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + 1)))
    tails = np.append(heads[1:], len(positions)) - 1
    view, space = old.view(), new.view()
    at = target.values_at
    for start, end in zip(starts[heads].tolist(), ends[tails].tolist(), strict=True):
        space[at : at + end - start] = view[source.values_at + start : source.values_at + end]
        at += end - start
