"""Groups and orders: which rows make up a group, which groups can be delivered, and the order of `order_by`.

Nothing is kept between claims. The first rows in an order are found by selection, all of them by a sort. Texts are
compared a few thousand at once, since numpy and Python hold the interpreter lock meanwhile, unlike for numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Blocks
from tq_service.state.groups import NO_GROUP
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, Order
from tq_service.state.table import DEAD_LETTERED, is_open

_SLICE: Final = 1 << 14  # rows
_FEW: Final = 1 << 9
_TEXTS_AT_ONCE: Final = 1 << 12  # sorted in some milliseconds


def run_lengths(indexes: Indexes) -> tuple[Indexes, Indexes]:
    """Return for each of ascending indexes `(n,)` its place in its run, from 0, and how many indexes the run has."""
    places = np.arange(indexes.size)
    is_first = np.ones(indexes.size, np.bool_)
    is_first[1:] = np.diff(indexes) != 1
    starts = places[is_first]
    run_of = np.cumsum(is_first) - 1
    lengths = np.diff(starts, append=indexes.size)
    return places - starts[run_of], lengths[run_of]


def groups_in_runs(indexes: Indexes, size: int) -> Indexes:
    """Return for each of ascending indexes `(n,)` the first index of its group, -1 where it is in none.

    Groups are of `size` indexes that follow each other, each as early as can be: those of 1, 2, 3, 5, 6 with size 2
    are 1, 2 and 5, 6. What a group is does not change with indexes that come after it.
    """
    place, length = run_lengths(indexes)
    start = place - place % size
    return np.where(start + size <= length, indexes - place % size, -1)


class Grouping:
    """The groups of a partition, as one sampler asks for them.

    They are the named ones where groups were ever named; a row without a name is a group of its own. Else blocks of
    `block_size` consecutive indexes stand in for them, or, without a block size, each row is a group.

    A group has lost its members that failed, were cleared, or were dead-lettered by the task. The rest of it is
    delivered if `take_incomplete`, and never otherwise.
    """

    blocks: ClassVar[Blocks] = "aligned"

    def __init__(
        self, partition: Partition, task: TaskLedger, block_size: int | None, *, take_incomplete: bool = False
    ) -> None:
        self.block_size = block_size
        self._partition = partition
        self._groups = partition.groups
        self._task = task
        self._take_incomplete = take_incomplete

    @property
    def kept(self) -> int | None:
        """How groups are kept whole, see `TaskFacts.kept_groups`."""
        return None if self._take_incomplete else self.block_size or 0

    def check(self) -> None:
        """Refuse blocks that cut through what was put together."""
        size, step = self.block_size, self._partition.insert_size_gcd
        if size is not None and not self._groups.in_use and step % size:
            raise InvalidArgumentError(
                f"n_samples_per_prompt is {size}, but samples were put in steps of {step}: blocks of consecutive "
                f"indexes are not groups; put multiples of {size}, name their groups, or have them begin anywhere "
                f"with blocks 'anywhere'",
                field="sampler_config",
                metadata={"option": "n_samples_per_prompt"},
            )

    def ids(self, positions: Indexes) -> Indexes:
        """Return the id of the group of each row."""
        if self._groups.in_use:
            slots = self._groups.of_rows[positions]
            return np.where(slots == NO_GROUP, -2 - positions, slots)
        return positions if self.block_size is None else self._partition.table.index[positions] // self.block_size

    def members(self, positions: Indexes) -> Indexes:
        """Return the positions of rows and of all others of their groups."""
        if self._groups.in_use:
            # A copy, since rows of new groups may be added while another thread looks.
            slots = self._groups.of_rows[: self._partition.table.count].copy()
            is_met = np.zeros(int(slots.max(initial=NO_GROUP)) + 2, np.bool_)  # the last is of rows without a group
            is_met[slots[positions]] = True
            is_met[NO_GROUP] = False
            return np.concatenate([positions[slots[positions] == NO_GROUP], np.flatnonzero(is_met[slots])])
        if self.block_size is None:
            return positions
        found = self._find_blocks(np.unique(self.ids(positions)), self.block_size)
        return found[found >= 0]

    def is_group(self, ids: Indexes) -> NDArray[np.bool_]:
        """Return which of some ids are those of groups, as opposed to samples without one."""
        if self._groups.in_use:
            return ids >= 0
        return np.full(ids.size, self.block_size is not None)

    def members_of(self, ids: Indexes) -> Indexes:
        """Return the positions of all rows of groups that are given by their ids, in order."""
        if self._groups.in_use:
            named = self._groups.members_of(ids[ids >= 0], self._partition.table)
            return np.sort(np.concatenate([-2 - ids[ids < 0], named]))
        if self.block_size is None:
            return ids
        found = self._find_blocks(ids, self.block_size)
        return np.sort(found[found >= 0])

    def whole(self, ready: Indexes, *, no_more: bool) -> tuple[Indexes, Indexes]:
        """Return the rows of groups that can be delivered, and the sizes of these.

        Args:
            ready: positions of rows in the order of the batch; groups come in the order of their first members.
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
        """Return for each row whether its group can never be delivered, given that no new rows come."""
        ids, group_of = np.unique(self.ids(positions), return_inverse=True)
        needed = self.needed(ids, no_more=True)
        return ((needed < 0) | (self.left(ids) < needed))[group_of]

    def needed(self, ids: Indexes, *, no_more: bool) -> Indexes:
        """Return how many members of each group must be ready for it to be delivered, -1 where it is not complete.

        Args:
            ids: of groups.
            no_more: whether no new rows come, which completes groups of unknown size.
        """
        needed = self.left(ids) if self._take_incomplete else self._sizes(ids)
        return np.where(self.is_complete(ids, no_more=no_more), needed, -1) if self._groups.in_use else needed

    def is_complete(self, ids: Indexes, *, no_more: bool) -> NDArray[np.bool_]:
        """Return for each group whether it gets no further members; for `no_more` see `needed`."""
        if self._groups.in_use:
            return self._groups.is_complete(np.maximum(ids, 0), self.block_size, no_more=no_more) | (ids < 0)
        if self.block_size is None or no_more:
            return np.ones(ids.size, np.bool_)
        return (ids + 1) * self.block_size <= self._partition.inserted_count

    def _sizes(self, ids: Indexes) -> Indexes:
        """Return how many members groups ever had."""
        if self._groups.in_use:
            return np.where(ids < 0, 1, self._groups.members[np.maximum(ids, 0)])
        return np.full(ids.size, self.block_size or 1)

    def left(self, ids: Indexes) -> Indexes:
        """Return how many members groups have not lost."""
        if self._groups.in_use:
            slots = np.maximum(ids, 0)
            lost = self._groups.failed[slots] + self._groups.cleared[slots] + self._dead_lettered_counts(slots)
            return np.where(ids < 0, 1, self._groups.members[slots] - lost)
        if self.block_size is None:
            return np.ones(ids.size, np.int64)
        positions = self._find_blocks(ids, self.block_size)
        is_left = is_open(self._partition.state[positions]) & (self._task.claim[positions] != DEAD_LETTERED)
        left: Indexes = (is_left & (positions >= 0)).sum(axis=1)
        return left

    def _find_blocks(self, blocks: Indexes, size: int) -> Indexes:
        """Return the positions `(n, size)` of the rows of blocks, -1 where there is none."""
        indexes = blocks[:, None] * size + np.arange(size)
        return self._partition.table.find(indexes.ravel()).reshape(indexes.shape)

    def _dead_lettered_counts(self, slots: Indexes) -> Indexes:
        """Return how many members of named groups are dead-lettered; those that failed since are counted as failed."""
        positions = self._task.dead_lettered()
        positions = positions[is_open(self._partition.state[positions])]
        lost = np.sort(self._groups.of_rows[positions])
        return np.searchsorted(lost, slots, "right") - np.searchsorted(lost, slots)


class Runs(Grouping):
    """Groups of `block_size` rows whose indexes follow each other, anywhere among the rows that are ready.

    A row has no group of its own: which one it is in depends on the rows beside it that are ready as well.
    """

    blocks: ClassVar[Blocks] = "anywhere"
    kept: ClassVar[int | None] = None  # which rows are one group is open until they are delivered

    def __init__(self, partition: Partition, task: TaskLedger, block_size: int) -> None:
        super().__init__(partition, task, block_size)
        self._size = block_size

    def check(self) -> None:
        """Accept any partition."""

    def ids(self, positions: Indexes) -> Indexes:
        """Return the id of the group that each row has among these rows."""
        by_index = np.argsort(positions)
        ids = np.empty_like(positions)
        ids[by_index] = groups_in_runs(self._partition.table.index[positions[by_index]], self._size)
        return np.where(ids < 0, -2 - positions, ids)

    def members(self, positions: Indexes) -> Indexes:
        """Return the positions of all rows, any of which may be in one group with another."""
        return np.arange(self._partition.table.count)

    def needed(self, ids: Indexes, *, no_more: bool) -> Indexes:
        """Return how many members each group has, -1 for a row without one."""
        return np.where(ids < 0, -1, self._size)

    def is_dead(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return for each row whether too few rows are left beside it, given that no new rows come."""
        count = self._partition.table.count
        left = self._task.is_left(slice(0, count))
        lengths = np.zeros(count, np.int64)
        lengths[left] = run_lengths(self._partition.table.index[:count][left])[1]
        return lengths[positions] < self._size


def grouping_of(
    partition: Partition, task: TaskLedger, block_size: int | None, blocks: Blocks, *, take_incomplete: bool = False
) -> Grouping:
    """Return the groups that a sampler asks for; those that have names are never anything else."""
    if blocks == "anywhere" and block_size is not None and not partition.groups.in_use:
        return Runs(partition, task, block_size)
    return Grouping(partition, task, block_size, take_incomplete=take_incomplete)


# Returns the values of a column at some positions, and which of these have one.
ValuesOf: TypeAlias = Callable[[str, Indexes], tuple[NDArray[Any], NDArray[np.bool_]]]


def first_in_order(values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes, count: int | None) -> Indexes:
    """Return the first `count` of some rows in an order, all of them if `count` is None.

    Rows without a value come last, and rows that are equal in all columns in the order of their indexes.

    Args:
        values_of: returns what is compared.
        orders: the columns, the most significant first.
        positions: the rows, in the order of their indexes.
        count: how many are wanted.
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
    """Return some rows in an order."""
    positions = np.sort(positions)
    for order in reversed(orders):  # each sort leaves rows that are equal in their order
        values, present = values_of(order.column, positions)
        found = positions[present]
        positions = np.concatenate([found[_order_of(values[present], order.descending)], positions[~present]])
    return positions


def _may_precede(
    values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes, last: Indexes
) -> NDArray[np.bool_]:
    """Return which rows may come before one with a lower index, by the first column alone; of NaN it cannot tell."""
    column, is_descending = orders[0].column, orders[0].descending
    bound, is_bounded = values_of(column, last)
    values, present = values_of(column, positions)
    if not is_bounded.all():
        return np.ones(positions.size, np.bool_)
    if len(orders) == 1:  # equal ones come after it
        is_after = operator.le if is_descending else operator.ge
    else:
        is_after = operator.lt if is_descending else operator.gt
    may_precede = present.copy()
    may_precede[present] = ~is_after(values[present], bound)
    return may_precede


def _order_of(values: NDArray[Any], descending: bool) -> Indexes:
    """Return the positions that values have in order, equal ones as they come; NaN is the largest."""
    if descending:
        backwards: Indexes = values.size - 1 - _order_of(values[::-1], descending=False)
        return backwards[::-1]
    if values.dtype.kind != "O":
        return np.argsort(values, kind="stable")
    buckets = [np.arange(values.size)]
    if values.size > _TEXTS_AT_ONCE:  # spread over buckets, those of one before those of the next
        splitters = np.array(sorted(values[:: _TEXTS_AT_ONCE // 8].tolist()), np.object_)
        slices = (values[start : start + _TEXTS_AT_ONCE] for start in range(0, values.size, _TEXTS_AT_ONCE))
        bucket_of = np.concatenate([np.searchsorted(splitters, some) for some in slices])
        by_bucket = np.argsort(bucket_of, kind="stable")
        buckets = np.split(by_bucket, np.flatnonzero(np.diff(bucket_of[by_bucket])) + 1)
    texts = values.tolist()  # a list is sorted faster than an array, above all a sorted one
    return np.concatenate([np.array(sorted(each.tolist(), key=texts.__getitem__), np.int64) for each in buckets])
