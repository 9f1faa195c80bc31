import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_client import batch_of, token_rows

from tq_service.client.batch_meta import BatchMeta
from tq_service.client.reads import object_stack
from tq_service.data.source import FetchedBatch
from tq_service.data.workers import SharedBatch, SharedBufferReader, SharedBufferWriter, open_batch

_SELF = Path("/proc/self")


class Transport:
    """Both ends of what lies between a worker and its parent."""

    def __init__(self) -> None:
        self.writer = SharedBufferWriter()
        self.reader = SharedBufferReader()
        self.sent: list[SharedBatch] = []

    def travel(self, data: Any, index: int = 0) -> FetchedBatch:
        self.writer.release(self.reader.take_released())
        row_count = len(data) if hasattr(data, "__len__") else 0
        shared = self.writer.share(FetchedBatch(index=index, data=data, meta=BatchMeta(indexes=np.arange(row_count))))
        self.sent.append(shared)
        descriptor = os.dup(shared.buffer_id) if shared.is_new else None
        return open_batch(shared.layout, self.reader.open(shared, descriptor))

    @property
    def buffer_ids(self) -> list[int]:
        return [shared.buffer_id for shared in self.sent]


def unpicklable() -> Any:
    return (value for value in ())


def test_a_batch_arrives_as_it_was() -> None:
    data = batch_of(token_rows(7))
    data["matrix"] = torch.arange(14.0).reshape(2, 7).T
    batch = Transport().travel(data, 3)
    assert (batch.index, batch.meta.global_indexes) == (3, list(range(7)))
    assert list(batch.data.keys()) == list(data.keys())
    for name in ("input_ids", "logprobs"):
        assert batch.data[name].layout is torch.jagged
        assert batch.data[name].dtype is data[name].dtype
        assert torch.equal(batch.data[name].values(), data[name].values())
        assert torch.equal(batch.data[name].offsets(), data[name].offsets())
    assert batch.data["input_ids"].offsets() is batch.data["logprobs"].offsets()
    assert torch.equal(batch.data["matrix"], data["matrix"])
    assert list(batch.data["text"]) == list(data["text"])


def test_an_empty_batch_keeps_its_types() -> None:
    batch = Transport().travel(batch_of([]))
    assert batch.data.batch_size == torch.Size([0])
    assert batch.data["logprobs"].layout is torch.jagged
    assert batch.data["logprobs"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64]
)
def test_tensors_of_every_kind(dtype: torch.dtype) -> None:
    data = batch_of(token_rows(2))
    data["dense"] = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    data["rows"] = object_stack([torch.ones(2, 3).to(dtype), torch.tensor(1).to(dtype)])
    data["within"] = object_stack([{"image": torch.ones(2).to(dtype)[::2]}, torch.empty(0, 4).to(dtype)])
    batch = Transport().travel(data)
    assert batch.data["dense"].dtype is dtype
    assert torch.equal(batch.data["dense"].to(torch.complex64), data["dense"].to(torch.complex64))
    assert [(row.dtype, tuple(row.shape)) for row in batch.data["rows"]] == [(dtype, (2, 3)), (dtype, ())]
    assert batch.data["within"][0]["image"].to(torch.complex64).tolist() == [1]
    assert batch.data["within"][1].shape == (0, 4)


def test_objects_of_any_kind_travel() -> None:
    data = batch_of(token_rows(2))
    data["mixed"] = object_stack([{"image": torch.ones(2), "n": None}, (1, np.arange(3), "a", {1, 2})])
    batch = Transport().travel(data)
    assert torch.equal(batch.data["mixed"][0]["image"], torch.ones(2))
    assert batch.data["mixed"][1][1].tolist() == [0, 1, 2]
    assert batch.data["mixed"][1][3] == {1, 2}


def test_a_view_takes_only_its_part_along() -> None:
    data = batch_of(token_rows(2))
    data["part"] = torch.zeros(2, 1 << 20)[:, :1]
    transport = Transport()
    assert transport.travel(data).data["part"].shape == (2, 1)
    assert transport.sent[0].layout.size_bytes < 10_000


def test_data_that_is_no_tensordict() -> None:
    batch = Transport().travel({"x": torch.arange(4), "y": [1, "a"]})
    assert batch.data["x"].tolist() == [0, 1, 2, 3]
    assert batch.data["y"] == [1, "a"]


def test_what_cannot_be_pickled_is_an_error() -> None:
    data = batch_of(token_rows(1))
    data["odd"] = object_stack([unpicklable()])
    with pytest.raises(TypeError, match="generator"):
        Transport().travel(data)


def test_tensors_lie_in_the_buffer_and_can_be_written() -> None:
    transport = Transport()
    batch = transport.travel({"x": 1})
    batch = transport.travel(batch_of(token_rows(4)))
    first = batch.data["index"].data_ptr()
    batch.data["index"].add_(1)
    assert batch.data["index"].tolist() == [1, 2, 3, 4]
    assert 0 < batch.data["input_ids"].values().data_ptr() - first < transport.sent[-1].buffer_bytes or (
        0 < first - batch.data["input_ids"].values().data_ptr() < transport.sent[-1].buffer_bytes
    )


def test_a_buffer_is_used_again_when_no_tensor_lies_in_it() -> None:
    transport = Transport()
    batch = transport.travel(batch_of(token_rows(4)))
    kept = batch.data["index"]
    again = transport.travel(batch_of(token_rows(9)))
    first, second = transport.buffer_ids
    assert first != second
    assert kept.tolist() == [0, 1, 2, 3]
    del batch, kept
    gc.collect()
    assert transport.travel(batch_of(token_rows(5))).data["index"].tolist() == [0, 1, 2, 3, 4]
    assert transport.buffer_ids == [first, second, first]
    assert [shared.is_new for shared in transport.sent] == [True, True, False]
    assert again.data["index"].tolist() == list(range(9))


def test_nothing_of_a_pickled_batch_is_left_for_the_garbage_collector() -> None:
    data = batch_of(token_rows(4))
    data["within"] = object_stack([{"array": np.ones(3)}] * 4)
    gc.collect()
    gc.disable()  # CPython 3.11 crashes when the collector frees a PickleBuffer after its memoryview
    try:
        shared = Transport().writer.share(FetchedBatch(index=0, data=data, meta=BatchMeta(indexes=np.arange(4))))
        left = [type(each) for each in gc.get_objects() if issubclass(type(each), pickle.Pickler | pickle.PickleBuffer)]
    finally:
        gc.enable()
    assert shared.layout.size_bytes > 0
    assert left == []


def test_objects_do_not_hold_their_buffer() -> None:
    transport = Transport()
    data = batch_of(token_rows(2))
    data["within"] = object_stack([{"image": torch.ones(2)}, {"array": np.ones(3)}])
    batch = transport.travel(data)
    kept = (list(batch.data["within"]), batch.meta)
    del batch
    gc.collect()
    transport.travel(batch_of(token_rows(2)))
    assert len(set(transport.buffer_ids)) == 1
    assert kept[0][0]["image"].tolist() == [1, 1]


def mapped_files() -> int:
    return (_SELF / "maps").read_text().count("memfd:tq-batch")


def open_files() -> int:
    return len(list((_SELF / "fd").iterdir()))


@pytest.mark.skipif(not _SELF.exists(), reason="reads /proc")
def test_memory_comes_back() -> None:
    gc.collect()  # files of earlier tests
    mapped_before, open_before = mapped_files(), open_files()
    transport = Transport()
    batches = [transport.travel(batch_of(token_rows(4))) for _ in range(8)]
    assert mapped_files() - mapped_before == len(set(transport.buffer_ids)) == 8
    batches.clear()
    gc.collect()
    for _ in range(3):
        transport.travel(batch_of(token_rows(4)))
        gc.collect()
    assert mapped_files() - mapped_before == 3
    assert open_files() - open_before == 3  # those of the worker
    transport.travel(batch_of(token_rows(4)))
    del transport
    gc.collect()
    assert mapped_files() == mapped_before
