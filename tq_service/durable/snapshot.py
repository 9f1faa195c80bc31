"""Snapshots: the state of a service at one moment in one file, from which it is read whole or not at all.

A file is of records (`record_file`), each of which but the bytes of blocks is (kind, value):

    header, [checkpoint], [block, bytes ...] ..., state
    state: [partition, column ..., [task, (batches | claims | names | past_names | reusing | ended) ...] ...] ...,
        answers ..., puts ...

Values are in the encoding of `codec`, columns in that of `column_codec`. Columns are found by name: one that the file
does not have takes its fill (see `Partition.restore`), one that this version does not have was written by a newer one,
as was a kind or a field that is unknown. That is an error of its own and never taken for damage: going on with an older
snapshot would lose what came after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from tq_service.errors import NewerVersionError, SnapshotDamagedError, TqError
from tq_service.journal import codec
from tq_service.journal.columns import ColumnPart, TableHeader, TableReader, encode_table
from tq_service.journal.record_file import Found, RecordWriter, damaged, gathered, read_records
from tq_service.state.claim_names import PastName
from tq_service.state.idempotency import Entry
from tq_service.state.ledger import Batch, QueueClaim, RecordedPlan, Steps, TaskFacts, TaskSnapshot
from tq_service.state.partition import PartitionFacts, PartitionSnapshot
from tq_service.state.plan import Indexes
from tq_service.state.request import BatchSpec
from tq_service.wire.collection import no_collection
from tq_service.wire.columns import ColumnShape

FORMAT_VERSION: Final = 5
_CLAIMS_A_RECORD: Final = 256  # what is encoded without giving way to others
_IDS_A_RECORD: Final = 1024
_PUT_BYTES_A_RECORD: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """All that a service has to know to go on where it was.

    Attributes:
        partitions: of the controller.
        answers: of the controller, for retries; each packed as (name of the message, bytes).
        puts: of the storage engine, a record of each as the engine gave it.
    """

    partitions: Sequence[PartitionSnapshot] = ()
    answers: Iterable[Entry] = ()
    puts: Iterable[bytes] = ()


def write_snapshot(path: Path, snapshot: ServiceSnapshot) -> None:
    """Write a snapshot; its file is there only once it is whole and on the disk. Runs in a thread beside the loop.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with RecordWriter(path) as writer:
            write_header(writer, is_checkpoint=False)
            write_state(writer, snapshot)
    except OSError:
        path.unlink(missing_ok=True)  # a caller that gets the error goes on without it, and a start must do the same
        raise


def read_snapshot(path: Path) -> ServiceSnapshot:
    """Return what a snapshot holds, for the partition to restore once.

    Raises:
        SnapshotDamagedError: the file does not hold what was written.
        NewerVersionError: it was written by a newer version.
        OSError: it cannot be read.
    """
    with reading(path, is_checkpoint=False) as reader:
        return read_state(reader.values())


# Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Begins a file: in a checkpoint the bytes of the puts are in blocks, and partitions name these for their puts."""

    format_version: int
    is_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What stands in the beginning of a checkpoint, to be read without the rest.

    Attributes:
        written_at: when it was begun, in seconds since 1970.
        metadata: what its caller gave with it: a JSON object as text.
    """

    written_at: float
    partition_count: int
    sample_count: int
    metadata: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Cells of a checkpoint that become one put when it is restored; their bytes are in the records that follow.

    Attributes:
        partition_id: their partition.
        row_count: number of rows of every column.
        columns: the columns, in the order of their bytes.
        begins_at: where the first record with its bytes is, and the number of that.
    """

    partition_id: str
    row_count: int
    columns: tuple[ColumnShape, ...]
    begins_at: tuple[int, int] = field(default=(0, 0), metadata={"is_encoded": False})

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns together."""
        return sum(column.value_bytes for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionHeader:
    """Begins a partition; its columns and then its tasks follow."""

    facts: PartitionFacts
    tables: dict[str, TableHeader]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Batches of a task that were planned by one spec, in columns: to read a hundred thousand one by one takes long.

    Attributes:
        serials: of each batch.
        batch_indexes: of each batch.
        rows: of the plans of all of them, one after the other.
        sizes: of each plan.
        steps: of each plan.
        consumed: of each plan; empty: of none of them.
        dropped: of each plan; empty: of none of them.
    """

    batch_spec: BatchSpec
    serials: list[int]
    batch_indexes: list[int]
    rows: Indexes
    sizes: list[tuple[int, ...]]
    steps: list[tuple[Steps, ...]]
    consumed: list[Indexes | None] = field(default_factory=list)
    dropped: list[tuple[Indexes, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, batch_spec: BatchSpec, batches: Sequence[Batch]) -> Batches:
        """Return the record of some batches."""
        return cls(
            batch_spec=batch_spec,
            serials=[batch.serial for batch in batches],
            batch_indexes=[batch.batch_index for batch in batches],
            rows=np.concatenate([batch.plan.rows for batch in batches]),
            sizes=[batch.plan.sizes for batch in batches],
            steps=[batch.plan.steps for batch in batches],
            consumed=[batch.plan.consumed for batch in batches]
            if any(batch.plan.is_reusing for batch in batches)
            else [],
            dropped=[batch.plan.dropped for batch in batches] if any(batch.plan.dropped for batch in batches) else [],
        )

    def all(self) -> Iterator[Batch]:
        """Yield the batches."""
        spec, end = self.batch_spec, 0
        consumed_of, dropped_of = self.consumed or repeat(None), self.dropped or repeat(())
        for serial, batch_index, sizes, steps, consumed, dropped in zip(
            self.serials, self.batch_indexes, self.sizes, self.steps, consumed_of, dropped_of, strict=False
        ):
            start, end = end, end + sum(sizes)
            rows = self.rows[start:end].copy()  # lest one batch keep the rows of all
            plan = RecordedPlan(
                rows=rows,
                sizes=sizes,
                steps=steps,
                micro_batch_size=spec.micro_batch_size,
                consumed=consumed,
                dropped=dropped,
            )
            yield Batch(serial=serial, batch_spec=spec, plan=plan, batch_index=batch_index)


_KINDS: Final[dict[str, Any]] = {
    "header": Header,
    "checkpoint": CheckpointFacts,
    "block": StoredBlock,
    "partition": PartitionHeader,
    "column": ColumnPart,
    "task": TaskFacts,
    "batches": Batches,
    "claims": list[QueueClaim],
    "names": list[tuple[str, bytes]],  # see `ClaimNames`
    "past_names": list[tuple[str, PastName]],
    "reusing": list[int],  # serials, see `TaskSnapshot`
    "ended": list[tuple[bytes, tuple[float, bool]]],  # see `EndedClaims`
    "answers": list[Entry],
    "puts": list[bytes],  # as they are in the log
}


class SnapshotReader:
    """Reads a file from one end to the other.

    Attributes:
        last: the record that was read last.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = read_records(path)
        self.last = Found(0, 0, b"")

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the kinds and values of the records that are left to read.

        Raises:
            NewerVersionError: it is of a kind, or has a field, that is unknown.
        """
        while (data := self.data()) is not None:
            kind, value = codec.unpack(data)
            yield kind, codec.decode_named(_KINDS, kind, value)

    def data(self) -> bytes | None:
        """Return the bytes of the next record, None at the end of the file."""
        found = next(self._records, None)
        if found is None:
            return None
        self.last = found
        return found.data

    def damaged(self, what: str) -> SnapshotDamagedError:
        """Return the error for the place that is being read."""
        return damaged(self._path, self.last.at, what)


# What snapshots and checkpoints have in common


def write_record(writer: RecordWriter, kind: str, value: Any) -> None:
    """Append a record."""
    writer.write(codec.encode((kind, value)))


def write_header(writer: RecordWriter, *, is_checkpoint: bool) -> None:
    """Begin a file."""
    write_record(writer, "header", Header(format_version=FORMAT_VERSION, is_checkpoint=is_checkpoint))


def write_state(writer: RecordWriter, snapshot: ServiceSnapshot) -> None:
    """Write the state."""
    for partition in snapshot.partitions:
        for kind, value in _partition_records(partition):
            write_record(writer, kind, value)
    for answers in gathered(snapshot.answers, _IDS_A_RECORD):
        write_record(writer, "answers", answers)
    for puts in gathered(snapshot.puts, _PUT_BYTES_A_RECORD, len):
        write_record(writer, "puts", puts)


@contextlib.contextmanager
def reading(path: Path, *, is_checkpoint: bool) -> Iterator[SnapshotReader]:
    """Read a file, first how it begins; what is wrong with it becomes SnapshotDamagedError or NewerVersionError."""
    reader = SnapshotReader(path)
    try:
        with no_collection():  # a million new objects, none of them garbage
            _check_header(next(reader.values())[1], is_checkpoint=is_checkpoint)
            yield reader
    except NewerVersionError as error:
        raise NewerVersionError(f"{path} at byte {reader.last.at}: {error}", metadata={"path": str(path)}) from error
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError, StopIteration) as error:
        if isinstance(error, TqError):
            raise
        raise reader.damaged(f"{type(error).__name__}: {error}") from error


def _check_header(header: Any, *, is_checkpoint: bool) -> None:
    if header.format_version != FORMAT_VERSION:
        raise NewerVersionError(f"its format has version {header.format_version}, this service reads {FORMAT_VERSION}")
    if header.is_checkpoint != is_checkpoint:
        kinds = ("the snapshot of a data directory", "a checkpoint")
        raise ValueError(f"it is {kinds[header.is_checkpoint]}, expected {kinds[is_checkpoint]}")


def read_state(records: Iterable[tuple[str, Any]]) -> ServiceSnapshot:
    """Return the state that records are of, each as (kind, value)."""
    partitions: list[_Partition] = []
    answers: list[Entry] = []
    puts: list[bytes] = []
    for kind, value in records:
        match kind:
            case "partition":
                partitions.append(_Partition(value))
            case "answers":
                answers += value
            case "puts":
                puts += value
            case _:
                partitions[-1].add(kind, value)
    return ServiceSnapshot(partitions=[each.snapshot() for each in partitions], answers=answers, puts=puts)


# Partitions


def _partition_records(partition: PartitionSnapshot) -> Iterator[tuple[str, Any]]:
    tables = {name: TableHeader.of(table) for name, table in partition.tables.items()}
    yield "partition", PartitionHeader(facts=partition.facts, tables=tables)
    for name, table in partition.tables.items():
        for part in encode_table(name, table):
            yield "column", part
    for task in partition.tasks:
        yield "task", task.facts
        for batch_spec, batches in groupby(task.batches, attrgetter("batch_spec")):
            yield from (("batches", Batches.of(batch_spec, some)) for some in gathered(batches, _CLAIMS_A_RECORD))
        yield from (("claims", claims) for claims in gathered(task.claims, _CLAIMS_A_RECORD))
        yield from (("names", names) for names in gathered(task.names, _IDS_A_RECORD))
        yield from (("past_names", names) for names in gathered(task.past_names, _IDS_A_RECORD))
        yield from (("reusing", serials) for serials in gathered(task.reusing, _IDS_A_RECORD))
        yield from (("ended", ended) for ended in gathered(task.ended, _IDS_A_RECORD))


class _Partition:
    """Puts the records of a partition together."""

    def __init__(self, header: PartitionHeader) -> None:
        self._header = header
        self._tables = {name: TableReader(table) for name, table in header.tables.items()}
        self._tasks: list[TaskSnapshot] = []

    def add(self, kind: str, value: Any) -> None:
        match kind:
            case "column":
                self._tables[value.table].add(value)
            case "task":
                self._tasks.append(TaskSnapshot(facts=value))
            case "batches":
                self._tasks[-1].batches.extend(value.all())
            case "claims":
                self._tasks[-1].claims.extend(value)
            case "names":
                self._tasks[-1].names.extend(value)
            case "past_names":
                self._tasks[-1].past_names.extend(value)
            case "reusing":
                self._tasks[-1].reusing.extend(value)
            case "ended":
                self._tasks[-1].ended.extend(value)
            case _:
                raise ValueError(f"it has a {kind} within a partition")

    def snapshot(self) -> PartitionSnapshot:
        tables = {name: table.snapshot() for name, table in self._tables.items()}
        return PartitionSnapshot(facts=self._header.facts, tables=tables, tasks=self._tasks)
