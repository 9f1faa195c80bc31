"""Groups of samples, such as the responses to one prompt, and the index that finds rows and groups by name.

`NameIndex` finds numbers by names as a dict does, however many names there are, in steps that are never long.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError, NotFoundError, PreconditionError, nearest
from tq_service.state.plan import Indexes
from tq_service.state.table import Column, RowTable, SlotTable, as_slice, distinct

NO_GROUP = -1

_MOST_IN_ONE_DICT: Final = 1 << 15  # names; moving them to other dicts takes some 10 ms
_PART_COUNT: Final = 256
_HASH_MASK: Final = (1 << 16) - 1
# Parts by the last bits of a hash: the last part has twice as many names as the first, and those between grow evenly.
_PART_OF: Final = (_PART_COUNT * np.log2(1 + np.arange(_HASH_MASK + 1) / (_HASH_MASK + 1))).astype(np.uint8)
_FEW: Final = 1 << 10  # names up to which arrays cost more than they save
_GAPS_FROM_BYTES: Final = 1 << 12
_MOST_BYTES_PER_NAME: Final = 1 << 8  # of a dict; one that has just grown has up to 90

Part: TypeAlias = tuple[dict[str, int], Collection[str], Any]


class NameIndex(Collection[str]):
    """Numbers by name.

    A full dict moves all its names at once. So many names are in many dicts, each for some hashes, and of unequal
    sizes, so that each is full at another time.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[str, int]] = [{}]
        self._looked_at = 0  # the one that was last looked at for gaps

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.find((name,))[0] >= 0)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self._dicts)

    def find(self, names: Sequence[str]) -> Indexes:
        """Return the number of each name `(n,)`, -1 for an unknown one."""
        numbers = np.full(len(names), -1, np.int64)
        for known, some, positions in self._parts(names):
            if not known.keys().isdisjoint(some):  # as new names are, in half the time
                numbers[positions] = list(map(known.get, some, itertools.repeat(-1)))
        return numbers

    def add(self, names: Sequence[str], numbers: Indexes) -> None:
        """Enter unknown names and their numbers `(n,)`."""
        if len(self._dicts) == 1 and len(self._dicts[0]) + len(names) > _MOST_IN_ONE_DICT:
            (known,) = self._dicts
            self._dicts = [{} for _ in range(_PART_COUNT)]
            self.add(list(known), np.fromiter(known.values(), np.int64, len(known)))
        for known, some, positions in self._parts(names):
            known.update(zip(some, numbers[positions].tolist(), strict=True))

    def remove(self, names: Sequence[str]) -> None:
        """Forget names, and give back some memory of earlier ones; unknown names are ignored."""
        for known, some, _ in self._parts(names):
            deque(map(known.pop, some, itertools.repeat(None)), maxlen=0)
        if not self:
            self._dicts = [{}]
        self._looked_at = number = (self._looked_at + 1) % len(self._dicts)
        known = self._dicts[number]
        if sys.getsizeof(known) > _GAPS_FROM_BYTES + _MOST_BYTES_PER_NAME * len(known):
            self._dicts[number] = dict(known)  # a dict keeps the gaps of removed names, its copy has none

    def free(self) -> Iterator[None]:
        """Forget all names in steps."""
        for known in self._dicts:
            known.clear()
            yield

    def _parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield each dict that names belong to, with these names and their positions."""
        if len(self._dicts) == 1:
            yield self._dicts[0], names, slice(None)
        elif len(names) <= _FEW:
            for position, name in enumerate(names):
                yield self._dicts[_PART_OF[hash(name) & _HASH_MASK]], (name,), slice(position, position + 1)
        else:
            part_of = _PART_OF[np.fromiter(map(hash, names), np.int64, len(names)) & _HASH_MASK]
            order = np.argsort(part_of, kind="stable")
            starts = np.flatnonzero(np.diff(part_of[order], prepend=_PART_COUNT))
            for positions in np.split(order, starts[1:]):
                some = list(map(names.__getitem__, positions.tolist()))
                yield self._dicts[part_of[positions[0]]], some, positions


class KeyIndex(NameIndex):
    """The global indexes of rows by their keys, which are in the column `key` of the table.

    Attributes:
        column: the key of each row, None for one without.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self.column = table.column("key", np.object_, None)
        self._table = table

    def positions_of(self, keys: Sequence[str]) -> Indexes:
        """Return the positions of the rows that have keys `(n,)`, -1 for an unknown key."""
        positions = self.find(keys)
        is_known = positions >= 0
        if is_known.any():
            positions[is_known] = self._table.find(positions[is_known])
        return positions

    def on_rows_cleared(self, positions: Indexes) -> None:
        """Forget the keys of rows that are still in the table."""
        if self:
            keys = self.column[positions]
            self.remove(keys[keys != None].tolist())  # noqa: E711  (of each)

    def rebuild(self) -> None:
        """Enter the keys of restored rows."""
        keys, indexes = self.column[: self._table.count], self._table.index[: self._table.count]
        is_there = keys != None  # noqa: E711  (of each)
        if not is_there.all():
            keys, indexes = keys[is_there], indexes[is_there]
        self.add(keys.tolist(), indexes)


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
        return self._members.data

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
            name, size, have = names[code], int(self.declared[slots[code]]), int(self.members[slots[code]])
            if size and group_size and size != group_size:
                raise InvalidArgumentError(
                    f"group {name!r} was declared with group_size {size}, got {group_size}; give the same size with "
                    f"every put of the group",
                    field="group_size",
                )
            if self.closed[slots[code]]:
                raise PreconditionError(
                    f"group {name!r} is closed; put further samples into another group", metadata={"group": name}
                )
            limit = size or group_size
            if limit and have + counts[code] > limit:
                raise _too_many(name, have, limit, int(counts[code]))
        return CheckedGroups(names=names, codes=codes, counts=counts, slots=slots)

    def add(self, checked: CheckedGroups, group_size: int, rows: slice) -> None:
        """Enter new rows as members of groups that were checked."""
        slots, is_new = checked.slots, checked.slots < 0
        if is_new.any():
            names = list(itertools.compress(checked.names, is_new))
            taken = slots[is_new] = np.array(self.slots.allocate(len(names)))
            self._names.write(as_slice(taken), names)
            self.slot_of.add(names, taken)
            self.in_use = True
        of_rows = np.append(slots, NO_GROUP)[checked.codes]  # NO_GROUP is the last position, too
        self._members.write(rows, of_rows)
        slots_of_rows, indexes = of_rows[of_rows >= 0], self._index[rows][of_rows >= 0]
        fresh = self.first[slots_of_rows] < 0
        self.first.write(slots_of_rows[fresh][::-1], indexes[fresh][::-1])  # of several rows the first is written last
        self.last.write(slots_of_rows, indexes)
        self.members.write(slots, self.members[slots] + checked.counts)
        if group_size:
            self.declared.write(slots, group_size)

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
        return start + np.flatnonzero(is_wanted[self.of_rows[start:end]])

    def slots_of(self, names: Sequence[str]) -> Indexes:
        """Return the slots of groups that must be there."""
        slots = self.slot_of.find(names)
        if slots.size and slots.min() < 0:
            missing = names[int(np.argmin(slots))]
            raise NotFoundError(
                f"no group {missing!r} here; {nearest(missing, self.slot_of)}",
                reason="GROUP_NOT_FOUND",
                metadata={"group": missing},
            )
        return slots

    def close(self, slots: Indexes) -> None:
        """Take no further members."""
        self.closed.write(slots, True)

    def count_cleared(self, positions: Indexes) -> None:
        """Count rows as cleared, and free the slots of groups whose members all are."""
        if not self.in_use:
            return
        slots = self._members[positions]
        self.cleared.add(slots[slots >= 0], 1)
        slots = distinct(slots[slots >= 0], self.slots.count)
        empty = slots[(self.cleared[slots] >= self.members[slots]) & (self._names[slots] != None)]  # noqa: E711  (of each)
        self.slot_of.remove(self._names[empty].tolist())
        self.slots.free_slots(empty)

    def rebuild(self, *, in_use: bool) -> None:
        """Find out what follows from restored columns."""
        self.in_use = in_use
        self.slots.rebuild()
        names = self._names[: self.slots.count]
        slots = np.flatnonzero(names != None)  # noqa: E711  (of each)
        self.slot_of.add(names[slots].tolist(), slots)


class GroupCount:
    """Counts the groups that have at least one of some rows, and besides the rows that are in no group.

    Args:
        groups: those of the partition.

    Attributes:
        count: how many both are.
    """

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups
        self._row_counts = np.zeros(0, np.int64)  # by slot of the group
        self.count = 0

    def add(self, positions: Indexes, by: int) -> None:
        """Have rows counted from now on, or not any more where `by` is -1."""
        slots = self._groups.of_rows[positions]
        self.count += by * int(np.count_nonzero(slots < 0))
        slots, counts = np.unique(slots[slots >= 0], return_counts=True)
        if not slots.size:
            return
        if (missing := int(slots[-1]) + 1 - self._row_counts.size) > 0:
            self._row_counts = np.append(self._row_counts, np.zeros(missing + self._row_counts.size, np.int64))
        before = self._row_counts[slots]
        after = self._row_counts[slots] = before + by * counts
        self.count += int(np.count_nonzero(after)) - int(np.count_nonzero(before))

    def clear(self) -> None:
        """Have no rows counted."""
        self._row_counts[:] = 0
        self.count = 0


def _too_many(name: str, have: int, limit: int, count: int) -> PreconditionError:
    return PreconditionError(
        f"group {name!r} has {have} of {limit} members, got {count} more; declare a larger group_size or use another "
        f"group",
        metadata={"group": name},
    )
