"""What is found out about an address that gRPC cannot reach, and that errors and warnings say it."""

import contextlib
import logging
import socket
import threading
import time

import grpc
import pytest
from certificates import Authority
from client_support import make_client
from fault_seconds import FAULT_SECONDS

import tq_service as tq
from tq_service.addresses import hosts_and_ports
from tq_service.client import connection_check, transport
from tq_service.client.connection_check import find_fault


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@contextlib.contextmanager
def grpc_server(tls=None, *, asks_for_certificate=False):
    """Yield the port of a gRPC server without services, at 127.0.0.1 alone: "localhost" is ::1 as well."""
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (tls.key.read_bytes(), tls.cert.read_bytes())
        ca = tls.ca.read_bytes() if asks_for_certificate else None
        credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=asks_for_certificate)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(None)


@contextlib.contextmanager
def other_program(answer):
    """Yield the port of a program that answers what it is sent with `answer`, and with nothing where that is None."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    kept.append(connection)
                    if answer is not None:
                        connection.recv(1000)
                        connection.sendall(answer)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for connection in kept:
            connection.close()


def test_a_plaintext_client_at_a_service_with_tls(authority):
    tls = authority.issue("service")
    with grpc_server(tls) as port:
        expected = f"127.0.0.1:{port} speaks TLS and this client does not; pass tls=, or set TQ_TLS_CA"
        assert find_fault(f"localhost:{port}", None) == expected
        assert find_fault(f"dns:///localhost:{port}", None) == expected
        assert find_fault(f"ipv4:127.0.0.1:{port}", None) == expected
    with grpc_server(tls, asks_for_certificate=True) as port:
        assert "speaks TLS and this client does not" in find_fault(f"localhost:{port}", None)


def test_a_client_with_tls_at_a_plaintext_service(authority):
    with grpc_server() as port:
        assert find_fault(f"localhost:{port}", tq.Tls(ca=authority.ca)) == (
            f"127.0.0.1:{port} does not speak TLS and this client does; omit tls= and TQ_TLS_CA, or serve with TLS"
        )


def test_certificates_that_do_not_fit(authority, tmp_path):
    other = Authority(tmp_path / "other")
    with grpc_server(authority.issue("service")) as port:
        untrusted = find_fault(f"localhost:{port}", tq.Tls(ca=other.ca))
    assert untrusted is not None
    assert untrusted.startswith("the certificate of the service is not trusted (")
    with grpc_server(authority.issue("elsewhere", "elsewhere.example")) as port:
        wrong_name = find_fault(f"localhost:{port}", tq.Tls(ca=authority.ca))
    assert wrong_name is not None
    assert "localhost" in wrong_name
    tls = authority.issue("strict")
    with grpc_server(tls, asks_for_certificate=True) as port:
        assert find_fault(f"localhost:{port}", tq.Tls(ca=authority.ca)) == (
            "the service closes connections without a client certificate; pass cert and key in tls="
        )
        assert find_fault(f"localhost:{port}", tls) is None


def test_nothing_is_found_where_nothing_is_wrong_or_grpc_says_it(authority, free_port):
    with grpc_server() as port:
        assert find_fault(f"localhost:{port}", None) is None
    tls = authority.issue("service")
    with grpc_server(tls) as port:
        assert find_fault(f"localhost:{port}", tq.Tls(ca=authority.ca)) is None
        assert find_fault(f"localhost:{port}", tq.Tls()) is None
    assert find_fault(f"localhost:{free_port}", None) is None
    assert find_fault("no-such-host.invalid:1", None) is None
    assert find_fault("unix:/nowhere", None) is None


def test_another_program(authority):
    with other_program(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert find_fault(f"localhost:{port}", None) == f"the server at 127.0.0.1:{port} does not speak gRPC"
        assert "does not speak TLS" in find_fault(f"localhost:{port}", tq.Tls(ca=authority.ca))
    with other_program(None) as port:
        silent = f"127.0.0.1:{port} accepts connections but does not answer"
        assert find_fault(f"localhost:{port}", None) == silent


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_service_that_closes_new_connections_is_not_called_another_program(authority, has_tls):
    with other_program(b"") as port:
        found = find_fault(f"localhost:{port}", tq.Tls(ca=authority.ca) if has_tls else None)
    assert found == f"127.0.0.1:{port} closes new connections without an answer; it may have reached max_connections"


def test_a_check_runs_once_at_a_time_and_is_forgotten_when_the_service_answers(authority):
    with grpc_server(authority.issue("service")) as port:
        outage = transport.Outage(f"localhost:{port}")
        failure = tq.errors.UnavailableError("connection refused", metadata={"grpc_message": "refused"})
        before = threading.active_count()
        for _ in range(10):
            outage.lasts(time.monotonic(), failure, 60.0)
        assert threading.active_count() <= before + 1
        wait_for(lambda: outage.finding is not None)
        outage.is_over()
        assert outage.finding is None


def wait_for(condition):
    done = threading.Event()
    for _ in range(1000):
        if condition():
            return
        done.wait(0.01)
    pytest.fail("it did not become true in 10 s")


async def test_errors_and_warnings_begin_with_what_was_found(kind, authority, caplog, monkeypatch):
    monkeypatch.setattr(transport, "_WARN_AFTER_SECONDS", 1000.0)  # what was found is said before
    caplog.set_level(logging.WARNING, "tq_service.client")
    with grpc_server(authority.issue("service")) as port:
        client = make_client(kind, f"localhost:{port}", timeout=2 * FAULT_SECONDS)
        with pytest.raises(tq.errors.UnavailableError) as raised:
            await client.list_partitions()
        await client.aclose()
    finding = f"127.0.0.1:{port} speaks TLS and this client does not; pass tls=, or set TQ_TLS_CA"
    cause = f"cannot reach localhost:{port}: {finding}"
    assert str(raised.value).startswith(f"{cause}; tried for {2 * FAULT_SECONDS:g} s (")
    assert "do both sides agree" not in str(raised.value)
    assert raised.value.metadata["grpc_message"] in str(raised.value)
    assert [cause in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("address", "pairs"),
    [
        ("localhost:50051", [("localhost", 50051)]),
        ("[::1]:1", [("::1", 1)]),
        ("dns:name:2", [("name", 2)]),
        ("dns://1.1.1.1/name:2", [("name", 2)]),
        ("ipv4:10.0.0.1:1,10.0.0.2:2", [("10.0.0.1", 1), ("10.0.0.2", 2)]),
        ("ipv6:[::1]:1", [("::1", 1)]),
        ("unix:/run/a:1", []),
        ("xds:///a:1", []),
    ],
)
def test_hosts_and_ports_of_addresses(address, pairs):
    assert hosts_and_ports(address) == pairs


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_connection_that_is_reset_before_anything_is_sent_is_closed(monkeypatch):
    secured = connection_check._any_service().wrap_socket(socket.socket(), do_handshake_on_connect=False)
    monkeypatch.setattr(connection_check, "_connected", lambda *target: secured)
    assert connection_check.find_fault("127.0.0.1:1", None) is None
    assert secured.fileno() == -1
