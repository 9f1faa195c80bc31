"""A trainer rank: streams its balanced batches, learns from them, hands new weights to the rollout workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import tq_service as tq
from examples.demo.grpo import group_advantages
from examples.demo.learner import Learner, join_ranks
from examples.demo.policy import Policy, flat_weights
from examples.demo.reports import Reporter
from examples.demo.role import run_role
from examples.demo.settings import TRAINER_RANKS, UPDATE_TASK, DemoSettings, step_partition
from examples.demo.step_stats import StepStats, timed
from examples.demo.task import VOCABULARY
from examples.demo.tensors import rows_of
from examples.demo.weights import WeightPublisher
from tq_service.data import StreamingDataLoader, StreamingDataset


def train(settings: DemoSettings, rank: int) -> None:
    """Train for `settings.steps` steps or `settings.seconds`, whichever ends first."""
    join_ranks(settings.output, rank)
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    learner = Learner(Policy(len(VOCABULARY)), learning_rate=settings.learning_rate)
    loader = StreamingDataLoader(_dataset(settings, rank), num_workers=0)
    with ExitStack() as stack:
        leader = _Leader(stack.enter_context(tq.Client(settings.address)), learner) if rank == 0 else None
        if leader:
            leader.publish(0)
        begun = time.monotonic()
        for step in range(settings.steps):
            if step:
                loader.step(step_partition(step))
            stats = StepStats()
            for (batch, meta), waited in timed(loader):
                stats.waiting_seconds += waited
                _learn(learner, batch, meta, settings=settings, step=step, stats=stats)
            learner.update(stats.samples)
            summary = stats.sum_over_ranks(step, begun=begun)
            is_last = step + 1 == settings.steps or summary.elapsed_seconds > settings.seconds
            if leader:
                leader.finish_step(step, asdict(summary), is_last=is_last)
            if is_last:
                break
    dist.destroy_process_group()


class _Leader:
    """What rank 0 does for all ranks, between two steps."""

    def __init__(self, client: tq.Client, learner: Learner) -> None:
        self._client = client
        self._learner = learner
        self._publisher = WeightPublisher(client)
        self._reporter = Reporter(client)

    def publish(self, version: int) -> None:
        """Hand the weights to the rollout workers."""
        self._publisher.publish(version, flat_weights(self._learner.policy))

    def finish_step(self, step: int, summary: dict[str, Any], *, is_last: bool) -> None:
        """Publish the next version, report, and clear what is no longer needed.

        A step's partition goes one step late: by then the reward worker, which was needed for the samples of this
        step, has seen the end of the one before.
        """
        if is_last:
            self._publisher.stop(step + 1, flat_weights(self._learner.policy))
        else:
            self.publish(step + 1)
        self._reporter.send(summary)
        if step:
            self._client.clear_partition(step_partition(step - 1))


def _dataset(settings: DemoSettings, rank: int) -> StreamingDataset:
    return StreamingDataset(
        settings.address,
        batch_size=settings.samples_per_step // TRAINER_RANKS,
        micro_batch_size=settings.micro_batch_groups * settings.group_size,
        data_fields=["prompt", "response", "logprobs", "reward"],
        partition_id=step_partition(0),
        task_name=UPDATE_TASK,
        dp_rank=rank,
        dp_size=TRAINER_RANKS,
        sampler="seqlen_balanced",
        sampler_config={"n_samples_per_prompt": settings.group_size},
    )


def _learn(
    learner: Learner,
    batch: Mapping[str, Any],
    meta: tq.BatchMeta,
    *,
    settings: DemoSettings,
    step: int,
    stats: StepStats,
) -> None:
    """Add one micro-batch of whole groups to the gradient and to the stats."""
    if meta.size == 0:
        return
    advantages = group_advantages(batch["reward"], meta.groups, settings.group_size)
    learner.accumulate(rows_of(batch["prompt"]), rows_of(batch["response"]), rows_of(batch["logprobs"]), advantages)
    stats.add(
        batch["reward"],
        tokens=sum(int(row["total_lengths"]) for row in meta.custom_meta),
        lag_sum=float(sum(step - int(row["version"]) for row in meta.custom_meta)),
    )


if __name__ == "__main__":
    run_role(train)
