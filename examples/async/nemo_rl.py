"""NeMo-RL's `PromptGroupSampler` (nemo_rl/algorithms/async_utils/staleness_sampler.py) over the service.

In NeMo-RL, one object implements the policy: when rollouts may start, which groups a step takes, and which groups are
dropped.

| NeMo-RL | `admit` | `select` | `evict` |
|---|---|---|---|
| `WindowedSampler` | at once | started within the window, `freshest_first` if asked | started before it |
| `ReadyFirstSampler` | window of batches ahead | any ready group | nothing |
| `WeightFifoSampler` | window of batches ahead | the oldest version in the window, ready or not | before it |
| `InOrderSampler` | window of batches ahead | the batch dispatched for this step | of past steps |

- `admit` waits in the service for a version instead of polling every 5 ms. `reserve` creates the slots of a group; a
  put commits them, and `release` frees them. The samples' custom_meta contains the start version and the target step,
  so the buffer needs no lists.
- `select` is a claim that never waits, and `evict` keeps unfinished slots, as in NeMo-RL.
- The partition is created with `tasks=[TRAIN, ROLLOUT]`. The buffer survives a crash; the controller restores
  `dispatch_index`, as in NeMo-RL. `is_on_policy` corresponds to a window of 0, and `required_buffer_capacity` to the
  `most` of an admission.
"""

from __future__ import annotations

from typing import Literal

import tq_service as tq

PARTITION, TRAIN, ROLLOUT = "train", "train", "rollout"
Policy = Literal["windowed", "ready_first", "weight_fifo", "in_order"]


class PromptGroupSampler:
    """A staleness policy for the groups of a partition; `dispatch_index` is the index of the last admitted batch."""

    def __init__(self, client: tq.AsyncClient, policy: Policy, window: int, *, freshest_first: bool = False) -> None:
        self._client, self._policy, self._window, self.dispatch_index = client, policy, window, -1
        self._order = ["-start_version"] if freshest_first else []

    async def admit(self, max_wait: float = 3600.0) -> int | None:
        """Wait until the next batch of prompts may start; return its target step, or None."""
        if self._policy == "windowed":
            return None
        needed = max(0, self.dispatch_index + 1 - self._window)
        if await self._client.get_version(at_least=needed, max_wait=max_wait) < needed:
            raise TimeoutError(f"version {needed} was not published within {max_wait:g} s")
        self.dispatch_index += 1
        return self.dispatch_index if self._policy == "in_order" else None

    async def reserve(self, group: str, group_size: int, target_step: int | None) -> tq.BatchMeta:
        """Create the slots of a group; `put(data, metadata=slots, ack=True)` commits them."""
        meta = None if target_step is None else [{"target_step": target_step}] * group_size
        return await self._client.acquire(
            PARTITION, ROLLOUT, groups=[group], group_size=group_size, custom_meta=meta, lease=600.0, policy="default"
        )

    async def select(self, current: int, min_groups: int, max_groups: int, fields: list[str]) -> tq.BatchMeta | None:
        """Return up to `max_groups` groups for a trainer version's step; None if fewer than `min_groups` are ready."""
        column, oldest = self._oldest(current)
        if self._policy == "weight_fifo":
            found, _ = await self._client.lookup_samples(PARTITION, where=[(column, ">=", oldest)], task_name=TRAIN)
            left = [row[column] for row, is_gone in zip(found.custom_meta, found.consumed, strict=True) if not is_gone]
            oldest = min(left, default=oldest)
        operator = ">=" if self._policy in {"windowed", "ready_first"} else "=="
        batch = await self._client.claim(
            partition_id=PARTITION, task_name=TRAIN, data_fields=fields, batch_unit="group", min_batch_size=min_groups,
            batch_size=max_groups, where=[(column, operator, oldest)], order_by=self._order, max_wait=0,
        )  # fmt: skip
        return batch if batch.status == "batch" else None

    async def evict(self, current: int) -> int:
        """Clear finished groups that no step will take; return the number of cleared samples."""
        column, oldest = self._oldest(current)
        return await self._client.clear_samples(PARTITION, where=[(column, "<", oldest)], task_name=TRAIN)

    def should_abort_inflight(self, start_version: int, current: int) -> bool:
        """Return whether an unfinished group can never be selected."""
        return self._policy == "windowed" and start_version < current - self._window

    def _oldest(self, current: int) -> tuple[str, int]:
        if self._policy == "in_order":
            return "target_step", current
        return "start_version", 0 if self._policy == "ready_first" else current - self._window
