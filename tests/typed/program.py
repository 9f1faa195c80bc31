"""A program of a user, which mypy checks: the types of results, of items of loaders, and of settings, with torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import torch
from tensordict import TensorDict

import tq_service as tq
from tq_service.data import PackedMicroBatch, PackOptions, StreamingDataLoader, StreamingDataset


def results(client: tq.Client, meta: tq.BatchMeta) -> torch.Tensor:
    data = client.get_data(meta)
    assert_type(data, TensorDict)
    assert_type(data.batch_size, torch.Size)
    assert_type(client.allocate("train", [tq.FieldSpec("x", dtype="int64", row_shape=[3])], 8), TensorDict)
    options: tq.types.ClaimOptions = {"batch_size": 8, "dp_rank": 0, "dp_size": 1}
    batch, claimed = client.get_batch("train", "update_actor", ["tokens"], **options | {"batch_index": 0})
    assert_type(batch, TensorDict | None)
    assert_type(claimed, tq.BatchMeta)
    client.get_batch("train", "update_actor", ["tokens"], batch_sizes=8)  # type: ignore[call-arg]
    if batch is None:
        return torch.zeros(0)
    for item in client.work("train", "reward", ["tokens"]):
        assert_type(item.data, TensorDict)
    tokens: torch.Tensor = batch["tokens"]
    return tokens


async def awaited(client: tq.AsyncClient, meta: tq.BatchMeta) -> None:
    assert_type(await client.get_data(meta), TensorDict)
    batch, _ = await client.get_batch("train", "update_actor", ["tokens"], batch_size=8)
    assert_type(batch, TensorDict | None)
    async for item in client.work("train", "reward", ["tokens"]):
        assert_type(item.data, TensorDict)


def micro_batches() -> None:
    dataset = StreamingDataset(batch_size=8, data_fields=["tokens"], partition_id="train", task_name="update_actor")
    for micro_batch, meta in dataset:
        assert_type(micro_batch, TensorDict)
        assert_type(meta, tq.BatchMeta)
    loader: StreamingDataLoader = StreamingDataLoader(dataset)
    with loader as entered:
        for micro_batch, meta in entered:
            assert_type(micro_batch, TensorDict)
            assert_type(meta, tq.BatchMeta)


def packs() -> Iterator[PackedMicroBatch]:
    loader = StreamingDataLoader(
        StreamingDataset(
            batch_size=8, data_fields=["tokens"], partition_id="train", task_name="update_actor",
            pack=PackOptions(pack_max_length=4096),
        )
    )  # fmt: skip
    for pack in loader:
        assert_type(pack, PackedMicroBatch)
        yield pack


def sizes_of(_data: TensorDict, meta: tq.BatchMeta, micro_batch_size: int | None = None) -> Iterator[int]:
    yield meta.size if micro_batch_size is None else micro_batch_size


def processed() -> None:
    dataset = StreamingDataset(
        batch_size=8, data_fields=["tokens"], partition_id="train", task_name="update_actor", process_batch_fn=sizes_of
    )
    for size in StreamingDataLoader(dataset):
        assert_type(size, int)


def settings(client: tq.Client, data: dict[str, Any]) -> None:
    spec = tq.FieldSpec("pixels", layout="jagged", scope="group")
    assert_type(spec.layout, tq.types.Layout | None)
    assert_type(spec.scope, tq.types.FieldScope)
    tq.FieldSpec("text", layout=tq.types.Layout.OBJECT, encoding="text")
    tq.FieldSpec("pixels", layout="jaged")  # type: ignore[arg-type]
    client.create_partition("train", default_layout="jagged", fields=[spec])
    client.put("train", data, state="held")
    client.put("train", data, state="hold")  # type: ignore[arg-type]
