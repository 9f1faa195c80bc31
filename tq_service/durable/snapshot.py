"""Snapshots. A snapshot is a single file that captures a service's state at one point in time.

A snapshot is either read in full or rejected. A file consists of records (see `journal/files.py`). Each record contains
either a dataclass instance and its class name, or some of a block's bytes:

    Header, [CheckpointFacts], [StoredBlock, bytes ...] ..., state
    state: [PartitionHeader, ColumnPart ..., [TaskFacts, (Batches | TaskRecords) ...] ...] ..., ServiceRecords ...

Columns are identified by name. If a column is missing from the file, its fill value is used (see `Partition.restore`).
An unknown column, record class or field indicates that a newer version wrote the file. The reader then raises
NewerVersionError instead of treating the file as damaged. Falling back to an older snapshot could lose changes made
since that snapshot.
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
_CLAIMS_A_RECORD: Final = 256  # larger records would block other threads for too long during encoding
_IDS_A_RECORD: Final = 1024
_NUMBERS_A_RECORD: Final = 1 << 16
_PUT_BYTES_A_RECORD: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """The complete state from which a service is restored at startup.

    Attributes:
        partitions: snapshots of the controller's partitions.
        policies: the controller's policies and their published versions.
        answers: recorded controller responses, kept so that retries receive the same response. Each response is encoded
            as a tuple (message name, bytes).
        puts: put records of the storage engine.
    """

    partitions: Sequence[PartitionSnapshot] = ()
    policies: Sequence[Policy] = ()
    answers: Iterable[Entry] = ()
    puts: Iterable[bytes] = ()


def write_snapshot(path: Path, snapshot: ServiceSnapshot) -> None:
    """Write a snapshot file, which becomes visible only once it is complete and synced. Call this from a worker thread.

    Raises:
        OSError: the file could not be written.
    """
    try:
        with RecordWriter(path) as writer:
            write_record(writer, Header(format_version=FORMAT_VERSION))
            write_state(writer, snapshot)
    except OSError:
        path.unlink(missing_ok=True)  # the caller continues without this snapshot, so a start must not find it
        raise


def read_snapshot(path: Path) -> ServiceSnapshot:
    """Read a snapshot file and return its contents. The returned partitions can be restored only once.

    Raises:
        SnapshotDamagedError: the file is damaged.
        NewerVersionError: a newer version wrote the snapshot.
        OSError: the file could not be read.
    """
    with reading(path) as reader:
        return read_state(reader.values())


# Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First record of a snapshot or checkpoint file. A checkpoint contains sample bytes in blocks instead of puts."""

    format_version: int
    is_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The summary of a checkpoint, stored at the start of the file so that checkpoints can be listed quickly.

    Attributes:
        written_at: start time of the checkpoint, in seconds since 1970.
        metadata: JSON object provided by the caller, as text.
    """

    written_at: float
    partition_count: int
    sample_count: int
    metadata: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Cells in a checkpoint that are restored as a single put. The records that follow contain the bytes of the cells.

    Attributes:
        partition_id: id of the partition that contains the cells.
        row_count: number of rows in each column.
        columns: columns of the block, in the order in which their bytes are stored.
        begins_at: position in the file, and record number, of the first record that contains the block's bytes.
    """

    partition_id: str
    row_count: int
    columns: tuple[ColumnShape, ...]
    begins_at: tuple[int, int] = field(default=(0, 0), metadata={"is_encoded": False})

    @property
    def size_bytes(self) -> int:
        """Total size of all columns, in bytes."""
        return sum(column.value_bytes for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """The column names of a table, and the number of values in each column."""

    size: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionHeader:
    """The first record of a partition, followed by the records of the partition's columns and tasks."""

    facts: PartitionFacts
    tables: Mapping[str, TableHeader]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPart:
    """A run of consecutive values in a column. An empty column is stored as one part without values."""

    table: str
    column: str
    values: Any  # an array of shape `(n,)`, encoded in the form of `codec.compact`


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A task's batches with equal specs, combined into one record because reading 100,000 separate records is slow.

    Attributes:
        rows: rows of all batches, concatenated.
        others: for each batch, the serial number, the index, and the sizes, steps, consumed rows, dropped rows and
            totals of the plan.
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
        """Yield the batches that the record contains."""
        spec, end = self.batch_spec, 0
        for serial, batch_index, sizes, steps, consumed, dropped, totals in self.others:
            start, end = end, end + sum(sizes)
            plan = RecordedPlan(
                rows=self.rows[start:end].copy(),  # a view would keep the rows of all batches in memory
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
    """Entries to append to the lists of a `TaskSnapshot`. Each attribute extends the list of the same name."""

    claims: list[Claim] = field(default_factory=list)
    names: list[tuple[str, bytes]] = field(default_factory=list)
    past_names: list[tuple[str, PastName]] = field(default_factory=list)
    reusing: list[int] = field(default_factory=list)
    ended: list[tuple[bytes, tuple[float, bool]]] = field(default_factory=list)
    evicted: list[EvictedUnit] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecords:
    """Policies, answers and puts to add to a `ServiceSnapshot`."""

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
    """Reads the records of a file in order.

    Attributes:
        last: most recently read record.
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
    """Append a record that contains a dataclass instance and its class name."""
    writer.write(codec.encode_named(value))


@contextlib.contextmanager
def reading(path: Path, *, is_checkpoint: bool = False) -> Iterator[SnapshotReader]:
    """Open a file and read its header. Convert errors in the `with` block to SnapshotDamagedError or NewerVersionError.

    Args:
        path: path of the file.
        is_checkpoint: whether to expect a checkpoint rather than a snapshot.
    """
    reader = SnapshotReader(path)
    try:
        with no_collection():  # this creates a million objects, none of which are garbage
            header = next(reader.values())
            if header.format_version != FORMAT_VERSION:
                raise NewerVersionError(
                    f"the format version is {header.format_version}, but this service supports version {FORMAT_VERSION}"
                )
            if header.is_checkpoint != is_checkpoint:
                names = ("a data directory snapshot", "a checkpoint")
                raise ValueError(f"the file is {names[header.is_checkpoint]}; expected {names[is_checkpoint]}")
            yield reader
    except NewerVersionError as error:
        raise NewerVersionError(f"{path} at byte {reader.last.at}: {error}", metadata={"path": str(path)}) from error
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError, StopIteration) as error:
        if isinstance(error, TqError):
            raise
        raise damaged(path, reader.last.at, f"{type(error).__name__}: {error}") from error


# State


def write_state(writer: RecordWriter, snapshot: ServiceSnapshot) -> None:
    """Write the partitions, policies, answers and puts of a service snapshot."""
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
    """Assemble a service snapshot from the given records."""
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
                raise ValueError(f"the state contains an unexpected {type(record).__name__} record")
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
    """Return the given objects, converting each tuple to a `Put`.

    All puts in one storage service share a single copy of the service's name.
    """
    puts = (
        Put(*storages.setdefault(each[:2], each[:2]), each[2]) if isinstance(each, tuple) else each
        for each in values.tolist()
    )
    return np.fromiter(puts, np.object_, values.size)


def _table(size: int, parts: Mapping[str, Sequence[NDArray[Any]]]) -> TableSnapshot:
    """Assemble a table from the parts of its columns."""
    columns = {}
    for column, some in parts.items():
        values = np.concatenate(some) if some else np.empty(0)
        if values.size != size:
            raise ValueError(f"column {column!r} has {values.size} values, but its table has {size} rows")
        columns[column] = ColumnSnapshot(values, size)
    return TableSnapshot(size=size, columns=columns)


def _column_parts(column: ColumnSnapshot) -> Iterator[NDArray[Any]]:
    """Yield the values of a column as one or more arrays.

    Each array contains tens of thousands of values, or fewer if the values are objects.
    """
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
