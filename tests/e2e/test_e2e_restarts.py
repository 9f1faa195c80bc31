"""Services that are killed or replaced while their clients work: nothing is lost, and no call fails."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from live_server import AnyClient, ClientKind, LoopThread

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import ServiceProcess

TIMEOUT_SECONDS = 100.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServiceProcess]:
    """Controller and storage in one process that keeps its state."""
    with ServiceProcess("--data-dir", str(tmp_path)) as server:
        yield server


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def kill_and_restart(server: ServiceProcess) -> None:
    """What `kill -9` and a supervisor do."""
    server.restart()


def replace(server: ServiceProcess) -> None:
    """What a rolling restart does: SIGTERM, wait for the end, start again."""
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    server.restart()


@pytest.mark.parametrize(
    ("client_kind", "is_kept"), [pytest.param("sync", False, marks=pytest.mark.nightly), ("async", True)]
)
def test_a_long_poll_goes_on_over_a_restart(
    client_kind: ClientKind, is_kept: bool, tmp_path: Path, loop_thread: LoopThread, threads: ThreadPoolExecutor
) -> None:
    flags = ["--data-dir", str(tmp_path)] if is_kept else []
    with ServiceProcess(*flags) as server, ExitStack() as stack:
        client = AnyClient(client_kind, server.address, loop_thread, timeout=TIMEOUT_SECONDS)
        stack.callback(client.close)
        client.create_partition("train")
        wait = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 2, "max_wait": 100.0}
        queue_worker = threads.submit(client.get_meta, **wait)
        rank = threads.submit(client.get_meta, **wait | {"task_name": "r"}, dp_rank=0, dp_size=1, batch_index=0)
        while [task.waiting_count for task in client.describe_partition("train").tasks] != [1, 1]:
            assert not queue_worker.done()
            assert not rank.done()
        kill_and_restart(server)
        client.put("train", {"x": torch.arange(2)})
        for waiting in (queue_worker, rank):
            meta = waiting.result(TIMEOUT_SECONDS)
            assert client.get_data(meta)["x"].tolist() == [0, 1]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_data_loader_neither_loses_nor_repeats_a_batch(
    server: ServiceProcess, threads: ThreadPoolExecutor, num_workers: int
) -> None:
    sample_count, batch_size = 128, 4
    with tq.Client(server.address, timeout=TIMEOUT_SECONDS) as client:
        client.put("train", {"x": torch.arange(sample_count)})
        client.seal_partition("train")
    dataset = StreamingDataset(
        server.address, batch_size=batch_size, data_fields=["x"], partition_id="train", task_name="t",
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    seen: list[int] = []
    restarts: list[Future[None]] = []
    for micro_batch, meta in StreamingDataLoader(dataset, num_workers=num_workers):
        assert micro_batch["x"].tolist() == meta.global_indexes
        seen += meta.global_indexes
        if len(seen) == sample_count // 4:
            restarts.append(threads.submit(kill_and_restart, server))
    for restart in restarts:
        restart.result(TIMEOUT_SECONDS)
    assert len(restarts) == 1
    assert seen == list(range(sample_count))


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A controller and two storage services, each a process that keeps its state."""

    controller: ServiceProcess
    storages: dict[str, ServiceProcess]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        controller = stack.enter_context(
            ServiceProcess("--role", "controller", "--data-dir", str(tmp_path / "controller"))
        )
        storages = {
            name: stack.enter_context(
                ServiceProcess("--role", "storage", "--controller", controller.address, "--storage-id", name,
                               "--data-dir", str(tmp_path / name))
            )
            for name in ("one", "two")
        }  # fmt: skip
        yield Fleet(controller=controller, storages=storages)


def put_in_both(fleet: Fleet, client: tq.Client) -> tuple[tq.BatchMeta, torch.Tensor]:
    """Put rows until both storage services hold some."""
    count = 0
    while not all(client.storage_stat(storage.address).put_count for storage in fleet.storages.values()):
        client.put("train", {"x": rows(count, 4)})
        count += 4
    everything, _ = client.lookup_samples("train")
    return everything, rows(0, count)


def rows(start: int, count: int) -> torch.Tensor:
    """Rows of 64 KiB that tell which they are."""
    return torch.arange(start, start + count, dtype=torch.float32).reshape(-1, 1).expand(-1, 1 << 14).contiguous()


@pytest.mark.nightly
def test_reads_resume_when_their_storage_service_returns(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    with tq.Client(fleet.controller.address, timeout=TIMEOUT_SECONDS) as client:
        everything, values = put_in_both(fleet, client)
        assert torch.equal(client.get_data(everything)["x"], values)
        fleet.storages["two"].kill()
        with pytest.raises(tq.errors.UnavailableError, match=r"storage service 'two' at .* it stores 'x' of") as caught:
            client.get_data(everything, timeout=1.0)
        assert caught.value.metadata["address"] == fleet.storages["two"].address
        reading = threads.submit(client.get_data, everything)
        kill_and_restart(fleet.storages["two"])
        assert torch.equal(reading.result(TIMEOUT_SECONDS)["x"], values)


def test_a_controller_that_restarts_knows_what_its_storage_services_hold(fleet: Fleet) -> None:
    with tq.Client(fleet.controller.address, timeout=TIMEOUT_SECONDS) as client:
        everything, values = put_in_both(fleet, client)
        kill_and_restart(fleet.controller)
        found, _ = client.lookup_samples("train")
        assert found == everything
        assert torch.equal(client.get_data(found)["x"], values)
        counts = [client.storage_stat(storage.address).put_count for storage in fleet.storages.values()]
        assert sum(counts) == everything.size // 4
        assert client.clear_partition("train") == everything.size
        while any(client.storage_stat(storage.address).put_count for storage in fleet.storages.values()):
            pass


class Work:
    """Producers, ranks and queue workers that go on until what was put is consumed."""

    def __init__(self, address: str, threads: ThreadPoolExecutor) -> None:
        self.put: list[int] = []
        self.ranked: dict[int, list[int]] = {0: [], 1: []}
        self.queued: list[int] = []
        self._address = address
        self._stop = threading.Event()
        self._producers = [threads.submit(self._produce, number) for number in range(2)]
        self._consumers = [threads.submit(self._train, rank) for rank in self.ranked]
        self._consumers.append(threads.submit(self._reward))

    def wait_for_progress(self, count: int = 16) -> None:
        """Wait until so many more samples have been put and claimed."""
        goal = [now + count for now in self._counts()]
        while any(now < then for now, then in zip(self._counts(), goal, strict=True)):
            time.sleep(0.01)
            for each in (*self._producers, *self._consumers):
                if each.done():
                    each.result()
                    raise AssertionError("the work ended before it was told to")

    def _counts(self) -> tuple[int, int, int]:
        return len(self.put), len(self.ranked[0]), len(self.queued)

    def finish(self) -> None:
        """Seal, and wait until everything is consumed; raises what any of them raised."""
        self._stop.set()
        for producer in self._producers:
            producer.result(TIMEOUT_SECONDS)
        with tq.Client(self._address, timeout=TIMEOUT_SECONDS) as client:
            client.seal_partition("train")
        for consumer in self._consumers:
            consumer.result(TIMEOUT_SECONDS)

    def _produce(self, number: int) -> None:
        with tq.Client(self._address, timeout=TIMEOUT_SECONDS) as client:
            count = 0
            while not self._stop.is_set() or count % 2:
                values = rows(number * 1_000_000 + 2 * count, 2)
                keys = [f"{number}-{count}-{row}" for row in range(2)]
                data = {"x": values, "y": [str(int(row[0])) for row in values]}
                meta = client.put("train", data, keys=keys, key_mode="new")
                self.put += meta.global_indexes
                count += 1

    def _train(self, rank: int) -> None:
        with tq.Client(self._address, timeout=TIMEOUT_SECONDS) as client:
            batch_index = 0
            while True:
                meta = client.get_meta(
                    partition_id="train", task_name="train", data_fields=["x", "y"], batch_size=2, dp_rank=rank,
                    dp_size=2, batch_index=batch_index,
                )  # fmt: skip
                if meta.status == "end":
                    return
                if meta.status == "batch":
                    self._check(client, meta)
                    self.ranked[rank] += meta.global_indexes
                    batch_index += 1

    def _reward(self) -> None:
        with tq.Client(self._address, timeout=TIMEOUT_SECONDS) as client:
            while True:
                meta = client.get_meta(
                    partition_id="train", task_name="reward", data_fields=["x"], batch_size=4, min_batch_size=1
                )
                if meta.status == "end":
                    return
                if meta.status == "batch":
                    self._check(client, meta)
                    self.queued += meta.global_indexes

    @staticmethod
    def _check(client: tq.Client, meta: tq.BatchMeta) -> None:
        data = client.get_data(meta, data_fields=["x", "y"])
        assert [str(int(row[0])) for row in data["x"]] == list(data["y"])
        assert bool((data["x"] == data["x"][:, :1]).all())


@pytest.mark.nightly
def test_a_rolling_restart_under_load_loses_nothing_and_fails_no_call(
    fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    work = Work(fleet.controller.address, threads)
    for server in (*fleet.storages.values(), fleet.controller):
        work.wait_for_progress()
        replace(server)
    work.wait_for_progress()
    work.finish()
    expected = Counter(range(len(work.put)))
    assert Counter(work.put) == expected
    assert Counter(work.ranked[0]) + Counter(work.ranked[1]) == expected
    assert Counter(work.queued) == expected


def test_shared_memory_is_used_again_after_a_restart(
    server: ServiceProcess, client_kind: ClientKind, loop_thread: LoopThread
) -> None:
    client = AnyClient(client_kind, server.address, loop_thread, timeout=TIMEOUT_SECONDS)
    try:
        values = torch.arange(1 << 18, dtype=torch.float64).reshape(8, -1)
        first = client.put("train", {"x": values})
        kill_and_restart(server)
        assert torch.equal(client.get_data(first)["x"], values)
        second = client.put("train", {"x": values + 1})
        assert torch.equal(client.get_data(second)["x"], values + 1)
    finally:
        client.close()
