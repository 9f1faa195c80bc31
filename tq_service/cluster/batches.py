"""Batches: the groups of the log as etcd stores them, one per transaction, and their checked reading.

A batch is one value, or several pieces if etcd accepts no value of its size. The later pieces are written before the
first one, which is written together with the new end of the log. So keys after the end are left from a failed attempt
and ignored. Each batch contains the checksum of its predecessors: two logs that differ somewhere differ from there on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from tq_service.cluster.etcd import Etcd
from tq_service.cluster.keys import BEGINNING, ClusterKeys, Position
from tq_service.errors import JournalDamagedError, NewerVersionError, PreconditionError
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.journal.log import NewRecord, Record, packed, unpacked

_HEADER: Final = struct.Struct("<4sQQQIIQ")
_MAGIC: Final = b"tqb1"
PIECE_BYTES: Final = 1 << 20  # etcd's limit of a request is 1.5 MiB
_FEWEST_KEYS: Final = 16
_MOST_KEYS: Final = 4096
_ANSWER_BYTES: Final = 4 << 20
_READ_SECONDS: Final = 30.0


class _Header(NamedTuple):
    magic: bytes
    epoch: int
    first: int
    chain_before: int
    record_count: int
    piece_count: int
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive records; without any it takes one number, as where a leader begins or the log rotates.

    Attributes:
        before: the end of the log before it.
        after: the end after it.
        body: the records.
    """

    before: Position
    after: Position
    body: bytes

    @classmethod
    def of(cls, before: Position, epoch: int, records: Sequence[NewRecord]) -> Batch:
        """Return the batch that follows an end of the log."""
        return cls._made(before, epoch, max(1, len(records)), b"".join(packed(records)))

    @classmethod
    def decoded(cls, first: int, pieces: Sequence[bytes]) -> Batch:
        """Return the batch of these pieces.

        Raises:
            NewerVersionError: it has another format.
            JournalDamagedError: it differs from the written one.
        """
        header, body = _header_of(first, pieces[0]), b"".join(pieces)[_HEADER.size :]
        if header.first != first or len(body) != header.body_bytes:
            raise _damaged(first, "is not the one that was written")
        # The chain alone covers the epoch of the previous writer.
        return cls._made(Position(first - 1, 0, header.chain_before), header.epoch, header.record_count, body)

    @classmethod
    def _made(cls, before: Position, epoch: int, count: int, body: bytes) -> Batch:
        number = before.number + count
        end = struct.pack("<QQQ", before.chain, number, epoch)
        chain = xxhash.xxh3_64_intdigest(end, seed=xxhash.xxh3_64_intdigest(body))
        return cls(before=before, after=Position(number, epoch, chain), body=body)

    @property
    def first(self) -> int:
        """The number of its first record."""
        return self.before.number + 1

    def pieces(self) -> list[bytes]:
        """Return the values of its keys."""
        count = max(1, -(-(len(self.body) + _HEADER.size) // PIECE_BYTES))
        number, epoch, _ = self.after
        header = _Header(
            _MAGIC, epoch, self.first, self.before.chain, number - self.before.number, count, len(self.body)
        )
        value = _HEADER.pack(*header) + self.body
        return [value[start : start + PIECE_BYTES] for start in range(0, len(value), PIECE_BYTES)]

    def records(self) -> Iterator[Record]:
        """Yield its records."""
        return unpacked(self.body, self.first)


class BatchReader:
    """Reads batches of the log of a cluster. Blocks; may be used by several threads.

    Args:
        etcd: stores the log.
        keys: of the cluster.
    """

    def __init__(self, etcd: Etcd, keys: ClusterKeys) -> None:
        self._etcd = etcd
        self._keys = keys

    def end(self) -> Position:
        """Return the end of the log."""
        found = self._etcd.get(self._keys.last)
        return BEGINNING if found is None else Position.decode(found.value)

    def first_key(self, number: int) -> int:
        """Return the first record of the batch that contains a record, or 0 if no batch begins early enough."""
        request = pb.EtcdRangeRequest(
            key=self._keys.log,
            range_end=self._keys.batches_from(number + 1),
            limit=1,
            sort_order=2,
            keys_only=True,
        )
        answer: pb.EtcdRangeResponse = self._etcd.ask(request)
        return self._keys.first_of(answer.kvs[0].key) if answer.kvs else 0

    def batches(self, number: int, end: Position) -> Iterator[Batch]:
        """Yield the batches with a record and all later ones, up to an end of the log.

        Raises:
            PreconditionError: the record was truncated.
            JournalDamagedError: a batch is missing or differs from the written one.
        """
        number = max(number, 1)
        if number > end.number:
            return
        first = self.first_key(number)
        if not first:
            raise _truncated(number)
        known: Position | None = BEGINNING if first == 1 else None
        for batch in self._stored(first, end):
            if known is not None and (batch.before.number, batch.before.chain) != (known.number, known.chain):
                raise _damaged(batch.first, "does not follow the one before it")
            known = batch.after
            if known.number >= number:
                yield batch
        if known is None or known != end:
            missing = first if known is None else known.number + 1
            raise _truncated(number) if self.first_key(number) == 0 else _damaged(missing, "is missing")

    def _stored(self, first: int, end: Position) -> Iterator[Batch]:
        """Yield the batches as etcd has them, without pieces that a failed attempt left."""
        key, limit = self._keys.batch(first), _FEWEST_KEYS
        pieces: list[bytes] = []
        while first <= end.number:
            request = pb.EtcdRangeRequest(key=key, range_end=self._keys.batches_from(end.number + 1), limit=limit)
            answer: pb.EtcdRangeResponse = self._etcd.ask(request, _READ_SECONDS, timeout=5.0)
            for each in answer.kvs:
                if self._keys.first_of(each.key) != first:
                    continue
                if not pieces and each.key != self._keys.batch(first):
                    raise _damaged(first, "has no beginning")
                pieces.append(each.value)
                if len(pieces) == _header_of(first, pieces[0]).piece_count:
                    batch = Batch.decoded(first, pieces)
                    yield batch
                    first, pieces = batch.after.number + 1, []
            if not answer.more:
                return
            key = answer.kvs[-1].key + b"\0"
            limit = min(2 * limit, _MOST_KEYS) if answer.ByteSize() < _ANSWER_BYTES else max(limit // 2, 1)


def _header_of(first: int, value: bytes) -> _Header:
    if len(value) < _HEADER.size:
        raise _damaged(first, "is cut off")
    header = _Header._make(_HEADER.unpack_from(value))
    if header.magic != _MAGIC:
        raise NewerVersionError(f"the batch of record {first} was written by a newer version: install that one")
    return header


def _truncated(number: int) -> PreconditionError:
    return PreconditionError(
        f"what follows record {number} was given up for a snapshot that holds it; begin with that one"
    )


def _damaged(first: int, problem: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"the journal in etcd is damaged: the batch of record {first} {problem}; restore a checkpoint into another "
        "cluster, or restore etcd",
        metadata={"after_record": str(first - 1)},
    )
