"""AReaL's `StalenessManager` (areal/infra/staleness_manager.py) over the service: how many rollouts may start now.

AReaL counts in one process: `(max_staleness + version + 1) * batch - (accepted + running)`, and at most
`max_concurrent_rollouts` running. Here the service counts. `Admission(max_staleness=)` has the same capacity as long as
one batch is trained per version, since batches up to the published version are no longer outstanding.

- A rollout holds a slot from `on_rollout_submitted` on. Any number of processes can therefore submit rollouts, and a
  dead process's slot becomes free when its lease expires. AReaL's counters belong to one process, and are initialized
  again after a crash.
- The version is the published version: instead of AReaL's `set_version`, call `publish_version(version, trained=...)`.
- A rejected rollout frees its slot both in AReaL and in the service. AReaL does not bound the staleness of a slow
  rollout. In the service, batches wait for slow rollouts; see "The bound" in docs/asynchronous_rl.md.
- The capacity is never negative. A trainer that returns to a checkpoint publishes with `rewind=True`.
"""

from __future__ import annotations

from typing import Any

import tq_service as tq

PARTITION, ACTOR, ROLLOUT = "train", "actor", "rollout"


class StalenessManager:
    """Admits rollouts (`on_rollout_submitted`) and takes their results."""

    def __init__(
        self, client: tq.Client, max_concurrent_rollouts: int, consumer_batch_size: int, max_staleness: int
    ) -> None:
        self._client, self._concurrent = client, max(1, max_concurrent_rollouts)
        self._admission = tq.Admission(
            ACTOR, max_staleness=max_staleness, global_batch=consumer_batch_size, most_running=self._concurrent
        )
        client.create_partition(PARTITION, tasks=[ACTOR, ROLLOUT], admissions=[self._admission])

    def get_pending_limit(self) -> int:
        """Return the maximum number of outstanding rollouts: admitted, but not yet part of a published version."""
        return self._admission.most

    def get_capacity(self) -> int:
        """Return how many rollouts may be submitted now."""
        tasks = self._client.describe_partition(PARTITION).tasks
        task = next(task for task in tasks if task.task_name == ACTOR)
        return min(self._concurrent - (task.running_count or 0), self._admission.most - (task.outstanding_count or 0))

    def on_rollout_submitted(self, max_wait: float = 0.0) -> tq.BatchMeta | None:
        """Return a slot for a rollout, or None if no capacity becomes available within `max_wait` seconds."""
        slot = self._client.acquire(PARTITION, ROLLOUT, lease=600.0, on_lost="remove", max_wait=max_wait)
        return slot if slot.status == "batch" else None

    def on_rollout_accepted(self, slot: tq.BatchMeta, trajectory: dict[str, Any]) -> None:
        """Store the trajectory of a rollout. From then on, trainer ranks can claim the trajectory."""
        self._client.put(slot, trajectory, ack=True)

    def on_rollout_rejected(self, slot: tq.BatchMeta) -> None:
        """Free the slot of a rollout immediately."""
        self._client.release(slot)
