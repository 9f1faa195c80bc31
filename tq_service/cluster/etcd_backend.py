"""The log of a controller cluster, stored in etcd. The log survives the loss of any host and has a single writer.

Each write is a transaction that first checks the leader key and the end of the log. Therefore, a superseded controller
that still considers itself the leader cannot write. The lease determines which controller tries to write, and the
transaction determines whether the write succeeds. If the response to a write is lost, the end of the log shows whether
the write succeeded.

Records are stored in batches, with one transaction per batch. A batch that exceeds etcd's size limit is split into
chunks. The first chunk is written last, together with the new end of the log. Any keys after the end of the log are
left over from a failed attempt and are ignored. Each batch contains a checksum of all earlier batches, so logs that
differ at a record also differ at every later record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from tq_service.cluster.election import Lease
from tq_service.cluster.etcd import BEGINNING, ClusterKeys, Etcd, Position, after, delete, is_created_at, is_value, put
from tq_service.errors import (
    InvalidArgumentError,
    JournalDamagedError,
    JournalUnreachableError,
    NewerVersionError,
    PreconditionError,
    SupersededError,
)
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.journal.files import FileWriter
from tq_service.journal.log import NewRecord, Record, packed, unpacked
from tq_service.log_message import LogMessage

_HEADER: Final = struct.Struct("<4sQQQIIQ")
_MAGIC: Final = b"tqb1"
PIECE_BYTES: Final = 1 << 20  # etcd limits a request to 1.5 MiB
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
    """A batch of consecutive records. An empty batch marks a new leader or a rotation, and consumes one record number.

    Attributes:
        before: position at which the log ends before the batch is appended.
        after: position at which the log ends after the batch has been appended.
        body: packed records.
    """

    before: Position
    after: Position
    body: bytes

    @classmethod
    def of(cls, before: Position, epoch: int, records: Sequence[NewRecord]) -> Batch:
        """Create a batch of records that starts at the position `before`."""
        return cls._made(before, epoch, max(1, len(records)), b"".join(packed(records)))

    @classmethod
    def decoded(cls, first: int, pieces: Sequence[bytes]) -> Batch:
        """Decode a batch from its stored chunks.

        Raises:
            NewerVersionError: the chunks have an unknown format.
            JournalDamagedError: the chunks do not match the batch that was written.
        """
        header, body = _header_of(first, pieces[0]), b"".join(pieces)[_HEADER.size :]
        if header.first != first or len(body) != header.body_bytes:
            raise _damaged(first, "does not match the written batch (its position or size differs)")
        # The batch does not contain the previous writer's epoch. Only the chain checksum covers that epoch.
        return cls._made(Position(first - 1, 0, header.chain_before), header.epoch, header.record_count, body)

    @classmethod
    def _made(cls, before: Position, epoch: int, count: int, body: bytes) -> Batch:
        number = before.number + count
        end = struct.pack("<QQQ", before.chain, number, epoch)
        chain = xxhash.xxh3_64_intdigest(end, seed=xxhash.xxh3_64_intdigest(body))
        return cls(before=before, after=Position(number, epoch, chain), body=body)

    @property
    def first(self) -> int:
        """Number of the first record in the batch."""
        return self.before.number + 1

    def pieces(self) -> list[bytes]:
        """Split the batch into chunks. Each chunk is stored under a separate key."""
        count = max(1, -(-(len(self.body) + _HEADER.size) // PIECE_BYTES))
        number, epoch, _ = self.after
        header = _Header(
            _MAGIC, epoch, self.first, self.before.chain, number - self.before.number, count, len(self.body)
        )
        value = _HEADER.pack(*header) + self.body
        return [value[start : start + PIECE_BYTES] for start in range(0, len(value), PIECE_BYTES)]

    def records(self) -> Iterator[Record]:
        """Yield all records in the batch."""
        return unpacked(self.body, self.first)


def _header_of(first: int, value: bytes) -> _Header:
    if len(value) < _HEADER.size:
        raise _damaged(first, "is truncated")
    header = _Header._make(_HEADER.unpack_from(value))
    if header.magic != _MAGIC:
        raise NewerVersionError(f"the batch of record {first} was written by a newer version; install that version")
    return header


def _truncated(number: int) -> PreconditionError:
    return PreconditionError(
        f"record {number} of the journal was truncated, because a snapshot contains it; start from that snapshot"
    )


def _damaged(first: int, problem: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"the journal in etcd is damaged: the batch of record {first} {problem}. Restore a checkpoint into another "
        "cluster, or restore etcd.",
        metadata={"after_record": str(first - 1)},
    )


_log = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.1
_KEYS_A_DELETION: Final = 1000
_BATCHES_A_READ: Final = 64
_POSITION_FILE: Final = "etcd-position"


class EtcdBackend:
    """A `LogBackend` that stores the log in etcd.

    A standby follows the log, while the leader reads the log and then appends to it.

    Args:
        etcd: connection to etcd, closed by the caller.
        keys: keys that the controller cluster uses in etcd.
        member_id: id of this controller.
        directory: directory that contains the file with the last position seen by this controller.
        accept_loss: whether to continue even if etcd has lost records. If false, `read` raises an error in that case.

    Attributes:
        leadership: lease under which this controller leads, or None on a standby.
    """

    is_blocking = True
    group_bytes = 512 << 10
    segment_bytes = math.inf
    patience_seconds = 10.0
    is_disk_low = False  # etcd does not report that its disk is nearly full

    def __init__(
        self, etcd: Etcd, keys: ClusterKeys, *, member_id: str, directory: Path, accept_loss: bool = False
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._member_id = member_id
        self._position_path = directory / _POSITION_FILE
        self._accept_loss = accept_loss
        self.leadership: Lease | None = None
        self._seen = BEGINNING  # last known end of the log on a standby
        self._end = BEGINNING  # last known end of the log on the leader
        self._end_value = b""  # encoded `_end`, which each write compares with the value in etcd
        self._attempt: Batch | None = None  # a batch that may or may not have been written
        self._followed_from = 0  # first record needed by a standby, whose snapshot contains all earlier records
        self._is_loss_accepted = False

    # Reading, from any thread

    def end(self) -> Position:
        """Read the position of the log's end from etcd."""
        found = self._etcd.get(self._keys.last)
        return BEGINNING if found is None else Position.decode(found.value)

    def first_key(self, number: int) -> int:
        """Return the number of the first record in the batch that contains record `number`, or 0 if no batch does."""
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
        """Yield the batches up to the position `end`, starting with the batch that contains record `number`.

        Raises:
            PreconditionError: the log has been truncated and no longer contains the record.
            JournalDamagedError: a batch is missing or has been altered since it was written.
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
                raise _damaged(batch.first, "does not follow the previous batch")
            known = batch.after
            if known.number >= number:
                yield batch
        if known is None or known != end:
            missing = first if known is None else known.number + 1
            raise _truncated(number) if self.first_key(number) == 0 else _damaged(missing, "is missing")

    def _stored(self, first: int, end: Position) -> Iterator[Batch]:
        """Yield the stored batches from `first` to `end`. Skip chunks left over from failed attempts."""
        key, limit = self._keys.batch(first), _FEWEST_KEYS
        pieces: list[bytes] = []
        while first <= end.number:
            request = pb.EtcdRangeRequest(key=key, range_end=self._keys.batches_from(end.number + 1), limit=limit)
            answer: pb.EtcdRangeResponse = self._etcd.ask(request, _READ_SECONDS, timeout=5.0)
            for each in answer.kvs:
                if self._keys.first_of(each.key) != first:
                    continue
                if not pieces and each.key != self._keys.batch(first):
                    raise _damaged(first, "is missing its first chunk")
                pieces.append(each.value)
                if len(pieces) == _header_of(first, pieces[0]).piece_count:
                    batch = Batch.decoded(first, pieces)
                    yield batch
                    first, pieces = batch.after.number + 1, []
            if not answer.more:
                return
            key = answer.kvs[-1].key + b"\0"
            limit = min(2 * limit, _MOST_KEYS) if answer.ByteSize() < _ANSWER_BYTES else max(limit // 2, 1)

    @property
    def last_number(self) -> int | None:
        """Number of the last record in the log, or None on a standby. Only valid once `read` is exhausted."""
        return None if self.leadership is None else self._end.number

    @property
    def seen_number(self) -> int:
        """Number of the last durable record on the leader, or of the last record read on a standby."""
        return self._end.number or max(self._seen.number, self._followed_from - 1)

    def read(self, number: int) -> Iterator[Record]:
        """Yield the records from rotation `number` onward, or all records if `number` is 0.

        Raises:
            PreconditionError: some of these records have been truncated, so the caller must start from a snapshot.
            JournalDamagedError: etcd is missing records that this controller has seen, for example because etcd was
                restored from a backup.
            SupersededError: another controller has become the leader.
            JournalUnreachableError: etcd does not respond.
        """
        end = self.end()
        has_lost = self.has_lost(number, end)
        if not has_lost:
            for batch in self.batches(number, end):
                for record in batch.records():
                    if record.number >= number:
                        yield record
        if self.leadership is None:
            return
        self._end_value = end.encode() if end.number else b""
        if has_lost:
            removal = delete(self._keys.log, after(self._keys.log))
            if not self._etcd.ask(pb.EtcdTxnRequest(compare=[self._is_leader()], success=[removal])).succeeded:
                raise self._superseded()
            end = Position(number - 1, end.epoch, end.chain)
        self._end = end

    def has_lost(self, number: int, end: Position | None = None) -> bool:
        """Return whether etcd has lost records, so that the log must continue from this controller's snapshot. Blocks.

        Args:
            number: number of this controller's newest snapshot.
            end: end of the log, or None to read the end from etcd.

        Raises:
            JournalDamagedError: records are missing, and `accept_loss` is false.
        """
        end = end or self.end()
        seen, is_another = BEGINNING, False
        with contextlib.suppress(FileNotFoundError):
            seen = Position.decode(self._position_path.read_bytes())
        if seen.number and end.number >= seen.number:
            with contextlib.suppress(PreconditionError):  # the next batch was truncated, so no comparison is possible
                following = next(self.batches(seen.number + 1, end), None)
                found = end if following is None else following.before
                # The last position seen by this controller is the end of a batch. In a different log, batches may end
                # at other records.
                is_another = (found.number, found.chain) != (seen.number, seen.chain)
        if not is_another and end.number >= max(seen.number, number - 1):
            return False
        problem = (
            f"the journal in etcd ends with record {end.number}, or its records differ from those that this controller "
            f"has seen up to record {max(seen.number, number - 1)}: etcd was restored from an older state, or another "
            "cluster uses the same name"
        )
        if not self._accept_loss:
            raise JournalDamagedError(
                f"{problem}. Restore etcd from a newer backup, or start one controller with --accept-journal-loss to "
                "continue from its newest snapshot and discard later records.",
                metadata={"after_record": str(end.number)},
            )
        _log.error(LogMessage("accepted the loss of records missing from etcd", problem=problem))
        self._is_loss_accepted = True
        return number > 0 and (is_another or end.number < number - 1)

    async def follow(self, number: int) -> AsyncIterator[Record]:
        """Yield all durable records starting at `number`, and each new record once it is durable. Never returns.

        Raises:
            PreconditionError: some of these records have been truncated, so the caller must start from a snapshot.
            JournalDamagedError: the log in etcd is shorter than before.
        """
        self._followed_from = number
        seen = 0
        while True:
            try:
                end, some = await asyncio.to_thread(self._next_batches, number)
            except JournalUnreachableError as error:
                _log.warning(LogMessage("could not follow the journal; retrying", error=error))
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            if end.number < seen:
                raise JournalDamagedError(
                    f"the journal in etcd ended with record {seen} but now ends with record {end.number}, because etcd "
                    "was restored from an older state. Restore etcd from a newer backup.",
                    metadata={"after_record": str(end.number)},
                )
            seen = end.number
            for batch in some:
                self._seen = batch.after
                for record in batch.records():
                    if record.number >= number:
                        yield record
                number = max(number, batch.after.number + 1)
            if number > end.number:
                await asyncio.sleep(_LOOK_SECONDS)

    def _next_batches(self, number: int) -> tuple[Position, list[Batch]]:
        """Return the end of the log, and the next batches up to a limit. Blocks, so it must run in a thread."""
        end = self.end()
        return end, list(islice(self.batches(number, end), _BATCHES_A_READ))

    # Writing

    def write(self, number: int, records: Sequence[NewRecord]) -> None:
        """Append records to the log as a single batch.

        Raises:
            JournalUnreachableError: etcd does not respond. A retry determines whether the batch was written.
            SupersededError: another controller leads, so this controller can no longer write to the log. It is unknown
                whether the batch was written.
            InvalidArgumentError: etcd rejected the batch permanently.
        """
        batch = self._attempt or Batch.of(self._end, self._led_epoch, records)
        if self._attempt is None or not self._is_written(batch):
            self._attempt = batch
            self._append(batch)
        self._end, self._end_value, self._attempt = batch.after, batch.after.encode(), None
        if self._is_loss_accepted:  # otherwise, the next start would detect the accepted loss again
            self._is_loss_accepted = False
            self.sync_rotated(number)

    def _append(self, batch: Batch) -> None:
        first, *others = batch.pieces()
        last = self._keys.last
        unchanged = is_value(last, self._end_value) if self._end_value else is_created_at(last, 0)
        conditions = [self._is_leader(), unchanged]
        writes = [[put(self._keys.batch(batch.first, number), piece)] for number, piece in enumerate(others, 1)]
        writes.append([put(self._keys.batch(batch.first), first), put(last, batch.after.encode())])
        for operations in writes:
            answer: pb.EtcdTxnResponse = self._etcd.once(pb.EtcdTxnRequest(compare=conditions, success=operations))
            if not answer.succeeded:
                # An earlier attempt may have succeeded although its response was lost.
                if not self._is_written(batch):
                    raise self._superseded()
                return

    def _is_written(self, batch: Batch) -> bool:
        """Return whether the log ends with `batch`, or raise SupersededError if another controller wrote a batch."""
        found = self._etcd.get(self._keys.last, seconds=0.0)
        value = b"" if found is None else found.value
        if value == batch.after.encode():
            return True
        if value != self._end_value:
            raise self._superseded()
        return False

    @property
    def _led_epoch(self) -> int:
        if self.leadership is None:
            raise RuntimeError("the journal does not accept records from a standby")
        return self.leadership.epoch

    def _is_leader(self) -> pb.EtcdCompare:
        """Return an etcd condition that holds while this controller is still the leader."""
        return is_created_at(self._keys.leader, self._led_epoch)

    def _superseded(self) -> SupersededError:
        return SupersededError(
            "another controller leads; this controller may no longer write to the journal. Restart it as a standby.",
            metadata={"epoch": str(self._led_epoch)},
        )

    def close(self) -> None:
        """Do nothing, because the owner of `etcd` closes the connections."""

    # Snapshots

    def sync_rotated(self, number: int) -> None:
        """Save the last known position to the local disk. Call this before a snapshot depends on the position."""
        with FileWriter(self._position_path) as writer:
            writer.file.write((self._seen if self.leadership is None else self._end).encode())

    def truncate_before(self, number: int) -> None:
        """Publish the number of the first record that this controller needs.

        The leader also deletes obsolete records.
        """
        key = self._keys.snapshots + self._member_id.encode()
        self._etcd.ask(pb.EtcdTxnRequest(success=[put(key, b"%d" % number)]))
        if self.leadership is None:
            return
        needed = self._needed_number()
        kept = self.first_key(needed) if needed else 0
        while kept:
            request = pb.EtcdRangeRequest(
                key=self._keys.log,
                range_end=self._keys.batches_from(kept),
                limit=_KEYS_A_DELETION,
                keys_only=True,
            )
            found: pb.EtcdRangeResponse = self._etcd.ask(request)
            if not found.kvs:
                return
            answer: pb.EtcdTxnResponse = self._etcd.ask(
                pb.EtcdTxnRequest(
                    compare=[self._is_leader()],
                    success=[delete(self._keys.log, found.kvs[-1].key + b"\0")],
                )
            )
            if not answer.succeeded:
                return
            if not found.more:
                with contextlib.suppress(InvalidArgumentError):  # another controller has compacted further
                    self._etcd.ask(pb.EtcdCompactionRequest(revision=answer.header.revision))
                return

    def _needed_number(self) -> int:
        """Return the number of the first record to keep.

        All earlier records are contained in snapshots of at least two live controllers, or in a single snapshot if only
        one controller is live. A controller that rejoins later starts from one of these snapshots.
        """
        alive = {each.key.rpartition(b"/")[2] for each in self._etcd.get_all(self._keys.members)}
        alive.add(self._member_id.encode())
        found = {each.key.rpartition(b"/")[2]: int(each.value) for each in self._etcd.get_all(self._keys.snapshots)}
        numbers = sorted((found.get(member_id, 0) for member_id in alive), reverse=True)
        return numbers[min(1, len(numbers) - 1)]
