"""What is an address of a service, what is none, and why one cannot be reached."""

import pytest

import tq_service as tq
from tq_service.addresses import cause_of, parse_address


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("localhost", "localhost:50051"),
        ("localhost:6000", "localhost:6000"),
        ("storage-0.tq-storage", "storage-0.tq-storage:50051"),
        ("tq_controller_1.example.", "tq_controller_1.example.:50051"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("10.0.0.1:65535", "10.0.0.1:65535"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[2001:db8::2]:1", "[2001:db8::2]:1"),
        ("fe80::1%eth0", "[fe80::1%eth0]:50051"),
        ("dns:///host", "dns:///host:50051"),
        ("dns://8.8.8.8/host:1", "dns://8.8.8.8/host:1"),
        ("dns:host", "dns:host:50051"),
        ("ipv4:10.0.0.1:1,10.0.0.2", "ipv4:10.0.0.1:1,10.0.0.2:50051"),
        ("ipv6:[::1]:1", "ipv6:[::1]:1"),
        ("unix:/run/my directory/tq.sock", "unix:/run/my directory/tq.sock"),
        ("unix-abstract:tq", "unix-abstract:tq"),
    ],
)
def test_what_addresses_stand_for(given, expected):
    assert parse_address(given) == expected
    assert parse_address(expected) == expected


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("http://localhost:50051", "omit 'http://'"),
        ("https://localhost:50051/v1", "omit 'https://' and the path; enable TLS with tls="),
        ("grpc://localhost", "omit 'grpc://'"),
        ("localhost:50051/", "omit the path '/'"),
        ("localhost/train", "omit the path '/train'"),
        ("localhost:", "'' is not a port number from 1 to 65535"),
        ("localhost:0", "'0' is not a port"),
        ("localhost:65536", "'65536' is not a port"),
        ("localhost:-1", "'-1' is not a port"),
        ("localhost:http", "'http' is not a port"),
        ("localhost:\u0663", "is not a port"),
        ("", "omit it or pass None"),
        (":50051", "the host is missing"),
        ("dns:///", "the host is missing"),
        ("50051", "did you mean 'localhost:50051'?"),
        (50051, "as a string"),
        (" localhost:50051", "remove spaces"),
        ("localhost:50051\n", "remove spaces"),
        ("local host", "remove spaces"),
        ("user@localhost:1", "neither a valid host name nor an IP address"),
        ("10.0.0.256:1", "neither a valid host name nor an IP address"),
        ("::1:50051", "needs brackets, such as '[::1]:50051'"),
        ("[::1", "'[::1]:50051' for an IPv6 address"),
        ("[::1]50051", "'[::1]:50051' for an IPv6 address"),
        ("[localhost]:1", "'[::1]:50051' for an IPv6 address"),
    ],
)
@pytest.mark.parametrize("kind", [tq.Client, tq.AsyncClient])
def test_what_is_no_address_is_refused_before_anything_is_sent(kind, given, advice):
    with pytest.raises(ValueError, match=r"^address: got ") as caught:
        kind(given)
    assert isinstance(caught.value, tq.errors.InvalidArgumentError)
    assert f"got {given!r}, expected 'host:port'" in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize("kind", [tq.Client, tq.AsyncClient])
def test_the_environment_has_addresses_of_the_same_kind(kind, monkeypatch):
    monkeypatch.setenv("TQ_ADDRESS", "controller")
    assert kind().address == "controller:50051"
    assert kind("other").address == "other:50051"
    monkeypatch.setenv("TQ_ADDRESS", "")
    assert kind().address == "localhost:50051"
    monkeypatch.setenv("TQ_ADDRESS", "http://controller")
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="TQ_ADDRESS: got 'http://controller', expected 'host:port'"
    ):
        kind()


@pytest.mark.parametrize(
    ("grpc_message", "cause"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "connection refused",
        ),
        (
            "errors resolving okk:50051: [field:hostname lookup error:address lookup failed for okk:50051: Domain name "
            "not found]",
            "name not found",
        ),
        ("DNS resolution failed for okk:50051: C-ares status is not ARES_SUCCESS qtype=A name=okk", "name not found"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connection attempt timed out "
            "before receiving SETTINGS frame",
            "timed out",
        ),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.1.1:1: FD Shutdown: timeout", "timed out"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed "
            "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER",
            "TLS handshake failed",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed "
            "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
            "CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "the certificate of the service has expired",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Handshake read failed "
            "(recvmsg:Connection reset by peer (104))",
            "TLS handshake failed",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1.1.1.1:1: Socket closed",
            "closed by peer",
        ),
        ("recvmsg:Connection reset by peer", "closed by peer"),
        ("upstream connect error", "upstream connect error"),
    ],
)
def test_causes_are_said_in_plain_words(grpc_message, cause):
    assert cause_of(grpc_message) == cause


def test_several_addresses_have_commas_between_them() -> None:
    assert parse_address("a, b:1,[::1],a:50051") == "a:50051,b:1,[::1]:50051"
    assert parse_address("ipv4:1.2.3.4:1,1.2.3.5:2") == "ipv4:1.2.3.4:1,1.2.3.5:2"
    for wrong in ("a,,b", "a,", "a,b:0"):
        with pytest.raises(tq.errors.InvalidArgumentError, match="address: got"):
            parse_address(wrong)
