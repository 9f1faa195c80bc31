"""Combines small puts from one client into a single call.

Puts that can be combined wait in one queue, called a line. If fewer than two of a line's calls are in flight, a new put
is sent immediately by its caller. Otherwise, the put waits, and is sent with all other waiting puts in the next call.
This scheme needs no timer.

    waiting -- the leading caller takes it and sends a batch --> sent -- answered --> each caller gets its part
                                                                      | refused: nothing was written
                                                                      v
                                                              each put is sent separately

One of the callers leads each batch, and sends the batch with the caller's own deadline. If the leader times out or is
cancelled before the outcome is known, another caller becomes the leader. The new leader resends identical bytes with
the original request id.

Combined puts never wait for capacity, because one waiting put would delay the other puts in its line. If capacity is
lacking, the service rejects the batch. Each put is then sent separately, and waits until the service has capacity.

The sync and async clients share this module. Each `Lines` object belongs to one event loop or process, and has its own
lock. No thread waits while it holds the lock, and a forked child never uses its parent's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from tq_service.client.batch_meta import BatchMeta, Namespace, joined
from tq_service.client.requests import Write, new_id, write_message, written_meta
from tq_service.client.transport import Deadline, unavailable_until
from tq_service.errors import (
    CallCancelledError,
    DeadlineError,
    DiskFullError,
    InternalError,
    LimitExceededError,
    PermissionDeniedError,
    ResourceExhaustedError,
    TqError,
    UnauthenticatedError,
    UnavailableError,
)
from tq_service.schema import FieldSpec, Layout
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.storage_service_pb2 import PutHeader
from tq_service.wire.columns import INLINE_BYTES, SourceColumn, is_on_host, put_header, stacked

MOST_ROWS: Final = 256
"""Maximum number of rows in a batch. The values in a batch take up at most `INLINE_BYTES` bytes."""

_MOST_UNDER_WAY: Final = 2

_OUTCOME_UNKNOWN: Final = (UnavailableError, DeadlineError, CallCancelledError, InternalError)
_NOT_LOOKED_UP: Final = (LimitExceededError, DiskFullError, UnauthenticatedError, PermissionDeniedError)
"""Errors raised by the service before it checks whether an earlier attempt succeeded."""


def seconds_without_capacity(refusal: TqError) -> float | None:
    """If a put was rejected for lack of capacity, return its retry delay in seconds; otherwise, return None."""
    if not isinstance(refusal, ResourceExhaustedError) or isinstance(refusal, _NOT_LOOKED_UP):
        return None
    return refusal.retry_after_seconds


@dataclass(slots=True, kw_only=True, eq=False)
class Put:
    """The put made by a single call.

    Attributes:
        kind: the response type, which determines whether the RPC is Commit or Insert. If there are columns, the Commit
            is sent as part of a put.
        columns: columns of new or existing samples, or empty if the put contains only metadata.
        write: the samples to write.
        for_existing_rows: whether all samples already exist.
        return_all_meta: whether to return all metadata of the samples rather than only the written metadata.
        size_bytes: total size of all values in bytes.
        likeness: key shared by all puts that can be combined with each other, or None if the put must be sent
            separately.
    """

    kind: type[commit_pb2.CommitResponse] | type[pb.InsertResponse] = commit_pb2.CommitResponse
    columns: Sequence[SourceColumn] = ()
    write: Write
    for_existing_rows: bool = False
    return_all_meta: bool = False
    size_bytes: int = field(init=False)
    likeness: Hashable | None = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(column.value_bytes for column in self.columns)
        self.likeness = self._likeness()

    def _likeness(self) -> Hashable | None:
        write, metadata = self.write, self.write.metadata
        if write.append_at:
            return None
        is_small = 0 < write.row_count <= MOST_ROWS and self.size_bytes <= INLINE_BYTES
        if not is_small or not isinstance(write.partition_id, str) or not is_on_host(self.columns):
            return None
        if any(column.json is not None or not column.present.all() for column in write.meta_columns):
            return None  # with mixed types or removals, the result depends on the order of writes
        samples = None
        if metadata is not None:
            is_fenced = write.claim is not None
            samples = metadata.incarnation, write.ack, is_fenced and (metadata.task_name, metadata.claim_id)
        return (
            self.kind,
            self.return_all_meta,
            self.for_existing_rows,
            write.partition_id,
            write.row_count,
            samples,
            bool(write.key_column),
            bool(write.group_column),
            bool(write.rollout_column),
            # These values may be any objects. The service rejects invalid values later.
            f"{write.key_mode} {write.state} {write.group_size} {write.ends_rollouts}",
            tuple((column.name, column.values.dtype.kind) for column in write.meta_columns),
            tuple(_rows_of(column.spec) for column in self.columns),
        )


def _rows_of(spec: FieldSpec) -> Hashable:
    """Return a key that is equal for all rows that can be stacked into one column; see `stacked`."""
    return (spec.name, spec.dtype, len(spec.row_shape)) if spec.layout is Layout.DENSE and spec.row_shape else spec


class JointPut:
    """One or more puts in wire form. Every attempt sends identical bytes.

    Attributes:
        kind: response type of the call.
        columns: columns of all puts, or empty if the puts contain only metadata.
        header: the put header, including the commit. If there are no columns, only the commit is set.
        request: the commit or insert request.
    """

    def __init__(self, puts: Sequence[Put], *, is_gathered: bool = False) -> None:
        first = puts[0]
        self.kind = first.kind
        self.columns = first.columns if len(puts) == 1 else stacked([put.columns for put in puts])
        message = write_message([put.write for put in puts], first.write.row_count if is_gathered else 0)
        self.header = PutHeader()
        if self.columns:
            self.header = put_header(
                new_id(),
                self.columns,
                for_existing_rows=first.for_existing_rows,
                partition_id=message.partition_id,
                never_waits=is_gathered,
            )
        self.request: Any
        if self.kind is pb.InsertResponse:
            self.request = pb.InsertRequest(request_id=new_id(), write=message)
        else:  # build the commit inside the header, which an embedded storage service requires, to avoid a slow copy
            self.request = self.header.commit
            self.request.request_id = new_id()
            self.request.return_all_meta = first.return_all_meta
            self.request.write.MergeFrom(message)


class Answered:
    """The service's response to one or more puts.

    Args:
        answer: the response.
        namespace: the client's namespace.
    """

    def __init__(self, answer: Any, namespace: Namespace) -> None:
        self._written = BatchMeta.from_proto(answer.meta, namespace)
        all_meta = getattr(answer, "all_meta", ())
        self._known = joined([BatchMeta.from_proto(part, namespace) for part in all_meta]) if all_meta else None

    def part(self, write: Write, start: int = 0) -> BatchMeta:
        """Return the samples of the put whose first row is at position `start` in the combined put."""
        written, known, rows = self._written, self._known, slice(start, start + write.row_count)
        if known is not None and known.size > write.row_count:
            known = known.select_samples(range(known.size)[rows])
            known = known.select_fields([name for name, is_there in known.produced.items() if is_there.any()])
        return written_meta(written, known, write, written.indexes[rows])


@dataclass(slots=True, eq=False)
class Member:
    """A gathered put and the caller waiting for it.

    Attributes:
        put: the put.
        deadline: the caller's deadline.
        signal: an `AsyncSignal` or `Signal` that wakes the caller.
        line: the line to which the put belongs.
        leads: whether the caller is sending, or is about to send, the batch.
        batch: the batch that contains the put, or None while the put is waiting.
        start: position of the put's first row in the batch.
    """

    put: Put
    deadline: Deadline
    signal: Any
    line: Line
    leads: bool = False
    batch: Batch | None = None
    start: int = 0

    def lead(self) -> None:
        """Wake the caller as the leader of its batch."""
        self.leads = True
        self.signal.set()

    @property
    def is_over(self) -> bool:
        """Whether the put's outcome is known."""
        return self.batch is not None and self.batch.is_over

    def answer(self) -> BatchMeta | None:
        """Return the written samples, or None if the put must be sent separately."""
        answered = None if self.batch is None else self.batch.answered
        return None if answered is None else answered.part(self.put.write, self.start)

    def overdue(self) -> TqError:
        """Return the error to raise when the caller's deadline has passed and the outcome is unknown."""
        if self.line.failure is not None:
            return unavailable_until(self.deadline, self.line.failure)
        timeout = f"{self.deadline.timeout:g} s"
        if self.batch is None:
            return DeadlineError(
                f"the put was not sent within {timeout}; it was waiting for the responses to other puts"
            )
        return DeadlineError(f"the put was not answered within {timeout}; it may still be applied")


@dataclass(slots=True, eq=False)
class Batch:
    """A batch of puts that are sent in one call.

    Attributes:
        members: puts of the batch, in row order.
        waiting: members whose callers still await the result.
        joint: wire form of the puts, or None until the batch is sent.
        answered: the response. If None, the service rejected the batch, and each put must be sent separately.
        is_over: whether the batch's outcome is known.
        may_be_made: whether the puts may already have been written, because the outcome of an earlier attempt is
            unknown.
    """

    members: Sequence[Member]
    waiting: set[Member]
    joint: JointPut | None = None
    answered: Answered | None = None
    is_over: bool = False
    may_be_made: bool = False

    def note(self, failure: TqError) -> None:
        """Record the error of a failed attempt."""
        if isinstance(failure, UnavailableError):
            self.members[0].line.failure = failure
        self.may_be_made |= isinstance(failure, _OUTCOME_UNKNOWN)

    def is_refused_by(self, failure: TqError) -> bool:
        """Return whether it is certain that neither the failed attempt nor any earlier attempt wrote any data."""
        kinds = (*_OUTCOME_UNKNOWN, *_NOT_LOOKED_UP) if self.may_be_made else _OUTCOME_UNKNOWN
        return not isinstance(failure, kinds)


@dataclass(slots=True, eq=False)
class Line:
    """A waiting line of puts that can be combined with each other.

    Attributes:
        likeness: key shared by all puts in the line.
        waiting: puts that have not been sent yet, in order of arrival.
        leader: the waiting put whose caller is about to send a batch, or None.
        batches: batches in flight.
        failure: the last error if the service is unavailable, or None if the service is available.
    """

    likeness: Hashable
    waiting: deque[Member] = field(default_factory=deque)
    leader: Member | None = None
    batches: set[Batch] = field(default_factory=set)
    failure: UnavailableError | None = None


class Lines:
    """The lines of puts for all callers in one event loop or process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[Hashable, Line] = {}
        self._awaited: list[tuple[set[Member], Any]] = []  # puts awaited by closing clients, with a signal each

    def join(self, likeness: Hashable, put: Put, deadline: Deadline, signal: Any) -> Member:
        """Add a put to the line of puts that have the same `likeness`.

        A caller that is woken as the leader must send a batch. Every caller must call `leave` when it stops waiting.
        """
        with self._lock:
            line = self._lines.get(likeness)
            if line is None:
                line = self._lines[likeness] = Line(likeness)
            member = Member(put, deadline, signal, line)
            line.waiting.append(member)
            self._go_on(line)
        return member

    def take(self, leader: Member) -> Batch:
        """Return the batch that the leader must send, either an abandoned batch or a new batch of waiting puts."""
        with self._lock:
            if leader.batch is not None:
                leader.batch.may_be_made = True
                return leader.batch
            line, put = leader.line, leader.put
            waiting = line.waiting
            # Take half of the line, so that the client encodes one half while the service processes the other half.
            most = (len(waiting) + sum(len(batch.members) for batch in line.batches) + 1) // 2
            waiting.remove(leader)
            members, size_bytes = [leader], put.size_bytes
            while waiting and len(members) < min(most, MOST_ROWS // put.write.row_count):
                size_bytes += waiting[0].put.size_bytes
                if size_bytes > INLINE_BYTES:
                    break
                members.append(waiting.popleft())
            batch = Batch(members, set(members))
            for position, member in enumerate(members):
                member.batch, member.start = batch, position * put.write.row_count
            line.batches.add(batch)
            line.leader = None
            self._go_on(line)
        return batch

    def end(self, batch: Batch, answered: Answered | None) -> None:
        """Record the response to a batch, or None for a rejected batch, and wake all waiting callers."""
        with self._lock:
            line = batch.members[0].line
            line.failure = None
            batch.answered = answered
            self._end(line, batch)
            for member in batch.waiting:  # last, because the woken threads read the batch without the lock
                member.signal.set()

    def leave(self, member: Member) -> None:
        """End a caller's wait. If the caller led a batch whose outcome is unknown, make another caller the leader."""
        with self._lock:
            line, batch = member.line, member.batch
            for members, signal in self._awaited:
                members.discard(member)
                if not members:
                    signal.set()
            self._awaited = [each for each in self._awaited if each[0]]
            if batch is None:
                line.waiting.remove(member)
                if line.leader is member:
                    line.leader = None
                self._go_on(line)
            elif not batch.is_over:
                batch.waiting.discard(member)
                if not batch.waiting:
                    self._end(line, batch)
                elif member.leads:
                    _latest(batch.waiting).lead()

    def await_gathered(self, signal: Any) -> None:
        """Set a signal once no caller is waiting for a gathered put. If no caller is waiting now, set it immediately.

        If a line has unsent puts, the line's puts in flight also delay the signal, because their responses may arrive
        last.
        """
        with self._lock:
            lines = [line for line in self._lines.values() if line.waiting]
            members = {member for line in lines for batch in line.batches for member in batch.waiting}
            members.update(member for line in lines for member in line.waiting)
            if members:
                self._awaited.append((members, signal))
            else:
                signal.set()

    def _end(self, line: Line, batch: Batch) -> None:
        batch.is_over = True
        line.batches.discard(batch)
        self._go_on(line)

    def _go_on(self, line: Line) -> None:
        """If fewer than two calls are in flight, make a waiting caller the leader. Drop the line if it is empty."""
        if line.waiting:
            if line.leader is None and len(line.batches) < _MOST_UNDER_WAY:
                line.leader = _latest(islice(line.waiting, MOST_ROWS))
                line.leader.lead()
        elif not line.batches:
            self._lines.pop(line.likeness, None)


def _latest(members: Iterable[Member]) -> Member:
    """Return the member with the latest deadline."""
    return max(members, key=lambda member: member.deadline.at)
