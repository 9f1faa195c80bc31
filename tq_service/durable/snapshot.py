"""Snapshots: the state of a service at one moment in one file, from which it is read whole or not at all.

A file is of records (`record_file`), each of which but the bytes of blocks is (kind, value):

    header, [block, bytes ...] ..., state, end
    state: [partition, column ..., [task, (batches | claims | released | expired) ...] ...] ..., answers ..., puts ...

Values are dataclasses, in the encoding of `codec`; columns are in that of `column_codec`. Columns are found by name:
one that the file does not have takes its fill (see `Partition.restore`), one that this version does not have was
written by a newer one, as was a kind or a field that is unknown. That is an error of its own and never taken for
damage: going on with an older snapshot would lose what came after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tq_service.domain.claims.ledger import Batch, Lease, QueueClaim, TaskFacts, TaskSnapshot
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.idempotency import AnswerBlocks, Entry
from tq_service.domain.partition import PartitionFacts, PartitionSnapshot
from tq_service.domain.plan import Plan, RankPlan
from tq_service.durable import codec
from tq_service.durable.column_codec import ColumnPart, TableHeader, TableReader, encode_table
from tq_service.durable.record_file import RecordWriter, damaged, gathered, read_records
from tq_service.errors import NewerVersionError, SnapshotDamagedError, TqError
from tq_service.wire.collection import no_collection
from tq_service.wire.columns import ColumnShape

FORMAT_VERSION: Final = 3
_CLAIMS_A_RECORD: Final = 256  # what is encoded without giving way to others
_IDS_A_RECORD: Final = 1024
_PUT_BYTES_A_RECORD: Final = 1 << 18
_NO_ROWS: Final = np.zeros(0, np.int64)
_NOT_ROWS: Final = tuple(each.name for each in fields(RankPlan) if each.name != "rows")
Each = TypeVar("Each")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """All that a service has to know to go on where it was.

    Attributes:
        partitions: of the controller.
        answers: of the controller, for retries; each packed as (name of the message, bytes).
        puts: of the storage engine, a record of each as the engine gave it.
    """

    partitions: Sequence[PartitionSnapshot] = ()
    answers: AnswerBlocks = ()
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
        return read_state(reader)


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
        at: where their bytes begin in the file.
    """

    partition_id: str
    row_count: int
    columns: tuple[ColumnShape, ...]
    at: int = field(default=0, metadata={"is_encoded": False})

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns together."""
        return sum(column.value_bytes for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartitionHeader:
    """Begins a partition; its columns and then its tasks follow."""

    facts: PartitionFacts
    tables: dict[str, TableHeader]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """Planned batches.

    Attributes:
        are_without_rows: whether they are kept though their rows are gone.
        batch_specs: what they were planned by; batches in a row mostly share it.
        parts: what ranks get but for their rows, each a RankPlan; batches in a row mostly share it.
        batches: of each (serial, batch_index, size, position in `batch_specs`, parts of its ranks), where the part of a
            rank is (rows as bytes, position in `parts`).
    """

    are_without_rows: bool = False
    batch_specs: list[BatchSpec]
    parts: list[bytes]
    batches: list[Any]  # looking at the types of a hundred thousand would take long


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claims:
    """Claims of queue workers.

    Attributes:
        parts: see `_Batches`.
        claims: of each (serial, request_id, rows as bytes, position in `parts`).
        leases: of those that were made with one, by their serials.
    """

    parts: list[bytes]
    claims: list[Any]
    leases: list[Lease]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Ends a file of so many records before it."""

    record_count: int


_KINDS: Final[dict[str, Any]] = {
    "header": Header,
    "block": StoredBlock,
    "partition": _PartitionHeader,
    "column": ColumnPart,
    "task": TaskFacts,
    "batches": _Batches,
    "claims": _Claims,
    "released": list[tuple[bytes, float]],
    "expired": list[tuple[bytes, float]],
    "answers": list[Entry],
    "puts": list[bytes],
    "end": _End,
}


class SnapshotReader:
    """A place in a file.

    Attributes:
        count: number of records before it.
        at: where the next record begins, in bytes; that of the last one at the end of the file.
    """

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.at = 0
        self._path = path
        self._records = read_records(path)
        self._data: bytes | None = None
        self._value: Any = None
        self._kind: str | None = None
        self._advance()

    @property
    def kind(self) -> str | None:
        """Kind of the next record; None at the end of the file.

        Raises:
            NewerVersionError: it is unknown.
        """
        if self._kind is None and self._data is not None:
            self._kind, self._value = codec.unpack(self._data)
            if self._kind not in _KINDS:
                raise NewerVersionError(
                    f"a record is of the unknown kind {self._kind!r}; it was written by a newer version: install that "
                    f"one"
                )
        return self._kind

    def take(self, kind: str) -> Any:
        """Return the next record, which is of this kind.

        Raises:
            SnapshotDamagedError: it is of another, or damaged.
            NewerVersionError: it has a field that is unknown.
        """
        got = self.kind
        if got != kind:
            raise self.damaged(f"expected a record of kind {kind!r}, got {got or 'the end of the file'!r}")
        value = codec.decoder(_KINDS[kind])(self._value)
        self._take()
        return value

    def take_bytes(self) -> bytes:
        """Return the next record, which is bytes of a block.

        Raises:
            SnapshotDamagedError: the file ends here, or the record is damaged.
        """
        data = self._data
        if data is None:
            raise self.damaged("expected bytes of a block, got the end of the file")
        self._take()
        return data

    def damaged(self, what: str) -> SnapshotDamagedError:
        """Return the error for the place that is being read."""
        return damaged(self._path, self.at, what)

    def _take(self) -> None:
        self.count += 1
        self._advance()

    def _advance(self) -> None:
        self._data = self._value = self._kind = None
        found = next(self._records, None)
        if found is not None:
            self.at, self._data = found


# What snapshots and checkpoints have in common


def write_record(writer: RecordWriter, kind: str, value: Any) -> None:
    """Append a record."""
    writer.write(codec.encode((kind, value)))


def write_header(writer: RecordWriter, *, is_checkpoint: bool) -> None:
    """Begin a file."""
    write_record(writer, "header", Header(format_version=FORMAT_VERSION, is_checkpoint=is_checkpoint))


def write_state(writer: RecordWriter, snapshot: ServiceSnapshot) -> None:
    """Write the state, and end the file."""
    for partition in snapshot.partitions:
        for kind, value in _partition_records(partition):
            write_record(writer, kind, value)
    for answers in _batched(chain.from_iterable(snapshot.answers), _IDS_A_RECORD):
        write_record(writer, "answers", answers)
    for puts in gathered(snapshot.puts, len, _PUT_BYTES_A_RECORD):
        write_record(writer, "puts", puts)
    write_record(writer, "end", _End(record_count=writer.count))


@contextlib.contextmanager
def reading(path: Path, *, is_checkpoint: bool) -> Iterator[SnapshotReader]:
    """Read a file, first how it begins; what is wrong with it becomes SnapshotDamagedError or NewerVersionError."""
    reader = SnapshotReader(path)
    try:
        with no_collection():  # a million new objects, none of them garbage
            _check_header(reader.take("header"), is_checkpoint=is_checkpoint)
            yield reader
    except NewerVersionError as error:
        raise NewerVersionError(f"{path} at byte {reader.at}: {error}", metadata={"path": str(path)}) from error
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, TqError):
            raise
        raise reader.damaged(f"{type(error).__name__}: {error}") from error


def _check_header(header: Header, *, is_checkpoint: bool) -> None:
    if header.format_version != FORMAT_VERSION:
        raise NewerVersionError(f"its format has version {header.format_version}, this service reads {FORMAT_VERSION}")
    if header.is_checkpoint != is_checkpoint:
        kinds = ("the snapshot of a data folder", "a checkpoint")
        raise ValueError(f"it is {kinds[header.is_checkpoint]}, expected {kinds[is_checkpoint]}")


def read_state(reader: SnapshotReader) -> ServiceSnapshot:
    """Read the state, to the end of the file."""
    partitions: list[PartitionSnapshot] = []
    answers: list[Sequence[Entry]] = []
    puts: list[bytes] = []
    while reader.kind == "partition":
        partitions.append(_read_partition(reader))
    while reader.kind == "answers":
        answers.append(reader.take("answers"))
    while reader.kind == "puts":
        puts += reader.take("puts")
    expected = reader.count
    end: _End = reader.take("end")
    if end.record_count != expected or reader.kind is not None:
        raise reader.damaged("its end is not where it should be")
    return ServiceSnapshot(partitions=partitions, answers=answers, puts=puts)


# Partitions


def _partition_records(partition: PartitionSnapshot) -> Iterator[tuple[str, Any]]:
    tables = {name: TableHeader.of(table) for name, table in partition.tables.items()}
    yield "partition", _PartitionHeader(facts=partition.facts, tables=tables)
    for name, table in partition.tables.items():
        for part in encode_table(name, table):
            yield "column", part
    for task in partition.tasks:
        yield "task", task.facts
        yield from _record_records(task)
        for kind, ids in (("released", task.released), ("expired", task.expired)):
            yield from ((kind, some) for some in _batched(ids, _IDS_A_RECORD))


def _read_partition(reader: SnapshotReader) -> PartitionSnapshot:
    header: _PartitionHeader = reader.take("partition")
    tables = {name: TableReader(table) for name, table in header.tables.items()}
    while reader.kind == "column":
        part: ColumnPart = reader.take("column")
        tables[part.table].add(part)
    snapshots = {name: table.snapshot() for name, table in tables.items()}
    tasks: list[TaskSnapshot] = []
    while reader.kind == "task":
        tasks.append(_read_task(reader))
    return PartitionSnapshot(facts=header.facts, tables=snapshots, tasks=tasks)


def _read_task(reader: SnapshotReader) -> TaskSnapshot:
    facts: TaskFacts = reader.take("task")
    records: list[Batch | QueueClaim] = []
    without_rows: list[Batch] = []
    ended: dict[str, list[tuple[bytes, float]]] = {"released": [], "expired": []}
    while (kind := reader.kind) in {"batches", "claims", *ended}:
        if kind == "batches":
            batches: _Batches = reader.take(kind)
            (without_rows if batches.are_without_rows else records).extend(_batches_of(batches))
        elif kind == "claims":
            records += _claims_of(reader.take(kind))
        elif kind is not None:
            ended[kind] += reader.take(kind)
    return TaskSnapshot(facts=facts, records=records, batches_without_rows=without_rows, **ended)


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
        key = tuple(id(getattr(part, name)) for name in _NOT_ROWS)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (part, self._number_of(codec.encode(replace(part, rows=_NO_ROWS))))
        return part.rows.astype("<i8", copy=False).tobytes(), known[1]

    def all(self) -> list[bytes]:
        """Return what the parts are but for their rows."""
        return list(self._numbers)

    def _number_of(self, rest: bytes) -> int:
        return self._numbers.setdefault(rest, len(self._numbers))


def _record_records(task: TaskSnapshot) -> Iterator[tuple[str, Any]]:
    for some in _batched(task.records, _CLAIMS_A_RECORD):
        batches = [record for record in some if isinstance(record, Batch)]
        if batches:
            yield "batches", _encode_batches(batches)
        claims = [record for record in some if isinstance(record, QueueClaim)]
        if claims:
            yield "claims", _encode_claims(claims)
    if task.batches_without_rows:
        yield "batches", replace(_encode_batches(task.batches_without_rows), are_without_rows=True)


def _encode_batches(batches: Sequence[Batch]) -> _Batches:
    specs: dict[BatchSpec, int] = {}
    parts = _Parts()
    encoded = []
    for batch in batches:
        kept = batch.kept_plan
        ranks = list(map(parts.add, kept.parts() if isinstance(kept, EncodedPlan) else batch.plan.ranks))
        spec = specs.setdefault(batch.batch_spec, len(specs))
        encoded.append((batch.serial, batch.batch_index, batch.size, spec, ranks))
    return _Batches(batch_specs=list(specs), parts=parts.all(), batches=encoded)


def _batches_of(stored: _Batches) -> Iterator[Batch]:
    """Yield batches; how much is left of them follows from the rows."""
    for serial, batch_index, size, spec, ranks in stored.batches:
        yield Batch(
            serial=serial,
            batch_spec=stored.batch_specs[spec],
            plan=EncodedPlan(ranks, stored.parts),
            batch_index=batch_index,
            size=size,
            remaining=0,
        )


def _encode_claims(claims: Sequence[QueueClaim]) -> _Claims:
    parts = _Parts()
    encoded = [(claim.serial, claim.request_id, *parts.add(claim.kept_part)) for claim in claims]
    leases = [claim.lease for claim in claims if claim.lease is not None]
    return _Claims(parts=parts.all(), claims=encoded, leases=leases)


def _claims_of(stored: _Claims) -> Iterator[QueueClaim]:
    """Yield claims of queue workers; how much is left of them follows from the rows."""
    leases = {lease.serial: lease for lease in stored.leases}
    for serial, request_id, rows, number in stored.claims:
        part = EncodedPart(rows, stored.parts[number])
        yield QueueClaim(request_id=request_id, serial=serial, part=part, remaining=0, lease=leases.get(serial))


def _batched(values: Iterable[Each], size: int) -> Iterator[list[Each]]:
    """Yield values in lists of so many, the last one apart."""
    left = iter(values)
    while some := list(islice(left, size)):
        yield some
