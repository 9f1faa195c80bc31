"""Moving what is live of a put into a smaller blob, where stores can free parts."""

from __future__ import annotations

import numpy as np

from tq_service.storage.blobs.base import BlobStore
from tq_service.storage.cells import Rows
from tq_service.storage.index.put import StoredColumn, StoredPut, table_bytes
from tq_service.wire.columns import fixed_row_bytes


def compact(put: StoredPut, store: BlobStore) -> StoredPut:
    """Return the put with its live cells only, in a new blob; the old one is left to the caller.

    Args:
        put: what is compacted.
        store: where the new blob is allocated.

    Raises:
        OSError: there is no space for it, or the old one cannot be read.
    """
    kept = {id(row_set): row_set.live_positions() for row_set in put.row_sets()}
    row_sets = {id(row_set): row_set.compacted() for row_set in put.row_sets()}
    moved: dict[str, StoredColumn | None] = dict.fromkeys(put.columns)
    for name, column in put.columns.items():
        if column is not None:
            positions = kept[id(column.row_set)]
            value_bytes = column.bytes_of(put, positions) - len(positions) * table_bytes(column.spec)
            moved[name] = StoredColumn(column.spec, row_sets[id(column.row_set)], value_bytes)
    smaller = StoredPut(
        moved, put.row_count, put.partition_id, for_existing_rows=put.for_existing_rows, owner=put.owner
    )
    values = store.allocate_now(smaller.blob_bytes(store))
    values.charge = smaller.charge_in(store)
    smaller.place(values)
    smaller.live_bytes = put.live_bytes
    for source, target in zip(put.columns.values(), moved.values(), strict=True):
        if source is not None and target is not None:
            move = _move_ragged if fixed_row_bytes(source.spec) is None else _move_dense
            move(source, put, target, smaller, kept[id(source.row_set)])
    return smaller


def _move_dense(source: StoredColumn, old: StoredPut, target: StoredColumn, new: StoredPut, positions: Rows) -> None:
    row_bytes = fixed_row_bytes(source.spec)
    if not row_bytes:
        return
    stored = source.row_set.stored_count
    rows = np.frombuffer(old.values.view(), np.uint8, stored * row_bytes, source.values_at)
    space = np.frombuffer(new.values.view(), np.uint8, target.value_bytes, target.values_at)
    # mode "raise" would copy once more
    np.take(rows.reshape(-1, row_bytes), positions, axis=0, out=space.reshape(-1, row_bytes), mode="clip")


def _move_ragged(source: StoredColumn, old: StoredPut, target: StoredColumn, new: StoredPut, positions: Rows) -> None:
    offsets = source.offsets(old.tables())
    starts, ends = offsets[positions], offsets[positions + 1]
    moved = target.offsets(new.tables())
    moved[0] = 0
    np.cumsum(ends - starts, out=moved[1:])
    target.extents(new.tables())[:] = source.extents(old.tables())[positions]
    heads = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1] + 1)))
    tails = np.append(heads[1:], len(positions)) - 1
    view, space = old.values.view(), new.values.view()
    at = target.values_at
    for start, end in zip(starts[heads].tolist(), ends[tails].tolist(), strict=True):
        space[at : at + end - start] = view[source.values_at + start : source.values_at + end]
        at += end - start
