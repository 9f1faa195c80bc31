"""A trainer rank: streams its balanced batches, trains on them, and publishes new weights to the rollout workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tq_service as tq
from examples.demo.batch_notes import BatchNotes
from examples.demo.grpo import group_advantages
from examples.demo.learner import Learner
from examples.demo.policy import Policy, flat_weights
from examples.demo.ranks import RankLostError, Ranks
from examples.demo.reports import EVENT, JOINED_STEP, Reporter
from examples.demo.role import run_role
from examples.demo.settings import TRAINER_RANKS, UPDATE_TASK, DemoSettings, step_partition
from examples.demo.step_stats import StepStats, StepSummary, summary_of, timed
from examples.demo.task import VOCABULARY
from examples.demo.tensors import rows_of
from examples.demo.weights import WeightPublisher
from tq_service.data import StreamingDataLoader, StreamingDataset


def train(settings: DemoSettings, rank: int) -> None:
    """Train for `settings.steps` steps or `settings.seconds`, whichever ends first.

    A process that replaces a dead rank gets the weights, optimizer state and step from the other rank. Both ranks
    repeat the step in which the rank died, and the service delivers the same batches again.
    """
    torch.manual_seed(settings.seed)  # the same initial weights on every rank
    learner = Learner(Policy(len(VOCABULARY)), learning_rate=settings.learning_rate)
    ranks = Ranks(settings.output, rank)
    begun = time.monotonic()
    step = _join(ranks, 0, learner)
    with ExitStack() as stack:
        client = stack.enter_context(tq.Client(settings.address))
        leader = _Leader(client, learner) if rank == 0 else None
        Reporter(client).send({EVENT: f"trainer rank {rank} joined at step {step}", JOINED_STEP: step})
        if leader:
            leader.publish(step)
        batches = _Batches(settings, rank)
        is_last = False
        while not is_last:
            try:
                summary = _train_step(step, batches, learner, ranks, begun=begun)
            except RankLostError:
                learner.discard()
                step = _join(ranks, step, learner)
                continue
            is_last = step + 1 == settings.steps or summary.elapsed_seconds > settings.seconds
            if leader:
                leader.finish_step(step, asdict(summary), is_last=is_last)
            step += 1
    ranks.leave()


def _join(ranks: Ranks, step: int, learner: Learner) -> int:
    """Join the group, load the state of the most advanced rank, and return its step."""
    furthest, state = ranks.join(step, learner.state())
    learner.load_state(state)
    return furthest


def _train_step(step: int, batches: _Batches, learner: Learner, ranks: Ranks, *, begun: float) -> StepSummary:
    """Train on this rank's batch of a step.

    Raises:
        RankLostError: a rank was lost, so no rank applied the step.
    """
    stats = StepStats(trained=torch.zeros(batches.settings.samples_per_step, dtype=torch.float64))
    for (batch, meta), waited in timed(batches.of_step(step)):
        stats.waiting_seconds += waited
        _learn(learner, batch, meta, settings=batches.settings, step=step, stats=stats)
    counts = learner.update(ranks.sum, stats.counts(batches.rank, ranks.count, begun=begun))
    return summary_of(step, counts, ranks.count)


class _Batches:
    """The micro-batches of one rank. A digest of each is written to a file, so that the demo can compare them.

    Args:
        settings: settings of the run.
        rank: this rank.
    """

    def __init__(self, settings: DemoSettings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self._notes = BatchNotes(Path(settings.output), rank)
        self._loader: StreamingDataLoader | None = None
        self._sampler = ""

    def of_step(self, step: int) -> Iterator[tuple[Mapping[str, Any], tq.BatchMeta]]:
        """Yield the micro-batches of a step; a repeated step yields the same ones."""
        sampler = self.settings.sampler_of(step)
        if self._loader is None or sampler != self._sampler:
            self._loader, self._sampler = StreamingDataLoader(self._dataset(step, sampler), num_workers=0), sampler
        else:
            self._loader.step(step_partition(step))
        for number, (batch, meta) in enumerate(self._loader):
            self._notes.add(step, number, batch, meta)
            yield batch, meta

    def _dataset(self, step: int, sampler: str) -> StreamingDataset:
        settings = self.settings
        return StreamingDataset(
            settings.address,
            batch_size=settings.samples_per_step // TRAINER_RANKS,
            micro_batch_size=settings.micro_batch_groups * settings.group_size,
            data_fields=["prompt", "response", "logprobs", "reward"],
            partition_id=step_partition(step),
            task_name=UPDATE_TASK,
            dp_rank=self.rank,
            dp_size=TRAINER_RANKS,
            sampler=sampler,
            sampler_config={"n_samples_per_prompt": settings.group_size},
        )


class _Leader:
    """The work that rank 0 does for all ranks between two steps."""

    def __init__(self, client: tq.Client, learner: Learner) -> None:
        self._client = client
        self._learner = learner
        self._publisher = WeightPublisher(client)
        self._reporter = Reporter(client)

    def publish(self, version: int) -> None:
        """Publish the weights to the rollout workers."""
        self._publisher.publish(version, flat_weights(self._learner.policy))

    def finish_step(self, step: int, summary: dict[str, Any], *, is_last: bool) -> None:
        """Publish the next version, report, and clear the partition of the previous step.

        A step's partition is cleared one step late. By then the reward worker has scored samples of the current step,
        so it has seen the end of the previous one.
        """
        if is_last:
            self._publisher.stop(step + 1, flat_weights(self._learner.policy))
        else:
            self.publish(step + 1)
        self._reporter.send(summary)
        if step:
            self._client.clear_partition(step_partition(step - 1))


def _learn(
    learner: Learner,
    batch: Mapping[str, Any],
    meta: tq.BatchMeta,
    *,
    settings: DemoSettings,
    step: int,
    stats: StepStats,
) -> None:
    """Add one micro-batch of complete groups to the gradient and to the stats."""
    if meta.size == 0:
        return
    advantages = group_advantages(batch["reward"], meta.groups, settings.group_size)
    learner.accumulate(rows_of(batch["prompt"]), rows_of(batch["response"]), rows_of(batch["logprobs"]), advantages)
    stats.add(
        batch["reward"],
        indexes=meta.global_indexes,
        tokens=sum(int(row["total_lengths"]) for row in meta.custom_meta),
        lag_sum=float(sum(step - int(row["version"]) for row in meta.custom_meta)),
    )


if __name__ == "__main__":
    run_role(train)
