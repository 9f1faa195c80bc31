"""Claims through a real server, with both clients: ranks, queue workers, the end, epochs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from live_server import AnyClient, LiveServer

import tq_service as tq

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"]}


def put_rows(client: AnyClient, count: int, **arguments: Any) -> None:
    client.put("train", {"x": torch.arange(count)}, **arguments)


def test_every_retry_of_a_rank_gets_the_same(client: AnyClient, server: LiveServer) -> None:
    put_rows(client, 10)
    client.seal_partition("train")
    replica = server.client("sync")
    batches: dict[tuple[int, int], Any] = {}
    for index in (2, 0, 1, 3):  # whoever asks for batch 2 has 0 and 1 planned as well
        for rank in (1, 0):
            asks = {**ASKS, "batch_size": 2, "micro_batch_size": 1, "dp_rank": rank, "dp_size": 2}
            got = client.get_meta(**asks, batch_index=index)
            assert got == client.get_meta(**asks, batch_index=index)
            assert got == replica.get_meta(**asks, batch_index=index) == pickle.loads(pickle.dumps(got))
            batches[index, rank] = got
    assert [batches[0, 0].global_indexes, batches[0, 1].global_indexes] == [[0, 1], [2, 3]]
    last = batches[2, 0], batches[2, 1]
    assert sorted(index for one in last for index in one.global_indexes) == [8, 9]
    assert len(last[0].micro_batches) == len(last[1].micro_batches)
    assert [batches[3, rank].status for rank in (0, 1)] == ["end", "end"]
    status = client.check_consumption(**{key: ASKS[key] for key in ("partition_id", "task_name")})
    assert (status.consumed_count, status.complete, status.sealed) == (10, True, True)


def test_an_empty_rank_gets_a_typed_empty_batch(client: AnyClient) -> None:
    put_rows(client, 1)
    client.seal_partition("train")
    asks = {**ASKS, "batch_size": 2, "micro_batch_size": 2, "dp_size": 3, "batch_index": 0}
    parts = [client.get_meta(**asks, dp_rank=rank) for rank in range(3)]
    assert [part.status for part in parts] == ["batch"] * 3
    assert sorted(part.size for part in parts) == [0, 0, 1]
    assert {len(part.micro_batches) for part in parts} == {1}
    for part in parts:
        batch = client.get_data(part)
        assert batch["x"].dtype is torch.int64
        assert batch["x"].shape == (part.size,)


def test_drop_last_leaves_out_the_short_batch(client: AnyClient) -> None:
    put_rows(client, 5)
    client.seal_partition("train")
    asks = {**ASKS, "batch_size": 2, "dp_size": 1, "dp_rank": 0, "drop_last": True}
    assert [client.get_meta(**asks, batch_index=index).size for index in range(2)] == [2, 2]
    end = client.get_meta(**asks, batch_index=2)
    assert (end.status, end.skipped_count) == ("end", 1)
    assert end.end is not None
    assert (end.end.consumed_count, end.end.skipped_counts) == (4, {"left_over_count": 1})
    assert client.check_consumption("train", "t").complete


def test_finite_ends_with_what_is_there_and_says_so_to_all_ranks(client: AnyClient) -> None:
    put_rows(client, 3)
    asks = {**ASKS, "batch_size": 2, "dp_size": 2, "finite": True}
    assert [client.get_meta(**asks, dp_rank=rank, batch_index=0).size for rank in range(2)] in ([2, 1], [1, 2])
    assert client.get_meta(**asks, dp_rank=0, batch_index=1).status == "end"
    put_rows(client, 3)
    assert client.get_meta(**asks, dp_rank=1, batch_index=1).status == "end"
    assert client.get_meta(**{**ASKS, "task_name": "s"}, batch_size=9, max_wait=0).status == "not_yet"


def test_queue_workers_take_at_least_the_minimum(client: AnyClient) -> None:
    put_rows(client, 7)
    assert client.get_meta(**ASKS, batch_size=4, min_batch_size=2).global_indexes == [0, 1, 2, 3]
    assert client.get_meta(**ASKS, batch_size=4, min_batch_size=2).global_indexes == [4, 5, 6]
    put_rows(client, 1)
    assert client.get_meta(**ASKS, batch_size=4, min_batch_size=2, max_wait=0).status == "not_yet"
    client.seal_partition("train")  # the last ones are handed out though fewer
    assert client.get_meta(**ASKS, batch_size=4, min_batch_size=2).global_indexes == [7]
    assert client.get_meta(**ASKS, batch_size=4, min_batch_size=2).status == "end"


def test_queue_workers_take_groups(client: AnyClient) -> None:
    put_rows(client, 6, groups=list("aabbcc"), group_size=2)
    asks = {**ASKS, "batch_unit": "group", "sampler": "grpo_group_n", "sampler_config": {"n_samples_per_prompt": 2}}
    first = client.get_meta(**asks, batch_size=2)
    assert (first.global_indexes, first.groups) == ([0, 1, 2, 3], list("aabb"))
    assert client.get_meta(**asks, batch_size=2, max_wait=0).status == "not_yet"
    second = client.get_meta(**asks, batch_size=2, min_batch_size=1)
    assert second.groups == ["c", "c"]


def test_groups_of_neighbours_begin_anywhere_where_a_claim_says_so(client: AnyClient) -> None:
    put_rows(client, 1)
    put_rows(client, 6)
    second = client.lookup_samples("train")[0].select_samples([1])
    asks: dict[str, Any] = {**ASKS, "sampler": "grpo_group_n", "batch_size": 6, "min_batch_size": 1}
    with pytest.raises(tq.errors.InvalidArgumentError, match="blocks to 'anywhere'"):
        client.get_meta(**asks, sampler_config={"n_samples_per_prompt": 3}, max_wait=0.0)
    asks["sampler_config"] = {"n_samples_per_prompt": 3, "blocks": "anywhere"}
    client.put(second, state="held")
    got = client.get_meta(**asks, lease=60.0)
    assert got.global_indexes == [2, 3, 4]
    with pytest.raises(tq.errors.InvalidArgumentError, match="form one group"):
        client.ack(got.select_samples([0]))
    assert client.ack(got) == 3
    client.put(second, state="live")
    client.seal_partition("train")
    end = client.get_meta(**asks)
    assert end.end is not None
    assert end.end.in_incomplete_groups_count == 4


def test_tasks_consume_independently(client: AnyClient) -> None:
    put_rows(client, 4)
    for task in ("actor", "critic"):
        assert client.get_meta(**{**ASKS, "task_name": task}, batch_size=4).size == 4
    assert [task.consumed_count for task in client.describe_partition("train").tasks] == [4, 4]


def test_a_released_claim_is_claimable_again(client: AnyClient) -> None:
    put_rows(client, 4)
    first = client.get_meta(**ASKS, batch_size=3)
    assert client.release(first) == 3
    assert client.release(first) == 0
    assert client.get_meta(**ASKS, batch_size=4).global_indexes == [0, 1, 2, 3]
    assert client.check_consumption("train", "t").consumed_count == 4


def test_a_reset_starts_the_next_epoch(client: AnyClient) -> None:
    put_rows(client, 4)
    asks = {**ASKS, "batch_size": 2, "dp_size": 1, "dp_rank": 0}
    first = client.get_meta(**asks, batch_index=0)
    client.get_meta(**asks, batch_index=1)
    assert client.reset_consumption("train", "t", 0) == 1
    again = client.get_meta(**asks, batch_index=0, epoch=1)
    assert (again.epoch, again.global_indexes) == (1, first.global_indexes)
    assert client.reset_consumption("train", "t", 1, keep_consumed=True) == 2
    rest = client.get_meta(**asks, batch_index=0)
    assert (rest.epoch, rest.global_indexes) == (2, [2, 3])
    assert client.check_consumption("train", "t").epoch == 2


def test_clearing_consumed_samples_keeps_the_counts(client: AnyClient) -> None:
    put_rows(client, 6)
    got = client.get_meta(**ASKS, batch_size=4)
    assert client.clear_samples(got) == 4
    status = client.check_consumption("train", "t")
    assert (status.consumed_count, status.total_count, status.skipped_count) == (4, 6, 0)
    assert client.clear_samples("train", global_indexes=[4, 99]) == 1
    client.seal_partition("train")
    assert client.get_meta(**ASKS, batch_size=4).global_indexes == [5]
    end = client.get_meta(**ASKS, batch_size=4)
    assert (end.status, end.skipped_count) == ("end", 1)


def test_balanced_ranks_get_like_token_totals(client: AnyClient) -> None:
    lengths = torch.randint(1, 1000, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    put_rows(client, 64, custom_meta=[{"total_lengths": length} for length in lengths])
    asks = {**ASKS, "batch_size": 16, "dp_size": 4, "batch_index": 0, "sampler": "seqlen_balanced"}
    asks["sampler_config"] = {"n_samples_per_prompt": 1}
    parts = [client.get_meta(**asks, dp_rank=rank) for rank in range(4)]
    totals = [sum(lengths[index] for index in part.global_indexes) for part in parts]
    assert sorted(index for part in parts for index in part.global_indexes) == list(range(64))
    assert max(totals) < 1.02 * min(totals)


def test_ranks_are_balanced_by_the_rows_themselves(client: AnyClient) -> None:
    """As if each sample had the length of its longest row in total_lengths."""
    lengths = torch.randint(1, 1000, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    columns = {"x": torch.arange(64), "answer": [torch.zeros(length // 2) for length in lengths]}
    columns["ids"] = [torch.zeros(length) for length in lengths]
    fields = ["answer", "x", "ids"]
    client.put("train", columns)
    client.put("named", columns, custom_meta={"total_lengths": lengths})
    asks: dict[str, Any] = {"task_name": "t", "batch_size": 16, "dp_size": 4, "batch_index": 0}
    asks["sampler"] = tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=1)
    for rank in range(4):
        # Ranks may name the fields in any order.
        part = client.get_meta(
            partition_id="train", data_fields=fields[rank % 3 :] + fields[: rank % 3], dp_rank=rank, **asks
        )
        named = client.get_meta(partition_id="named", data_fields=["x"], dp_rank=rank, **asks)
        assert part.global_indexes == named.global_indexes


def test_a_sampler_with_its_options_is_the_same_as_its_name_and_these_options(client: AnyClient) -> None:
    put_rows(client, 8, custom_meta={"total_lengths": [5, 1, 1, 1, 1, 1, 1, 1]})
    asks: dict[str, Any] = {**ASKS, "batch_size": 4, "dp_size": 2, "batch_index": 0}
    sampler = tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=2, cost="attention")
    config = {"n_samples_per_prompt": 2, "cost": "attention"}
    first = client.get_meta(**asks, dp_rank=0, sampler=sampler)
    assert client.get_meta(**asks, dp_rank=0, sampler="seqlen_balanced", sampler_config=config) == first
    _, second = client.get_batch(**asks, dp_rank=1, sampler=sampler)
    assert {*first.global_indexes, *second.global_indexes} == {*range(8)}
    with pytest.raises(tq.errors.RankDisagreementError, match="sampler_config"):
        client.get_meta(**asks, dp_rank=0, sampler=tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=4))
