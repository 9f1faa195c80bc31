"""Cuts and delays between clients and the service: calls end in time, go on by themselves, and have one effect."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from live_server import AnyClient, ClientKind, LiveServer, LoopThread, StartServer
from tcp_proxy import Network

import tq_service as tq

MIB = 1 << 20
ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 4}


@pytest.fixture
def server(start_server: StartServer) -> LiveServer:
    """A service whose puts and gets all go over the network, through the calls that the tests break."""
    return start_server(shared_memory="off", bulk="off", put_ttl_seconds=1.0)


@pytest.fixture
def network(loop_thread: LoopThread, server: LiveServer) -> Iterator[Network]:
    with Network(loop_thread, server.address) as network:
        yield network


@pytest.fixture
def far(network: Network, client_kind: ClientKind, loop_thread: LoopThread) -> Iterator[AnyClient]:
    """A client at the other end of the network."""
    client = AnyClient(client_kind, network.address, loop_thread, timeout=60.0)
    yield client
    client.close()


def wait_until_waiting(client: AnyClient, count: int) -> None:
    while [task.waiting_count for task in client.describe_partition("train").tasks] != [count]:
        pass


def test_a_long_poll_goes_on_after_a_cut(server: LiveServer, network: Network, far: AnyClient) -> None:
    near = server.client()
    near.create_partition("train")
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(far.get_meta, **ASKS, max_wait=60.0)
        wait_until_waiting(near, 1)
        for _ in range(3):
            network.cut()
            wait_until_waiting(near, 1)
        near.put("train", {"x": torch.arange(4)})
        assert claim.result(60).global_indexes == [0, 1, 2, 3]
    assert near.check_consumption("train", "t").consumed_count == 4


def test_an_answer_that_a_cut_has_taken_comes_again(server: LiveServer, network: Network, far: AnyClient) -> None:
    near = server.client()
    near.create_partition("train")
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(far.get_meta, **ASKS, max_wait=60.0)
        wait_until_waiting(near, 1)
        network.freeze()
        near.put("train", {"x": torch.arange(8)})
        while near.check_consumption("train", "t").consumed_count != 4:  # it is claimed, and the answer on its way
            pass
        network.cut()
        network.mend()
        taken = claim.result(60).global_indexes
    assert len(taken) == 4
    rest = near.get_meta(**{**ASKS, "batch_size": 8, "min_batch_size": 1}, max_wait=0).global_indexes
    assert sorted(taken + rest) == list(range(8))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_put_that_is_cut_is_whole_and_there_once(
    server: LiveServer, network: Network, far: AnyClient, share: float
) -> None:
    rows = torch.arange(4 * MIB, dtype=torch.int32).reshape(16, -1)
    far.create_partition("train")
    network.cut_after_bytes = network.passed_bytes + int(share * rows.nbytes)
    meta = far.put("train", {"x": rows}, keys=[str(row) for row in range(16)])
    assert network.cut_after_bytes is None
    near = server.client()
    assert near.describe_partition("train").live_count == 16
    assert near.get_data(meta)["x"].equal(rows)
    assert near.storage_stat().put_count == 1
    assert near.clear_partition("train") == 16
    assert near.storage_stat().used_bytes == 0


def test_a_put_that_never_arrives_leaves_nothing(server: LiveServer, network: Network, far: AnyClient) -> None:
    near = server.client()
    far.create_partition("train")
    rows = torch.zeros(16, MIB, dtype=torch.uint8)
    network.cut_after_bytes = network.passed_bytes + 8 * MIB
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(far.put, "train", {"x": rows}, timeout=5.0)
        while network.cut_after_bytes is not None:
            pass
        network.cut(refuse=True)
        with pytest.raises(tq.errors.UnavailableError):
            put.result(60)
    # The first try was cut in the middle; should the second have been quick enough, it was whole.
    described = near.describe_partition("train")
    assert described.live_count in {0, 16}
    while (stat := near.storage_stat()).uncommitted_put_count:
        pass
    assert (stat.put_count, stat.used_bytes) == ((1, rows.nbytes) if described.live_count else (0, 0))


def test_calls_end_by_their_deadline_where_nothing_comes_through(
    server: LiveServer, network: Network, far: AnyClient
) -> None:
    near = server.client()
    meta = near.put("train", {"x": torch.zeros(4, MIB)})
    assert far.list_partitions()  # connected
    network.freeze()
    calls: list[Any] = [
        lambda: far.list_partitions(timeout=0.5),
        lambda: far.get_meta(**ASKS, max_wait=0.2, timeout=0.3),
        lambda: far.put("train", {"x": torch.zeros(1, MIB)}, timeout=0.5),
        lambda: far.get_data(meta, timeout=0.5),
    ]
    for call in calls:
        with pytest.raises((tq.errors.DeadlineError, tq.errors.UnavailableError)):
            call()
    network.mend()
    assert far.get_data(meta)["x"].shape == (4, MIB)
    # What was sent before the deadline may have arrived after it; nothing of it is half there.
    network.cut()
    assert far.describe_partition("train").live_count in {4, 5}
    while near.storage_stat().uncommitted_put_count:
        pass


def test_a_slow_network_with_delays_changes_nothing(network: Network, far: AnyClient) -> None:
    network.delay_seconds = 0.02
    network.bytes_per_second = 8 * MIB
    rows = [torch.arange(index * 1000) for index in range(12)]
    meta = far.put("train", {"x": rows, "o": [f"text {index}" for index in range(12)]})
    claimed = far.get_meta(**{**ASKS, "data_fields": ["x", "o"], "batch_size": 12})
    assert claimed.global_indexes == meta.global_indexes
    batch = far.get_data(claimed)
    assert all(mine.equal(theirs) for mine, theirs in zip(rows, batch["x"].unbind(), strict=True))
    assert list(batch["o"]) == [f"text {index}" for index in range(12)]


def test_a_service_out_of_reach_is_found_again(network: Network, far: AnyClient) -> None:
    far.create_partition("train")
    network.cut(refuse=True)
    with pytest.raises(tq.errors.UnavailableError):
        far.list_partitions(timeout=0.5)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(far.list_partitions)
        network.mend()
        assert [one.partition_id for one in call.result(60)] == ["train"]
