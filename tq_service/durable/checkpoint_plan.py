"""What a checkpoint copies: the cells of partitions in blocks, and the partitions with these blocks for puts.

A block is what one storage service holds of some fields that were put together, for samples in the order of the table:
a few MiB, from any number of puts. When it is restored it becomes one put. So a million small puts come back as a few
hundred, wherever there is room for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.partition import PartitionSnapshot
from tq_service.domain.plan import Indexes
from tq_service.domain.tables.cells import CELL_COLUMN, NOT_PRODUCED, CellsSnapshot, Put, cells_of, slots_and_rows
from tq_service.domain.tables.table import ColumnSnapshot, TableSnapshot
from tq_service.durable.pace import Pace
from tq_service.storage.cells import ReadRuns

BLOCK_BYTES: Final = 4 << 20
_MOST_ROWS: Final = 1 << 16
_MOST_PUTS: Final = 256  # finding the cells of so many holds the loop for about a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells of one storage service that are read together.

    Attributes:
        partition_id: their partition.
        slot: of the partition's put table, once the checkpoint is restored.
        storage_id: the storage service that holds them.
        boot_id: its boot.
        put_ids: the puts that hold them.
        runs: where they are in these puts.
        global_indexes: their samples `(n,)`.
    """

    partition_id: str
    slot: int
    storage_id: str
    boot_id: bytes
    put_ids: Sequence[bytes]
    runs: ReadRuns
    global_indexes: Indexes


class PartitionPlan:
    """What a checkpoint copies of one partition.

    Attributes:
        blocks: its cells.
    """

    def __init__(self, partition: PartitionSnapshot) -> None:
        """Read the cells of a partition, which takes about 50 ms for a million samples."""
        self._partition = partition
        rows, puts = partition.tables["rows"], partition.tables["puts"]
        self._read_puts(puts)
        self._indexes: Indexes = rows.columns["index"].values()
        self._cells: dict[str, Indexes] = {}
        self.blocks: list[Block] = []
        for names, cells in _put_together(CellsSnapshot.of(rows, puts).cells):
            self._add_blocks(names, cells)
        self._value_bytes = np.zeros(len(self.blocks), np.int64)

    def note_size(self, block: Block, value_bytes: int) -> None:
        """Take note of the bytes of a block, once they were read."""
        self._value_bytes[block.slot] = value_bytes

    def partition(self, first_number: int) -> PartitionSnapshot:
        """Return the partition with its blocks for puts, once they all were read.

        Its puts have the numbers of their blocks in the checkpoint for ids, of which the first is given.
        """
        count = len(self.blocks)
        puts = np.full(count, None, object)
        for slot in range(count):
            puts[slot] = Put("", b"", put_id_of(first_number + slot))
        sizes = np.array([block.global_indexes.size * len(block.runs.field_names) for block in self.blocks], np.int64)
        columns = {"put": puts, "cells": sizes, "made": sizes, "bytes": self._value_bytes}
        rows = self._partition.tables["rows"]
        changed = {"index": self._indexes} | {CELL_COLUMN + name: cells for name, cells in self._cells.items()}
        return replace(
            self._partition,
            tables={
                **self._partition.tables,
                "rows": replace(rows, columns={**rows.columns, **_snapshots(changed)}),
                "puts": TableSnapshot(size=count, columns=_snapshots(columns)),
            },
        )

    def _read_puts(self, table: TableSnapshot) -> None:
        """Read what is known of the puts, by slot."""
        self._puts: list[Put | None] = []
        numbers: dict[tuple[str, bytes], int] = {}
        storage_of: list[int] = []
        pace = Pace()
        for block in table.columns["put"].blocks():
            some: list[Put | None] = block.tolist()
            self._puts += some
            storage_of += [-1 if put is None else numbers.setdefault(put[:2], len(numbers)) for put in some]
            pace.step()
        self._storages = list(numbers)
        self._storage_of: Indexes = np.array(storage_of, np.int64)
        counts = np.maximum(table.columns["cells"].values(), 1)
        self._cell_bytes: NDArray[np.float64] = table.columns["bytes"].values() / counts  # of parts of a put a guess

    def _add_blocks(self, names: tuple[str, ...], cells: Indexes) -> None:
        renamed = np.full(cells.size, NOT_PRODUCED, np.int64)
        self._cells |= dict.fromkeys(names, renamed)
        produced = np.flatnonzero(cells >= 0)
        slots, rows = slots_and_rows(cells[produced])
        for number, (storage_id, boot_id) in enumerate(self._storages):
            mine = np.flatnonzero(self._storage_of[slots] == number)
            sizes = self._cell_bytes[slots[mine]] * len(names)
            for some in _cut(sizes, slots[mine]):
                chosen = mine[some]
                slot = len(self.blocks)
                put_ids, runs = self._runs(names, slots[chosen], rows[chosen])
                positions = produced[chosen]
                renamed[positions] = cells_of(slot, np.arange(positions.size))
                self.blocks.append(
                    Block(
                        partition_id=self._partition.facts.partition_id,
                        slot=slot,
                        storage_id=storage_id,
                        boot_id=boot_id,
                        put_ids=put_ids,
                        runs=runs,
                        global_indexes=self._indexes[positions],
                    )
                )

    def _runs(self, names: tuple[str, ...], slots: Indexes, rows: Indexes) -> tuple[list[bytes], ReadRuns]:
        """Return the puts of cells, and the cells as runs of neighbouring rows."""
        heads = np.r_[0, np.flatnonzero((np.diff(slots) != 0) | (np.diff(rows) != 1)) + 1]
        used, put_indexes = np.unique(slots[heads], return_inverse=True)
        puts = [self._puts[slot] for slot in used.tolist()]
        return [put.put_id for put in puts if put is not None], ReadRuns(
            field_names=names,
            put_indexes=put_indexes.astype(np.int64, copy=False),
            first_rows=rows[heads],
            row_counts=np.diff(np.r_[heads, rows.size]),
        )


def _snapshots(columns: Mapping[str, NDArray[Any]]) -> dict[str, ColumnSnapshot]:
    return {name: ColumnSnapshot(values, values.size) for name, values in columns.items()}


def put_id_of(number: int) -> bytes:
    """Return what stands for the id of the put that a block of a checkpoint becomes."""
    return number.to_bytes(8, "little")


def number_of(put_id: bytes) -> int:
    """Return the number of the block that a put of a checkpoint is."""
    return int.from_bytes(put_id, "little")


def _put_together(cells_of_fields: Mapping[str, ColumnSnapshot]) -> list[tuple[tuple[str, ...], Indexes]]:
    """Return the fields whose cells all lie alike, together, with these cells."""
    found: list[tuple[list[str], Indexes]] = []
    for name, column in cells_of_fields.items():
        cells: Indexes = column.values()
        names = next((names for names, known in found if np.array_equal(known, cells)), None)
        if names is None:
            found.append(([name], cells))
        else:
            names.append(name)
    return [(tuple(names), cells) for names, cells in found]


def _cut(sizes: NDArray[np.float64], slots: Indexes) -> Iterator[slice]:
    """Yield stretches of rows of about a block's bytes and not too many puts, at least one row each."""
    if not sizes.size:
        return
    puts = np.cumsum(np.diff(slots, prepend=slots[0]) != 0)
    numbers = np.cumsum(sizes) // BLOCK_BYTES + np.arange(sizes.size) // _MOST_ROWS + puts // _MOST_PUTS
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), sizes.size]
    for start, end in pairwise(bounds):
        yield slice(start, end)
