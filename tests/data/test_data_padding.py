"""What the loader yields is padded to the longest row of its batch, micro-batch or pack."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from padded_rows import LENGTHS, assert_pads_like, columns_of, made
from tensordict import TensorDict

import tq_service as tq
from tq_service.data import (
    PackOptions,
    StreamingDataLoader,
    StreamingDataset,
    pack_sequences,
    split_micro_batches,
    take_rows,
    unpack_sequences,
)
from tq_service.data.columns import build, flatten

FIELDS = ["tokens", "features", "position_ids", "deep"]
ROW_LENGTHS = [(7 * index) % 13 for index in range(40)]


@pytest.fixture
def partition(request: pytest.FixtureRequest, address: str) -> Iterator[str]:
    name = request.node.name
    with tq.Client(address) as client:
        for first in range(0, len(ROW_LENGTHS), 10):
            data = columns_of(ROW_LENGTHS[first : first + 10], first)
            data["index"] = torch.arange(first, first + 10)
            client.put(name, data)
        client.seal_partition(name)
        yield name
        client.clear_partition(name)


def assert_rows(batch: Any, indexes: list[int], lengths: list[int]) -> None:
    """Assert that all jagged fields of a batch are those rows of `columns_of(lengths)`."""
    for name, shape_of in SHAPES.items():
        assert_pads_like(batch[name], [made(index, shape_of(lengths[index])) for index in indexes])


SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "tokens": lambda length: (length,),
    "features": lambda length: (length, 2),
    "position_ids": lambda length: (3, length),
    "deep": lambda length: (3, length, 2),
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_micro_batches_of_the_loader(address: str, partition: str, num_workers: int) -> None:
    dataset = StreamingDataset(
        address, batch_size=14, micro_batch_size=4, data_fields=[*FIELDS, "index"], partition_id=partition,
        task_name="update_actor", max_wait=0.5,
    )  # fmt: skip
    count = 0
    with StreamingDataLoader(dataset, num_workers) as loader:
        for micro_batch, meta in loader:
            assert_rows(micro_batch, micro_batch["index"].tolist(), ROW_LENGTHS)
            offsets = [micro_batch[name].offsets() for name in FIELDS]
            assert all(other is offsets[0] for other in offsets)
            count += meta.size
    assert count == len(ROW_LENGTHS)


def whole_batches(data: Any, meta: tq.BatchMeta, micro_batch_size: int | None = None) -> Iterator[Any]:
    yield data, meta


def plain_dicts(*, client: tq.Client, max_wait: float, timeout: float, **claim: Any) -> tuple[Any, tq.BatchMeta]:
    meta = client.get_meta(max_wait=max_wait, timeout=timeout, **claim)
    data = dict(client.get_data(meta).items()) if meta.status == "batch" else None
    return data, meta


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fetch", [None, plain_dicts])
def test_whole_batches_of_the_loader(address: str, partition: str, num_workers: int, fetch: Any) -> None:
    dataset = StreamingDataset(
        address, batch_size=14, data_fields=[*FIELDS, "index"], partition_id=partition, task_name="update_actor",
        max_wait=0.5, fetch_batch_fn=fetch, process_batch_fn=whole_batches,
    )  # fmt: skip
    with StreamingDataLoader(dataset, num_workers) as loader:
        for data, _ in loader:
            assert_rows(data, data["index"].tolist(), ROW_LENGTHS)


@pytest.mark.parametrize("name", LENGTHS)
def test_parts_of_a_batch(name: str) -> None:
    lengths = LENGTHS[name]
    batch = TensorDict(columns_of(lengths), batch_size=[len(lengths)])
    everything = list(range(len(lengths)))
    assert_rows(build(flatten(batch)), everything, lengths)
    for positions in (everything, everything[::-1], everything[:1], [0, *everything, 0]):
        assert_rows(take_rows(batch, positions), positions, lengths)


def test_a_part_without_rows() -> None:
    part = take_rows(TensorDict(columns_of([3, 5]), batch_size=[2]), [])
    shapes = {name: tuple(part[name].to_padded_tensor(0).shape) for name in FIELDS}
    assert shapes == {"tokens": (0, 0), "features": (0, 0, 2), "position_ids": (0, 3, 0), "deep": (0, 3, 0, 2)}


def test_values_with_gaps_or_unused_ends() -> None:
    values = torch.arange(20)
    window = torch.nested.nested_tensor_from_jagged(values, torch.tensor([2, 4, 9]))
    holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 8, 20]), torch.tensor([2, 5]))
    flat = build(flatten(TensorDict({"window": window, "holes": holes}, batch_size=[2])))
    assert_pads_like(flat["window"], [values[2:4], values[4:9]])
    assert_pads_like(flat["holes"], [values[0:2], values[8:13]])


def test_packs_and_the_samples_taken_out_of_them() -> None:
    lengths = [3, 11, 5, 1]
    data = TensorDict({**columns_of(lengths), "prompt": columns_of([2, 9, 4, 4])["tokens"]}, batch_size=[len(lengths)])
    options = PackOptions(pack_max_length=32, input_field="tokens", keep_fields=("prompt",))
    packed = pack_sequences(data, None, options, positions=[3, 1, 0])
    assert_pads_like(packed["prompt"], [made(3, (4,)), made(1, (9,)), made(0, (2,))])
    assert_rows(unpack_sequences(packed), [3, 1, 0], lengths)


STRIDED = {
    "first dimension ragged": [torch.arange(2.0), torch.arange(3.0)] * 2,
    "second dimension ragged": [torch.arange(6.0).reshape(3, 2), torch.arange(15.0).reshape(3, 5)] * 2,
    "rows alike": [torch.arange(6.0).reshape(3, 2)] * 4,
}


def strided(rows: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # of a prototype, once in a process
        return torch.nested.nested_tensor(rows, layout=torch.strided)


@pytest.mark.parametrize("name", STRIDED)
def test_strided_nested_tensors_become_jagged(name: str) -> None:
    rows = STRIDED[name]
    meta = tq.BatchMeta(status="batch", indexes=np.arange(len(rows)))
    data = TensorDict({"x": strided(rows)}, batch_size=[len(rows)])
    parts = [part["x"] for part, _ in split_micro_batches(data, meta, 2)]
    assert len(parts) == 2
    for part, expected in zip(parts, (rows[:2], rows[2:]), strict=True):
        assert_pads_like(part, expected)
        assert all(map(torch.equal, part.unbind(), expected))


def test_strided_nested_tensors_ragged_in_two_dimensions_become_rows() -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 1), torch.ones(1, 1)]
    part = take_rows(TensorDict({"x": strided(rows)}, batch_size=[3]), [2, 0])
    assert [tuple(row.shape) for row in part["x"]] == [(1, 1), (2, 3)]
