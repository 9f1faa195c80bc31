"""A client for etcd, and the keys under which etcd stores the state of a controller cluster.

Each call is sent to a single etcd member. If a member does not respond, the next call is sent to the next member.

    /tq/<cluster>/0/about            controller id shared by the cluster, written once
    /tq/<cluster>/0/leader           current leader as JSON, under its lease; the leader's epoch is the revision that
                                     created the key
    /tq/<cluster>/0/last             end of the log, see `Position`
    /tq/<cluster>/0/log/<first>/<n>  chunk <n> of the batch of records that starts with record <first>
    /tq/<cluster>/0/members/<id>     address and last applied record of a controller, under its lease
    /tq/<cluster>/0/snapshots/<id>   first record that a controller needs, kept even while the controller is down

The 0 in each key is the shard number. There is only one shard.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from tq_service.errors import InvalidArgumentError, JournalUnreachableError, NewerVersionError
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.wire.connection import CONNECTION_OPTIONS, Credentials, Tls, open_channel

_POSITION: Final = struct.Struct("<4sQQQ")
_POSITION_MAGIC: Final = b"tqp1"


class Position(NamedTuple):
    """A position in the log, immediately after a record.

    Attributes:
        number: number of the last record before the position; 0 at the beginning of the log.
        epoch: epoch of the leader that wrote this record.
        chain: checksum of all records up to the position, used to tell diverged logs apart.
    """

    number: int
    epoch: int
    chain: int

    def encode(self) -> bytes:
        """Encode the position as bytes."""
        return _POSITION.pack(_POSITION_MAGIC, *self)

    @classmethod
    def decode(cls, data: bytes) -> Position:
        """Decode a position.

        Raises:
            NewerVersionError: the bytes have an unknown format.
        """
        if len(data) != _POSITION.size or not data.startswith(_POSITION_MAGIC):
            raise NewerVersionError(
                "the journal in etcd was written by a newer version of the service; install that version"
            )
        return cls(*_POSITION.unpack(data)[1:])


BEGINNING: Final = Position(0, 0, 0)


class ClusterKeys:
    """The etcd keys of a controller cluster.

    Args:
        cluster: name of the cluster.
    """

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.prefix = f"/tq/{cluster}/0/".encode()
        self.about = self.prefix + b"about"
        self.leader = self.prefix + b"leader"
        self.last = self.prefix + b"last"
        self.log = self.prefix + b"log/"
        self.members = self.prefix + b"members/"
        self.snapshots = self.prefix + b"snapshots/"

    def batch(self, first: int, piece: int = 0) -> bytes:
        """Return the key of a chunk of the batch that starts with record `first`."""
        return self.log + b"%016x/%04x" % (first, piece)

    def batches_from(self, first: int) -> bytes:
        """Return the lower bound for the keys of batches that start at record `first` or later."""
        return self.log + b"%016x" % first

    def first_of(self, key: bytes) -> int:
        """Return the number of a batch's first record, given the key of any chunk in the batch."""
        return int(key[len(self.log) :].partition(b"/")[0], 16)


_log = logging.getLogger(__name__)
TRY_SECONDS: Final = 1.0
"""Time to wait for a member's response before trying the next member."""
_PAUSE_SECONDS: Final = 0.05
_OPTIONS: Final = (*CONNECTION_OPTIONS, ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
# Status codes after which a retry may succeed, possibly at another member. A member without a leader returns
# UNAVAILABLE. A member with a full database returns RESOURCE_EXHAUSTED, which an operator can resolve.
_TRIED_AGAIN: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}
# Parts of etcd's error messages that indicate an invalid token. The status codes differ between versions of etcd.
_OF_TOKENS: Final = ("auth token", "revision of auth store", "revision in header")
_METHODS: Final[dict[type[Any], tuple[str, type[Any]]]] = {
    pb.EtcdRangeRequest: ("KV/Range", pb.EtcdRangeResponse),
    pb.EtcdTxnRequest: ("KV/Txn", pb.EtcdTxnResponse),
    pb.EtcdCompactionRequest: ("KV/Compact", pb.EtcdCompactionResponse),
    pb.EtcdLeaseGrantRequest: ("Lease/LeaseGrant", pb.EtcdLeaseGrantResponse),
    # A streaming method that is called here with a single request. etcd ends the stream after its response.
    pb.EtcdLeaseKeepAliveRequest: ("Lease/LeaseKeepAlive", pb.EtcdLeaseKeepAliveResponse),
    pb.EtcdLeaseRevokeRequest: ("Lease/LeaseRevoke", pb.EtcdLeaseRevokeResponse),
    pb.EtcdAuthenticateRequest: ("Auth/Authenticate", pb.EtcdAuthenticateResponse),
    pb.EtcdStatusRequest: ("Maintenance/Status", pb.EtcdStatusResponse),
}


class Etcd:
    """A client for an etcd cluster. Thread-safe.

    Args:
        members: addresses of the members in the form "host:port".
        tls: TLS settings. None for plaintext.
        user: name of an etcd user, or None to connect without authentication.
        password_file: path of the file that contains the user's password. The file is read for each token request.

    Raises:
        InvalidArgumentError: a file in the settings cannot be read.
    """

    def __init__(
        self,
        members: Sequence[str],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password_file: Path | None = None,
    ) -> None:
        self.members = members
        self._user = user
        self._password_file = password_file
        self._credentials = Credentials(token=False, tls=tls or False)
        self._lock = threading.Lock()
        self._opened_with = self._credentials.signature()
        self._channels: dict[str, grpc.Channel] = {}
        self._old: list[grpc.Channel] = []
        self._at = 0  # index of the current member
        self._token: str | None = None
        self._closed = threading.Event()
        for address in members:
            self._channel(address)

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = open_channel(grpc, address, self._credentials, _OPTIONS)
            return self._channels[address]

    def _member(self) -> str:
        return self.members[self._at % len(self.members)]

    def _next_member(self, failed: str) -> None:
        """Switch from a failed member to the next one, unless another thread has already done so.

        Reopen channels if certificates have changed.
        """
        with self._lock:
            if self._member() == failed:
                self._at += 1
            signature = self._credentials.signature()
            if signature != self._opened_with:
                self._opened_with = signature
                self._old += self._channels.values()
                self._channels.clear()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the call metadata that authenticates the user, requesting a token if necessary."""
        if self._user is None:
            return ()
        if self._token is None:
            try:
                password = "" if self._password_file is None else self._password_file.read_text().strip()
            except OSError as error:
                raise InvalidArgumentError(
                    f"etcd_password_file {self._password_file} cannot be read: {error.strerror}",
                    field="etcd_password_file",
                ) from None
            request = pb.EtcdAuthenticateRequest(name=self._user, password=password)
            answer: pb.EtcdAuthenticateResponse = self._ask(self._member(), request, TRY_SECONDS, ())
            self._token = answer.token
        return (("token", self._token),)

    def _ask(self, address: str, request: Any, timeout: float, metadata: Sequence[tuple[str, str]]) -> Any:
        name, kind = _METHODS[type(request)]
        method: Any = self._channel(address).unary_unary(
            f"/etcdserverpb.{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return method(request, timeout=timeout, metadata=metadata)

    def once(self, request: Any, timeout: float = TRY_SECONDS) -> Any:
        """Send a request to the current member and return the response.

        Raises:
            JournalUnreachableError: the member did not respond. It is unknown whether the call took effect. The next
                call is sent to the next member.
            InvalidArgumentError: etcd rejected the call permanently.
        """
        if self._closed.is_set():
            raise JournalUnreachableError("the connection to etcd is closed")
        address, had_token = self._member(), self._token is not None
        try:
            return self._ask(address, request, timeout, self._metadata())
        except ValueError as error:  # another thread has closed the channel
            raise JournalUnreachableError(f"the connection to etcd at {address} is closed ({error})") from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        if had_token and (code is grpc.StatusCode.UNAUTHENTICATED or any(each in details for each in _OF_TOKENS)):
            self._token = None  # the token has expired, etcd has restarted, or users or permissions have changed
            return self.once(request, timeout)
        if code in _TRIED_AGAIN:
            self._next_member(address)
            raise JournalUnreachableError(
                f"etcd at {address} does not respond ({code.name}: {details}); no acknowledged data is "
                "lost, and the service resumes when a majority of etcd's members responds",
                metadata={"address": address},
            )
        raise InvalidArgumentError(
            f"etcd at {address} rejected a request from the journal ({code.name}: {details}). Check etcd_user and "
            "its permissions, the certificates, and etcd's --max-request-bytes.",
            field="journal",
        )

    def ask(self, request: Any, seconds: float = 10.0, timeout: float = TRY_SECONDS) -> Any:
        """Send an idempotent request to etcd and return the response. Retry for up to `seconds`.

        Raises:
            JournalUnreachableError: no member responded in time.
            InvalidArgumentError: etcd rejected the call permanently.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                return self.once(request, timeout)
            except JournalUnreachableError:
                if time.monotonic() > end or self._closed.is_set():
                    raise
            time.sleep(_PAUSE_SECONDS)

    def get(self, key: bytes, seconds: float = 10.0) -> pb.EtcdKeyValue | None:
        """Return the entry for a key, or None if the key does not exist."""
        answer: pb.EtcdRangeResponse = self.ask(pb.EtcdRangeRequest(key=key), seconds)
        return answer.kvs[0] if answer.kvs else None

    def get_all(self, prefix: bytes, seconds: float = 10.0) -> list[pb.EtcdKeyValue]:
        """Return the entries of all keys with a prefix. Use this method only if few keys have the prefix."""
        answer: pb.EtcdRangeResponse = self.ask(pb.EtcdRangeRequest(key=prefix, range_end=after(prefix)), seconds)
        return list(answer.kvs)

    def close(self) -> None:
        """Cancel all calls and close all connections."""
        self._closed.set()
        with self._lock:
            for channel in (*self._channels.values(), *self._old):
                channel.close()


def after(prefix: bytes) -> bytes:
    """Return the exclusive upper bound of the keys that begin with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def is_value(key: bytes, value: bytes) -> pb.EtcdCompare:
    """Return an etcd condition that holds if a key has the given value."""
    return pb.EtcdCompare(result=0, target=3, key=key, value=value)


def is_created_at(key: bytes, revision: int) -> pb.EtcdCompare:
    """Return an etcd condition that holds if a key was created in `revision` or, for revision 0, does not exist."""
    return pb.EtcdCompare(result=0, target=1, key=key, create_revision=revision)


def put(key: bytes, value: bytes, lease_id: int = 0) -> pb.EtcdRequestOp:
    """Return an operation that writes a key, optionally under a lease."""
    return pb.EtcdRequestOp(request_put=pb.EtcdPutRequest(key=key, value=value, lease=lease_id))


def delete(first: bytes, end: bytes = b"") -> pb.EtcdRequestOp:
    """Return an operation that deletes a key, or a range of keys if `end` is given."""
    return pb.EtcdRequestOp(request_delete_range=pb.EtcdDeleteRangeRequest(key=first, range_end=end))
