"""How long a peer may leave a ping unanswered before its connection is closed."""

from tq_service.wire.connection import LISTENING_OPTIONS


def test_a_client_that_is_merely_busy_keeps_its_calls():
    """One whose event loop computed for ten seconds lost its calls; the usual time, in gRPC too, is a minute."""
    options = dict(LISTENING_OPTIONS)
    assert options["grpc.http2.ping_timeout_ms"] >= 60_000
    assert options["grpc.keepalive_timeout_ms"] >= 60_000
    assert options["grpc.keepalive_time_ms"] == 20_000  # a vanished client is noticed all the same
