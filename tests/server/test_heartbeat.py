"""How a storage service stays known to its controller, and what becomes of one that cannot."""

import asyncio
import contextlib
import logging

import grpc
import pytest

from tq_service.config import ServeSettings
from tq_service.errors import InvalidArgumentError
from tq_service.internal.v1 import storage_registry_pb2
from tq_service.internal.v1.storage_registry_pb2_grpc import (
    StorageRegistryServiceServicer,
    add_StorageRegistryServiceServicer_to_server,
)
from tq_service.server import heartbeat
from tq_service.server.app import running
from tq_service.server.heartbeat import register_storage
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.storage_servicer import endpoint_of
from tq_service.storage.engine import StorageEngine
from tq_service.wire.connection import Credentials


class Controller(StorageRegistryServiceServicer):
    """Answers announcements one after the other from a list, then waits."""

    def __init__(self, answers):
        self._answers = iter(answers)
        self.requests = []
        self.is_done = asyncio.Event()

    async def RegisterStorage(self, request, context):  # noqa: N802
        self.requests.append(request)
        answer = next(self._answers, None)
        if answer is None:
            self.is_done.set()
            await asyncio.Event().wait()
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "not you")
        return storage_registry_pb2.RegisterStorageResponse(controller_id=answer)


@contextlib.asynccontextmanager
async def announcing(engine, answers):
    """Announce a storage service to a controller with these answers, until the last one was given."""
    server = grpc.aio.server()
    controller = Controller(answers)
    add_StorageRegistryServiceServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    task = asyncio.ensure_future(
        register_storage(
            engine,
            ReceiptKeys(),
            endpoint_of(engine, "localhost:1"),
            f"127.0.0.1:{port}",
            Credentials(None, None, None),
        )
    )
    try:
        async with asyncio.timeout(60):
            await controller.is_done.wait()
        yield controller
    finally:
        task.cancel()
        await server.stop(None)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(heartbeat, "_REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(heartbeat, "_RETRY_SECONDS", 0.0)


@pytest.fixture
def engine():
    return StorageEngine(max_bytes=1000, storage_id="mine")


def settings(**given):
    return ServeSettings(host="127.0.0.1", port=0, role="storage", shared_memory="off", storage_id="s", **given)


async def test_it_announces_itself_again_and_again(engine):
    async with announcing(engine, [b"c" * 16, b"c" * 16]) as controller:
        assert len(controller.requests) == 3
        for request in controller.requests:
            assert request.storage.storage_id == "mine"
            assert request.storage.boot_id == engine.boot_id
            assert request.storage.address == "localhost:1"
            assert (request.max_bytes, request.used_bytes) == (1000, 0)


async def test_a_refusal_and_a_silence_are_logged_and_it_tries_again(engine, caplog):
    refusals = [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE]
    with caplog.at_level(logging.WARNING):
        async with announcing(engine, [*refusals, b"c" * 16]) as controller:
            assert len(controller.requests) == 4
    messages = [record.getMessage() for record in caplog.records if record.name == heartbeat.__name__]
    assert any("not you" in message for message in messages)
    assert any("does not answer" in message for message in messages)


async def test_authorities_that_cannot_be_read_stop_the_start(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"tls_ca is .*typo\.pem, which could not be loaded \(No such file"):
        async with running(settings(controller="127.0.0.1:1", tls_ca=tmp_path / "typo.pem")):
            raise AssertionError("it started")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    with pytest.raises(
        InvalidArgumentError, match=r"tls_ca is .*, which could not be loaded .*; expected certificates in PEM"
    ):
        async with running(settings(controller="127.0.0.1:1", tls_ca=garbage)):
            raise AssertionError("it started")


async def test_a_token_that_would_go_in_plaintext_stops_the_start(tmp_path):
    token, secret = tmp_path / "token", tmp_path / "secret"
    for path, content in ((token, "tq_abc"), (secret, "s" * 32)):
        path.write_text(content)
        path.chmod(0o600)
    with pytest.raises(
        InvalidArgumentError, match=r"the token would be sent to controller\.example:50051 in plaintext"
    ):
        async with running(
            settings(controller="controller.example:50051", peer_token_file=token, internal_secret_file=secret)
        ):
            raise AssertionError("it started")
