"""Which storage services a controller takes note of."""

import asyncio
import contextlib
import os

import pytest

from tq_service.dataplane.local import LocalDriver
from tq_service.domain.tables.cells import Put
from tq_service.errors import AlreadyExistsError, LimitExceededError
from tq_service.server import storages
from tq_service.server.remote_storage import Capacity, Registration
from tq_service.server.storage_servicer import EngineCalls, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import metadata_pb2
from tq_service.wire.credentials import Credentials

BOOT = b"b" * 16


@contextlib.asynccontextmanager
async def registry_of(embedded=None, heartbeat_seconds=60.0):
    registry = StorageRegistry(embedded, heartbeat_seconds, Credentials(None, None, None))
    try:
        yield registry
    finally:
        await registry.close()


def registration(name):
    endpoint = metadata_pb2.StorageEndpoint(storage_id=name, boot_id=BOOT, kind="grpc", address="localhost:1")
    return Registration(endpoint=endpoint, run_id=BOOT, capacity=Capacity(max_bytes=None, used_bytes=0))


async def test_the_name_of_the_embedded_storage_is_taken():
    engine = StorageEngine(max_bytes=None, storage_id="mine")
    embedded = EmbeddedStorage(engine, endpoint_of(engine, ""), LocalDriver(EngineCalls(engine)))
    async with registry_of(embedded) as registry:
        with pytest.raises(AlreadyExistsError, match="another storage_id"):
            registry.on_heartbeat(registration("mine"))
        assert registry.place(1).storages == [embedded]
        assert registry.count == 1
        registry.on_heartbeat(registration("other"))
        assert registry.count == 2


async def test_one_storage_service_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(storages, "_MOST_STORAGES", 2)
    async with registry_of() as registry:
        for name in ("a", "b", "a"):
            registry.on_heartbeat(registration(name))
        with pytest.raises(LimitExceededError):
            registry.on_heartbeat(registration("c"))
        assert set(registry.endpoints) == {"a", "b"}


async def test_those_that_are_silent_and_empty_make_way(monkeypatch):
    monkeypatch.setattr(storages, "_MOST_STORAGES", 2)
    async with registry_of(heartbeat_seconds=0.0) as registry:
        for name in ("a", "b"):
            registry.on_heartbeat(registration(name))
        with registry.committing(Put("a", BOOT, os.urandom(16))):
            pass
        await asyncio.sleep(0.001)
        registry.on_heartbeat(registration("c"))
        assert set(registry.endpoints) == {"a", "c"}
