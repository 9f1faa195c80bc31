"""Loaders of a context-parallel group, and of padded batches, against a real service."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from live_server import LiveServer

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset

LENGTHS = [5, 16, 1, 0, 9, 30, 2, 3, 8, 7]
FIELDS = ["input_ids", "labels", "experts", "index"]


@pytest.fixture
def filled(server: LiveServer) -> LiveServer:
    client = server.client()
    client.create_partition("train", fields=[tq.FieldSpec(name, layout="jagged") for name in FIELDS[:3]])
    rows = [torch.arange(length) + 100 * at for at, length in enumerate(LENGTHS)]
    client.put(
        "train",
        {
            "input_ids": rows,
            "labels": [row.to(torch.float32) for row in rows],
            "experts": [row.to(torch.int16).reshape(-1, 1, 1).expand(-1, 3, 2) for row in rows],
            "index": torch.arange(len(LENGTHS)),
        },
    )
    client.seal_partition("train")
    return server


def dataset_of(server: LiveServer, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 4, "micro_batch_size": 2, "data_fields": FIELDS, "partition_id": "train", "task_name": "train",
        "max_wait": 0.5,
    }  # fmt: skip
    return StreamingDataset(server.address, **{**options, **changes})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_group_shares_the_rows_of_its_batches(filled: LiveServer, layout: Any, num_workers: int) -> None:
    multiple = 3 * 2 * (2 if layout == "zigzag" else 1)
    found: dict[int, dict[int, float]] = {at: {} for at in range(len(LENGTHS))}
    orders = []
    for rank in range(3):
        dataset = dataset_of(
            filled, cp_rank=rank, cp_size=3, cp_fields=FIELDS[:3], cp_layout=layout, cp_align=2,
            cp_fill={"labels": -100},
        )  # fmt: skip
        with StreamingDataLoader(dataset, num_workers=num_workers) as loader:
            items = list(loader)
        orders.append([micro_batch["index"].tolist() for micro_batch, _ in items])
        for micro_batch, meta in items:
            assert meta.size == len(micro_batch["index"])
            columns = [micro_batch[name].unbind() for name in ("input_ids", "labels", "experts", "cp_positions")]
            for at, ids, labels, experts, positions in zip(micro_batch["index"].tolist(), *columns, strict=True):
                share = -(-LENGTHS[at] // multiple) * multiple // 3
                assert len(ids) == len(labels) == len(experts) == len(positions) == share
                within = positions < LENGTHS[at]
                assert torch.equal(ids[within], positions[within] + 100 * at)
                assert torch.equal(labels[within], ids[within].to(torch.float32))
                assert torch.equal(experts[within], ids[within].to(torch.int16).reshape(-1, 1, 1).expand(-1, 3, 2))
                assert (labels[~within] == -100).all()
                assert (ids[~within] == 0).all()
                for position, label in zip(positions.tolist(), labels.tolist(), strict=True):
                    assert position not in found[at]
                    found[at][position] = label
    assert orders[0] == orders[1] == orders[2]
    for at, length in enumerate(LENGTHS):
        assert sorted(found[at]) == list(range(-(-length // multiple) * multiple))


def test_a_group_of_four_fetches_a_quarter_each(filled: LiveServer) -> None:
    client = filled.client()
    rows = [torch.arange(length) for length in (4096, 2000, 8192, 512)]
    client.put("long", {"x": rows, "y": [row.to(torch.bfloat16) for row in rows]})
    client.seal_partition("long")
    stat = filled.app.storage.engine.stat
    fetched = []
    for cp_size in (1, 4):
        for rank in range(cp_size):
            cp: dict[str, Any] = {"cp_rank": rank, "cp_size": cp_size, "cp_fields": ["x", "y"]} if cp_size > 1 else {}
            before = stat().read_bytes
            dataset = dataset_of(filled, partition_id="long", data_fields=["x", "y"], micro_batch_size=None, **cp)
            assert len(list(StreamingDataLoader(dataset, prefetch_factor=0))) == 1
            fetched.append(stat().read_bytes - before)
    whole, *shares = fetched
    assert whole == sum(map(len, rows)) * (8 + 2)
    assert sum(shares) == whole
    assert max(shares) <= whole / 4 + len(rows) * 8 * (8 + 2)


def test_a_step_of_shared_images_takes_a_seventh_of_whole_rows(filled: LiveServer) -> None:
    """A step of GRPO of a group of four, scaled down: 4 prompts with an image of 64 KiB, and 8 responses each."""
    prompts, size, cp_size = 4, 8, 4
    client, stat = filled.client(), filled.app.storage.engine.stat
    images = torch.arange(prompts << 16).reshape(prompts, -1).to(torch.uint8)
    tokens = [torch.arange(length) + 1000 * at for at, length in enumerate(range(32, 32 + prompts * size))]
    groups = [f"p{prompt}" for prompt in range(prompts) for _ in range(size)]
    client.create_partition("whole")
    client.create_partition("shared", fields=[tq.FieldSpec("pixels", scope="group")])
    stored, fetched, got = {}, {}, {}
    for partition in ("whole", "shared"):
        before = stat().used_bytes
        data: dict[str, Any] = {"input_ids": tokens}
        if partition == "whole":
            data["pixels"] = images.repeat_interleave(size, dim=0)
        else:
            client.put_groups("shared", {"pixels": images}, groups=[f"p{each}" for each in range(prompts)])
        client.put(partition, data, groups=groups, group_size=size)
        client.seal_partition(partition)
        stored[partition], before = stat().used_bytes - before, stat().read_bytes
        for rank in range(cp_size):
            share: dict[str, Any] = {} if partition == "whole" else {"cp_fields": ["input_ids"], "cp_size": cp_size}
            dataset = dataset_of(
                filled, partition_id=partition, data_fields=["input_ids", "pixels"], batch_size=prompts * size,
                micro_batch_size=None, cp_rank=rank if share else 0, **share,
            )  # fmt: skip
            ((got[partition, rank], _),) = list(StreamingDataLoader(dataset, prefetch_factor=0))
        fetched[partition] = stat().read_bytes - before
    assert stored["shared"] * 7 <= stored["whole"]
    assert fetched["shared"] * 7 <= fetched["whole"]
    for rank in range(cp_size):
        assert torch.equal(got["shared", rank]["pixels"], got["whole", rank]["pixels"])
    found: list[dict[int, int]] = [{} for _ in tokens]
    for rank in range(cp_size):
        batch = got["shared", rank]
        for row, ids, at in zip(found, batch["input_ids"].unbind(), batch["cp_positions"].unbind(), strict=True):
            row |= dict(zip(at.tolist(), ids.tolist(), strict=True))
    for row, ids in zip(found, got["whole", 0]["input_ids"].unbind(), strict=True):
        assert [row[position] for position in range(len(ids))] == ids.tolist()


def test_empty_micro_batches_of_a_group_have_the_same_columns(filled: LiveServer) -> None:
    dataset = dataset_of(
        filled, dp_rank=1, dp_size=2, batch_size=5, micro_batch_size=1, cp_size=2, cp_fields=["input_ids"],
        where=[], sampler="sequential", data_fields=["input_ids", "index"], drop_last=False, partition_id="few",
    )  # fmt: skip
    client = filled.client()
    client.create_partition("few", fields=[tq.FieldSpec("input_ids", layout="jagged")])
    client.put("few", {"input_ids": [torch.arange(3)], "index": torch.arange(1)})
    client.seal_partition("few")
    ((micro_batch, meta),) = list(StreamingDataLoader(dataset))
    assert meta.size == 0
    assert micro_batch["input_ids"].layout is micro_batch["cp_positions"].layout is torch.jagged
    assert micro_batch["cp_positions"].dtype is torch.int64


def test_batches_come_padded(filled: LiveServer) -> None:
    options = {
        "padded": ["input_ids", "labels"],
        "pad_value": {"labels": -100},
        "length": 12,
        "mask": True,
        "truncate": True,
    }
    dataset = dataset_of(filled, read_options=options)
    items = list(StreamingDataLoader(dataset))
    assert [tuple(each["input_ids"].shape) for each, _ in items] == [(2, 12)] * 5
    for micro_batch, _ in items:
        for at, ids, labels, mask in zip(
            *(micro_batch[name].tolist() for name in ("index", "input_ids", "labels", "labels_mask")), strict=True
        ):
            length = min(LENGTHS[at], 12)
            assert ids == [100 * at + position for position in range(length)] + [0] * (12 - length)
            assert labels[length:] == [-100] * (12 - length)
            assert mask == [True] * length + [False] * (12 - length)


def test_shares_are_padded_to_the_longest_of_a_batch(filled: LiveServer) -> None:
    dataset = dataset_of(
        filled, cp_size=2, cp_rank=1, cp_fields=["input_ids"], data_fields=["input_ids"], cp_layout="contiguous",
        read_options={"padded": True, "pad_value": -1},
    )  # fmt: skip
    batch, _ = next(iter(StreamingDataLoader(dataset)))
    assert batch["input_ids"].shape == batch["cp_positions"].shape == (2, 8)
    assert batch["input_ids"].tolist() == [[3, 4, 0, -1, -1, -1, -1, -1], list(range(108, 116))]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cp_rank": 2, "cp_size": 2, "cp_fields": ["labels"]}, "cp_rank: got 2; expected 0 to 1"),
        ({"cp_size": 2}, "cp_fields: got no fields, but a cp_size"),
        ({"cp_fields": "labels"}, "cp_fields is 'labels'"),
        ({"cp_fields": ["label"]}, "cp_fields has field 'label', which is not in data_fields"),
        ({"cp_fields": ["labels"], "read_options": {"slices": {"labels": (0, 1)}}}, "is also in the slices"),
        ({"cp_fields": ["labels"], "cp_layout": "spiral"}, "layout 'spiral'"),
        ({"read_options": {"device": "cpu"}}, "read_options contains 'device'"),
        ({"read_options": {"slices": {"labels": []}}}, "one slice per row of field 'labels'"),
        ({"read_options": {"length": 3}}, "padded is False"),
    ],
)
def test_shares_that_cannot_be_are_refused(server: LiveServer, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match=re.escape(says)):
        dataset_of(server, **wrong)
