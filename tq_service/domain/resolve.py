"""Which rows a write means, named by index, by key, or new, and whether they take it. Nothing is changed here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.plan import Indexes
from tq_service.domain.states import FAILED
from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    KeyNotFoundError,
    PartitionSealedError,
    SampleFailedError,
    nearest,
)
from tq_service.schema import FieldSpec, SampleState

if TYPE_CHECKING:
    from tq_service.domain.partition import Partition
    from tq_service.domain.writes import SampleWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The rows of a write, in its order: `positions` `(n,)` of existing rows, -1 where `is_new` `(n,)`."""

    positions: Indexes
    is_new: NDArray[np.bool_]


def resolve_target(partition: Partition, write: SampleWrite) -> Target:
    """Find the rows of a write; raises before anything is changed."""
    _check_counts(write)
    if write.global_indexes is not None:
        if write.keys is not None:
            raise InvalidArgumentError("a write names its samples by index or by key, not by both", field="keys")
        positions = partition.positions_of(write.global_indexes)
    elif write.keys is not None:
        positions = _by_key(partition, write)
    else:
        positions = np.full(write.row_count, -1, np.int64)
    is_new = positions < 0
    if partition.sealed and is_new.any():
        raise PartitionSealedError(
            f"partition {partition.partition_id!r} is sealed with {partition.inserted_count} samples, got "
            f"{int(is_new.sum())} new ones; put columns of existing samples with metadata= or key_mode='existing', "
            f"remove it with clear_partition to begin anew, or use another partition"
        )
    return Target(positions=positions, is_new=is_new)


def check_write(partition: Partition, write: SampleWrite, target: Target) -> list[FieldSpec]:
    """Return the specs that the written fields have afterwards; raises where the rows do not take what is written."""
    specs = partition.cells.merged_specs(write.columns)
    partition.meta.check(write.meta, write.row_count)
    if write.groups is not None:
        _check_groups(partition, write, target)
    if write.state is not None and write.state is not SampleState.FAILED:
        _check_not_failed(partition, target.positions[~target.is_new])
    return specs


def of_rows(names: Sequence[str], which: NDArray[np.bool_]) -> Sequence[str]:
    """Return the names of some rows of a write; usually all of them are meant."""
    return names if which.all() else [names[i] for i in np.flatnonzero(which).tolist()]


def _check_groups(partition: Partition, write: SampleWrite, target: Target) -> None:
    groups = write.groups or ()
    old = np.flatnonzero(~target.is_new)
    for where, known in zip(old.tolist(), partition.groups.names_of(target.positions[old]), strict=True):
        if groups[where] and groups[where] != known:
            raise InvalidArgumentError(
                f"sample {int(partition.table.index.data[target.positions[where]])} is in group {known!r}, got "
                f"{groups[where]!r}; groups are given when a sample is inserted and stay",
                field="groups",
            )
    names = write.group_names()
    if names is not None:
        partition.groups.check(names if target.is_new.all() else names.of_samples(target.is_new), write.group_size)


def _check_not_failed(partition: Partition, positions: Indexes) -> None:
    failed = positions[partition.state.data[positions] == FAILED]
    if failed.size:
        raise SampleFailedError(
            f"sample {int(partition.table.index.data[failed[0]])} of partition {partition.partition_id!r} has failed, "
            f"which is final; insert a new sample in its place"
        )


def _check_counts(write: SampleWrite) -> None:
    if write.row_count <= 0:
        raise InvalidArgumentError("an empty put: got 0 samples; put at least one", field="row_count")
    counts = {"keys": write.keys, "groups": write.groups, "global_indexes": write.global_indexes}
    for name, values in counts.items():
        if values is not None and len(values) != write.row_count:
            raise InvalidArgumentError(
                f"got {len(values)} {name} for {write.row_count} samples; give one a sample", field=name
            )
    if write.keys is not None:
        unique = set(write.keys) if write.names is None else write.names.index_of.keys()
        if len(unique) != len(write.keys):
            seen: set[str] = set()
            twice = next(key for key in write.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidArgumentError(f"key {twice!r} is given twice in one put; keys are unique", field="keys")
        if "" in unique:
            raise InvalidArgumentError("a key is empty; give every sample of the put a key", field="keys")


def _by_key(partition: Partition, write: SampleWrite) -> Indexes:
    keys = write.keys or ()
    index_of = partition.key_index
    known = np.full(len(keys), -1, np.int64)
    # Of two large sets it is quicker to see that nothing is in both than where each is.
    if index_of and not (write.names is not None and write.names.index_of.keys().isdisjoint(index_of.keys())):
        known = np.fromiter(map(index_of.get, keys, itertools.repeat(-1)), np.int64, len(keys))
    if write.key_mode == "new" and bool((known >= 0).any()):
        key = keys[int(np.argmax(known >= 0))]
        raise AlreadyExistsError(
            f"key {key!r} is known in partition {partition.partition_id!r}; use key_mode='upsert' to write to it"
        )
    if write.key_mode == "existing" and bool((known < 0).any()):
        key = keys[int(np.argmax(known < 0))]
        raise KeyNotFoundError(
            f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, index_of)}; use "
            f"key_mode='upsert' to add it"
        )
    positions = np.full(known.size, -1, np.int64)
    is_known = known >= 0
    positions[is_known] = partition.table.find(known[is_known])
    return positions
