"""Which storage services a controller takes note of."""

import asyncio
import contextlib
import os

import pytest

from tq_service.domain.tables.cells import Put
from tq_service.errors import AlreadyExistsError, DataLossError, LimitExceededError, PreconditionError
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


def lost_and_heirs(count=1):
    """Return a storage service, the same that comes back empty, and others that have taken the puts of the first."""
    lost, back = (registration("a", boot_id=run * 16, run_id=run * 16, port=run[0]) for run in (b"1", b"2"))
    heirs = [registration("a", boot_id=b"1" * 16, run_id=bytes([number]) * 16, port=number) for number in range(count)]
    for each in (lost, back, *heirs):
        each.mirror.url = "file:///m"
    for each in heirs:
        each.is_adopted = True
    return lost, back, *heirs


def ask(registry, instance, port):
    """Have it noted that the storage service at a port was asked to take over what is lost."""
    lost = registry.adoptions._lost[instance]
    lost.asked_at, lost.address = 0.0, f"localhost:{port}"


async def test_a_lost_service_counts_once_and_an_heir_that_registers_again_not_at_all():
    """A controller that has started again hears of what was taken over before, which it has not lost."""
    lost, back, heir = lost_and_heirs()
    async with registry_of() as registry:
        for heartbeat in (lost, back, back):
            registry.on_heartbeat(heartbeat)
        assert registry.adoption_counts() == (1, 0)
        ask(registry, ("a", b"1" * 16), 0)
        for _ in range(2):
            registry.on_heartbeat(heir)
        assert registry.adoption_counts() == (1, 1)
    async with registry_of() as registry:
        registry.on_heartbeat(heir)
        assert registry.adoption_counts() == (0, 0)


async def test_no_put_is_committed_at_a_storage_service_that_is_lost():
    """It may live, cut off from the controller alone, and take puts that its heir has not seen in the mirror."""
    lost, back, heir = lost_and_heirs()
    put = Put("a", b"1" * 16, os.urandom(16))
    async with registry_of() as registry:
        registry.on_heartbeat(lost)
        registry.check_not_lost(put)
        registry.adoptions.lose(put[:2], "file:///m")  # it is silent, and nothing has taken its name
        ask(registry, put[:2], 0)
        for heartbeat in (heir, back):
            with (
                pytest.raises(DataLossError, match=r"was lost since the put.* put the data again"),
                registry.redeemed(put, [], "train", b"receipt"),
            ):
                pass
            registry.on_heartbeat(heartbeat)
        registry.check_not_lost(Put("a", b"2" * 16, os.urandom(16)))


async def test_an_heir_of_before_the_lost_one_was_here_lets_go():
    lost, back, early, asked = lost_and_heirs(2)
    async with registry_of() as registry:
        registry.on_heartbeat(lost)
        with pytest.raises(PreconditionError, match="was here under boot"):
            registry.on_heartbeat(early)
        registry.on_heartbeat(back)  # so that the first one is lost
        with pytest.raises(PreconditionError, match="let go of them"):
            registry.on_heartbeat(early)
        ask(registry, ("a", b"1" * 16), 1)
        with pytest.raises(PreconditionError, match="are being taken over by the one at localhost:1"):
            registry.on_heartbeat(early)
        for _ in range(2):
            registry.on_heartbeat(asked)
        assert registry.adoption_counts() == (1, 1)
