"""Waiting costs no polling, ends with the server, and goes on with its successor."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_server import AnyClient, ClientKind, LiveServer, LoopThread

import tq_service as tq
from tq_service.server.controller_servicer import ControllerServicer
from tq_service.testing import ServiceProcess
from tq_service.v1 import storage_service_pb2
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"]}


def wait_until_waiting(client: Any, count: int) -> None:
    """Wait until so many calls wait for the task."""
    while [task.waiting_count for task in client.describe_partition("train").tasks] != [count]:
        pass


@pytest.fixture
def get_meta_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[int | None]:
    """Count by dp_rank the GetMeta calls that servers of this process see."""
    calls: Counter[int | None] = Counter()
    original = ControllerServicer.GetMeta

    async def counted(self: ControllerServicer, request: Any, context: Any) -> Any:
        calls[request.dp_rank if request.HasField("dp_rank") else None] += 1
        return await original(self, request, context)

    monkeypatch.setattr(ControllerServicer, "GetMeta", counted)
    return calls


def test_ranks_are_served_by_the_commit_in_one_call_each(
    get_meta_calls: Counter[int | None], server: LiveServer, client: AnyClient
) -> None:
    client.create_partition("train")
    with ThreadPoolExecutor(4) as pool:
        asks = {**ASKS, "batch_size": 2, "dp_size": 4, "batch_index": 0, "max_wait": 60.0}
        ranks = [pool.submit(client.get_meta, **asks, dp_rank=rank) for rank in range(4)]
        wait_until_waiting(client, 4)
        for _ in range(7):  # none of which is enough
            client.put("train", {"x": torch.zeros(1)})
        assert not any(rank.done() for rank in ranks)
        wait_until_waiting(client, 4)
        client.put("train", {"x": torch.zeros(1)})
        taken = [index for rank in ranks for index in rank.result(60).global_indexes]
    assert sorted(taken) == list(range(8))
    assert get_meta_calls == Counter(dict.fromkeys(range(4), 1))


def test_a_wait_longer_than_the_servers_takes_few_calls(
    get_meta_calls: Counter[int | None], start_server: Any, client_kind: ClientKind
) -> None:
    server = start_server(max_wait_cap_seconds=0.2)
    client = server.client(client_kind)
    assert client.get_meta(**ASKS, batch_size=1, max_wait=0.9).status == "not_yet"
    assert 4 <= get_meta_calls[None] <= 6


def test_sigterm_ends_waits_and_clients_go_on_with_the_next_server(loop_thread: LoopThread) -> None:
    with ServiceProcess("--grace-seconds", "10") as server, ThreadPoolExecutor(3) as pool:
        clients = [AnyClient(kind, server.address, loop_thread, timeout=60.0) for kind in ("sync", "async")]
        clients[0].create_partition("train")
        waiting = [pool.submit(client.get_meta, **ASKS, batch_size=3, max_wait=60.0) for client in clients]
        wait_until_waiting(clients[0], 2)

        def watch() -> list[int]:
            with grpc.insecure_channel(server.address) as channel:
                health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                seen = [next(health).status]
                server.send_signal(signal.SIGTERM)
                seen.append(next(health).status)
                health.cancel()
                return seen

        serving = health_pb2.HealthCheckResponse
        assert pool.submit(watch).result(30) == [serving.SERVING, serving.NOT_SERVING]
        assert server.wait(30) == 0  # the waits have been answered, or it would take the whole grace
        assert not any(one.done() for one in waiting)  # UNAVAILABLE: they try again
        server.restart()
        clients[0].put("train", {"x": torch.arange(6)})
        taken = [index for one in waiting for index in one.result(60).global_indexes]
        assert sorted(taken) == list(range(6))
        for client in clients:
            client.close()


def test_sigterm_lets_a_running_put_finish() -> None:
    (column,) = encode_columns({"x": torch.arange(4)})
    header = storage_service_pb2.PutHeader(
        put_id=bytes(16),
        row_count=4,
        columns=[encode_header(column)],
        size_bytes=column.value_bytes,
        partition_id="train",
    )
    with ServiceProcess("--grace-seconds", "30") as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(health)

        stopping = threading.Event()

        def messages() -> Any:
            yield storage_service_pb2.PutRequest(header=header)
            assert stopping.wait(60)
            yield storage_service_pb2.PutRequest(frame=b"".join(map(bytes, column.chunks)))

        put = StorageServiceStub(channel).Put.future(messages(), timeout=60)
        put.initial_metadata()  # sent once the service has taken the header: before that, the put would not be running
        server.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        health.cancel()
        stopping.set()
        assert put.result(60).storage.boot_id
        assert server.wait(30) == 0


def test_many_waiting_calls_are_served_in_the_order_of_their_arrival(server: LiveServer) -> None:
    client = server.client()

    async def wait_and_serve() -> list[list[int]]:
        async with tq.AsyncClient(server.address) as waiting:
            await waiting.create_partition("train")
            claims = []
            for count in range(1, 41):
                claims.append(asyncio.ensure_future(waiting.get_meta(**ASKS, batch_size=2, max_wait=60.0)))
                while sum(one.waiting_count for one in (await waiting.describe_partition("train")).tasks) < count:
                    pass
            await waiting.put("train", {"x": torch.zeros(50)})
            served = [one.global_indexes for one in await asyncio.gather(*claims[:25])]
            assert not any(claim.done() for claim in claims[25:])
            for claim in claims[25:]:
                claim.cancel()
            return served

    assert server.loop.run(wait_and_serve()) == [[2 * claim, 2 * claim + 1] for claim in range(25)]
    wait_until_waiting(client, 0)


@pytest.mark.parametrize("ranked", [True, False])
def test_hundreds_wait_for_a_partition_and_all_are_served_once_and_see_the_end(
    server: LiveServer, ranked: bool
) -> None:
    count = 300

    async def consume(client: tq.AsyncClient, rank: int) -> list[int]:
        taken: list[int] = []
        for batch_index in range(count):
            place = {"dp_rank": rank, "dp_size": count, "batch_index": batch_index} if ranked else {}
            meta = await client.get_meta(**ASKS, **place, batch_size=1, max_wait=60.0)
            if meta.status == "end":
                break
            taken += meta.global_indexes
        return taken

    async def wait_and_serve() -> list[list[int]]:
        async with tq.AsyncClient(server.address) as waiting, tq.AsyncClient(server.address) as producer:
            consumers = [asyncio.ensure_future(consume(waiting, rank)) for rank in range(count)]
            await asyncio.sleep(0)
            await producer.create_partition("train")
            while [task.waiting_count for task in (await producer.describe_partition("train")).tasks] != [count]:
                pass
            for size in (count, 10, count - 10):
                await producer.put("train", {"x": torch.zeros(size)})
            await producer.seal_partition("train")
            return await asyncio.gather(*consumers)

    taken = server.loop.run(wait_and_serve())
    assert sorted(index for one in taken for index in one) == list(range(2 * count))
    if ranked:
        assert taken == [[rank, count + rank] for rank in range(count)]
