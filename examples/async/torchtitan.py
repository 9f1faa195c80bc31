"""torchtitan's `RolloutGroupWorkBuffer` (torchtitan/experiments/rl/components/work_buffer.py) over the service.

A group of rollouts is a group of `group_size` samples: WAITING is held, INFLIGHT is held and leased to a rollout loop,
FINALIZED is live. `add_work` takes one of `max_active_rollout_groups` slots, and only `release_active_groups` frees it:
once the generators have pulled the weights trained on a group, or if a group is filtered out.

- Input, rollout and batcher loops may be separate processes. If a rollout loop dies, another loop claims its group when
  the lease expires. If a batcher or trainer dies before the release, its groups are redelivered.
- `add_work` waits for a slot itself, so `wait_for_slot` is not needed, and several input loops cannot overbook.
- The batcher takes finalized groups within a window that is anchored at the oldest group not yet taken. This module's
  sampler implements the window, so start the service with PYTHONPATH=examples/async. `Admission(max_staleness=)` needs
  no window: batches pass a slow group for as long as the group's staleness allows.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import tq_service as tq
from tq_service.samplers import Plan, PlanRequest, Sampler, View

PARTITION, ROLLOUT, BATCHER, LEASE = "work", "rollout", "batcher", 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredWindow(Sampler):
    """Takes the oldest finalized group among `window_size` group ids, starting at the oldest id not yet taken."""

    name: ClassVar[str] = "anchored_window"
    window_size: int = 1

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return one group, or None if none in the window is finalized."""
        rows = view.ready_groups(1, unit="group").rows
        ids, _ = view.values("group_id", rows[:1])
        oldest, _ = view.values("group_id", view.left(1))
        return Plan.of([rows]) if rows.size and ids[0] < oldest[0] + self.window_size else None


class RolloutGroupWorkBuffer:
    """Holds groups of rollouts between the input loop and the trainer. Each process must call `open` first."""

    def __init__(self, client: tq.AsyncClient, *, group_size: int, window_size: int = 1) -> None:
        self._client, self._group_size = client, group_size
        self._window = {"sampler": "torchtitan:AnchoredWindow", "sampler_config": {"window_size": window_size}}

    async def open(self, max_active_rollout_groups: int) -> None:
        """Create the partition."""
        limit = tq.Admission(BATCHER, most=max_active_rollout_groups, unit="group", given_back="trained")
        await self._client.create_partition(PARTITION, tasks=[ROLLOUT, BATCHER], admissions=[limit])

    async def add_work(self, group_id: int, sample: Any, timeout: float = 30.0) -> None:
        """Admit a group as WAITING once a slot is free; raises AdmissionLimitError after `timeout` seconds."""
        size, meta = self._group_size, [{"group_id": group_id}] * self._group_size
        await self._client.put(PARTITION,
            {"sample": [sample] * size}, groups=[str(group_id)] * size, group_size=size,
            custom_meta=meta, state="held", timeout=timeout,
        )  # fmt: skip

    async def claim_next(self, max_wait: float = 30.0) -> tq.BatchMeta | None:
        """Make the oldest WAITING group INFLIGHT and return it; None on timeout, or if the buffer is closed."""
        return await self._claim(max_wait, task_name=ROLLOUT, data_fields=["sample"], held=True)

    async def finalize_work(self, work: tq.BatchMeta, rollouts: dict[str, Any]) -> None:
        """Store the result of a group, which becomes FINALIZED; drops the result if the buffer was closed."""
        with contextlib.suppress(tq.errors.SampleNotFoundError):
            await self._client.put(work, rollouts, ack=True)

    async def take_finalized(self, data_fields: list[str], max_wait: float = 30.0) -> tq.BatchMeta | None:
        """Return the oldest FINALIZED group in the window; None on timeout, or if the buffer is closed."""
        return await self._claim(max_wait, task_name=BATCHER, data_fields=data_fields, **self._window)

    async def release_active_groups(self, groups: tq.BatchMeta) -> None:
        """Free the slots of trained or filtered groups."""
        await self._client.ack(groups)

    async def close(self) -> None:
        """Drop all groups of the buffer, and wake all waiting loops."""
        await self._client.seal_partition(PARTITION)
        await self._client.clear_samples(PARTITION, where=[("group_id", ">=", 0)])

    async def _claim(self, max_wait: float, **asks: Any) -> tq.BatchMeta | None:
        group = await self._client.claim(
            partition_id=PARTITION, batch_unit="group", batch_size=1, lease=LEASE, max_wait=max_wait, **asks
        )
        return group if group.status == "batch" else None
