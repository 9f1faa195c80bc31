"""How channels connect, connect again and notice that their peer is gone: those of clients and between services."""

from __future__ import annotations

from typing import Final

CONNECTION_OPTIONS: Final = (
    # A service that starts late or comes back is found within half a second; gRPC's own pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # In spite of its name: how long one attempt to connect may take. A busy service needs its time for a handshake.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A peer that vanished without closing is noticed within 20 s while calls wait on it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever keepalive_timeout_ms says
    ("grpc.http2.max_pings_without_data", 0),  # a long poll has no data for long; 0: no bound
)

SWIFT_KEEPALIVE: Final = (
    # Of a controller of a cluster that was paused or cut off: noticed before its lease ends, so that calls that wait on
    # it go to the next one.
    ("grpc.keepalive_time_ms", 1_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
)

CLUSTER_OPTIONS: Final = (*CONNECTION_OPTIONS, *SWIFT_KEEPALIVE)

LISTENING_OPTIONS: Final = (
    # A client that vanished without closing is noticed within 80 s, so that what its calls hold does not stay. A client
    # that is merely busy, such as a Node.js worker whose event loop computes, answers no pings and keeps its calls.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients that look for a vanished service more often than gRPC's five minutes are welcome.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
