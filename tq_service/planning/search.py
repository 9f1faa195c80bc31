"""One look for the next plan of a claim, and what it can come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from tq_service.errors import SamplerError
from tq_service.planning.grouping import Grouping
from tq_service.planning.view import PartitionView, ScanStarts, ScanWatch
from tq_service.schema import EndCounts
from tq_service.state.ledger import RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, LengthSource, Plan
from tq_service.state.request import ClaimRequest


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that may be recorded in the step of the event loop in which it is returned.

    Attributes:
        plan: as it is recorded.
        positions: of `plan.named`, in the table of this moment.
        grouping: what its groups are; None where its sampler took no whole ones.
        length: what its sampler needs of each sample.
    """

    plan: RecordedPlan
    positions: Indexes
    grouping: Grouping | None
    length: LengthSource | None


@dataclass(frozen=True, slots=True)
class Miss:
    """There is no plan, and another look is of no use before something has changed.

    So a partition that fills row by row is not scanned for each of them, nor at its end for each waiting claim.

    Attributes:
        state_version: of the partition when the search was begun.
        row_version: that the partition must reach.
        consumed: rows consumed and leased by the task then, where a change of these may bring the end, or is after it;
            else None.
    """

    state_version: int = -1
    row_version: int = 0
    consumed: tuple[int, int] | None = None

    def is_current(self, partition: Partition, task: TaskLedger) -> bool:
        """Whether too little has changed for another look to be worth while."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFound(Miss):
    """No plan follows, unless something changes."""

    end: EndCounts


Found: TypeAlias = Planned | Miss

NOT_LOOKED = Miss()  # is never current
LOST = Miss()  # nor is this: other claims, or changes, were quicker than a plan


class Search:
    """Looks once for the next plan of a claim, or for the end of its task.

        plan of `view` for `wanted` -> conclude
            |none
        begins_last? -yes-> plan of `view` for `wanted` -> conclude
            |no                 |none
        conclude               end

    It reads only, and runs no sampler. In one step of the event loop it is of one moment; over several of them, a plan
    is of use if its rows are ready still, and an end if nothing has changed.

    Attributes:
        view: what the sampler sees.
        wanted: what it is asked for.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        starts: ScanStarts,
        request: ClaimRequest,
        length: LengthSource | None,
        *,
        watch: ScanWatch | None = None,
        look_past: int = 0,
    ) -> None:
        """Begin; for `length`, `watch` and `look_past` see `PartitionView`."""
        self._partition = partition
        self._task = task
        self._starts = starts
        self._request = request
        self._length = length
        self._watch = watch
        self._look_past = look_past
        self._begun_at = self._marks
        self._consumed = task.consumed_count, task.leased_count
        self.wanted = request.plan_request
        self.view = self._view()

    @property
    def _marks(self) -> tuple[int, int, int, int, int]:
        """Versions of all that plans depend on; what is equal at two moments has not changed between them."""
        partition, task = self._partition, self._task
        return *partition.version, task.serial, task.leased_count, task.epoch

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since the search was begun."""
        return self._marks == self._begun_at

    def _view(self, *, no_more: bool = False) -> PartitionView:
        return PartitionView(
            self._partition, self._task, self._starts, self._request.batch_spec, self._length,
            watch=self._watch, no_more=no_more, look_past=self._look_past,
        )  # fmt: skip

    def begins_last(self) -> bool:
        """Have the last, short batch planned if no more rows can become ready; return whether that is so.

        Raises:
            MustBeAwaited: the event loop has no time to see.
        """
        partition, batch_spec = self._partition, self._request.batch_spec
        is_closed = partition.sealed or (batch_spec.finite and partition.may_end_finite)
        if self._look_past or not is_closed or not self.is_current or self.view.may_become_ready():
            return False
        self.wanted = replace(self.wanted, min_size=self.wanted.total_size if batch_spec.drop_last else 1)
        self.view = self._view(no_more=True)
        return True

    def end(self) -> EndFound:
        """Return the end, after there was no last batch.

        Raises:
            MustBeAwaited: the event loop has no time to count it.
        """
        state_version, row_version, *_ = self._begun_at
        return EndFound(state_version, row_version + 1, self._consumed, end=self.view.end())

    def conclude(self, plan: Plan | None) -> Found:
        """Return a plan as it may be recorded in this step of the event loop, or why there is none.

        Raises:
            SamplerError: its rows were not ready although nothing has changed.
            MissingLengthError: see `PartitionView.check_length_field`.
        """
        if plan is None:
            if self._look_past:
                return NOT_LOOKED
            self.view.check_length_field()
            return self._miss()
        if self._task.epoch != self._begun_at[-1]:  # what was left in it is not what there is now
            return LOST
        recorded = RecordedPlan.of(plan, self._request.batch_spec.micro_batch_size)
        positions = self.view.still_ready(recorded.named)
        if positions is None:
            state_version, _, *others = self._begun_at  # rows that are only written to stay ready
            if (state_version, *others) != (self._marks[0], *self._marks[2:]):
                return LOST
            sampler = self._request.sampler.name
            raise SamplerError(
                f"sampler {sampler!r} returned rows that were not ready for this claim; return rows of view.ready() or "
                f"view.ready_groups() only",
                metadata={"sampler": sampler},
            )
        max_uses = self._request.batch_spec.max_uses
        if max_uses > 1 or recorded.is_reusing:
            recorded = recorded.consuming(self._spent(recorded.rows, max_uses))
            positions = self._partition.table.find(recorded.named)
        return Planned(recorded, positions, self.view.grouping, self._length)

    def _miss(self) -> Miss:
        """Return how many rows must be written, after the search was begun, before there can be more to find."""
        view, wanted, batch_spec = self.view, self.wanted, self._request.batch_spec
        missing, is_closed = 1, self._partition.sealed or batch_spec.finite  # or soon closed, by a first sample
        # Of the class, where reading it runs no code of the sampler.
        needs_min_size = type(self._request.sampler).plans_below_min_size is not True
        if needs_min_size and view.exhausted and wanted.batch_unit == "sample":
            missing = wanted.min_size - view.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, view.unready_count) if view.is_plain else 1
        state_version, row_version, *_ = self._begun_at
        return Miss(state_version, row_version + max(1, missing), self._consumed if is_closed else None)

    def _spent(self, rows: Indexes, max_uses: int) -> Indexes:
        """Return the rows of a plan that were used often enough once it is recorded; of no number none."""
        if max_uses == 1:
            return rows[:0]
        rows, counts = np.unique(rows, return_counts=True)
        spent: Indexes = rows[self._task.uses.data[self._partition.table.find(rows)] + counts >= max_uses]
        return spent
