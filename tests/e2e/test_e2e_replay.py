"""A replay buffer that keeps its state: killed at any moment, it draws the same as one that was not."""

from pathlib import Path

import pytest

import tq_service as tq
from tq_service.testing import ServiceProcess

torch = pytest.importorskip("torch")

BUFFER = tq.Admission(
    "learner", 16, overflow="drop_lowest", priority_key="priority", samples_per_insert=2.0, error_buffer=24
)


def claim(client: tq.Client, index: int, rank: int) -> list[int]:
    meta = client.get_meta(
        partition_id="replay", task_name="learner", data_fields=["x"], batch_size=4, dp_rank=rank, dp_size=2,
        batch_index=index, sampler="replay", max_wait=30.0,
        sampler_config={"fresh": 0.25, "priority_key": "priority", "exponent": 0.7, "seed": 5, "max_uses": 6},
    )  # fmt: skip
    rows: list[int] = meta.global_indexes
    return rows


def run(directory: Path, *, is_killed: bool) -> tuple[list[list[int]], int, list[int]]:
    """Return the batches of a run, what was dropped, and what is left; it is killed around a batch, and within one."""
    batches: list[list[int]] = []
    arguments = ("--data-dir", str(directory), "--durability", "process")
    with ServiceProcess(*arguments) as service, tq.Client(service.address) as client:
        client.create_partition("replay", admissions=[BUFFER])
        for index in range(5):
            count = 8 if index == 0 else 4
            meta = [{"priority": (index * 7 + row * 3) % 5 + 0.5} for row in range(count)]
            client.put("replay", {"x": torch.arange(count)}, custom_meta=meta)
            if is_killed and index == 2:
                service.restart()
            batches.append(claim(client, index, 0))
            if is_killed and index == 3:
                service.restart()
            batches.append(claim(client, index, 1))
            assert claim(client, index, 0) == batches[-2]
            client.advance("replay", "learner", trained=index)
        found, _ = client.lookup_samples("replay")
        (task,) = client.describe_partition("replay").tasks
        assert task.delivered_count == 40
        return batches, task.overflow_count, found.global_indexes


@pytest.mark.nightly
def test_draws_and_drops_are_the_same_after_kills(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", is_killed=False)
    assert whole == run(tmp_path / "killed", is_killed=True)
    assert whole[1] > 0
    assert any(len(set(rows)) < len(rows) for rows in whole[0]), "drawn with replacement"
