"""Selects units to evict: samples that a claim's `where` excludes, and groups with too few remaining members.

A task that keeps groups together evicts entire groups. A task that accepts incomplete groups evicts excluded members
individually. Such a task also evicts the rest of a group once the group has no members left, or fewer than
`least_members`. A group is not evicted while more members may be put, or while a member is held, leased, or delivered
to the task.

`small_groups` searches for candidates, which may take a long time. `units` decides which candidates to evict, and must
be called in the step that performs the eviction. `lowest_units` finds the lowest-priority units, which make room for
new samples (`Admission.overflow`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.planning.grouping import Grouping
from tq_service.schema import Admission, BatchUnit, EvictionCode
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, MustBeAwaited
from tq_service.state.table import CLEARED, DEAD_LETTERED, FAILED, HELD, UNCLAIMED, is_open

MOST_EVICTED_AT_ONCE: Final = 1 << 12
"""Maximum number of candidates whose groups are found and examined in one step."""
_MOST_GROUPS_ON_LOOP: Final = 1 << 17


class EvictionSearch:
    """A search for the units that a claim must evict.

    Args:
        partition: partition that contains the units.
        task: ledger of the claiming task.
        excluded: function that returns a mask of the live, unconsumed rows that `where` excludes.
        grouping: how the sampler groups samples. If None, or if groups may start at any index, samples are evicted
            individually.
        least_members: minimum number of members per group (see `BatchSpec`).
        clears: whether evicted samples are cleared. If True, failed samples in the same groups are also cleared, so
            that the group names become available again.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        excluded: Callable[[Indexes], NDArray[np.bool_]],
        grouping: Grouping | None,
        *,
        least_members: int,
        clears: bool,
    ) -> None:
        self._partition = partition
        self._task = task
        self._excluded = excluded
        self._grouping = None if grouping is None or grouping.blocks == "anywhere" else grouping
        self._least_members = least_members
        self._clears = clears

    # Candidates

    def small_groups(self, left: Callable[[], Indexes], *, is_on_loop: bool) -> Indexes:
        """Return the positions of all members of groups that may be too small.

        Args:
            left: function that returns the positions of the task's unconsumed rows.
            is_on_loop: whether the search runs in a single event-loop step.

        Raises:
            MustBeAwaited: searching all groups would take too long on the event loop.
        """
        grouping, groups, none = self._grouping, self._partition.groups, np.zeros(0, np.int64)
        if grouping is None or not self._least_members:
            return none
        if groups.in_use:
            if is_on_loop and groups.slots.count > _MOST_GROUPS_ON_LOOP:
                raise MustBeAwaited
            slots = groups.slots_of_unit(grouping.unit)
            ids = slots[groups.members[slots] > groups.failed[slots] + groups.cleared[slots]]
        else:
            has_lost = self._partition.table.removed_count or self._partition.state_counts[FAILED]
            if grouping.block_size is None or not (has_lost or self._task.dead_lettered_count):
                return none
            ids = np.unique(grouping.ids(np.concatenate([left(), self._task.dead_lettered()])))
        return grouping.members_of(ids[grouping.left_units(ids) < self._least_members])

    # Units

    def units(self, candidates: Indexes) -> Evicted | None:
        """Return the units to evict now, or None if none need to be evicted.

        The search stops after the first part of the candidates with units to evict, so later calls may return more
        units.

        Args:
            candidates: global indexes of candidates, without duplicates.
        """
        positions = self._partition.table.find(candidates)
        positions = positions[positions >= 0]
        for start in range(0, positions.size, MOST_EVICTED_AT_ONCE):
            some = positions[start : start + MOST_EVICTED_AT_ONCE]
            evicted = self._samples(some) if self._grouping is None else self._groups(self._grouping, some)
            if evicted is not None:
                return evicted
        return None

    def _samples(self, positions: Indexes) -> Evicted | None:
        """Return the excluded samples that are not leased as units of one sample each, or None if there are none."""
        positions = positions[self._excluded(positions)]
        positions = positions[~self._partition.is_leased(positions)]
        count = positions.size
        if not count:
            return None
        return Evicted(
            rows=self._partition.table.index[positions],
            sizes=np.ones(count, np.int64),
            reasons=np.full(count, EvictionCode.UNMATCHED, np.uint8),
            is_group=np.zeros(count, np.bool_),
        )

    def _groups(self, grouping: Grouping, positions: Indexes) -> Evicted | None:
        """Return the samples' groups and individual group members to evict, or None if nothing is to be evicted."""
        members = grouping.members_of(np.unique(grouping.ids(positions)))
        members = members[self._partition.state[members] != CLEARED]
        state, claims = self._partition.state[members], self._task.claim[members]
        excluded, is_there = self._excluded(members), is_open(state)
        ids, unit_of = np.unique(grouping.ids(members), return_inverse=True)

        def count(mask: NDArray[np.bool_]) -> Indexes:
            return np.bincount(unit_of[mask], minlength=ids.size)

        is_delivered = is_there & (claims != UNCLAIMED) & (claims != DEAD_LETTERED)
        in_use_counts = count((state == HELD) | is_delivered | self._partition.is_leased(members))
        is_free = grouping.is_complete(ids, no_more=self._partition.sealed) & (in_use_counts == 0)
        is_free &= count(is_there) > 0
        least = np.where(grouping.is_group(ids), self._least_members, 0)
        is_left = is_there & (claims != DEAD_LETTERED)
        counted_as = grouping.counted_as(members)

        def count_units(mask: NDArray[np.bool_]) -> Indexes:
            return np.bincount(unit_of[mask][np.unique(counted_as[mask], return_index=True)[1]], minlength=ids.size)

        excluded_counts, left_counts = count(excluded), count(is_left)
        has_excluded = excluded_counts > 0
        if grouping.kept is None:  # incomplete groups are delivered if they are large enough
            least_left = np.maximum(least, has_excluded)
            goes_whole = is_free & (count_units(is_left & ~excluded) < least_left)
            is_unmatched = has_excluded & (excluded_counts == left_counts)
        else:
            goes_whole = is_free & (has_excluded | (count_units(is_left & ~grouping.in_lost_rollout(members)) < least))
            is_unmatched = has_excluded
        goes_alone = excluded & (is_free & ~goes_whole)[unit_of]
        goes = goes_alone | (goes_whole[unit_of] & (is_there | self._clears))
        if not goes.any():
            return None
        chosen, place = self.unit_by_unit(np.where(goes_alone, ids.size + np.arange(members.size), unit_of), goes)
        first = chosen[np.searchsorted(place, np.arange(place[-1] + 1))]
        reasons = np.where(
            goes_alone[first] | is_unmatched[unit_of[first]], EvictionCode.UNMATCHED, EvictionCode.TOO_SMALL
        )
        return Evicted(
            rows=self._partition.table.index[members[chosen]],
            sizes=np.bincount(place),
            reasons=reasons.astype(np.uint8),
            is_group=~goes_alone[first] & grouping.is_group(ids[unit_of[first]]),
            unit=grouping.unit,
        )

    @staticmethod
    def unit_by_unit(units: Indexes, is_chosen: NDArray[np.bool_]) -> tuple[Indexes, Indexes]:
        """Return the indexes of the chosen elements, ordered by unit, and each element's unit number.

        Units are ordered by their first chosen elements, and numbered from 0.
        """
        chosen = np.flatnonzero(is_chosen)
        _, first, units = np.unique(units[chosen], return_index=True, return_inverse=True)
        number = np.empty_like(first)
        number[np.argsort(first)] = np.arange(first.size)
        order = np.argsort(number[units], kind="stable")
        return chosen[order], number[units][order]


def lowest_units(
    partition: Partition, task: TaskLedger, admission: Admission, count: int, kept: Indexes | range
) -> Evicted | None:
    """Return up to `count` of the lowest-priority pending units (see `Admission.overflow`), or None if there are none.

    Args:
        partition: partition that contains the units.
        task: the task's ledger.
        admission: the task's admission.
        count: maximum number of units.
        kept: global indexes of rows that must not be evicted.
    """
    table, groups, unit = partition.table, partition.groups, admission.unit
    positions = np.flatnonzero(task.is_pending(slice(0, table.count)))
    is_free = ~(partition.in_use(positions) | np.isin(table.index[positions], kept))
    ids, first, unit_of = -1 - positions, np.arange(positions.size), np.arange(positions.size)
    if unit != "sample":
        ids, first, unit_of = np.unique(_unit_ids(partition, positions, unit), return_index=True, return_inverse=True)
    sizes = np.bincount(unit_of)
    may_go = np.bincount(unit_of, ~is_free) == 0
    is_group = ids >= 0
    named = ids[is_group]
    left = groups.members[named] - groups.failed[named] - groups.cleared[named]
    may_go[is_group] &= groups.is_complete(named, None, no_more=partition.sealed) & (sizes[is_group] == left)
    chosen = np.flatnonzero(may_go)
    chosen = chosen[np.argsort(first[chosen], kind="stable")]
    priorities = (np.bincount(unit_of, _priorities(partition, admission.priority_key, positions)) / sizes)[chosen]
    if chosen.size > count:
        highest = np.partition(priorities, count - 1)[count - 1]
        goes = priorities < highest
        goes[np.flatnonzero(priorities == highest)[: count - np.count_nonzero(goes)]] = True
        chosen = chosen[goes]
    if not chosen.size:
        return None
    singles, slots = ids[chosen][~is_group[chosen]], ids[chosen][is_group[chosen]]
    members = np.concatenate([-1 - singles, groups.members_of(slots, table, unit)])
    members = np.sort(members[partition.state[members] != CLEARED])
    member_ids = _unit_ids(partition, members, unit) if slots.size else -1 - members
    order, place = EvictionSearch.unit_by_unit(member_ids, np.ones(members.size, np.bool_))
    sizes = np.bincount(place)
    return Evicted(
        rows=table.index[members[order]],
        sizes=sizes,
        reasons=np.full(sizes.size, EvictionCode.OVERFLOW, np.uint8),
        is_group=member_ids[order[np.cumsum(sizes) - sizes]] >= 0,
        unit=unit,
    )


def _unit_ids(partition: Partition, positions: Indexes, unit: BatchUnit) -> Indexes:
    """Return the slot of each row's group or rollout. For a row without a slot, return a unique negative number."""
    slots = partition.groups.of_unit(unit, positions)
    return np.where(slots < 0, -1 - positions, slots)


def _priorities(partition: Partition, column: str, positions: Indexes) -> NDArray[np.float64]:
    """Return the priorities of the rows, as an array of shape `(n,)`.

    Rows without a number in the priority column have infinite priority.
    """
    values, present = partition.meta.typed(column, positions)
    if not column or values.dtype.kind not in "bif":
        return np.full(positions.size, np.inf)
    priorities = values.astype(np.float64)
    return np.where(present & ~np.isnan(priorities), priorities, np.inf)
