"""Groups, rollouts, and indexes for finding rows and groups by name.

A group contains the responses to one prompt. A rollout contains the turns of an agent. `NameIndex` maps names to
numbers like a dict, but every operation is fast even if the index contains a large number of names.
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
from tq_service.schema import BatchUnit
from tq_service.state.plan import Indexes
from tq_service.state.table import Column, RowTable, SlotTable, as_slice, distinct

NO_GROUP = -1

_MOST_IN_ONE_DICT: Final = 1 << 15  # maximum number of names in a single dict; it takes about 10 ms to split
_PART_COUNT: Final = 256
_HASH_MASK: Final = (1 << 16) - 1
# Maps the last bits of a hash to a part. The size of the parts increases evenly, and the last part is twice as large as
# the first.
_PART_OF: Final = (_PART_COUNT * np.log2(1 + np.arange(_HASH_MASK + 1) / (_HASH_MASK + 1))).astype(np.uint8)
_FEW: Final = 1 << 10  # up to this number of names, a loop is faster than arrays
_GAPS_FROM_BYTES: Final = 1 << 12
_MOST_BYTES_PER_NAME: Final = 1 << 8  # a larger dict is copied to free memory; a dict that has just grown uses up to 90

Part: TypeAlias = tuple[dict[str, int], Collection[str], Any]


class NameIndex(Collection[str]):
    """A mapping from names to integers.

    When a dict grows, it rehashes all its names at once, which is slow for a large dict. If there are many names, they
    are therefore distributed by hash over many dicts. The dicts have unequal sizes, so they grow at different times.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[str, int]] = [{}]
        self._looked_at = 0  # number of the last dict that was checked for gaps

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.find((name,))[0] >= 0)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self._dicts)

    def find(self, names: Sequence[str]) -> Indexes:
        """Return an array of shape `(n,)` that contains the number of each name, or -1 for unknown names."""
        numbers = np.full(len(names), -1, np.int64)
        for known, some, positions in self._parts(names):
            if not known.keys().isdisjoint(some):  # halves the time if all names are new
                numbers[positions] = list(map(known.get, some, itertools.repeat(-1)))
        return numbers

    def add(self, names: Sequence[str], numbers: Indexes) -> None:
        """Add new names, each with its number from `numbers`, an array of shape `(n,)`."""
        if len(self._dicts) == 1 and len(self._dicts[0]) + len(names) > _MOST_IN_ONE_DICT:
            (known,) = self._dicts
            self._dicts = [{} for _ in range(_PART_COUNT)]
            self.add(list(known), np.fromiter(known.values(), np.int64, len(known)))
        for known, some, positions in self._parts(names):
            known.update(zip(some, numbers[positions].tolist(), strict=True))

    def remove(self, names: Sequence[str]) -> None:
        """Remove names, and free some of the memory used by previously removed names. Unknown names are ignored."""
        for known, some, _ in self._parts(names):
            deque(map(known.pop, some, itertools.repeat(None)), maxlen=0)
        if not self:
            self._dicts = [{}]
        self._looked_at = number = (self._looked_at + 1) % len(self._dicts)
        known = self._dicts[number]
        if sys.getsizeof(known) > _GAPS_FROM_BYTES + _MOST_BYTES_PER_NAME * len(known):
            self._dicts[number] = dict(known)  # removed names leave gaps in a dict, but not in its copy

    def free(self) -> Iterator[None]:
        """Remove all names incrementally."""
        for known in self._dicts:
            known.clear()
            yield

    def _parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield each dict that covers some of the names, along with those names and their positions in `names`."""
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
    """A mapping from keys to the global indexes of their rows. Keys are stored in the row table's `key` column.

    Attributes:
        column: key of each row, or None for a row without a key.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self.column = table.column("key", np.object_, None)
        self._table = table

    def positions_of(self, keys: Sequence[str]) -> Indexes:
        """Return an array of shape `(n,)` with the position of each key's row, or -1 for an unknown key."""
        positions = self.find(keys)
        is_known = positions >= 0
        if is_known.any():
            positions[is_known] = self._table.find(positions[is_known])
        return positions

    def on_rows_cleared(self, positions: Indexes) -> None:
        """Remove the keys of the given rows from the index. Call this before removing the rows from the table."""
        if self:
            keys = self.column[positions]
            self.remove(keys[keys != None].tolist())  # noqa: E711  (of each)

    def rebuild(self) -> None:
        """Add the keys of restored rows to the index."""
        keys, indexes = self.column[: self._table.count], self._table.index[: self._table.count]
        is_there = keys != None  # noqa: E711  (of each)
        if not is_there.all():
            keys, indexes = keys[is_there], indexes[is_there]
        self.add(keys.tolist(), indexes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNames:
    """The group or rollout names of new samples, together with the slots of groups or rollouts that already exist.

    Attributes:
        names: distinct group or rollout names.
        codes: for each new sample, the position of its name in `names`, or NO_GROUP for a sample without a name.
        slots: slot of each name, or a negative number for a new name.
        has_members: for each name, whether the group or rollout already has samples.
    """

    names: Sequence[str]
    codes: Indexes
    slots: Indexes
    has_members: NDArray[np.bool_]

    @classmethod
    def of(cls, given: Sequence[str], known: NameIndex, members: Column) -> CheckedNames:
        """Look up the group or rollout names of new samples. A sample without a name is represented by "".

        For each slot, the column `members` contains the member count of its group or rollout.
        """
        names = list(filter(None, dict.fromkeys(given)))
        code_of = dict(zip(names, itertools.count()))
        codes = np.fromiter(map(code_of.get, given, itertools.repeat(NO_GROUP)), np.int64, len(given))
        slots = known.find(names)
        return cls(names=names, codes=codes, slots=slots, has_members=(slots >= 0) & (members[slots] > 0))

    @property
    def new_names(self) -> list[str]:
        """Names of groups or rollouts that do not exist yet."""
        return list(itertools.compress(self.names, self.slots < 0))

    @property
    def names_without_members(self) -> list[str]:
        """Names of groups or rollouts without samples."""
        return list(itertools.compress(self.names, ~self.has_members))

    def have_begun(self, codes: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the codes whose group or rollout already has samples. NO_GROUP is never selected."""
        return np.append(self.has_members, False)[codes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroups:
    """The groups and rollouts of new samples, validated against the current table.

    Attributes:
        groups: names of the groups.
        rollouts: names of the rollouts, or None if no sample has a rollout.
        group_codes: for each new sample, the position of its group in `groups.names`. The code is NO_GROUP if the
            sample has no group or its rollout already has samples.
    """

    groups: CheckedNames
    rollouts: CheckedNames | None
    group_codes: Indexes

    @property
    def begins(self) -> NDArray[np.bool_]:
        """Mask of shape `(n,)` that selects the new samples whose group and rollout are still empty.

        Samples without a group or rollout are selected as well.
        """
        has_begun = self.groups.have_begun(self.group_codes)
        if self.rollouts is not None:
            has_begun |= self.rollouts.have_begun(self.rollouts.codes)
        return ~has_begun

    def count_units(self, unit: BatchUnit, samples: Indexes) -> int:
        """Return the number of units that the given new samples form."""
        if unit == "sample":
            return samples.size
        ids, rollout_count = -2 - samples, 0
        if self.rollouts is not None:
            rollouts, rollout_count = self.rollouts.codes[samples], len(self.rollouts.names)
            ids = np.where(rollouts >= 0, rollouts, ids)
        if unit == "group":
            groups = self.group_codes[samples]
            ids = np.where(groups >= 0, rollout_count + groups, ids)
        return np.unique(ids).size


class GroupTable:
    """The groups and rollouts of a partition, with their member counts by status.

    Each group occupies one slot across parallel columns. The slot can be reused after the last member of the group has
    been cleared. If a group receives cells before its first sample, the group exists without members (see
    `CellTable.shared`). Each rollout also occupies a slot. Samples of a rollout are also members of the group that
    contains the rollout. A rollout outside any group counts as a group itself.

    A rollout is complete when it is closed. A group is complete when all its rollouts are closed and the group itself
    is closed or has reached its declared size.
    """

    __slots__ = (
        "_index", "_members", "_names", "_rollouts",
        "cleared", "closed", "continuing", "declared", "failed", "first", "in_use", "last", "members", "open_rollouts",
        "parent", "rollout_slot_of", "slot_of", "slots",
    )  # fmt: skip

    def __init__(self, table: RowTable) -> None:
        self.slots = SlotTable("name")
        self.slot_of = NameIndex()
        self.rollout_slot_of = NameIndex()
        self.in_use = False  # becomes True with the first named group or rollout and remains True
        self._members: Column = table.column("group", np.int64, NO_GROUP)
        # Contains the slot plus 1. The fill is therefore 0, and the memory remains untouched if there are no rollouts.
        self._rollouts: Column = table.column("rollout", np.int64, 0)
        self._names = self.slots.occupants
        self.declared = self.slots.column("declared", np.int64, 0)
        self.members = self.slots.column("members", np.int64, 0)
        self.continuing = self.slots.column(
            "continuing", np.int64, 0
        )  # for a group: number of members in rollouts, without the first member of each rollout
        self.failed = self.slots.column("failed", np.int64, 0)
        self.cleared = self.slots.column("cleared", np.int64, 0)
        self.closed = self.slots.column("closed", np.bool_, False)
        self.open_rollouts = self.slots.column("open_rollouts", np.int64, 0)  # for a group: number of open rollouts
        self.parent = self.slots.column("parent", np.int64, NO_GROUP)  # for a rollout: slot of its group, or its own
        self.first = self.slots.column("first", np.int64, -1)  # first and last global indexes of the members
        self.last = self.slots.column("last", np.int64, -1)
        self._index = table.index

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def rollout_count(self) -> int:
        """Number of rollouts that have members."""
        return len(self.rollout_slot_of)

    @property
    def has_rollouts(self) -> bool:
        """Whether any rollout has ever existed in the partition."""
        return not self.parent.is_blank

    @property
    def of_rows(self) -> NDArray[np.int64]:
        """Group slot of each row in the table, or NO_GROUP for a row without a group."""
        return self._members.data

    def of_unit(self, unit: BatchUnit, rows: slice | Indexes) -> Indexes:
        """Return the group or rollout slot of each row, or NO_GROUP for a row without a group or rollout."""
        slots: Indexes = self._rollouts[rows] - 1 if unit == "rollout" else self._members[rows]
        return slots

    def outermost(self, slots: Indexes) -> Indexes:
        """Replace each rollout's slot with its group's slot. Group slots are returned unchanged."""
        parents = self.parent[slots]
        return np.where(parents < 0, slots, parents)

    def slots_of_unit(self, unit: BatchUnit) -> Indexes:
        """Return the slots of all groups or rollouts that have members."""
        slots = np.flatnonzero(self.members[: self.slots.count])
        if not self.has_rollouts:
            return slots if unit == "group" else slots[:0]
        parent = self.parent[slots]
        return slots[parent >= 0] if unit == "rollout" else slots[(parent < 0) | (parent == slots)]

    def names_of(self, positions: Indexes) -> list[str | None]:
        """Return the name of each row's group, or None for a row without a group."""
        slots = self._members[positions]
        return self._named(slots, slots < 0 if not self.has_rollouts else (slots < 0) | (self.parent[slots] >= 0))

    def rollout_names_of(self, positions: Indexes) -> list[str | None]:
        """Return the name of each row's rollout, or None for a row without a rollout."""
        slots = self.of_unit("rollout", positions)
        return self._named(slots, slots < 0)

    def _named(self, slots: Indexes, is_unnamed: NDArray[np.bool_]) -> list[str | None]:
        names = self._names[slots]
        names[is_unnamed] = None
        listed: list[str | None] = names.tolist()
        return listed

    def count_units(self, positions: Indexes, unit: BatchUnit) -> int:
        """Return the number of units that the rows belong to. A row without a group or rollout counts as one unit."""
        if unit == "sample" or not self.in_use or (unit == "rollout" and not self.has_rollouts):
            return int(positions.size)
        slots = self.of_unit(unit, positions)
        return int(np.unique(slots[slots >= 0]).size + np.count_nonzero(slots < 0))

    def check(self, groups: Sequence[str], group_size: int, rollouts: Sequence[str] = ()) -> CheckedGroups:
        """Validate the groups and rollouts of new samples without changing the table.

        Args:
            groups: group of each sample, or "" for a sample that has no group or belongs to its rollout's group.
            group_size: declared size of new groups, or 0 if the size is unknown.
            rollouts: rollout of each sample, or "" for a sample that has no rollout. The sequence is empty if no sample
                has a rollout.

        Raises:
            InvalidArgumentError: a group's size or a rollout's group differs from the value in an earlier put, or
                `group_size` is negative.
            PreconditionError: a group or rollout is closed, or a group would have too many members.
        """
        if group_size < 0:
            raise InvalidArgumentError(
                f"group_size is {group_size}; expected 0 or a positive number", field="group_size"
            )
        named, named_rollouts = CheckedNames.of(groups, self.slot_of, self.members), None
        codes = begun = named.codes
        if any(rollouts):
            named_rollouts = CheckedNames.of(rollouts, self.rollout_slot_of, self.members)
            codes, begun = self._check_rollouts(groups, named, named_rollouts)
        counts = np.bincount(begun + 1, minlength=len(named.names) + 1)[1:]
        self._check_sizes(named, counts, group_size)
        return CheckedGroups(groups=named, rollouts=named_rollouts, group_codes=codes)

    def _check_sizes(self, named: CheckedNames, counts: Indexes, group_size: int) -> None:
        """Raise an error if `counts` contains more new samples and rollouts than a group can accept."""
        names, slots = named.names, named.slots
        if group_size:
            too_many = np.flatnonzero((slots < 0) & (counts > group_size))
            if too_many.size:
                raise _too_many(names[too_many[0]], 0, group_size, int(counts[too_many[0]]))
        for code in np.flatnonzero(slots >= 0).tolist():
            name, slot = names[code], slots[code]
            size, have = int(self.declared[slot]), int(self.members[slot] - self.continuing[slot])
            if size and group_size and size != group_size:
                raise InvalidArgumentError(
                    f"group_size is {group_size}; expected {size}, the declared size of group {name!r}. Pass the same "
                    "size in every put for the group.",
                    field="group_size",
                )
            if self.closed[slot] and counts[code]:
                raise PreconditionError(
                    f"group {name!r} is closed. Put further samples into another group.", metadata={"group": name}
                )
            limit = size or group_size
            if limit and have + counts[code] > limit:
                raise _too_many(name, have, limit, int(counts[code]))

    def _check_rollouts(
        self, groups: Sequence[str], named: CheckedNames, rollouts: CheckedNames
    ) -> tuple[Indexes, Indexes]:
        """Validate the rollouts of new samples against their groups.

        Return two arrays. The first is `CheckedGroups.group_codes`. The second contains the group codes of new rollouts
        and of samples without a rollout.

        Raises:
            PreconditionError: a rollout is closed.
            InvalidArgumentError: a rollout belongs to a different group.
        """
        has_begun = rollouts.slots >= 0
        if (is_closed := self.closed[rollouts.slots] & has_begun).any():
            name = rollouts.names[int(np.argmax(is_closed))]
            raise PreconditionError(
                f"rollout {name!r} is closed. Put further samples into another rollout.", metadata={"group": name}
            )
        inside = np.flatnonzero(rollouts.codes >= 0)
        codes_inside = rollouts.codes[inside]
        first = inside[np.unique(codes_inside, return_index=True)[1]]  # the first sample of each rollout
        parents = self.parent[rollouts.slots]
        known = self._named(parents, parents == rollouts.slots)
        expected = [
            name if is_known else groups[sample]
            for name, is_known, sample in zip(known, has_begun.tolist(), first.tolist(), strict=True)
        ]
        for sample, code in zip(inside.tolist(), codes_inside.tolist(), strict=True):
            if groups[sample] and groups[sample] != expected[code]:
                where = f"group {expected[code]!r}" if expected[code] else "no group"
                raise InvalidArgumentError(
                    f"got group {groups[sample]!r} for rollout {rollouts.names[code]!r}, which is in {where}; the "
                    f"first sample of a rollout sets its group. Pass the same group, or none, for the other samples",
                    field="groups",
                )
        group_of = np.where(has_begun, NO_GROUP, named.codes[first])
        codes = named.codes.copy()
        codes[inside] = group_of[codes_inside]
        return codes, np.concatenate([named.codes[rollouts.codes < 0], group_of[~has_begun]])

    def add(self, checked: CheckedGroups, group_size: int, rows: slice) -> None:
        """Add new rows to the groups and rollouts in `checked`, the result of `check`."""
        slots, codes = self._slots_for(checked.groups, self.slot_of), checked.group_codes
        of_rows = np.append(slots, NO_GROUP)[codes]  # as an index, NO_GROUP (-1) selects the last element
        indexes, rollouts = self._index[rows], checked.rollouts
        if rollouts is not None:
            is_new, own = rollouts.slots < 0, self._slots_for(rollouts, self.rollout_slot_of)
            inside = np.flatnonzero(rollouts.codes >= 0)
            first = inside[np.unique(rollouts.codes[inside], return_index=True)[1]]
            groups = np.where(is_new & (of_rows[first] >= 0), of_rows[first], own)
            self.parent.write(own[is_new], groups[is_new])
            parents, in_group = self.parent[own], self.parent[own] != own
            self.open_rollouts.add(parents[is_new & in_group], 1)
            of_rollouts = np.append(own, NO_GROUP)[rollouts.codes]
            self._rollouts.write(rows, of_rollouts + 1)
            of_rows[inside] = parents[rollouts.codes[inside]]
            is_inner = np.append(in_group, False)[rollouts.codes]
            self.continuing.add(of_rows[is_inner], 1)
            self.continuing.add(parents[is_new & in_group], -1)
            self._add_members(of_rollouts[is_inner], indexes[is_inner])
        self._members.write(rows, of_rows)
        is_member = of_rows >= 0
        self._add_members(of_rows[is_member], indexes[is_member])
        if group_size:
            self.declared.write(slots, group_size)

    def named(self, names: Sequence[str]) -> CheckedNames:
        """Look up groups by name. Unknown names are allowed."""
        return CheckedNames.of(names, self.slot_of, self.members)

    def open(self, named: CheckedNames) -> Indexes:
        """Return the slots of the named groups. Groups that do not exist yet are created without members."""
        return self._slots_for(named, self.slot_of)

    def without_members(self) -> Indexes:
        """Return the slots of all groups that have never had members."""
        slots = self.slots
        return np.flatnonzero((self._names[: slots.count] != None) & (self.members[: slots.count] == 0))  # noqa: E711  (of each)

    def find(self, names: Sequence[str], rollouts: Sequence[str] = ()) -> Indexes:
        """Return the group slots followed by the rollout slots. An unknown or empty group or rollout has slot -1."""
        slots = np.append(self.slot_of.find(names), self.rollout_slot_of.find(rollouts))
        return np.where(self.members[slots] > 0, slots, -1)

    def _slots_for(self, named: CheckedNames, index: NameIndex) -> Indexes:
        """Return the slot of each name, and allocate slots for new names."""
        slots = named.slots.copy()
        if names := named.new_names:
            taken = slots[slots < 0] = np.array(self.slots.allocate(len(names)))
            self._names.write(as_slice(taken), names)
            index.add(names, taken)
            self.in_use = True
        return slots

    def _add_members(self, slots: Indexes, indexes: Indexes) -> None:
        """Add rows to the member counts of groups or rollouts. `slots` contains each row's group or rollout slot."""
        fresh = self.first[slots] < 0
        self.first.write(
            slots[fresh][::-1], indexes[fresh][::-1]
        )  # in reverse order, so that a slot's first row is written last
        self.last.write(slots, indexes)
        self.members.add(slots, 1)

    def is_complete(self, slots: NDArray[np.int64], default_size: int | None, *, no_more: bool) -> NDArray[np.bool_]:
        """Return a mask of the groups or rollouts that are complete.

        Args:
            slots: slots of the groups or rollouts.
            default_size: size of groups without a declared size. None means that the size is unknown.
            no_more: whether no more rows will be inserted. If true, rollouts and groups of unknown size count as
                complete.
        """
        size = self.declared[slots]
        if default_size is not None:
            size = np.where((size == 0) & (self.parent[slots] < 0), default_size, size)
        full = (size > 0) & (self.members[slots] - self.continuing[slots] >= size)
        unsized = (self.declared[slots] == 0) & no_more
        complete: NDArray[np.bool_] = (full | unsized | self.closed[slots]) & (
            no_more | (self.open_rollouts[slots] == 0)
        )
        return complete

    def members_of(self, slots: Indexes, table: RowTable, unit: BatchUnit = "group") -> Indexes:
        """Return the positions of all members of the given groups or rollouts.

        The method scans all rows from the first member to the last.
        """
        if not slots.size:
            return np.zeros(0, np.int64)
        start = table.position_from(int(self.first[slots].min()))
        end = table.position_from(int(self.last[slots].max()) + 1)
        is_wanted = np.zeros(self.slots.count + 1, np.bool_)  # the last element is for rows without a group
        is_wanted[slots] = True
        return start + np.flatnonzero(is_wanted[self.of_unit(unit, slice(start, end))])

    def slots_of(self, names: Sequence[str], rollouts: Sequence[str] = ()) -> Indexes:
        """Return the slots of groups followed by the slots of rollouts. Raise NotFoundError if a name is unknown."""
        found = []
        for what, given, index in (("group", names, self.slot_of), ("rollout", rollouts, self.rollout_slot_of)):
            slots = index.find(given)
            if slots.size and slots.min() < 0:
                missing = given[int(np.argmin(slots))]
                raise NotFoundError(
                    f"{what} {missing!r} does not exist; {nearest(missing, index)}",
                    reason="GROUP_NOT_FOUND",
                    metadata={"group": missing},
                )
            found.append(slots)
        return np.concatenate(found)

    def close(self, slots: Indexes) -> None:
        """Close groups and rollouts, so that they accept no new members."""
        slots = distinct(slots, self.slots.count)
        self._count_not_open(slots)
        self.closed.write(slots, True)

    def close_rollouts_of(self, rows: slice | Indexes) -> None:
        """Close the rollouts that contain the given rows."""
        slots = self.of_unit("rollout", rows)
        self.close(slots[slots >= 0])

    def _count_not_open(self, slots: Indexes) -> None:
        """Reduce each group's open rollout count by the number of its open rollouts in `slots`."""
        if self.has_rollouts:
            parents = self.parent[slots]
            self.open_rollouts.add(parents[(parents >= 0) & (parents != slots) & ~self.closed[slots]], -1)

    def count_failed(self, rows: slice | Indexes, by: int) -> None:
        """Count rows as failed and close their rollouts.

        If `by` is -1, reduce the counts of failed rows without changing any rollouts.
        """
        self.failed.add(self._slots_of(rows), by)
        if by > 0 and self.has_rollouts:
            self.close_rollouts_of(rows)

    def count_cleared(self, positions: Indexes) -> Indexes:
        """Count rows as cleared. Return the slots of groups and rollouts that no longer have members.

        Pass the returned slots to `remove`.
        """
        slots = self._slots_of(positions)
        self.cleared.add(slots, 1)
        slots = distinct(slots, self.slots.count)
        empty: Indexes = slots[(self.cleared[slots] >= self.members[slots]) & (self._names[slots] != None)]  # noqa: E711  (of each)
        return empty

    def remove(self, empty: Indexes) -> None:
        """Free the slots of groups and rollouts without members. The slots must be distinct."""
        is_rollout = self.parent[empty] >= 0
        self._count_not_open(empty)
        self.slot_of.remove(self._names[empty[~is_rollout]].tolist())
        self.rollout_slot_of.remove(self._names[empty[is_rollout]].tolist())
        self.slots.free_slots(empty)

    def _slots_of(self, rows: slice | Indexes) -> Indexes:
        """Return the rows' group and rollout slots, with one entry per membership."""
        slots = self._members[rows]
        of_groups: Indexes = slots[slots >= 0]
        if not self.has_rollouts:
            return of_groups
        rollouts = self.of_unit("rollout", rows)
        return np.concatenate([of_groups, rollouts[(rollouts >= 0) & (rollouts != slots)]])

    def rebuild(self, *, in_use: bool) -> None:
        """Recompute the derived state after the columns have been restored."""
        self.in_use = in_use
        self.slots.rebuild()
        names = self._names[: self.slots.count]
        slots = np.flatnonzero(names != None)  # noqa: E711  (of each)
        is_rollout = self.parent[slots] >= 0
        for index, found in ((self.slot_of, slots[~is_rollout]), (self.rollout_slot_of, slots[is_rollout])):
            index.add(names[found].tolist(), found)


class UnitCount:
    """Counts the groups or rollouts that contain at least one row from a set of rows.

    Args:
        groups: groups of the partition.
        unit: "group" or "rollout".

    Attributes:
        count: number of groups or rollouts that have at least one row in the set. Each row in the set that belongs to
            no group or rollout counts as one.
    """

    def __init__(self, groups: GroupTable, unit: BatchUnit) -> None:
        self._groups = groups
        self._unit: BatchUnit = unit
        self._row_counts = np.zeros(0, np.int64)  # by slot
        self.count = 0

    def add(self, positions: Indexes, by: int) -> None:
        """Add rows to the set, or remove them if `by` is -1."""
        slots = self._groups.of_unit(self._unit, positions)
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
        """Remove all rows from the set."""
        self._row_counts[:] = 0
        self.count = 0


def _too_many(name: str, have: int, limit: int, count: int) -> PreconditionError:
    return PreconditionError(
        f"group {name!r} has {have} of {limit} members, got {count} more; declare a larger group_size or use another "
        f"group",
        metadata={"group": name},
    )
