"""How a service is reached: how channels connect, what a client shows and whom it believes, which controller is asked.

A bearer token and TLS are what clients show; between services it is the same.

A request that is larger than one message goes in several messages of its call. Messages are small, so that few bytes
are on their way to a service at a time. The first request of a call that takes `PART_BYTES` or more is cut, serialized,
into parts of just that size and a last one that is shorter, which may be empty. A service joins them: what the request
asks for is done whole or not at all.
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

PART_BYTES: Final = 2 << 20
"""Size of each part but the last; a first message of this size says that more follow."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Of a request with all its parts."""

MOST_BATCHED_CALLS: Final = 256
"""Calls of one `CallMany` that are not answered, and calls of one of its messages."""

MOST_BATCHED_REQUEST_BYTES: Final = 16 << 10
"""Of each of them; a larger request goes by itself."""

MOST_BATCHED_METADATA_BYTES: Final = 1024
"""What each of them may have besides the metadata of its stream."""

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


TOKEN_VARIABLE: Final = "TQ_TOKEN"  # noqa: S105  (a name)
TOKEN_FILE_VARIABLE: Final = "TQ_TOKEN_FILE"  # noqa: S105  (a name)
CA_VARIABLE: Final = "TQ_TLS_CA"
CERT_VARIABLE: Final = "TQ_TLS_CERT"
KEY_VARIABLE: Final = "TQ_TLS_KEY"
INSECURE_VARIABLE: Final = "TQ_INSECURE"
TOKEN_KEY: Final = "authorization"  # noqa: S105  (a name)
TOKEN_SCHEME: Final = "Bearer "  # noqa: S105  (a name)

Role: TypeAlias = Literal["read", "produce", "consume", "admin", "service"]
"""What a token lets its holder do."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)

_REREAD_SECONDS: Final = 1.0
Metadata: TypeAlias = "tuple[tuple[str, str], ...]"
Signature: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM with which a client reaches a service over TLS.

    Attributes:
        ca: certificates of the authorities that the service's certificate is checked against; None: those that gRPC
            knows.
        cert: the client's own certificate with its chain, for services that ask for one (mTLS).
        key: the private key of `cert`, without a passphrase.
    """

    ca: FilePath | None = None
    cert: FilePath | None = None
    key: FilePath | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("got one of cert and key; give both, or none for no certificate", field="tls")

    @classmethod
    def of_environment(cls) -> Tls | None:
        """Return what `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY` say, None where none of them is set."""
        ca, cert, key = (os.environ.get(name) or None for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
        return cls(ca=ca, cert=cert, key=key) if ca or cert or key else None

    def signature(self) -> Signature:
        """Return what differs once one of the files has been replaced."""
        return tuple(map(file_signature, (self.ca, self.cert, self.key)))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InvalidArgumentError: one of them cannot be read.
        """
        ca, cert, key = (None if path is None else _read(path) for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca, key, cert)


class Credentials:
    """Token and TLS of one client or service. May be used by several threads.

    Secrets are neither in its repr nor in its pickle: where it is unpickled, a token that was given as text is taken
    from the environment, one from a file is read again.

    Args:
        token: the bearer token, or the path of a file that holds it and is read again when it changes; None:
            `TQ_TOKEN`, else the file that `TQ_TOKEN_FILE` names, else no token; False: no token, whatever they say.
        tls: how to reach the service over TLS; None: as `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY` say, else in
            plaintext; False: in plaintext, whatever they say.
        insecure: whether the token may be sent in plaintext to other machines; None: whether `TQ_INSECURE` is true.
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
        """What others could read on the way where calls go in plaintext, "" for nothing."""
        return "the token" if self.has_token else ""

    def metadata(self) -> Metadata | None:
        """Return the metadata that carries the token, None without one.

        Raises:
            UnauthenticatedError: the token's file cannot be used.
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
        except (OSError, ValueError) as error:  # replaced at this moment, or gone: the token read before may still do
            if self._metadata is None:
                raise UnauthenticatedError(
                    f"the token file {path} cannot be used: {error}", metadata={"path": str(path)}
                ) from None
        self._reread_at = time.monotonic() + _REREAD_SECONDS

    def signature(self) -> Signature:
        """Return what differs once a channel has to be opened again to use the present files."""
        return () if self.tls is None else self.tls.signature()

    def check_target(self, address: str) -> None:
        """Refuse to send a token to another machine in plaintext.

        Raises:
            InvalidArgumentError: a token, no TLS, an address beyond this machine, and `insecure` not set.
        """
        if self.sent_secret and self.tls is None and not self._insecure and not is_loopback_target(address):
            raise InvalidArgumentError(
                f"{self.sent_secret} would go to {address} in plaintext, for everyone on the way to read; give tls, or "
                f"set TQ_TLS_CA; where the network itself is trusted, set insecure or {INSECURE_VARIABLE}=true",
                field="tls",
            )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make such credentials elsewhere, secrets left out."""
        return dict(self._arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self.arguments()), ()

    def __repr__(self) -> str:
        return f"Credentials(has_token={self.has_token}, tls={self.tls})"


def open_channel(api: Any, address: str, credentials: Credentials, options: Sequence[tuple[str, Any]]) -> Any:
    """Open a channel for threads or for asyncio, as `api` says: `grpc` or `grpc.aio`.

    Raises:
        InvalidArgumentError: the credentials cannot be used for this address.
    """
    credentials.check_target(address)
    if credentials.tls is None:
        return api.insecure_channel(address, options=options)
    return api.secure_channel(address, credentials.tls.channel_credentials(), options=options)


def in_parts(request: bytes, name: str) -> list[bytes]:
    """Return the messages in which a serialized request goes.

    Args:
        request: the request.
        name: of the call, for the error.

    Raises:
        InvalidArgumentError: it is larger than a service takes.
    """
    size = len(request)
    if size > MAX_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"the request of {name} is {size} bytes, the values of fields apart; expected at most {MAX_REQUEST_BYTES}. "
            "Write or name fewer samples at once, or give them shorter keys, groups and custom_meta",
            metadata={"got": str(size), "limit": str(MAX_REQUEST_BYTES)},
        )
    if size < PART_BYTES:
        return [request]
    return [request[start : start + PART_BYTES] for start in range(0, size + 1, PART_BYTES)]


def is_loopback_target(address: str) -> bool:
    """Whether a gRPC target, such as "host:port", is on this machine."""
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
    """Return what differs once a file has been replaced or written to, None where there is none."""
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
            f"{source} holds no token: {len(token)} characters, expected printable ASCII without spaces as `tq-service "
            "token new` prints it",
            field="token",
        )
    return ((TOKEN_KEY, TOKEN_SCHEME + token),)


def _read(path: FilePath) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{os.fspath(path)} cannot be read: {error.strerror}", field="tls") from None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "yes", "on"}


_SILENT_SECONDS: Final = 4.0
_TIMED_OUT: Final = "timed out"  # what `addresses.cause_of` makes of it


class Controllers:
    """The addresses at which the controller is asked for; of several controllers one leads. For several threads.

    A standby says where the leader is, which is asked from then on, whether it was among the addresses given or not;
    where that does not answer, those that were given have their turns.

    Args:
        addresses: one, such as a DNS name of all controllers, or several with commas between them.

    Attributes:
        current: that which is asked next.
        has_several: whether there is more than one controller, as far as is known.
    """

    def __init__(self, addresses: str) -> None:
        self._given = split_addresses(addresses)
        self.current = self._given[0]
        self._silent_at: dict[str, float] = {}  # by address: when a call had no answer
        self.has_several = len(self._given) > 1

    def note(self, asked: str, failure: TqError) -> None:
        """Choose the controller that is asked next, after a call that failed; each thread may be late with its own."""
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
        """Whether a controller did not answer just now: others name one that is paused until its lease ends."""
        return time.monotonic() - self._silent_at.get(address, -_SILENT_SECONDS) < _SILENT_SECONDS
