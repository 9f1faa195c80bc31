"""5,120 rollouts, put while four trainer ranks wait for them: every sample once, bit-exact, groups whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from e2e_rollouts import GROUP_SIZE, PROMPT_COUNT, RECORDED, Rollout, made_rollouts, recorded_rollouts

import tq_service as tq
from tq_service.testing import ServiceProcess

PARTITION = "train@0"
TASK = "update_actor"
RANKS = 4
BATCH_SIZE = 32
CHUNK = 80


def ask(client: tq.Client, rank: int, index: int) -> tq.BatchMeta:
    return client.get_meta(
        partition_id=PARTITION, task_name=TASK, data_fields=["input_ids", "text", "reward"], batch_size=BATCH_SIZE,
        micro_batch_size=8, sampler="seqlen_balanced", sampler_config={"n_samples_per_prompt": GROUP_SIZE},
        dp_rank=rank, dp_size=RANKS, batch_index=index, max_wait=60.0,
    )  # fmt: skip


def produce(address: str, rollouts: list[Rollout], *, with_reward: bool) -> None:
    """Put rollouts in the order in which they finish: members of one group in different puts."""
    with tq.Client(address) as client:
        for start in range(0, len(rollouts), CHUNK):
            part = rollouts[start : start + CHUNK]
            rows = [one.input_ids for one in part]
            meta = client.put(
                PARTITION,
                {"input_ids": rows, "text": [one.text for one in part]},
                keys=[one.key for one in part],
                groups=[one.group for one in part],
                group_size=GROUP_SIZE,
                custom_meta=[{"total_lengths": len(row)} for row in rows],
            )
            if with_reward:
                client.put(meta, {"reward": torch.tensor([one.reward for one in part])})


def reward(address: str) -> int:
    """Add the rewards, as a worker that takes whatever is there, to those that come without."""
    rewarded = 0
    with tq.Client(address) as client:
        while True:
            meta = client.get_meta(partition_id=PARTITION, task_name="reward", data_fields=["text"], batch_size=64,
                                   min_batch_size=1, where=[("total_lengths", ">", 0)], max_wait=60.0)  # fmt: skip
            if meta.status == "end":
                return rewarded
            values = [len(text) % 7 for text in client.get_data(meta)["text"]]
            client.put(meta, {"length_reward": torch.tensor(values)})
            rewarded += meta.size


def consume(address: str, rank: int, expected: dict[str, Rollout]) -> list[tq.BatchMeta]:
    """Take all batches of a rank, checking each sample; ask for each batch again as a replica does."""
    taken = []
    with tq.Client(address) as client, tq.Client(address) as replica:
        while (meta := ask(client, rank, len(taken))).status != "end":
            assert meta.status == "batch"
            batch = client.get_data(meta)
            for position, key in enumerate(meta.keys):
                rollout = expected[str(key)]
                assert meta.groups[position] == rollout.group
                assert batch["input_ids"][position].equal(rollout.input_ids)
                assert batch["text"][position] == rollout.text
                assert batch["reward"][position] == rollout.reward
            again = random.randrange(len(taken) + 1)
            assert ask(replica, rank, again) == [*taken, meta][again]
            taken.append(meta)
        assert ask(replica, rank, len(taken)) == meta
    return taken


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            recorded_rollouts,
            id="recorded",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not RECORDED.exists(), reason=f"needs the recorded rollouts of {RECORDED}"),
            ],
        ),
        pytest.param(made_rollouts, id="made"),
    ],
)
def test_every_rollout_is_consumed_once(source: Callable[[], list[Rollout]]) -> None:
    rollouts = source()
    assert len(rollouts) == PROMPT_COUNT * GROUP_SIZE == 5120
    expected = {one.key: one for one in rollouts}
    random.Random(5).shuffle(rollouts)
    with ServiceProcess() as server, ThreadPoolExecutor(8) as pool:
        ranks = [pool.submit(consume, server.address, rank, expected) for rank in range(RANKS)]
        rewards = pool.submit(reward, server.address)
        with tq.Client(server.address) as client:
            client.create_partition(PARTITION, expected_samples=len(rollouts))
        halves = [rollouts[:2560], rollouts[2560:]]
        for producer in [pool.submit(produce, server.address, half, with_reward=True) for half in halves]:
            producer.result()
        taken = [rank.result() for rank in ranks]
        assert rewards.result() == 5120
        check_consumed(server.address, taken, expected)


def check_consumed(address: str, taken: list[list[tq.BatchMeta]], expected: dict[str, Rollout]) -> None:
    times = Counter(key for batches in taken for meta in batches for key in meta.keys)
    assert set(times) == set(expected)
    assert set(times.values()) == {1}
    for batches in taken:
        for meta in batches:
            assert set(Counter(meta.groups).values()) == {GROUP_SIZE}
    for metas in zip(*taken, strict=True):  # as many batches and micro-batches on every rank
        assert len({len(meta.micro_batches) for meta in metas}) == 1
        totals = [sum(one["total_lengths"] for one in meta.custom_meta) for meta in metas]
        assert max(totals) - min(totals) <= max(len(expected[str(key)].text.encode()) for key in times)
    with tq.Client(address) as client:
        status: Any = client.check_consumption(PARTITION, TASK)
        assert (status.consumed_count, status.total_count, status.skipped_count) == (5120, 5120, 0)
        assert status.complete
        assert client.check_production(PARTITION, ["reward", "length_reward"]).complete
        assert client.clear_partition(PARTITION) == 5120
        assert client.storage_stat().used_bytes == 0
