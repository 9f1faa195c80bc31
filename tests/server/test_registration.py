"""Which storage services a controller takes note of."""

import asyncio
import contextlib
import os

import pytest

from tq_service.domain.tables.cells import Put
from tq_service.errors import AlreadyExistsError, LimitExceededError
from tq_service.internal.v1.storage_registry_pb2 import RegisterStorageRequest
from tq_service.server import storages
from tq_service.server.storage_servicer import EngineDriver, endpoint_of
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


def registration(name, *, boot_id=BOOT, run_id=BOOT, port=1):
    endpoint = metadata_pb2.StorageEndpoint(storage_id=name, boot_id=boot_id, kind="grpc", address=f"localhost:{port}")
    return RegisterStorageRequest(storage=endpoint, run_id=run_id)


async def test_the_name_of_the_embedded_storage_is_taken():
    engine = StorageEngine(max_bytes=None, storage_id="mine")
    embedded = EmbeddedStorage(engine, endpoint_of(engine, ""), EngineDriver(engine))
    async with registry_of(embedded) as registry:
        with pytest.raises(AlreadyExistsError, match="another storage_id"):
            registry.on_heartbeat(registration("mine"))
        assert registry.place(1).storages == [embedded.endpoint]
        assert registry.place(1).embedded
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
        assert {each.storage_id for each in registry.statuses()} == {"a", "b"}


async def test_those_that_are_silent_and_empty_make_way(monkeypatch):
    monkeypatch.setattr(storages, "_MOST_STORAGES", 2)
    async with registry_of(heartbeat_seconds=0.0) as registry:
        for name in ("a", "b"):
            registry.on_heartbeat(registration(name))
        with registry.committing(Put("a", BOOT, os.urandom(16))):
            pass
        await asyncio.sleep(0.001)
        registry.on_heartbeat(registration("c"))
        assert {each.storage_id for each in registry.statuses()} == {"a", "c"}


async def test_of_two_services_with_one_name_the_first_one_is_told_so_and_the_second_one_stays():
    """They would take turns with each heartbeat, each of which made the samples of the other unreachable."""
    runs = (b"1", b"2", b"3")
    first, second, third = (registration("a", boot_id=run * 16, run_id=run * 16, port=run[0]) for run in runs)
    async with registry_of() as registry:
        registry.on_heartbeat(first)
        key = registry.on_heartbeat(second).receipt_key
        for _ in range(2):
            with pytest.raises(AlreadyExistsError, match=r"localhost:50.* at localhost:49.* another storage_id"):
                registry.on_heartbeat(first)
            assert registry.on_heartbeat(second).receipt_key == key
        registry.on_heartbeat(third)
        for lost in (first, second):
            with pytest.raises(AlreadyExistsError):
                registry.on_heartbeat(lost)


async def test_a_service_comes_back_to_its_name_when_the_other_one_with_it_is_silent():
    first, second = (registration("a", run_id=run * 16, port=run[0]) for run in (b"1", b"2"))
    async with registry_of(heartbeat_seconds=0.0) as registry:
        for heartbeat in (first, second, first, second):
            await asyncio.sleep(0.001)
            registry.on_heartbeat(heartbeat)
            assert registry.endpoint_of("a", heartbeat.storage.boot_id) == heartbeat.storage


async def test_a_lost_service_counts_once_and_an_heir_that_registers_again_not_at_all():
    """A controller that has started again hears of what was taken over before, which it has not lost."""
    lost, back = (registration("a", boot_id=run * 16, run_id=run * 16, port=run[0]) for run in (b"1", b"2"))
    heir = registration("a", boot_id=b"1" * 16, run_id=b"3" * 16, port=3)
    for each in (lost, back, heir):
        each.mirror.url = "file:///m"
    heir.is_adopted = True
    async with registry_of() as registry:
        for heartbeat in (lost, back, back):
            registry.on_heartbeat(heartbeat)
        assert registry.adoption_counts() == (1, 0)
        for _ in range(2):
            registry.on_heartbeat(heir)
        assert registry.adoption_counts() == (1, 1)
    async with registry_of() as registry:
        registry.on_heartbeat(heir)
        assert registry.adoption_counts() == (0, 0)
