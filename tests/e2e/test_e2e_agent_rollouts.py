"""Rollouts of agents and totals of batches outlive a service that is killed, and come back from a checkpoint."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tq_service as tq
from tq_service.testing import ServiceProcess

ASKS: dict[str, Any] = {
    "partition_id": "agents", "task_name": "train", "data_fields": ["tokens"], "batch_size": 1, "dp_size": 2,
    "batch_unit": "rollout", "sampler": "seqlen_balanced", "totals": ["reward"], "max_wait": 0,
}  # fmt: skip


def put_turn(client: tq.Client, rollout: str, turn: int, *, ends: bool = False) -> None:
    first = {"groups": [rollout.partition("/")[0]], "group_size": 2} if turn == 0 else {}
    meta = {"total_lengths": [turn + 1], "reward": [0.5]}
    data = {"tokens": [list(range(turn + 1))]}
    client.put("agents", data, rollouts=[rollout], ends_rollouts=ends, custom_meta=meta, **first)


def batch_of(client: tq.Client, batch_index: int) -> list[tuple[Any, ...]]:
    metas = [client.get_meta(dp_rank=rank, batch_index=batch_index, **ASKS) for rank in range(2)]
    return [(meta.status, meta.rollouts, meta.totals) for meta in metas]


@pytest.mark.parametrize("saves", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_rollouts_go_on_where_they_were(tmp_path: Path, saves: bool) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), "--checkpoint-dir", str(tmp_path)]
    with ServiceProcess(*flags) as server:
        client = tq.Client(server.address)
        admission = tq.Admission("train", 9, unit="rollout", given_back="trained")
        client.create_partition("agents", admissions=[admission])
        for rollout, ends in (("p0/0", True), ("p0/1", False), ("p1/0", True), ("p1/1", False)):
            put_turn(client, rollout, 0)
            put_turn(client, rollout, 1, ends=ends)
        first = batch_of(client, 0)
        assert [rollouts for _, rollouts, _ in first] == [["p0/0"] * 2, ["p1/0"] * 2]
        assert [totals[0].sums for *_, totals in first] == [{"reward": 2.0}] * 2
        if saves:
            client.checkpoint("half")
    if saves:
        flags[1] = str(tmp_path / "other")
    with ServiceProcess(*flags) as server:
        client = tq.Client(server.address)
        if saves:
            client.restore("half")
        assert batch_of(client, 0) == first
        assert batch_of(client, 1)[0][0] == "not_yet"
        put_turn(client, "p0/1", 2, ends=True)
        client.close_rollouts("agents", ["p1/1"])
        server.restart()  # kill -9
        client = tq.Client(server.address)
        with pytest.raises(tq.errors.PreconditionError, match="rollout 'p1/1' is closed"):
            put_turn(client, "p1/1", 2)
        assert batch_of(client, 0) == first
        assert [rollouts for _, rollouts, _ in batch_of(client, 1)] == [["p0/1"] * 3, ["p1/1"] * 2]
        described = client.describe_partition("agents")
        assert (described.group_count, described.rollout_count, described.tasks[0].outstanding_count) == (2, 4, 4)
        client.advance("agents", "train", trained=0)
        assert client.describe_partition("agents").tasks[0].outstanding_count == 2
        assert client.clear_samples("agents", rollouts=["p0/0", "p0/1"]) == 5
        described = client.describe_partition("agents")
        assert (described.group_count, described.rollout_count) == (1, 2)


def run_agents(address: str, number: int) -> dict[str, int]:
    """Put the turns of some rollouts, and have some fail; return how many turns the others have."""
    rng, counts = random.Random(number), {}
    with tq.Client(address, timeout=60.0) as client:
        for prompt in range(12):
            rollout, count, fails = f"p{prompt}/{number}", rng.randint(1, 4), rng.random() < 0.2
            for turn in range(count):
                meta = {"total_lengths": [turn + 1], "reward": [0.5]}
                client.put("agents",
                    {"tokens": [list(range(turn + 1))]}, keys=[f"{rollout}/{turn}"],
                    rollouts=[rollout], groups=[f"p{prompt}"], group_size=4, custom_meta=meta,
                    ends_rollouts=turn == count - 1 and not fails,
                )  # fmt: skip
                time.sleep(rng.uniform(0.0, 0.05))
            if fails:
                client.fail_samples("agents", rollouts=[rollout])
            else:
                counts[rollout] = count
    return counts


def run_ranks(address: str) -> list[list[tq.BatchMeta]]:
    """Claim all batches for two ranks, each batch twice."""
    taking = {"sampler_config": {"incomplete_groups": "take"}, "batch_unit": "group", "max_wait": 60.0}
    batches: list[list[tq.BatchMeta]] = []
    with tq.Client(address, timeout=60.0) as client:
        while not batches or batches[-1][0].status == "batch":
            asks = ASKS | taking | {"batch_index": len(batches)}
            batch = [client.get_meta(dp_rank=rank, **asks) for rank in range(2)]
            assert [client.get_meta(dp_rank=rank, **asks) for rank in range(2)] == batch
            batches.append(batch)
    return batches[:-1]


@pytest.mark.nightly
def test_each_rollout_is_trained_once_and_whole_however_often_the_service_is_killed(tmp_path: Path) -> None:
    rng = random.Random(7)
    with ServiceProcess("--data-dir", str(tmp_path)) as server, ThreadPoolExecutor(5) as pool:
        agents = [pool.submit(run_agents, server.address, number) for number in range(4)]
        ranks = pool.submit(run_ranks, server.address)
        for _ in range(4):
            time.sleep(rng.uniform(0.1, 0.4))
            server.restart()  # kill -9
        counts = {name: count for agent in agents for name, count in agent.result().items()}
        with tq.Client(server.address) as client:
            client.seal_partition("agents")
        batches = ranks.result()
    trained = [each for batch in batches for meta in batch for each in Counter(meta.rollouts).items()]
    assert sorted(trained) == sorted(counts.items())  # each on one rank, in one batch
    for batch in batches:
        (totals,) = batch[0].totals
        assert batch[1].totals == (totals,)
        names = [name for meta in batch for name in meta.rollouts]
        assert (totals.sample_count, totals.rollout_count) == (len(names), len(set(names)))
        assert totals.sums == {"reward": 0.5 * len(names)}
