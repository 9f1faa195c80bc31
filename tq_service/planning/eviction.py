"""What a claim evicts: samples that its `where` excludes, and groups of which too few members are left.

Whole groups are evicted where the task keeps groups whole. Where it takes the rest of incomplete ones, excluded members
are evicted one by one, and the group once fewer than `least_members` are left, or none. A group goes only if it is
complete, and the task has been delivered no member, nobody leases one, and none is held: else work on it goes on.

`candidates` looks at rows that may have to go, and may take long; `units` decides in the step that evicts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.planning.grouping import Grouping
from tq_service.schema import EvictionCode
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, MustBeAwaited
from tq_service.state.table import CLEARED, DEAD_LETTERED, FAILED, HELD, UNCLAIMED, is_open

MOST_EVICTED_AT_ONCE: Final = 1 << 12
"""Candidates, with the groups that they are in, among which units are found in one step."""
_MOST_GROUPS_ON_LOOP: Final = 1 << 17


class EvictionSearch:
    """Looks for what a claim evicts.

    Args:
        partition: the partition.
        task: the task that claims.
        excluded: returns which of some rows are left, live and excluded by `where`.
        grouping: the groups that its sampler asks for; None, or groups that begin anywhere: samples go one by one.
        least_members: see `BatchSpec`.
        takes_group: whether the rest of an incomplete group is delivered.
        clears: whether evicted samples are cleared: of a group the failed ones too, so that its name is free again.
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
        """Return the positions of members of groups that may have too few left.

        Args:
            left: returns the positions of the rows that are left for the task.
            is_on_loop: whether it is called in a step of the event loop.

        Raises:
            MustBeAwaited: the event loop has no time for so many groups.
        """
        grouping, groups, none = self._grouping, self._partition.groups, np.zeros(0, np.int64)
        if grouping is None or not self._least_members:
            return none
        if groups.in_use:
            if is_on_loop and groups.slots.count > _MOST_GROUPS_ON_LOOP:
                raise MustBeAwaited
            slots = slice(0, groups.slots.count)
            ids = np.flatnonzero(groups.members[slots] - groups.failed[slots] - groups.cleared[slots])
        else:
            has_lost = self._partition.table.removed_count or self._partition.state_counts[FAILED]
            if grouping.block_size is None or not (has_lost or self._task.dead_lettered_count):
                return none
            ids = np.unique(grouping.ids(np.concatenate([left(), self._task.dead_lettered()])))
        return grouping.members_of(ids[grouping.left(ids) < self._least_members])

    # Units

    def units(self, candidates: Indexes) -> Evicted | None:
        """Return the first units to be evicted of some candidates, as of now; None if there are none.

        Args:
            candidates: global indexes, each once.
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
        """Return those of some samples that are excluded, one by one."""
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
        """Return the groups that some samples are in, or those of their members, that are to be evicted."""
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
        excluded_counts, left_counts = count(excluded), grouping.left(ids)
        has_excluded = excluded_counts > 0
        if grouping.kept is None:  # the rest is delivered, if it is large enough
            least_left = np.maximum(least, has_excluded)
            goes_whole = is_free & (left_counts - excluded_counts < least_left)
            is_unmatched = has_excluded & (excluded_counts == left_counts)
        else:
            goes_whole = is_free & (has_excluded | (left_counts < least))
            is_unmatched = has_excluded
        goes_alone = excluded & (is_free & ~goes_whole)[unit_of]
        goes = goes_alone | (goes_whole[unit_of] & (is_there | self._clears))
        if not goes.any():
            return None
        chosen, place = self._unit_by_unit(np.where(goes_alone, ids.size + np.arange(members.size), unit_of), goes)
        first = chosen[np.searchsorted(place, np.arange(place[-1] + 1))]
        reasons = np.where(
            goes_alone[first] | is_unmatched[unit_of[first]], EvictionCode.UNMATCHED, EvictionCode.TOO_SMALL
        )
        return Evicted(
            rows=self._partition.table.index[members[chosen]],
            sizes=np.bincount(place),
            reasons=reasons.astype(np.uint8),
            is_group=~goes_alone[first] & grouping.is_group(ids[unit_of[first]]),
        )

    @staticmethod
    def _unit_by_unit(units: Indexes, is_chosen: NDArray[np.bool_]) -> tuple[Indexes, Indexes]:
        """Return the places of what is chosen, unit by unit in the order of their first ones, and the unit of each.

        Units are numbered from 0 in that order.
        """
        chosen = np.flatnonzero(is_chosen)
        _, first, units = np.unique(units[chosen], return_index=True, return_inverse=True)
        number = np.empty_like(first)
        number[np.argsort(first)] = np.arange(first.size)
        order = np.argsort(number[units], kind="stable")
        return chosen[order], number[units][order]
