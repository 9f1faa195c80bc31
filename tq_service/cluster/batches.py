"""Batches: what of the log is written to etcd in one transaction, and read back checked.

A batch is one value, or several pieces where etcd takes no value that large: the others are written first, then the
first piece, together with the new end of the log. So what is after the end is of an attempt that failed, and is not
looked at. Each batch has the checksum of all before it: two logs that differ somewhere differ from there on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from tq_service.cluster.etcd import Etcd
from tq_service.cluster.keys import BEGINNING, ClusterKeys, Position
from tq_service.durable.log.log import Record, Stream
from tq_service.errors import JournalDamagedError, NewerVersionError, PreconditionError
from tq_service.internal.v1 import etcd_pb2 as pb

_HEADER: Final = struct.Struct("<4sQQQIIQ")  # magic, epoch, first, chain before, records, pieces, bytes
_MAGIC: Final = b"tqb1"
_RECORD: Final = struct.Struct("<IB")
PIECE_BYTES: Final = 1 << 20  # etcd's limit of a request is 1.5 MiB
_FEWEST_KEYS: Final = 16
_MOST_KEYS: Final = 4096
_ANSWER_BYTES: Final = 4 << 20
_READ_SECONDS: Final = 30.0
_STREAMS: Final = {int(stream): stream for stream in Stream}

Parts = tuple[int, Sequence[bytes | bytearray]]
"""A record that is to be written: its stream, and its bytes in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records that follow each other; none where a leader begins, which takes one number.

    Attributes:
        before: the end of the log before it.
        after: that after it.
        body: the records.
    """

    before: Position
    after: Position
    body: bytes

    @classmethod
    def of(cls, before: Position, epoch: int, records: Sequence[Parts]) -> Batch:
        """Return the batch that goes on from an end of the log."""
        body = bytearray()
        for stream, parts in records:
            body += _RECORD.pack(sum(map(len, parts)), stream)
            for part in parts:
                body += part
        number = before.number + max(1, len(records))
        frozen = bytes(body)
        return cls(before=before, after=Position(number, epoch, _chain(before, number, epoch, frozen)), body=frozen)

    @property
    def first(self) -> int:
        """The number of its first record."""
        return self.before.number + 1

    def pieces(self) -> list[bytes]:
        """Return the values of its keys."""
        count = max(1, -(-(len(self.body) + _HEADER.size) // PIECE_BYTES))
        header = _HEADER.pack(
            _MAGIC,
            self.after.epoch,
            self.first,
            self.before.chain,
            self.after.number - self.before.number,
            count,
            len(self.body),
        )
        whole = header + self.body
        return [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]

    def records(self) -> Iterator[Record]:
        """Yield its records.

        Raises:
            NewerVersionError: one is of a stream that is not known.
        """
        number, at = self.first, 0
        while at < len(self.body):
            size, stream = _RECORD.unpack_from(self.body, at)
            at += _RECORD.size
            if stream not in _STREAMS:
                raise NewerVersionError(
                    f"record {number} of the journal is of the unknown stream {stream}; it was written by a newer "
                    "version: install that one"
                )
            yield Record(number, _STREAMS[stream], self.body[at : at + size])
            number, at = number + 1, at + size


def _chain(before: Position, number: int, epoch: int, body: bytes) -> int:
    end = struct.pack("<QQQ", before.chain, number, epoch)
    return xxhash.xxh3_64_intdigest(end, seed=xxhash.xxh3_64_intdigest(body))


class BatchReader:
    """Reads batches of the log of a cluster. Blocks; may be used by several threads.

    Args:
        etcd: where the log is.
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
        """Return the first record of the batch that has a record, 0 where none is there that could have it."""
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
        """Yield the batches that have a record and all after it, up to an end of the log.

        Raises:
            PreconditionError: the record was given up.
            JournalDamagedError: something is missing or is not as it was written.
        """
        number = max(number, 1)
        if number > end.number:
            return
        first = self.first_key(number)
        if not first:
            raise _too_late(number)
        known: Position | None = BEGINNING if first == 1 else None
        for values in self._values(first, end):
            batch = _decode(first, values)
            if known is not None and (batch.before.number, batch.before.chain) != (known.number, known.chain):
                raise _damaged(first, "does not go on from the one before it")
            known = batch.after
            first = known.number + 1
            if known.number >= number:
                yield batch
        if known is None or known != end:
            raise _too_late(number) if self.first_key(number) == 0 else _damaged(first, "is missing")

    def _values(self, first: int, end: Position) -> Iterator[list[bytes]]:
        """Yield the values of the pieces of each batch, from one on; those that no batch counts are passed over."""
        key, limit = self._keys.batch(first), _FEWEST_KEYS
        pieces: list[bytes] = []
        wanted = 0
        while first <= end.number:
            request = pb.EtcdRangeRequest(key=key, range_end=self._keys.batches_from(end.number + 1), limit=limit)
            answer: pb.EtcdRangeResponse = self._etcd.ask(request, _READ_SECONDS, timeout=5.0)
            for each in answer.kvs:
                if self._keys.first_of(each.key) != first or len(pieces) >= wanted > 0:
                    continue  # left by an attempt that failed
                if not pieces:
                    if each.key != self._keys.batch(first):
                        raise _damaged(first, "has no beginning")
                    wanted = _pieces_of(first, each.value)
                pieces.append(each.value)
                if len(pieces) == wanted:
                    first += _count_of(pieces[0])
                    yield pieces
                    pieces, wanted = [], 0
            if not answer.more:
                return
            key = answer.kvs[-1].key + b"\0"
            limit = min(2 * limit, _MOST_KEYS) if answer.ByteSize() < _ANSWER_BYTES else max(limit // 2, 1)


def _header(first: int, value: bytes) -> tuple[int, int, int, int, int, int]:
    if len(value) < _HEADER.size:
        raise _damaged(first, "is cut off")
    magic, epoch, found, chain, count, pieces, size = _HEADER.unpack_from(value)
    if magic != _MAGIC:
        raise NewerVersionError(f"the batch of record {first} was written by a newer version: install that one")
    return epoch, found, chain, count, pieces, size


def _pieces_of(first: int, value: bytes) -> int:
    return _header(first, value)[4]


def _count_of(value: bytes) -> int:
    return _header(0, value)[3]


def _decode(first: int, values: Sequence[bytes]) -> Batch:
    epoch, found, chain, count, _, size = _header(first, values[0])
    body = b"".join(values)[_HEADER.size :]
    if found != first or len(body) != size:
        raise _damaged(first, "is not the one that was written")
    # The epoch of the writer before is known from the chain alone.
    before = Position(first - 1, 0, chain)
    number = first - 1 + count
    return Batch(before=before, after=Position(number, epoch, _chain(before, number, epoch, body)), body=body)


def _too_late(number: int) -> PreconditionError:
    return PreconditionError(
        f"what follows record {number} was given up for a snapshot that holds it; begin with that one"
    )


def _damaged(first: int, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"the journal in etcd is damaged: the batch of record {first} {what}; restore a checkpoint into another "
        "cluster, or restore etcd",
        metadata={"after_record": str(first - 1)},
    )
