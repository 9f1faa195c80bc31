"""Snapshots: a service's state at one moment in one file, which is either read completely or rejected.

A file consists of records (see `journal/files.py`). Each record is a dataclass with its class name, except for the
bytes of blocks:

    Header, [CheckpointFacts], [StoredBlock, bytes ...] ..., state
    state: [PartitionHeader, ColumnPart ..., [TaskFacts, (Batches | TaskRecords) ...] ...] ..., ServiceRecords ...

Columns are identified by name. If a column is missing from the file, its fill value is used (see `Partition.restore`).
An unknown column, record class or field means that a newer version wrote the file. The reader then raises a separate
error instead of treating the file as damaged. Otherwise, an older snapshot would be used, without all later changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import NewerVersionError, TqError
from tq_service.journal import codec
from tq_service.journal.files import (
    Found,
    RecordWriter,
    damaged,
    gathered,
    read_records,
)
from tq_service.machine.state_machine import Entry
from tq_service.results import EvictedUnit
from tq_service.state.cells import Put
from tq_service.state.ledger import Claim, PastName, RecordedPlan, Steps, TaskFacts, TaskSnapshot
from tq_service.state.partition import PartitionFacts, PartitionSnapshot
from tq_service.state.plan import BatchSpec, Indexes, TotalsOfStep
from tq_service.state.policies import Policy
from tq_service.state.table import ColumnSnapshot, TableSnapshot
from tq_service.wire.columns import ColumnShape
from tq_service.wire.objects import no_collection

FORMAT_VERSION: Final = 7
_CLAIMS_A_RECORD: Final = 256  # larger records would block other threads for too long while they are encoded
_IDS_A_RECORD: Final = 1024
_NUMBERS_A_RECORD: Final = 1 << 16
_PUT_BYTES_A_RECORD: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """The complete state of a service, restored at start.

    Attributes:
        partitions: the controller's partitions.
        policies: the controller's policies.
        answers: the controller's answers, which are returned to retries; each packed as a tuple (message name, bytes).
        puts: the storage engine's put records.
    """

    partitions: Sequence[PartitionSnapshot] = ()
    policies: Sequence[Policy] = ()
    answers: Iterable[Entry] = ()
    puts: Iterable[bytes] = ()


def write_snapshot(path: Path, snapshot: ServiceSnapshot) -> None:
    """Write a snapshot file, which appears only after it is complete and synced. Runs in a thread.

    Raises:
        OSError: the file could not be written.
    """
    try:
        with RecordWriter(path) as writer:
            write_record(writer, Header(format_version=FORMAT_VERSION))
            write_state(writer, snapshot)
    except OSError:
        path.unlink(missing_ok=True)  # the caller proceeds without this snapshot, so a start must not find it
        raise


def read_snapshot(path: Path) -> ServiceSnapshot:
    """Return the contents of a snapshot. The partitions in it can be restored only once.

    Raises:
        SnapshotDamagedError: the file is damaged.
        NewerVersionError: a newer version wrote the snapshot.
        OSError: the file cannot be read.
    """
    with reading(path) as reader:
        return read_state(reader.values())


# Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first record in a file. In a checkpoint, blocks contain the bytes of all puts and replace these puts."""

    format_version: int
    is_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The description of a checkpoint. It is stored at the start of the file, so lists can read it alone.

    Attributes:
        written_at: start time of the checkpoint, in seconds since 1970.
        metadata: the caller's JSON object, as text.
    """

    written_at: float
    partition_count: int
    sample_count: int
    metadata: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Cells in a checkpoint that become one put when restored. The records that follow contain the cells' bytes.

    Attributes:
        partition_id: partition of the cells.
        row_count: number of rows in every column.
        columns: the columns, in the order in which their bytes are stored.
        begins_at: file position and number of the first record that contains bytes of the block.
    """

    partition_id: str
    row_count: int
    columns: tuple[ColumnShape, ...]
    begins_at: tuple[int, int] = field(default=(0, 0), metadata={"is_encoded": False})

    @property
    def size_bytes(self) -> int:
        """Total size of all columns in bytes."""
        return sum(column.value_bytes for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """The column names of a table, and the number of values in each column."""

    size: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionHeader:
    """The first record of a partition, followed by the records of its columns and tasks."""

    facts: PartitionFacts
    tables: Mapping[str, TableHeader]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPart:
    """The next values of a column. An empty column has one part without values."""

    table: str
    column: str
    values: Any  # an array `(n,)`; encoded in the form of `codec.compact`


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A task's batches with equal specs, stored together because reading 100,000 batches one by one takes too long.

    Attributes:
        rows: rows in all batches, concatenated.
        others: for each batch, its serial and index, and its plan's sizes, steps, consumed rows, dropped rows and
            totals.
    """

    batch_spec: BatchSpec
    rows: Indexes
    others: list[
        tuple[
            int,
            int,
            tuple[int, ...],
            tuple[Steps, ...],
            Indexes | None,
            tuple[Indexes, ...],
            tuple[TotalsOfStep, ...],
        ]
    ]

    @classmethod
    def of(cls, batch_spec: BatchSpec, batches: Sequence[Claim]) -> Batches:
        """Return a record that contains the given batches."""
        return cls(
            batch_spec=batch_spec,
            rows=np.concatenate([batch.plan.rows for batch in batches]),
            others=[
                (each.serial, each.batch_index, plan.sizes, plan.steps, plan.consumed, plan.dropped, plan.totals)
                for each in batches
                for plan in (each.plan,)
            ],
        )

    def all(self) -> Iterator[Claim]:
        """Yield the batches in the record."""
        spec, end = self.batch_spec, 0
        for serial, batch_index, sizes, steps, consumed, dropped, totals in self.others:
            start, end = end, end + sum(sizes)
            plan = RecordedPlan(
                rows=self.rows[start:end].copy(),  # a view would keep all batches' rows in memory
                sizes=sizes,
                steps=steps,
                micro_batch_size=spec.micro_batch_size,
                consumed=consumed,
                dropped=dropped,
                totals=totals,
                summed=spec.totals,
            )
            yield Claim(serial=serial, batch_spec=spec, plan=plan, batch_index=batch_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecords:
    """Further entries for those lists in a `TaskSnapshot` that have the same names as these fields."""

    claims: list[Claim] = field(default_factory=list)
    names: list[tuple[str, bytes]] = field(default_factory=list)
    past_names: list[tuple[str, PastName]] = field(default_factory=list)
    reusing: list[int] = field(default_factory=list)
    ended: list[tuple[bytes, tuple[float, bool]]] = field(default_factory=list)
    evicted: list[EvictedUnit] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecords:
    """Further policies, answers and puts that belong to a `ServiceSnapshot`."""

    policies: list[Policy] = field(default_factory=list)
    answers: list[Entry] = field(default_factory=list)
    puts: list[bytes] = field(default_factory=list)


_Parts: TypeAlias = dict[str, dict[str, list[NDArray[Any]]]]  # by table and column
_KINDS: Final = (
    Header,
    CheckpointFacts,
    StoredBlock,
    PartitionHeader,
    ColumnPart,
    TaskFacts,
    Batches,
    TaskRecords,
    ServiceRecords,
)


class SnapshotReader:
    """Reads the records in a file, from start to end.

    Attributes:
        last: the most recently read record.
    """

    def __init__(self, path: Path) -> None:
        self._kinds = {kind.__name__: kind for kind in _KINDS}
        self._records = read_records(path)
        self.last = Found(0, 0, b"")

    def values(self) -> Iterator[Any]:
        """Decode and yield the remaining records in the file.

        Raises:
            NewerVersionError: a record has an unknown class or field.
        """
        while (data := self.data()) is not None:
            yield codec.decode_named(self._kinds, *codec.unpack(data))

    def data(self) -> bytes | None:
        """Return the bytes of the next record, or None at the end of the file."""
        found = next(self._records, None)
        if found is None:
            return None
        self.last = found
        return found.data


def write_record(writer: RecordWriter, value: object) -> None:
    """Append a dataclass as a record that includes its class name."""
    writer.write(codec.encode_named(value))


@contextlib.contextmanager
def reading(path: Path, *, is_checkpoint: bool = False) -> Iterator[SnapshotReader]:
    """Open a file and read its header; errors in the `with` block become SnapshotDamagedError or NewerVersionError.

    Args:
        path: path of the file.
        is_checkpoint: whether the file must be a checkpoint (true) or a snapshot (false).
    """
    reader = SnapshotReader(path)
    try:
        with no_collection():  # this creates a million objects, none of them garbage
            header = next(reader.values())
            if header.format_version != FORMAT_VERSION:
                raise NewerVersionError(
                    f"its format version is {header.format_version}, but this service reads version {FORMAT_VERSION}"
                )
            if header.is_checkpoint != is_checkpoint:
                names = ("the snapshot of a data directory", "a checkpoint")
                raise ValueError(f"it is {names[header.is_checkpoint]}; expected {names[is_checkpoint]}")
            yield reader
    except NewerVersionError as error:
        raise NewerVersionError(f"{path} at byte {reader.last.at}: {error}", metadata={"path": str(path)}) from error
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError, StopIteration) as error:
        if isinstance(error, TqError):
            raise
        raise damaged(path, reader.last.at, f"{type(error).__name__}: {error}") from error


# State


def write_state(writer: RecordWriter, snapshot: ServiceSnapshot) -> None:
    """Write all partitions, policies, answers and puts in a state."""
    for partition in snapshot.partitions:
        for record in _partition_records(partition):
            write_record(writer, record)
    for policies in gathered(snapshot.policies, _IDS_A_RECORD):
        write_record(writer, ServiceRecords(policies=policies))
    for answers in gathered(snapshot.answers, _IDS_A_RECORD):
        write_record(writer, ServiceRecords(answers=answers))
    for puts in gathered(snapshot.puts, _PUT_BYTES_A_RECORD, len):
        write_record(writer, ServiceRecords(puts=puts))


def read_state(records: Iterable[Any]) -> ServiceSnapshot:
    """Return the state contained in the given records."""
    partitions: list[tuple[PartitionHeader, _Parts, list[TaskSnapshot]]] = []
    policies: list[Policy] = []
    answers: list[Entry] = []
    puts: list[bytes] = []
    storages: dict[tuple[str, bytes], tuple[str, bytes]] = {}
    for record in records:
        match record:
            case PartitionHeader():
                empty: _Parts = {name: {column: [] for column in each.columns} for name, each in record.tables.items()}
                partitions.append((record, empty, []))
            case ColumnPart(table=name, column=column, values=values):
                if values.dtype.hasobject:
                    values = _with_puts(values, storages)
                partitions[-1][1][name][column].append(values)
            case TaskFacts():
                partitions[-1][2].append(TaskSnapshot(facts=record))
            case Batches():
                partitions[-1][2][-1].batches.extend(record.all())
            case TaskRecords():
                for each in fields(record):
                    getattr(partitions[-1][2][-1], each.name).extend(getattr(record, each.name))
            case ServiceRecords():
                policies += record.policies
                answers += record.answers
                puts += record.puts
            case _:
                raise ValueError(f"a {type(record).__name__} record must not be part of the state")
    restored = [
        PartitionSnapshot(
            facts=header.facts,
            tables={name: _table(table.size, parts[name]) for name, table in header.tables.items()},
            tasks=tasks,
        )
        for header, parts, tasks in partitions
    ]
    return ServiceSnapshot(partitions=restored, policies=policies, answers=answers, puts=puts)


def _with_puts(values: NDArray[Any], storages: dict[tuple[str, bytes], tuple[str, bytes]]) -> NDArray[Any]:
    """Return the objects with tuples converted to puts; all puts in one storage service share one copy of its name."""
    puts = (
        Put(*storages.setdefault(each[:2], each[:2]), each[2]) if isinstance(each, tuple) else each
        for each in values.tolist()
    )
    return np.fromiter(puts, np.object_, values.size)


def _table(size: int, parts: Mapping[str, Sequence[NDArray[Any]]]) -> TableSnapshot:
    """Assemble columns from their parts, and return the table."""
    columns = {}
    for column, some in parts.items():
        values = np.concatenate(some) if some else np.empty(0)
        if values.size != size:
            raise ValueError(f"column {column!r} has {values.size} values, but its table has {size} rows")
        columns[column] = ColumnSnapshot(values, size)
    return TableSnapshot(size=size, columns=columns)


def _column_parts(column: ColumnSnapshot) -> Iterator[NDArray[Any]]:
    """Yield a column's values in at least one part; a part has tens of thousands of numbers, or fewer objects."""
    if not column.size:
        yield np.empty(0, column.dtype)
    yield from map(
        np.concatenate, gathered(column.blocks(), 1 if column.dtype.hasobject else _NUMBERS_A_RECORD, np.size)
    )


def _partition_records(partition: PartitionSnapshot) -> Iterator[object]:
    tables = {name: TableHeader(size=each.size, columns=tuple(each.columns)) for name, each in partition.tables.items()}
    yield PartitionHeader(facts=partition.facts, tables=tables)
    for table_name, table in partition.tables.items():
        for name, column in table.columns.items():
            for values in _column_parts(column):
                yield ColumnPart(table=table_name, column=name, values=codec.compact(values))
    for task in partition.tasks:
        yield task.facts
        for batch_spec, batches in groupby(task.batches, attrgetter("batch_spec")):
            for some in gathered(batches, _CLAIMS_A_RECORD):
                yield Batches.of(batch_spec, some)
        for each in fields(TaskRecords):
            count = _CLAIMS_A_RECORD if each.name == "claims" else _IDS_A_RECORD
            for entries in gathered(getattr(task, each.name), count):
                yield TaskRecords(**{each.name: entries})
