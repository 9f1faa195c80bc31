"""Connections to a service: channel options, client credentials, and the selection of a controller.

Clients authenticate with a bearer token over TLS. Services also authenticate to each other with tokens and TLS.

A large request is split into several messages within one call. Because the messages are small, only a few bytes are in
flight to a service at any time. If the serialized first request of a call has at least `PART_BYTES` bytes, it is split
into parts of exactly this size. The last part is smaller and may be empty. The service joins the parts before it
executes the request. A request is therefore executed either completely or not at all.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import grpc

from tq_service.addresses import split_addresses
from tq_service.errors import InvalidArgumentError, NotLeaderError, TqError, UnauthenticatedError, UnavailableError
from tq_service.version import USER_AGENT

if TYPE_CHECKING:
    FilePath: TypeAlias = str | os.PathLike[str]

CONNECTION_OPTIONS: Final = (
    ("grpc.primary_user_agent", USER_AGENT),
    # A client detects within half a second that a service has started or restarted. By default, gRPC's reconnection
    # pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name, this option limits the duration of a connection attempt. A busy service needs time for a
    # handshake.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # While calls wait for a response, the client detects within 20 s that a peer has disappeared without closing the
    # connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the default is one minute, regardless of keepalive_timeout_ms
    ("grpc.http2.max_pings_without_data", 0),  # unlimited, because no data is sent during a long poll
)

_OF_CLUSTER: Final[dict[str, Any]] = {
    "grpc.keepalive_time_ms": 1_500,
    "grpc.keepalive_timeout_ms": 2_000,
    "grpc.http2.ping_timeout_ms": 2_000,
    # If a DNS name resolves to several addresses, each connection picks one at random. The first address may be that of
    # an unreachable standby.
    "grpc.dns_min_time_between_resolutions_ms": 1_000,
    "grpc.service_config": '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}',
}

CONTROLLER_CONNECTION_SECONDS: Final = 30
"""How long, in seconds, a controller in a cluster accepts new calls on a connection. Calls in flight continue.

Some clients connect to a cluster through a load balancer that routes to the leader. The limit makes these clients
reconnect, which brings them to the current leader.
"""


def cluster_options(options: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Return the options for a channel to a controller in a cluster.

    With these options, the client detects a paused or disconnected controller before the controller's lease ends. Calls
    waiting for that controller then move to the next one.
    """
    return tuple((dict(options) | _OF_CLUSTER).items())  # gRPC uses the first of duplicate options


CLUSTER_OPTIONS: Final = cluster_options(CONNECTION_OPTIONS)

STREAM_WINDOW_BYTES: Final = 16 << 10
"""Maximum number of unread bytes that a client may send to the service."""

PART_BYTES: Final = 2 << 20
"""Size in bytes of each part except the last. If a call's first message has at least this size, more parts follow."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Maximum total size of all parts of a request, in bytes."""

MOST_BATCHED_CALLS: Final = 256
"""Maximum number of unanswered calls per `CallMany` stream, which is also the maximum number of calls per message."""

MOST_BATCHED_REQUEST_BYTES: Final = 16 << 10
"""Maximum size of a batched call's request, in bytes. Larger requests are sent as separate calls."""

MOST_BATCHED_METADATA_BYTES: Final = 1024
"""Maximum size in bytes of a batched call's metadata, excluding the stream's own metadata."""

LISTENING_OPTIONS: Final = (
    # Unread bytes use memory that the quota does not cover. By default, gRPC allows several megabytes of unread bytes
    # per call.
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_max_read_chunk_size", 256 << 10),  # per connection; gRPC's default is 4 MiB
    # The service detects within 80 s that a client has disappeared without closing the connection, and releases the
    # resources of its calls. A client may also fail to answer pings because it is busy, such as a Node.js worker with a
    # blocked event loop. Its calls continue once it answers within this time.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Accept clients that ping more often than every five minutes, which is gRPC's default limit.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


TOKEN_VARIABLE: Final = "TQ_TOKEN"  # noqa: S105  (a name)
TOKEN_FILE_VARIABLE: Final = "TQ_TOKEN_FILE"  # noqa: S105  (a name)
CA_VARIABLE: Final = "TQ_TLS_CA"
CERT_VARIABLE: Final = "TQ_TLS_CERT"
KEY_VARIABLE: Final = "TQ_TLS_KEY"
INSECURE_VARIABLE: Final = "TQ_INSECURE"
TOKEN_KEY: Final = "authorization"  # noqa: S105  (a name)
TOKEN_SCHEME: Final = "Bearer "  # noqa: S105  (a name)

Role: TypeAlias = Literal["read", "produce", "consume", "admin", "service"]
"""Role of a token, which determines what it permits."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)

_REREAD_SECONDS: Final = 1.0
Metadata: TypeAlias = "tuple[tuple[str, str], ...]"
Signature: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files that a client uses to connect to a service over TLS.

    Attributes:
        ca: certificates of the authorities that may sign the service's certificate. If None, gRPC's defaults are used.
        cert: client certificate and its chain, for services that require one (mTLS).
        key: private key of `cert`, without a passphrase.
    """

    ca: FilePath | None = None
    cert: FilePath | None = None
    key: FilePath | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("only one of cert and key is set; set both or neither", field="tls")

    @classmethod
    def of_environment(cls) -> Tls | None:
        """Return the settings from `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY`, or None if all three are unset."""
        ca, cert, key = (os.environ.get(name) or None for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
        return cls(ca=ca, cert=cert, key=key) if ca or cert or key else None

    def signature(self) -> Signature:
        """Return a value that changes whenever any of the files is modified."""
        return tuple(map(file_signature, (self.ca, self.cert, self.key)))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return channel credentials.

        Raises:
            InvalidArgumentError: a file cannot be read.
        """
        ca, cert, key = (None if path is None else _read(path) for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca, key, cert)


class Credentials:
    """Token and TLS settings of a client or service. Thread-safe.

    Neither the repr nor the pickle contains secrets. If the token was passed as text, the unpickled credentials use the
    token from the environment instead. If the token was passed as a file, the unpickled credentials read the file
    again.

    Args:
        token: bearer token as text, or the path of a file that contains the token. The file is read again whenever it
            changes. If None, use the token in `TQ_TOKEN`, otherwise the token in the file named by `TQ_TOKEN_FILE`,
            otherwise no token. If False, use no token, even if these variables are set.
        tls: TLS settings for connections to the service. If None, use the settings in `TQ_TLS_CA`, `TQ_TLS_CERT` and
            `TQ_TLS_KEY`, or plaintext if they are not set. If False, use plaintext, even if these variables are set.
        insecure: whether to allow sending the token to other machines in plaintext. If None, `TQ_INSECURE` determines
            the value.
    """

    def __init__(
        self,
        token: str | Path | Literal[False] | None = None,
        tls: Tls | Literal[False] | None = None,
        insecure: bool | None = None,
    ) -> None:
        self._arguments = {"token": None if isinstance(token, str) else token, "tls": tls, "insecure": insecure}
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE) or None
        if token is None and (path := os.environ.get(TOKEN_FILE_VARIABLE)):
            token = Path(path)
        self._token_file = token if isinstance(token, Path) else None
        self._metadata: Metadata | None = _bearer(token, "token") if isinstance(token, str) else None
        self._file_signature: tuple[int, int, int] | None = None
        self._reread_at = 0.0
        self.tls = Tls.of_environment() if tls is None else tls or None
        self._insecure = _is_set(INSECURE_VARIABLE) if insecure is None else insecure

    @property
    def has_token(self) -> bool:
        """Whether calls carry a token."""
        return self._token_file is not None or self._metadata is not None

    @property
    def sent_secret(self) -> str:
        """Name of the secret that plaintext calls would expose, or an empty string if there is none."""
        return "the token" if self.has_token else ""

    def metadata(self) -> Metadata | None:
        """Return call metadata containing the token, or None if no token is set.

        Raises:
            UnauthenticatedError: the token file cannot be read, or does not contain a token.
        """
        if self._token_file is not None and time.monotonic() >= self._reread_at:
            self._reread(self._token_file)
        return self._metadata

    def _reread(self, path: Path) -> None:
        try:
            signature = file_signature(path)
            if signature is None or signature != self._file_signature:
                self._metadata = _bearer(path.read_text(), str(path))
                self._file_signature = signature
        except (OSError, ValueError) as error:  # if the file no longer exists, the last token may still be valid
            if self._metadata is None:
                raise UnauthenticatedError(
                    f"could not read a token from {path}: {error}", metadata={"path": str(path)}
                ) from None
        self._reread_at = time.monotonic() + _REREAD_SECONDS

    def signature(self) -> Signature:
        """Return a value that changes whenever a TLS file is modified. The channel must then be reopened."""
        return () if self.tls is None else self.tls.signature()

    def check_target(self, address: str) -> None:
        """Reject an address if calls to it would send the token over the network in plaintext.

        Raises:
            InvalidArgumentError: the address is on another machine, TLS is off, and `insecure` is not set.
        """
        if self.sent_secret and self.tls is None and not self._insecure and not is_loopback_target(address):
            raise InvalidArgumentError(
                f"{self.sent_secret} would be sent to {address} in plaintext, readable by others on the network. Set "
                f"tls or TQ_TLS_CA. If the network itself is trusted, set insecure or {INSECURE_VARIABLE}=true",
                field="tls",
            )

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments, without secrets, for creating equivalent credentials in another process."""
        return dict(self._arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self.arguments()), ()

    def __repr__(self) -> str:
        return f"Credentials(has_token={self.has_token}, tls={self.tls})"


def open_channel(api: Any, address: str, credentials: Credentials, options: Sequence[tuple[str, Any]]) -> Any:
    """Open a channel that is synchronous if `api` is `grpc`, or asynchronous if `api` is `grpc.aio`.

    Raises:
        InvalidArgumentError: the credentials cannot be read, or must not be sent to `address`.
    """
    credentials.check_target(address)
    if credentials.tls is None:
        return api.insecure_channel(address, options=options)
    return api.secure_channel(address, credentials.tls.channel_credentials(), options=options)


def in_parts(request: bytes, name: str) -> list[bytes]:
    """Split a serialized request into the messages of a single call.

    Args:
        request: serialized request.
        name: name of the call, for use in error messages.
    """
    size = len(request)
    if size > MAX_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"the request of {name} has {size} bytes, excluding field values; expected at most {MAX_REQUEST_BYTES}. "
            "Write or request fewer samples at once, or use shorter keys, groups and custom_meta",
            metadata={"got": str(size), "limit": str(MAX_REQUEST_BYTES)},
        )
    if size < PART_BYTES:
        return [request]
    return [request[start : start + PART_BYTES] for start in range(0, size + 1, PART_BYTES)]


def is_loopback_target(address: str) -> bool:
    """Return whether a gRPC target, such as "host:port", refers to this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    endpoint = address.rpartition("/")[2]
    host = (endpoint.rpartition(":")[0] or endpoint).strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def file_signature(path: FilePath | None) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is replaced or modified, or None if the file does not exist."""
    if path is None:
        return None
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _bearer(text: str, source: str) -> Metadata:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgumentError(
            f"{source} does not contain a token: got {len(token)} characters; expected printable ASCII without spaces, "
            "as printed by `tq-service token new`",
            field="token",
        )
    return ((TOKEN_KEY, TOKEN_SCHEME + token),)


def _read(path: FilePath) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"could not read {os.fspath(path)}: {error.strerror}", field="tls") from None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "yes", "on"}


_SILENT_SECONDS: Final = 4.0
_TIMED_OUT: Final = "timed out"  # as in the result of `addresses.cause_of`


class Controllers:
    """Stores the controllers' addresses and chooses which controller to call. Thread-safe.

    If several controllers exist, one of them is the leader. The error response of a standby contains the leader's
    address. The client then calls the leader, even if the leader's address was not configured. If the leader does not
    respond, the client tries the configured addresses in turn.

    Args:
        addresses: one or more addresses, separated by commas. A single address may be a DNS name that resolves to all
            controllers.

    Attributes:
        current: address of the controller to call next.
        has_several: whether more than one controller is known.
    """

    def __init__(self, addresses: str) -> None:
        self._given = split_addresses(addresses)
        self.current = self._given[0]
        self._silent_at: dict[str, float] = {}  # time of the last timed-out call, by address
        self.has_several = len(self._given) > 1

    def note(self, asked: str, failure: TqError) -> None:
        """Choose the next controller if the current one was unavailable. Failures of other controllers are ignored."""
        if not isinstance(failure, UnavailableError) or asked != self.current:
            return
        leader = ""
        if isinstance(failure, NotLeaderError):
            self.has_several = True
            leader = failure.metadata.get("leader_address", "")
        elif _TIMED_OUT in failure.message:
            self._silent_at[asked] = time.monotonic()
        if leader and leader != asked and not self._is_silent(leader):
            self.current = leader
        else:
            at = self._given.index(asked) + 1 if asked in self._given else 0
            others = self._given[at:] + self._given[:at]
            self.current = next((each for each in others if not self._is_silent(each)), others[0])

    def _is_silent(self, address: str) -> bool:
        """Return whether a controller timed out recently. A standby may still name such a controller as the leader."""
        return time.monotonic() - self._silent_at.get(address, -_SILENT_SECONDS) < _SILENT_SECONDS
