"""Reading a checkpoint: whole, before anything is done with it, and then block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tq_service.domain.frozen import FrozenPartition, FrozenPuts
from tq_service.domain.tables.column import FrozenColumn
from tq_service.domain.tables.puts import Put
from tq_service.durable.checkpoint_plan import number_of
from tq_service.durable.record_file import damaged, read_records
from tq_service.durable.snapshot import FrozenService, read_header, read_state, reading
from tq_service.durable.snapshot_reader import SnapshotReader
from tq_service.errors import InvalidArgumentError
from tq_service.v1 import snapshot_pb2 as pb
from tq_service.wire.columns import ColumnShape, decode_headers


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Cells of a checkpoint, to become one put.

    Attributes:
        partition_id: their partition.
        row_count: number of rows of every column.
        columns: the columns, in the order of their bytes.
        size_bytes: bytes of all columns together.
        at: where their bytes begin in the file.
    """

    partition_id: str
    row_count: int
    columns: Sequence[ColumnShape]
    size_bytes: int
    at: int


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
    state: FrozenService

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

    def relocated(self, puts: Sequence[Put]) -> list[FrozenPartition]:
        """Return the partitions, with the puts that the blocks have become, in their order."""
        return [replace(each, puts=_relocated(each, puts)) for each in self.state.partitions]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check all of it.

    Raises:
        InvalidArgumentError: there is none.
        SnapshotDamagedError: the file does not hold what was written, or is of a later version.
    """
    try:
        with reading(path) as reader:
            read_header(reader, is_checkpoint=True)
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
        message: pb.SnapshotBlock = reader.take("block")
        columns = decode_headers(message.columns, message.row_count)
        if sum(column.value_bytes for column in columns) != message.size_bytes:
            raise ValueError("a block has another size than its columns")
        at, left = reader.at, message.size_bytes
        while left > 0:
            left -= len(reader.take_bytes())
        if left < 0:
            raise ValueError(f"a block has {-left} bytes too many")
        yield StoredBlock(
            partition_id=message.partition_id,
            row_count=message.row_count,
            columns=columns,
            size_bytes=message.size_bytes,
            at=at,
        )


def _check_blocks(partitions: Sequence[FrozenPartition], blocks: Sequence[StoredBlock]) -> None:
    names = [partition.partition_id for partition in partitions]
    if len(set(names)) < len(names):
        raise ValueError("a partition is in it twice")
    named = [(partition.partition_id, put) for partition in partitions for put in partition.puts.puts.values()]
    numbers = [number_of(put.put_id) for _, put in named if put is not None]
    if numbers != list(range(len(blocks))) or len(numbers) < len(named):
        raise ValueError("its partitions do not name its blocks in order")
    if any(block.partition_id != name for block, (name, _) in zip(blocks, named, strict=True)):
        raise ValueError("a partition names the block of another")


def _relocated(partition: FrozenPartition, puts: Sequence[Put]) -> FrozenPuts:
    numbers = [number_of(put.put_id) for put in partition.puts.puts.values()]
    moved = np.full(len(numbers), None, object)
    for slot, number in enumerate(numbers):
        moved[slot] = puts[number]
    return replace(partition.puts, puts=FrozenColumn(moved, moved.size))
