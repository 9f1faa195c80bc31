"""Plans that found too little, remembered so that a partition filling row by row is not scanned for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.request import ClaimRequest
from tq_service.domain.claims.view import PartitionView
from tq_service.domain.partition import Partition
from tq_service.domain.plan import PlanRequest


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What must have changed before another attempt can find more."""

    state_version: int
    row_version: int
    consumed: tuple[int, int] | None  # where what others of the task consume may bring the end nearer


@dataclass(slots=True)
class _Way:
    """A way of asking, while calls wait that ask so."""

    waiting_count: int = 0
    failed: _Attempt | None = None


class Attempts:
    """The last failed attempt of each way of asking that calls wait in; it goes with the last of these calls.

    So what is kept needs no limit of its own: the calls that wait hold their requests anyway, and are counted.
    """

    def __init__(self, partition: Partition, task: TaskLedger) -> None:
        self._partition = partition
        self._task = task
        self._ways: dict[object, _Way] = {}

    def __len__(self) -> int:
        return len(self._ways)

    def join(self, request: ClaimRequest) -> None:
        """Count a call that waits; `leave` is called once for it."""
        self._ways.setdefault(request.signature, _Way()).waiting_count += 1

    def leave(self, request: ClaimRequest) -> None:
        """Count off a call that waits no longer."""
        way = self._ways[request.signature]
        way.waiting_count -= 1
        if way.waiting_count == 0:
            del self._ways[request.signature]

    def clear(self) -> None:
        """Forget all failed attempts."""
        for way in self._ways.values():
            way.failed = None

    def cannot_succeed_yet(self, request: ClaimRequest) -> bool:
        """Whether the partition has not changed enough since this way of asking found too little."""
        way = self._ways.get(request.signature)
        failed = None if way is None else way.failed
        return (
            failed is not None
            and self._partition.state_version == failed.state_version
            and self._partition.row_version < failed.row_version
            and failed.consumed in (None, self._consumed)
        )

    def remember(
        self, request: ClaimRequest, wanted: PlanRequest, view: PartitionView, counts: tuple[int, int]
    ) -> None:
        """Note how many rows must be written, after the view was made at `counts`, before there can be more to find."""
        way = self._ways.get(request.signature)
        if way is None:  # the last call that asks so has left while its plan was made
            return
        missing, is_closed = 1, self._partition.sealed or request.batch_spec.finite  # or soon closed, by a first sample
        # Of the class, where reading it runs no code of the sampler.
        needs_min_size = type(request.sampler).plans_below_min_size is not True
        if needs_min_size and view.exhausted and wanted.batch_unit == "sample":
            missing = wanted.min_size - view.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, view.unready_count) if view.is_plain else 1
        state_version, row_version = counts
        way.failed = _Attempt(state_version, row_version + max(1, missing), self._consumed if is_closed else None)

    @property
    def _consumed(self) -> tuple[int, int]:
        """Counts that differ whenever samples were consumed, or are leased no longer."""
        return self._task.consumed_count, self._task.leased_count
