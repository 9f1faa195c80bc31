"""The health service: what it says before, while and after the service serves, and that its watches end."""

import asyncio
import contextlib
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tq_service.config import ServeSettings
from tq_service.errors import DiskFullError
from tq_service.server.app import App
from tq_service.server.health import Health
from tq_service.server.rpc.calls import DurableAnswers, RunningCalls, Services
from tq_service.server.rpc.methods import Method
from tq_service.server.supervisor import Supervisor

Status = health_pb2.HealthCheckResponse
NAMES = ["", "one", "two"]


class WholeDisk:
    has_unflushed = is_failing = is_disk_low = False


@contextlib.asynccontextmanager
async def serving(health, calls=None, state=None):
    server = grpc.aio.server()
    middleware = [calls or RunningCalls(), DurableAnswers(state or WholeDisk())]
    health_pb2_grpc.add_HealthServicer_to_server(health, Services(server, middleware))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield health_pb2_grpc.HealthStub(channel)
        finally:
            await server.stop(0)


async def statuses(stub):
    return [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in NAMES]


async def test_services_do_not_serve_before_they_say_so_nor_after_the_drain():
    health = Health()
    health.add(NAMES)
    async with serving(health) as stub:
        assert await statuses(stub) == [Status.NOT_SERVING] * 3
        health.serve()
        assert await statuses(stub) == [Status.SERVING] * 3
        health.drain()
        assert await statuses(stub) == [Status.NOT_SERVING] * 3


class FullDisk:
    has_unflushed = is_failing = is_disk_low = True

    async def wait_durable(self):
        raise DiskFullError("the disk is full: free space")


async def test_a_service_whose_disk_is_full_serves():
    """Whoever restarts it for that would have none: it goes on reading, and needs space to start."""
    health = Health()
    health.add(NAMES)
    health.serve()
    async with serving(health, state=FullDisk()) as stub:
        assert await statuses(stub) == [Status.SERVING] * 3


async def test_an_unknown_service_is_not_found_and_the_nearest_is_named():
    health = Health()
    health.add(NAMES)
    async with serving(health) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="tow"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'two'" in raised.value.details()
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="tow"))
        assert (await watch.read()).status == Status.SERVICE_UNKNOWN
        watch.cancel()


async def test_watches_hear_of_changes_and_end_with_the_drain():
    health = Health()
    health.add(NAMES)
    async with serving(health) as stub:
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "one", "one")]
        assert [(await watch.read()).status for watch in watches] == [Status.NOT_SERVING] * 3
        health.serve()
        assert [(await watch.read()).status for watch in watches] == [Status.SERVING] * 3
        health.drain()
        assert [(await watch.read()).status for watch in watches] == [Status.NOT_SERVING] * 3
        assert [await watch.read() for watch in watches] == [grpc.aio.EOF] * 3
        assert [await watch.code() for watch in watches] == [grpc.StatusCode.OK] * 3


async def test_a_watch_that_is_read_only_after_its_end_hears_of_the_drain():
    health = Health()
    health.add(NAMES)
    health.serve()
    async with serving(health) as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        health.drain()
        await asyncio.sleep(0.2)  # the end of the call arrives meanwhile: there is no event for it
        assert (await watch.read()).status == Status.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_a_drain_while_a_status_is_sent_is_told():
    health = Health()
    health.add(NAMES)
    watch = health.Watch(health_pb2.HealthCheckRequest(), Mock(peer=lambda: "ipv4:127.0.0.1:1"))
    assert (await anext(watch)).status == Status.NOT_SERVING
    health.serve()
    assert (await anext(watch)).status == Status.SERVING
    health.drain()  # before the watch goes on
    assert [answer.status async for answer in watch] == [Status.NOT_SERVING]


async def test_an_open_watch_does_not_hold_up_the_end():
    app = await App.start(ServeSettings(host="127.0.0.1", port=0, max_bytes=1 << 20), Supervisor())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        async with asyncio.timeout(60):
            await app.stop(grace_seconds=3600)
            assert (await watch.read()).status == Status.NOT_SERVING


async def test_watches_do_not_count_as_calls_of_others():
    health, calls = Health(), RunningCalls(1)
    health.add(NAMES)
    async with serving(health, calls) as stub:
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [Status.NOT_SERVING] * 2
        assert calls.count == 0
        assert calls.admit(Method(name="/test/Other"), None) is None
        for watch in watches:
            watch.cancel()


async def test_there_are_so_many_watches_and_no_more():
    health = Health(most_watches=2)
    health.add(NAMES)
    async with serving(health) as stub:
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [Status.NOT_SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await statuses(stub) == [Status.NOT_SERVING] * 3
        watches[0].cancel()
        async with asyncio.timeout(60):
            while health._watches.count > 1:  # noqa: ASYNC110  (the server has no event for it)
                await asyncio.sleep(0.01)
        assert (await stub.Watch(health_pb2.HealthCheckRequest()).read()).status == Status.NOT_SERVING
