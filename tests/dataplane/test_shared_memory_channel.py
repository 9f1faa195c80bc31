"""The Unix socket for shared memory: what it gives and takes, and what it refuses."""

import asyncio
import os
import socket
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from open_files import open_files

from tq_service.dataplane.shared_memory import messages
from tq_service.dataplane.shared_memory import server as server_side
from tq_service.dataplane.shared_memory import server as shared_memory_session
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.dataplane.shared_memory.server import SharedMemoryServer
from tq_service.errors import UnavailableError
from tq_service.internal.v1.shared_memory_pb2 import Hello, ReceiveFds, SendFds, SharedMemoryAnswer, SharedMemoryRequest
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

BOOT = b"b" * 16
PUT = b"p" * 16
COLUMNS = encode_columns({"x": np.arange(1 << 16)})


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A short one: the path of a socket may have no more than 107 bytes."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
async def server(tmp_path):
    server = SharedMemoryServer(tmp_path, BOOT)
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
    with server.session(client.session_id).awaiting(PUT) as take_fds:
        await asyncio.to_thread(client.send_fds, PUT, COLUMNS)
        (fd,) = take_fds()
    values = shared_memory.map_private([(fd, 0, COLUMNS[0].value_bytes)]).view(np.int64)
    assert np.array_equal(values, np.arange(1 << 16))
    os.close(fd)


async def test_fds_that_no_put_waits_for_are_refused_and_closed(server):
    client = await connect(server)
    session = server.session(client.session_id)
    before = open_files()
    with pytest.raises(UnavailableError, match="no put waits"):
        await asyncio.to_thread(client.send_fds, PUT, COLUMNS)
    with session.awaiting(b"q" * 16), pytest.raises(UnavailableError, match="no put waits"):
        await asyncio.to_thread(client.send_fds, PUT, COLUMNS)
    assert open_files() <= before


async def test_a_second_send_fds_of_one_put_is_refused(server):
    client = await connect(server)
    before = open_files()
    with server.session(client.session_id).awaiting(PUT):
        await asyncio.to_thread(client.send_fds, PUT, COLUMNS)
        with pytest.raises(UnavailableError, match="no put waits"):
            await asyncio.to_thread(client.send_fds, PUT, COLUMNS)
    assert open_files() <= before


async def test_another_session_cannot_send_fds_for_a_put(server):
    owner, stranger = await connect(server), await connect(server)
    with server.session(owner.session_id).awaiting(PUT) as take_fds:
        with pytest.raises(UnavailableError, match="no put waits"):
            await asyncio.to_thread(stranger.send_fds, PUT, COLUMNS)
        with pytest.raises(UnavailableError, match="not sent"):
            take_fds()


async def test_fds_that_are_not_taken_are_closed(server):
    client = await connect(server)
    before = open_files()
    with server.session(client.session_id).awaiting(PUT):
        await asyncio.to_thread(client.send_fds, PUT, COLUMNS)
        assert open_files() > before
    assert open_files() <= before


@pytest.mark.parametrize("count", [1, 3, 128, 129, 300])
async def test_offered_memory_is_collected_in_order(server, count):
    client = await connect(server)
    paths = [os.memfd_create(f"part-{number}") for number in range(count)]
    with closing(server.session(client.session_id).offer(paths)) as offer:
        fds = await asyncio.to_thread(client.receive_fds, offer.offer_id, count)
        await asyncio.wait_for(offer.wait(), 10)
    assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(fd).st_ino for fd in paths]
    assert len({os.fstat(fd).st_ino for fd in fds}) == count
    shared_memory.close_all(fds + paths)


async def test_only_the_session_of_the_get_collects_and_only_while_it_lasts(server):
    owner, stranger = await connect(server), await connect(server)
    fd = os.memfd_create("part")
    before = open_files()
    session = server.session(owner.session_id)
    with closing(session.offer([fd])) as offer, pytest.raises(UnavailableError, match="no get of this session"):
        await asyncio.to_thread(stranger.receive_fds, offer.offer_id, 1)
    with pytest.raises(UnavailableError, match="no get of this session"):
        await asyncio.to_thread(owner.receive_fds, offer.offer_id, 1)
    assert open_files() <= before
    os.close(fd)


async def test_an_offer_ends_when_its_client_is_gone(server):
    client = await connect(server)
    session = server.session(client.session_id)
    with closing(session.offer([0])) as offer:
        client.close()
        await asyncio.wait_for(offer.wait(), 10)
    with closing(session.offer([0])) as offer:
        await asyncio.wait_for(offer.wait(), 10)
    assert server.session(client.session_id) is None


async def test_what_is_lent_is_ended_when_all_was_collected(server):
    client = await connect(server)
    fds = [os.memfd_create(f"part-{number}") for number in range(200)]
    ended = []
    offer = server.session(client.session_id).lease(fds, lambda: ended.append(True))
    assert not ended
    received = await asyncio.to_thread(client.receive_fds, offer.offer_id, len(fds))
    await settled(lambda: ended == [True])
    with pytest.raises(UnavailableError, match="no get of this session"):
        await asyncio.to_thread(client.receive_fds, offer.offer_id, 1)
    shared_memory.close_all([*fds, *received])


async def test_what_is_lent_is_ended_in_time(server, monkeypatch):
    monkeypatch.setattr(shared_memory_session, "_LEASE_SECONDS", 0.01)
    client = await connect(server)
    ended = []
    offer = server.session(client.session_id).lease([0], lambda: ended.append(True))
    await settled(lambda: ended == [True])
    with pytest.raises(UnavailableError, match="no get of this session"):
        await asyncio.to_thread(client.receive_fds, offer.offer_id, 1)


async def test_what_is_lent_is_ended_with_the_session(server):
    client = await connect(server)
    session = server.session(client.session_id)
    ended = []
    session.lease([0], lambda: ended.append("before"))
    client.close()
    await settled(lambda: ended == ["before"])
    session.lease([0], lambda: ended.append("after"))
    assert ended == ["before", "after"]


async def test_another_life_of_the_service_is_refused(server):
    with pytest.raises(UnavailableError, match="another storage service"):
        await asyncio.to_thread(FdChannel, server.path, b"c" * 16)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xff\xff",
        SharedMemoryRequest(send_fds=SendFds(put_id=PUT)).SerializeToString(),
        SharedMemoryRequest(receive_fds=ReceiveFds(offer_id=PUT)).SerializeToString(),
        SharedMemoryRequest(hello=Hello(boot_id=bytes(5000))).SerializeToString(),
        b"\x22\x00",
    ],
    ids=["garbage", "deposit", "collection", "too long", "unknown"],
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
        with session.awaiting(PUT) as take_fds:
            assert await ask(connection, SharedMemoryRequest(send_fds=SendFds(put_id=PUT))) == "refusal"
            with pytest.raises(UnavailableError, match="not sent"):
                take_fds()


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
    other = SharedMemoryServer(tmp_path, b"o" * 16)
    other.start()
    assert not dead.exists()
    assert unrelated.exists()
    assert server.path.exists()
    other.close()
    assert not other.path.exists()
    assert (await connect(server)).session_id


async def test_a_service_that_was_killed_before_it_listened_listens_when_it_comes_back_in_its_boot(tmp_path):
    server = SharedMemoryServer(tmp_path, BOOT)
    with messages.open_socket() as left_behind:
        left_behind.bind(str(server.path.with_suffix(".new")))
    server.start()
    assert (await connect(server)).session_id
    server.close()
    assert not list(tmp_path.iterdir())


async def test_the_directory_it_makes_is_its_users_alone(tmp_path):
    server = SharedMemoryServer(tmp_path / "new" / "directory", BOOT)
    server.start()
    assert server.path.parent.stat().st_mode & 0o777 == 0o700
    server.close()


def test_a_directory_that_others_could_have_made_is_refused(tmp_path):
    directory = tmp_path / "mine"
    server_side.make_private(directory)
    server_side.make_private(directory)
    directory.chmod(0o770)
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        server_side.make_private(directory)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="not a directory of this user alone"):
        server_side.make_private(tmp_path / "link")


async def test_closing_ends_the_sessions(server):
    client = await connect(server)
    server.close()
    with pytest.raises(UnavailableError, match="has ended"):
        await asyncio.to_thread(client.receive_fds, b"o" * 16, 1)


async def test_threads_share_a_session(server):
    client = await connect(server)
    put_ids = [bytes([number]) * 16 for number in range(8)]
    session = server.session(client.session_id)
    with_all = [session.awaiting(put_id) for put_id in put_ids]
    pending = [each.__enter__() for each in with_all]
    threads = [threading.Thread(target=client.send_fds, args=(put_id, COLUMNS)) for put_id in put_ids]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    taken = [take_fds() for take_fds in pending]
    for each in with_all:
        each.__exit__(None, None, None)
    sizes = [[os.fstat(fd).st_size for fd in fds] for fds in taken]
    for fds in taken:
        shared_memory.close_all(fds)
    assert all(len(each) == len(COLUMNS) and all(each) for each in sizes)
    assert len({fd for fds in taken for fd in fds}) == sum(map(len, taken))


async def test_what_nobody_collects_is_ended_soon_after_the_drain_began(server, monkeypatch):
    monkeypatch.setattr(server_side, "_DRAIN_SECONDS", 0.0)
    client = await connect(server)
    fds = shared_memory.write_columns(COLUMNS)
    with closing(server.session(client.session_id).offer(fds)) as offer:
        server.drain()
        async with asyncio.timeout(20):
            await offer.wait()
        with pytest.raises(UnavailableError, match="over"):
            await asyncio.to_thread(client.receive_fds, offer.offer_id, len(fds))
    shared_memory.close_all(fds)


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
