"""What tasks have on record as records of a snapshot, and back. Plans stay encoded until somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from tq_service.domain.aging_log import Entry, FrozenLog
from tq_service.domain.claims.ledger import Batch, Lease, QueueClaim
from tq_service.domain.claims.request import BatchSpec, LeaseTerms
from tq_service.domain.plan import Pack, Plan, RankPlan
from tq_service.durable.messages import decode_binding, decode_part, encode_binding, encode_indexes, encode_steps
from tq_service.v1 import journal_pb2
from tq_service.v1 import snapshot_pb2 as pb

_CLAIMS_A_RECORD: Final = 256  # what is encoded without giving way to others
_IDS_A_RECORD: Final = 1024
_MOST_STEPS: Final = 4096
Steps = tuple[tuple[Pack, ...], ...]
Each = TypeVar("Each")


class EncodedPart:
    """One rank's part of a plan as it was read, which decodes it when it is called."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __call__(self) -> RankPlan:
        """Return the part."""
        return decode_part(journal_pb2.PlannedPart.FromString(self.data))


class EncodedPlan:
    """The plan of a batch as it was read, which decodes it when it is called."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __call__(self) -> Plan:
        """Return the plan."""
        return Plan(ranks=tuple(EncodedPart(part)() for part in pb.SnapshotPlan.FromString(self.data).ranks))


class PartEncoder:
    """Encodes the parts of plans; steps that several of them share, as plain batches do, are encoded once."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[Steps, bytes]] = {}  # by identity, which is theirs while they are in here

    def encode(self, part: RankPlan) -> bytes:
        """Return a PlannedPart, encoded: a message is what its fields are, one after the other."""
        rows = journal_pb2.PlannedPart(rows=encode_indexes(part.rows)).SerializeToString()
        known = self._steps.get(id(part.steps))
        if known is None:
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            steps = journal_pb2.PlannedPart(steps=encode_steps(part.steps)).SerializeToString()
            known = self._steps[id(part.steps)] = (part.steps, steps)
        return rows + known[1]


# Claims


def encode_records(records: Sequence[Batch | QueueClaim], encoder: PartEncoder) -> Iterator[pb.SnapshotRecord]:
    """Yield the records of claims that have rows."""
    claims = [record for record in records if isinstance(record, QueueClaim)]
    for some in _batched(claims, _CLAIMS_A_RECORD):
        yield pb.SnapshotRecord(claims=_encode_claims(some, encoder))
    yield from encode_batches([record for record in records if isinstance(record, Batch)], encoder)


def encode_batches(
    batches: Sequence[Batch], encoder: PartEncoder, *, have_rows: bool = True
) -> Iterator[pb.SnapshotRecord]:
    """Yield the records of batches with their serials, 0 for those whose rows are gone."""
    for some in _batched(batches, _CLAIMS_A_RECORD):
        serials = [batch.serial if have_rows else 0 for batch in some]
        yield pb.SnapshotRecord(batches=_encode_batches(some, serials, encoder))


def _encode_claims(claims: Sequence[QueueClaim], encoder: PartEncoder) -> pb.SnapshotClaims:
    return pb.SnapshotClaims(
        serials=_integers(claim.serial for claim in claims),
        request_ids=[claim.request_id for claim in claims],
        parts=[_part_bytes(claim, encoder) for claim in claims],
        leases=[
            _encode_lease(position, claim.lease) for position, claim in enumerate(claims) if claim.lease is not None
        ],
    )


def _part_bytes(claim: QueueClaim, encoder: PartEncoder) -> bytes:
    kept = claim.kept_part
    return kept.data if isinstance(kept, EncodedPart) else encoder.encode(claim.part)


def _encode_lease(position: int, lease: Lease) -> pb.SnapshotLease:
    return pb.SnapshotLease(
        position=position,
        seconds=lease.terms.seconds,
        max_deliveries=lease.terms.max_deliveries or 0,
        group_block_size=lease.terms.group_block_size,
        delivery_counts=lease.delivery_counts.astype("<i4", copy=False).tobytes(),
    )


def _encode_batches(batches: Sequence[Batch], serials: Sequence[int], encoder: PartEncoder) -> pb.SnapshotBatches:
    numbers: dict[BatchSpec, int] = {}
    indexes = [numbers.setdefault(batch.batch_spec, len(numbers)) for batch in batches]
    return pb.SnapshotBatches(
        serials=_integers(serials),
        batch_indexes=_integers(batch.batch_index for batch in batches),
        sizes=_integers(batch.size for batch in batches),
        bindings=map(encode_binding, numbers),
        binding_indexes=np.array(indexes, "<i4").tobytes(),
        plans=[_plan_bytes(batch, encoder) for batch in batches],
    )


def _plan_bytes(batch: Batch, encoder: PartEncoder) -> bytes:
    kept = batch.kept_plan
    if isinstance(kept, EncodedPlan):
        return kept.data
    return pb.SnapshotPlan(ranks=map(encoder.encode, batch.plan.ranks)).SerializeToString()


def decode_claims(message: pb.SnapshotClaims) -> list[QueueClaim]:
    """Return claims of queue workers; how much is left of them follows from the rows.

    Raises:
        ValueError: parts of the record differ in number.
    """
    serials = _integers_of(message.serials)
    claims = [
        QueueClaim(request_id=request_id, serial=serial, part=EncodedPart(part), remaining=0)
        for serial, request_id, part in zip(serials, message.request_ids, message.parts, strict=True)
    ]
    for lease in message.leases:
        claim = claims[lease.position]
        claim.lease = _decode_lease(lease, claim)
    return claims


def _decode_lease(message: pb.SnapshotLease, claim: QueueClaim) -> Lease:
    return Lease(
        request_id=claim.request_id,
        serial=claim.serial,
        terms=LeaseTerms(
            seconds=message.seconds,
            max_deliveries=message.max_deliveries or None,
            group_block_size=message.group_block_size if message.HasField("group_block_size") else None,
        ),
        delivery_counts=np.frombuffer(message.delivery_counts, "<i4"),
        left_count=0,
    )


def decode_batches(message: pb.SnapshotBatches) -> list[Batch]:
    """Return batches, with serial 0 where their rows are gone; how much is left of them follows from the rows.

    Raises:
        ValueError, IndexError: parts of the record differ in number.
    """
    bindings = list(map(decode_binding, message.bindings))
    facts = zip(
        _integers_of(message.serials),
        _integers_of(message.batch_indexes),
        _integers_of(message.sizes),
        np.frombuffer(message.binding_indexes, "<i4").tolist(),
        message.plans,
        strict=True,
    )
    return [
        Batch(
            serial=serial,
            batch_spec=bindings[binding],
            plan=EncodedPlan(plan),
            batch_index=index,
            size=size,
            remaining=0,
        )
        for serial, index, size, binding, plan in facts
    ]


# Ids and answers


def encode_ids(log: FrozenLog) -> Iterator[pb.SnapshotRecord]:
    """Yield the records of ids that are remembered."""
    for some in _entries(log):
        ids = pb.SnapshotIds(ids=[entry.key for entry in some], ages=_ages(some, log))
        yield pb.SnapshotRecord(ids=ids)


def decode_ids(message: pb.SnapshotIds) -> list[Entry[Any]]:
    """Return ids, their ages as times before 0."""
    return [Entry(key, seconds, None) for key, seconds in zip(message.ids, _times(message.ages), strict=True)]


def encode_answers(log: FrozenLog) -> Iterator[pb.SnapshotRecord]:
    """Yield the records of answers, packed as (type of the message, bytes)."""
    for some in _entries(log):
        numbers: dict[str, int] = {}
        indexes = [numbers.setdefault(entry.value[0].DESCRIPTOR.name, len(numbers)) for entry in some]
        answers = pb.SnapshotAnswers(
            request_ids=[entry.key for entry in some],
            ages=_ages(some, log),
            message_types=numbers,
            type_indexes=np.array(indexes, "<i4").tobytes(),
            answers=[entry.value[1] for entry in some],
        )
        yield pb.SnapshotRecord(answers=answers)


def decode_answers(message: pb.SnapshotAnswers, type_of: Callable[[str], Any]) -> list[Entry[Any]]:
    """Return answers, their ages as times before 0.

    Args:
        message: a record of them.
        type_of: returns the type of a message by its name.

    Raises:
        ValueError, IndexError: parts of the record differ in number.
        AttributeError: there is no such type.
    """
    types = [type_of(name) for name in message.message_types]
    indexes = np.frombuffer(message.type_indexes, "<i4").tolist()
    facts = zip(message.request_ids, _times(message.ages), indexes, message.answers, strict=True)
    return [Entry(key, seconds, (types[index], answer)) for key, seconds, index, answer in facts]


def _entries(log: FrozenLog) -> Iterator[Sequence[Entry[Any]]]:
    for block in log.blocks:
        yield from _batched(block, _IDS_A_RECORD)


def _ages(entries: Sequence[Entry[Any]], log: FrozenLog) -> bytes:
    return np.array([log.now_seconds - entry.seconds for entry in entries], "<f8").tobytes()


def _times(ages: bytes) -> list[float]:
    times: list[float] = (-np.frombuffer(ages, "<f8")).tolist()
    return times


def _integers(values: Iterable[int]) -> bytes:
    return np.array(list(values), "<i8").tobytes()


def _integers_of(data: bytes) -> list[int]:
    integers: list[int] = np.frombuffer(data, "<i8").tolist()
    return integers


def _batched(values: Sequence[Each], size: int) -> Iterator[Sequence[Each]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
