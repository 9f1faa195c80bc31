"""Packs planned by a real service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pack_samples import jagged

import tq_service as tq
from tq_service.data import (
    PackedMicroBatch,
    PackOptions,
    StreamingDataLoader,
    StreamingDataset,
    split_packs,
    unpack_sequences,
)

SIZE = 64
OPTIONS = PackOptions(
    pack_max_length=SIZE, padding_sequence_length=16, repeat_fields=("advantage",), keep_fields=("prompt",)
)
FIELDS = ["index", "input_ids", "labels", "logprobs", "position_ids", "advantage", "prompt"]
LENGTHS = np.random.default_rng(3).integers(1, 40, 50).tolist()


def columns(first: int, lengths: list[int]) -> dict[str, Any]:
    """Return samples told apart by their index, from `first` on."""
    indexes = range(first, first + len(lengths))
    counted = list(zip(indexes, lengths, strict=True))
    return {
        "index": torch.tensor(list(indexes)),
        "input_ids": [index * 100 + torch.arange(length) for index, length in counted],
        "labels": [index * 100 + 1 + torch.arange(length) for index, length in counted],
        "logprobs": [torch.full((length,), index, dtype=torch.bfloat16) for index, length in counted],
        "position_ids": jagged([torch.arange(length).expand(3, length) + index for index, length in counted], 1),
        "advantage": torch.tensor([float(index) for index in indexes]),
        "prompt": [torch.full((1 + index % 3,), index) for index in indexes],
    }


@pytest.fixture
def partition(request: pytest.FixtureRequest, address: str) -> Iterator[str]:
    name = request.node.name
    yield name
    with tq.Client(address) as client:
        client.clear_partition(name)


def fill(address: str, partition: str, lengths: list[int]) -> None:
    with tq.Client(address) as client:
        for first in range(0, len(lengths), 8):
            part = lengths[first : first + 8]
            meta = [{"total_lengths": length} for length in part]
            client.put(partition, columns(first, part), custom_meta=meta)
        client.seal_partition(partition)


def dataset_of(address: str, partition: str, rank: int = 0, dp_size: int = 1, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 16, "data_fields": FIELDS, "partition_id": partition, "task_name": "update_actor",
        "dp_rank": rank, "dp_size": dp_size, "sampler": "packed", "max_wait": 0.5, "pack": OPTIONS,
        "sampler_config": {"optimizer_steps": 3, "pack_max_length": SIZE},
    }  # fmt: skip
    return StreamingDataset(address, **{**options, **changes})


def check(pack: PackedMicroBatch, size: int = SIZE) -> list[int]:
    """Assert that a pack holds what was put, and return the indexes of its samples."""
    assert pack["input_ids"].shape == pack["labels"].shape == pack["advantage"].shape == (size,)
    assert pack["position_ids"].shape == (3, size)
    assert int(pack["padding_mask"].sum()) == pack.num_padding == size - pack.token_count
    assert bool((pack["labels"][pack["padding_mask"]] == -100).all())
    indexes: list[int] = pack["index"].tolist()
    assert indexes == pack.meta.global_indexes
    expected = columns(0, LENGTHS)
    rows = unpack_sequences(pack)
    for name in FIELDS[1:]:
        assert rows[name].dtype is expected[name][0].dtype
        for row, index, length in zip(rows[name].unbind() if indexes else (), indexes, pack.lengths, strict=True):
            whole = expected[name][index]
            assert torch.equal(row, whole[..., :length] if name not in ("advantage", "prompt") else whole), name
    return indexes


@pytest.mark.parametrize(("count", "num_workers"), [(50, 0), (50, 2), (3, 0), (33, 0)])
def test_two_ranks_train_the_same_number_of_packs(address: str, partition: str, count: int, num_workers: int) -> None:
    fill(address, partition, LENGTHS[:count])
    places, seen = [], []
    for rank in range(2):
        with StreamingDataLoader(dataset_of(address, partition, rank, 2), num_workers) as loader:
            packs = list(loader)
        places.append([(pack.step, pack.step_count, pack.pack, pack.ends_step) for pack in packs])
        seen += [index for pack in packs for index in check(pack)]
    assert places[0] == places[1]
    assert sorted(seen) == list(range(count))
    steps = Counter(ends for _, _, _, ends in places[0])[True]
    assert steps == 3 * -(-count // 32)
    assert {step_count for _, step_count, _, _ in places[0]} == {3}


def test_packs_are_planned_by_the_rows_themselves(address: str, partition: str) -> None:
    with tq.Client(address) as client:
        client.put(partition, columns(0, LENGTHS))
        client.seal_partition(partition)
    lengths: dict[int, int] = {}
    for rank in range(2):
        sampler = tq.samplers.PackedSampler(optimizer_steps=3, pack_max_length=SIZE)
        dataset = dataset_of(
            address, partition, rank, 2, sampler=sampler, sampler_config=None, data_fields=["index", "input_ids"],
            pack=PackOptions(pack_max_length=SIZE),
        )  # fmt: skip
        for pack in dataset:
            lengths |= zip(pack["index"].tolist(), pack.lengths, strict=True)
    assert lengths == dict(enumerate(LENGTHS))


@pytest.mark.parametrize(
    ("sampler", "config"),
    [
        ("packed", {"optimizer_steps": 2, "pack_max_length": SIZE, "packs_multiple_of": 3}),
        ("token_budget", {"tokens_per_rank": 400, "tokens_per_micro_batch": SIZE, "packs_multiple_of": 3}),
    ],
)
def test_packs_of_aligned_samples_hold_what_was_planned(
    address: str, partition: str, sampler: str, config: dict[str, Any]
) -> None:
    fill(address, partition, LENGTHS)
    options = replace(OPTIONS, align=8)
    seen, counts = [], []
    for rank in range(2):
        dataset = dataset_of(
            address, partition, rank, 2, sampler=sampler, sampler_config={**config, "align": 8}, pack=options
        )
        packs = list(StreamingDataLoader(dataset))
        for pack in packs:
            assert not (pack["cu_seqlens"] % 8).any(), "each sample begins and ends at a multiple of 8"
            seen += check(pack)
        counts.append([pack.pack_count for pack in packs])
    assert counts[0] == counts[1]
    assert not any(count % 3 for count in counts[0])
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_samples_that_are_all_of_one_length_are_packed_like_others(address: str, partition: str) -> None:
    """Their fields are dense, as no row differs; what has a value for each token is concatenated all the same."""
    with tq.Client(address) as client:
        for first in range(0, 12, 4):
            client.put(partition, columns(first, [9] * 4), custom_meta=[{"total_lengths": 9}] * 4)
        client.seal_partition(partition)
        specs = {field.spec.name: field.spec for field in client.describe_partition(partition).fields}
    assert specs["input_ids"].layout == specs["logprobs"].layout == "dense"
    seen = []
    for pack in StreamingDataLoader(dataset_of(address, partition)):
        seen += pack["index"].tolist()
        assert pack["input_ids"].shape == pack["labels"].shape == pack["logprobs"].shape == (SIZE,)
        assert pack["position_ids"].shape == (3, SIZE)
        expected = columns(0, [9] * 12)
        for name in ("input_ids", "labels", "logprobs"):
            for row, index in zip(pack.split_tokens(pack[name]), pack["index"].tolist(), strict=True):
                assert torch.equal(row, expected[name][index]), name
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("lengths", [[9] * 6, [3] * 6, [5, 7, 7, 9, 3, 7], [9, 9, 9, 9, 5, 9]])
def test_position_ids_put_one_trajectory_after_the_other_are_packed(
    address: str, partition: str, lengths: list[int]
) -> None:
    """torch makes them ragged in their first dimension, which has no tokens, as long as there is one length only."""
    with tq.Client(address) as client:
        for index, length in enumerate(lengths):
            data = columns(index, [length])
            data["position_ids"] = torch.nested.as_nested_tensor(data["position_ids"].unbind(), layout=torch.jagged)
            client.put(partition, data, custom_meta=[{"total_lengths": length}])
        client.seal_partition(partition)
    seen = []
    for pack in StreamingDataLoader(dataset_of(address, partition)):
        seen += pack["index"].tolist()
        assert pack["position_ids"].shape == (3, SIZE)
        expected = columns(0, lengths)["position_ids"].unbind()
        rows = unpack_sequences(pack)["position_ids"].unbind()
        for row, index in zip(rows, pack["index"].tolist(), strict=True):
            assert torch.equal(row, expected[index])
    assert sorted(seen) == list(range(len(lengths)))


def test_a_restart_and_a_reset_give_the_same_packs(address: str, partition: str) -> None:
    fill(address, partition, LENGTHS)
    with StreamingDataLoader(dataset_of(address, partition, replay_buffer_bytes=20_000)) as loader:
        first = [pack.meta for pack in loader]
        loader.reset()
        assert [pack.meta for pack in loader] == first
    restarted = [pack.meta for pack in StreamingDataLoader(dataset_of(address, partition, start_batch_index=1))]
    assert restarted == first[-len(restarted) :]
    assert 0 < len(restarted) < len(first)


def test_a_plan_that_truncates_is_packed_truncated(address: str, partition: str) -> None:
    fill(address, partition, LENGTHS)
    config = {"optimizer_steps": 1, "pack_max_length": 24, "overlong": "truncate"}
    options = {"repeat_fields": ("advantage",), "keep_fields": ("prompt",), "pack_max_length": 24}
    truncating = PackOptions(**options, overlong="truncate")
    packs = list(StreamingDataLoader(dataset_of(address, partition, sampler_config=config, pack=truncating)))
    lengths = {index: length for pack in packs for index, length in zip(check(pack, 24), pack.lengths, strict=True)}
    assert lengths == {index: min(length, 24) for index, length in enumerate(LENGTHS)}


def test_what_the_sampler_drops_is_in_no_pack(address: str, partition: str) -> None:
    fill(address, partition, LENGTHS)
    config = {"optimizer_steps": 2, "pack_max_length": 24, "overlong": "drop"}
    options = PackOptions(repeat_fields=("advantage",), keep_fields=("prompt",), pack_max_length=24)
    packs = list(StreamingDataLoader(dataset_of(address, partition, sampler_config=config, pack=options)))
    seen = sorted(index for pack in packs for index in check(pack, 24))
    assert seen == [index for index, length in enumerate(LENGTHS) if length <= 24]


def test_micro_batches_of_a_token_budget_are_packs_too(address: str, partition: str) -> None:
    fill(address, partition, LENGTHS)
    config = {"tokens_per_rank": 200, "tokens_per_micro_batch": SIZE}
    places, seen = [], []
    for rank in range(2):
        packs = list(dataset_of(address, partition, rank, 2, sampler="token_budget", sampler_config=config))
        seen += [index for pack in packs for index in check(pack)]
        places.append([pack.ends_step for pack in packs])
    assert places[0] == places[1]
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_the_claim_of_a_queue_worker_can_be_packed(address: str, partition: str) -> None:
    fill(address, partition, LENGTHS)
    with tq.Client(address) as client:
        meta = client.get_meta(
            partition_id=partition, task_name="score", data_fields=FIELDS, batch_size=20, sampler="packed",
            sampler_config={"optimizer_steps": 1, "pack_max_length": SIZE},
        )  # fmt: skip
        packs = list(split_packs(client.get_data(meta), meta, OPTIONS))
    assert sorted(index for pack in packs for index in check(pack)) == list(range(20))


def test_what_a_model_says_of_tokens_goes_back_to_the_samples(address: str, partition: str) -> None:
    fill(address, partition, LENGTHS)
    with tq.Client(address) as client, StreamingDataLoader(dataset_of(address, partition)) as loader:
        for pack in loader:
            doubled = pack["input_ids"] * 2
            if pack.meta.size:
                client.put(pack.meta, {"doubled": pack.split_tokens(doubled)})
        found = client.get_meta(
            partition_id=partition, task_name="read", data_fields=["doubled", "input_ids"], batch_size=len(LENGTHS)
        )
        batch = client.get_data(found)
    assert batch["doubled"].offsets().diff().tolist() == LENGTHS
    assert torch.equal(batch["doubled"].values(), batch["input_ids"].values() * 2)
