"""Plans that found too little, remembered so that a partition filling row by row is not scanned for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from tq_service.domain.asking import ClaimRequest
from tq_service.domain.partition import Partition
from tq_service.domain.plan import PlanRequest
from tq_service.domain.task import Task
from tq_service.domain.view import PartitionView

_MOST_ATTEMPTS = 4096


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What must have changed before another attempt can find more."""

    event_count: int
    touched_count: int
    consumed: tuple[int, int] | None  # where what others of the task consume may bring the end nearer


class Attempts:
    """The last attempt in vain of each way of asking."""

    def __init__(self, partition: Partition, task: Task) -> None:
        self._partition = partition
        self._task = task
        self._attempts: dict[object, _Attempt] = {}

    def clear(self) -> None:
        """Forget all of them."""
        self._attempts.clear()

    def is_in_vain(self, request: ClaimRequest) -> bool:
        """Whether the partition has not changed enough since this way of asking found too little."""
        attempt = self._attempts.get(request.signature)
        return (
            attempt is not None
            and self._partition.event_count == attempt.event_count
            and self._partition.touched_count < attempt.touched_count
            and attempt.consumed in (None, self._consumed)
        )

    def remember(
        self, request: ClaimRequest, wanted: PlanRequest, view: PartitionView, counts: tuple[int, int]
    ) -> None:
        """Note how many rows must be written, after the view was made at `counts`, before there can be more to find."""
        missing, is_closed = 1, self._partition.sealed or request.binding.finite  # or soon closed, by a first sample
        # Of the class, where reading it runs no code of the sampler.
        needs_min_size = type(request.sampler).plans_below_min_size is not True
        if needs_min_size and view.exhausted and wanted.batch_unit == "sample":
            missing = wanted.min_size - view.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, view.unready_count) if view.is_plain else 1
        self._attempts.pop(request.signature, None)
        if len(self._attempts) >= _MOST_ATTEMPTS:
            del self._attempts[next(iter(self._attempts))]
        event_count, touched_count = counts
        self._attempts[request.signature] = _Attempt(
            event_count, touched_count + max(1, missing), self._consumed if is_closed else None
        )

    @property
    def _consumed(self) -> tuple[int, int]:
        """Counts that differ whenever samples were consumed, or are leased no longer."""
        return self._task.consumed_count, self._task.leases.count
