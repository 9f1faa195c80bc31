"""Reading a checkpoint: whole, before anything is done with it, and then block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tq_service.domain.partition import PartitionSnapshot
from tq_service.domain.tables.cells import Put
from tq_service.domain.tables.table import ColumnSnapshot
from tq_service.durable.checkpoint_plan import number_of
from tq_service.durable.record_file import damaged, read_records
from tq_service.durable.snapshot import (
    ServiceSnapshot,
    SnapshotReader,
    StoredBlock,
    read_state,
    reading,
)
from tq_service.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and is whole.

    Attributes:
        path: its file.
        blocks: what it has of bytes, in order.
        state: all else; its partitions name blocks for their puts.
    """

    path: Path
    blocks: Sequence[StoredBlock]
    state: ServiceSnapshot

    def values(self, block: StoredBlock) -> Iterator[bytes]:
        """Yield the bytes of a block, about 1 MiB at a time.

        Raises:
            SnapshotDamagedError: they are not any more what they were.
        """
        left = block.size_bytes
        records = read_records(self.path, block.at)
        while left > 0:
            at, data = next(records, (block.at, b""))
            if not 0 < len(data) <= left:
                raise damaged(self.path, at, "a block is not any more what it was")
            left -= len(data)
            yield data

    def relocated(self, puts: Sequence[Put]) -> list[PartitionSnapshot]:
        """Return the partitions, with the puts that the blocks have become, in their order."""
        return [_relocated(each, puts) for each in self.state.partitions]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check all of it.

    Raises:
        InvalidArgumentError: there is none.
        SnapshotDamagedError: the file does not hold what was written.
        NewerVersionError: it was written by a newer version.
    """
    try:
        with reading(path, is_checkpoint=True) as reader:
            blocks = list(_blocks(reader))
            state = read_state(reader)
            _check_blocks(state.partitions, blocks)
            return Checkpoint(path=path, blocks=blocks, state=state)
    except OSError as error:
        raise InvalidArgumentError(
            f"no checkpoint can be read from {path.parent} ({error}); give the name that it was written under",
            field="name",
        ) from error


def _blocks(reader: SnapshotReader) -> Iterator[StoredBlock]:
    while reader.kind == "block":
        block: StoredBlock = reader.take("block")
        for column in block.columns:
            column.validate()
            if column.row_count != block.row_count:
                raise ValueError("a block has another number of rows than its columns")
        at, left = reader.at, block.size_bytes
        while left > 0:
            left -= len(reader.take_bytes())
        if left < 0:
            raise ValueError(f"a block has {-left} bytes too many")
        yield replace(block, at=at)


def _check_blocks(partitions: Sequence[PartitionSnapshot], blocks: Sequence[StoredBlock]) -> None:
    names = [partition.facts.partition_id for partition in partitions]
    if len(set(names)) < len(names):
        raise ValueError("a partition is in it twice")
    named = [(name, put) for name, partition in zip(names, partitions, strict=True) for put in _puts_of(partition)]
    numbers = [number_of(put.put_id) for _, put in named if put is not None]
    if numbers != list(range(len(blocks))) or len(numbers) < len(named):
        raise ValueError("its partitions do not name its blocks in order")
    if any(block.partition_id != name for block, (name, _) in zip(blocks, named, strict=True)):
        raise ValueError("a partition names the block of another")


def _puts_of(partition: PartitionSnapshot) -> Sequence[Put]:
    puts: list[Put] = partition.tables["puts"].columns["put"].values().tolist()
    return puts


def _relocated(partition: PartitionSnapshot, puts: Sequence[Put]) -> PartitionSnapshot:
    numbers = [number_of(put.put_id) for put in _puts_of(partition)]
    moved = np.full(len(numbers), None, object)
    for slot, number in enumerate(numbers):
        moved[slot] = puts[number]
    table = partition.tables["puts"]
    columns = {**table.columns, "put": ColumnSnapshot(moved, moved.size)}
    return replace(partition, tables={**partition.tables, "puts": replace(table, columns=columns)})
