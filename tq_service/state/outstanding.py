"""The number of outstanding units (samples, rollouts or groups) of a task that has an admission.

A unit is outstanding while the task holds it. After delivery, a unit remains outstanding until the admission frees its
capacity. A task holds its pending units. It also holds its leased units, unless the admission frees capacity on
delivery. `TaskLedger` changes the status of rows, whereas this module counts the units.
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
    """The attributes of a `TaskLedger` that are needed to count outstanding units."""

    backlog: int
    leased_count: int
    delivered_units: tuple[int, ...]
    done_units: int
    claim: Column
    state: Column

    def is_pending(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask of the unclaimed rows that are live or held and have not been skipped."""
        ...


class Outstanding:
    """Counts the outstanding units of one task.

    Args:
        admission: limits on the task's outstanding units.
        groups: table of the groups in the task's partition.
    """

    def __init__(self, admission: Admission, groups: GroupTable) -> None:
        self.admission = admission
        self._groups = groups
        self._holds_leased = admission.given_back != "delivered"
        self._held = (
            None if admission.unit == "sample" else UnitCount(groups, admission.unit)
        )  # units that the task holds

    def bounds_staleness_by(self, policy: str) -> bool:
        """Return whether the admission limits staleness, measured in versions of `policy`."""
        return self.admission.max_staleness is not None and self.admission.policy == policy

    def count(self, task: Held) -> int:
        """Return the number of outstanding units of the task."""
        if self._held is not None:
            held = self._held.count
        else:
            held = task.backlog + (task.leased_count if self._holds_leased else 0)
        return held + sum(task.delivered_units) + task.done_units

    def units_of(self, positions: Indexes) -> int:
        """Return the number of distinct units that contain the given rows."""
        return self._groups.count_units(positions, self.admission.unit)

    def is_held(self, task: Held, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask that marks which of the given rows the task holds."""
        claims = task.claim[rows]
        held = task.is_pending(rows)
        if self._holds_leased:
            held |= (claims < DROPPED) & is_open(task.state[rows])
        return held

    @contextlib.contextmanager
    def following(self, task: Held, positions: Indexes) -> Iterator[None]:
        """Adjust the count for rows that the `with` block changes. `positions` must be distinct."""
        if self._held is None or not positions.size:
            yield
            return
        before = self.is_held(task, positions)
        yield
        after = self.is_held(task, positions)
        self.add(positions[after & ~before], 1)
        self.add(positions[before & ~after], -1)

    def add(self, positions: Indexes, by: int) -> None:
        """Add rows that the task now holds to the count or, if `by` is -1, subtract rows that it no longer holds."""
        if self._held is not None and positions.size:
            self._held.add(positions, by)

    def recount(self, task: Held, row_count: int) -> None:
        """Recount the held units across all rows."""
        if self._held is not None:
            self._held.clear()
            self._held.add(np.flatnonzero(self.is_held(task, slice(0, row_count))), 1)
