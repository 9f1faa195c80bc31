"""Groups of samples, such as the responses to one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.column import Column
from tq_service.domain.plan import Indexes
from tq_service.domain.rows import RowTable
from tq_service.errors import GroupNotFoundError, InvalidArgumentError, PreconditionError, nearest

NO_GROUP = -1
_FIRST_CAPACITY = 64


class GroupTable:
    """Counts the members of each group by what became of them.

    A group is a slot in parallel columns; slots of groups whose last member was cleared are used again.

    - complete: the declared size is reached, or the group is closed;
    - broken: a member failed or was cleared;
    - dead: it can no longer be whole.
    """

    __slots__ = (
        "_capacity", "_free", "_members", "_names", "_slot_count", "_slots",
        "cleared", "closed", "declared", "failed", "held", "in_use", "members",
    )  # fmt: skip

    def __init__(self, table: RowTable) -> None:
        self._slots: dict[str, int] = {}
        self._slot_count = 0  # slots that were ever in use
        self._capacity = _FIRST_CAPACITY
        self._free: list[int] = []
        self.in_use = False  # from the first named group on, also when all have been cleared
        self._members: Column = table.add_column(np.int64, NO_GROUP)
        self._names = Column(np.object_, None, self._capacity)
        self.declared = Column(np.int64, 0, self._capacity)
        self.members = Column(np.int64, 0, self._capacity)
        self.failed = Column(np.int64, 0, self._capacity)
        self.cleared = Column(np.int64, 0, self._capacity)
        self.held = Column(np.int64, 0, self._capacity)
        self.closed = Column(np.bool_, False, self._capacity)

    def __len__(self) -> int:
        return len(self._slots)

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

    def check(self, names: Sequence[str], group_size: int) -> None:
        """Refuse new members that do not fit, before anything is written."""
        if group_size < 0:
            raise InvalidArgumentError(f"group_size is {group_size}; give a positive number", field="group_size")
        counts = Counter(names)
        del counts[""]  # no group
        for name, count in counts.items():
            slot = self._slots.get(name)
            have = int(self.members[slot]) if slot is not None else 0
            size = int(self.declared[slot]) if slot is not None else 0
            if size and group_size and size != group_size:
                raise InvalidArgumentError(
                    f"group {name!r} was declared with group_size {size}, got {group_size}; give the same size with "
                    f"every put of the group",
                    field="group_size",
                )
            if slot is not None and self.closed[slot]:
                raise PreconditionError(f"group {name!r} is closed; put further samples into another group")
            limit = size or group_size
            if limit and have + count > limit:
                raise PreconditionError(
                    f"group {name!r} has {have} of {limit} members, got {count} more; declare a larger group_size or "
                    f"use another group"
                )

    def add(self, names: Sequence[str], group_size: int, positions: Indexes, *, held: bool, failed: bool) -> None:
        """Enter new rows; "" stands for no group."""
        slot_of = {name: self._slot(name) if name else NO_GROUP for name in dict.fromkeys(names)}
        slots = np.fromiter(map(slot_of.__getitem__, names), np.int64, len(names))
        self._members.write(positions, slots)
        slots = slots[slots >= 0]
        self.members.add(slots, 1)
        if held:
            self.held.add(slots, 1)
        if failed:
            self.failed.add(slots, 1)
        if group_size:
            self.declared.write(slots, group_size)

    def count(self, counter: Column, positions: Indexes, by: int) -> None:
        """Add to one of the counters for the groups of rows."""
        slots = self._members[positions]
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

    def close(self, names: Iterable[str]) -> None:
        """Say that no further members come."""
        slots = []
        for name in names:
            slot = self._slots.get(name)
            if slot is None:
                raise GroupNotFoundError(f"no group {name!r} here; {nearest(name, self._slots)}")
            slots.append(slot)
        self.closed.write(np.array(slots, np.int64), True)

    def forget_empty(self, slots: NDArray[np.int64]) -> None:
        """Free the slots of groups whose members are all cleared."""
        slots = np.unique(slots[slots >= 0])
        empty = slots[(self.cleared[slots] >= self.members[slots]) & (self._names[slots] != None)]  # noqa: E711  (of each)
        for name in self._names[empty]:
            del self._slots[name]
        self._free.extend(empty.tolist())
        for column in self._columns:
            column.write(empty, column.fill)

    def _slot(self, name: str) -> int:
        slot = self._slots.get(name)
        if slot is None:
            slot = self._free.pop() if self._free else self._new_slot()
            self._names.write(slice(slot, slot + 1), name)
            self._slots[name] = slot
            self.in_use = True
        return slot

    def _new_slot(self) -> int:
        slot = self._slot_count
        if slot == self._capacity:
            self._capacity *= 2
            for column in self._columns:
                column.resize(self._capacity, None, slot)
        self._slot_count += 1
        return slot

    @property
    def _columns(self) -> tuple[Column, ...]:
        """What is known of each slot."""
        return (self._names, self.declared, self.members, self.failed, self.cleared, self.held, self.closed)
