"""Bounded staleness: which units a plan may take so that no unit is trained later than its deadline.

Units are samples or groups, as the admission of the task counts them. The deadline of a unit is its `start_version`
plus `max_staleness`. A plan is trained at the version `V` at the latest: the published one, plus the number of batches
that are planned and not reported as trained with a publication. It takes `B` units, and leaves for each `j` at most
`j * B` outstanding units that are due by `V + j`, whether they are ready or still being generated. That this bounds
staleness is proved in docs/asynchronous_rl.md, "The bound".

The sets that a plan may take are the independent sets of a laminar matroid: at most so many units that are due later
than `V`, later than `V + 1`, and so on. So the greedy choice, in whichever order the task wants, finds a largest one
(Schrijver, "Combinatorial Optimization", 2003, section 40.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError, SamplerError
from tq_service.schema import START_VERSION, Admission, EvictionCode
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, Indexes


class DueUnits:
    """The units that a task has yet to plan, by when they are due.

    Where more are due than plans can take in time, as after a trainer has gone back further than the published version,
    a plan takes as many of those that are due first as it can.

    Args:
        deadlines: version by which each unit must be trained `(n,)`.
        version: at which the next plan is trained at the latest.
        max_staleness: see `Admission`.
        batch_size: units of a plan.

    Attributes:
        due_in: in how many versions after `version` each unit is due `(n,)`, from 0 to `max_staleness`.
    """

    def __init__(self, deadlines: Indexes, version: int, max_staleness: int, batch_size: int) -> None:
        self.due_in = np.clip(deadlines - version, 0, max_staleness)
        self._batch_size = batch_size
        self._due = self._due_counts(np.ones(deadlines.size, np.bool_), max_staleness)
        planned = np.arange(self._due.size) * batch_size
        self._most_left = np.maximum(planned, self._due - batch_size)

    def _due_counts(self, is_counted: NDArray[np.bool_], max_staleness: int) -> Indexes:
        """Return how many of some units are due by each of the next versions `(max_staleness + 1,)`."""
        return np.cumsum(np.bincount(self.due_in[is_counted], minlength=max_staleness + 1))

    def choose(self, units: Sequence[int] | Indexes) -> Indexes:
        """Return which units a plan takes, in order: those it may, `batch_size` of them at most.

        Args:
            units: those that are ready, in the order in which they are wanted.
        """
        chosen = np.asarray(units, np.int64)
        # How many may be due later than each of the next versions but the last, behind which none is.
        most_later = (self._batch_size - (self._due - self._most_left))[:-1].tolist()
        if min(most_later, default=self._batch_size) >= self._batch_size:
            return chosen[: self._batch_size]
        taken = []
        for unit in chosen.tolist():
            earlier = range(int(self.due_in[unit]))
            if all(most_later[each] > 0 for each in earlier):
                taken.append(unit)
                for each in earlier:
                    most_later[each] -= 1
                if len(taken) == self._batch_size:
                    break
        return np.asarray(taken, np.int64)

    def permits(self, units: Indexes) -> bool:
        """Whether a plan may take these units, and leave the others."""
        is_left = np.ones(self.due_in.size, np.bool_)
        is_left[units] = False
        return bool((self._due_counts(is_left, self._due.size - 1) <= self._most_left).all())

    def waits_for(self, ready: Indexes) -> Indexes:
        """Return the units for which plans wait: not ready, and due before all that a plan could take instead."""
        chosen = self.choose(ready)
        if chosen.size == self._batch_size and self.permits(chosen):
            return chosen[:0]
        is_late = np.ones(self.due_in.size, np.bool_)
        is_late[ready] = False
        left = np.ones(self.due_in.size, np.bool_)
        left[chosen] = False
        exceeded = np.flatnonzero(self._due_counts(left, self._due.size - 1) > self._most_left)
        return np.flatnonzero(is_late & (self.due_in <= (exceeded.max() if exceeded.size else -1)))


def check_bounded_claim(request: ClaimRequest, admission: Admission) -> None:
    """Refuse a claim of a task with a `max_staleness` that does not ask for batches as its admission counts them.

    Raises:
        InvalidArgumentError: it is of a queue worker, for another number of units, or for samples that come again.
    """
    spec, wanted = request.batch_spec, request.plan_request
    unit, size = admission.unit, admission.global_batch
    whose = f"task {request.task_name!r} has max_staleness {admission.max_staleness}, which"
    if request.rank is None:
        raise InvalidArgumentError(
            f"{whose} bounds the batches of trainer ranks; give dp_rank, dp_size and batch_index", field="dp_rank"
        )
    if spec.max_uses != 1:
        raise InvalidArgumentError(
            f"{whose} holds for samples that are trained once, got max_uses {spec.max_uses}; leave it out",
            field="max_uses",
        )
    if wanted.batch_unit != unit or wanted.total_size != size:
        raise InvalidArgumentError(
            f"{whose} counts batches of {size} {unit}s over all ranks, got {wanted.batch_size} {wanted.batch_unit}s "
            f"for each of {wanted.rank_count} ranks; ask for batch_unit {unit!r} and a batch_size that gives {size}, "
            f"or create the partition with another global_batch",
            field="batch_size",
            metadata={"got": str(wanted.total_size), "expected": str(size)},
        )


class StalenessBound:
    """What plans of a task with a `max_staleness` may take of its rows, as they are when that is first asked.

    Another thread may ask as well, while the table is pinned.

    Args:
        partition: that of the task.
        task: the task.
        admission: that of the task.
        left: returns the positions of all rows that are left for the task, or more.
        is_ready: returns which of some rows are ready but for this bound.
        in_order: returns rows in the order in which they are wanted.
        no_more: whether no new rows come: groups that declared no size are complete then, and a plan may be short.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        admission: Admission,
        *,
        left: Callable[[], Indexes],
        is_ready: Callable[[Indexes], NDArray[np.bool_]],
        in_order: Callable[[Indexes], Indexes],
        no_more: bool = False,
    ) -> None:
        self._partition = partition
        self._task = task
        self._admission = admission
        self._left = left
        self._is_ready = is_ready
        self._in_order = in_order
        self._no_more = no_more
        self._allowed: Indexes | None = None

    @property
    def _version(self) -> int | None:
        """The version at which the next plan is trained at the latest; None: none is published."""
        policy = self._partition.policies.get(self._admission.policy)
        return None if policy is None else policy.version + len(self._task.delivered_units)

    def _units(self, version: int) -> tuple[DueUnits, Indexes, Indexes]:
        """Return the units, the positions of their rows, and the unit of each of these."""
        positions = self._left()
        positions = positions[self._task.is_pending(positions)]
        ids, unit_of = np.unique(self._ids(positions), return_inverse=True)
        starts, present = self._partition.meta.typed(START_VERSION, positions)
        staleness = self._admission.max_staleness or 0
        deadlines = np.full(ids.size, np.iinfo(np.int64).max)
        np.minimum.at(deadlines, unit_of, np.where(present, starts, 0).astype(np.int64) + staleness)
        return DueUnits(deadlines, version, staleness, self._admission.global_batch), positions, unit_of

    def _ids(self, positions: Indexes) -> Indexes:
        """Return the id of the unit of each row."""
        slots = self._slots(positions)
        return np.where(slots < 0, -2 - positions, slots)

    def _slots(self, positions: Indexes) -> Indexes:
        """Return the group that is the unit of each row, -1 for one that is a unit of its own."""
        if self._admission.unit == "sample" or not self._partition.groups.in_use:
            return np.full(positions.size, -1)
        return self._partition.groups.of_rows[positions]

    def _ready_units(self, positions: Indexes, unit_of: Indexes) -> Indexes:
        """Return the units of which all rows are ready, and no more come, in the order in which they are wanted."""
        is_ready, slots = self._is_ready(positions), self._slots(positions)
        if (named := slots[slots >= 0]).size:
            is_ready[slots >= 0] &= self._partition.groups.is_complete(named, None, no_more=self._no_more)
        is_whole = np.bincount(unit_of, ~is_ready) == 0
        by_position = np.argsort(positions)
        wanted = self._in_order(positions[is_whole[unit_of]])
        units = unit_of[by_position[np.searchsorted(positions, wanted, sorter=by_position)]]
        ready, first = np.unique(units, return_index=True)
        return ready[np.argsort(first)]

    def allows(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which of some rows the next plan may take: those of as many units as it needs, or none."""
        if self._allowed is None:
            self._allowed = self._choose()
        positions = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return np.isin(positions, self._allowed)

    def _choose(self) -> Indexes:
        if (version := self._version) is None:
            return np.zeros(0, np.int64)
        due, positions, unit_of = self._units(version)
        chosen = due.choose(self._ready_units(positions, unit_of))
        is_whole = chosen.size == self._admission.global_batch or (self._no_more and due.permits(chosen))
        return positions[np.isin(unit_of, chosen)] if is_whole else positions[:0]

    def permits(self, plan: RecordedPlan, taken: Indexes, sampler: str, *, is_last: bool) -> bool:
        """Whether a plan may take its rows now, and leave the others.

        Args:
            plan: the plan.
            taken: positions of `plan.named`.
            sampler: that made the plan.
            is_last: whether it may be short.

        Raises:
            SamplerError: it is not for the units of a batch.
        """
        unit, expected, count = self._admission.unit, self._admission.global_batch, np.unique(self._ids(taken)).size
        if plan.is_reusing or (count != expected and not (is_last and count < expected)):
            raise SamplerError(
                f"sampler {sampler!r} took {count} {unit}s for a batch of task {self._task.name!r}, expected "
                f"{expected}, each once: its max_staleness counts batches of global_batch {unit}s. Use a sampler that "
                f"takes batch_size for each rank, such as 'sequential'",
                metadata={"sampler": sampler},
            )
        if (version := self._version) is None:
            return False
        due, positions, unit_of = self._units(version)
        return due.permits(np.unique(unit_of[np.isin(positions, taken)]))

    def staleness_of(self, planned: Indexes) -> int | None:
        """Return how old the oldest of some rows is at the latest when they are trained, which were planned last.

        None where they are gone, or nothing is published any more.
        """
        starts, present = self._partition.meta.typed(START_VERSION, planned[planned >= 0])
        version = self._version
        return int(version - 1 - starts[present].min()) if version is not None and present.any() else None

    def awaited(self) -> Indexes:
        """Return the positions of rows that are not ready and that plans have to wait for, unit by unit."""
        return self._awaited()[0]

    def _awaited(self) -> tuple[Indexes, Indexes, int]:
        """Return the same, the sizes of their units, and how many units are ready."""
        if (version := self._version) is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), 0
        due, positions, unit_of = self._units(version)
        ready = self._ready_units(positions, unit_of)
        awaited = np.flatnonzero(np.isin(unit_of, due.waits_for(ready)))
        by_unit = awaited[np.argsort(unit_of[awaited], kind="stable")]
        return positions[by_unit], np.unique(unit_of[by_unit], return_counts=True)[1], ready.size

    def late(self) -> Evicted | None:
        """Return the units to be evicted, without which a batch could be planned; None if there are none."""
        if self._admission.late == "wait":
            return None
        positions, sizes, ready_count = self._awaited()
        if not sizes.size or (ready_count < self._admission.global_batch and not self._no_more):
            return None
        first = positions[np.cumsum(sizes) - sizes]
        return Evicted(
            rows=self._partition.table.index[positions],
            sizes=sizes,
            reasons=np.full(sizes.size, EvictionCode.LATE, np.uint8),
            is_group=self._slots(first) >= 0,
        )
