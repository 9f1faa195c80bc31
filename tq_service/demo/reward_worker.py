"""The reward worker: a queue consumer that adds the reward column to samples as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tq_service as tq
from tq_service.demo.recorded import text_of, text_reward
from tq_service.demo.role import run_role
from tq_service.demo.settings import REPLAY_PARTITION, REWARD_TASK, DemoSettings, step_partition
from tq_service.demo.task import decode, score
from tq_service.demo.tensors import rows_of
from tq_service.demo.weights import stop_check

BATCH_SIZE = 64
BREVITY_TOKENS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A way to score samples.

    Attributes:
        fields: what it reads.
        score: gives one reward to each sample of a batch.
    """

    fields: tuple[str, ...]
    score: Callable[[Mapping[str, Any]], Sequence[float]]


def score_additions(batch: Mapping[str, Any]) -> list[float]:
    """Score the responses of the policy."""
    return [
        score(decode(prompt.tolist()), decode(response.tolist()))
        for prompt, response in zip(rows_of(batch["prompt"]), rows_of(batch["response"]), strict=True)
    ]


def score_recorded(batch: Mapping[str, Any]) -> list[float]:
    """Score recorded solutions by their final answer; requests of a trace, which have no text, by their brevity."""
    return [
        text_reward(text_of(response.numpy()), reference)
        if reference
        else BREVITY_TOKENS / (BREVITY_TOKENS + response.numel())
        for response, reference in zip(rows_of(batch["response"]), batch["reference"], strict=True)
    ]


def give_rewards(settings: DemoSettings, worker: int) -> None:
    """Score all samples: of the replay, or of one step after the other until the trainer is done."""
    with tq.Client(settings.address) as client:
        if settings.input is not None:
            scorer = Scorer(fields=("response", "reference"), score=score_recorded)
            _score_partition(client, REPLAY_PARTITION, scorer, is_stopped=lambda: False)
            return
        scorer = Scorer(fields=("prompt", "response"), score=score_additions)
        is_stopped = stop_check(client)
        for step in range(settings.steps):
            if not _score_partition(client, step_partition(step), scorer, is_stopped):
                return


def _score_partition(client: tq.Client, partition_id: str, scorer: Scorer, is_stopped: Callable[[], bool]) -> bool:
    """Add rewards to a partition until it is sealed and done; False when the trainer is done before that."""
    while True:
        meta = client.get_meta(
            partition_id=partition_id,
            task_name=REWARD_TASK,
            data_fields=list(scorer.fields),
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
        rewards = scorer.score(client.get_data(meta))
        client.put({"reward": torch.tensor(rewards, dtype=torch.float32)}, metadata=meta)


if __name__ == "__main__":
    run_role(give_rewards)
