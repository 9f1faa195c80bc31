"""verl's asynchronous `ReplayBuffer.sample` (verl/trainer/ppo/v1/replay_buffer.py) over the service.

verl lists all keys every 2 seconds; the trainer evicts, counts, refills, waits and selects. Here, `sample` is one
claim: the service wakes the claim, and evicts and refills groups in the same change that plans the batch.

| verl | here |
|---|---|
| `global_steps` of a prompt, at most `max_off_policy_threshold` versions spanned | `start_version`, `max_staleness` |
| strategy "wait": no batch while a running prompt is at the threshold | `late="wait"` |
| strategy "drop": finished groups past the threshold are evicted | `late="evict"`, before they are finished |
| group with a failed session | `least_members` |
| DAPO: all rewards of a group are equal | `where=` on a custom_meta column that the reward worker writes |
| `refill_fn(k)` submits k other prompts | `refill=`: the same prompts again |

"wait" only waits for groups that would otherwise be trained too late. With both strategies no group exceeds the
threshold, while verl's "wait" trains groups beyond a full batch a step later. `num_warmup_batches` is the threshold: at
most this many batches are outstanding.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import tq_service as tq

TRAIN, UPDATE, PROMPTS, ROLLOUT = "train", "update_actor", "prompts", "rollout"
REASONS = {"late": "off_policy", "unmatched": "filter_groups", "too_small": "rollout_failure"}


class ReplayBuffer:
    """Groups of `rollout_n` trajectories; step `global_steps` counts from 1 and trains the weights of this version."""

    def __init__(
        self, client: tq.Client, *, batch_size: int, rollout_n: int, max_off_policy_threshold: int,
        max_off_policy_strategy: Literal["wait", "drop"], filter_groups_metric: str | None = None,
    ) -> None:  # fmt: skip
        self._client, self._serial = client, 0
        bound = tq.Admission(
            UPDATE, max_staleness=max_off_policy_threshold - 1, global_batch=batch_size, unit="group",
            late="evict" if max_off_policy_strategy == "drop" else "wait",
        )  # fmt: skip
        client.publish_version(1)
        client.create_partition(TRAIN, admissions=[bound])
        self._asks: dict[str, Any] = {
            "partition_id": TRAIN, "task_name": UPDATE, "dp_rank": 0, "dp_size": 1, "batch_unit": "group",
            "batch_size": batch_size, "order_by": ["start_version"], "unmatched": "clear", "least_members": rollout_n,
            "where": [(filter_groups_metric, ">", 0.0)] if filter_groups_metric else [], "refill": (PROMPTS, ROLLOUT),
        }  # fmt: skip

    def sample(self, global_steps: int, data_fields: list[str], max_wait: float) -> tuple[tq.BatchMeta, dict[str, int]]:
        """Return the batch of a step, and the number of groups evicted since the last call, by reason.

        The previous step must have been trained, and the generators must have its weights.
        """
        if global_steps > 1:
            self._client.publish_version(global_steps, trained={(TRAIN, UPDATE): global_steps - 2})
        batch = self._client.claim(
            **self._asks, data_fields=data_fields, batch_index=global_steps - 1, max_wait=max_wait
        )
        evicted = self._client.take_evicted(TRAIN, UPDATE, after=self._serial).units
        self._serial = evicted[-1].serial if evicted else self._serial
        counts = Counter(REASONS[unit.reason] for unit in evicted)
        return batch, {f"training/{reason}/evicted_samples": count for reason, count in counts.items()}
