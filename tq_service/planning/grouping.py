"""Group members, groups that can be delivered, and the row order defined by `order_by`.

No state is kept between claims. To find the first rows in an order, a selection algorithm is used instead of sorting
all rows. Strings are compared a few thousand at a time, because comparing strings (unlike numbers) holds the
interpreter lock.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import BatchUnit, Blocks
from tq_service.state.groups import NO_GROUP
from tq_service.state.ledger import KEPT_ROLLOUTS, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, Order
from tq_service.state.table import DEAD_LETTERED, is_open

_SLICE: Final = 1 << 14  # rows per comparison
_FEW: Final = 1 << 9
_TEXTS_AT_ONCE: Final = 1 << 12  # strings per sort; a sort takes a few milliseconds


def run_lengths(indexes: Indexes) -> tuple[Indexes, Indexes]:
    """Return each index's place in its run of consecutive indexes, and the length of that run.

    Both arrays have shape `(n,)`. Places start at 0.
    """
    places = np.arange(indexes.size)
    is_first = np.ones(indexes.size, np.bool_)
    is_first[1:] = np.diff(indexes) != 1
    starts = places[is_first]
    run_of = np.cumsum(is_first) - 1
    lengths = np.diff(starts, append=indexes.size)
    return places - starts[run_of], lengths[run_of]


def groups_in_runs(indexes: Indexes, size: int) -> Indexes:
    """For each index, return the first index of its group, or -1 if the index belongs to no group.

    The result has shape `(n,)`. Indexes must be ascending. A group consists of `size` consecutive indexes and starts as
    early as possible. For example, the indexes 1, 2, 3, 5 and 6 form the groups (1, 2) and (5, 6) if the size is 2.
    Adding larger indexes never changes a group.
    """
    place, length = run_lengths(indexes)
    start = place - place % size
    return np.where(start + size <= length, indexes - place % size, -1)


class Grouping:
    """The groups of a partition, as requested by a sampler.

    If any group or rollout in the partition has a name, the groups are the named groups, and each row without a name
    forms its own group. Otherwise, the groups are blocks of `block_size` consecutive indexes, or single rows if no
    block size is given.

    If the unit is "rollout", the groups are the rollouts, and each row without a rollout is its own group. Blocks are
    then not used.

    Members that have failed, been cleared, or been dead-lettered by the task count as lost. If a group has lost
    members, the remaining members are delivered only if `take_incomplete` is set.
    """

    blocks: ClassVar[Blocks] = "aligned"

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        block_size: int | None,
        *,
        take_incomplete: bool = False,
        unit: BatchUnit = "group",
    ) -> None:
        self.unit: BatchUnit = unit
        self.block_size = None if unit == "rollout" else block_size
        self._partition = partition
        self._groups = partition.groups
        self._task = task
        self._take_incomplete = take_incomplete

    @property
    def kept(self) -> int | None:
        """How claims must keep groups together, as a value of `TaskFacts.kept_groups`."""
        if self._take_incomplete:
            return None
        return self.code

    @property
    def code(self) -> int:
        """The kind of groups: `KEPT_ROLLOUTS` for rollouts, 0 for named groups, or the block size."""
        return KEPT_ROLLOUTS if self.unit == "rollout" else self.block_size or 0

    @classmethod
    def of_code(cls, partition: Partition, task: TaskLedger, code: int) -> Grouping:
        """Create the grouping whose `code` property has the given value."""
        return cls(partition, task, max(code, 0) or None, unit="rollout" if code == KEPT_ROLLOUTS else "group")

    def check(self) -> None:
        """Raise InvalidArgumentError if blocks would separate samples from the same put."""
        size, step = self.block_size, self._partition.insert_size_gcd
        if size is not None and not self._groups.in_use and step % size:
            raise InvalidArgumentError(
                f"n_samples_per_prompt is {size}, but samples were put in multiples of {step}, so blocks of "
                f"consecutive indexes do not form groups. Put multiples of {size}, name the groups, or set blocks to "
                f"'anywhere'.",
                field="sampler_config",
                metadata={"option": "n_samples_per_prompt"},
            )

    def ids(self, positions: Indexes) -> Indexes:
        """Return the group id of each row."""
        if self._groups.in_use:
            slots = self._groups.of_unit(self.unit, positions)
            return np.where(slots == NO_GROUP, -2 - positions, slots)
        return positions if self.block_size is None else self._partition.table.index[positions] // self.block_size

    def members(self, positions: Indexes) -> Indexes:
        """Return the positions of the given rows and of all other members of their groups."""
        if self._groups.in_use:
            # Copy the slots, because rows with new groups may be added while another thread reads them.
            slots = self._groups.of_unit(self.unit, slice(0, self._partition.table.count)).copy()
            is_met = np.zeros(
                int(slots.max(initial=NO_GROUP)) + 2, np.bool_
            )  # the last element is for rows without a group
            is_met[slots[positions]] = True
            is_met[NO_GROUP] = False
            return np.concatenate([positions[slots[positions] == NO_GROUP], np.flatnonzero(is_met[slots])])
        if self.block_size is None:
            return positions
        found = self._find_blocks(np.unique(self.ids(positions)), self.block_size)
        return found[found >= 0]

    def is_group(self, ids: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the ids that identify groups rather than single rows."""
        if self._groups.in_use:
            return ids >= 0
        return np.full(ids.size, self.block_size is not None)

    def members_of(self, ids: Indexes) -> Indexes:
        """Return the positions of all rows in the groups with the given ids, in ascending order."""
        if self._groups.in_use:
            named = self._groups.members_of(ids[ids >= 0], self._partition.table, self.unit)
            return np.sort(np.concatenate([-2 - ids[ids < 0], named]))
        if self.block_size is None:
            return ids
        found = self._find_blocks(ids, self.block_size)
        return np.sort(found[found >= 0])

    def whole(self, ready: Indexes, *, no_more: bool) -> tuple[Indexes, Indexes]:
        """Return the ready rows of all deliverable groups, and the sizes of the groups.

        Args:
            ready: positions of ready rows, in batch order. Groups are ordered by their first members.
            no_more: see `needed`.
        """
        ids, first, group_of, counts = np.unique(
            self.ids(ready), return_index=True, return_inverse=True, return_counts=True
        )
        is_whole = counts == self.needed(ids, no_more=no_more)
        by_first = np.argsort(first)
        rows = np.flatnonzero(is_whole[group_of])
        order = np.argsort(first[group_of[rows]], kind="stable")
        return ready[rows[order]], counts[by_first[is_whole[by_first]]]

    def is_dead(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows whose groups cannot be delivered unless new rows are inserted."""
        ids, group_of = np.unique(self.ids(positions), return_inverse=True)
        needed = self.needed(ids, no_more=True)
        return ((needed < 0) | (self.left(ids) < needed))[group_of]

    def needed(self, ids: Indexes, *, no_more: bool) -> Indexes:
        """For each group, return the number of ready members needed for delivery, or -1 if the group is incomplete.

        Args:
            ids: group ids.
            no_more: True if no more rows can be inserted. In that case, groups of unknown size count as complete.
        """
        needed = self.left(ids) if self._take_incomplete else self._sizes(ids)
        return np.where(self.is_complete(ids, no_more=no_more), needed, -1) if self._groups.in_use else needed

    def is_complete(self, ids: Indexes, *, no_more: bool) -> NDArray[np.bool_]:
        """Return a mask of the groups that cannot receive more members. For `no_more`, see `needed`."""
        if self._groups.in_use:
            return self._groups.is_complete(np.maximum(ids, 0), self.block_size, no_more=no_more) | (ids < 0)
        if self.block_size is None or no_more:
            return np.ones(ids.size, np.bool_)
        return (ids + 1) * self.block_size <= self._partition.inserted_count

    def _sizes(self, ids: Indexes) -> Indexes:
        """Return the number of members of each group, including lost members."""
        if self._groups.in_use:
            return np.where(ids < 0, 1, self._groups.members[np.maximum(ids, 0)])
        return np.full(ids.size, self.block_size or 1)

    def left(self, ids: Indexes) -> Indexes:
        """For each group, return the number of members that are not lost."""
        if self._groups.in_use:
            slots = np.maximum(ids, 0)
            lost = (
                self._groups.failed[slots] + self._groups.cleared[slots] + self._dead_lettered_counts(slots, self.unit)
            )
            return np.where(ids < 0, 1, self._groups.members[slots] - lost)
        if self.block_size is None:
            return np.ones(ids.size, np.int64)
        positions = self._find_blocks(ids, self.block_size)
        is_left = is_open(self._partition.state[positions]) & (self._task.claim[positions] != DEAD_LETTERED)
        left: Indexes = (is_left & (positions >= 0)).sum(axis=1)
        return left

    def counted_as(self, positions: Indexes) -> Indexes:
        """Return the id of each row's unit within the group, which is the row's rollout or the row itself.

        If the unit of the grouping is "rollout", each row is its own unit.
        """
        if self.unit == "rollout" or not self._groups.has_rollouts:
            return positions
        rollouts = self._groups.of_unit("rollout", positions)
        return np.where(rollouts < 0, -2 - positions, rollouts)

    def left_units(self, ids: Indexes) -> Indexes:
        """For each group, return the number of units (see `counted_as`) that are not lost.

        A rollout is lost if any of its samples is lost, unless the remaining samples can still be delivered.
        """
        left = self.left(ids)
        if self.unit == "rollout" or not self._groups.has_rollouts:
            return left
        rollouts = self._groups.slots_of_unit("rollout")
        lost = self._lost_of_rollouts(rollouts)
        more = self._groups.members[rollouts] - lost
        more -= (more > 0) & (self._take_incomplete | (lost == 0))
        surplus = np.zeros(self._groups.slots.count, np.int64)
        np.add.at(surplus, self._groups.parent[rollouts], more)
        return left - np.where(ids < 0, 0, surplus[np.maximum(ids, 0)])

    def in_lost_rollout(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that `left_units` excludes because another row of their rollout is lost."""
        if self._take_incomplete or self.unit == "rollout" or not self._groups.has_rollouts:
            return np.zeros(positions.size, np.bool_)
        rollouts = self._groups.of_unit("rollout", positions)
        return (rollouts >= 0) & (self._lost_of_rollouts(np.maximum(rollouts, 0)) > 0)

    def _lost_of_rollouts(self, slots: Indexes) -> Indexes:
        """Return the number of lost members of each rollout."""
        lost: Indexes = self._groups.failed[slots] + self._groups.cleared[slots]
        return lost + self._dead_lettered_counts(slots, "rollout")

    def _find_blocks(self, blocks: Indexes, size: int) -> Indexes:
        """Return the positions of the rows in each block, as an `(n, size)` array with -1 for missing rows."""
        indexes = blocks[:, None] * size + np.arange(size)
        return self._partition.table.find(indexes.ravel()).reshape(indexes.shape)

    def _dead_lettered_counts(self, slots: Indexes, unit: BatchUnit) -> Indexes:
        """Return the number of dead-lettered members of each named group. Members that failed later are not counted."""
        positions = self._task.dead_lettered()
        positions = positions[is_open(self._partition.state[positions])]
        lost = np.sort(self._groups.of_unit(unit, positions))
        return np.searchsorted(lost, slots, "right") - np.searchsorted(lost, slots)


class Runs(Grouping):
    """Groups of `block_size` ready rows with consecutive indexes, which may start at any index.

    A row has no fixed group, because its group depends on which neighboring rows are ready.
    """

    blocks: ClassVar[Blocks] = "anywhere"
    kept: ClassVar[int | None] = None  # groups are formed only when they are delivered

    def __init__(self, partition: Partition, task: TaskLedger, block_size: int) -> None:
        super().__init__(partition, task, block_size)
        self._size = block_size

    def check(self) -> None:
        """Accept every partition, because groups can start at any index."""

    def ids(self, positions: Indexes) -> Indexes:
        """Return the group id of each row. Groups are formed from the given rows."""
        by_index = np.argsort(positions)
        ids = np.empty_like(positions)
        ids[by_index] = groups_in_runs(self._partition.table.index[positions[by_index]], self._size)
        return np.where(ids < 0, -2 - positions, ids)

    def members(self, positions: Indexes) -> Indexes:
        """Return the positions of all rows, because any two rows may belong to the same group."""
        return np.arange(self._partition.table.count)

    def needed(self, ids: Indexes, *, no_more: bool) -> Indexes:
        """Return the size of each group, or -1 for a row that belongs to no group."""
        return np.where(ids < 0, -1, self._size)

    def is_dead(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that cannot belong to a group unless new rows are inserted."""
        count = self._partition.table.count
        left = self._task.is_left(slice(0, count))
        lengths = np.zeros(count, np.int64)
        lengths[left] = run_lengths(self._partition.table.index[:count][left])[1]
        return lengths[positions] < self._size


def grouping_of(
    partition: Partition,
    task: TaskLedger,
    block_size: int | None,
    blocks: Blocks,
    *,
    take_incomplete: bool = False,
    unit: BatchUnit = "group",
) -> Grouping:
    """Return the groups requested by a sampler. Named groups take precedence over blocks."""
    if blocks == "anywhere" and block_size is not None and not partition.groups.in_use and unit != "rollout":
        return Runs(partition, task, block_size)
    return Grouping(partition, task, block_size, take_incomplete=take_incomplete, unit=unit)


# A function that returns a column's values at the given positions, and a mask of the positions that have a value.
ValuesOf: TypeAlias = Callable[[str, Indexes], tuple[NDArray[Any], NDArray[np.bool_]]]


def first_in_order(values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes, count: int | None) -> Indexes:
    """Sort the given rows by the columns in `orders`, and return the first `count` rows, or all if `count` is None.

    Rows without a value come last. Rows whose values are equal in all columns are ordered by index.

    Args:
        values_of: function that returns the column values to compare.
        orders: columns that determine the order, most significant first.
        positions: positions of the rows, in ascending order.
        count: maximum number of rows to return.
    """
    if count is None:
        return in_order(values_of, orders, positions)
    best, last = positions[:0], None
    start, end = 0, 2 * max(_FEW, count)
    while start < positions.size:
        some = positions[start:end]
        best = np.concatenate([best, some if last is None else some[_may_precede(values_of, orders, some, last)]])
        if best.size > count + max(_FEW, count):
            best = in_order(values_of, orders, best)[:count]
            last = best[-1:]
        start, end = end, end + _SLICE
    return in_order(values_of, orders, best)[:count]


def in_order(values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes) -> Indexes:
    """Sort rows by columns."""
    positions = np.sort(positions)
    for order in reversed(orders):  # each sort is stable, so the first column is the most significant
        values, present = values_of(order.column, positions)
        found = positions[present]
        positions = np.concatenate([found[_order_of(values[present], order.descending)], positions[~present]])
    return positions


def _may_precede(
    values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes, last: Indexes
) -> NDArray[np.bool_]:
    """Return a mask of the rows that might sort before the row `last`. All of the rows have higher indexes than `last`.

    Only the first column is compared. Where this comparison is inconclusive, for example because of NaN, the mask is
    True.
    """
    column, is_descending = orders[0].column, orders[0].descending
    bound, is_bounded = values_of(column, last)
    values, present = values_of(column, positions)
    if not is_bounded.all():
        return np.ones(positions.size, np.bool_)
    if len(orders) == 1:  # rows equal to `last` follow it
        is_after = operator.le if is_descending else operator.ge
    else:
        is_after = operator.lt if is_descending else operator.gt
    may_precede = present.copy()
    may_precede[present] = ~is_after(values[present], bound)
    return may_precede


def _order_of(values: NDArray[Any], descending: bool) -> Indexes:
    """Return the indexes that sort the values, like a stable argsort. NaN counts as the largest value."""
    if descending:
        backwards: Indexes = values.size - 1 - _order_of(values[::-1], descending=False)
        return backwards[::-1]
    if values.dtype.kind != "O":
        return np.argsort(values, kind="stable")
    buckets = [np.arange(values.size)]
    if values.size > _TEXTS_AT_ONCE:  # divide the values into ordered buckets
        splitters = np.array(sorted(values[:: _TEXTS_AT_ONCE // 8].tolist()), np.object_)
        slices = (values[start : start + _TEXTS_AT_ONCE] for start in range(0, values.size, _TEXTS_AT_ONCE))
        bucket_of = np.concatenate([np.searchsorted(splitters, some) for some in slices])
        by_bucket = np.argsort(bucket_of, kind="stable")
        buckets = np.split(by_bucket, np.flatnonzero(np.diff(bucket_of[by_bucket])) + 1)
    texts = values.tolist()  # lists sort faster than arrays, especially if they are already sorted
    return np.concatenate([np.array(sorted(each.tolist(), key=texts.__getitem__), np.int64) for each in buckets])
