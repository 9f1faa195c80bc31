"""The loader against a real service."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset

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


@pytest.fixture
def partition(request: pytest.FixtureRequest, address: str) -> Iterator[str]:
    name = request.node.name
    yield name
    with tq.Client(address) as client:
        if name in {summary.partition_id for summary in client.list_partitions()}:
            client.clear_partition(name)


def fill(address: str, partition: str, count: int, *, part: int = 16, seal: bool = True) -> None:
    with tq.Client(address) as client:
        for start in range(0, count, part):
            indexes = range(start, min(count, start + part))
            client.put(
                columns(indexes),
                partition_id=partition,
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


def test_one_rank_gets_everything_in_order(address: str, partition: str) -> None:
    fill(address, partition, 42)
    items = list(StreamingDataLoader(dataset_of(address, partition)))
    assert taken(items) == list(range(42))
    assert [meta.size for _, meta in items] == [3, 3, 2] * 5 + [2]


@pytest.mark.parametrize("sampler", ["sequential", "rank_aware", "seqlen_balanced"])
@pytest.mark.parametrize("count", [1, 7, 24, 50])
def test_ranks_that_start_first_end_together(address: str, partition: str, sampler: str, count: int) -> None:
    results: dict[int, list[Any]] = {}

    def consume(rank: int) -> None:
        dataset = dataset_of(address, partition, dp_rank=rank, dp_size=3, sampler=sampler)
        results[rank] = list(StreamingDataLoader(dataset))

    ranks = [threading.Thread(target=consume, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    fill(address, partition, count)
    for thread in ranks:
        thread.join()
    assert len({len(items) for items in results.values()}) == 1
    assert sorted(index for items in results.values() for index in taken(items)) == list(range(count))


def test_finite_mode_and_step(address: str, partition: str) -> None:
    other = f"{partition}-next"
    fill(address, partition, 10, seal=False)
    fill(address, other, 5)
    with StreamingDataLoader(dataset_of(address, partition, should_check_consumption_status=True)) as loader:
        assert taken(list(loader)) == list(range(10))
        loader.step(other)
        assert taken(list(loader)) == list(range(5))
    with tq.Client(address) as client:
        client.clear_partition(other)


@pytest.mark.parametrize("kept", [0, 32])
def test_reset_and_restart(address: str, partition: str, kept: int) -> None:
    fill(address, partition, 30)
    loader = StreamingDataLoader(dataset_of(address, partition, max_buffered_batches=kept, sampler="seqlen_balanced"))
    first = list(loader)
    loader.reset()
    again = list(loader)
    assert [meta for _, meta in again] == [meta for _, meta in first]
    assert taken(again) == taken(first)
    restarted = list(
        StreamingDataLoader(dataset_of(address, partition, start_batch_index=2, sampler="seqlen_balanced"))
    )
    assert [meta.global_indexes for _, meta in restarted] == [meta.global_indexes for _, meta in first[6:]]


def test_a_reset_task_is_another_life(address: str, partition: str) -> None:
    fill(address, partition, 30)
    loader = StreamingDataLoader(dataset_of(address, partition, max_buffered_batches=0), prefetch_factor=0)
    assert len(list(loader)) == 12 - 1
    with tq.Client(address) as client:
        client.reset_consumption(partition, "update_actor", 0)
    loader.reset()
    with pytest.raises(tq.StaleEpochError):
        list(loader)
    loader.step(partition)
    assert taken(list(loader)) == list(range(30))


def test_columns_can_be_put_for_a_micro_batch(address: str, partition: str) -> None:
    fill(address, partition, 10)
    with tq.Client(address) as client:
        for micro_batch, meta in StreamingDataLoader(dataset_of(address, partition)):
            client.put({"double": micro_batch["index"] * 2}, metadata=meta)
        found = client.get_meta(
            partition_id=partition, task_name="read", data_fields=["index", "double"], batch_size=10
        )
        batch = client.get_data(found)
        assert batch["double"].tolist() == [2 * index for index in batch["index"].tolist()]


@pytest.mark.parametrize(
    ("context", "num_workers"), [("fork", 1), ("fork", 2), ("fork", 3), ("spawn", 2), ("spawn", 3), (None, 2)]
)
async def test_workers_with_live_clients_in_the_parent(
    address: str, partition: str, context: str | None, num_workers: int
) -> None:
    async with tq.AsyncClient(address) as async_client:
        await async_client.list_partitions()
        with tq.Client(address) as client:
            client.list_partitions()
            await asyncio.to_thread(fill, address, partition, 42)
            with StreamingDataLoader(dataset_of(address, partition), num_workers, 2, context) as loader:
                items = []
                for item in loader:
                    items.append(item)
                    if len(items) == 9:
                        break
                items += list(loader)
                assert taken(items) == list(range(42))
                loader.reset()
                assert taken(list(loader)) == list(range(42))
            assert client.check_consumption(partition, "update_actor").complete
        assert (await async_client.check_consumption(partition, "update_actor")).consumed == 42


def test_workers_started_before_the_producer(address: str, partition: str) -> None:
    with StreamingDataLoader(dataset_of(address, partition), 2, 2, "fork") as loader:
        producer = threading.Thread(target=fill, args=(address, partition, 30), kwargs={"part": 4})
        iterator = iter(loader)
        producer.start()
        assert taken(list(iterator)) == list(range(30))
        producer.join()


def test_closing_does_not_wait_for_data_that_never_comes(address: str, partition: str) -> None:
    fill(address, partition, 8, seal=False)
    loader = StreamingDataLoader(dataset_of(address, partition, max_wait=60.0))
    iterator = iter(loader)
    items = [next(iterator) for _ in range(3)]
    thread = next(thread for thread in threading.enumerate() if thread.name == "tq-prefetch")
    loader.close()
    assert not thread.is_alive()
    assert taken(items) == list(range(8))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_the_service_keep_their_type(address: str, partition: str, num_workers: int) -> None:
    dataset = dataset_of(address, partition, sampler="no_such_sampler")
    with (
        StreamingDataLoader(dataset, num_workers, 2, "fork") as loader,
        pytest.raises(tq.UnknownSamplerError, match="seqlen_balanced"),
    ):
        list(loader)


@contextmanager
def server_on(port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tq_service.cli", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_that_comes_back_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    loader = StreamingDataLoader(dataset_of(address, "train@0", timeout=60.0))
    results: list[Any] = []
    consumer = threading.Thread(target=lambda: results.extend(loader))
    consumer.start()
    for _ in range(2):
        with server_on(port) as server:
            assert server.stdout is not None
            server.stdout.readline()
    with server_on(port) as server:
        assert server.stdout is not None
        server.stdout.readline()
        fill(address, "train@0", 10)
        consumer.join(60)
    assert taken(results) == list(range(10))


@pytest.mark.parametrize("flags", [[], ["--num-workers", "2"]])
def test_the_example_learns(address: str, flags: list[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "train_loop.py"
    command = [sys.executable, str(example), "--address", address, "--steps", "4", *flags]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    losses = [float(line.rsplit(" ", 1)[1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10
