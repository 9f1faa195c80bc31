"""Counts the units that are outstanding for a task with an admission: samples, or groups.

A unit is outstanding while the task holds it, and from its delivery until it gives its place back. What a task holds is
what it has pending and, unless places are given back with the delivery, what is leased. `TaskLedger` says what happens
to rows; here it is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import Admission
from tq_service.state.groups import GroupTable
from tq_service.state.plan import Indexes
from tq_service.state.table import DROPPED, Column, is_open


class Held(Protocol):
    """What a task knows of its rows; see `TaskLedger`."""

    backlog: int
    leased_count: int
    delivered_units: tuple[int, ...]
    done_units: int
    claim: Column
    state: Column

    def is_pending(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows are left and not skipped."""
        ...


class Outstanding:
    """What is outstanding for one task.

    Args:
        admission: that of the task.
        groups: those of its partition.
    """

    def __init__(self, admission: Admission, groups: GroupTable) -> None:
        self.admission = admission
        self._groups = groups
        self._is_by_group = admission.unit == "group"
        self._holds_leased = admission.given_back != "delivered"
        self._member_counts = np.zeros(0, np.int64)  # by slot: members of a group that the task holds
        self._group_count = self._ungrouped_count = 0  # that it holds, where groups are counted

    def bounds_staleness_by(self, policy: str) -> bool:
        """Whether staleness is bounded, in versions of this policy."""
        return self.admission.max_staleness is not None and self.admission.policy == policy

    def count(self, task: Held) -> int:
        """Return the units that are outstanding for the task."""
        if self._is_by_group:
            held = self._group_count + self._ungrouped_count
        else:
            held = task.backlog + (task.leased_count if self._holds_leased else 0)
        return held + sum(task.delivered_units) + task.done_units

    def units_of(self, positions: Indexes) -> int:
        """Return how many units some rows are of."""
        if not self._is_by_group:
            return int(positions.size)
        slots = self._groups.of_rows[positions]
        return int(np.unique(slots[slots >= 0]).size + np.count_nonzero(slots < 0))

    def is_held(self, task: Held, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which of some rows the task holds."""
        claims = task.claim[rows]
        held = task.is_pending(rows)
        if self._holds_leased:
            held |= (claims < DROPPED) & is_open(task.state[rows])
        return held

    @contextlib.contextmanager
    def following(self, task: Held, positions: Indexes) -> Iterator[None]:
        """Count what becomes of some rows in the `with`; each is named once."""
        if not self._is_by_group or not positions.size:
            yield
            return
        before = self.is_held(task, positions)
        yield
        after = self.is_held(task, positions)
        self.add(positions[after & ~before], 1)
        self.add(positions[before & ~after], -1)

    def add(self, positions: Indexes, by: int) -> None:
        """Count rows that the task holds from now on, or does not hold any more where `by` is -1."""
        if not self._is_by_group or not positions.size:
            return
        slots = self._groups.of_rows[positions]
        self._ungrouped_count += by * int(np.count_nonzero(slots < 0))
        slots, counts = np.unique(slots[slots >= 0], return_counts=True)
        if not slots.size:
            return
        if (missing := int(slots[-1]) + 1 - self._member_counts.size) > 0:
            self._member_counts = np.append(self._member_counts, np.zeros(missing + self._member_counts.size, np.int64))
        before = self._member_counts[slots]
        after = self._member_counts[slots] = before + by * counts
        self._group_count += int(np.count_nonzero(after)) - int(np.count_nonzero(before))

    def recount(self, task: Held, row_count: int) -> None:
        """Count all rows anew."""
        if self._is_by_group:
            self._member_counts[:] = 0
            self._group_count = self._ungrouped_count = 0
            self.add(np.flatnonzero(self.is_held(task, slice(0, row_count))), 1)
