"""Groups of samples, such as the responses to one prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import GroupNotFoundError, InvalidArgumentError, PreconditionError, nearest
from tq_service.state.name_index import NameIndex
from tq_service.state.plan import Indexes
from tq_service.state.table import Column, RowTable, SlotTable, as_slice, distinct

NO_GROUP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroups:
    """Groups that take new members, as the table is now.

    Attributes:
        names: each group once.
        codes: for each new member `(n,)` the position of its group in `names`, NO_GROUP for none.
        counts: how many members each group gets `(groups,)`.
        slots: of the groups `(groups,)`, negative where there is none of the name yet.
    """

    names: Sequence[str]
    codes: Indexes
    counts: Indexes
    slots: Indexes


class GroupTable:
    """Counts the members of each group by what became of them.

    A group is a slot in parallel columns; slots of groups whose last member was cleared are used again.

    - complete: the declared size is reached, or the group is closed;
    - broken: a member failed or was cleared;
    - dead: it can no longer be whole.
    """

    __slots__ = (
        "_index", "_members", "_names",
        "cleared", "closed", "declared", "failed", "first", "in_use", "last", "members", "slot_of", "slots",
    )  # fmt: skip

    def __init__(self, table: RowTable) -> None:
        self.slots = SlotTable("name")
        self.slot_of = NameIndex()
        self.in_use = False  # from the first named group on, also when all have been cleared
        self._members: Column = table.column("group", np.int64, NO_GROUP)
        self._names = self.slots.occupants
        self.declared = self.slots.column("declared", np.int64, 0)
        self.members = self.slots.column("members", np.int64, 0)
        self.failed = self.slots.column("failed", np.int64, 0)
        self.cleared = self.slots.column("cleared", np.int64, 0)
        self.closed = self.slots.column("closed", np.bool_, False)
        self.first = self.slots.column("first", np.int64, -1)  # global indexes between which all members are
        self.last = self.slots.column("last", np.int64, -1)
        self._index = table.index

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def of_rows(self) -> NDArray[np.int64]:
        """The group slot of each row of the table, NO_GROUP for one without."""
        data: NDArray[np.int64] = self._members.data
        return data

    def names_of(self, positions: Indexes) -> list[str | None]:
        """Return the names of the groups of rows."""
        slots = self._members[positions]
        names = self._names[slots]
        names[slots < 0] = None
        listed: list[str | None] = names.tolist()
        return listed

    def check(self, groups: Sequence[str], group_size: int) -> CheckedGroups:
        """Return what new members of groups, "" for none, mean; raises if they do not fit, and writes nothing."""
        if group_size < 0:
            raise InvalidArgumentError(f"group_size is {group_size}; give a positive number", field="group_size")
        names = list(filter(None, dict.fromkeys(groups)))
        code_of = dict(zip(names, itertools.count()))
        codes = np.fromiter(map(code_of.get, groups, itertools.repeat(NO_GROUP)), np.int64, len(groups))
        counts = np.bincount(codes + 1, minlength=len(names) + 1)[1:]
        slots = self.slot_of.find(names)
        if group_size:
            too_many = np.flatnonzero((slots < 0) & (counts > group_size))
            if too_many.size:
                raise _too_many(names[too_many[0]], 0, group_size, int(counts[too_many[0]]))
        for code in np.flatnonzero(slots >= 0).tolist():
            self._check_known(names[code], int(slots[code]), group_size, int(counts[code]))
        return CheckedGroups(names=names, codes=codes, counts=counts, slots=slots)

    def _check_known(self, name: str, slot: int, group_size: int, count: int) -> None:
        size = int(self.declared[slot])
        if size and group_size and size != group_size:
            raise InvalidArgumentError(
                f"group {name!r} was declared with group_size {size}, got {group_size}; give the same size with "
                f"every put of the group",
                field="group_size",
            )
        if self.closed[slot]:
            raise PreconditionError(
                f"group {name!r} is closed; put further samples into another group", metadata={"group": name}
            )
        limit, have = size or group_size, int(self.members[slot])
        if limit and have + count > limit:
            raise _too_many(name, have, limit, count)

    def add(self, checked: CheckedGroups, group_size: int, rows: slice) -> None:
        """Enter new rows as members of groups that were checked."""
        slots, is_new = checked.slots, checked.slots < 0
        if is_new.any():
            names = list(itertools.compress(checked.names, is_new))
            taken = slots[is_new] = np.array(self.slots.take(len(names)))
            self._names.write(as_slice(taken), names)
            self.slot_of.add(names, taken)
            self.in_use = True
        of_rows = np.append(slots, NO_GROUP)[checked.codes]  # NO_GROUP is the last position, too
        self._members.write(rows, of_rows)
        slots_of_rows, indexes = of_rows[of_rows >= 0], self._index.data[rows][of_rows >= 0]
        fresh = self.first[slots_of_rows] < 0
        self.first.write(slots_of_rows[fresh][::-1], indexes[fresh][::-1])  # of several rows the first is written last
        self.last.write(slots_of_rows, indexes)
        self.members.write(slots, self.members[slots] + checked.counts)
        if group_size:
            self.declared.write(slots, group_size)

    def count(self, counter: Column, rows: slice | Indexes, by: int) -> None:
        """Add to one of the counters for the groups of rows."""
        slots = self._members[rows]
        counter.add(slots[slots >= 0], by)

    def is_complete(self, slots: NDArray[np.int64], default_size: int | None, *, no_more: bool) -> NDArray[np.bool_]:
        """Return for each group whether it has all its members.

        Args:
            slots: the groups.
            default_size: number of members of groups that declared none.
            no_more: whether no new rows come, which completes groups of unknown size.
        """
        size = np.where(self.declared[slots] > 0, self.declared[slots], default_size or 0)
        full = (size > 0) & (self.members[slots] >= size)
        unsized = (self.declared[slots] == 0) & no_more
        complete: NDArray[np.bool_] = full | unsized | self.closed[slots]
        return complete

    def members_of(self, slots: Indexes, table: RowTable) -> Indexes:
        """Return the positions of the members of groups; it looks at the rows between their first and their last."""
        if not slots.size:
            return np.zeros(0, np.int64)
        start = table.position_from(int(self.first[slots].min()))
        end = table.position_from(int(self.last[slots].max()) + 1)
        is_wanted = np.zeros(self.slots.count + 1, np.bool_)  # the last is of rows without a group
        is_wanted[slots] = True
        members: Indexes = start + np.flatnonzero(is_wanted[self.of_rows[start:end]])
        return members

    def slots_of(self, names: Sequence[str]) -> Indexes:
        """Return the slots of groups that must be there."""
        slots = self.slot_of.find(names)
        if slots.size and slots.min() < 0:
            missing = names[int(np.argmin(slots))]
            raise GroupNotFoundError(
                f"no group {missing!r} here; {nearest(missing, self.slot_of)}", metadata={"group": missing}
            )
        return slots

    def close(self, slots: Indexes) -> None:
        """Take no further members."""
        self.closed.write(slots, True)

    def forget_members(self, positions: Indexes) -> None:
        """Count rows as cleared, and free the slots of groups whose members all are."""
        if not self.in_use:
            return
        self.count(self.cleared, positions, 1)
        slots = self._members[positions]
        slots = distinct(slots[slots >= 0], self.slots.count)
        empty = slots[(self.cleared[slots] >= self.members[slots]) & (self._names[slots] != None)]  # noqa: E711  (of each)
        self.slot_of.remove(self._names[empty].tolist())
        self.slots.give_up(empty)

    def rebuild(self, *, in_use: bool) -> None:
        """Find out what follows from restored columns."""
        self.in_use = in_use
        self.slots.rebuild()
        names = self._names[: self.slots.count]
        slots = np.flatnonzero(names != None)  # noqa: E711  (of each)
        self.slot_of.add(names[slots].tolist(), slots)


def _too_many(name: str, have: int, limit: int, count: int) -> PreconditionError:
    return PreconditionError(
        f"group {name!r} has {have} of {limit} members, got {count} more; declare a larger group_size or use another "
        f"group",
        metadata={"group": name},
    )
