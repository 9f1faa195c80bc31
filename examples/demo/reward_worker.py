"""The reward worker: a queue consumer that adds the reward column to samples as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import tq_service as tq
from examples.demo.reports import Reporter
from examples.demo.role import run_role
from examples.demo.settings import REWARD_TASK, DemoSettings, step_partition
from examples.demo.task import decode, score
from examples.demo.tensors import rows_of
from examples.demo.weights import stop_check

BATCH_SIZE = 64


def score_additions(batch: Mapping[str, Any]) -> list[float]:
    """Score the responses of the policy."""
    return [
        score(decode(prompt.tolist()), decode(response.tolist()))
        for prompt, response in zip(rows_of(batch["prompt"]), rows_of(batch["response"]), strict=True)
    ]


def give_rewards(settings: DemoSettings, worker: int) -> None:
    """Score the samples of each step in order, until the trainer is done."""
    with tq.Client(settings.address) as client:
        Reporter(client).send_event("the reward worker is ready")
        is_stopped = stop_check(client)
        for step in range(settings.steps):
            if not _score_partition(client, step_partition(step), is_stopped):
                return


def _score_partition(client: tq.Client, partition_id: str, is_stopped: Callable[[], bool]) -> bool:
    """Add rewards to a partition until it is sealed and done. Return False if the trainer is done earlier."""
    while True:
        meta = client.claim(
            partition_id=partition_id,
            task_name=REWARD_TASK,
            data_fields=["prompt", "response"],
            batch_size=BATCH_SIZE,
            min_batch_size=1,
            max_wait=1.0,
        )
        if meta.status == "end":
            return True
        if meta.status == "not_yet":
            if is_stopped():
                return False
            continue
        rewards = score_additions(client.get_data(meta))
        client.put(meta, {"reward": torch.tensor(rewards, dtype=torch.float32)})


if __name__ == "__main__":
    run_role(give_rewards)
