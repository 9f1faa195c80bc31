"""Changes to cells shared by a group's samples, and to groups created before their samples.

put_groups before the samples --> group without members -- first sample --> group -- last sample cleared --> removed
                                      | clear_samples(groups=), seal
                                      v
                                   removed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tq_service.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, PartitionSealedError
from tq_service.machine.rows import begin_groups, remove_groups
from tq_service.machine.samples import CHECKED_ONCE, FoundRows, Written
from tq_service.machine.state_machine import Change, State, Step
from tq_service.schema import FieldSpec
from tq_service.state.cells import ColumnWrite, Put
from tq_service.state.groups import CheckedNames
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroupWrite:
    """A put to groups, after validation against the partition's current state.

    Attributes:
        partition: partition that contains the groups.
        named: groups named in the put, both existing and new.
        specs: specs of the written fields after the put.
    """

    partition: Partition
    named: CheckedNames
    specs: Sequence[FieldSpec]


class GroupsWritten(Change):
    """Values shared by the samples of one or more groups were written. Missing groups were created.

    Attributes:
        names: names of the groups, without duplicates.
        put: put that contains the columns, with one row per group.
        columns: columns that the put contains.
        must_exist: whether each group must already have samples.
    """

    partition_id: str
    names: Sequence[str]
    put: Put
    columns: Sequence[ColumnWrite]
    must_exist: bool = field(default=False, metadata=CHECKED_ONCE)

    def prepare(self, state: State) -> CheckedGroupWrite:
        """Find the groups and validate the values."""
        partition = state.partition(self.partition_id)
        _check_names(self.names)
        named = partition.groups.named(self.names)
        if self.must_exist and (missing := named.names_without_members):
            raise NotFoundError(
                f"partition {self.partition_id!r} has no samples of group {missing[0]!r} ({len(missing)} of "
                f"{len(self.names)} groups have none); expected groups with samples. Put the samples first, or "
                "do not require existing groups",
                reason="GROUP_NOT_FOUND",
                metadata={"group": missing[0]},
            )
        if partition.sealed and (new := named.new_names):
            raise PartitionSealedError(
                f"partition {self.partition_id!r} is sealed and has no group {new[0]!r} ({len(new)} of "
                f"{len(self.names)} groups are new); expected existing groups. Omit new groups, or put them before "
                f"the partition is sealed",
                metadata={"partition_id": self.partition_id},
            )
        for column in self.columns:
            _check_field(partition, column.spec.name)
        _check_write_once(partition, self.columns, self.names, named.slots)
        specs = partition.cells.merged_specs(self.columns, named.slots)
        return CheckedGroupWrite(partition=partition, named=named, specs=specs)

    def apply(self, state: State, prepared: CheckedGroupWrite, step: Step) -> Written:
        """Create the new groups, and store the locations of the new values in the groups' cells."""
        partition, groups = prepared.partition, prepared.partition.groups
        had_groups = groups.in_use
        slots = groups.open(prepared.named)
        if groups.in_use and not had_groups:
            begin_groups(partition)
        count = len(self.names)
        step.freed += partition.cells.write(self.put, self.columns, prepared.specs, slots, count)
        members = groups.members_of(slots[prepared.named.has_members], partition.table)
        indexes: Indexes = partition.table.index[members]
        if indexes.size:
            partition.notify_rows(indexes)
            step.written.append((partition, indexes))
        step.note_change(partition)
        return Written(partition=partition, global_indexes=indexes, specs=prepared.specs)


class GroupsRemoved(Change):
    """Groups without samples were removed together with their cells."""

    partition_id: str
    names: Sequence[str]

    def prepare(self, state: State) -> FoundRows | None:
        """Find the groups in `names` that have no samples. Return None if all groups have samples."""
        partition = state.partition(self.partition_id)
        named = partition.groups.named(self.names)
        slots = named.slots[(named.slots >= 0) & ~named.has_members]
        return (partition, slots) if slots.size else None

    def apply(self, state: State, prepared: FoundRows, step: Step) -> int:
        """Remove the groups and their cells, and return the number of removed groups."""
        partition, slots = prepared
        remove_groups(partition, slots, step)
        step.note_change(partition)
        return slots.size


def _check_names(names: Sequence[str]) -> None:
    if not names or "" in names:
        raise InvalidArgumentError(
            f"groups has {len(names)} names{', including an empty name' if names else ''}; expected one group name "
            f"per row of the put",
            field="groups",
        )
    if len(set(names)) != len(names):
        ((twice, count),) = Counter(names).most_common(1)
        raise InvalidArgumentError(
            f"group {twice!r} occurs {count} times in one put; expected once. Pass one row per group",
            field="groups",
        )


def _check_field(partition: Partition, name: str) -> None:
    """Raise InvalidArgumentError if a field does not have group scope."""
    if name not in partition.cells.shared:
        shared = ", ".join(map(repr, sorted(partition.cells.shared))) or "none"
        raise InvalidArgumentError(
            f"field {name!r} of partition {partition.partition_id!r} does not have group scope; fields with "
            f"group scope: {shared}. Put the field with samples, or declare it with group scope when creating the "
            "partition",
            field="columns",
            metadata={"field_name": name},
        )


def _check_write_once(
    partition: Partition, columns: Sequence[ColumnWrite], names: Sequence[str], slots: Indexes
) -> None:
    """Raise AlreadyExistsError if a group already has a value in a write-once field that the put writes."""
    for name in partition.cells.write_once.intersection(column.spec.name for column in columns):
        is_there = (slots >= 0) & (partition.cells.fields[name].cell[slots] >= 0)
        if is_there.any():
            group = names[int(np.argmax(is_there))]
            raise AlreadyExistsError(
                f"field {name!r} is write-once, but group {group!r} of partition {partition.partition_id!r} already "
                f"has a value ({np.count_nonzero(is_there)} of {slots.size} groups have one). Omit these groups, or "
                f"clear the field to put it again",
                metadata={
                    "resource_type": "cell",
                    "resource_name": f"{name} of group {group}",
                    "partition_id": partition.partition_id,
                    "field_name": name,
                },
            )
