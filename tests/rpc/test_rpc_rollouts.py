"""Rollouts of several rows and totals of batches, through a real server with both clients."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient

import tq_service as tq
from tq_service.client import BatchMeta
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.types import StepTotals

ASKS: dict[str, Any] = {"partition_id": "t", "task_name": "train", "data_fields": ["x"], "batch_size": 1, "max_wait": 0}
SAMPLERS = [
    ("sequential", {}),
    ("rank_aware", {}),
    ("seqlen_balanced", {}),
    ("token_budget", {"tokens_per_rank": 1000}),
    ("packed", {"optimizer_steps": 1, "pack_max_length": 16}),
]


def put(
    client: AnyClient, rollout: str | None, count: int = 1, group: str | None = None, **arguments: Any
) -> BatchMeta:
    meta = {"total_lengths": np.full(count, 5), "loss_tokens": np.arange(1.0, count + 1)}
    names = {"rollouts": [rollout] * count} | ({} if group is None else {"groups": [group] * count})
    return client.put("t", {"x": torch.ones(count, 5)}, custom_meta=meta, **names, **arguments)


def put_agents(client: AnyClient) -> None:
    """Put rows 0 to 6: prompts p0 (r0 of one turn, r1 of three) and p1 (r2 of two, r3 of one)."""
    for rollout, count, group in (("r0", 1, "p0"), ("r1", 3, "p0"), ("r2", 2, "p1"), ("r3", 1, "p1")):
        put(client, rollout, count, group, group_size=2, ends_rollouts=True)


def ranks(client: AnyClient, batch_index: int = 0, dp_size: int = 2, **arguments: Any) -> list[BatchMeta]:
    asks = ASKS | {"dp_size": dp_size, "batch_index": batch_index} | arguments
    return [client.get_meta(dp_rank=rank, **asks) for rank in range(dp_size)]


def explain(client: AnyClient, **arguments: Any) -> str:
    return client.get_meta(**(ASKS | {"explain": True} | arguments)).reason


# Batches


@pytest.mark.parametrize(("sampler", "config"), SAMPLERS)
def test_a_batch_of_rollouts_has_all_their_rows_on_one_rank(client: AnyClient, sampler: str, config: Any) -> None:
    put_agents(client)
    got: list[list[list[str | None]]] = []
    for index in range(2):
        batch = ranks(client, index, batch_unit="rollout", sampler=sampler, sampler_config=config)
        got.append([meta.rollouts for meta in batch])
        totals = batch[0].totals
        assert totals == batch[1].totals
        assert [(each.rollout_count, each.group_count) for each in totals] == [(2, 1)]
        assert sum(each.sample_count for each in totals) == sum(meta.size for meta in batch)
    assert [sorted(map(sorted, each)) for each in got] == [[["r0"], ["r1"] * 3], [["r2"] * 2, ["r3"]]]
    client.seal_partition("t")
    assert ranks(client, 2, batch_unit="rollout", sampler=sampler, sampler_config=config)[0].status == "end"


def test_a_batch_of_groups_has_all_their_rollouts(client: AnyClient) -> None:
    put_agents(client)
    batch = ranks(client, batch_unit="group", sampler="seqlen_balanced", totals=["loss_tokens"])
    assert [meta.global_indexes for meta in batch] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [meta.rollouts for meta in batch] == [["r0", "r1", "r1", "r1"], ["r2", "r2", "r3"]]
    expected = StepTotals(
        sample_count=7, rollout_count=4, group_count=2, token_count=35, sums={"loss_tokens": 1.0 + 6 + 3 + 1}
    )
    assert [meta.totals for meta in batch] == [(expected,)] * 2


def test_rows_are_delivered_one_by_one_to_who_asks_for_samples(client: AnyClient) -> None:
    put(client, "r0", 2)
    assert [meta.global_indexes for meta in ranks(client)] == [[0], [1]]


def test_rollouts_are_not_cut_over_optimizer_steps(client: AnyClient) -> None:
    for number in range(6):
        put(client, f"r{number}", 1 + number % 3, f"p{number // 2}", group_size=2, ends_rollouts=True)
    config = {"optimizer_steps": 3, "pack_max_length": 8, "even_steps": False}
    batch = ranks(client, batch_size=3, batch_unit="rollout", sampler="packed", sampler_config=config)
    for meta in batch:
        steps = [{meta.rollouts[at] for pack in step.packs for at in pack.positions} for step in meta.steps]
        assert len(steps) == 3
        assert sum(map(len, steps)) == len(set(meta.rollouts))
    totals = batch[0].totals
    assert [len(totals), sum(each.sample_count for each in totals), sum(each.rollout_count for each in totals)] == [
        3,
        12,
        6,
    ]
    assert sum(each.token_count or 0 for each in totals) == 60
    selected = batch[0].select_samples([0])
    assert len(selected.totals) == len(selected.steps) == 1


def test_a_queue_worker_has_whole_rollouts(client: AnyClient) -> None:
    put_agents(client)
    claim = client.get_meta(**ASKS | {"batch_size": 2}, batch_unit="rollout", lease=60.0)
    assert (claim.rollouts, claim.totals) == (["r0", "r1", "r1", "r1"], ())
    with pytest.raises(tq.errors.InvalidArgumentError, match="form one group, but only 1 of its 3 samples are listed"):
        client.ack(claim.select_samples([1]))
    client.release(claim.select_samples([1, 2, 3]))
    client.ack(claim.select_samples([0]))
    again = client.get_meta(**ASKS, batch_unit="rollout", lease=60.0)
    assert again.rollouts == ["r1"] * 3


def test_samplers_that_keep_groups_refuse_rollouts(client: AnyClient) -> None:
    config = {"n_samples_per_prompt": 2}
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"n_samples_per_prompt: got 2 .* batch_unit 'rollout'"):
        ranks(client, batch_unit="rollout", sampler="grpo_group_n", sampler_config=config)


# Growth


def test_a_rollout_is_complete_once_it_is_closed(client: AnyClient) -> None:
    first = put(client, "r0", 1, "p0", group_size=2)
    assert first.rollouts == ["r0"]
    assert ranks(client, batch_unit="rollout")[0].status == "not_yet"
    assert "rollout 'r0' is not closed, and 1 of its 1 samples are ready" in explain(client, batch_unit="rollout")
    second = put(client, "r0")
    assert client.lookup_samples("t", rollouts=["r0"])[0].groups == ["p0", "p0"]
    put(client, "r1", 1, "p0", group_size=2, ends_rollouts=True)
    assert "group 'p0' has 1 rollouts that are not closed, such as 'r0'" in explain(client, batch_unit="group")
    client.close_rollouts("t", ["r0"])
    client.close_rollouts("t", ["r0"])
    with pytest.raises(tq.errors.PreconditionError, match="rollout 'r0' is closed"):
        put(client, "r0")
    with pytest.raises(tq.errors.PreconditionError, match="group 'p0' has 2 of 2 members, got 1 more"):
        put(client, "r2", 1, "p0")
    assert client.get_meta(**ASKS, batch_unit="group").global_indexes == [0, second.global_indexes[0], 2]
    described = client.describe_partition("t")
    assert (described.group_count, described.rollout_count) == (1, 2)


def test_a_slot_closes_its_rollout_with_the_last_turn(client: AnyClient) -> None:
    put(client, "r0")
    slot = client.acquire("t", "agents", rollouts=["r0"], lease=60.0)
    assert slot.rollouts == ["r0"]
    client.put(slot, {"x": torch.ones(1, 5)}, ack=True, ends_rollouts=True)
    assert client.get_meta(**ASKS, batch_unit="rollout").global_indexes == [0, 1]


def test_slots_of_groups_are_in_rollouts(client: AnyClient) -> None:
    client.create_partition("t")
    slots = client.acquire("t", "agents", groups=["p0"], group_size=2, rollouts=["a", "b"], lease=60.0)
    assert (slots.groups, slots.rollouts) == (["p0"] * 2, ["a", "b"])
    more = client.acquire("t", "agents", rollouts=["a"], lease=60.0)
    assert more.groups == ["p0"]
    client.close_rollouts("t", ["a", "b"])
    for one in (more, slots):
        assert client.get_meta(**ASKS, batch_unit="group").status == "not_yet"
        client.put(one, {"x": torch.ones(one.size, 5)}, ack=True)
    assert client.get_meta(**ASKS, batch_unit="group").rollouts == ["a", "b", "a"]


def test_a_seal_closes_all_rollouts(client: AnyClient) -> None:
    put(client, "r0", 2)
    client.seal_partition("t")
    assert client.get_meta(**ASKS, batch_unit="rollout").size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollouts": ["r0", "r0"], "groups": ["p0", "p1"]}, "got group 'p1' for rollout 'r0', which is in group 'p0'"),
        ({"rollouts": ["known", None], "groups": ["p1", ""]}, "'p1' for rollout 'known', which is in no group"),
        ({"rollouts": ["r0"]}, "rollouts has 1 values for 2 samples"),
        ({"ends_rollouts": True}, "ends_rollouts is set, but none of the 2 samples is in a rollout"),
    ],
)
def test_what_does_not_fit_changes_nothing(client: AnyClient, arguments: Any, message: str) -> None:
    put(client, "known")
    with pytest.raises(tq.errors.InvalidArgumentError, match=re.escape(message)):
        client.put("t", {"x": torch.ones(2, 5)}, **arguments)
    described = client.describe_partition("t")
    assert (described.summary.inserted_count, described.group_count, described.rollout_count) == (1, 0, 1)


def test_a_rollout_that_does_not_exist_is_not_closed(client: AnyClient) -> None:
    put(client, "r0", 1, "p0")
    with pytest.raises(tq.errors.NotFoundError, match="rollout 'p0' does not exist") as caught:
        client.close_rollouts("t", ["r0", "p0"])
    assert (caught.value.reason, caught.value.metadata["group"]) == ("GROUP_NOT_FOUND", "p0")
    put(client, "r0")  # not closed


def test_existing_rows_keep_their_rollout(client: AnyClient) -> None:
    client.put("t", {"x": torch.ones(1, 5)}, keys=["k"], rollouts=["r0"])
    client.put("t", {"x": torch.ones(1, 5)}, keys=["k"], rollouts=["r0"], ends_rollouts=True)
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="sample 0 is in rollout 'r0', but the put has rollout 'r1'"
    ):
        client.put("t", {"x": torch.ones(1, 5)}, keys=["k"], rollouts=["r1"])
    assert client.get_meta(**ASKS, batch_unit="rollout").rollouts == ["r0"]


# Losses


def test_a_rollout_fails_as_a_whole_and_is_closed(client: AnyClient) -> None:
    put_agents(client)
    put(client, "r4", 2)
    assert client.fail_samples("t", rollouts=["r1", "r4"]) == 5
    found = client.lookup_samples("t", rollouts=["r1", "none"])
    assert (found[0].global_indexes, found[1]) == ([1, 2, 3], ["none"])
    with pytest.raises(tq.errors.PreconditionError, match="rollout 'r4' is closed"):
        put(client, "r4")
    batch = ranks(client, batch_unit="rollout", batch_size=3, dp_size=1)
    assert batch[0].rollouts == ["r0", "r2", "r2", "r3"]


@pytest.mark.parametrize("action", ["fail", "clear"])
def test_the_rest_of_a_broken_rollout_is_skipped_or_taken(client: AnyClient, action: str) -> None:
    put_agents(client)
    change = client.fail_samples if action == "fail" else client.clear_samples
    assert change("t", global_indexes=[2]) == 1
    sampler = {"sampler": "rank_aware", "batch_unit": "rollout", "batch_size": 3, "dp_size": 1}
    assert ranks(client, **sampler)[0].rollouts == ["r0", "r2", "r2", "r3"]
    (status,) = client.describe_partition("t").tasks
    assert (status.skipped_count, status.pending_count) == (3, 0)
    taking = sampler | {"sampler_config": {"incomplete_groups": "take"}, "batch_size": 1, "batch_index": 1}
    assert ranks(client, **taking)[0].global_indexes == [1, 3]


def test_a_group_loses_a_rollout_and_the_rest_is_taken(client: AnyClient) -> None:
    put_agents(client)
    client.fail_samples("t", rollouts=["r1"])
    taking = {"sampler": "rank_aware", "sampler_config": {"incomplete_groups": "take"}, "batch_unit": "group"}
    assert ranks(client, dp_size=1, **taking)[0].rollouts == ["r0"]


def test_groups_with_too_few_rollouts_are_evicted(client: AnyClient) -> None:
    client.put("prompts", {"x": torch.ones(2, 5)}, keys=["p0", "r2"])
    client.get_meta(**ASKS | {"partition_id": "prompts", "task_name": "agents", "batch_size": 2})
    put_agents(client)
    client.fail_samples("t", rollouts=["r0"])
    taking = {"sampler": "rank_aware", "sampler_config": {"incomplete_groups": "take"}, "dp_size": 1}
    evicting = {"unmatched": "clear", "refill": ("prompts", "agents")}
    # Three samples are left of p0, of one rollout.
    assert ranks(client, batch_unit="group", least_members=2, **taking, **evicting)[0].rollouts == ["r2", "r2", "r3"]
    (unit,) = client.take_evicted("t", "train").units
    assert (unit.unit, unit.group, unit.reason, unit.sample_count, unit.refill) == (
        "group", "p0", "too_small", 4, "refilled"
    )  # fmt: skip


def test_a_rollout_that_lost_a_turn_is_not_left_where_groups_are_whole(client: AnyClient) -> None:
    put_agents(client)
    client.put(client.lookup_samples("t", rollouts=["r1"])[0].select_samples([2]), state="failed")
    evicting = {"unmatched": "fail", "least_members": 2, "batch_unit": "group", "sampler": "rank_aware", "dp_size": 1}
    taking = evicting | {"sampler_config": {"incomplete_groups": "take"}}
    assert ranks(client, **taking)[0].rollouts == ["r0", "r1", "r1"]
    put(client, "r4", 2, "p2", group_size=1, state="failed")
    put(client, "r5", 2, "p3", group_size=2, ends_rollouts=True)
    rest = put(client, "r6", 2, "p3", ends_rollouts=True)
    client.put(rest.select_samples([1]), state="failed")
    assert ranks(client, batch_index=1, **evicting)[0].rollouts == ["r2", "r2", "r3"]
    (unit,) = client.take_evicted("t", "train").units
    assert (unit.group, unit.reason, unit.sample_count) == ("p3", "too_small", 3)


def test_rollouts_are_evicted_whole(client: AnyClient) -> None:
    client.put("prompts", {"x": torch.ones(2, 5)}, keys=["p0", "r1"])
    client.get_meta(**ASKS | {"partition_id": "prompts", "task_name": "agents", "batch_size": 2})
    put_agents(client)
    evicting = {"where": [("loss_tokens", "<", 3)], "unmatched": "clear", "refill": ("prompts", "agents")}
    got = ranks(client, batch_unit="rollout", sampler="rank_aware", dp_size=1, batch_size=3, **evicting)
    assert got[0].rollouts == ["r0", "r2", "r2", "r3"]
    (unit,) = client.take_evicted("t", "train").units
    assert (unit.unit, unit.group, unit.rollout, unit.sample_count, unit.refill) == (
        "rollout",
        "p0",
        "r1",
        3,
        "refilled",
    )


def test_a_cleared_rollout_gives_back_its_name(client: AnyClient) -> None:
    put(client, "r0", 2, ends_rollouts=True)
    assert client.clear_samples("t", rollouts=["r0"]) == 2
    put(client, "r0", ends_rollouts=True)
    assert client.get_meta(**ASKS, batch_unit="rollout").global_indexes == [2]


# Admission


def test_a_rollout_is_admitted_once(client: AnyClient) -> None:
    client.create_partition("t", admissions=[tq.Admission("train", 2, unit="rollout", given_back="trained")])
    put(client, "r0", 2)
    put(client, "r1")
    with pytest.raises(tq.errors.AdmissionLimitError, match="3 rollouts outstanding"):
        put(client, "r2", timeout=0.5)
    put(client, "r0", ends_rollouts=True, timeout=5.0)
    assert client.describe_partition("t").tasks[0].outstanding_count == 2
    assert ranks(client, dp_size=1, batch_unit="rollout")[0].size == 3
    client.advance("t", "train", trained=0)
    assert client.describe_partition("t").tasks[0].outstanding_count == 1
    put(client, "r2", timeout=5.0)


def test_running_rollouts_are_bounded(client: AnyClient) -> None:
    client.create_partition("t", admissions=[tq.Admission("train", 9, unit="rollout", most_running=1)])
    first = client.acquire("t", "agents", rollouts=["r0"], lease=60.0)
    assert client.acquire("t", "agents", rollouts=["r0"], lease=60.0, max_wait=0).status == "batch"
    assert client.acquire("t", "agents", rollouts=["r1"], lease=60.0, max_wait=0).status == "not_yet"
    client.fail_samples("t", rollouts=["r0"])
    assert client.acquire("t", "agents", rollouts=["r1"], lease=60.0, max_wait=0).status == "batch"
    assert first.rollouts == ["r0"]


# Totals


def test_totals_are_those_of_the_plan_whatever_changes(client: AnyClient) -> None:
    put_agents(client)
    asks = {"batch_size": 2, "batch_unit": "rollout", "totals": ["loss_tokens"]}
    first = ranks(client, **asks)[0]
    client.set_custom_meta(first, {"loss_tokens": np.full(first.size, 100.0)})
    assert [meta.totals for meta in ranks(client, **asks)] == [first.totals] * 2
    assert first.totals[0].sums == {"loss_tokens": 11.0}
    with pytest.raises(tq.errors.PreconditionError, match="totals"):
        ranks(client, **asks | {"totals": []})


def test_totals_need_a_number_of_each_sample(client: AnyClient) -> None:
    put(client, "r0")
    client.put("t", {"x": torch.ones(1, 5)}, custom_meta=[{"loss_tokens": "many"}])
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"column 'loss_tokens' of sample 1 .* is not a number"):
        ranks(client, totals=["loss_tokens"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="totals names 5 columns; expected at most 4"):
        ranks(client, totals=list("abcde"))
    with pytest.raises(tq.errors.InvalidArgumentError, match="totals is a, but only ranks receive totals"):
        client.get_meta(**ASKS, totals=["a"])
    assert ranks(client)[0].totals[0].token_count is None  # sample 1 has no length


def test_micro_batches_of_a_loader_have_the_totals_of_their_step(client: AnyClient, server: Any) -> None:
    put_agents(client)
    client.seal_partition("t")
    dataset = StreamingDataset(
        server.address, partition_id="t", task_name="train", data_fields=["x"], batch_size=4, micro_batch_size=2,
        batch_unit="rollout", totals=["loss_tokens"],
    )  # fmt: skip
    loader = StreamingDataLoader(dataset)
    totals = [meta.totals for _, meta in loader]
    assert [[each.sums for each in one] for one in totals] == [[{"loss_tokens": 11.0}]] * 4


def test_staleness_of_rollouts_is_bounded(client: AnyClient) -> None:
    bounded = tq.Admission("train", max_staleness=1, global_batch=1, unit="rollout", late="evict")
    client.publish_version(0)
    client.create_partition("t", admissions=[bounded])
    late = client.acquire("t", "agents", rollouts=["late"], groups=["p0"], lease=60.0)
    for rollout in ("a", "b"):
        slot = client.acquire("t", "agents", rollouts=[rollout], lease=60.0, max_wait=5.0)
        more = client.acquire("t", "agents", rollouts=[rollout], lease=60.0)
        for one in (slot, more):
            client.put(one, {"x": torch.ones(1, 5)}, ack=True, ends_rollouts=one is more)
        evicting = {"unmatched": "clear", "batch_index": "ab".index(rollout)}
        assert ranks(client, dp_size=1, batch_unit="rollout", **evicting)[0].rollouts == [rollout] * 2
        version = 1 + "ab".index(rollout)
        client.publish_version(version, trained={("t", "train"): version - 1})
    (unit,) = client.take_evicted("t", "train").units
    assert (unit.unit, unit.rollout, unit.group, unit.reason) == ("rollout", "late", "p0", "late")
    with pytest.raises((tq.errors.LeaseExpiredError, tq.errors.NotFoundError)):
        client.put(late, {"x": torch.ones(1, 5)}, ack=True)
