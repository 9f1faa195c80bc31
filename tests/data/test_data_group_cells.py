"""Fields that the samples of a group share, through the loader: in this process, in workers, in packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tq_service as tq
from tq_service.data import PackOptions, StreamingDataLoader, StreamingDataset, unpack_sequences
from tq_service.schema import Layout

GROUPS, SIZE = 5, 4
SHARED = ["pixels", "patches", "image", "prompt"]
FIELDS = [tq.FieldSpec(name, scope="group") for name in SHARED[:3]]
FIELDS += [tq.FieldSpec("prompt", layout=Layout.OBJECT, scope="group"), tq.FieldSpec("input_ids", layout=Layout.JAGGED)]


def shared() -> dict[str, Any]:
    """Return what groups share: dense, jagged, of two ragged dimensions, objects."""
    return {
        "pixels": torch.arange(GROUPS * 6, dtype=torch.uint8).reshape(GROUPS, 2, 3),
        "patches": [torch.full((1 + group, 2), group, dtype=torch.bfloat16) for group in range(GROUPS)],
        "image": [torch.full((1 + group % 2, 1 + group % 3), group) for group in range(GROUPS)],
        "prompt": [f"prompt {group}" for group in range(GROUPS)],
    }


def fill(address: str, partition: str) -> None:
    with tq.Client(address) as client:
        client.create_partition(partition, fields=FIELDS)
        client.put_groups(partition, shared(), groups=[f"g{group}" for group in range(GROUPS)])
        client.put(
            partition,
            {
                "index": torch.arange(GROUPS * SIZE),
                "input_ids": [torch.arange(3 + row % 5) for row in range(GROUPS * SIZE)],
            },
            groups=[f"g{group}" for group in range(GROUPS) for _ in range(SIZE)],
            group_size=SIZE,
            custom_meta=[{"total_lengths": 3 + row % 5} for row in range(GROUPS * SIZE)],
        )
        client.seal_partition(partition)


def dataset_of(address: str, partition: str, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 2 * SIZE, "data_fields": ["index", "input_ids", *SHARED], "partition_id": partition,
        "task_name": "update_actor", "max_wait": 0.5, "sampler": "grpo_group_n",
        "sampler_config": {"n_samples_per_prompt": SIZE},
    }  # fmt: skip
    return StreamingDataset(address, **{**options, **changes})


def check_rows(rows: Any, indexes: list[int]) -> None:
    """Assert that each sample has what its group shares."""
    expected = shared()
    for name in SHARED[:3]:
        values = rows[name].unbind() if isinstance(rows[name], torch.Tensor) else rows[name]
        for value, index in zip(values, indexes, strict=True):
            assert torch.equal(value, expected[name][index // SIZE]), name
    assert list(rows["prompt"]) == [f"prompt {index // SIZE}" for index in indexes]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("batch_groups", "micro_batch_size"), [(2, 3), (1, None), (5, 7)])
def test_micro_batches_have_a_row_for_each_sample(
    address: str, num_workers: int, batch_groups: int, micro_batch_size: int | None
) -> None:
    partition = f"shared {num_workers} {batch_groups}"
    fill(address, partition)
    dataset = dataset_of(address, partition, batch_size=batch_groups * SIZE, micro_batch_size=micro_batch_size)
    seen: list[int] = []
    with StreamingDataLoader(dataset, num_workers) as loader:
        for micro_batch, meta in loader:
            indexes = micro_batch["index"].tolist()
            assert micro_batch.batch_size[0] == len(indexes) == meta.size
            check_rows(micro_batch, indexes)
            seen += indexes
    assert sorted(seen) == list(range(GROUPS * SIZE))


def test_a_micro_batch_may_be_changed_in_place(address: str) -> None:
    fill(address, "changed")
    for micro_batch, _ in StreamingDataLoader(dataset_of(address, "changed", batch_size=SIZE)):
        before = micro_batch["pixels"].clone()
        micro_batch["pixels"][0] += 1
        assert torch.equal(micro_batch["pixels"][1:], before[1:])


def test_packs_keep_the_rows_of_groups(address: str) -> None:
    fill(address, "packed")
    dataset = dataset_of(
        address,
        "packed",
        data_fields=["index", "input_ids", "pixels", "patches"],
        sampler="packed",
        sampler_config={"optimizer_steps": 1, "pack_max_length": 16},
        pack=PackOptions(pack_max_length=16, keep_fields=("pixels", "patches")),
    )
    seen, expected = [], shared()
    for pack in StreamingDataLoader(dataset):
        indexes = pack["index"].tolist()
        rows = unpack_sequences(pack)
        for name in ("pixels", "patches"):
            for row, index in zip(rows[name].unbind() if indexes else (), indexes, strict=True):
                assert torch.equal(row, expected[name][index // SIZE])
        seen += indexes
    assert sorted(seen) == list(range(GROUPS * SIZE))
