"""The one way to change the state of a controller.

    group:  prepare -> encode -> apply, for each change; the answer of the request last
            -> append to the log, whole
            -> consequences to the listener: freed cells, started leases, wake-ups

A group is what one step of the event loop does. `prepare` makes all checks and changes nothing, so a change that is
refused, or has no bytes, leaves no trace. Whatever goes wrong once a change is being applied is fatal: the group is
dropped, and the state of the process, of which a part may have been changed, is not used again. So the log has what was
applied, and a start, which applies the same changes, gives the same state. Consequences are for the process that made
the change: they are not repeated when the log is read.

It has the shape of a replicated state machine: Ongaro and Ousterhout, "In Search of an Understandable Consensus
Algorithm", 2014, section 2.

It also keeps the answers of mutating requests, so that a retry gets the same answer and has no second effect.
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

_MOST_FORGOTTEN: Final = 1024  # entries that stay in the list, and
_FORGOTTEN_SHARE: Final = 8  # one of so many
_ENTRY_BYTES: Final = 256  # of an id, a time, and what holds them together


class Entry(NamedTuple):
    """A recorded answer: the id of its request, when it was made, in seconds of wall-clock time, and the answer."""

    key: bytes
    seconds: float
    value: Any


def merged(*snapshots: Iterable[Entry]) -> list[Entry]:
    """Return the answers of several snapshots as one."""
    return sorted(chain.from_iterable(snapshots), key=attrgetter("seconds"))


class IdempotencyCache:
    """Recorded answers by request_id, forgotten once no client can still be retrying.

    Refused requests are not recorded: they changed nothing, and may be right the next time. Times are those of the
    steps in which requests were made, so an answer is as old after a restart as it is.

    Attributes:
        used_bytes: about how much memory the answers take.
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
        """Make an empty cache.

        Args:
            keep_seconds: how long an answer is kept.
            pack: makes of an answer what is kept, which should be small: there may be a million of them.
            unpack: makes the answer of it again.
            max_bytes: what the answers may take; the oldest are forgotten sooner then. None: no bound.
            weigh: returns the bytes of what is kept of an answer.
        """
        self.pack = pack
        self._unpack = unpack
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._weigh = weigh
        self.used_bytes = 0
        self._newest: dict[bytes, int] = {}  # the number of the newest answer of each id; they count from 0
        # Id, time and what is kept of all answers in order of time, since an `Entry` of each would take more memory.
        # Shared with snapshots: they only grow, until others take their place.
        self._ids: list[bytes] = []
        self._seconds = array("d")
        self._packed: list[Any] = []
        self._forgotten_count = 0  # of these, in front
        self._removed_count = 0  # answers that were in front of these

    def __len__(self) -> int:
        return len(self._newest)

    def recorded(self, request_id: bytes, kind: type[object], now_seconds: float) -> Any | None:
        """Return the recorded answer, None where there is none, or it is too old by now.

        Raises:
            InvalidArgumentError: the id has not 16 bytes, or the recorded answer is not of this kind: it is that of
                another method, to which the caller gave the same id.
        """
        check_id("request_id", request_id)
        number = self._newest.get(request_id)
        if number is None or self._seconds[number - self._removed_count] < now_seconds - self._keep_seconds:
            return None
        recorded = self._unpack(self._packed[number - self._removed_count])
        if not isinstance(recorded, kind):
            raise InvalidArgumentError(
                f"request_id {request_id.hex()} is that of another call, which was answered with a "
                f"{type(recorded).__name__}; make a new one for each call, the same over its retries",
                field="request_id",
            )
        return recorded

    def add(self, request_id: bytes, packed: Any, at_seconds: float) -> None:
        """Record an answer at a time that is not before that of any other; forget those that are too old or too many.

        An id is recorded twice where the settings kept its first answer for a shorter time than they do now.
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
        """Return the answers as they are now, packed, to be read once, by any thread.

        It costs the same however many there are: the lists only grow at their end, or others take their place.
        """
        entries = zip(self._ids, self._seconds, self._packed, strict=False)
        return starmap(Entry, islice(entries, self._forgotten_count, len(self._ids)))

    def restore(self, answers: Iterable[Entry]) -> None:
        """Record the answers of a snapshot, besides those that are here."""
        entries = merged(answers, self.snapshot())
        self._newest, self._ids, self._seconds, self._packed = {}, [], array("d"), []
        self._forgotten_count = self._removed_count = self.used_bytes = 0
        for entry in entries:
            self._append(entry.key, entry.seconds, entry.value)


_log = logging.getLogger(__name__)

WrittenRows: TypeAlias = tuple[Partition, Indexes | range]
ChangedTask: TypeAlias = tuple[Partition, str | None]


class State:
    """All that a controller has to know to go on where it was: what changes are applied to, and snapshots hold.

    Attributes:
        partitions: by name.
        policies: by name.
        answers: of mutating requests, for retries.
        snapshot_number: of the snapshot that it comes from; 0: of none.
    """

    __slots__ = ("answers", "partitions", "policies", "snapshot_number")

    def __init__(self, answers: IdempotencyCache | None = None) -> None:
        self.partitions: dict[str, Partition] = {}
        self.policies: dict[str, Policy] = {}
        self.snapshot_number = 0
        self.answers = IdempotencyCache(600.0) if answers is None else answers

    def add_partition(self, partition: Partition) -> None:
        """Have a partition, which can compare with what is published, and share leases with others."""
        partition.policies, partition.all_partitions = self.policies, self.partitions
        self.partitions[partition.partition_id] = partition

    def policy(self, name: str) -> Policy:
        """Return a policy of which a version must be published."""
        policy = self.policies.get(name)
        if policy is None:
            raise PolicyNotFoundError(
                f"policy {name!r} has no version; its trainer has to publish one first; {nearest(name, self.policies)}",
                metadata={"policy": name},
            )
        return policy

    def partition(self, partition_id: str, incarnation: bytes = b"") -> Partition:
        """Return a partition that must be there, in the incarnation the caller means; empty means whichever."""
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
    """What the changes of one group are applied in, and what follows from them for the process that made them.

    Attributes:
        at_seconds: when, in seconds (see `StateMachine.now_seconds`); the same when the change is applied again.
        freed: cells that no sample has any more.
        leases: claims of which the lease began, or got more time, with the partition and the name of their task.
        changed: partitions in which waiting claims may find more samples.
        consumed: partitions of which a task has fewer samples left, so that writes may have capacity.
        created: partitions that are there from now on.
        cleared: partitions that are not there any more.
        written: partition and global indexes of rows that were added or written to.
        removed: partition and global indexes of rows that were removed, and their keys, None where none had one.
        tasks: partition and name of tasks that went on; None for the name: all of the partition.
        policies: names of policies of which a version was published, or that were removed.
    """

    at_seconds: float
    freed: list[Freed] = field(default_factory=list)
    leases: list[tuple[Partition, str, Claim]] = field(default_factory=list)
    changed: dict[Partition, None] = field(default_factory=dict)
    consumed: dict[Partition, None] = field(default_factory=dict)
    created: list[Partition] = field(default_factory=list)
    cleared: list[Partition] = field(default_factory=list)
    written: list[WrittenRows] = field(default_factory=list)
    removed: list[tuple[Partition, Indexes, NDArray[Any] | None]] = field(default_factory=list)
    tasks: list[ChangedTask] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)

    def note_change(self, partition: Partition) -> None:
        """Have all waiting claims of a partition look again, whichever rows have changed."""
        partition.state_version += 1
        self.changed[partition] = None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Change(ABC):
    """Something that can be done to the state: a frozen dataclass, whose fields are what the log keeps of it.

    Attributes:
        kinds: all changes there are, by the name of their class, which the log knows them by.
    """

    kinds: ClassVar[dict[str, type[Change]]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        # Else it is what several changes have in common.
        if not any(getattr(each, "__isabstractmethod__", False) for each in vars(cls).values()):
            Change.kinds[cls.__name__] = cls

    @abstractmethod
    def prepare(self, state: State) -> Any | None:
        """Check the change and look up what it needs; None where there is nothing to change.

        Nothing is changed here.

        Raises:
            TqError: the change does not fit the state.
        """

    @abstractmethod
    def apply(self, state: State, prepared: Any, step: Step) -> Any:
        """Make the change, by the state and the step alone, and return what came of it.

        It cannot be refused any more.
        """


class ChangeLog(Protocol):
    """Stores groups of changes."""

    def check_open(self) -> None:
        """Raise if no record is accepted any more."""
        ...

    def append(self, records: Sequence[bytes]) -> None:
        """Take the records of a group into memory, to be durable together: it cannot fail."""
        ...


def encode_change(change: Change) -> bytes:
    """Return the bytes of a change; raises if a value of it has none."""
    return codec.encode_named(change)


def encode_group(at_seconds: float, changes: Sequence[bytes]) -> list[bytes]:
    """Return the records of a group, each below 1 MiB unless a single change is larger: etcd takes no larger ones."""
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
    """Return the time and the changes of a record.

    Raises:
        NewerVersionError: one of them has an unknown kind or field.
        ValueError, TypeError, KeyError, struct.error: the bytes are not those of a group.
    """
    (at_seconds,) = _AT_SECONDS.unpack_from(record)
    changes = codec.unpack_each(memoryview(record)[_AT_SECONDS.size :])
    return at_seconds, [codec.decode_named(Change.kinds, *named) for named in changes]


class RequestAnswered(Change):
    """A mutating request was answered, last in the group of what it changed.

    Attributes:
        packed: the answer, as it is kept.
    """

    request_id: bytes
    packed: Any

    def prepare(self, state: State) -> State:
        """Return the state: an answer is of what has been applied, so there is nothing to refuse."""
        return state

    def apply(self, state: State, prepared: State, step: Step) -> None:
        """Record it."""
        state.answers.add(self.request_id, self.packed, step.at_seconds)


class StateMachine:
    """Applies changes to the state, and has them written down. Confined to one event loop.

    Attributes:
        log: None: nothing is written down, as while a log is read.
        fatal: called where the state cannot be used any more, with the reason and the error.
        listener: called with what follows from a group once that was appended.
        refusal: returns why no change is made at present; None: changes are made.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.log: ChangeLog | None = None
        self.fatal: Callable[[str, BaseException], None] = _log_critical
        self.listener: Callable[[Step], None] = lambda step: None
        self.refusal: Callable[[], TqError] | None = None
        self._group: tuple[Step, list[bytes]] | None = None  # that is open, and its encoded changes
        self._clock_offset = time.time() - time.monotonic()
        self._last_seconds = 0.0

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Have the changes of the `with` in one group; there is no await in it."""
        step, encoded = self._group = Step(self.now_seconds()), list[bytes]()
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self._group = None
            # A refusal may follow a change that was made whole, such as a task that was seen for the first time.
            if encoded and failure is not None and not isinstance(failure, TqError):
                self.fatal("a request failed after a change of it was made", failure)
            elif encoded:
                self._finish(step, encoded)

    def _finish(self, step: Step, encoded: Sequence[bytes]) -> None:
        """Append a group to the log, and do what follows from it."""
        try:
            if self.log is not None:
                self.log.append(encode_group(step.at_seconds, encoded))
            self.listener(step)
        except Exception as failure:
            self.fatal("what follows from a change could not be done", failure)
            raise

    def commit(self, change: Change, prepared: Any = None) -> Any:
        """Make a change, alone or in the open group, and return what came of it; None where nothing is to change.

        Args:
            change: what is to be done.
            prepared: what `prepare` returned for the state as it is.

        Raises:
            TqError: it does not fit the state, which has not changed.
        """
        if prepared is None:
            prepared = change.prepare(self.state)
            if prepared is None:
                return None
        return self.commit_all(((change, prepared),))

    def commit_all(self, changes: Sequence[tuple[Change, Any]]) -> Any:
        """Make several changes that were prepared, or none of them; return what came of the last one.

        They are encoded first, then applied, in the open group or in one of their own.
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
        except BaseException as error:
            self._group[1].clear()  # the changes before it in the group are dropped with it
            self.fatal("a change was made in part", error)
            raise
        self._group[1].extend(encoded)
        return result

    def log_alone(self, change: Change) -> None:
        """Write down a change that was made in another way, also while changes are refused."""
        if self.log is not None:
            self.log.append(encode_group(self.now_seconds(), [encode_change(change)]))

    def replay(self, change: Change, at_seconds: float) -> None:
        """Apply a change that was written down, to the state in which it was made.

        Raises:
            TqError, LookupError, ValueError: it does not fit the state.
        """
        self._last_seconds = at_seconds
        prepared = change.prepare(self.state)
        if prepared is None:
            raise ValueError("it changes nothing")
        change.apply(self.state, prepared, Step(at_seconds))

    def now_seconds(self) -> float:
        """Return the time of a group that begins now.

        The wall clock is read once for each process, since it may be set; from then on time goes by monotonically. It
        goes on from the last group of the log where the clock was set back before the start.
        """
        now = self._clock_offset + time.monotonic()
        if now < self._last_seconds:
            self._clock_offset += self._last_seconds - now
            now = self._last_seconds
        self._last_seconds = now
        return now


def _log_critical(reason: str, error: BaseException) -> None:
    _log.critical(LogMessage("the state cannot be used any more", reason=reason), exc_info=error)
