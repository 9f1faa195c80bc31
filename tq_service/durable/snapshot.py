"""Snapshots: the state of a service at one moment in one file, from which it is read whole or not at all.

A file is of records (`record_file`), each of which but the bytes of blocks is (kind, value):

    header, [block, bytes ...] ..., state
    state: [partition, column ..., [task, (claims | ended) ...] ...] ..., answers ..., puts ...

Values are dataclasses, in the encoding of `codec`; columns are in that of `column_codec`. Columns are found by name:
one that the file does not have takes its fill (see `Partition.restore`), one that this version does not have was
written by a newer one, as was a kind or a field that is unknown. That is an error of its own and never taken for
damage: going on with an older snapshot would lose what came after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tq_service.domain.claims.ledger import Batch, Lease, QueueClaim, TaskFacts, TaskSnapshot
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.idempotency import Entry
from tq_service.domain.partition import PartitionFacts, PartitionSnapshot
from tq_service.domain.plan import Plan, RankPlan
from tq_service.durable import codec
from tq_service.durable.column_codec import ColumnPart, TableHeader, TableReader, encode_table
from tq_service.durable.record_file import Found, RecordWriter, damaged, gathered, read_records
from tq_service.errors import NewerVersionError, SnapshotDamagedError, TqError
from tq_service.wire.collection import no_collection
from tq_service.wire.columns import ColumnShape

FORMAT_VERSION: Final = 4
_CLAIMS_A_RECORD: Final = 256  # what is encoded without giving way to others
_IDS_A_RECORD: Final = 1024
_PUT_BYTES_A_RECORD: Final = 1 << 18
_SHARED: Final = tuple(each.name for each in fields(RankPlan) if each.name != "rows")


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
        path.unlink(missing_ok=True)  # who is told that it failed goes on without it, and a start must do the same
        raise


def read_snapshot(path: Path) -> ServiceSnapshot:
    """Return what a snapshot holds, for the domain to restore once.

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
class ClaimRecords:
    """Some records of a task.

    Attributes:
        name: what they are of its snapshot.
        batch_specs: what batches were planned by; batches in a row mostly share it.
        parts: what ranks and queue workers get but for the rows, each a RankPlan; many share it.
        batches: of each (serial, batch_index, size, position in `batch_specs`, parts of its ranks), where the part of a
            rank is (rows as bytes, position in `parts`); looking at the types of a hundred thousand would take long.
        claims: of each (serial, request_id, rows as bytes, position in `parts`).
        leases: of those claims that were made with one, by their serials.
    """

    name: str
    batch_specs: list[BatchSpec]
    parts: list[bytes]
    batches: list[Any]
    claims: list[Any]
    leases: list[Lease]

    @classmethod
    def of(cls, name: str, records: Iterable[Batch | QueueClaim]) -> ClaimRecords:
        """Encode records."""
        specs: dict[BatchSpec, int] = {}
        parts = _Parts()
        batches, claims, leases = [], [], []
        for record in records:
            if isinstance(record, Batch):
                kept = record.kept_plan
                ranks = list(map(parts.add, kept.parts() if isinstance(kept, EncodedPlan) else record.plan.ranks))
                spec = specs.setdefault(record.batch_spec, len(specs))
                batches.append((record.serial, record.batch_index, record.size, spec, ranks))
            else:
                claims.append((record.serial, record.request_id, *parts.add(record.kept_part)))
                if record.lease is not None:
                    leases.append(record.lease)
        return cls(name=name, batch_specs=list(specs), parts=parts.all(), batches=batches, claims=claims, leases=leases)

    def all(self) -> Iterator[Batch | QueueClaim]:
        """Yield the records; how much is left of them follows from the rows."""
        for serial, batch_index, size, spec, ranks in self.batches:
            plan = EncodedPlan(ranks, self.parts)
            yield Batch(
                serial=serial, batch_spec=self.batch_specs[spec], kept_plan=plan, batch_index=batch_index,
                size=size, remaining=0,
            )  # fmt: skip
        leases = {lease.serial: lease for lease in self.leases}
        for serial, request_id, rows, number in self.claims:
            part = EncodedPart(rows, self.parts[number])
            yield QueueClaim(
                request_id=request_id, serial=serial, kept_part=part, remaining=0, lease=leases.get(serial)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedClaims:
    """Ids of claims that were released or have expired, and when."""

    name: str
    ids: list[tuple[bytes, float]]

    def all(self) -> list[tuple[bytes, float]]:
        """Return them."""
        return self.ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers for retries."""

    entries: list[Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Puts:
    """Records of puts, as they are in the log."""

    records: list[bytes]


_KINDS: Final[dict[str, Any]] = {
    "header": Header,
    "block": StoredBlock,
    "partition": PartitionHeader,
    "column": ColumnPart,
    "task": TaskFacts,
    "claims": ClaimRecords,
    "ended": EndedClaims,
    "answers": Answers,
    "puts": Puts,
}
_TASK_PARTS: Final = ("records", "batches_without_rows", "released", "expired")


class SnapshotReader:
    """Reads a file from one end to the other.

    Attributes:
        last: the record that was read last.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = read_records(path)
        self.last = Found(0, 0, b"")

    def values(self) -> Iterator[Any]:
        """Yield the values of the records that are left to read.

        Raises:
            NewerVersionError: it is of a kind, or has a field, that is unknown.
        """
        while (data := self.data()) is not None:
            yield codec.decode_named(_KINDS, *codec.unpack(data))

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
        write_record(writer, "answers", Answers(entries=answers))
    for puts in gathered(snapshot.puts, _PUT_BYTES_A_RECORD, len):
        write_record(writer, "puts", Puts(records=puts))


@contextlib.contextmanager
def reading(path: Path, *, is_checkpoint: bool) -> Iterator[SnapshotReader]:
    """Read a file, first how it begins; what is wrong with it becomes SnapshotDamagedError or NewerVersionError."""
    reader = SnapshotReader(path)
    try:
        with no_collection():  # a million new objects, none of them garbage
            _check_header(next(reader.values()), is_checkpoint=is_checkpoint)
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
        kinds = ("the snapshot of a data folder", "a checkpoint")
        raise ValueError(f"it is {kinds[header.is_checkpoint]}, expected {kinds[is_checkpoint]}")


def read_state(values: Iterable[Any]) -> ServiceSnapshot:
    """Return the state that the values of records are of."""
    partitions: list[_Partition] = []
    answers: list[Entry] = []
    puts: list[bytes] = []
    for value in values:
        match value:
            case PartitionHeader():
                partitions.append(_Partition(value))
            case Answers():
                answers += value.entries
            case Puts():
                puts += value.records
            case _:
                partitions[-1].add(value)
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
        for name, records in (("records", task.records), ("batches_without_rows", task.batches_without_rows)):
            yield from (("claims", ClaimRecords.of(name, some)) for some in gathered(records, _CLAIMS_A_RECORD))
        for name, ids in (("released", task.released), ("expired", task.expired)):
            yield from (("ended", EndedClaims(name=name, ids=some)) for some in gathered(ids, _IDS_A_RECORD))


class _Partition:
    """Puts the records of a partition together."""

    def __init__(self, header: PartitionHeader) -> None:
        self._header = header
        self._tables = {name: TableReader(table) for name, table in header.tables.items()}
        self._tasks: list[tuple[TaskFacts, dict[str, list[Any]]]] = []

    def add(self, value: Any) -> None:
        match value:
            case ColumnPart():
                self._tables[value.table].add(value)
            case TaskFacts():
                self._tasks.append((value, {name: [] for name in _TASK_PARTS}))
            case _:
                self._tasks[-1][1][value.name].extend(value.all())

    def snapshot(self) -> PartitionSnapshot:
        tables = {name: table.snapshot() for name, table in self._tables.items()}
        tasks = [TaskSnapshot(facts=facts, **parts) for facts, parts in self._tasks]
        return PartitionSnapshot(facts=self._header.facts, tables=tables, tasks=tasks)


# Claims


class EncodedPart:
    """One rank's part of a plan as it was read, which decodes it when it is called."""

    __slots__ = ("rest", "rows")

    def __init__(self, rows: bytes, rest: bytes) -> None:
        self.rows = rows
        self.rest = rest

    def __call__(self) -> RankPlan:
        """Return the part."""
        return replace(codec.decode(RankPlan, self.rest), rows=np.frombuffer(self.rows, "<i8"))


class EncodedPlan:
    """The plan of a batch as it was read, which decodes it when it is called."""

    __slots__ = ("_plan", "_rests")

    def __init__(self, plan: Sequence[tuple[bytes, int]], rests: Sequence[bytes]) -> None:
        self._plan = plan
        self._rests = rests

    def parts(self) -> list[EncodedPart]:
        """Return the parts, by rank."""
        return [EncodedPart(rows, self._rests[number]) for rows, number in self._plan]

    def __call__(self) -> Plan:
        """Return the plan."""
        return Plan(ranks=tuple(part() for part in self.parts()))


class _Parts:
    """The parts of plans in one record; what several share but for their rows, as plain batches do, is in it once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[RankPlan, int]] = {}  # by identity, which is theirs while in here
        self._numbers: dict[bytes, int] = {}

    def add(self, part: RankPlan | Callable[[], RankPlan]) -> tuple[bytes, int]:
        """Return the rows of a part, and the position of all else."""
        if isinstance(part, EncodedPart):
            return part.rows, self._number_of(part.rest)
        part = part if isinstance(part, RankPlan) else part()
        key = tuple(id(getattr(part, name)) for name in _SHARED)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (part, self._number_of(codec.encode(replace(part, rows=np.zeros(0, np.int64)))))
        return part.rows.astype("<i8", copy=False).tobytes(), known[1]

    def all(self) -> list[bytes]:
        """Return what the parts are but for their rows."""
        return list(self._numbers)

    def _number_of(self, rest: bytes) -> int:
        return self._numbers.setdefault(rest, len(self._numbers))
