"""Checkpoints. A checkpoint file stores a service's state at one point in time, including all sample bytes.

    PartitionPlan: groups cells into blocks --> CheckpointWriter: writes the blocks, then the state
    read_checkpoint: checks everything --> its blocks become puts --> relocate: partitions refer to these puts

A checkpoint is a directory with one file, `checkpoint.tqc`, which begins with a summary used to list checkpoints. The
file is written under a temporary name. Once complete and synced, the temporary file atomically replaces the previous
one. The directory therefore always contains either the old or the new checkpoint. A new checkpoint overwrites any
partial file left behind by an interrupted checkpoint.

A block contains a few MiB of cells from any number of puts. The cells of a block are in table order, come from one
storage service, and belong to fields written by the same puts. On restore, each block becomes one put. A million small
puts can thus be restored as a few hundred puts on any storage service with enough space. The puts of a restored
partition are in the same order as its blocks in the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.durable.snapshot import (
    FORMAT_VERSION,
    CheckpointFacts,
    Header,
    ServiceSnapshot,
    SnapshotReader,
    StoredBlock,
    read_state,
    reading,
    write_record,
    write_state,
)
from tq_service.errors import DiskFullError, InternalError, InvalidArgumentError, PreconditionError
from tq_service.journal.files import (
    HEADER_BYTES,
    PARTIAL_SUFFIX,
    Pace,
    RecordWriter,
    beside,
    damaged,
    gathered,
    make_directory,
    read_records,
)
from tq_service.state.cells import (
    CELL_BYTES_COLUMN,
    CELL_COLUMN,
    NOT_PRODUCED,
    Put,
    cell_columns,
    cells_of,
    slots_and_rows,
)
from tq_service.state.extents import GROWN, Chains
from tq_service.state.partition import Partition, PartitionSnapshot
from tq_service.state.plan import Indexes
from tq_service.state.table import ColumnSnapshot, TableSnapshot
from tq_service.wire.columns import ColumnShape
from tq_service.wire.metadata import CellRuns

FILE_NAME: Final = "checkpoint.tqc"
_LONGEST_NAME: Final = 200
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=@+-]*")
"""Pattern for each component of a checkpoint name. It does not match "", ".", ".." or a hidden file name."""
_RECORD_BYTES: Final = 1 << 20
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BAD_DIRECTORY: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
     errno.ENAMETOOLONG, errno.EINVAL}
)  # fmt: skip
BLOCK_BYTES: Final = 4 << 20
_MOST_ROWS: Final = 1 << 16
_MOST_PUTS: Final = 256  # finding the cells in 256 puts blocks the event loop for about a millisecond
_CHAIN_COLUMNS: Final = ("cell", "previous", "depth")
_BLOCK: Final = Put("", b"", b"")
"""Placeholder for the put that a restore creates from a block."""


def checkpoint_path(checkpoint_dir: Path | None, name: str) -> Path:
    """Return the path of a checkpoint file, given the checkpoint directory and a name chosen by the caller.

    The operator controls the directory and any symlinks in its path. Symlinks below the directory must not point
    outside it. A process with write access to the directory could replace part of the path after it has been checked,
    but a caller cannot.

    Raises:
        PreconditionError: the service has no checkpoint directory.
        InvalidArgumentError: the name is invalid, or a symlink below the checkpoint directory points outside it.
    """
    checkpoint_dir = _directory(checkpoint_dir)
    if not _is_name(name):
        raise InvalidArgumentError(
            f"name is {name[:_LONGEST_NAME]!r} ({len(name)} characters); expected 1 to {_LONGEST_NAME} characters in "
            "components separated by '/'. Each component may contain letters, digits and '._=@+-', and must begin with "
            "a letter or digit. Use a path relative to the service's checkpoint_dir, such as 'nightly/2026-11-21'.",
            field="name",
        )
    top = os.path.realpath(checkpoint_dir)
    directory = Path(os.path.realpath(Path(top, name)))  # Path.resolve would raise if the symlinks form a cycle
    file = directory / FILE_NAME
    if not directory.is_relative_to(top):
        raise _symlink(name, "it contains a symlink that points outside the service's checkpoint_dir")
    for path in (file, beside(file, PARTIAL_SUFFIX)):
        if path.is_symlink():
            raise _symlink(name, f"its {path.name} is a symlink")
    return file


def _directory(checkpoint_dir: Path | None) -> Path:
    if checkpoint_dir is None:
        raise PreconditionError(
            "this service has no checkpoint directory. Start it with checkpoint_dir (--checkpoint-dir, "
            "TQ_CHECKPOINT_DIR), or with data_dir to store checkpoints there."
        )
    return checkpoint_dir


def _is_name(name: str) -> bool:
    return len(name) <= _LONGEST_NAME and all(map(_PART.fullmatch, name.split("/")))


def checkpoint_names(checkpoint_dir: Path | None) -> list[str]:
    """Return the names of all checkpoints below a directory, without following symlinks.

    Raises:
        PreconditionError: the service has no checkpoint directory.
    """
    top = os.path.realpath(_directory(checkpoint_dir))
    found = [
        Path(directory).relative_to(top).as_posix()
        for directory, _, files in os.walk(top)
        if FILE_NAME in files and not Path(directory, FILE_NAME).is_symlink()
    ]
    return list(filter(_is_name, found))


def read_facts(path: Path) -> CheckpointFacts:
    """Read only the summary at the start of a checkpoint file.

    Raises:
        SnapshotDamagedError: the file does not begin with a valid checkpoint header.
        NewerVersionError: the checkpoint was written by a newer version.
        OSError: the file could not be read.
    """
    with reading(path, is_checkpoint=True) as reader:
        return _read_facts(reader)


def _read_facts(reader: SnapshotReader) -> CheckpointFacts:
    record = next(reader.values())
    if not isinstance(record, CheckpointFacts):
        raise ValueError(f"the header is followed by a {type(record).__name__} record; expected CheckpointFacts")
    return record


def _symlink(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"name is {name!r}, but {problem}. Use a different name, or ask the operator to remove the symlink.",
        field="name",
    )


@dataclass(slots=True, kw_only=True)
class Block:
    """Cells that are read together from one storage service and restored as a single put.

    Attributes:
        partition_id: id of the partition that contains the cells.
        puts: puts that contain the cells; a single storage service stores all of these puts.
        runs: positions of the cells in `puts`.
        global_indexes: global index of each cell's sample, as an array of shape `(n,)`. If a cell has several extents,
            the array contains its sample's index once per extent. For cells shared within groups, the array contains
            the index of each group's first sample, or -1 for a group without samples.
        is_shared: whether each cell is shared by all samples of a group.
        column_bytes: total size of each field's cells, in bytes. The mapping is empty until the cells are written.
    """

    partition_id: str
    puts: Sequence[Put]
    runs: CellRuns
    global_indexes: Indexes
    is_shared: bool = False
    column_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """Total size of all cells, in bytes."""
        return sum(self.column_bytes.values())


class PartitionPlan:
    """A plan that divides a partition's cells into checkpoint blocks.

    Attributes:
        blocks: checkpoint blocks into which the cells are divided.
    """

    def __init__(self, partition: PartitionSnapshot) -> None:
        """Read the partition's cell locations, which takes about 50 ms for a million samples."""
        self._partition = partition
        rows, groups, puts, extents = (partition.tables[name] for name in ("rows", "groups", "puts", "extents"))
        self._read_puts(puts)
        self._indexes: Indexes = rows.columns["index"].values()
        self._first: Indexes = groups.columns["first"].values()
        self._chains = Chains(**{name: extents.columns[name].values() for name in _CHAIN_COLUMNS})
        self._extent_cells = self._chains.cell.copy()
        self._cells: dict[str, Indexes] = {}
        self._shared_cells: dict[str, Indexes] = {}
        self.blocks: list[Block] = []
        for names, cells in _put_together(cell_columns(groups)):
            renamed = self._add_blocks(tuple(names), cells, self._first, is_shared=True)
            self._shared_cells |= dict.fromkeys(names, renamed)
        for names, cells in _put_together(cell_columns(rows)):
            has_grown = cells >= GROWN
            own = np.where(has_grown, NOT_PRODUCED, cells)
            renamed = np.where(has_grown, cells, self._add_blocks(tuple(names), own, self._indexes))
            self._cells |= dict.fromkeys(names, renamed)
            if has_grown.any():
                found = self._chains.resolve(cells[has_grown])
                indexes = self._indexes[has_grown][found.owners]
                self._extent_cells[found.slots] = self._add_blocks(tuple(names), found.cells, indexes)

    def partition(self) -> PartitionSnapshot:
        """Return a partition snapshot that refers to blocks instead of puts. Call this after all blocks are written."""
        count = len(self.blocks)
        cells = np.array([block.global_indexes.size * len(block.runs.field_names) for block in self.blocks], np.int64)
        columns = {
            "put": np.fromiter([_BLOCK] * count, object, count),
            "cells": cells,
            "made": cells,
            "bytes": np.array([block.value_bytes for block in self.blocks], np.int64),
        }
        for spec in self._partition.facts.fields:
            sizes = [block.column_bytes.get(spec.name, 0) / block.global_indexes.size for block in self.blocks]
            columns[CELL_BYTES_COLUMN + spec.name] = np.array(sizes, np.float64)
        rows, groups, extents = (self._partition.tables[name] for name in ("rows", "groups", "extents"))
        chains = {name: getattr(self._chains, name) for name in _CHAIN_COLUMNS} | {"cell": self._extent_cells}
        changed = {"index": self._indexes} | {CELL_COLUMN + name: cells for name, cells in self._cells.items()}
        shared = {"first": self._first} | {CELL_COLUMN + name: cells for name, cells in self._shared_cells.items()}
        return replace(
            self._partition,
            tables={
                **self._partition.tables,
                "rows": replace(rows, columns={**rows.columns, **_snapshots(changed)}),
                "groups": replace(groups, columns={**groups.columns, **_snapshots(shared)}),
                "puts": TableSnapshot(size=count, columns=_snapshots(columns)),
                "extents": replace(extents, columns={**extents.columns, **_snapshots(chains)}),
            },
        )

    def _read_puts(self, table: TableSnapshot) -> None:
        """Find the storage service and the average cell size of each put slot."""
        self._puts: list[Put | None] = []
        numbers: dict[tuple[str, bytes], int] = {}
        storage_of: list[int] = []
        pace = Pace()
        for block in table.columns["put"].blocks():
            some: list[Put | None] = block.tolist()
            self._puts += some
            storage_of += [-1 if put is None else numbers.setdefault(put[:2], len(numbers)) for put in some]
            pace.step()
        self._storage_of: Indexes = np.array(storage_of, np.int64)
        counts = np.maximum(table.columns["cells"].values(), 1)
        self._cell_bytes: NDArray[np.float64] = table.columns["bytes"].values() / counts  # an estimate for partial puts

    def _add_blocks(
        self, names: tuple[str, ...], cells: Indexes, indexes: Indexes, *, is_shared: bool = False
    ) -> Indexes:
        """Divide cells into blocks of a few MiB, each with cells from only one storage service.

        All fields in `names` have the same cell locations. `indexes` contains the global index of each cell's sample.
        Return each cell's location within the new blocks.
        """
        renamed = np.full(cells.size, NOT_PRODUCED, np.int64)
        produced = np.flatnonzero(cells >= 0)
        if not produced.size:
            return renamed
        slots, _ = slots_and_rows(cells[produced])
        storages = self._storage_of[slots]
        order = np.argsort(storages, kind="stable")
        produced, slots = produced[order], slots[order]
        # No term ever decreases, so the sum changes whenever a term changes.
        numbers = (
            storages[order]
            + np.cumsum(self._cell_bytes[slots] * len(names)) // BLOCK_BYTES
            + np.arange(slots.size) // _MOST_ROWS
            + np.cumsum(np.diff(slots, prepend=slots[0]) != 0) // _MOST_PUTS
        )
        for positions in np.split(produced, np.flatnonzero(np.diff(numbers)) + 1):
            renamed[positions] = cells_of(len(self.blocks), positions.size)
            puts, runs = self._runs(names, cells[positions])
            self.blocks.append(
                Block(
                    partition_id=self._partition.facts.partition_id,
                    puts=puts,
                    runs=runs,
                    global_indexes=indexes[positions],
                    is_shared=is_shared,
                )
            )
        return renamed

    def _runs(self, names: tuple[str, ...], cells: Indexes) -> tuple[list[Put], CellRuns]:
        """Return the puts that contain the cells, and the runs of adjacent rows that the cells occupy."""
        slots, rows = slots_and_rows(cells)
        used, put_indexes = np.unique(slots, return_inverse=True)
        puts = [put for slot in used.tolist() if (put := self._puts[slot]) is not None]
        return puts, CellRuns.of_rows(names, put_indexes.astype(np.int64, copy=False), rows)


def _snapshots(columns: Mapping[str, NDArray[Any]]) -> dict[str, ColumnSnapshot]:
    return {name: ColumnSnapshot(values, values.size) for name, values in columns.items()}


def _put_together(cells_of_fields: Mapping[str, ColumnSnapshot]) -> list[tuple[list[str], Indexes]]:
    """Group fields by the locations of their cells. Return the field names and cells of each group."""
    found: dict[bytes, tuple[list[str], Indexes]] = {}
    for name, column in cells_of_fields.items():
        cells: Indexes = column.values()
        found.setdefault(cells.tobytes(), ([], cells))[0].append(name)
    return list(found.values())


class CheckpointWriter:
    """Writes a checkpoint: first the summary, then the blocks in order, and finally the state.

    The writer's methods run in worker threads, one call at a time. The caller must always call `abort` when done, even
    after `finish`.

    Raises:
        DiskFullError: the disk is full.
        InvalidArgumentError: the checkpoint cannot be written to the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aborting = contextlib.ExitStack()
        self._writer: RecordWriter

    def begin(self, facts: CheckpointFacts) -> None:
        """Create the directory if necessary, then create the file and write its header and summary."""
        with self._explained():
            make_directory(self._path.parent)
            self._writer = RecordWriter(self._path)
            self._aborting.callback(self._writer.abort)
            write_record(self._writer, Header(format_version=FORMAT_VERSION, is_checkpoint=True))
            write_record(self._writer, facts)

    def add(self, block: Block, values: Iterable[tuple[ColumnShape, memoryview]]) -> None:
        """Write a block as a description of its columns, followed by their bytes."""
        columns, chunks = zip(*values, strict=True)
        stored = StoredBlock(partition_id=block.partition_id, row_count=block.global_indexes.size, columns=columns)
        block.column_bytes = {column.spec.name: column.value_bytes for column in columns}
        with self._explained():
            write_record(self._writer, stored)
            for some in gathered(_cut(chunks), _RECORD_BYTES, len):
                self._writer.write(*some)

    def finish(self, snapshot: ServiceSnapshot) -> None:
        """Write the state, then rename the file to its final name."""
        with self._explained():
            write_state(self._writer, snapshot)
            self._writer.commit()

    def abort(self) -> None:
        """Remove the unfinished file. After `finish`, this method does nothing."""
        self._aborting.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            directory = self._path.parent
            if error.errno in _NO_SPACE:
                raise DiskFullError(
                    f"the disk that holds {directory} has no space for the checkpoint ({error}). Free some disk space.",
                    metadata={"path": str(directory)},
                ) from error
            if error.errno in _BAD_DIRECTORY:
                raise InvalidArgumentError(
                    f"could not write a checkpoint to {directory} ({error}). Use a different name, or grant the "
                    f"service's user write access to the directory.",
                    field="name",
                ) from error
            raise InternalError(
                f"could not write a checkpoint to {directory}, because its disk failed ({error}). Start the service "
                "with a checkpoint_dir on another disk."
            ) from error


def _cut(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Split byte chunks into pieces that each fit in one record."""
    for chunk in chunks:
        for start in range(0, len(chunk), _RECORD_BYTES):
            yield chunk[start : start + _RECORD_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that has been read in full and verified.

    Attributes:
        path: path of the checkpoint file.
        facts: summary at the start of the file.
        blocks: descriptions of the blocks, in file order.
        state: state at the end of the file. The state's partitions refer to blocks (in file order) rather than to puts.
    """

    path: Path
    facts: CheckpointFacts
    blocks: Sequence[StoredBlock]
    state: ServiceSnapshot

    def values(self, block: StoredBlock) -> Iterator[bytes]:
        """Yield the bytes of a block, in parts of about 1 MiB.

        Raises:
            SnapshotDamagedError: the block has changed since the checkpoint was verified.
        """
        left = block.size_bytes
        records = read_records(self.path, *block.begins_at)
        while left > 0:
            at, _, data = next(records)
            if len(data) > left:
                raise damaged(self.path, at, "a block has changed since the checkpoint was verified")
            left -= len(data)
            yield data


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify an entire checkpoint.

    Raises:
        InvalidArgumentError: the checkpoint does not exist or cannot be read.
        SnapshotDamagedError: the file is damaged.
        NewerVersionError: the checkpoint was written by a newer version.
    """
    try:
        with reading(path, is_checkpoint=True) as reader:
            facts = _read_facts(reader)
            blocks: list[StoredBlock] = []
            state = read_state(_beyond_blocks(reader, blocks))
            _check_blocks(state.partitions, blocks)
            return Checkpoint(path=path, facts=facts, blocks=blocks, state=state)
    except OSError as error:
        raise InvalidArgumentError(
            f"could not read a checkpoint from {path.parent} ({error}). Pass the name under which the checkpoint was "
            f"written.",
            field="name",
        ) from error


def _beyond_blocks(reader: SnapshotReader, blocks: list[StoredBlock]) -> Iterator[object]:
    """Yield the state records that follow the blocks.

    While reading, verify the bytes of each block, and append a description of the block to `blocks`.
    """
    for value in reader.values():
        if not isinstance(value, StoredBlock):
            yield value
            continue
        for column in value.columns:
            column.validate()
            if column.row_count != value.row_count:
                raise ValueError(f"a block has {value.row_count} rows, but one of its columns has {column.row_count}")
        at, number, data = reader.last
        blocks.append(replace(value, begins_at=(at + HEADER_BYTES + len(data), number + 1)))
        left = value.size_bytes
        while left > 0 and (some := reader.data()) is not None:
            left -= len(some)
        if left:
            raise ValueError(f"a block has {value.size_bytes - left} bytes; expected {value.size_bytes}")


def _check_blocks(partitions: Sequence[PartitionSnapshot], blocks: Sequence[StoredBlock]) -> None:
    names = [partition.facts.partition_id for partition in partitions]
    if len(set(names)) < len(names):
        raise ValueError("the checkpoint contains the same partition twice")
    named = [each.facts.partition_id for each in partitions for _ in range(each.tables["puts"].size)]
    if named != [block.partition_id for block in blocks]:
        raise ValueError("the partitions do not refer to the blocks in file order")


def relocate(partitions: Iterable[Partition], puts: Iterable[Put]) -> None:
    """Replace the placeholders in restored partitions, in order, with the puts created from the checkpoint's blocks."""
    became = iter(puts)
    for partition in partitions:
        table = partition.cells.puts
        for slot in range(table.count):
            table.occupants.write(slot, next(became))
