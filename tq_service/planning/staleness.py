"""Bounded staleness: the rule for selecting a plan's units so that every unit meets its deadline.

The task's admission defines whether a unit is a sample, a rollout or a group. The deadline of a unit is its
`start_version` plus `max_staleness`. When the next plan is trained on, the version is at most `V`. `V` is the published
version plus the number of planned batches that have not yet been reported as trained. Each plan contains `B` units.
According to the rule, for every `j`, at most `j * B` outstanding units outside the plan may be due by `V + j`.
Outstanding units include both ready units and units that are still being generated. The section "The bound" in
docs/asynchronous_rl.md proves that this rule bounds staleness.

The rule therefore limits how many units in a plan may be due after `V`, after `V + 1`, and so on. The permitted plans
are the independent sets of a laminar matroid. A greedy choice in any order therefore finds a plan of maximum size
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
    """The unplanned units of a task and their deadlines.

    After a trainer has restarted from an old checkpoint, more units may be due than fit into the plans before their
    deadlines. Each plan then includes as many of the units with the earliest deadlines as possible.

    Args:
        deadlines: latest permitted training version of each unit, as an array of shape `(n,)`.
        version: latest policy version at which the trainer can train on the next plan.
        max_staleness: maximum number of versions by which a unit may be stale (see `Admission`).
        batch_size: number of units per plan.

    Attributes:
        due_in: number of versions from `version` to each unit's deadline, clipped to the range from 0 to
            `max_staleness`. The array has shape `(n,)`.
    """

    def __init__(self, deadlines: Indexes, version: int, max_staleness: int, batch_size: int) -> None:
        self.due_in = np.clip(deadlines - version, 0, max_staleness)
        self._batch_size = batch_size
        self._due = self._due_counts(np.ones(deadlines.size, np.bool_), max_staleness)
        planned = np.arange(self._due.size) * batch_size
        self._most_left = np.maximum(planned, self._due - batch_size)

    def _due_counts(self, is_counted: NDArray[np.bool_], max_staleness: int) -> Indexes:
        """Return how many of the counted units are due by `version`, by `version + 1`, and so on.

        The result has `max_staleness + 1` elements.
        """
        return np.cumsum(np.bincount(self.due_in[is_counted], minlength=max_staleness + 1))

    def choose(self, units: Sequence[int] | Indexes) -> Indexes:
        """Select up to `batch_size` of the given units, in order, such that a plan of these units obeys the rule.

        Args:
            units: ready units, in order of preference.
        """
        chosen = np.asarray(units, np.int64)
        # For each next version except the last, the number of units due after that version that the plan may still
        # include.
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
        """Return whether a plan may take exactly these units and leave all others unplanned."""
        is_left = np.ones(self.due_in.size, np.bool_)
        is_left[units] = False
        return bool((self._due_counts(is_left, self._due.size - 1) <= self._most_left).all())

    def waits_for(self, ready: Indexes) -> Indexes:
        """Return the units that block plans because they are not ready.

        A unit blocks plans if it is due before all units that could replace it.
        """
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
    """Check that a claim of a task with `max_staleness` requests batches of the admission's size and unit.

    Raises:
        InvalidArgumentError: the claim comes from a queue worker, reuses samples, or requests a different number or
            kind of units.
    """
    spec, wanted = request.batch_spec, request.plan_request
    unit, size = admission.unit, admission.global_batch
    whose = f"task {request.task_name!r} has max_staleness {admission.max_staleness}, which"
    if request.rank is None:
        raise InvalidArgumentError(
            f"{whose} applies only to batches of trainer ranks; pass dp_rank, dp_size and batch_index", field="dp_rank"
        )
    if spec.max_uses != 1:
        raise InvalidArgumentError(
            f"{whose} requires each sample to be trained on once, but max_uses is {spec.max_uses}; omit max_uses",
            field="max_uses",
        )
    if wanted.batch_unit != unit or wanted.total_size != size:
        raise InvalidArgumentError(
            f"{whose} requires batches of {size} {unit}s over all ranks; got {wanted.batch_size} {wanted.batch_unit}s "
            f"for each of {wanted.rank_count} ranks. Use batch_unit {unit!r} and a batch_size that yields a total of "
            f"{size}, or create the partition with a different global_batch",
            field="batch_size",
            metadata={"got": str(wanted.total_size), "expected": str(size)},
        )


class StalenessBound:
    """The rows that the staleness bound permits in a task's plans, computed on first use and cached.

    While the table is pinned, other threads may also use this object.

    Args:
        partition: partition that contains the units.
        task: the task's ledger.
        admission: the task's admission, which sets the staleness bound.
        left: function that returns the positions of all rows that the task has not consumed. The result may include
            other rows.
        is_ready: function that returns a mask of the rows that are ready if the staleness bound is ignored.
        in_order: function that sorts rows by preference.
        no_more: True if no more rows can be inserted. In that case, groups without a declared size count as complete,
            and a plan may contain fewer units than a full batch.
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
        """Latest policy version at which the trainer can train on the next plan; None if no version is published."""
        policy = self._partition.policies.get(self._admission.policy)
        return None if policy is None else policy.version + len(self._task.delivered_units)

    def _units(self, version: int) -> tuple[DueUnits, Indexes, Indexes]:
        """Return the unplanned units, the positions of their rows, and the index of each row's unit."""
        positions = self._left()
        positions = positions[self._task.is_pending(positions)]
        ids, unit_of = np.unique(self._ids(positions), return_inverse=True)
        starts, present = self._partition.meta.typed(START_VERSION, positions)
        staleness = self._admission.max_staleness or 0
        deadlines = np.full(ids.size, np.iinfo(np.int64).max)
        np.minimum.at(deadlines, unit_of, np.where(present, starts, 0).astype(np.int64) + staleness)
        return DueUnits(deadlines, version, staleness, self._admission.global_batch), positions, unit_of

    def _ids(self, positions: Indexes) -> Indexes:
        """Return each row's unit id."""
        slots = self._slots(positions)
        return np.where(slots < 0, -2 - positions, slots)

    def _slots(self, positions: Indexes) -> Indexes:
        """Return, for each row, the slot of its group or rollout, or -1 if the row itself is a unit."""
        if self._admission.unit == "sample" or not self._partition.groups.in_use:
            return np.full(positions.size, -1)
        return self._partition.groups.of_unit(self._admission.unit, positions)

    def _ready_units(self, positions: Indexes, unit_of: Indexes) -> Indexes:
        """Return the complete units whose rows are all ready, most preferred units first."""
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
        """Return a mask of the rows that the next plan may include.

        The mask is False for all rows unless the permitted rows suffice for a full batch.
        """
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
        """Return whether the staleness bound currently permits a plan to leave all other rows unplanned.

        Args:
            plan: plan that the sampler returned.
            taken: table positions of the rows in `plan.named`.
            sampler: name of the sampler that returned the plan.
            is_last: whether the plan may contain fewer units than a full batch.

        Raises:
            SamplerError: the plan reuses samples, or does not contain exactly one batch of units.
        """
        unit, expected, count = self._admission.unit, self._admission.global_batch, np.unique(self._ids(taken)).size
        if plan.is_reusing or (count != expected and not (is_last and count < expected)):
            raise SamplerError(
                f"sampler {sampler!r} selected {count} {unit}s for a batch of task {self._task.name!r}; expected "
                f"{expected} distinct {unit}s, because the task's max_staleness requires batches of that size. "
                f"Use a sampler that selects batch_size {unit}s for each rank, such as 'sequential'",
                metadata={"sampler": sampler},
            )
        if (version := self._version) is None:
            return False
        due, positions, unit_of = self._units(version)
        return due.permits(np.unique(unit_of[np.isin(positions, taken)]))

    def staleness_of(self, planned: Indexes) -> int | None:
        """Return the maximum staleness that the latest plan's rows will have when they are trained on.

        Return None if the rows no longer exist or if no version has been published.
        """
        starts, present = self._partition.meta.typed(START_VERSION, planned[planned >= 0])
        version = self._version
        return int(version - 1 - starts[present].min()) if version is not None and present.any() else None

    def awaited(self) -> Indexes:
        """Return the positions of the unready rows that block plans, grouped by unit."""
        return self._awaited()[0]

    def _awaited(self) -> tuple[Indexes, Indexes, int]:
        """Return the result of `awaited`, the number of rows in each awaited unit, and the number of ready units."""
        if (version := self._version) is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), 0
        due, positions, unit_of = self._units(version)
        ready = self._ready_units(positions, unit_of)
        awaited = np.flatnonzero(np.isin(unit_of, due.waits_for(ready)))
        by_unit = awaited[np.argsort(unit_of[awaited], kind="stable")]
        return positions[by_unit], np.unique(unit_of[by_unit], return_counts=True)[1], ready.size

    def late(self) -> Evicted | None:
        """Return the late units that must be evicted before a batch can be planned, or None if there are none."""
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
            unit=self._admission.unit,
        )
