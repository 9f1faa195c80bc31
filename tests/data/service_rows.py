"""Rows of every layout in a real service, and datasets over them."""

from __future__ import annotations

from typing import Any

import torch

import tq_service as tq
from tq_service.data import StreamingDataset

DECLARED = [  # so that also a batch of one row is typed like the others
    tq.FieldSpec("input_ids", layout="jagged"),
    tq.FieldSpec("scores", layout="jagged"),
    tq.FieldSpec("image", layout="jagged", row_shape=(-1, -1)),
]
FIELDS = ["index", "input_ids", "scores", "image", "text", "extra"]


def columns(indexes: range) -> dict[str, Any]:
    """Rows told apart by their index: dense, jagged, of two ragged dimensions, text and objects with tensors."""
    return {
        "index": torch.tensor(list(indexes)),
        "input_ids": [torch.full((1 + index % 4,), index, dtype=torch.int32) for index in indexes],
        "scores": [torch.full((1 + index % 4,), index, dtype=torch.bfloat16) for index in indexes],
        "image": [torch.full((1 + index % 2, 1 + index % 3), index, dtype=torch.uint8) for index in indexes],
        "text": [f"sample {index}" for index in indexes],
        "extra": [{"mask": torch.full((2,), index), "names": (str(index), None)} for index in indexes],
    }


def check(micro_batch: Any, meta: tq.BatchMeta) -> None:
    """Assert that a micro-batch is what was put, in the layouts of the fields, rows or no rows."""
    indexes = micro_batch["index"].tolist()
    assert len(indexes) == meta.size == micro_batch.batch_size[0]
    assert meta.micro_batches == [list(range(meta.size))]
    for name, dtype in (("input_ids", torch.int32), ("scores", torch.bfloat16)):
        assert micro_batch[name].layout is torch.jagged
        assert micro_batch[name].dtype is dtype
        assert micro_batch[name].offsets().diff().tolist() == [1 + index % 4 for index in indexes]
        assert micro_batch[name].values().tolist() == [index for index in indexes for _ in range(1 + index % 4)]
    assert micro_batch["input_ids"].offsets() is micro_batch["scores"].offsets()
    assert [tuple(image.shape) for image in micro_batch["image"]] == [(1 + at % 2, 1 + at % 3) for at in indexes]
    assert list(micro_batch["text"]) == [f"sample {index}" for index in indexes]
    for index, extra in zip(indexes, micro_batch["extra"], strict=True):
        assert extra["mask"].tolist() == [index, index]
        assert extra["names"] == (str(index), None)


def fill(address: str, partition: str, count: int, *, part: int = 16, seal: bool = True, **settings: Any) -> None:
    with tq.Client(address) as client:
        client.create_partition(partition, fields=DECLARED, **settings)
        for start in range(0, count, part):
            indexes = range(start, min(count, start + part))
            client.put(
                partition,
                columns(indexes),
                custom_meta=[{"total_lengths": 1 + index % 4} for index in indexes],
            )
        if seal:
            client.seal_partition(partition)


def dataset_of(address: str, partition: str, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 8, "micro_batch_size": 3, "data_fields": FIELDS, "partition_id": partition,
        "task_name": "update_actor", "max_wait": 0.5,
    }  # fmt: skip
    return StreamingDataset(address, **{**options, **changes})


def taken(items: list[tuple[Any, tq.BatchMeta]]) -> list[int]:
    for micro_batch, meta in items:
        check(micro_batch, meta)
    return [index for micro_batch, _ in items for index in micro_batch["index"].tolist()]
