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
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.claims.ledger import Batch, Lease, QueueClaim, TaskFacts, TaskSnapshot
from tq_service.domain.claims.request import BatchSpec, LeaseTerms
from tq_service.domain.idempotency import Entry, LogSnapshot
from tq_service.domain.partition import PartitionFacts, PartitionSnapshot
from tq_service.domain.plan import Plan, RankPlan
from tq_service.durable import codec
from tq_service.durable.column_codec import ColumnPart, TableHeader, TableReader, encode_table
from tq_service.durable.record_file import RecordWriter, damaged, read_records
from tq_service.errors import NewerVersionError, SnapshotDamagedError, TqError
from tq_service.wire.collection import no_collection

FORMAT_VERSION: Final = 2
_CLAIMS_A_RECORD: Final = 256  # what is encoded without giving way to others
_IDS_A_RECORD: Final = 1024
_PUT_BYTES_A_RECORD: Final = 1 << 18
_MOST_PARTS: Final = 4096
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
    answers: LogSnapshot = ()
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
    with reading(path) as reader:
        read_header(reader, is_checkpoint=False)
        return read_state(reader)


# Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Begins a file: in a checkpoint the bytes of the puts are in blocks, and partitions name these for their puts."""

    format_version: int
    is_checkpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """Cells of a checkpoint that become one put when it is restored; their bytes are in the records that follow.

    Attributes:
        columns: their headers, in the order of their bytes; each a ColumnHeader message.
    """

    partition_id: str
    row_count: int
    columns: tuple[bytes, ...]
    size_bytes: int


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
        spec_numbers: for each batch the position of its spec.
        parts: what ranks get but for their rows, each a RankPlan; batches in a row mostly share it.
        plans: for each batch the parts of its ranks: the rows as bytes, and the position in `parts`.
    """

    are_without_rows: bool = False
    serials: NDArray[np.int64]
    batch_indexes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    batch_specs: list[BatchSpec]
    spec_numbers: NDArray[np.int64]
    parts: list[bytes]
    plans: list[Any]  # of lists of (bytes, int); looking at the types of a hundred thousand would take long


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredLease:
    """The lease of the claim at a position of its record."""

    position: int
    terms: LeaseTerms
    delivery_counts: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claims:
    """Claims of queue workers; for `parts` and `given` see `_Batches`."""

    serials: NDArray[np.int64]
    request_ids: list[bytes]
    parts: list[bytes]
    given: list[Any]  # of (bytes, int)
    leases: list[_StoredLease]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Ends a file of so many records before it."""

    record_count: int


_KINDS: Final[dict[str, Any]] = {
    "header": Header,
    "block": BlockHeader,
    "partition": _PartitionHeader,
    "column": ColumnPart,
    "task": TaskFacts,
    "batches": _Batches,
    "claims": _Claims,
    "released": list[tuple[bytes, float]],
    "expired": list[tuple[bytes, float]],
    "answers": list[Entry[Any]],
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
    for answers in _entries(snapshot.answers):
        write_record(writer, "answers", answers)
    for puts in _put_records(snapshot.puts):
        write_record(writer, "puts", puts)
    write_record(writer, "end", _End(record_count=writer.count))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[SnapshotReader]:
    """Read a file from its beginning; what is wrong with it becomes SnapshotDamagedError or NewerVersionError."""
    reader = SnapshotReader(path)
    try:
        with no_collection():  # a million new objects, none of them garbage
            yield reader
    except NewerVersionError as error:
        raise NewerVersionError(f"{path} at byte {reader.at}: {error}", metadata={"path": str(path)}) from error
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, TqError):
            raise
        raise reader.damaged(f"{type(error).__name__}: {error}") from error


def read_header(reader: SnapshotReader, *, is_checkpoint: bool) -> None:
    """Read how a file begins."""
    header: Header = reader.take("header")
    if header.format_version != FORMAT_VERSION:
        raise NewerVersionError(f"its format has version {header.format_version}, this service reads {FORMAT_VERSION}")
    if header.is_checkpoint != is_checkpoint:
        kinds = ("the snapshot of a data folder", "a checkpoint")
        raise ValueError(f"it is {kinds[header.is_checkpoint]}, expected {kinds[is_checkpoint]}")


def read_state(reader: SnapshotReader) -> ServiceSnapshot:
    """Read the state, to the end of the file."""
    partitions: list[PartitionSnapshot] = []
    answers: list[Sequence[Entry[Any]]] = []
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


class _PartEncoder:
    """Encodes the parts of plans; what several of them share but for their rows, as plain batches do, is so once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[RankPlan, bytes]] = {}  # by identity, which is theirs while in here

    def encode(self, part: RankPlan | Callable[[], RankPlan]) -> tuple[bytes, bytes]:
        """Return the rows, and all else of a part."""
        if isinstance(part, EncodedPart):
            return part.rows, part.rest
        part = part if isinstance(part, RankPlan) else part()
        key = tuple(id(getattr(part, name)) for name in _NOT_ROWS)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_PARTS:
                self._known.clear()
            known = self._known[key] = (part, codec.encode(replace(part, rows=_NO_ROWS)))
        return part.rows.astype("<i8", copy=False).tobytes(), known[1]


class _Parts:
    """The parts of one record, of which those that are alike but for their rows share what they have else."""

    def __init__(self, encoder: _PartEncoder) -> None:
        self._encoder = encoder
        self._numbers: dict[bytes, int] = {}

    def add(self, part: RankPlan | Callable[[], RankPlan]) -> tuple[bytes, int]:
        rows, rest = self._encoder.encode(part)
        return rows, self._numbers.setdefault(rest, len(self._numbers))

    def all(self) -> list[bytes]:
        return list(self._numbers)


def _record_records(task: TaskSnapshot) -> Iterator[tuple[str, Any]]:
    encoder = _PartEncoder()
    for some in _batched(task.records, _CLAIMS_A_RECORD):
        batches = [record for record in some if isinstance(record, Batch)]
        if batches:
            yield "batches", _encode_batches(batches, encoder)
        claims = [record for record in some if isinstance(record, QueueClaim)]
        if claims:
            yield "claims", _encode_claims(claims, encoder)
    if task.batches_without_rows:
        yield "batches", replace(_encode_batches(task.batches_without_rows, encoder), are_without_rows=True)


def _encode_batches(batches: Sequence[Batch], encoder: _PartEncoder) -> _Batches:
    numbers: dict[BatchSpec, int] = {}
    parts = _Parts(encoder)
    plans = []
    for batch in batches:
        kept = batch.kept_plan
        ranks = kept.parts() if isinstance(kept, EncodedPlan) else batch.plan.ranks
        plans.append(list(map(parts.add, ranks)))
    return _Batches(
        serials=np.array([batch.serial for batch in batches], np.int64),
        batch_indexes=np.array([batch.batch_index for batch in batches], np.int64),
        sizes=np.array([batch.size for batch in batches], np.int64),
        spec_numbers=np.array([numbers.setdefault(batch.batch_spec, len(numbers)) for batch in batches], np.int64),
        batch_specs=list(numbers),
        parts=parts.all(),
        plans=plans,
    )


def _batches_of(stored: _Batches) -> Iterator[Batch]:
    """Yield batches; how much is left of them follows from the rows."""
    facts = zip(
        stored.serials.tolist(),
        stored.batch_indexes.tolist(),
        stored.sizes.tolist(),
        stored.spec_numbers.tolist(),
        stored.plans,
        strict=True,
    )
    for serial, batch_index, size, spec, plan in facts:
        yield Batch(
            serial=serial,
            batch_spec=stored.batch_specs[spec],
            plan=EncodedPlan(plan, stored.parts),
            batch_index=batch_index,
            size=size,
            remaining=0,
        )


def _encode_claims(claims: Sequence[QueueClaim], encoder: _PartEncoder) -> _Claims:
    parts = _Parts(encoder)
    given = [parts.add(claim.kept_part) for claim in claims]
    return _Claims(
        serials=np.array([claim.serial for claim in claims], np.int64),
        request_ids=[claim.request_id for claim in claims],
        parts=parts.all(),
        given=given,
        leases=[
            _StoredLease(position=position, terms=claim.lease.terms, delivery_counts=claim.lease.delivery_counts)
            for position, claim in enumerate(claims)
            if claim.lease is not None
        ],
    )


def _claims_of(stored: _Claims) -> list[QueueClaim]:
    """Return claims of queue workers; how much is left of them follows from the rows."""
    claims = [
        QueueClaim(
            request_id=request_id,
            serial=serial,
            part=EncodedPart(rows, stored.parts[number]),
            remaining=0,
        )
        for serial, request_id, (rows, number) in zip(
            stored.serials.tolist(), stored.request_ids, stored.given, strict=True
        )
    ]
    for each in stored.leases:
        claim = claims[each.position]
        claim.lease = Lease(
            request_id=claim.request_id,
            serial=claim.serial,
            terms=each.terms,
            delivery_counts=each.delivery_counts,
            left_count=0,
        )
    return claims


# Ids, answers and puts


def _put_records(puts: Iterable[bytes]) -> Iterator[list[bytes]]:
    some: list[bytes] = []
    size = 0
    for put in puts:
        some.append(put)
        size += len(put)
        if size >= _PUT_BYTES_A_RECORD:
            yield some
            some, size = [], 0
    if some:
        yield some


def _entries(log: LogSnapshot) -> Iterator[Sequence[Entry[Any]]]:
    for block in log:
        yield from _batched(block, _IDS_A_RECORD)


def _batched(values: Iterable[Each], size: int) -> Iterator[list[Each]]:
    """Yield values in lists of so many, the last one apart."""
    left = iter(values)
    while some := list(islice(left, size)):
        yield some
