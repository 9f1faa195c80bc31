"""Writes of new samples that wait for capacity in a partition, and the bounds that make them wait.

A partition bounds the bytes of its cells, and how far producers may be ahead of its tasks. All that is counted follows
from its rows and puts, so that it is the same after a restart. `LowestVersion` finds the lowest version among the
samples that a task has left without looking at all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.admission_turn import AdmissionTurn
from tq_service.custom_meta import MetaColumn
from tq_service.errors import (
    CallCancelledError,
    InvalidArgumentError,
    QuotaExceededError,
    ResourceExhaustedError,
    StalenessLimitError,
    TqError,
)
from tq_service.machine.samples import SampleWrite, check_write
from tq_service.planning.view import Readiness
from tq_service.schema import SampleState
from tq_service.serving.planner import Planner
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, Indexes
from tq_service.state.table import is_open
from tq_service.wait_clock import Waiting

_BLOCK_ROWS = 1024
_TO_BE_LOOKED_AT = -math.inf
NO_VERSIONS = (math.inf, -math.inf)  # so that nothing is ahead of them, and they of nothing
_MOST_LOOKED_AT: Final = 256  # of the writes that wait, after each change
_MOST_EXPLAINED: Final = 1 << 16  # rows that a refused put has time to look at

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the new samples of a write take.

    Attributes:
        sample_count: how many they are.
        value_bytes: bytes of their cells.
        versions: by column, the lowest and the highest version of the samples.
        groups: names of groups of the samples; of groups that have begun its members take nothing.
        is_gathered: whether the samples are of several puts, none of which may be too far above another.
    """

    sample_count: int = 0
    value_bytes: int = 0
    versions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    is_gathered: bool = False


def sum_of(demands: Iterable[Demand | None]) -> Demand:
    """Return what several writes take together, None for nothing."""
    count = size = 0
    versions: dict[str, tuple[float, float]] = {}
    for demand in filter(None, demands):
        count, size = count + demand.sample_count, size + demand.value_bytes
        for name, (lowest, highest) in demand.versions.items():
            known = versions.get(name, NO_VERSIONS)
            versions[name] = min(known[0], lowest), max(known[1], highest)
    return Demand(sample_count=count, value_bytes=size, versions=versions)


_OLDEST: Final = "the task has to consume, or somebody has to clear, the oldest first"
# Of each bound, by its setting: what is counted, with a place for the name of the task, and what makes capacity.
_BOUNDS: Final = {
    "max_bytes": ("bytes", "clear consumed samples, or raise max_bytes"),
    "max_samples": ("samples for task {!r} to consume", "the task has to consume some first"),
    "max_versions": ("versions between new samples and the oldest that task {!r} has to consume", _OLDEST),
}


class Bound:
    """The most there may be in a partition of bytes of cells, or of what a task has left: samples, or versions.

    Of versions it is how far those of new samples are above the lowest that the task has left to consume.

    Attributes:
        name: of the setting.
        limit: the most there may be.
        task_name: of the task that has to consume first; empty: none has.
    """

    def __init__(self, partition: Partition, name: str, limit: int, task_name: str = "", column: str = "") -> None:
        """Bound a partition; versions by their column."""
        self._partition = partition
        self.name = name
        self.limit = limit
        self.task_name = task_name
        self._column = column
        self._lowest = LowestVersion(partition, task_name, column) if column else None
        self._what, self._remedy = _BOUNDS[name]

    def share(self, demand: Demand) -> int:
        """Return how much there would be of a write in an empty partition, into which any version may come."""
        if self._lowest is not None:
            return 0
        return demand.sample_count if self.task_name else demand.value_bytes

    def used(self) -> int:
        """Return the bytes of the cells there are, or how many samples the task has left: all before it asks."""
        if not self.task_name:
            return self._partition.cells.used_bytes
        task = self._partition.tasks.get(self.task_name)
        return self._partition.open_count if task is None else task.backlog

    def total(self, demand: Demand, others: Demand) -> float:
        """Return how much there would be with a write, and others that were let in and are not made yet.

        A write that adds nothing never waits.
        """
        if self._lowest is not None:
            lowest, highest = demand.versions.get(self._column, NO_VERSIONS)
            lowest = min(lowest if demand.is_gathered else math.inf, others.versions.get(self._column, NO_VERSIONS)[0])
            return highest - min(self._lowest.find(), lowest)
        share = self.share(demand)
        return self.used() + share + self.share(others) if share else 0

    def waits_for(self, got: float) -> str:
        """Return why a write waits with which there would be so much."""
        counted, limited = _shown(got), self._what.format(self.task_name)
        name = self._partition.partition_id
        return f"partition {name!r} would have {counted} {limited}, its {self.name} is {self.limit}"

    def error(self, got: float, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Return the error of a write with which there would be so much, at once or after it has waited."""
        names = {"limit_name": self.name, "got": _shown(got), "limit": str(self.limit), "task_name": self.task_name}
        metadata = {name: value for name, value in names.items() if value}
        outcome = f" and it stayed so until the deadline; {self._remedy}{note}" if may_fit_later else "; split the put"
        error_kind = StalenessLimitError if self.task_name else QuotaExceededError
        return error_kind(
            f"{self.waits_for(got)}{outcome}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata=metadata,
        )


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def bounds_of(partition: Partition) -> list[Bound]:
    """Return the bounds that the settings of a partition have."""
    settings = partition.settings
    bounds = [] if settings.max_bytes is None else [Bound(partition, "max_bytes", settings.max_bytes)]
    for limit in settings.staleness_limits:
        if limit.max_samples is not None:
            bounds.append(Bound(partition, "max_samples", limit.max_samples, limit.task_name))
        if limit.max_versions is not None:
            column = limit.version_column
            bounds.append(Bound(partition, "max_versions", limit.max_versions, limit.task_name, column))
    return bounds


def demand_of(partition: Partition, write: SampleWrite, value_bytes: int) -> Demand | None:
    """Return what the new samples of a write take, None if it has none that last or all are in groups that have begun.

    Raises:
        TqError: the partition would refuse the write whatever capacity there is.
    """
    checked = check_write(partition, write)
    if checked.new_count == 0 or write.state is SampleState.FAILED:
        return None
    count, is_counted = checked.new_count, checked.is_new
    groups: tuple[str, ...] = ()
    if checked.groups is not None:
        has_begun = checked.groups.slots >= 0
        groups = tuple(itertools.compress(checked.groups.names, ~has_begun))
        if has_begun.any():
            is_counted = np.zeros(write.row_count, np.bool_)
            is_counted[checked.is_new] = ~np.append(has_begun, False)[checked.groups.codes]  # the last: without a group
            count = int(np.count_nonzero(is_counted))
            if count == 0:
                return None
    bounding = {limit.version_column for limit in partition.settings.staleness_limits if limit.max_versions is not None}
    return Demand(
        sample_count=count,
        value_bytes=value_bytes * count // write.row_count,
        versions={each.name: _version_range(each, is_counted) for each in write.meta if each.name in bounding},
        groups=groups,
        is_gathered=write.rows_per_put > 0,
    )


def _version_range(column: MetaColumn, which: slice | NDArray[np.bool_]) -> tuple[float, float]:
    others = set() if column.json is None else {*column.json.tolist()} - {None, "null"}
    if others or (column.values.dtype.kind not in "if" and column.present.any()):
        got = f"the JSON value {min(others):.200}" if others else f"values of type {column.values.dtype}"
        raise InvalidArgumentError(
            f"custom_meta column {column.name!r} has the versions of a staleness limit, so it holds numbers; got {got}",
            field="custom_meta",
        )
    if not column.present.any():
        return NO_VERSIONS
    return version_range(column.values[which][column.present[which]])


class LowestVersion:
    """Knows for each block of neighbouring rows a version below which none of its rows that are left lies.

    Rows that leave keep that true, so only those that come, come back or change are noted. A search looks at the block
    with the lowest bound, and at the next one only where the bound turned out to be too low: once for each version that
    a block runs out of, however many rows there are.

    Bounds are doubles, by which blocks are compared: integers beyond 2**53 may be taken for their neighbours there.
    """

    def __init__(self, partition: Partition, task_name: str, column: str) -> None:
        self._partition = partition
        self._task_name = task_name
        self._column = column
        self._first_block = 0
        self._bounds = np.zeros(0)  # of blocks from the first on; those of rows that were cleared in front are dropped
        self._extend()
        partition.on_rows.append(self._note)
        partition.on_reset.append(self._invalidate)

    def _note(self, indexes: Indexes | range) -> None:
        """Have the blocks of rows looked at again."""
        self._extend()
        if isinstance(indexes, range):  # of new rows, which are the last
            self._bounds[indexes.start // _BLOCK_ROWS - self._first_block :] = _TO_BE_LOOKED_AT
        else:
            self._bounds[indexes // _BLOCK_ROWS - self._first_block] = _TO_BE_LOOKED_AT

    def _extend(self) -> None:
        """Have bounds for the blocks of all rows there are."""
        table = self._partition.table
        missing_count = -(-table.next_index // _BLOCK_ROWS) - self._first_block - self._bounds.size
        if missing_count > 0:
            bounds = np.append(self._bounds, np.full(missing_count, _TO_BE_LOOKED_AT))
            position = table.position_from(0)
            first_index = int(table.index[position]) if position < table.count else table.next_index
            first_block = first_index // _BLOCK_ROWS
            self._bounds, self._first_block = bounds[first_block - self._first_block :], first_block

    def _invalidate(self, task_name: str) -> None:
        """Have all blocks looked at: any rows may be left again."""
        if task_name == self._task_name:
            self._bounds[:] = _TO_BE_LOOKED_AT

    def find(self) -> float:
        """Return the lowest version, infinity where no row that is left has one."""
        while self._bounds.size:
            block = int(self._bounds.argmin())
            bound, lowest = self._bounds[block], self._lowest_of(self._first_block + block)
            self._bounds[block] = lowest
            if self._bounds[block] == bound:
                return lowest
        return math.inf

    def _lowest_of(self, block: int) -> float:
        partition = self._partition
        arrays = partition.meta.arrays(self._column)
        if arrays is None or arrays[0].dtype.kind not in "if":
            return math.inf
        table = partition.table
        rows = slice(table.position_from(block * _BLOCK_ROWS), table.position_from((block + 1) * _BLOCK_ROWS))
        task = partition.tasks.get(self._task_name)
        left = is_open(partition.state[rows]) if task is None else task.is_pending(rows)
        left &= arrays[1][rows]
        return version_range(arrays[0][rows][left])[0]


def version_range(versions: NDArray[Any]) -> tuple[float, float]:
    """Return the lowest and the highest version of some samples."""
    versions = versions[~np.isnan(versions)]  # not a number: no version
    return (versions.min().item(), versions.max().item()) if versions.size else NO_VERSIONS


@dataclass(slots=True, eq=False, kw_only=True)
class Admission(contextlib.AbstractContextManager["Admission"]):
    """A write that waits for capacity, and once it is admitted has it: until the end of the `with` in which it is made.

    Attributes:
        demand: what the write takes, None where that is nothing.
        seen: the marks of the queue as of which it takes that: keys and groups may become known while it waits.
        since: when it came, or its last turn was over, see `AdmissionTurn`.
        admitted: done once there is capacity, or none will be.
    """

    queue: AdmissionQueue
    request_id: bytes
    write: SampleWrite
    value_bytes: int
    demand: Demand | None = None
    seen: tuple[bool, int, int] | None = None
    since: float = field(default_factory=time.monotonic)
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __exit__(self, *exception: object) -> None:
        self.queue.leave(self)


class AdmissionQueue:
    """Lets writes with new samples into one partition as its bounds allow, in order of arrival.

    A write that fits passes those that do not, for it may be what lets them in: the sample that completes the batch for
    which a trainer waits, say. That a large put is not put off for ever see `AdmissionTurn`. Members of groups of which
    the partition has some already take no capacity: their groups have passed the bounds.

    The first writes of those that wait are looked at, and only when something has changed. A retry takes the place of
    the call that it repeats, in the queue or after it. Confined to the event loop of its partition.
    """

    def __init__(
        self,
        partition: Partition,
        deadlock: Callable[[str, ClaimRequest | None], str] = lambda task_name, asking: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a queue in which nothing waits.

        Args:
            partition: what is written to.
            deadlock: returns, for the task that has to consume first, or "" for whichever, why it cannot; "" if it can.
                It gets a claim that is known to wait, if there is one.
            clock: of deadlines and turns.
        """
        self._partition = partition
        self._deadlock = deadlock
        self._clock = clock
        self._bounds = bounds_of(partition)
        self._waiting: OrderedDict[bytes, Admission] = OrderedDict()
        self._admitted: dict[bytes, Admission] = {}
        self._turn = AdmissionTurn(clock)
        self._timer: asyncio.TimerHandle | None = None
        self._end_error: Callable[[], TqError] | None = None
        partition.on_change.append(self.wake)
        partition.on_consumed.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of writes that wait."""
        return len(self._waiting)

    def first_waits_for(self, asking: ClaimRequest | None = None) -> str:
        """Return why the first write that waits has no capacity, beside a claim that waits; empty if none waits."""
        first = next(iter(self._waiting.values()), None)
        refusing = None if first is None or first.demand is None else self._refusing(first.demand)
        return "" if refusing is None else refusing[0].waits_for(refusing[1]) + self._note(refusing[0], asking)

    async def enter(self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None) -> Admission:
        """Return capacity for a write, as soon as all that came before have theirs; at once where it takes none.

        Args:
            request_id: the same over retries.
            write: what is to be written.
            value_bytes: bytes of its columns.
            deadline: until when to wait, by `time.monotonic`; None: until the caller is cancelled.

        Raises:
            QuotaExceededError, StalenessLimitError: larger than a bound (at once), or no capacity until the deadline
                (with `retry_after_seconds`).
            PartitionClearedError, UnavailableError: the partition or the service went away meanwhile.
            CallCancelledError: a retry took the place of this call.
            TqError: the partition would refuse the write whatever capacity there is.
        """
        entering = Admission(
            queue=self, request_id=request_id, write=write, value_bytes=value_bytes, since=self._clock()
        )
        self._update_demand(entering)
        if entering.demand is None:
            return entering
        for bound in self._bounds:
            if (share := bound.share(entering.demand)) > bound.limit:
                raise bound.error(share, may_fit_later=False)
        if request_id in self._admitted:
            self._admitted[request_id] = entering
            return entering
        if (earlier := self._waiting.get(request_id)) is not None:
            earlier.admitted.set_exception(CallCancelledError("a retry of this call took its place in the queue"))
            entering.since = earlier.since
            self._turn.leave(earlier)
        self._waiting[request_id] = entering
        self.wake(entering)
        if self._end_error is not None:
            self.end(self._end_error)
        try:
            timeout = None if deadline is None else deadline - self._clock()
            if not entering.admitted.done() and (timeout is None or timeout > 0):
                with Waiting():
                    await asyncio.wait((entering.admitted,), timeout=timeout)
            if not entering.admitted.done():
                raise self._too_late(entering)
            entering.admitted.result()
            return entering
        except BaseException:  # a cancellation may come in the turn in which capacity did
            self.leave(entering)
            raise
        finally:
            del entering  # through which an error would hold this frame, and with it the partition

    def leave(self, admission: Admission) -> None:
        """Give up the place of a write, or its capacity; a retry that has taken it over keeps it."""
        for places in (self._waiting, self._admitted):
            if places.get(admission.request_id) is admission:
                del places[admission.request_id]
                self._turn.leave(admission)
                self.wake()

    def wake(self, last: Admission | None = None) -> None:
        """Let those in for whom there is capacity now; `last`, if it waits, is looked at however many are before it."""
        admitted, short = sum_of(each.demand for each in self._admitted.values()), list[Admission]()
        looked_at = dict(itertools.islice(self._waiting.items(), _MOST_LOOKED_AT))
        if last is not None and last.request_id in self._waiting:
            looked_at[last.request_id] = last
        for request_id, waiting in looked_at.items():
            holder = self._turn.holder
            try:
                fits = self._fits(waiting, admitted, may_pass=holder is None or holder is waiting)
            except TqError as error:
                waiting.admitted.set_exception(error)
            else:
                if not fits or (waiting.demand is not None and self._turn.begin(short) not in (None, waiting)):
                    short.append(waiting)
                    continue
                if waiting.demand is not None:
                    self._admitted[request_id] = waiting
                    admitted = sum_of((admitted, waiting.demand))
                waiting.admitted.set_result(None)
            del self._waiting[request_id]
            self._turn.leave(waiting)
        self._set_timer()

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waits, and those to come, with an error."""
        self._end_error = error
        self._deadlock = lambda task_name, asking: ""  # lest the queue and its owner reference each other
        for admission in self._waiting.values():
            admission.admitted.set_exception(error())
            self._turn.leave(admission)
        self._waiting.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        """Have the others looked at when a turn is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (over_at := self._turn.over_at) is not None:
            seconds = max(0.0, over_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self.wake)

    def _fits(self, waiting: Admission, admitted: Demand, *, may_pass: bool) -> bool:
        """Whether a write takes nothing, or there is capacity for it beside what is admitted and it may pass others.

        What it takes is found out again only where it may be less than before, or once it fits: a large put that waits
        must not cost each small clear a look at all of its keys.
        """
        if self._may_take_less(waiting):
            self._update_demand(waiting)
        if waiting.demand is None:
            return True
        if not may_pass or self._refusing(waiting.demand, admitted) is not None:
            return False
        self._update_demand(waiting)  # rows were removed since, so their keys may be new again
        return waiting.demand is None or self._refusing(waiting.demand, admitted) is None

    def _may_take_less(self, waiting: Admission) -> bool:
        """Whether samples of a write may be known by now, their groups begun, or the write be refused."""
        if waiting.demand is None or waiting.seen is None or waiting.seen[0] != self._partition.sealed:
            return True
        added = self._partition.table.next_index - waiting.seen[1]
        if added and waiting.demand.groups:
            return bool((self._partition.groups.slot_of.find(waiting.demand.groups) >= 0).any())
        return added > 0 and waiting.write.keys is not None

    def _update_demand(self, admission: Admission) -> None:
        """Find out what a write takes, where it may be more or less than before."""
        table = self._partition.table
        marks = self._partition.sealed, table.next_index, table.removed_count
        if admission.seen != marks:
            admission.demand = demand_of(self._partition, admission.write, admission.value_bytes)
            admission.seen = marks

    def _refusing(self, demand: Demand, admitted: Demand | None = None) -> tuple[Bound, float] | None:
        """Return the bound that a write would exceed now, and by what total; None where it has capacity."""
        if admitted is None:
            admitted = sum_of(each.demand for each in self._admitted.values())
        for bound in self._bounds:
            if (total := bound.total(demand, admitted)) > bound.limit:
                return bound, total
        return None

    def _too_late(self, late: Admission) -> TqError:
        """Return the error of a write for which there was no capacity in time, or which might not pass another."""
        if late.demand is not None and (refusing := self._refusing(late.demand)) is not None:
            return refusing[0].error(refusing[1], may_fit_later=True, note=self._note(refusing[0]))
        holder = self._turn.holder
        front = holder.demand if isinstance(holder, Admission) and holder is not late else None
        if front is not None and (refusing := self._refusing(front)) is not None:
            note = f"; that is with a put of {front.sample_count} samples in front, which has waited longest"
            return refusing[0].error(refusing[1], may_fit_later=True, note=note)
        return ResourceExhaustedError(
            "there was no capacity until the deadline", retry_after_seconds=RETRY_AFTER_SECONDS
        )

    def _note(self, bound: Bound, asking: ClaimRequest | None = None) -> str:
        """Return what else keeps a write waiting that a bound refuses: puts in front of it, or a deadlock."""
        if self._admitted:
            return f"; {len(self._admitted)} puts in front were let in and are not stored yet"
        deadlock = self._deadlock(bound.task_name, asking)
        return f"; {deadlock}" if deadlock else ""


def starvation(partition: Partition, planner: Planner, asking: ClaimRequest | None = None) -> str:
    """Return, in words, why a task consumes nothing of what it has left; "" if that is unknown or it may.

    Either a claim waits which only new samples can serve, or conditions rule out samples, which stay pending.

    Args:
        partition: that of the task.
        planner: serves its claims.
        asking: a claim that is known to wait, if it is of this task.
    """
    task, waiting = planner.task, [request for request, _ in planner.waiting_claims()]
    if asking is not None and asking.task_name == task.name:
        waiting.insert(0, asking)
    request, rows = waiting[0] if waiting else planner.last_request, slice(0, partition.table.count)
    if request is None or task.leased_count or rows.stop > _MOST_EXPLAINED:
        return ""
    try:
        readiness = Readiness(partition, task, request.batch_spec, planner.length(request))
        pending, ready = task.is_pending(rows), readiness.ready(rows)
        excluded = pending & readiness.excluded(rows)
    except TqError:
        return ""
    ruled_out, names = int(np.count_nonzero(excluded)), {each.column for each in request.batch_spec.where}
    cause = f"{ruled_out} samples are ruled out by its where ({', '.join(sorted(names))}); clear these"
    if not waiting:
        return f"for task {task.name!r} {cause}" if ruled_out else ""
    if (pending & ~ready & ~excluded).any():  # held, or a field of them is still to come
        return ""
    return (
        f"this is a deadlock unless samples that fit still come: task {task.name!r} waits for more samples itself, "
        f"{int(np.count_nonzero(pending & ready))} are ready, too few for it{', and ' + cause if ruled_out else ''}"
    )
