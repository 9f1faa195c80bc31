"""The end of a task's epoch: what it consumed of a partition, and what became of the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No further batch comes; numbers of samples, as they were when the end was found.

    Attributes:
        consumed: consumed by the task, cleared ones included.
        cleared: cleared before the task took them.
        failed: failed before the task took them.
        dead_lettered: delivered too often without being acknowledged, cleared ones included.
        excluded: ruled out by the task's `where`.
        in_incomplete_groups: of groups that cannot be delivered whole any more.
        left_over: ready, but in no plan: a short last batch with `drop_last`, or what the sampler leaves out.
    """

    consumed: int
    cleared: int = 0
    failed: int = 0
    dead_lettered: int = 0
    excluded: int = 0
    in_incomplete_groups: int = 0
    left_over: int = 0

    @property
    def skipped(self) -> int:
        """Samples that the task never gets."""
        reasons = (
            self.cleared, self.failed, self.dead_lettered, self.excluded, self.in_incomplete_groups, self.left_over
        )  # fmt: skip
        return sum(reasons)
