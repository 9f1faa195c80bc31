"""A recorded run of the demo, with its kills, is replayed elsewhere: every batch of every rank is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.demo.__main__ import RECORDING_DIRECTORY, run_demo
from examples.demo.batch_notes import digest_of, notes_file
from examples.demo.settings import TRAINER_RANKS, UPDATE_TASK, DemoSettings, step_partition
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import COMMAND, ListeningProcess

STEPS = 12


@pytest.mark.nightly
@pytest.mark.timeout(400)  # as test_demo_run.py
def test_each_rank_of_a_killed_run_gets_its_batches_again(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert run_demo(steps=STEPS, seconds=600.0, output=run, plain=True, record=True) == 0
    assert json.loads((run / "history.json").read_text(encoding="utf-8"))["outage"] is not None
    settings = DemoSettings.load(run / "settings.json")
    shutil.copytree(run / RECORDING_DIRECTORY, elsewhere)
    shutil.rmtree(run / RECORDING_DIRECTORY)
    shutil.rmtree(run / "data")
    sizes = [sum(path.stat().st_size for path in (elsewhere / name).iterdir()) for name in ("puts", "steps")]
    assert sum(sizes) < 1.1 * sizes[0]  # which is what was stored, each put once
    compared = 0
    with ListeningProcess([*COMMAND, "replay", str(elsewhere), "--task", UPDATE_TASK]) as replay:
        for rank in range(TRAINER_RANKS):
            lines = notes_file(run, rank).read_text(encoding="utf-8").splitlines()
            noted: dict[int, dict[int, str]] = {}
            for note in map(json.loads, lines):  # those of a process that was killed too
                before = noted.setdefault(note["step"], {}).setdefault(note["micro_batch"], note["digest"])
                assert before == note["digest"]
            assert sorted(noted) == list(range(STEPS))
            for step, digests in noted.items():
                dataset = StreamingDataset(
                    replay.address,
                    batch_size=settings.samples_per_step // TRAINER_RANKS,
                    micro_batch_size=settings.micro_batch_groups * settings.group_size,
                    data_fields=["prompt", "response", "logprobs", "reward"],
                    partition_id=step_partition(step),
                    task_name=UPDATE_TASK,
                    dp_rank=rank,
                    dp_size=TRAINER_RANKS,
                )
                batches = StreamingDataLoader(dataset, num_workers=0)
                again = {number: digest_of(batch, meta)[0] for number, (batch, meta) in enumerate(batches)}
                assert again == digests, f"step {step} of rank {rank}"
                compared += len(again)
    assert compared >= 2 * STEPS * TRAINER_RANKS
