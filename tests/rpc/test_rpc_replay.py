"""Replay buffers through a real server with both clients: draws, priorities, what makes way, and who waits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer

import tq_service as tq

REPLAY: dict[str, Any] = {
    "partition_id": "r", "task_name": "t", "data_fields": ["x"], "batch_size": 4, "sampler": "replay",
    "sampler_config": {"fresh": 0.5, "priority_key": "priority", "seed": 1},
}  # fmt: skip


def put(client: AnyClient, count: int, priority: float = 1.0, **arguments: Any) -> tq.BatchMeta:
    meta: tq.BatchMeta = client.put(
        "r", {"x": torch.arange(count)}, custom_meta=[{"priority": priority}] * count, **arguments
    )
    return meta


def claim(client: AnyClient, index: int, **arguments: Any) -> tq.BatchMeta:
    options = {"dp_rank": 0, "dp_size": 1, "max_wait": 0.0} | arguments
    meta: tq.BatchMeta = client.get_meta(**{**REPLAY, **options}, batch_index=index)
    return meta


def test_half_of_each_batch_is_fresh_and_half_was_used_before(client: AnyClient, server: LiveServer) -> None:
    batches = []
    for index in range(6):
        put(client, 4)
        batches.append(claim(client, index).global_indexes)
    fresh = [row for rows in batches[1:] for row in rows[:2]]
    assert batches[0] == [0, 1, 2, 3]
    assert fresh == [*range(4, 14)]
    for number, rows in enumerate(batches[1:]):
        assert set(rows[2:]) <= {row for before in batches[: number + 1] for row in before}
    for index in (5, 0, 3):
        assert claim(server.client(), index).global_indexes == batches[index], "replicas get the same"
    assert client.check_consumption("r", "t").consumed_count == 0


def test_priorities_change_by_set_custom_meta(client: AnyClient) -> None:
    meta = put(client, 8)
    for index in range(3):
        claim(client, index)
    client.set_custom_meta(meta, {"priority": np.eye(8)[5]})
    put(client, 2)
    assert claim(client, 3).global_indexes[2:] == [5, 5]


def test_a_sample_in_a_batch_several_times_has_its_data_each_time(client: AnyClient) -> None:
    put(client, 2)
    config = {"fresh": 0, "max_uses": 4}
    metas = [claim(client, index, sampler_config=config) for index in range(2)]
    rows = [row for meta in metas for row in meta.global_indexes]
    assert sorted(rows) == [0] * 4 + [1] * 4
    assert client.get_data(metas[0])["x"].tolist() == metas[0].global_indexes
    client.seal_partition("r")
    assert claim(client, 2, sampler_config=config).status == "end"
    assert client.check_consumption("r", "t").consumed_count == 2


def test_a_full_buffer_drops_the_lowest_and_counts_them(client: AnyClient) -> None:
    bound = tq.Admission("t", 4, overflow="drop_lowest", priority_key="priority")
    client.create_partition("r", admissions=[bound])
    put(client, 2, 3.0)
    put(client, 2, 1.0, keys=["a", "b"])
    put(client, 1, 2.0)
    described = client.describe_partition("r")
    assert described.admissions == (bound,)
    assert (described.summary.present_count, described.tasks[0].overflow_count) == (4, 1)
    evicted = client.take_evicted("r", "t").units
    assert [(unit.key, unit.reason) for unit in evicted] == [("a", "overflow")]
    batch = claim(client, 0)
    with pytest.raises(tq.errors.AdmissionLimitError, match="or in untrained batches"):
        put(client, 1, timeout=2.0)
    client.advance("r", "t", trained=0)
    put(client, 1)
    assert client.describe_partition("r").tasks[0].delivered_count == batch.size == 4


def test_the_ratio_has_trainers_wait_and_says_so(client: AnyClient, server: LiveServer) -> None:
    bound = tq.Admission("t", 1000, samples_per_insert=2.0, min_size_to_sample=4, error_buffer=8)
    client.create_partition("r", admissions=[bound])
    put(client, 6)
    config = {"fresh": 0}
    assert [claim(client, index, sampler_config=config).status for index in range(3)] == ["batch"] * 3
    waiting = claim(client, 3, sampler_config=config, explain=True)
    assert waiting.status == "not_yet"
    assert waiting.waiting_for.code == "RATIO_BOUNDED"
    assert "task 't' received 12 samples, and 6 were inserted into partition 'r'" in waiting.waiting_for.text
    answers: list[tq.BatchMeta] = []
    thread = threading.Thread(
        target=lambda: answers.append(claim(server.client("sync"), 3, sampler_config=config, max_wait=60.0))
    )
    thread.start()
    put(client, 2)
    thread.join()
    assert answers[0].status == "batch"


def test_the_ratio_has_producers_wait(client: AnyClient) -> None:
    bound = tq.Admission("t", 1000, samples_per_insert=2.0, error_buffer=4)
    client.create_partition("r", admissions=[bound])
    put(client, 3)
    with pytest.raises(
        tq.errors.AdmissionLimitError, match="more samples must be delivered to the task first"
    ) as error:
        put(client, 1, timeout=2.0)
    assert error.value.metadata["limit_name"] == "samples_per_insert"
    claim(client, 0, batch_size=2, sampler_config={"fresh": 0})
    put(client, 1)
