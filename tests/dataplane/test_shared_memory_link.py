"""What a client knows about sharing memory with a service: found out without holding up who only asks whether it is."""

import os
import threading
import time

import pytest

from tq_service.dataplane.shared_memory import messages
from tq_service.dataplane.shared_memory.client import SWITCH_VARIABLE, HostLink
from tq_service.internal.v1.shared_memory_pb2 import HelloAnswer, SharedMemoryAnswer, SharedMemoryRequest
from tq_service.v1.storage_service_pb2 import StatResponse
from tq_service.wire.shared_memory import is_supported

pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="this system has no sealed memfds"),
    pytest.mark.skipif(os.environ.get(SWITCH_VARIABLE, "").lower() == "off", reason=f"{SWITCH_VARIABLE} is off"),
]


class SilentService:
    """Takes connections on a socket, and answers greetings when it is told to."""

    def __init__(self, path):
        self.path = path
        self.socket = messages.open_socket()
        self.socket.bind(str(path))
        self.socket.listen()
        self.connections = []

    def stat(self):
        return StatResponse(shared_memory_socket=str(self.path))

    def take(self):
        """Wait for the greeting of one more connection."""
        connection, _ = self.socket.accept()
        self.connections.append(connection)
        request, _ = messages.receive(connection, SharedMemoryRequest)
        assert request.HasField("hello")

    def welcome(self):
        messages.send(self.connections[-1], SharedMemoryAnswer(hello=HelloAnswer(session_id=b"s" * 16)))

    def close(self):
        for connection in [*self.connections, self.socket]:
            connection.close()


@pytest.fixture
def service(tmp_path):
    service = SilentService(tmp_path / "socket")
    yield service
    service.close()


@pytest.fixture
def opening(service):
    """A link that waits in a thread for a service which has its greeting and does not answer."""
    link = HostLink()
    assert link.is_due()
    thread = threading.Thread(target=link.open, args=(service.stat(),))
    thread.start()
    service.take()
    yield link, thread
    service.close()
    thread.join()
    link.close()


def test_an_event_loop_does_not_wait_for_a_service_that_does_not_answer(opening):
    link, thread = opening
    assert not link.is_due()
    link.postpone()
    with link.session() as session:
        assert session is None
    assert thread.is_alive()  # none of this has waited for it


def test_threads_that_find_out_at_the_same_time_share_one_session(service, opening):
    link, thread = opening
    second = threading.Thread(target=link.open, args=(service.stat(),))
    second.start()
    service.welcome()
    thread.join()
    second.join()
    assert len(service.connections) == 1
    with link.session() as session:
        assert session is not None
        assert session.session_id == b"s" * 16


def test_a_session_that_opens_after_the_client_was_closed_is_closed(service, opening):
    link, thread = opening
    link.close()
    assert thread.is_alive()
    service.welcome()
    thread.join()
    with link.session() as session:
        assert session is None
    assert service.connections[0].recv(1) == b""  # its other side is closed
    link.postpone()
    assert not link.is_due()


def test_a_service_that_goes_away_is_asked_for_again_at_once(service, opening):
    link, thread = opening
    service.welcome()
    thread.join()
    assert not link.is_due()
    service.connections[0].close()
    give_up = time.monotonic() + 20
    while not link.is_due():
        assert time.monotonic() < give_up


def test_a_socket_that_this_user_may_not_look_at_is_that_of_no_service_of_this_host(service, tmp_path):
    """As the one of a service that another user runs, whose directory is private."""
    link = HostLink()
    user = os.geteuid()
    tmp_path.chmod(0o000)
    try:
        if user == 0:
            os.seteuid(65534)
        link.open(service.stat())
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert not link.is_due()
    with link.session() as session:
        assert session is None


def test_a_call_that_is_about_to_end_does_not_wait_for_a_session(service):
    link = HostLink()
    before = time.monotonic()
    link.open(service.stat(), 0.01)  # nobody answers
    assert time.monotonic() - before < 5
    assert not link.is_due()
    with link.session() as session:
        assert session is None
    link.close()


def test_nor_does_it_wait_for_another_thread_that_opens_one(service, opening):
    link, thread = opening
    link._ask_at = time.monotonic()  # it is due for this call, too
    before = time.monotonic()
    link.open(service.stat(), 0.01)
    assert time.monotonic() - before < 5
    assert thread.is_alive()
    service.welcome()
    thread.join()
    with link.session() as session:
        assert session is not None
    assert len(service.connections) == 1
