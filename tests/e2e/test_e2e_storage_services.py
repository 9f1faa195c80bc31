"""Several storage services behind one controller, and memory that stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import psutil
import pytest
import torch
from live_server import AnyClient, ClientKind, LoopThread
from padded_rows import assert_pads_like

import tq_service as tq
from tq_service.testing import ServiceProcess
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A controller and two storage services, each a process."""

    controller: ServiceProcess
    storages: dict[str, ServiceProcess]
    client: AnyClient


def place(controller: str, size_bytes: int) -> str:
    """Return the name of the storage service that a put would go to now."""
    with grpc.insecure_channel(controller) as channel:
        return (
            ControllerServiceStub(channel)
            .PlacePut(pb.PlacePutRequest(partition_id="p", size_bytes=size_bytes))
            .storages[0]
            .storage_id
        )


@pytest.fixture
def cluster(client_kind: ClientKind, loop_thread: LoopThread) -> Iterator[Cluster]:
    with ExitStack() as stack:
        controller = stack.enter_context(ServiceProcess("--role", "controller"))
        storages = {
            name: stack.enter_context(
                ServiceProcess("--role", "storage", "--controller", controller.address, "--storage-id", name,
                               "--max-bytes", "64MiB")
            )
            for name in ("one", "two")
        }  # fmt: skip
        client = AnyClient(client_kind, controller.address, loop_thread, timeout=60.0)
        stack.callback(client.close)
        yield Cluster(controller=controller, storages=storages, client=client)


def put_in_both(cluster: Cluster) -> dict[str, list[int]]:
    """Put rows until both storage services hold some; return the samples of each."""
    held: dict[str, list[int]] = {"one": [], "two": []}
    used = {name: cluster.client.storage_stat(storage.address).used_bytes for name, storage in cluster.storages.items()}
    while not all(held.values()):
        start = sum(map(len, held.values()))
        meta = cluster.client.put(
            "train",
            {
                "x": torch.arange(start, start + 4).reshape(4, 1).expand(4, MIB // 4),
                "j": [torch.arange(index) for index in range(start, start + 4)],
                "dense": torch.stack([dense_row(index) for index in range(start, start + 4)]),
                "o": [f"text {index}" for index in range(start, start + 4)],
            },
            keys=[f"k{index}" for index in range(start, start + 4)],
        )
        assert meta.global_indexes == list(range(start, start + 4))
        for name, storage in cluster.storages.items():
            now = cluster.client.storage_stat(storage.address).used_bytes
            if now > used[name]:
                held[name] += meta.global_indexes
            used[name] = now
    return held


def dense_row(index: int) -> torch.Tensor:
    """Return a row of a field that is dense in each put, and of another shape in the next one."""
    return torch.full((2, 1 + index // 4), index)


def check_rows(cluster: Cluster, indexes: list[int]) -> None:
    batch = cluster.client.get_data("train", global_indexes=indexes)
    assert batch["x"][:, 0].tolist() == indexes
    assert_pads_like(batch["j"], [torch.arange(index) for index in indexes])
    assert bool((batch["x"] == batch["x"][:, :1]).all())
    assert [row.tolist() for row in batch["j"].unbind()] == [list(range(index)) for index in indexes]
    assert_pads_like(batch["dense"], [dense_row(index) for index in indexes])
    assert list(batch["o"]) == [f"text {index}" for index in indexes]


def test_storage_services_share_the_puts_and_may_be_lost(cluster: Cluster) -> None:
    client = cluster.client
    held = put_in_both(cluster)
    everything = sorted(held["one"] + held["two"])
    check_rows(cluster, everything)
    check_rows(cluster, everything[::-1])
    check_rows(cluster, everything[1::3])

    # Rewards of samples in both, in one put: columns of a sample may be in different storage services.
    rewards = client.put("train", {"reward": torch.tensor(everything)}, keys=[f"k{i}" for i in everything])
    assert client.get_data(rewards)["reward"].tolist() == everything
    reward_on = "one" if held_rewards(cluster, "one") else "two"
    lost, kept = ("two", "one") if reward_on == "one" else ("one", "two")

    boot_id = client.storage_stat(cluster.storages[lost].address).boot_id
    cluster.storages[lost].restart()
    wait_for_new_boot(cluster, lost, boot_id)
    with pytest.raises(tq.errors.DataLossError) as caught:
        client.get_data("train", global_indexes=everything, data_fields=["x"])
    named = caught.value.metadata["global_indexes"].split(",")
    assert sorted(map(int, named)) == held[lost]
    assert f"{held[lost][0]} (k{held[lost][0]})" in str(caught.value)

    # The rest goes on, and what was lost may be put again.
    check_rows(cluster, held[kept])
    assert client.get_data(rewards)["reward"].tolist() == everything
    again = held[lost]
    client.put(
        "train",
        {
            "x": torch.tensor(again).reshape(-1, 1).expand(-1, MIB // 4),
            "j": [torch.arange(index) for index in again],
            "dense": [dense_row(index) for index in again],
            "o": [f"text {index}" for index in again],
        },
        keys=[f"k{index}" for index in again],
        key_mode="existing",
    )
    check_rows(cluster, everything)
    assert client.clear_partition("train") == len(everything)
    wait_until_empty(cluster)


def test_puts_of_several_clients_at_once_use_both_storage_services(cluster: Cluster) -> None:
    """One of them holds more already: all the puts went to the other."""
    cluster.client.put("large", {"x": torch.zeros(16, MIB, dtype=torch.uint8)})
    addresses = [storage.address for storage in cluster.storages.values()]
    before = [cluster.client.storage_stat(address).used_bytes for address in addresses]
    assert sorted(before) == [0, 16 * MIB]

    def put(number: int) -> None:
        with tq.Client(cluster.controller.address, timeout=60.0) as client:
            for _ in range(3):
                client.put(f"p{number}", {"x": torch.full((5, MIB // 4), number, dtype=torch.uint8)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(4)))
    received = [cluster.client.storage_stat(address).used_bytes for address in addresses]
    counts = [(now - was) / (5 * MIB // 4) for now, was in zip(received, before, strict=True)]
    assert sum(counts) == 12
    assert min(counts) >= 4


def held_rewards(cluster: Cluster, name: str) -> bool:
    """Whether the rewards are in a storage service, by asking where they are."""
    found, _ = cluster.client.lookup_samples("train", ["k0"])
    assert found.locations is not None
    runs = next(one for one in found.locations.runs if "reward" in one.field_names)
    return found.locations.puts[int(runs.put_indexes[0])].storage.storage_id == name


def wait_for_new_boot(cluster: Cluster, name: str, old_boot_id: bytes) -> None:
    """Wait until the restarted storage service, which is the emptier one, gets puts."""
    assert cluster.client.storage_stat(cluster.storages[name].address).boot_id != old_boot_id
    while place(cluster.controller.address, 1) != name:
        pass


def wait_until_empty(cluster: Cluster) -> None:
    """Wait until the storage services have heard that everything is cleared."""
    for storage in cluster.storages.values():
        while cluster.client.storage_stat(storage.address).used_bytes:
            pass


def test_a_put_larger_than_any_quota_is_refused_at_once(cluster: Cluster) -> None:
    put_in_both(cluster)
    with pytest.raises(tq.errors.QuotaExceededError) as caught:
        cluster.client.put("large", {"x": torch.zeros(65, MIB // 4)})
    assert caught.value.retry_after_seconds is None
    assert [one.partition_id for one in cluster.client.list_partitions()] == ["train"]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dense", "jagged"])
def test_a_loop_of_put_and_clear_keeps_memory_flat(layout: str) -> None:
    rows = torch.zeros(64, 32_768)  # 8 MiB
    data = {"x": rows if layout == "dense" else [row[: 30_000 + index] for index, row in enumerate(rows)]}
    with ServiceProcess("--max-bytes", "256MiB") as server, tq.Client(server.address) as client:
        process = psutil.Process(server.pid)

        def loop(count: int) -> int:
            for _ in range(count):
                meta = client.put("train", data)
                client.get_data(meta)
                client.clear_partition("train")
                assert client.storage_stat().used_bytes == 0
            rss: int = process.memory_info().rss
            return rss

        warm = loop(15)
        assert loop(60) < warm + 48 * MIB


@pytest.mark.nightly
def test_a_partition_that_lives_on_keeps_memory_flat() -> None:
    """One long-lived partition: put, claim, clear what was consumed, again and again."""
    with ServiceProcess() as server, tq.Client(server.address) as client:
        process = psutil.Process(server.pid)

        def loop(count: int) -> int:
            for _ in range(count):
                client.put("train", {"x": torch.zeros(500, 8)}, custom_meta=[{"version": 1}] * 500)
                meta = client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=500)
                assert meta.size == 500
                assert client.clear_samples(meta) == 500
            assert client.storage_stat().used_bytes == 0
            rss: int = process.memory_info().rss
            return rss

        warm = loop(40)
        assert loop(120) < warm + 16 * MIB


def test_services_started_at_once_on_one_machine_know_each_other(tmp_path, monkeypatch):
    """Without a flag for it: one of them makes the secret that all read."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ThreadPoolExecutor(4) as threads, ExitStack() as stack:
        roles = ["controller"] * 3 + ["all"]
        controllers = list(threads.map(lambda role: stack.enter_context(ServiceProcess("--role", role)), roles))
        assert len(list(tmp_path.glob("tq_service-internal-*/*"))) == 1
        for number, controller in enumerate(controllers[:2]):
            flags = ("--controller", controller.address.replace("127.0.0.1", "localhost"), "--storage-id", f"s{number}")
            stack.enter_context(ServiceProcess("--role", "storage", *flags))
            with tq.Client(controller.address, timeout=60) as client:
                meta = client.put("train", {"x": torch.arange(4)})
                assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
