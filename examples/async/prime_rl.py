"""prime-rl's gate, ship hold and staleness sweep (src/prime_rl/orchestrator) over the service.

Batch N trains version N - 1 and produces version N. prime-rl keeps two rules separate, and so does this example:

| prime-rl | here |
|---|---|
| dispatch gate: no new group until the inference engines have version N - 1 - TARGET_LAG | `get_version(at_least=)` |
| ship hold: `finalize_train_batch` waits for that version | `not_before_version` of the claim |
| `TrainSink._drop_stale`: traces from before N - 1 - max_off_policy_steps are dropped | `where=`, `unmatched="clear"` |
| early cancel of groups that are still being generated | their slots are held, and swept once they are finished |

On timeout, this hold ends with an error or "not_yet", whereas prime-rl's hold can wait forever. A claim waits and
sweeps in the service. The dispatchers, the orchestrator and the trainer ranks can therefore be separate processes, and
any of them can restart. `Admission(max_staleness=)` would bound staleness without dropping finished traces.
"""

from __future__ import annotations

from typing import Any

import tq_service as tq

PARTITION, TRAIN, ROLLOUT, TARGET_LAG = "train", "train", "rollout", 1


class Orchestrator:
    """Collects batch `step`, which counts from 1."""

    def __init__(self, client: tq.AsyncClient, *, batch_size: int, max_off_policy_steps: int) -> None:
        self._client, self.step = client, 1
        self._batch_size, self._max_off_policy_steps = batch_size, max_off_policy_steps

    @property
    def _needed_version(self) -> int:
        return max(0, self.step - 1 - TARGET_LAG)

    async def dispatch(self, group: str, group_size: int, max_wait: float = 30.0) -> tq.BatchMeta | None:
        """Return the slots of a group that may start, with its dispatch version, or None if the gate stays closed."""
        if await self._client.get_version(at_least=self._needed_version, max_wait=max_wait) < self._needed_version:
            return None
        return await self._client.acquire(
            PARTITION, ROLLOUT, groups=[group], group_size=group_size, lease=600.0, on_lost="fail", policy="default"
        )

    async def finish(self, slots: tq.BatchMeta, traces: dict[str, Any]) -> None:
        """Store the traces of a group, whose advantages are known once all its traces are finished."""
        await self._client.put(slots, traces, ack=True)

    async def finalize_train_batch(self, data_fields: list[str], max_wait: float = 30.0) -> tq.BatchMeta | None:
        """Ship the next batch without traces that are too stale for it. Return None if it cannot be shipped yet."""
        batch = await self._client.claim(
            partition_id=PARTITION, task_name=TRAIN, data_fields=data_fields, batch_size=self._batch_size,
            dp_rank=0, dp_size=1, batch_index=self.step - 1, not_before_version=self._needed_version,
            where=[("start_version", ">=", self.step - 1 - self._max_off_policy_steps)], unmatched="clear",
            max_wait=max_wait,
        )  # fmt: skip
        if batch.status != "batch":
            return None
        self.step += 1
        return batch

    async def on_new_version(self, version: int) -> None:
        """Record that the inference engines have loaded a version; gate and hold are checked again."""
        await self._client.publish_version(version)
