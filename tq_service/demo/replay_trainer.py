"""A trainer rank on recorded rollouts: checks what it gets, and learns from it where there are groups to learn from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.demo.grpo import group_advantages
from tq_service.demo.learner import Learner, join_ranks
from tq_service.demo.policy import Policy
from tq_service.demo.recorded import Recording, checksum_of, open_recording
from tq_service.demo.reports import Reporter
from tq_service.demo.role import run_role
from tq_service.demo.settings import REPLAY_PARTITION, TRAINER_RANKS, UPDATE_TASK, DemoSettings
from tq_service.demo.start_line import report_ready
from tq_service.demo.tally import StepTally, timed
from tq_service.demo.tensors import chunks_of_like_length, rows_of

SAMPLES_PER_BATCH = 64
ROWS_PER_PASS = 8
BYTE_VALUES = 256
HIDDEN_SIZE = 64
FIELDS = ["number", "prompt", "response", "recorded_reward", "checksum", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySummary:
    """What the ranks together saw of a recording.

    Attributes:
        expected: samples in the recording.
        received: samples that came, repeats included.
        missing: samples that never came.
        repeated: samples that came more than once.
        corrupt: samples whose tokens do not match their checksum.
        has_text: whether there are groups of responses and recorded rewards, which a trace has not.
        groups: groups in the recording.
        whole_groups: groups that came whole, in one batch of one rank.
        reward_differences: samples whose reward differs from the recorded one.
    """

    expected: int
    received: int
    missing: int
    repeated: int
    corrupt: int
    has_text: bool
    groups: int
    whole_groups: int
    reward_differences: int


class Inspector:
    """Counts what one rank got of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._seen = torch.zeros(recording.sample_count, dtype=torch.int64)
        self._corrupt = 0
        self._whole_groups = 0
        self._reward_differences = 0

    def inspect(self, batch: Mapping[str, Any], meta: tq.BatchMeta) -> None:
        """Count the samples of one batch."""
        numbers = batch["number"]
        self._seen += torch.bincount(numbers, minlength=self._seen.numel())
        received = [
            checksum_of(prompt.numpy(), response.numpy())
            for prompt, response in zip(rows_of(batch["prompt"]), rows_of(batch["response"]), strict=True)
        ]
        self._corrupt += sum(a != b for a, b in zip(received, batch["checksum"].tolist(), strict=True))
        sizes = [meta.groups.count(group) for group in set(meta.groups)]
        self._whole_groups += sizes.count(self._recording.group_size)
        recorded = batch["recorded_reward"]
        self._reward_differences += int(((recorded != batch["reward"]) & ~recorded.isnan()).sum().item())

    def sum_over_ranks(self) -> ReplaySummary:
        """Return the summary, the same on all ranks; every rank calls it."""
        counts = torch.tensor([self._corrupt, self._whole_groups, self._reward_differences])
        dist.all_reduce(counts)
        dist.all_reduce(self._seen)
        corrupt, whole_groups, reward_differences = counts.tolist()
        return ReplaySummary(
            expected=self._recording.sample_count,
            received=int(self._seen.sum().item()),
            missing=int((self._seen == 0).sum().item()),
            repeated=int((self._seen > 1).sum().item()),
            corrupt=corrupt,
            has_text=self._recording.has_text,
            groups=self._recording.group_count,
            whole_groups=whole_groups,
            reward_differences=reward_differences,
        )


def consume(settings: DemoSettings, rank: int) -> None:
    """Stream the whole recording, one optimizer step a batch, and clear each batch once it is learned."""
    join_ranks(settings.output, rank)
    torch.manual_seed(settings.seed)
    recording = open_recording(Path(settings.input or ""), settings.limit)
    learner = Learner(Policy(BYTE_VALUES, hidden_size=HIDDEN_SIZE), learning_rate=settings.learning_rate)
    inspector = Inspector(recording)
    learns = recording.has_text and recording.group_size > 1  # else there is nothing to compare a response with
    loader = StreamingDataLoader(_dataset(settings, recording, rank), num_workers=0)
    with ExitStack() as stack:
        client = stack.enter_context(tq.Client(settings.address))
        report_ready(client, rank)
        begun = time.monotonic()
        tally = StepTally()
        for step, ((batch, meta), waited) in enumerate(timed(loader)):
            tally.waiting_seconds += waited
            if meta.size:
                inspector.inspect(batch, meta)
                tally.add(batch["reward"], tokens=sum(int(row["total_lengths"]) for row in meta.custom_meta))
                if learns:
                    _learn(learner, batch, meta, recording.group_size)
                client.clear_samples(meta)
            if learns:
                learner.update(meta.size)
            summary = tally.sum_over_ranks(step, begun=begun)
            if rank == 0:
                Reporter(client).send("step", **asdict(summary))
            tally = StepTally()
        replayed = inspector.sum_over_ranks()
        if rank == 0:
            Reporter(client).send("replayed", **asdict(replayed))
    dist.destroy_process_group()


def _learn(learner: Learner, batch: Mapping[str, Any], meta: tq.BatchMeta, group_size: int) -> None:
    """Add the gradient of a batch of whole groups, in parts of like length."""
    advantages = group_advantages(batch["reward"], meta.groups, group_size)
    prompts, responses = rows_of(batch["prompt"]), rows_of(batch["response"])
    sequences = [torch.cat([prompt, response]) for prompt, response in zip(prompts, responses, strict=True)]
    for part in chunks_of_like_length(sequences, ROWS_PER_PASS):
        learner.accumulate([prompts[i] for i in part], [responses[i] for i in part], None, advantages[part])


def _dataset(settings: DemoSettings, recording: Recording, rank: int) -> StreamingDataset:
    batch_size = max(1, SAMPLES_PER_BATCH // recording.group_size) * recording.group_size
    return StreamingDataset(
        settings.address,
        batch_size=batch_size,
        micro_batch_size=batch_size,  # one micro-batch a batch: each is one optimizer step
        data_fields=FIELDS,
        partition_id=REPLAY_PARTITION,
        task_name=UPDATE_TASK,
        dp_rank=rank,
        dp_size=TRAINER_RANKS,
        sampler="seqlen_balanced",
        sampler_config={"n_samples_per_prompt": recording.group_size},
    )


if __name__ == "__main__":
    run_role(consume)
