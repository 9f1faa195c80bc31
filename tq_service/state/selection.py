"""Which samples of a partition a request means: named one by one, or all, or those in some groups; under conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.state.meta import Condition
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.table import as_slice

_MOST_SCANNED: Final = 131_072  # rows, for those in groups or under conditions
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples that come one after the other in a selection.

    Attributes:
        positions: where they are in the table `(n,)`.
        places: for each of them the place at which a part begins that begins with it `(n,)`.
        next_place: where the part after this one begins; None: nowhere.
    """

    positions: Indexes
    places: Indexes
    next_place: int | None

    def first(self, count: int) -> Part:
        """Return the part of the first `count` samples at most."""
        if count >= self.positions.size:
            return self
        return Part(positions=self.positions[:count], places=self.places[:count], next_place=int(self.places[count]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Samples that a request means.

    Those that are named come in the order of `indexes`, then of `keys`; where none is named, the members of `groups`,
    or all samples, in the order of insertion. It is read in parts, since there may be millions: a place is a number of
    names, or a global index.

    Attributes:
        indexes: global indexes `(n,)`.
        keys: keys.
        groups: names of groups, whose members are meant.
        is_all: whether all samples are.
        skipped_by: name of a task that never gets the samples; empty: any samples. For `is_all`.
        where: what the samples must satisfy besides.

    Raises:
        InvalidArgumentError: samples are named both by themselves and by their group, or by what skipped them.
    """

    indexes: Indexes = field(default_factory=_NONE.copy)
    keys: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_all: bool = False
    skipped_by: str = ""
    where: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if self.skipped_by and not self.is_all:
            raise InvalidArgumentError(
                f"skipped_by is {self.skipped_by!r}, and samples or groups are named too; give one of them",
                field="skipped_by",
            )
        if self.groups and (self.named_count or self.is_all):
            raise InvalidArgumentError(
                "groups are named, and samples too; name samples by index or key, or the groups they are in",
                field="groups",
            )

    @property
    def named_count(self) -> int:
        """Number of samples that are named, those included that are not there."""
        return self.indexes.size + len(self.keys)

    @property
    def is_named(self) -> bool:
        """Whether samples are named one by one; it may be none of them."""
        return not self.groups and not self.is_all

    def part(self, partition: Partition, place: int, size: int) -> Part:
        """Return the samples from a place on, of so many names, or so many rows where no condition is looked at."""
        if self.is_named:
            return self._named(partition, place, place + size)
        is_filtered = bool(self.groups or self.where or self.skipped_by)
        return self._scanned(partition, place, _MOST_SCANNED if is_filtered else size)

    def _named(self, partition: Partition, start: int, stop: int) -> Part:
        positions = self._positions(partition, start, stop)
        places = start + np.arange(positions.size)
        found = positions >= 0
        if self.where:
            found[found] = self._holds(partition, positions[found])
        next_place = stop if stop < self.named_count else None
        return Part(positions=positions[found], places=places[found], next_place=next_place)

    def _positions(self, partition: Partition, start: int, stop: int) -> Indexes:
        """Return the positions of the samples named there, -1 for each that is not there."""
        count = self.indexes.size
        found = partition.table.find(self.indexes[start:stop])
        keys = self.keys[max(0, start - count) : max(0, stop - count)]
        return np.concatenate([found, partition.key_index.positions_of(keys)]) if keys else found

    def _scanned(self, partition: Partition, first_index: int, count: int) -> Part:
        table = partition.table
        positions = table.present_from(first_index, count + 1)
        next_place = int(table.index.data[positions[count]]) if positions.size > count else None
        positions = self.among(partition, positions[:count])
        return Part(positions=positions, places=table.index.data[positions], next_place=next_place)

    def among(self, partition: Partition, positions: Indexes) -> Indexes:
        """Return those of some samples that are meant, where none is named."""
        if self.groups:
            slots = partition.groups.slot_of.find(self.groups)
            wanted = np.zeros(partition.groups.slots.count + 1, np.bool_)  # the last one is of samples without a group
            wanted[slots[slots >= 0]] = True
            positions = positions[wanted[partition.groups.of_rows[as_slice(positions)]]]
        return self.satisfying(partition, positions)

    def satisfying(self, partition: Partition, positions: Indexes) -> Indexes:
        """Return those of some samples that satisfy all conditions, and that the task of `skipped_by` never gets."""
        if self.skipped_by:
            positions = positions[partition.known_task(self.skipped_by).is_lost(positions)]
        return positions[self._holds(partition, positions)] if self.where else positions

    def _holds(self, partition: Partition, positions: Indexes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask = np.ones(positions.size, np.bool_)
        rows = as_slice(positions)
        for condition in self.where:
            mask &= partition.meta.holds(condition, rows)[0]
        return mask

    def missing_keys(self, partition: Partition, start: int, stop: int | None) -> list[str]:
        """Return the keys from a place to another that no sample has."""
        count = self.indexes.size
        keys = self.keys[max(0, start - count) : None if stop is None else max(0, stop - count)]
        return [keys[each] for each in np.flatnonzero(partition.key_index.positions_of(keys) < 0).tolist()]

    def missing_indexes(self, partition: Partition, start: int, stop: int | None) -> Indexes:
        """Return the indexes from a place to another that no sample has."""
        indexes = self.indexes[start:stop]
        return indexes[partition.table.find(indexes) < 0]

    def missing_groups(self, partition: Partition) -> list[str]:
        """Return the groups that have no members here."""
        slots = partition.groups.slot_of.find(self.groups)
        return [self.groups[each] for each in np.flatnonzero(slots < 0).tolist()]
