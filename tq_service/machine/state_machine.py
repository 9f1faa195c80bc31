"""The state machine that applies all changes to the controller's state.

    group:  prepare -> encode -> apply each change; the last change records the response to the request
            -> append the group to the log as a unit
            -> pass the consequences to the listener: freed cells, started leases, wake-ups

A group contains the changes made in a single iteration of the event loop. `prepare` validates a change without
modifying the state, so a change that is rejected or cannot be encoded has no effect. If applying a change fails, the
group is discarded, and the process stops using its state, which may be inconsistent. The log therefore contains exactly
the applied changes, and replaying the log after a restart restores the state. The consequences of a change concern only
the process that made the change, so replay ignores them.

The design follows the replicated state machine described in Ongaro and Ousterhout, "In Search of an Understandable
Consensus Algorithm", 2014, section 2.

The state machine also records the responses to mutating requests. A retried request receives the recorded response and
changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, starmap
from operator import attrgetter
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias, dataclass_transform

from numpy.typing import NDArray

from tq_service.errors import (
    InvalidArgumentError,
    PartitionNotFoundError,
    PolicyNotFoundError,
    TqError,
    nearest,
)
from tq_service.journal import codec
from tq_service.log_message import LogMessage
from tq_service.schema import check_id
from tq_service.state.cells import Freed
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.policies import Policy

_AT_SECONDS: Final = struct.Struct("<d")
_MOST_RECORD_BYTES: Final = (1 << 20) - 1

_MOST_FORGOTTEN: Final = 1024  # forgotten entries are removed from the lists when there are more than this
_FORGOTTEN_SHARE: Final = 8  # the limit increases by one for each group of this many entries
_ENTRY_BYTES: Final = 256  # approximate memory used by a request id, a time, and their containers


class Entry(NamedTuple):
    """A recorded response, with its request id and wall-clock time in seconds."""

    key: bytes
    seconds: float
    value: Any


def merged(*snapshots: Iterable[Entry]) -> list[Entry]:
    """Merge the recorded responses of several snapshots, oldest first."""
    return sorted(chain.from_iterable(snapshots), key=attrgetter("seconds"))


class IdempotencyCache:
    """Responses to mutating requests, by request_id. Each response is kept as long as a client may retry the request.

    Rejected requests are not recorded, because they change nothing and a retry may succeed. A response's age is
    measured from the time of the request's step, so a restart does not extend its lifetime.

    Attributes:
        used_bytes: approximate memory usage of the responses, in bytes.
    """

    def __init__(
        self,
        keep_seconds: float,
        *,
        pack: Callable[[Any], Any] = lambda answer: answer,
        unpack: Callable[[Any], Any] = lambda packed: packed,
        max_bytes: int | None = None,
        weigh: Callable[[Any], int] = lambda packed: 0,
    ) -> None:
        """Create an empty cache.

        Args:
            keep_seconds: number of seconds for which a response is kept.
            pack: function that converts a response to its stored form. The stored form should be small, because a cache
                may contain a million responses.
            unpack: function that converts the stored form back to the response.
            max_bytes: memory limit in bytes. If the limit is exceeded, the oldest responses are removed early. None
                means no limit.
            weigh: function that returns the size of a stored response in bytes.
        """
        self.pack = pack
        self._unpack = unpack
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._weigh = weigh
        self.used_bytes = 0
        self._newest: dict[bytes, int] = {}  # sequence number of the newest response to each request, from 0
        # Request id, time and stored form of each response, oldest first. `Entry` objects would use more memory.
        # Snapshots share these lists, so the lists are only appended to or replaced.
        self._ids: list[bytes] = []
        self._seconds = array("d")
        self._packed: list[Any] = []
        self._forgotten_count = 0  # number of forgotten responses at the front of the lists
        self._removed_count = 0  # number of responses removed from the front of the lists

    def __len__(self) -> int:
        return len(self._newest)

    def recorded(self, request_id: bytes, kind: type[object], now_seconds: float) -> Any | None:
        """Return the recorded response to a request, or None if it is missing or too old.

        Raises:
            InvalidArgumentError: the request id is not 16 bytes long, or the recorded response is not of type `kind`
                because the caller used the id for another method.
        """
        check_id("request_id", request_id)
        number = self._newest.get(request_id)
        if number is None or self._seconds[number - self._removed_count] < now_seconds - self._keep_seconds:
            return None
        recorded = self._unpack(self._packed[number - self._removed_count])
        if not isinstance(recorded, kind):
            raise InvalidArgumentError(
                f"request_id {request_id.hex()} was already used for another call, whose result was of type "
                f"{type(recorded).__name__}. Use a new request_id for each call, and reuse it only for retries",
                field="request_id",
            )
        return recorded

    def add(self, request_id: bytes, packed: Any, at_seconds: float) -> None:
        """Remove the oldest responses to respect the age and memory limits, and record a new response.

        If `keep_seconds` has been increased since a response expired, its request id can have two entries.
        """
        self._forget_old(at_seconds)
        self._append(request_id, at_seconds, packed)

    def _append(self, request_id: bytes, at_seconds: float, packed: Any) -> None:
        self._newest[request_id] = self._removed_count + len(self._ids)
        self._ids.append(request_id)
        self._seconds.append(at_seconds)
        self._packed.append(packed)
        self.used_bytes += _ENTRY_BYTES + self._weigh(packed)

    def _forget_old(self, now: float) -> None:
        oldest = self._forgotten_count
        while oldest < len(self._ids):
            is_too_much = self._max_bytes is not None and self.used_bytes > self._max_bytes
            if not is_too_much and self._seconds[oldest] >= now - self._keep_seconds:
                break
            self.used_bytes -= _ENTRY_BYTES + self._weigh(self._packed[oldest])
            if self._newest[self._ids[oldest]] == self._removed_count + oldest:
                del self._newest[self._ids[oldest]]
            oldest += 1
        self._forgotten_count = oldest
        if oldest > _MOST_FORGOTTEN + len(self._ids) // _FORGOTTEN_SHARE:
            self._ids, self._seconds, self._packed = self._ids[oldest:], self._seconds[oldest:], self._packed[oldest:]
            self._forgotten_count, self._removed_count = 0, self._removed_count + oldest

    def snapshot(self) -> Iterator[Entry]:
        """Return an iterator over the current responses in stored form. The iterator can be used in any thread.

        The call takes constant time, because the lists are only appended to or replaced.
        """
        entries = zip(self._ids, self._seconds, self._packed, strict=False)
        return starmap(Entry, islice(entries, self._forgotten_count, len(self._ids)))

    def restore(self, answers: Iterable[Entry]) -> None:
        """Add the responses from a snapshot to the cache."""
        entries = merged(answers, self.snapshot())
        self._newest, self._ids, self._seconds, self._packed = {}, [], array("d"), []
        self._forgotten_count = self._removed_count = self.used_bytes = 0
        for entry in entries:
            self._append(entry.key, entry.seconds, entry.value)


_log = logging.getLogger(__name__)

WrittenRows: TypeAlias = tuple[Partition, Indexes | range]
ChangedTask: TypeAlias = tuple[Partition, str | None]


class State:
    """The complete state of a controller. Changes modify the state, and snapshots store it.

    Attributes:
        partitions: all partitions, by name.
        policies: all policies, by name.
        answers: recorded responses to mutating requests, returned again when a request is retried.
        snapshot_number: number of the snapshot from which the state was restored, or 0 if it was not restored from a
            snapshot.
    """

    __slots__ = ("answers", "partitions", "policies", "snapshot_number")

    def __init__(self, answers: IdempotencyCache | None = None) -> None:
        self.partitions: dict[str, Partition] = {}
        self.policies: dict[str, Policy] = {}
        self.snapshot_number = 0
        self.answers = IdempotencyCache(600.0) if answers is None else answers

    def add_partition(self, partition: Partition) -> None:
        """Add a partition, and give it access to the policies and to all partitions."""
        partition.policies, partition.all_partitions = self.policies, self.partitions
        self.partitions[partition.partition_id] = partition

    def policy(self, name: str) -> Policy:
        """Return a policy. Raise PolicyNotFoundError if the policy has no published version."""
        policy = self.policies.get(name)
        if policy is None:
            raise PolicyNotFoundError(
                f"policy {name!r} has no published version; {nearest(name, self.policies)}. Its trainer must publish "
                f"a version first",
                metadata={"policy": name},
            )
        return policy

    def partition(self, partition_id: str, incarnation: bytes = b"") -> Partition:
        """Return a partition.

        Args:
            partition_id: name of the partition.
            incarnation: expected incarnation of the partition. An empty value accepts any incarnation.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            StaleIncarnationError: the partition has a different incarnation.
        """
        partition = self.partitions.get(partition_id)
        if partition is None:
            raise PartitionNotFoundError(
                f"no partition {partition_id!r}; {nearest(partition_id, self.partitions)}",
                metadata={"partition_id": partition_id},
            )
        partition.check_incarnation(incarnation)
        return partition


@dataclass(slots=True, eq=False)
class Step:
    """The consequences of a group of changes, to be handled by the process that makes the changes.

    Attributes:
        at_seconds: time at which the group was begun, in seconds (see `StateMachine.now_seconds`). During replay, this
            is the time recorded in the log.
        freed: cells that no longer belong to any sample.
        leases: leases that began or were extended, each with its partition, task name and claim.
        batches: batches that were planned for ranks, each with its partition, task name and claim.
        changed: partitions in which waiting claims may now find more samples.
        consumed: partitions in which a task has fewer samples left, so that waiting writes may now be able to proceed.
        created: new partitions.
        cleared: removed partitions.
        written: new rows and rows that were written to, as pairs of partition and global indexes.
        removed: the removed rows, as tuples `(partition, global indexes, keys)`. The keys are None if the partition
            does not use keys.
        tasks: tasks that made progress, as pairs of partition and task name. A task name of None means all tasks of the
            partition.
        policies: names of policies that were removed or have a new version.
        pending: actions to run as the last part of the current change.
    """

    at_seconds: float
    freed: list[Freed] = field(default_factory=list)
    leases: list[tuple[Partition, str, Claim]] = field(default_factory=list)
    batches: list[tuple[Partition, str, Claim]] = field(default_factory=list)
    changed: dict[Partition, None] = field(default_factory=dict)
    consumed: dict[Partition, None] = field(default_factory=dict)
    created: list[Partition] = field(default_factory=list)
    cleared: list[Partition] = field(default_factory=list)
    written: list[WrittenRows] = field(default_factory=list)
    removed: list[tuple[Partition, Indexes, NDArray[Any] | None]] = field(default_factory=list)
    tasks: list[ChangedTask] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    pending: list[Callable[[], None]] = field(default_factory=list)

    def complete(self) -> None:
        """Run all pending actions, including those added by other actions."""
        while self.pending:
            self.pending.pop(0)()

    def note_change(self, partition: Partition) -> None:
        """Make all of a partition's waiting claims search again, regardless of which rows have changed."""
        partition.state_version += 1
        self.changed[partition] = None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Change(ABC):
    """Base class of changes to the state. Subclasses become frozen dataclasses, whose fields are stored in the log.

    Attributes:
        kinds: all change classes, keyed by class name. The class name identifies the class in the log.
    """

    kinds: ClassVar[dict[str, type[Change]]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        # A class with abstract methods is a base class, so it is not registered.
        if not any(getattr(each, "__isabstractmethod__", False) for each in vars(cls).values()):
            Change.kinds[cls.__name__] = cls

    @abstractmethod
    def prepare(self, state: State) -> Any | None:
        """Validate the change, and return the objects that `apply` needs, or None if there is nothing to change.

        This method must not modify the state.

        Raises:
            TqError: the change is not valid in the current state.
        """

    @abstractmethod
    def apply(self, state: State, prepared: Any, step: Step) -> Any:
        """Apply the change and return the result, which must depend only on the state and the step.

        This method must not reject the change, because an error at this point is fatal.
        """


class ChangeLog(Protocol):
    """A log to which the state machine appends groups of changes."""

    def check_open(self) -> None:
        """Raise an error if the log no longer accepts records."""
        ...

    def append(self, records: Sequence[bytes]) -> None:
        """Buffer the records of a group, which become durable together. This method cannot fail."""
        ...


def encode_change(change: Change) -> bytes:
    """Encode a change for the log. Raise an error if the value of a field cannot be encoded."""
    return codec.encode_named(change)


def encode_group(at_seconds: float, changes: Sequence[bytes]) -> list[bytes]:
    """Pack encoded changes into log records that are smaller than 1 MiB, which is etcd's limit for a record.

    A change that exceeds the limit gets its own record.
    """
    parts: list[list[bytes]] = [[]]
    size = _AT_SECONDS.size
    for change in changes:
        if parts[-1] and size + len(change) > _MOST_RECORD_BYTES:
            parts.append([])
            size = _AT_SECONDS.size
        parts[-1].append(change)
        size += len(change)
    return [b"".join((_AT_SECONDS.pack(at_seconds), *part)) for part in parts]


def decode_group(record: bytes) -> tuple[float, list[Change]]:
    """Decode a log record, and return its time and its changes.

    Raises:
        NewerVersionError: a change has an unknown kind or field, which means that a newer version wrote the record.
        ValueError, TypeError, KeyError, struct.error: the record is not a valid group.
    """
    (at_seconds,) = _AT_SECONDS.unpack_from(record)
    changes = codec.unpack_each(memoryview(record)[_AT_SECONDS.size :])
    return at_seconds, [codec.decode_named(Change.kinds, *named) for named in changes]


class RequestAnswered(Change):
    """A mutating request was answered. This change is always the last change in the request's group.

    Attributes:
        packed: response in stored form.
    """

    request_id: bytes
    packed: Any

    def prepare(self, state: State) -> State:
        """Return the state. No validation is needed, because the request's other changes have all been applied."""
        return state

    def apply(self, state: State, prepared: State, step: Step) -> None:
        """Record the response for retries."""
        state.answers.add(self.request_id, self.packed, step.at_seconds)


class StateMachine:
    """A state machine that applies changes to the state and logs them. Must be used from a single event loop.

    Attributes:
        log: log to which changes are appended. None if changes are not being logged, for example during recovery.
        fatal: function called with a reason and an error when the state can no longer be used.
        listener: function called with the consequences of a group after the group has been appended to the log.
        refusal: function that returns the error to raise when rejecting a change. The attribute is None while changes
            are accepted.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.log: ChangeLog | None = None
        self.fatal: Callable[[str, BaseException], None] = _log_critical
        self.listener: Callable[[Step], None] = lambda step: None
        self.refusal: Callable[[], TqError] | None = None
        self._group: tuple[Step, list[bytes]] | None = None  # step and encoded changes of the open group
        self._clock_offset = time.time() - time.monotonic()
        self._last_seconds = 0.0

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Combine all changes made in a `with` block into one group. The block must not contain an `await`."""
        step, encoded = self._group = Step(self.now_seconds()), list[bytes]()
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self._group = None
            # A request may be rejected with a TqError after a complete change, such as `TaskSeen`.
            if encoded and failure is not None and not isinstance(failure, TqError):
                self.fatal("a request failed after one of its changes was applied", failure)
            elif encoded:
                self._finish(step, encoded)

    def _finish(self, step: Step, encoded: Sequence[bytes]) -> None:
        """Append a group to the log, and pass the step to the listener."""
        try:
            if self.log is not None:
                self.log.append(encode_group(step.at_seconds, encoded))
            self.listener(step)
        except Exception as failure:
            self.fatal("could not log a change or handle its consequences", failure)
            raise

    def commit(self, change: Change, prepared: Any = None) -> Any:
        """Apply a change and return its result, or None if there is nothing to change.

        The change joins the open group or forms a new group.

        Args:
            change: change to apply.
            prepared: result of `change.prepare` for the current state. If None, `commit` calls `change.prepare` itself.

        Raises:
            TqError: the change was rejected, and the state was not modified.
        """
        if prepared is None:
            prepared = change.prepare(self.state)
            if prepared is None:
                return None
        return self.commit_all(((change, prepared),))

    def commit_all(self, changes: Sequence[tuple[Change, Any]]) -> Any:
        """Apply all of the prepared changes or none of them, and return the result of the last change.

        All changes are encoded before the first change is applied. The changes are added to the open group, or form a
        new group if none is open.
        """
        if self._group is None:
            with self.group():
                return self.commit_all(changes)
        if self.refusal is not None:
            raise self.refusal()
        step, result, encoded = self._group[0], None, [b""] * len(changes)
        if self.log is not None:
            self.log.check_open()
            encoded = [encode_change(change) for change, _ in changes]
        try:
            for change, prepared in changes:
                result = change.apply(self.state, prepared, step)
                step.complete()
        except BaseException as error:
            self._group[1].clear()  # this also drops the earlier changes in the group
            self.fatal("a change was only partially applied", error)
            raise
        self._group[1].extend(encoded)
        return result

    def log_alone(self, change: Change) -> None:
        """Log a change that was made outside the state machine. This works even while changes are being rejected."""
        if self.log is not None:
            self.log.append(encode_group(self.now_seconds(), [encode_change(change)]))

    def replay(self, change: Change, at_seconds: float) -> None:
        """Apply a change read from the log. All earlier changes in the log must already have been applied.

        Raises:
            TqError, LookupError, ValueError: the change is not valid in the current state.
        """
        self._last_seconds = at_seconds
        prepared = change.prepare(self.state)
        if prepared is None:
            raise ValueError("could not replay a change, because the change has no effect on the current state")
        step = Step(at_seconds)
        change.apply(self.state, prepared, step)
        step.complete()

    def now_seconds(self) -> float:
        """Return the time, in seconds, to record for a group that starts now.

        The process reads the wall clock only at startup and then adds monotonic time, so clock adjustments are ignored.
        The result is never earlier than the time of the last group in the log.
        """
        now = self._clock_offset + time.monotonic()
        if now < self._last_seconds:
            self._clock_offset += self._last_seconds - now
            now = self._last_seconds
        self._last_seconds = now
        return now


def _log_critical(reason: str, error: BaseException) -> None:
    _log.critical(LogMessage("the state can no longer be used", reason=reason), exc_info=error)
