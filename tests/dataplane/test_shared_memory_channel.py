"""The Unix socket for shared memory: what it gives and takes, and what it refuses."""

import asyncio
import os
import socket
import sys
import threading
import weakref
from contextlib import closing

import numpy as np
import pytest
from open_files import open_files

from tq_service.dataplane.shared_memory import client as client_side
from tq_service.dataplane.shared_memory import mapped, messages
from tq_service.dataplane.shared_memory import server as server_side
from tq_service.dataplane.shared_memory import server as shared_memory_session
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.dataplane.shared_memory.server import SharedMemoryServer
from tq_service.errors import UnavailableError
from tq_service.internal.v1.shared_memory_pb2 import (
    Filled,
    Hello,
    Release,
    SendFd,
    SharedMemoryAnswer,
    SharedMemoryRequest,
    TakeMemory,
)
from tq_service.v1.storage_service_pb2 import RegionOffer
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns
from tq_service.wire.mapping import Mapping

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

BOOT = b"b" * 16
RUN = b"r" * 16
PUT = b"p" * 16
COLUMNS = encode_columns({"x": np.arange(1 << 16)})


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A short one: the path of a socket may have no more than 107 bytes."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
async def server(tmp_path):
    server = SharedMemoryServer(tmp_path, BOOT, RUN)
    server.start()
    yield server
    server.close()


async def connect(server):
    return await asyncio.to_thread(FdChannel, server.path, BOOT)


async def ask(connection, request, fds=()):
    """Exchange raw messages: what a client that keeps no rules may send."""

    def exchange():
        messages.send(connection, request, fds)
        received = messages.receive(connection, SharedMemoryAnswer)
        return None if received is None else received[0].WhichOneof("answer")

    return await asyncio.to_thread(exchange)


def raw(server):
    connection = messages.open_socket()
    connection.settimeout(10)
    connection.connect(str(server.path))
    return connection


async def settled(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def test_fds_reach_the_put_that_waits_for_it(server):
    client = await connect(server)
    with server.session(client.session_id).awaiting(PUT) as take_fd:
        await asyncio.to_thread(client.send_sealed, PUT, COLUMNS)
        fd = take_fd()
    values = Mapping(fd, is_shared=False).array(0, COLUMNS[0].value_bytes).view(np.int64)
    assert np.array_equal(values, np.arange(1 << 16))
    os.close(fd)


async def test_fds_that_no_put_waits_for_are_refused_and_closed(server):
    client = await connect(server)
    session = server.session(client.session_id)
    before = open_files()
    with pytest.raises(UnavailableError, match="no put waits"):
        await asyncio.to_thread(client.send_sealed, PUT, COLUMNS)
    with session.awaiting(b"q" * 16), pytest.raises(UnavailableError, match="no put waits"):
        await asyncio.to_thread(client.send_sealed, PUT, COLUMNS)
    assert open_files() <= before


async def test_a_second_send_fds_of_one_put_is_refused(server):
    client = await connect(server)
    before = open_files()
    with server.session(client.session_id).awaiting(PUT):
        await asyncio.to_thread(client.send_sealed, PUT, COLUMNS)
        with pytest.raises(UnavailableError, match="no put waits"):
            await asyncio.to_thread(client.send_sealed, PUT, COLUMNS)
    assert open_files() <= before


async def test_another_session_cannot_send_fds_for_a_put(server):
    owner, stranger = await connect(server), await connect(server)
    with server.session(owner.session_id).awaiting(PUT) as take_fd:
        with pytest.raises(UnavailableError, match="no put waits"):
            await asyncio.to_thread(stranger.send_sealed, PUT, COLUMNS)
        with pytest.raises(UnavailableError, match="did not send the put's shared memory"):
            take_fd()


async def test_fds_that_are_not_taken_are_closed(server):
    client = await connect(server)
    before = open_files()
    with server.session(client.session_id).awaiting(PUT):
        await asyncio.to_thread(client.send_sealed, PUT, COLUMNS)
        received = open_files() - before
        assert received
    assert not open_files() & received


class Memory:
    """What may be offered, and how its leases have ended."""

    def __init__(self, number=1):
        self.fd = os.memfd_create("part")
        os.ftruncate(self.fd, 1 << 20)
        self.number = number
        self.lease_count = 0
        self.ends = []

    def lease(self, session):
        self.lease_count += 1

    def end_lease(self, *, is_released):
        self.lease_count -= 1
        self.ends.append(is_released)

    def __del__(self):
        os.close(self.fd)


@pytest.mark.parametrize("count", [1, 3, 128, 129, 300])
async def test_offered_memory_is_taken_in_order(server, count):
    client = await connect(server)
    memories = [Memory() for _ in range(count)]
    with closing(server.session(client.session_id).offer(memories)) as offer:
        fds = await asyncio.to_thread(client.take, offer.offer_id, range(count))
        await asyncio.wait_for(offer.wait(), 10)
    assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(each.fd).st_ino for each in memories]
    assert len({os.fstat(fd).st_ino for fd in fds}) == count
    assert all(each.lease_count == 1 for each in memories)
    shared_memory.close_all(fds)


@pytest.mark.parametrize(("count", "indexes"), [(0, []), (3, []), (3, [2]), (3, [2, 0])])
async def test_only_the_file_descriptors_that_are_needed_are_sent(server, count, indexes):
    client = await connect(server)
    memories = [Memory() for _ in range(count)]
    offer = server.session(client.session_id).offer(memories)
    fds = await asyncio.to_thread(client.take, offer.offer_id, indexes)
    assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(memories[index].fd).st_ino for index in indexes]
    await asyncio.wait_for(offer.wait(), 10)
    assert [each.lease_count for each in memories] == [1] * count
    shared_memory.close_all(fds)


@pytest.mark.parametrize("indexes", [[3], [0] * 129])
async def test_memory_that_is_not_offered_ends_the_session(server, indexes):
    with raw(server) as connection:
        assert await ask(connection, SharedMemoryRequest(hello=Hello(boot_id=BOOT))) == "hello"
        session = next(iter(server._sessions.values()))
        memory = Memory()
        with closing(session.offer([memory] * 3)) as offer:
            take = TakeMemory(offer_id=offer.offer_id, indexes=indexes, is_last=True)
            assert await ask(connection, SharedMemoryRequest(take_memory=take)) is None
        assert memory.ends == []


async def test_only_the_session_of_the_call_takes_and_only_while_it_is_offered(server):
    owner, stranger = await connect(server), await connect(server)
    memory = Memory()
    before = open_files()
    session = server.session(owner.session_id)
    with closing(session.offer([memory])) as offer, pytest.raises(UnavailableError, match="no put or get"):
        await asyncio.to_thread(stranger.take, offer.offer_id, [0])
    with pytest.raises(UnavailableError, match="no put or get"):
        await asyncio.to_thread(owner.take, offer.offer_id, [0])
    assert memory.ends == []
    assert open_files() <= before


async def test_an_offer_ends_when_its_client_is_gone(server):
    client = await connect(server)
    session = server.session(client.session_id)
    with closing(session.offer([Memory()])) as offer:
        client.close()
        await asyncio.wait_for(offer.wait(), 10)
    with closing(session.offer([Memory()])) as offer:
        await asyncio.wait_for(offer.wait(), 10)
    assert server.session(client.session_id) is None


async def test_an_offer_without_a_call_ends_when_it_is_taken(server):
    client = await connect(server)
    memories = [Memory() for _ in range(200)]
    ended = []
    offer = server.session(client.session_id).offer_for_a_while(memories, lambda: ended.append(True))
    assert not ended
    received = await asyncio.to_thread(client.take, offer.offer_id, range(200))
    await settled(lambda: ended == [True])
    with pytest.raises(UnavailableError, match="no put or get"):
        await asyncio.to_thread(client.take, offer.offer_id, [0])
    shared_memory.close_all(received)


async def test_an_offer_without_a_call_ends_in_time(server, monkeypatch):
    monkeypatch.setattr(shared_memory_session, "_OFFER_SECONDS", 0.01)
    client = await connect(server)
    ended = []
    offer = server.session(client.session_id).offer_for_a_while([Memory()], lambda: ended.append(True))
    await settled(lambda: ended == [True])
    with pytest.raises(UnavailableError, match="no put or get"):
        await asyncio.to_thread(client.take, offer.offer_id, [0])


async def test_an_offer_without_a_call_ends_with_the_session(server):
    client = await connect(server)
    session = server.session(client.session_id)
    ended = []
    session.offer_for_a_while([Memory()], lambda: ended.append("before"))
    client.close()
    await settled(lambda: ended == ["before"])
    session.offer_for_a_while([Memory()], lambda: ended.append("after"))
    assert ended == ["before", "after"]


async def test_a_lease_lasts_until_it_is_released(server):
    client = await connect(server)
    memory = Memory()
    offer = server.session(client.session_id).offer([memory])
    await asyncio.to_thread(client.take, offer.offer_id, [])
    await asyncio.wait_for(offer.wait(), 10)
    lease = client.begin_lease(offer.offer_id)
    assert memory.ends == []
    del lease
    await settled(lambda: memory.ends == [True])
    client.close()
    assert memory.ends == [True]


async def test_a_lease_that_is_not_released_ends_with_the_session(server):
    client = await connect(server)
    memory = Memory()
    offer = server.session(client.session_id).offer([memory])
    await asyncio.to_thread(client.take, offer.offer_id, [])
    client.close()
    await settled(lambda: memory.ends == [False])
    client.begin_lease(offer.offer_id)  # an array that ends later harms nobody
    assert memory.ends == [False]


async def test_a_fork_keeps_the_leases_of_its_time(server):
    client = await connect(server)
    old, new = Memory(), Memory()
    session = server.session(client.session_id)
    leases = []
    for memory in (old, new):
        offer = session.offer([memory])
        await asyncio.to_thread(client.take, offer.offer_id, [])
        leases.append(client.begin_lease(offer.offer_id))
        if memory is old:
            mapped._note_fork()
    leases.clear()
    await settled(lambda: new.ends == [True])
    assert old.ends == []
    client.close()
    await settled(lambda: old.ends == [False])


@pytest.mark.parametrize("size", [1 << 16, 48 << 20])
async def test_a_region_is_filled_once_mapped_and_released(server, size):
    client = await connect(server)
    columns = encode_columns({"x": np.arange(size // 8)})
    memory = Memory(number=7)
    os.ftruncate(memory.fd, size)
    session = server.session(client.session_id)
    for use in range(3):
        offer = session.offer([memory])
        assert not offer.is_filled
        await asyncio.to_thread(client.fill, RegionOffer(offer_id=offer.offer_id, region=7), columns)
        assert offer.is_filled
        assert (client.regions.shared(7) is not None) == (use > 0)  # once it has come back
    assert memory.ends == [True] * 3
    assert os.pread(memory.fd, size, 0) == np.arange(size // 8).tobytes()
    with pytest.raises(UnavailableError, match="not taken"):
        await asyncio.to_thread(client._exchange, SharedMemoryRequest(filled=Filled(offer_id=offer.offer_id)))


async def test_sessions_of_one_process_share_mappings_and_those_of_a_child_do_not(server, monkeypatch):
    first, second = await connect(server), await connect(server)
    memory = Memory(number=7)
    for client in (first, second, first):
        offer = server.session(client.session_id).offer([memory])
        await asyncio.to_thread(client.fill, RegionOffer(offer_id=offer.offer_id, region=7), COLUMNS)
    mapping = first.regions.shared(7)
    assert mapping is second.regions.shared(7) is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert mapped.MappedRegions(RUN).shared(7) is None
    gone = weakref.ref(mapping)
    first.regions.drop([7])
    del mapping
    assert gone() is not None  # the other session has not heard of it yet
    second.regions.drop([7])
    assert gone() is None


async def test_a_region_that_cannot_be_filled_is_released(server, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(shared_memory, "write", fail)
    client = await connect(server)
    memory = Memory()
    offer = server.session(client.session_id).offer([memory])
    with pytest.raises(MemoryError):
        await asyncio.to_thread(client.fill, RegionOffer(offer_id=offer.offer_id, region=1), COLUMNS)
    await settled(lambda: memory.ends == [True])
    assert not offer.is_filled


async def test_releases_that_the_connection_cannot_take_are_sent_later(server):
    client = await connect(server)
    memories = [Memory() for _ in range(3)]
    session = server.session(client.session_id)
    offers = [session.offer([memory]) for memory in memories]
    for offer in offers:
        await asyncio.to_thread(client.take, offer.offer_id, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_side.messages, "send", _block)
        for offer in offers[:2]:
            client.begin_lease(offer.offer_id)
    assert [memory.ends for memory in memories] == [[], [], []]
    client.begin_lease(offers[2].offer_id)
    await settled(lambda: all(memory.ends for memory in memories))
    assert [memory.ends for memory in memories] == [[True]] * 3


def _block(*_):
    raise BlockingIOError


async def test_another_life_of_the_service_is_refused(server):
    with pytest.raises(UnavailableError, match="another storage service"):
        await asyncio.to_thread(FdChannel, server.path, b"c" * 16)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xff\xff",
        SharedMemoryRequest(send_fd=SendFd(put_id=PUT)).SerializeToString(),
        SharedMemoryRequest(take_memory=TakeMemory(offer_id=PUT)).SerializeToString(),
        SharedMemoryRequest(hello=Hello(boot_id=bytes(5000))).SerializeToString(),
        SharedMemoryRequest(filled=Filled(offer_id=PUT)).SerializeToString(),
        SharedMemoryRequest(release=Release(offer_ids=[PUT])).SerializeToString(),
        b"\x7a\x00",
    ],
    ids=["garbage", "memory", "offer", "too long", "filled", "release", "unknown"],
)
async def test_who_does_not_greet_is_cut_off(server, packet):
    before = open_files()
    with raw(server) as connection:
        socket.send_fds(connection, [packet], [0, 0, 0])
        assert await asyncio.to_thread(connection.recv, 100) == b""
    await settled(lambda: open_files() <= before)
    assert (await connect(server)).session_id  # the others are served


async def test_send_fds_without_file_descriptors_is_refused(server):
    with raw(server) as connection:
        assert await ask(connection, SharedMemoryRequest(hello=Hello(boot_id=BOOT))) == "hello"
        session = next(iter(server._sessions.values()))
        with session.awaiting(PUT) as take_fd:
            assert await ask(connection, SharedMemoryRequest(send_fd=SendFd(put_id=PUT))) == "refusal"
            with pytest.raises(UnavailableError, match="did not send the put's shared memory"):
                take_fd()


async def test_too_many_sessions_are_refused_the_others_served(server, monkeypatch):
    monkeypatch.setattr(server_side, "_MOST_SESSIONS", 2)
    first, second = await connect(server), await connect(server)
    assert server.session(first.session_id) is not None
    assert server.session(second.session_id) is not None
    with pytest.raises(UnavailableError):
        await connect(server)
    second.close()
    await settled(lambda: server.session(second.session_id) is None)
    assert (await connect(server)).session_id != first.session_id


async def test_who_opens_sessions_but_makes_no_calls_keeps_nobody_out(server, monkeypatch):
    monkeypatch.setattr(server_side, "_MOST_SESSIONS", 4)
    used = await connect(server)
    assert server.session(used.session_id) is not None
    idle = [raw(server) for _ in range(16)]
    greeted = await connect(server)
    assert server.session(greeted.session_id) is not None
    assert server.session(used.session_id) is not None
    assert len(server._sessions) <= 4
    assert await ask(idle[-1], SharedMemoryRequest(hello=Hello(boot_id=BOOT))) == "hello"
    assert idle[0].recv(1) == b""
    for connection in idle:
        connection.close()


async def test_sockets_of_killed_services_are_removed_those_of_others_left(server, tmp_path):
    dead = tmp_path / f"{'ab' * 16}.sock"
    with messages.open_socket() as left_behind:
        left_behind.bind(str(dead))
    unrelated = tmp_path / "notes.txt"
    unrelated.write_text("mine")
    other = SharedMemoryServer(tmp_path, b"o" * 16, RUN)
    other.start()
    assert not dead.exists()
    assert unrelated.exists()
    assert server.path.exists()
    other.close()
    assert not other.path.exists()
    assert (await connect(server)).session_id


async def test_a_service_that_was_killed_before_it_listened_listens_when_it_comes_back_in_its_boot(tmp_path):
    server = SharedMemoryServer(tmp_path, BOOT, RUN)
    with messages.open_socket() as left_behind:
        left_behind.bind(str(server.path.with_suffix(".new")))
    server.start()
    assert (await connect(server)).session_id
    server.close()
    assert not list(tmp_path.iterdir())


async def test_the_directory_it_makes_is_its_users_alone(tmp_path):
    server = SharedMemoryServer(tmp_path / "new" / "directory", BOOT, RUN)
    server.start()
    assert server.path.parent.stat().st_mode & 0o777 == 0o700
    server.close()


def test_a_directory_that_others_could_have_made_is_refused(tmp_path):
    directory = tmp_path / "mine"
    server_side.make_private(directory)
    server_side.make_private(directory)
    directory.chmod(0o770)
    with pytest.raises(PermissionError, match="not a directory that only the current user can write to"):
        server_side.make_private(directory)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="not a directory that only the current user can write to"):
        server_side.make_private(tmp_path / "link")


async def test_closing_ends_the_sessions(server):
    client = await connect(server)
    server.close()
    with pytest.raises(UnavailableError, match="has ended"):
        await asyncio.to_thread(client.take, b"o" * 16, [0])


async def test_threads_share_a_session(server):
    client = await connect(server)
    put_ids = [bytes([number]) * 16 for number in range(8)]
    session = server.session(client.session_id)
    with_all = [session.awaiting(put_id) for put_id in put_ids]
    pending = [each.__enter__() for each in with_all]
    threads = [threading.Thread(target=client.send_sealed, args=(put_id, COLUMNS)) for put_id in put_ids]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    taken = [take_fd() for take_fd in pending]
    for each in with_all:
        each.__exit__(None, None, None)
    sizes = [os.fstat(fd).st_size for fd in taken]
    shared_memory.close_all(taken)
    assert all(sizes)
    assert len(set(taken)) == len(put_ids)


async def test_what_nobody_collects_is_ended_soon_after_the_drain_began(server, monkeypatch):
    monkeypatch.setattr(server_side, "_DRAIN_SECONDS", 0.0)
    client = await connect(server)
    with closing(server.session(client.session_id).offer([Memory()])) as offer:
        server.drain()
        async with asyncio.timeout(20):
            await offer.wait()
        with pytest.raises(UnavailableError, match="may have ended"):
            await asyncio.to_thread(client.take, offer.offer_id, [0])


class ClosedAfterALook(socket.socket):
    """A socket that another thread closes right after somebody asked for its file descriptor."""

    is_armed = False

    def fileno(self):
        fd = super().fileno()
        if self.is_armed:
            self.close()
        return fd


async def test_a_session_closed_during_the_look_has_ended(server, monkeypatch):
    monkeypatch.setattr(messages, "open_socket", lambda: ClosedAfterALook(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    client = await connect(server)
    assert not client.has_ended
    monkeypatch.setattr(ClosedAfterALook, "is_armed", True)
    assert client.has_ended
    assert client.has_ended  # closed before it as well


async def test_threads_that_look_while_another_closes_see_the_end(server, monkeypatch):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures = []

    def look(client):
        try:
            while not client.has_ended:
                pass
        except Exception as error:
            failures.append(error)

    def close_while_looked_at():
        client = FdChannel(server.path, BOOT)
        looking = threading.Thread(target=look, args=(client,))
        looking.start()
        client.close()
        looking.join()

    try:
        for _ in range(30):
            await asyncio.to_thread(close_while_looked_at)
    finally:
        sys.setswitchinterval(interval)
    assert not failures


async def test_a_client_that_reads_no_answers_is_disconnected(server):
    request = SharedMemoryRequest(hello=Hello(boot_id=BOOT)).SerializeToString()
    with raw(server) as connection:
        connection.setblocking(False)
        sent_count, is_connected = 0, True
        while is_connected and sent_count < 20_000:
            try:
                connection.send(request)
                sent_count += 1
            except BlockingIOError:
                await asyncio.sleep(0)  # the service reads on
            except (BrokenPipeError, ConnectionResetError):
                is_connected = False
    assert not is_connected, "the service took requests whose answers it could not send"
