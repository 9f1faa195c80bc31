"""How channels connect, connect again and notice that their peer is gone: those of clients and between services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tq_service.version import USER_AGENT

CONNECTION_OPTIONS: Final = (
    ("grpc.primary_user_agent", USER_AGENT),
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

_OF_CLUSTER: Final[dict[str, Any]] = {
    "grpc.keepalive_time_ms": 1_500,
    "grpc.keepalive_timeout_ms": 2_000,
    "grpc.http2.ping_timeout_ms": 2_000,
    # Of a name with several addresses each connection takes one by chance: the first may be a standby that is cut off.
    "grpc.dns_min_time_between_resolutions_ms": 1_000,
    "grpc.service_config": '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}',
}

CONTROLLER_CONNECTION_SECONDS: Final = 30
"""For how long a controller of a cluster keeps a connection for new calls; those that run on it go on.

A client that has one name for all of them, of which the load balancer knows the one that leads, comes to that one.
"""


def cluster_options(options: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Return the options of a channel to a controller of a cluster.

    One that was paused or cut off is noticed before its lease ends, so that calls that wait on it go to the next one.
    """
    return tuple((dict(options) | _OF_CLUSTER).items())  # of an option that is there twice gRPC takes the first


CLUSTER_OPTIONS: Final = cluster_options(CONNECTION_OPTIONS)

STREAM_WINDOW_BYTES: Final = 16 << 10
"""What a client may send of a message before the service reads it."""

LISTENING_OPTIONS: Final = (
    # What is not read yet lies in memory that no quota counts: gRPC would let it grow to megabytes for each call.
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_max_read_chunk_size", 256 << 10),  # of each connection; gRPC's own is 4 MiB
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
