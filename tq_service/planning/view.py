"""One look for the next plan of a claim: what its sampler sees, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import MissingLengthError, SamplerError
from tq_service.planning.grouping import Grouping, grouping_of
from tq_service.planning.ordering import in_order
from tq_service.planning.readiness import Readiness, Scan, ScanStarts, ScanWatch
from tq_service.schema import BatchUnit, Blocks, EndCounts, Layout
from tq_service.state.ledger import RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, Groups, Indexes, LengthSource, MustBeAwaited, Plan
from tq_service.state.table import CLEARED, FAILED, LAST_RESERVED, STATE_NAMES, UNCLAIMED

_LEAST_CHUNK = 1024
_MOST_IN_GROUPS_ON_LOOP = 1 << 15  # ready rows among which the event loop looks for whole groups
_MOST_NAMED = 3  # samples, in an error


class PartitionView:
    """The rows of a partition as one task sees them; implements `tq_service.state.plan.View`.

    On the event loop it shows the present, and what would take long ends with `MustBeAwaited`. Elsewhere values may
    change under it, though positions do not while the table is pinned; which is why a plan is checked again when it is
    recorded.

    Attributes:
        scan: for the ready rows.
        no_more: whether no new rows come: groups that declared no size are complete then.
        plan_count: see `View`.
        grouping: the groups that were asked for last; None: none were.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, new_scan: Callable[..., Scan], *, no_more: bool = False
    ) -> None:
        self._partition = partition
        self._task = task
        self._new_scan = new_scan
        self.scan = new_scan()
        self._rows = self.scan.rows
        self.no_more = partition.sealed or no_more
        self.grouping: Grouping | None = None
        self.plan_count = task.serial - LAST_RESERVED

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows, see `View.ready`."""
        for found, _ in self.scan.first(limit):
            if limit is not None and found.size >= limit:
                break
        found = found[:limit]
        self._check_lengths(found)
        first: Indexes = self._rows.table.index.data[found]
        return first

    def _check_lengths(self, positions: Indexes) -> None:
        """Refuse to deliver rows whose length is not a token count."""
        if self._rows.key[2] is not None:
            self._rows.lengths(positions)

    def ready_groups(self, limit: int | None = None, *, unit: BatchUnit = "sample", block_size: int | None = None,
                     take_incomplete: bool = False, blocks: Blocks = "aligned") -> Groups:  # fmt: skip
        """Return whole groups, see `View.ready_groups`.

        Raises:
            MustBeAwaited: the members of groups lie so far apart that they are to be looked for off the event loop.
        """
        self.grouping = grouping_of(self._partition, self._task, block_size, blocks, take_incomplete=take_incomplete)
        self.grouping.check()
        # Among which rows a run is found must not depend on the order.
        is_whole_scan = limit is None or (self.grouping.blocks == "anywhere" and bool(self.scan.orders))
        for found, is_last in self.scan.first(None if is_whole_scan else max(_LEAST_CHUNK, limit or 0)):
            if self.scan.is_on_loop and found.size > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            positions = found
            if self.scan.orders and not is_last:
                members = self.grouping.members(found)
                positions = in_order(self._rows.values_of, self.scan.orders, members[self._rows.ready(members)])
            positions, sizes = self.grouping.whole(positions, no_more=self.no_more)
            if limit is not None and (positions if unit == "sample" else sizes).size >= limit:
                break
        if limit is not None:
            taken = int(np.searchsorted(np.cumsum(sizes), limit, side="right")) if unit == "sample" else limit
            sizes = sizes[:taken]
            positions = positions[: int(sizes.sum())]
        self._check_lengths(positions)
        return Groups(rows=self._rows.table.index.data[positions], sizes=sizes)

    def left(self, limit: int | None = None) -> Indexes:
        """Return rows that are left for the task, see `View.left`."""
        for found, _ in self._new_scan(of_left=True).first(limit):
            left = found[~self._rows.excluded(found)]
            if limit is not None and left.size >= limit:
                break
        rows: Indexes = self._rows.table.index.data[left[:limit]]
        return rows

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts, see `View.lengths`."""
        return self._at(rows, self._rows.lengths, -1)

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return row lengths of a field, see `View.field_lengths`."""
        return self._at(rows, partial(self._rows.field_lengths, field), -1)

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return a custom_meta column, see `View.values`."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        values, present = self._rows.values_of(column, positions)
        return values, present & (positions >= 0)

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the explicit group of each row, see `View.group_names`."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        names = self._partition.groups.names_of(positions)
        return [name if position >= 0 else None for name, position in zip(names, positions.tolist(), strict=True)]

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return how often rows were delivered and not consumed, see `View.use_counts`."""
        return self._at(rows, self._task.uses.data.__getitem__, 0)

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row, see `View.states`."""
        return [STATE_NAMES[code] for code in self._at(rows, self._partition.state.data.__getitem__, CLEARED)]

    def rows(self) -> Indexes:
        """Return all rows that are not cleared, see `View.rows`."""
        present = np.flatnonzero(self._partition.state.data[: self.scan.count] != CLEARED)
        rows: Indexes = self._rows.table.index.data[present]
        return rows

    def _at(self, rows: Indexes, read: Callable[[Indexes], NDArray[Any]], missing: int) -> Indexes:
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        found = positions >= 0
        result = np.full(positions.size, missing, np.int64)
        result[found] = read(positions[found])
        return result


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that may be recorded in the step of the event loop in which it is returned.

    Attributes:
        plan: as it is recorded.
        positions: of `plan.named`, in the table of this moment.
        grouping: what its groups are; None where its sampler took no whole ones.
        length: what its sampler needs of each sample.
    """

    plan: RecordedPlan
    positions: Indexes
    grouping: Grouping | None
    length: LengthSource | None


@dataclass(frozen=True, slots=True)
class Miss:
    """There is no plan, and another look is of no use before something has changed.

    So a partition that fills row by row is not scanned for each of them, nor at its end for each waiting claim.

    Attributes:
        state_version: of the partition when the search was begun.
        row_version: that the partition must reach.
        consumed: rows consumed and leased by the task then, where a change of these may bring the end, or is after it;
            else None.
    """

    state_version: int = -1
    row_version: int = 0
    consumed: tuple[int, int] | None = None

    def is_current(self, partition: Partition, task: TaskLedger) -> bool:
        """Whether too little has changed for another look to be worth while."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFound(Miss):
    """No plan follows, unless something changes."""

    end: EndCounts


Found: TypeAlias = Planned | Miss

NOT_LOOKED = Miss()  # is never current; or other claims, or changes, were quicker


class Search:
    """Looks once for the next plan of a claim, or for the end of its task.

        plan of `view` for `wanted` -> conclude
            |none
        begins_last? -yes-> plan of `view` for `wanted` -> conclude
            |no
        conclude

    It reads only, and runs no sampler. In one step of the event loop it is of one moment; over several of them, a plan
    is of use if its rows are ready still, and an end if nothing has changed.

    Attributes:
        view: what the sampler sees.
        wanted: what it is asked for.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        starts: ScanStarts,
        request: ClaimRequest,
        length: LengthSource | None,
        *,
        watch: ScanWatch | None = None,
        look_past: int = 0,
    ) -> None:
        """Begin, with the length that the sampler needs of each sample; for `watch` and `look_past` see `Scan`."""
        self._partition = partition
        self._task = task
        self._request = request
        self._spec = request.batch_spec
        self._length = length
        self._rows = Readiness(partition, task, self._spec, length)
        self._new_scan = partial(Scan, self._rows, starts, self._spec.order_by, watch=watch, look_past=look_past)
        self._begun_at = self._marks
        self._consumed = task.consumed_count, task.leased_count
        self._end: EndFound | None = None
        self.wanted = request.plan_request
        self.view = PartitionView(partition, task, self._new_scan)

    @property
    def _marks(self) -> tuple[int, int, int, int, int]:
        """Versions of all that plans depend on; they are equal at two moments if nothing has changed between."""
        partition, task = self._partition, self._task
        return *partition.version, task.serial, task.leased_count, task.epoch

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since the search was begun."""
        return self._marks == self._begun_at

    @property
    def kept_groups(self) -> int | None:
        """How groups that the sampler asked for are kept whole, see `TaskFacts`."""
        return None if self.view.grouping is None else self.view.grouping.kept

    # The end

    def begins_last(self) -> bool:
        """Have the last, short batch planned if no more rows can become ready; return whether that is so.

        Raises:
            MustBeAwaited: the event loop has no time to see.
        """
        is_closed = self._partition.sealed or (self._spec.finite and self._partition.may_end_finite)
        if not is_closed or not self.is_current:
            return False
        end = self._count_end()
        if end is None:
            return False
        state_version, row_version, *_ = self._begun_at
        self._end = EndFound(state_version, row_version + 1, self._consumed, end=end)
        self.wanted = replace(self.wanted, min_size=self.wanted.total_size if self._spec.drop_last else 1)
        self.view = PartitionView(self._partition, self._task, self._new_scan, no_more=True)
        return True

    @property
    def _is_plain(self) -> bool:
        """Whether rows become ready one by one, without groups or conditions that could rule them out."""
        return self.view.grouping is None and not self._spec.where

    @property
    def _unready_count(self) -> int:
        """Rows left for the task that were not ready, once a scan was exhausted."""
        return self._task.backlog + self._task.skipped_count - self.view.scan.seen_count

    def _count_end(self) -> EndCounts | None:
        """Count the end, in which nothing more is planned; None where rows may become ready that are not.

        No new rows come, but those that are leased may be released.
        """
        partition, task, rows, grouping = self._partition, self._task, self._rows, self.view.grouping
        consumed, inserted = task.consumed_count, partition.inserted_count
        if task.leased_count or (self._is_plain and self.view.scan.exhausted and self._unready_count > 0):
            return None
        if consumed == inserted:
            return EndCounts(consumed_count=consumed, kept_count=task.kept_count)
        failed = excluded = left_count = 0
        ready = [np.zeros(0, np.int64)]
        at_once = self.view.scan.at_once if self._is_plain else rows.at_once
        for some in self.view.scan.stretches(_LEAST_CHUNK, at_once):  # mostly the first unready row tells
            left = some.start + np.flatnonzero(rows.is_left(some))
            kept = left[~rows.excluded(left)]
            is_ready = rows.ready(kept)
            unready = kept[~is_ready]
            if unready.size and (grouping is None or not bool(grouping.is_dead(unready).all())):
                return None
            is_failed = (partition.state.data[some] == FAILED) & (task.claim.data[some] == UNCLAIMED)
            failed += int(np.count_nonzero(is_failed))
            excluded += left.size - kept.size
            left_count += kept.size
            ready.append(kept[is_ready])
        left_over = left_count
        if grouping is not None:
            if self.view.scan.is_on_loop and left_count > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            left_over = grouping.whole(np.concatenate(ready), no_more=True)[0].size
        dead_lettered, dropped = task.dead_lettered_count, task.dropped_count
        return EndCounts(
            consumed_count=consumed,
            cleared_count=inserted - consumed - failed - dead_lettered - dropped - excluded - left_count,
            failed_count=failed,
            dead_lettered_count=dead_lettered,
            excluded_count=excluded,
            in_incomplete_groups_count=left_count - left_over,
            left_over_count=left_over,
            overlong_count=dropped,
            kept_count=task.kept_count,
        )

    # What a plan comes to

    def conclude(self, plan: Plan | None) -> Found:
        """Return a plan as it may be recorded in this step of the event loop, the end, or why there is neither.

        Raises:
            SamplerError: its rows were not ready although nothing has changed.
            MissingLengthError: see `_check_length_field`.
        """
        if plan is None:
            if self._end is None:
                return self._miss()
            return self._end if self.is_current else NOT_LOOKED
        if self._task.epoch != self._begun_at[-1]:  # what was left in it is not what there is now
            return NOT_LOOKED
        recorded = RecordedPlan.of(plan, self._spec.micro_batch_size)
        positions = self._rows.table.find(recorded.named)
        if bool((positions < 0).any()) or not bool(self._rows.has_data(positions).all()):
            state_version, _, *others = self._begun_at  # rows that are only written to stay ready
            if (state_version, *others) != (self._marks[0], *self._marks[2:]):
                return NOT_LOOKED
            sampler = self._request.sampler.name
            raise SamplerError(
                f"sampler {sampler!r} returned rows that were not ready for this claim; return rows of view.ready() or "
                f"view.ready_groups() only",
                metadata={"sampler": sampler},
            )
        if self._spec.max_uses > 1 or recorded.is_reusing:
            recorded = recorded.consuming(self._spent(recorded.rows))
            positions = self._rows.table.find(recorded.named)
        return Planned(recorded, positions, self.view.grouping, self._length)

    def _miss(self) -> Miss:
        """Return how many rows must be written, after the search was begun, before there can be more to find."""
        self._check_length_field()
        missing, is_closed = 1, self._partition.sealed or self._spec.finite  # or soon closed, by a first sample
        # Of the class, where reading it runs no code of the sampler.
        needs_min_size = type(self._request.sampler).plans_below_min_size is not True
        if needs_min_size and self.view.scan.exhausted and self.wanted.batch_unit == "sample":
            missing = self.wanted.min_size - self.view.scan.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, self._unready_count) if self._is_plain else 1
        state_version, row_version, *_ = self._begun_at
        return Miss(state_version, row_version + max(1, missing), self._consumed if is_closed else None)

    def _check_length_field(self) -> None:
        """Refuse to wait for lengths of a field that never has any, where no sample has one in custom_meta either.

        Lengths that are missing can come as long as there are samples, by a put or by SetCustomMeta; so claims wait.
        """
        source, rows = self._length, self._rows
        field = None if source is None else self._partition.cells.fields.get(source.field or "")
        if source is None or field is None or not field.produced_count or field.has_lengths:
            return
        if self._partition.meta.has(source.key):
            return
        first = slice(0, min(self.view.scan.count, rows.at_once))
        lacking = np.flatnonzero(rows.has_data(first) & rows.allowed(first) & ~rows.has_length(first))
        if not lacking.size:
            return
        kind = "objects" if field.spec.layout is Layout.OBJECT else "scalars"
        named = ", ".join(map(str, rows.table.index.data[lacking[:_MOST_NAMED]].tolist()))
        raise MissingLengthError(
            f"length_field is {source.field!r}, which has {kind}; expected a field of tensors with a length, for "
            f"samples {named}{' and others' if lacking.size > _MOST_NAMED else ''}. Name another field, or put the "
            f"number of tokens into the custom_meta column {source.key!r}.",
            field="sampler_config",
            metadata={"partition_id": self._partition.partition_id, "column": source.key},
        )

    def _spent(self, rows: Indexes) -> Indexes:
        """Return the rows of a plan that were used often enough once it is recorded; of no number none."""
        max_uses = self._spec.max_uses
        if max_uses == 1:
            return rows[:0]
        rows, counts = np.unique(rows, return_counts=True)
        spent: Indexes = rows[self._task.uses.data[self._partition.table.find(rows)] + counts >= max_uses]
        return spent
