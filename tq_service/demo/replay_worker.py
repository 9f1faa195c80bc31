"""A rollout worker on recorded rollouts: puts each group when it arrives, and a checksum with every sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import tq_service as tq
from tq_service.demo.recorded import RecordedGroup, open_recording
from tq_service.demo.role import run_role
from tq_service.demo.settings import REPLAY_PARTITION, ROLLOUT_WORKERS, DemoSettings
from tq_service.demo.start_line import wait_for_ranks

MAX_GROUPS_PER_PUT = 32


def replay(settings: DemoSettings, worker: int) -> None:
    """Put this worker's share of the recorded groups, `settings.speed` times faster than they came."""
    recording = open_recording(Path(settings.input or ""), settings.limit)
    own = (group for i, group in enumerate(recording.groups()) if i % ROLLOUT_WORKERS == worker)
    with tq.Client(settings.address) as client:
        client.create_partition(REPLAY_PARTITION, expected_samples=recording.sample_count)
        wait_for_ranks(client, worker)
        for groups in _as_they_arrive(own, settings.speed):
            _put(client, groups)


def _as_they_arrive(groups: Iterator[RecordedGroup], speed: float) -> Iterator[list[RecordedGroup]]:
    """Yield the groups at their time, those that are due together in one list."""
    begun = time.monotonic()
    due: list[RecordedGroup] = []
    for group in groups:
        wait = group.arrival_seconds / speed - (time.monotonic() - begun) if speed else 0.0
        if due and (wait > 0 or len(due) == MAX_GROUPS_PER_PUT):
            yield due
            due = []
        if wait > 0:
            time.sleep(wait)
        due.append(group)
    if due:
        yield due


def _put(client: tq.Client, groups: Sequence[RecordedGroup]) -> None:
    samples = [(group, sample) for group in groups for sample in group.samples]
    client.put(
        {
            "number": torch.tensor([sample.number for _, sample in samples]),
            "prompt": [torch.from_numpy(sample.prompt.copy()) for _, sample in samples],
            "response": [torch.from_numpy(sample.response.copy()) for _, sample in samples],
            "reference": [sample.reference for _, sample in samples],
            "recorded_reward": torch.tensor([sample.recorded_reward for _, sample in samples]),
            "checksum": torch.tensor([sample.checksum for _, sample in samples]),
        },
        partition_id=REPLAY_PARTITION,
        groups=[group.name for group, _ in samples],
        group_size=len(groups[0].samples),
        custom_meta=[{"total_lengths": sample.prompt.size + sample.response.size} for _, sample in samples],
    )


if __name__ == "__main__":
    run_role(replay)
