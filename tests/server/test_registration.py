"""Which storage services a controller takes note of."""

import asyncio
import contextlib
import os

import pytest

from tq_service.domain.tables.cells import Put
from tq_service.errors import AlreadyExistsError, LimitExceededError
from tq_service.server import storages
from tq_service.server.embedded_storage import EmbeddedStorage
from tq_service.server.remote_storage import Announced, Room
from tq_service.server.storages import StorageDirectory
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import metadata_pb2
from tq_service.wire.credentials import Credentials

BOOT = b"b" * 16


@contextlib.asynccontextmanager
async def directory_of(embedded=None, heartbeat_seconds=60.0):
    directory = StorageDirectory(embedded, heartbeat_seconds, Credentials(None, None, None))
    try:
        yield directory
    finally:
        await directory.close()


def announced(name):
    endpoint = metadata_pb2.StorageEndpoint(storage_id=name, boot_id=BOOT, kind="grpc", address="localhost:1")
    return Announced(endpoint=endpoint, run_id=BOOT, room=Room(max_bytes=None, used_bytes=0))


async def test_the_name_of_the_embedded_storage_is_taken():
    embedded = EmbeddedStorage(StorageEngine(max_bytes=None, storage_id="mine"))
    async with directory_of(embedded) as directory:
        with pytest.raises(AlreadyExistsError, match="another storage_id"):
            directory.register(announced("mine"))
        assert directory.place(1) is embedded
        assert directory.count == 1
        directory.register(announced("other"))
        assert directory.count == 2


async def test_one_storage_service_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(storages, "_MOST_STORAGES", 2)
    async with directory_of() as directory:
        for name in ("a", "b", "a"):
            directory.register(announced(name))
        with pytest.raises(LimitExceededError):
            directory.register(announced("c"))
        assert set(directory.endpoints) == {"a", "b"}


async def test_those_that_are_silent_and_empty_make_way(monkeypatch):
    monkeypatch.setattr(storages, "_MOST_STORAGES", 2)
    async with directory_of(heartbeat_seconds=0.0) as directory:
        for name in ("a", "b"):
            directory.register(announced(name))
        with directory.committing(Put("a", BOOT, os.urandom(16))):
            pass
        await asyncio.sleep(0.001)
        directory.register(announced("c"))
        assert set(directory.endpoints) == {"a", "c"}
