"""Connections: services that are slow to shake hands, and peers that vanish without a word."""

import asyncio
import contextlib
import importlib
import socket

import pytest
from client_support import make_client
from fake_server import FakeController, Script, serving

import tq_service as tq
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2


@pytest.fixture(params=["async", "sync"])
def kind(request):
    return request.param


BATCH = pb.GetMetaResponse(meta=metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_BATCH, global_indexes=[4]))
CHANNELS = {"async": "tq_service.client._async.calls", "sync": "tq_service.client._sync.calls"}


class Wire:
    """What lies between a client and a server: it may connect late, and lose what it carries without closing."""

    def __init__(self, target, delay_seconds=0.0):
        self.connection_count = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._delay_seconds = delay_seconds
        self._is_lost = asyncio.Event()
        self._tasks = set()

    def lose(self):
        """Carry nothing more on the connections there are; new ones work."""
        self._is_lost.set()
        self._is_lost = asyncio.Event()

    @contextlib.asynccontextmanager
    async def laid(self):
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader, writer):
        self.connection_count += 1
        self._tasks.add(asyncio.current_task())
        is_lost = self._is_lost
        try:
            await asyncio.sleep(self._delay_seconds)
            onward_reader, onward_writer = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(onward_writer):
                pumps = [_pump(reader, onward_writer, is_lost), _pump(onward_reader, writer, is_lost)]
                await asyncio.gather(*pumps)
        except asyncio.CancelledError:
            return  # the end of the test; a server of asyncio logs what its handlers raise
        finally:
            writer.close()


async def _pump(reader, writer, is_lost):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            if not is_lost.is_set():
                writer.write(data)
    if not is_lost.is_set():
        writer.close()


async def test_a_service_that_takes_its_time_for_the_handshake_is_reached(kind):
    partitions = Script(pb.ListPartitionsResponse())
    async with serving(FakeController(ListPartitions=partitions)) as address:
        wire = Wire(address, delay_seconds=0.7)
        async with wire.laid() as slow_address:
            client = make_client(kind, slow_address, timeout=30)
            assert await client.list_partitions() == []
            await client.aclose()
    assert wire.connection_count == 1


async def test_a_long_poll_notices_that_its_connection_is_lost_and_goes_on_over_another(kind, monkeypatch):
    channels = importlib.import_module(CHANNELS[kind])
    faster = dict.fromkeys(("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"), 500)
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", tuple((dict(channels.CHANNEL_OPTIONS) | faster).items()))
    asked = Script(asyncio.Event(), BATCH)
    async with serving(FakeController(GetMeta=asked)) as address:
        wire = Wire(address)
        async with wire.laid() as lossy_address:
            client = make_client(kind, lossy_address, timeout=60)
            call = asyncio.ensure_future(
                client.get_meta(partition_id="p", task_name="t", data_fields=["x"], batch_size=1, max_wait=60)
            )
            await asyncio.wait_for(asked.entered.wait(), 20)
            wire.lose()
            assert (await call).global_indexes == [4]
            await client.aclose()
    assert 2 <= wire.connection_count <= 4  # of which up to two look at what listens there
    assert len({request.request_id for request in asked.requests}) == 1
    first, second = (request.max_wait.ToNanoseconds() / 1e9 for request in asked.requests)
    assert second < first


@pytest.mark.parametrize("module", CHANNELS.values())
def test_a_lost_connection_is_noticed_within_half_a_minute(module):
    options = dict(importlib.import_module(module).CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 30_000
    assert options["grpc.http2.max_pings_without_data"] == 0


async def test_of_a_name_with_several_addresses_a_standby_that_knows_no_leader_is_not_asked_for_ever(kind):
    """It keeps no connection for long, and a new one is to any of the addresses."""
    refusal = tq.errors.NotLeaderError("none is known to", metadata={"leader_address": "", "epoch": "0"})
    standby, leader = Script(refusal), Script(pb.ListPartitionsResponse())
    short_lived = (("grpc.max_connection_age_ms", 300),)
    async with serving(FakeController(ListPartitions=leader)) as address:
        port = address.rpartition(":")[2]
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", int(port)))
        except OSError as error:
            pytest.skip(f"localhost has one address here: {error}")
        async with serving(FakeController(ListPartitions=standby), port=port, options=short_lived, host="[::1]"):
            clients = [make_client(kind, f"localhost:{port}", timeout=50) for _ in range(4)]
            assert await asyncio.gather(*(client.list_partitions() for client in clients)) == [[]] * 4
            for client in clients:
                await client.aclose()
    assert standby.requests
    assert leader.requests
