"""The log of a cluster of controllers: in etcd, so that it outlives any host, and one controller at a time writes it.

An append is one transaction, which compares the key of the leader and the end of the log, so that a controller that was
superseded writes nothing, whatever it believes: the lease decides which controller tries, the log which one may.
An append without an answer is resolved by reading the end of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

from tq_service.cluster.batches import Batch, BatchReader, Parts
from tq_service.cluster.election import Leadership
from tq_service.cluster.etcd import Etcd, delete, is_created_at, is_value, put
from tq_service.cluster.keys import BEGINNING, ClusterKeys, Position
from tq_service.durable.files import FileWriter
from tq_service.durable.log.log import Record, Stream
from tq_service.durable.log.segment_log import DurabilityWaiters
from tq_service.errors import (
    InvalidArgumentError,
    JournalDamagedError,
    JournalUnreachableError,
    PreconditionError,
    SupersededError,
    TqError,
)
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
_BATCH_BYTES: Final = 512 << 10  # one that more groups are added to
_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 1.0
_KEYS_A_DELETION: Final = 1000
_BATCHES_A_READ: Final = 64
_POSITION_FILE: Final = "etcd-position.json"


class EtcdLog:
    """A `Log` in etcd. A standby follows it; it takes records once it leads, and what is there was read.

    Only `Stream.CHANGES` belongs here: the puts of a storage service are of its host.

    Args:
        etcd: where it is; its owner closes it.
        keys: of the cluster.
        member_id: of this controller.
        directory: where this controller remembers how far it has seen the log.
        accept_loss: whether `read` goes on where etcd has lost what this controller has seen, instead of raising.

    Attributes:
        leadership: of this controller; None: it is a standby.
    """

    def __init__(
        self, etcd: Etcd, keys: ClusterKeys, *, member_id: str, directory: Path, accept_loss: bool = False
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._member_id = member_id
        self._position_path = directory / _POSITION_FILE
        self._accept_loss = accept_loss
        self._reader = BatchReader(etcd, keys)
        self.leadership: Leadership | None = None
        self._appended = self._durable = 0
        self._group: list[Parts] = []  # appended in this step of the loop
        self._group_bytes = 0
        self._waiting = DurabilityWaiters()
        self._followers: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned: TqError | None = None
        self._is_closed = False
        # The loop adds groups to the queue. The worker takes them, and alone uses the end of the log and the attempt.
        self._queue: deque[tuple[list[Parts], int]] = deque()  # each with its bytes
        self._committing: Future[None] | None = None
        self._committed = 0
        self._end: Position | None = None  # None: it takes no records yet
        self._end_value = b""  # what etcd has for it
        self._attempt: Batch | None = None  # of which it is not known whether it was written
        self._seen = BEGINNING
        self._followed_from = 0  # number of the first record that a standby needs; it has the others from a snapshot
        self._is_loss_accepted = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tq-log")

    # Reading

    def read(self, number: int) -> Iterator[Record]:
        """Yield all since a snapshot; see `Log.read`. Where this controller leads, it takes records from then on.

        Raises:
            PreconditionError: some of them were truncated; begin with a snapshot.
            JournalDamagedError: etcd has less than this controller has seen, as after a restore from an old backup.
            SupersededError: another controller leads by now.
            JournalUnreachableError: etcd does not answer.
        """
        if self._end is not None:
            return
        end = self._reader.end()
        has_lost = self._check_seen(end, number)
        if not has_lost:
            for batch in self._reader.batches(number, end):
                for record in batch.records():
                    if record.number >= number:
                        yield record
        if self.leadership is not None:
            self._begin(end, number if has_lost else 0)

    def check(self, number: int) -> bool:
        """Check that etcd has what this controller has seen, before it follows the log from a snapshot; blocks.

        Returns:
            Whether it has not, which was accepted: the log is to go on from the snapshot then, and not to be followed.

        Raises:
            JournalDamagedError: it has not.
        """
        return self._check_seen(self._reader.end(), number)

    def _check_seen(self, end: Position, number: int) -> bool:
        """Return whether the log goes on from the snapshot of this controller, whatever etcd has: a loss was accepted.

        Raises:
            JournalDamagedError: it lacks some, and that was not accepted.
        """
        seen, is_another = self._read_seen(), False
        if seen.number and end.number >= seen.number:
            try:
                following = next(self._reader.batches(seen.number + 1, end), None)
                found = end if following is None else following.before
                # What was seen ended with a batch; in another log one may end elsewhere.
                is_another = (found.number, found.chain) != (seen.number, seen.chain)
            except PreconditionError:  # the batch after it was given up, so nothing can be compared
                pass
        if not is_another and end.number >= max(seen.number, number - 1):
            return False
        problem = (
            f"the journal in etcd ends with record {end.number}, or has others than those that this controller has "
            f"seen, up to record {max(seen.number, number - 1)}: etcd was restored from an older state, or another "
            "cluster has the name"
        )
        if not self._accept_loss:
            raise JournalDamagedError(
                f"{problem}; restore etcd from a newer backup, or start one controller with --accept-journal-loss to "
                "go on from its newest snapshot and forget what came later",
                metadata={"after_record": str(end.number)},
            )
        _log.error(LogMessage("etcd lacks records, and the loss was accepted", problem=problem))
        self._is_loss_accepted = True
        return number > 0 and (is_another or end.number < number - 1)

    def _begin(self, end: Position, snapshot: int) -> None:
        """Take records from now on, after an empty batch that says whose they are.

        Args:
            end: of the log.
            snapshot: number of a snapshot that the log goes on from, whatever etcd has; 0: it goes on from its end.
        """
        self._end, self._end_value = end, end.encode() if end.number else b""
        if snapshot:
            self._delete_all()
            self._end = Position(snapshot - 1, end.epoch, end.chain)
        self._commit_batch([])
        self._appended = self._durable = self._committed = self._end.number
        if self._is_loss_accepted:  # else the next start would find it again
            self.sync_rotated(self._end.number)

    def _delete_all(self) -> None:
        leadership = self._leading()
        request = pb.EtcdTxnRequest(
            compare=[is_created_at(self._keys.leader, leadership.epoch)],
            success=[delete(self._keys.log, self._keys.log[:-1] + b"0")],
        )
        if not self._etcd.ask(request).succeeded:
            raise self._superseded()

    async def follow(self, stream: Stream, number: int) -> AsyncIterator[Record]:
        """Yield durable records of a stream, and wait for more; see `Log.follow`.

        Raises:
            JournalDamagedError: etcd has less than was there before.
        """
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        self._followers.add(changed)

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        watch = self._etcd.watch(self._keys.last, notify)
        self._followed_from = number
        seen = 0
        try:
            while True:
                if self._abandoned is not None:
                    raise self._abandoned
                changed.clear()
                try:
                    end = await asyncio.to_thread(self._reader.end)
                    batches = self._reader.batches(number, end)
                    some = await asyncio.to_thread(_some, batches)
                except JournalUnreachableError as error:
                    _log.warning(LogMessage("the journal cannot be followed for now", error=error))
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                if end.number < seen:
                    raise JournalDamagedError(
                        f"the journal in etcd ended with record {seen}, and ends with record {end.number} now: etcd "
                        "was restored from an older state",
                        metadata={"after_record": str(end.number)},
                    )
                seen = end.number
                for batch in some:
                    self._seen = batch.after
                    for record in batch.records():
                        if record.stream is stream and record.number >= number:
                            yield record
                    number = max(number, batch.after.number + 1)
                if number <= end.number:
                    continue
                # A watch may say nothing of its end. (`wait_for` of Python 3.11 may overlook that it is cancelled.)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await changed.wait()
        finally:
            self._followers.discard(changed)
            await asyncio.to_thread(watch.close)

    def end(self) -> Position:
        """Return the end of the log in etcd; blocks.

        Raises:
            JournalUnreachableError: etcd does not answer.
        """
        return self._reader.end()

    @property
    def last_number(self) -> int:
        """Number of the last record that is durable, or that a standby has read."""
        return self._durable or max(self._seen.number, self._followed_from - 1)

    # Appending

    @property
    def has_unflushed(self) -> bool:
        """Whether something was appended that is not durable yet, or never will be."""
        return self._durable != self._appended or self._abandoned is not None

    @property
    def unflushed_count(self) -> int:
        """Number of records that were appended and are not durable yet."""
        return self._appended - self._durable

    @property
    def is_disk_low(self) -> bool:
        """Whether space is short: etcd says so only when it is full."""
        return False

    def append(self, stream: Stream, *parts: bytes | bytearray) -> int:
        """Add a record, which becomes durable together with all that is added in the same step of the loop.

        Raises:
            RuntimeError: what is there was not read, this controller does not lead, or the log is closed.
            TqError: the log was abandoned.
        """
        self._check_open()
        self._group.append((stream, parts))
        self._group_bytes += sum(map(len, parts))
        self._appended += 1
        return self._appended

    def rotate(self) -> int:
        """Return the number of the next record; of a standby, of that after the last one it has read."""
        if self._abandoned is not None:
            raise self._abandoned
        if self._end is None:
            raise RuntimeError("the journal takes no records: exhaust read() first, and append before close()")
        self._end_group()
        return self._appended + 1

    def sync_rotated(self, number: int) -> None:
        """Remember on the disk of this controller how far it has seen the log, before it has a snapshot of that."""
        seen = self._end or self._seen
        with FileWriter(self._position_path) as writer:
            writer.file.write(json.dumps({"number": seen.number, "epoch": seen.epoch, "chain": seen.chain}).encode())

    def _read_seen(self) -> Position:
        try:
            values = json.loads(self._position_path.read_bytes())
            return Position(int(values["number"]), int(values["epoch"]), int(values["chain"]))
        except FileNotFoundError:
            return BEGINNING
        except (ValueError, KeyError, TypeError) as error:
            raise JournalDamagedError(
                f"{self._position_path} cannot be read: {error!r}; remove it, and start the service again",
                metadata={"file": self._position_path.name},
            ) from None

    def abandon(self, error: TqError) -> None:
        """Write nothing more; see `Log.abandon`."""
        if self._abandoned is None:
            self._abandoned = error
            self._group.clear()
            self._waiting.drop_callbacks()
            self._settle(error)
            for changed in self._followers:
                changed.set()

    def close(self) -> None:
        """Make durable what was appended, and end the thread; see `Log.close`."""
        try:
            if self._end is not None and self.has_unflushed and self._abandoned is None:
                self.flush()
        finally:
            self._is_closed = True
            self._worker.shutdown()
            self._end = None

    def _check_open(self) -> None:
        if self._abandoned is not None:
            raise self._abandoned
        if self._end is None or self._is_closed:
            raise RuntimeError("the journal takes no records: exhaust read() first, and append before close()")

    def _end_group(self) -> None:
        if self._group:
            self._queue.append((self._group, self._group_bytes))
            self._group, self._group_bytes = [], 0

    # Waiting

    async def wait_durable(self, number: int | None = None) -> None:
        """Return once a record is durable, and all before it; None: the last that was appended.

        Raises:
            JournalUnreachableError: etcd has not answered for 10 s; all stays as it is, and the next call tries again.
            SupersededError: another controller leads.
            TqError: the log was abandoned.
        """
        number = self._appended if number is None else number
        if self._durable < number or self._abandoned is not None:
            self._loop = asyncio.get_running_loop()  # before the worker has something to notify it of
            self._commit_soon()
            await self._waiting.future(number)

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was appended before is durable; see `Log.after_durable`."""
        if not self.has_unflushed:
            callback()
        elif self._abandoned is None:
            self._waiting.add_callback(self._appended, callback)

    def flush(self) -> None:
        """Return once all that was appended is durable; blocks.

        Raises:
            TqError: see `wait_durable`.
        """
        try:
            self._commit_soon().result()
        finally:
            self._settle()

    def _settle(self, error: BaseException | None = None) -> None:
        """Notify the waiters, on the loop, of what was committed, or why nothing was."""
        self._durable = self._committed
        self._waiting.settle(self._durable, error)

    # Committing, on the worker

    def _commit_soon(self) -> Future[None]:
        self._check_open()
        self._end_group()
        job = self._committing
        if job is None or job.running() or job.done():  # else it has not looked into the queue yet
            job = self._committing = self._worker.submit(self._commit_queue)
        return job

    def _commit_queue(self) -> None:
        while self._queue:
            taken = self._take_groups()
            try:
                self._commit_batch(taken[0])
            except BaseException as error:
                self._queue.appendleft(taken)  # in its place, to be tried again
                self._notify(error)
                raise
            self._committed += len(taken[0])
            self._notify()

    def _notify(self, error: BaseException | None = None) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, error)

    def _take_groups(self) -> tuple[list[Parts], int]:
        """Take the groups that are to be one batch: what was tried without an answer is tried again as it was."""
        records, size = self._queue.popleft()
        while self._attempt is None and size < _BATCH_BYTES and self._queue:
            group, group_bytes = self._queue.popleft()
            records += group
            size += group_bytes
        return records, size

    def _commit_batch(self, records: list[Parts]) -> None:
        """Append a batch, or learn that another controller leads.

        Raises:
            SupersededError: nothing can be appended any more, and it is not known whether the batch was.
            JournalUnreachableError: etcd does not answer; the batch is to be tried again as it is.
            InvalidArgumentError: etcd refuses it for good.
        """
        leadership, end = self._leading(), self._end
        if end is None:
            raise RuntimeError("the journal is closed")
        batch = self._attempt
        is_unknown = batch is not None
        if batch is None:
            batch = self._attempt = Batch.of(end, leadership.epoch, records)
        give_up_at = time.monotonic() + _PATIENCE_SECONDS
        while True:
            if self._abandoned is not None:
                raise self._abandoned
            try:
                if is_unknown and self._is_written(batch, end):
                    break
                self._write(batch, leadership)
                break
            except JournalUnreachableError as error:
                is_unknown = True
                if time.monotonic() >= give_up_at or self._is_closed:
                    raise JournalUnreachableError(f"the journal cannot be written: {error.message}") from None
                time.sleep(_PAUSE_SECONDS)
        self._end, self._end_value, self._attempt = batch.after, batch.after.encode(), None

    def _write(self, batch: Batch, leadership: Leadership) -> None:
        first, *others = batch.pieces()
        last = self._keys.last
        unchanged = is_value(last, self._end_value) if self._end_value else is_created_at(last, 0)
        conditions = [is_created_at(self._keys.leader, leadership.epoch), unchanged]
        writes = [[put(self._keys.batch(batch.first, number), piece)] for number, piece in enumerate(others, 1)]
        writes.append([put(self._keys.batch(batch.first), first), put(last, batch.after.encode())])
        for operations in writes:
            answer: pb.EtcdTxnResponse = self._etcd.once(pb.EtcdTxnRequest(compare=conditions, success=operations))
            if not answer.succeeded:
                # Also where the answer to an earlier attempt was lost, and etcd took it just now.
                if not self._is_written(batch, self._end):
                    raise self._superseded()
                return

    def _is_written(self, batch: Batch, end: Position | None) -> bool:
        """Return whether a batch is in the log.

        Raises:
            SupersededError: something else is.
        """
        found = self._etcd.get(self._keys.last, seconds=0.0)
        value = b"" if found is None else found.value
        if value == batch.after.encode():
            return True
        if value != self._end_value:
            raise self._superseded()
        return False

    def _leading(self) -> Leadership:
        if self.leadership is None:
            raise RuntimeError("the journal takes no records of a standby")
        return self.leadership

    def _superseded(self) -> SupersededError:
        return SupersededError(
            "another controller leads by now, and this one may not write the journal any more; it has to start again "
            "as a standby",
            metadata={"epoch": str(self._leading().epoch)},
        )

    # Truncating

    def truncate_before(self, number: int) -> None:
        """Say that this controller needs nothing from before a number; the leader gives up what two do not need."""
        key = self._keys.snapshots + self._member_id.encode()
        self._etcd.ask(pb.EtcdTxnRequest(success=[put(key, b"%d" % number)]))
        leadership = self.leadership
        if leadership is not None:
            self._truncate(leadership)

    def _truncate(self, leadership: Leadership) -> None:
        number = self._needed()
        kept = self._reader.first_key(number) if number else 0
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
                    compare=[is_created_at(self._keys.leader, leadership.epoch)],
                    success=[delete(self._keys.log, found.kvs[-1].key + b"\0")],
                )
            )
            if not answer.succeeded:
                return
            if not found.more:
                self._compact(answer.header.revision)
                return

    def _needed(self) -> int:
        """Return from where on the log is needed: two controllers have snapshots of what was before, or the only one.

        Those that are gone do not count: one that comes back later is sent a snapshot.
        """
        alive = {each.key.rpartition(b"/")[2] for each in self._etcd.get_all(self._keys.members)}
        alive.add(self._member_id.encode())
        found = {each.key.rpartition(b"/")[2]: int(each.value) for each in self._etcd.get_all(self._keys.snapshots)}
        numbers = sorted((found.get(member_id, 0) for member_id in alive), reverse=True)
        return numbers[min(1, len(numbers) - 1)]

    def _compact(self, revision: int) -> None:
        try:
            self._etcd.ask(pb.EtcdCompactionRequest(revision=revision))
        except InvalidArgumentError as error:  # another one has compacted more
            _log.info(LogMessage("etcd was not compacted", revision=revision, error=error))


def _some(batches: Iterator[Batch]) -> list[Batch]:
    """Return the next batches, as many as are applied before others have their turns."""
    return list(islice(batches, _BATCHES_A_READ))
