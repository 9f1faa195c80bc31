"""Which storage services a controller takes note of."""

import asyncio
import contextlib
import os

import pytest

from tq_service.errors import (
    AlreadyExistsError,
    DataLossError,
    DeadlineError,
    LimitExceededError,
    PreconditionError,
    UnavailableError,
)
from tq_service.internal.v1.storage_registry_pb2 import RegisterStorageRequest
from tq_service.server import remote_storage, storages
from tq_service.server.storage_servicer import EngineDriver, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.state.cells import Put
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import metadata_pb2
from tq_service.wire.connection import Credentials

BOOT = b"b" * 16


@contextlib.asynccontextmanager
async def registry_of(embedded=None, heartbeat_seconds=60.0):
    registry = StorageRegistry(embedded, heartbeat_seconds, Credentials(None, None, None))
    try:
        yield registry
    finally:
        await registry.close()


def registration(name, *, boot_id=BOOT, run_id=BOOT, port=1):
    endpoint = metadata_pb2.StorageEndpoint(storage_id=name, boot_id=boot_id, address=f"localhost:{port}")
    return RegisterStorageRequest(storage=endpoint, run_id=run_id)


async def test_the_name_of_the_embedded_storage_is_taken():
    engine = StorageEngine(max_bytes=None, storage_id="mine")
    embedded = EmbeddedStorage(engine, endpoint_of(engine, ""), EngineDriver(engine))
    async with registry_of(embedded) as registry:
        with pytest.raises(AlreadyExistsError, match="a different storage_id"):
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
        with registry.puts.commit(Put("a", BOOT, os.urandom(16))):
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
            with pytest.raises(AlreadyExistsError, match=r"localhost:50.* at localhost:49.* a different storage_id"):
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


def lost_and_successors(count=1):
    """Return a storage service, the same that comes back empty, and others that have taken the puts of the first."""
    lost, back = (registration("a", boot_id=run * 16, run_id=run * 16, port=run[0]) for run in (b"1", b"2"))
    successors = [
        registration("a", boot_id=b"1" * 16, run_id=bytes([number]) * 16, port=number) for number in range(count)
    ]
    for each in (lost, back, *successors):
        each.mirror.url = "file:///m"
    for each in successors:
        each.is_adopted = True
    return lost, back, *successors


def ask(registry, instance, successor):
    """Have it noted that a storage service was asked to take over what is lost; it shows that when it registers."""
    lost = registry.adoptions.lost[instance]
    lost.successor = f"successor-{successor.storage.address}"
    successor.run_id = lost.search_id


async def test_a_lost_service_counts_once_and_a_successor_that_registers_again_not_at_all():
    """A controller that has started again hears of what was taken over before, which it has not lost."""
    lost, back, successor = lost_and_successors()
    async with registry_of() as registry:
        for heartbeat in (lost, back, back):
            registry.on_heartbeat(heartbeat)
        assert registry.adoption_counts() == (1, 0)
        ask(registry, ("a", b"1" * 16), successor)
        for _ in range(2):
            registry.on_heartbeat(successor)
        assert registry.adoption_counts() == (1, 1)
    async with registry_of() as registry:
        registry.on_heartbeat(successor)
        assert registry.adoption_counts() == (0, 0)


async def test_no_put_is_committed_at_a_storage_service_that_is_lost():
    """It may live, cut off from the controller alone, and take puts that its successor has not seen in the mirror."""
    lost, back, successor = lost_and_successors()
    put = Put("a", b"1" * 16, os.urandom(16))
    async with registry_of() as registry:
        registry.on_heartbeat(lost)
        registry.require(put)
        registry.adoptions.lose(put[:2], "file:///m")  # it is silent, and nothing has taken its name
        ask(registry, put[:2], successor)
        for heartbeat in (successor, back):
            with pytest.raises(DataLossError, match=r"was lost after this put.* put the data again"):
                registry.require(put)
            registry.on_heartbeat(heartbeat)
        registry.require(Put("a", b"2" * 16, os.urandom(16)))


async def test_a_successor_of_before_the_lost_one_was_here_lets_go():
    lost, back, early, asked = lost_and_successors(2)
    async with registry_of() as registry:
        registry.on_heartbeat(lost)
        with pytest.raises(PreconditionError, match="registered under instance id"):
            registry.on_heartbeat(early)
        registry.on_heartbeat(back)  # so that the first one is lost
        with pytest.raises(PreconditionError, match="release these puts"):
            registry.on_heartbeat(early)
        ask(registry, ("a", b"1" * 16), asked)
        with pytest.raises(PreconditionError, match="are being taken over by 'successor-localhost:1'"):
            registry.on_heartbeat(early)
        for _ in range(2):
            registry.on_heartbeat(asked)
        assert registry.adoption_counts() == (1, 1)


@contextlib.asynccontextmanager
async def watched(*heartbeats, clock, takes_heartbeats=lambda: True):
    """Yield a registry with storage services, which looks for lost ones when `look` is called."""
    registry = StorageRegistry(
        None, 2.0, Credentials(None, None, None), takes_heartbeats=takes_heartbeats
    )  # fmt: skip
    registry.adoptions._clock = clock.now
    for each in heartbeats:
        registry.on_heartbeat(each)
    try:
        yield registry
    finally:
        await registry.close()


class Clock:
    """Goes on when it is asked to; storage services have been silent for so long, too."""

    def __init__(self, monkeypatch):
        self.at = 1000.0
        monkeypatch.setattr(remote_storage.time, "monotonic", self.now)

    def now(self):
        return self.at

    def go_on(self, registry, seconds, *, heard=()):
        """Let time pass, in which some storage services register."""
        for _ in range(int(seconds / 0.5)):
            self.at += 0.5
            for each in heard:
                registry.on_heartbeat(each)
            registry.adoptions.look()


class Successors:
    """Answers what storage services are asked: to take over."""

    def __init__(self, monkeypatch, answer=0):
        self.asked = []
        self.answer = answer

        async def take_over(successor, instance, search_id):
            self.asked.append((successor.storage_id, instance[0], search_id))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        monkeypatch.setattr(remote_storage.RemoteStorage, "take_over", take_over)


def mirrored(*names):
    found = [
        registration(name, boot_id=name.encode() * 16, run_id=name.encode() * 16, port=ord(name)) for name in names
    ]
    for each in found:
        each.mirror.url = "file:///m"
    return found


def adopted_by(lost, search_id, port):
    successor = registration(lost.storage.storage_id, boot_id=lost.storage.boot_id, run_id=search_id, port=port)
    successor.mirror.url, successor.is_adopted = "file:///m", True
    return successor


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def successor_of_silent(registry, clock, successors, lost, *, heard):
    """Let one storage service be silent until another one is asked; return how "b" registers what it took over."""
    clock.go_on(registry, 6.5, heard=heard)
    await turns()
    return adopted_by(lost, successors.asked[0][2], ord("b"))


async def test_nobody_is_lost_while_the_controller_itself_takes_no_heartbeats(monkeypatch):
    """As where etcd is away, or the disk is full: all storage services are silent then, one after the other."""
    clock, successors, takes = Clock(monkeypatch), Successors(monkeypatch), True
    a, b = mirrored("a", "b")
    async with watched(a, b, clock=clock, takes_heartbeats=lambda: takes) as registry:
        clock.go_on(registry, 5.0)
        takes = False
        clock.go_on(registry, 30.0)
        takes = True
        clock.go_on(registry, 5.0)
        registry.on_heartbeat(a)
        registry.on_heartbeat(b)
        clock.go_on(registry, 5.0, heard=[a, b])
        await turns()
        assert registry.adoption_counts() == (0, 0)
        clock.go_on(registry, 7.0, heard=[b])  # and then one of them is
        await turns()
        assert [asked[:2] for asked in successors.asked] == [("b", "a")]


async def test_nobody_is_lost_since_the_controller_was_paused(monkeypatch):
    clock, successors = Clock(monkeypatch), Successors(monkeypatch)
    a, b = mirrored("a", "b")
    async with watched(a, b, clock=clock) as registry:
        clock.go_on(registry, 1.0, heard=[a, b])
        clock.at += 30.0
        registry.on_heartbeat(b)  # the first one that is read
        clock.go_on(registry, 3.0)
        clock.go_on(registry, 2.0, heard=[a, b])
        assert registry.adoption_counts() == (0, 0)
        assert not successors.asked


@pytest.mark.parametrize("answer", [UnavailableError("the mirror is away"), DeadlineError("slow"), 3])
async def test_one_that_was_silent_may_come_back_until_its_successor_has_registered(monkeypatch, answer):
    clock, successors = Clock(monkeypatch), Successors(monkeypatch, answer)
    a, b = mirrored("a", "b")
    async with watched(a, b, clock=clock) as registry:
        clock.go_on(registry, 7.0, heard=[b])
        await turns()
        assert registry.counts()["lost"] == 1
        registry.on_heartbeat(a)
        assert registry.counts() == {"available": 2, "silent": 0, "lost": 0}
        registry.require(Put("a", b"a" * 16, b"p" * 16))
        with pytest.raises(PreconditionError, match="registered under instance id"):  # so that it lets go
            registry.on_heartbeat(adopted_by(a, successors.asked[0][2], ord("b")))
        registry.on_heartbeat(a)
        clock.go_on(registry, 7.0, heard=[b])  # lost again: the successor of then has not seen what was put since
        await turns()
        first, second = successors.asked[0][2], successors.asked[-1][2]
        assert first != second
        with pytest.raises(PreconditionError, match="are being taken over"):
            registry.on_heartbeat(adopted_by(a, first, ord("b")))
        registry.on_heartbeat(adopted_by(a, second, ord("b")))
        with pytest.raises(PreconditionError, match="continue as a new, empty instance"):
            registry.on_heartbeat(a)


async def test_a_successor_that_takes_long_is_asked_again_and_no_other_one(monkeypatch):
    clock, successors = Clock(monkeypatch), Successors(monkeypatch, DeadlineError("slow"))
    a, b, c = mirrored("a", "b", "c")
    async with watched(a, b, c, clock=clock) as registry:
        clock.go_on(registry, 6.5, heard=[b, c])
        for _ in range(5):
            await turns()
            clock.go_on(registry, 0.5, heard=[b, c])
        asked = {successor for successor, *_ in successors.asked}
        assert len(asked) == 1
        assert len(successors.asked) > 3
        assert len({search_id for *_, search_id in successors.asked}) == 1
        for _ in range(30):  # but not for ever
            await turns()
            clock.go_on(registry, 0.5, heard=[b, c])
        assert {successor for successor, *_ in successors.asked} == {"b", "c"}


async def test_the_next_successor_is_asked_where_one_refuses_and_the_first_to_register_has_the_puts(monkeypatch):
    clock, successors = Clock(monkeypatch), Successors(monkeypatch, UnavailableError("its mirror is away"))
    a, b, c = mirrored("a", "b", "c")
    async with watched(a, b, c, clock=clock) as registry:
        successor = await successor_of_silent(registry, clock, successors, a, heard=[b, c])
        clock.go_on(registry, 0.5, heard=[b, c])
        await turns()
        assert {successor for successor, *_ in successors.asked} == {"b", "c"}
        registry.on_heartbeat(successor)  # it could after all
        with pytest.raises(PreconditionError, match="is still running as instance"):
            registry.on_heartbeat(adopted_by(a, successor.run_id, ord("c")))
        assert registry.adoption_counts() == (1, 1)


async def test_a_successor_that_was_silent_may_come_back_too(monkeypatch):
    clock, successors = Clock(monkeypatch), Successors(monkeypatch, UnavailableError("the mirror is away"))
    a, b, c = mirrored("a", "b", "c")
    async with watched(a, b, c, clock=clock) as registry:
        successor = await successor_of_silent(registry, clock, successors, a, heard=[b, c])
        successor.put_count = 1
        registry.on_heartbeat(successor)
        clock.go_on(registry, 7.0, heard=[b, c])
        await turns()
        assert registry.counts()["lost"] == 1
        registry.on_heartbeat(successor)
        assert registry.counts()["lost"] == 0
        assert registry.endpoint_of("a", a.storage.boot_id).address == f"localhost:{ord('b')}"


async def test_what_a_storage_service_had_taken_over_is_lost_when_it_starts_again(monkeypatch):
    """Its readers are not to hear from the new process that their samples are gone."""
    clock, successors = Clock(monkeypatch), Successors(monkeypatch)
    a, b, c = mirrored("a", "b", "c")
    async with watched(a, b, c, clock=clock) as registry:
        successor = await successor_of_silent(registry, clock, successors, a, heard=[b, c])
        registry.on_heartbeat(successor)
        instance = "a", a.storage.boot_id
        assert registry.endpoint_of(*instance).address == f"localhost:{ord('b')}"
        moved = mirrored("b")[0]
        moved.storage.address = "localhost:7"  # the same process, at another address
        registry.on_heartbeat(moved)
        assert registry.endpoint_of(*instance) is not None
        again = registration("b", boot_id=b"B" * 16, run_id=b"B" * 16, port=ord("b"))
        again.mirror.url = "file:///m"
        registry.on_heartbeat(mirrored("b")[0])
        registry.on_heartbeat(again)
        assert registry.endpoint_of(*instance) is None
        assert registry.endpoint_of("b", b.storage.boot_id) is None
        clock.go_on(registry, 0.5, heard=[again, c])
        await turns()
        assert [asked[1] for asked in successors.asked] == ["a", "a", "b"] or [
            asked[1] for asked in successors.asked
        ] == [
            "a",
            "b",
            "a",
        ]


@pytest.mark.parametrize("has_mirror", [True, False])
async def test_after_a_start_of_the_controller_it_is_open_who_has_an_instance_that_is_not_here(monkeypatch, has_mirror):
    clock = Clock(monkeypatch)
    (a,) = mirrored("a")
    back = registration("a", boot_id=b"A" * 16, run_id=b"A" * 16, port=1)
    if has_mirror:
        back.mirror.url = "file:///m"
    async with watched(clock=clock) as registry:
        registry.adoptions.expect([("a", a.storage.boot_id)])
        registry.on_heartbeat(back)
        found = registry.endpoint_of("a", a.storage.boot_id)
        assert (found is None) == has_mirror  # else it is gone, as the process that is there says
        successor = adopted_by(a, b"search", 2)
        registry.on_heartbeat(successor)  # of the controller before
        assert registry.endpoint_of("a", a.storage.boot_id) == successor.storage
