"""Packs and token budgets through a real server: all ranks agree, nothing is lost, what cannot be is said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from live_server import AnyClient, LiveServer

import tq_service as tq

LENGTHS = [90, 80, 30, 25, 15, 10, 60, 60, 5]


def put_lengths(client: AnyClient, lengths: list[int]) -> None:
    rows = [torch.arange(length) for length in lengths]
    client.put("train", {"x": rows}, custom_meta=[{"total_lengths": length} for length in lengths])


def asks(rank: int, sampler: str, **config: Any) -> dict[str, Any]:
    return {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 64, "batch_index": 0,
            "sampler": sampler, "sampler_config": config, "dp_rank": rank, "dp_size": 2}  # fmt: skip


def test_all_ranks_get_the_steps_and_packs_of_one_plan(client: AnyClient) -> None:
    put_lengths(client, LENGTHS)
    client.seal_partition("train")
    config = {"optimizer_steps": 3, "pack_max_length": 100}
    metas = [client.get_meta(**asks(rank, "packed", **config)) for rank in (1, 0)]
    assert metas == [client.get_meta(**asks(rank, "packed", **config)) for rank in (1, 0)]
    assert sorted(row for meta in metas for row in meta.global_indexes) == list(range(len(LENGTHS)))
    shapes = [[len(step.packs) for step in meta.steps] for meta in metas]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 3
    for meta in metas:
        for pack in (pack for step in meta.steps for pack in step.packs):
            tokens = [LENGTHS[meta.global_indexes[position]] for position in pack.positions]
            assert list(pack.lengths) == tokens
            assert sum(tokens) + pack.padding_tokens == 100


def test_a_sample_longer_than_a_pack_is_an_error_that_consumes_nothing(client: AnyClient) -> None:
    put_lengths(client, [5, 101])
    client.seal_partition("train")
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="got 101 for sample 1, expected at most pack_max_length"
    ) as error:
        client.get_meta(**asks(0, "packed", optimizer_steps=1, pack_max_length=100))
    assert (error.value.field, error.value.metadata["column"]) == ("sampler_config", "total_lengths")
    assert client.check_consumption("train", "t", missing_ok=True).consumed_count == 0
    dropped = [
        client.get_meta(**asks(rank, "packed", optimizer_steps=1, pack_max_length=100, overlong="drop"))
        for rank in range(2)
    ]
    assert [row for meta in dropped for row in meta.global_indexes] == [0]
    assert [row for meta in dropped for row in meta.dropped_indexes] == [1]
    assert sum(len(pack.positions) for meta in dropped for step in meta.steps for pack in step.packs) == 1


def test_a_sample_beyond_the_budget_does_not_stop_the_run(client: AnyClient) -> None:
    put_lengths(client, [10, 500, 10, 10])
    client.seal_partition("train")
    config = {"tokens_per_rank": 400, "tokens_per_micro_batch": 400, "overlong": "drop", "align": 8}
    batches = [client.get_meta(**asks(rank, "token_budget", **config)) for rank in range(2)]
    assert sorted(row for meta in batches for row in meta.global_indexes) == [0, 2, 3]
    end = client.get_meta(**{**asks(0, "token_budget", **config), "batch_index": 1})
    assert (end.status, end.end.overlong_count) == ("end", 1)


def test_ranks_wait_until_their_budget_is_used_up(client: AnyClient, server: LiveServer) -> None:
    config = {"tokens_per_rank": 100, "tokens_per_micro_batch": 60}
    assert client.get_meta(**asks(0, "token_budget", **config), max_wait=0.0).status == "not_yet"
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(lambda rank=rank: server.client("sync").get_meta(
                **asks(rank, "token_budget", **config), max_wait=60.0))
            for rank in range(2)
        ]  # fmt: skip
        for length in (60, 50, 40, 30, 40):
            put_lengths(client, [length])
        metas = [call.result() for call in waiting]
    assert sorted(meta.global_indexes for meta in metas) == [[0, 3], [1, 2]]
    assert [len(meta.micro_batches) for meta in metas] == [2, 2]
    rest = client.get_meta(**{**asks(0, "token_budget", **config), "batch_index": 1}, max_wait=0.0)
    assert rest.status == "not_yet"
