"""A loader that yields on a device, through a stand-in for one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import test_packs_with_server as packs
import torch
from service_rows import check, dataset_of, fill
from stand_in_device import StandIn, standing_in
from tensordict import TensorDict

import tq_service as tq
from tq_service.client.batch_meta import BatchMeta
from tq_service.client.reads import object_stack
from tq_service.data import StreamingDataLoader


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def partition(request: pytest.FixtureRequest, address: str) -> Iterator[str]:
    name = request.node.name
    fill(address, name, 42)
    yield name
    with tq.Client(address) as client:
        client.clear_partition(name)


def taken(stand_in: StandIn, items: Any) -> list[int]:
    """Return the indexes of micro-batches that are checked as the consumer's stream finds them."""
    indexes: list[int] = []
    for micro_batch, meta in items:
        stand_in.default.run()
        for name in ("index", "input_ids", "scores"):
            assert stand_in.has(micro_batch[name]), name
        check(micro_batch, meta)
        indexes += micro_batch["index"].tolist()
    return indexes


WAYS: dict[str, dict[str, Any]] = {
    "thread": {},
    "workers": {"num_workers": 2},
    "inline": {"prefetch_factor": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_on_the_device(address: str, partition: str, stand_in: StandIn, way: str) -> None:
    with StreamingDataLoader(dataset_of(address, partition), device="cuda:0", **WAYS[way]) as loader:
        assert taken(stand_in, loader) == list(range(42))
        loader.reset()
        assert taken(stand_in, loader) == list(range(42))
    assert ("used", "default") in stand_in.log


@pytest.mark.parametrize("way", WAYS)
def test_packs_are_on_the_device(address: str, request: pytest.FixtureRequest, stand_in: StandIn, way: str) -> None:
    packs.fill(address, request.node.name, packs.LENGTHS)
    host = list(StreamingDataLoader(packs.dataset_of(address, request.node.name)))
    dataset = packs.dataset_of(address, request.node.name, task_name="another")
    with StreamingDataLoader(dataset, device="cuda:0", **WAYS[way]) as loader:
        for ours, theirs in zip(loader, host, strict=True):
            stand_in.default.run()
            assert ours.lengths == theirs.lengths
            for name in ("input_ids", "labels", "logprobs", "position_ids", "advantage", "cu_seqlens"):
                assert torch.equal(ours[name].as_subclass(torch.Tensor), theirs[name]), name
            assert stand_in.has(ours["input_ids"]) or not ours.lengths
            assert all(map(torch.equal, ours["prompt"].unbind(), theirs["prompt"].unbind()))


def test_what_a_function_fetches_on_the_host_is_copied_up(address: str, partition: str, stand_in: StandIn) -> None:
    asked: list[Any] = []

    def fetch(
        *, client: Any, layout: Any = None, device: Any = None, max_wait: float, timeout: float, **claim: Any
    ) -> Any:
        asked.append(device)
        meta = client.get_meta(max_wait=max_wait, timeout=timeout, **claim)
        return (client.get_data(meta) if meta.status == "batch" else None), meta

    loader = StreamingDataLoader(dataset_of(address, partition, fetch_batch_fn=fetch), device="cuda:0")
    assert taken(stand_in, loader) == list(range(42))
    assert None not in asked


def test_a_function_of_the_consumer_gets_batches_on_the_device(address: str, partition: str, stand_in: StandIn) -> None:
    def process(data: TensorDict, meta: BatchMeta, micro_batch_size: int | None) -> Iterator[Any]:
        assert threading.current_thread() is threading.main_thread()
        stand_in.default.run()
        assert stand_in.has(data["index"])
        yield data["index"].as_subclass(torch.Tensor).tolist()

    loader = StreamingDataLoader(dataset_of(address, partition, process_batch_fn=process), device="cuda:0")
    assert [index for indexes in loader for index in indexes] == list(range(42))


def test_the_replay_buffer_keeps_batches_on_the_device(address: str, partition: str, stand_in: StandIn) -> None:
    loader = StreamingDataLoader(dataset_of(address, partition, replay_buffer_bytes=1 << 20), device="cuda:0")
    assert taken(stand_in, loader) == list(range(42))
    with tq.Client(address) as client:
        client.clear_partition(partition)
    kept = loader.get_buffer()
    assert all(stand_in.has(data["index"]) for data, _ in kept)
    fill(address, partition, 0)


def batches(count: int, rows: int = 4, columns: int = 1 << 10) -> Any:
    def fetch(*, batch_index: int, **_: Any) -> Any:
        if batch_index >= count:
            return None, BatchMeta(status="end")
        data = {"x": torch.full((rows, columns), batch_index), "o": object_stack([{"n": batch_index}] * rows)}
        return TensorDict(data, batch_size=[rows]), BatchMeta(indexes=np.arange(rows))

    return fetch


class NoClient:
    def close(self) -> None:
        pass


def no_client(_address: Any) -> NoClient:
    return NoClient()


@pytest.mark.timeout(400)  # on a busy machine; the nightly one takes 40 s on a quiet one
@pytest.mark.parametrize(
    ("num_workers", "count"), [(0, 500), (1, 500), pytest.param(0, 10_000, marks=pytest.mark.nightly)]
)
def test_pinned_memory_is_flat_over_many_batches(stand_in: StandIn, num_workers: int, count: int) -> None:
    dataset = dataset_of(
        "localhost:1", "p", fetch_batch_fn=batches(count), client_factory=no_client, micro_batch_size=None
    )
    with StreamingDataLoader(
        dataset, device="cuda:0", num_workers=num_workers, multiprocessing_context="fork"
    ) as loader:
        for number, (micro_batch, _) in enumerate(loader):
            stand_in.default.run()
            assert micro_batch["x"].as_subclass(torch.Tensor).unique().tolist() == [number]
            stand_in.log.clear()
    assert 0 < stand_in.pin_count <= 12  # blocks and buffers are used again, however many batches there are
    assert 0 < stand_in.most_pinned_bytes <= 64 << 20


def test_buffers_of_workers_are_pinned_once_and_copied_from_as_they_lie(stand_in: StandIn) -> None:
    dataset = dataset_of(
        "localhost:1", "p", fetch_batch_fn=batches(100, 64, 1 << 11), client_factory=no_client, micro_batch_size=None
    )
    with StreamingDataLoader(dataset, device="cuda:0", num_workers=2, multiprocessing_context="fork") as loader:
        for number, (micro_batch, _) in enumerate(loader):
            stand_in.default.run()
            assert micro_batch["x"].as_subclass(torch.Tensor).unique().tolist() == [number]
    assert len([what for what, _ in stand_in.log if what == "up"]) == 100  # one copy for each batch
    assert stand_in.pin_count < 20
    del loader, micro_batch
    gc.collect()
    assert stand_in.pinned == {}


def test_micro_batches_in_pinned_memory(
    address: str, partition: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: set[int] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    indexes: list[int] = []
    for micro_batch, meta in StreamingDataLoader(dataset_of(address, partition), pin_memory=True):
        check(micro_batch, meta)
        assert {micro_batch["index"].data_ptr(), micro_batch["scores"].values().data_ptr()} <= pinned
        indexes += micro_batch["index"].tolist()
    assert indexes == list(range(42))


def test_a_device_that_is_not_there_is_refused(address: str) -> None:
    for arguments in ({"device": "cuda:0"}, {"pin_memory": True}):
        with pytest.raises(tq.errors.InvalidArgumentError, match="device is 'cuda"):
            StreamingDataLoader(dataset_of(address, "p"), **arguments)
