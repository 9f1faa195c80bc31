"""The counter of outstanding units (samples, rollouts or groups) of a task with an admission.

A unit is outstanding while the task holds the unit and, after delivery, until the admission frees the unit's capacity.
A task holds its pending units and, unless the admission frees capacity on delivery, its leased units. `TaskLedger`
changes the status of rows, and this module counts the units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import Admission
from tq_service.state.groups import GroupTable, UnitCount
from tq_service.state.plan import Indexes
from tq_service.state.table import DROPPED, Column, is_open


class Held(Protocol):
    """The part of a `TaskLedger` needed to count outstanding units."""

    backlog: int
    leased_count: int
    delivered_units: tuple[int, ...]
    done_units: int
    claim: Column
    state: Column

    def is_pending(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that are unclaimed, live or held, and not skipped."""
        ...


class Outstanding:
    """The counter of one task's outstanding units.

    Args:
        admission: the task's admission.
        groups: groups of the task's partition.
    """

    def __init__(self, admission: Admission, groups: GroupTable) -> None:
        self.admission = admission
        self._groups = groups
        self._holds_leased = admission.given_back != "delivered"
        self._held = (
            None if admission.unit == "sample" else UnitCount(groups, admission.unit)
        )  # units that the task holds

    def bounds_staleness_by(self, policy: str) -> bool:
        """Return whether the admission bounds staleness in versions of this policy."""
        return self.admission.max_staleness is not None and self.admission.policy == policy

    def count(self, task: Held) -> int:
        """Return the number of the task's outstanding units."""
        if self._held is not None:
            held = self._held.count
        else:
            held = task.backlog + (task.leased_count if self._holds_leased else 0)
        return held + sum(task.delivered_units) + task.done_units

    def units_of(self, positions: Indexes) -> int:
        """Return the number of distinct units to which rows belong."""
        return self._groups.count_units(positions, self.admission.unit)

    def is_held(self, task: Held, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that the task holds."""
        claims = task.claim[rows]
        held = task.is_pending(rows)
        if self._holds_leased:
            held |= (claims < DROPPED) & is_open(task.state[rows])
        return held

    @contextlib.contextmanager
    def following(self, task: Held, positions: Indexes) -> Iterator[None]:
        """Update the count for rows changed within the `with` block; `positions` must not contain duplicates."""
        if self._held is None or not positions.size:
            yield
            return
        before = self.is_held(task, positions)
        yield
        after = self.is_held(task, positions)
        self.add(positions[after & ~before], 1)
        self.add(positions[before & ~after], -1)

    def add(self, positions: Indexes, by: int) -> None:
        """Add rows that the task now holds to the count; if `by` is -1, subtract rows that the task no longer holds."""
        if self._held is not None and positions.size:
            self._held.add(positions, by)

    def recount(self, task: Held, row_count: int) -> None:
        """Recount the units in all rows."""
        if self._held is not None:
            self._held.clear()
            self._held.add(np.flatnonzero(self.is_held(task, slice(0, row_count))), 1)
