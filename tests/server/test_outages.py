"""What the log says of a controller that does not answer its storage service."""

import asyncio
import contextlib
import logging
import re
import socket

import grpc
import pytest

from tq_service.internal.v1 import storage_registry_pb2
from tq_service.internal.v1.storage_registry_pb2_grpc import (
    StorageRegistryServiceServicer,
    add_StorageRegistryServiceServicer_to_server,
)
from tq_service.server import heartbeat
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.storage_servicer import endpoint_of
from tq_service.storage.engine import StorageEngine
from tq_service.wire.connection import Credentials


class Controller(StorageRegistryServiceServicer):
    """Hears announcements, refusing the first ones; `heard` is set once its answer to one has arrived."""

    def __init__(self, refusals=0):
        self.refusals = refusals
        self.is_answered = False
        self.heard = asyncio.Event()

    async def RegisterStorage(self, request, context):  # noqa: N802  (the name of the rpc)
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this service asks for a bearer token")
        if self.is_answered:
            self.heard.set()
        self.is_answered = True
        return storage_registry_pb2.RegisterStorageResponse(
            heartbeat_interval={"nanos": 10_000_000}, controller_id=b"c" * 16
        )


class Engine(StorageEngine):
    """Counts the announcements that are made of it."""

    def __init__(self):
        super().__init__(max_bytes=None, storage_id="s")
        self.announcements = asyncio.Semaphore(0)

    def stat(self):
        self.announcements.release()
        return super().stat()


@contextlib.asynccontextmanager
async def announcing(address):
    engine = Engine()
    task = asyncio.create_task(
        heartbeat.register_storage(
            engine, ReceiptKeys(), endpoint_of(engine, "127.0.0.1:1"), address, Credentials(None, None, None)
        )
    )
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(controller, port=0):
    server = grpc.aio.server()
    add_StorageRegistryServiceServicer_to_server(controller, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.fixture
def log(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "tq_service.server")
    monkeypatch.setattr(heartbeat, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "_REFUSED_SECONDS", 0.01)
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


async def test_an_outage_is_logged_once_and_again_when_it_is_over(log):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"127.0.0.1:{port}"
    controller = Controller()
    async with announcing(address) as engine:
        for _ in range(5):
            await engine.announcements.acquire()
        async with serving(controller, port):
            await controller.heard.wait()
    outage, end, known = log()
    assert outage == ("WARNING", f'controller does not answer address={address} error="connection refused"')
    assert re.fullmatch(rf"controller is responding again address={address} after_seconds=\d+(\.\d)?", end[1])
    assert known == ("INFO", f"registered with the controller address={address} storage=s")


async def test_a_refusal_is_logged_once_with_the_reason(log):
    controller = Controller(refusals=5)
    async with serving(controller) as address, announcing(address):
        await controller.heard.wait()
    assert [line for line in log() if line[0] != "INFO"] == [
        ("ERROR", f'controller rejects this service address={address} error="this service asks for a bearer token"')
    ]
