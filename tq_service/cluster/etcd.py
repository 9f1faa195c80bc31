"""Calls to etcd, and where in it a cluster of controllers keeps what.

A call goes to one of the members, and to the next one where that does not answer.

    /tq/<cluster>/0/about            the id of the controller that the cluster is, written once
    /tq/<cluster>/0/leader           the controller that leads, as JSON, under its lease; its epoch is the revision in
                                     which the key was created
    /tq/<cluster>/0/last             the end of the log, see `Position`
    /tq/<cluster>/0/log/<first>/<n>  a batch of records by the number of its first one, in pieces
    /tq/<cluster>/0/members/<id>     a controller, under its lease: its address, what it has applied, its snapshot
    /tq/<cluster>/0/snapshots/<id>   from where on a controller needs the log, beyond its life

The 0 is the shard; there is one.
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
    """The end of the log, or of a prefix of it.

    Attributes:
        number: of the last record before it; 0: there is none.
        epoch: of the leader that wrote it.
        chain: checksum of all up to it, which two different logs do not share.
    """

    number: int
    epoch: int
    chain: int

    def encode(self) -> bytes:
        """Return its bytes."""
        return _POSITION.pack(_POSITION_MAGIC, *self)

    @classmethod
    def decode(cls, data: bytes) -> Position:
        """Return the position from its bytes.

        Raises:
            NewerVersionError: they have another format.
        """
        if len(data) != _POSITION.size or not data.startswith(_POSITION_MAGIC):
            raise NewerVersionError(
                "the journal in etcd was written by a newer version of the service; install that one"
            )
        return cls(*_POSITION.unpack(data)[1:])


BEGINNING: Final = Position(0, 0, 0)


class ClusterKeys:
    """The keys of a cluster.

    Args:
        cluster: its name.
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
        """Return the key of a piece of the batch that begins with a record."""
        return self.log + b"%016x/%04x" % (first, piece)

    def batches_from(self, first: int) -> bytes:
        """Return where the keys of batches from a record on begin."""
        return self.log + b"%016x" % first

    def first_of(self, key: bytes) -> int:
        """Return the first record of the batch whose piece has a key."""
        return int(key[len(self.log) :].partition(b"/")[0], 16)


_log = logging.getLogger(__name__)
TRY_SECONDS: Final = 1.0
"""How long a member may take to answer before the next one is asked."""
_PAUSE_SECONDS: Final = 0.05
_OPTIONS: Final = (*CONNECTION_OPTIONS, ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
# What an answer may be lost with, or another member may answer better. etcd answers what a member without a leader
# refuses with UNAVAILABLE, and a full database with RESOURCE_EXHAUSTED, which an operator can change.
_TRIED_AGAIN: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}
# What etcd says, under different codes in different versions, where another token may be taken.
_OF_TOKENS: Final = ("auth token", "revision of auth store", "revision in header")
_METHODS: Final[dict[type[Any], tuple[str, type[Any]]]] = {
    pb.EtcdRangeRequest: ("KV/Range", pb.EtcdRangeResponse),
    pb.EtcdTxnRequest: ("KV/Txn", pb.EtcdTxnResponse),
    pb.EtcdCompactionRequest: ("KV/Compact", pb.EtcdCompactionResponse),
    pb.EtcdLeaseGrantRequest: ("Lease/LeaseGrant", pb.EtcdLeaseGrantResponse),
    # A stream for etcd, which answers each request on it, and ends it with its caller's.
    pb.EtcdLeaseKeepAliveRequest: ("Lease/LeaseKeepAlive", pb.EtcdLeaseKeepAliveResponse),
    pb.EtcdLeaseRevokeRequest: ("Lease/LeaseRevoke", pb.EtcdLeaseRevokeResponse),
    pb.EtcdAuthenticateRequest: ("Auth/Authenticate", pb.EtcdAuthenticateResponse),
    pb.EtcdStatusRequest: ("Maintenance/Status", pb.EtcdStatusResponse),
}


class Etcd:
    """The members of etcd, and the calls on them. May be used by several threads.

    Args:
        members: their addresses, each "host:port".
        tls: how they are reached over TLS; None: in plaintext.
        user: name of a user of etcd; None: it asks for none.
        password_file: file with the password, read again for each token.

    Raises:
        InvalidArgumentError: a file that is named cannot be read.
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
        self._at = 0  # the member that answered last
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
        """Go on with the next member, unless another thread has done so; with new channels for new certificates."""
        with self._lock:
            if self._member() == failed:
                self._at += 1
            signature = self._credentials.signature()
            if signature != self._opened_with:
                self._opened_with = signature
                self._old += self._channels.values()
                self._channels.clear()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what shows the user of etcd; asks for a token where there is none."""
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
        """Return the answer of one member.

        Raises:
            JournalUnreachableError: there was none, so that it is not known whether it was done; the next call goes
                to the next member.
            InvalidArgumentError: etcd refuses the call for good.
        """
        if self._closed.is_set():
            raise JournalUnreachableError("the connection to etcd is closed")
        address, had_token = self._member(), self._token is not None
        try:
            return self._ask(address, request, timeout, self._metadata())
        except ValueError as error:  # of a channel that was closed meanwhile
            raise JournalUnreachableError(f"the connection to etcd at {address} is closed ({error})") from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        if had_token and (code is grpc.StatusCode.UNAUTHENTICATED or any(each in details for each in _OF_TOKENS)):
            self._token = None  # it has expired, etcd has begun again, or users or their rights have changed
            return self.once(request, timeout)
        if code in _TRIED_AGAIN:
            self._next_member(address)
            raise JournalUnreachableError(
                f"etcd at {address} does not answer ({code.name}: {details}); nothing that was acknowledged is "
                "lost, the service goes on by itself once a majority of its members answers",
                metadata={"address": address},
            )
        raise InvalidArgumentError(
            f"etcd at {address} refuses what the journal asks ({code.name}: {details}); check etcd_user and "
            "its rights, the certificates, and etcd's --max-request-bytes",
            field="journal",
        )

    def ask(self, request: Any, seconds: float = 10.0, timeout: float = TRY_SECONDS) -> Any:
        """Return an answer, asked for again until the time is over: for what may be done twice.

        Raises:
            JournalUnreachableError: there was none in that time.
            InvalidArgumentError: etcd refuses the call for good.
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
        """Return a key with its value, None where it is not there."""
        answer: pb.EtcdRangeResponse = self.ask(pb.EtcdRangeRequest(key=key), seconds)
        return answer.kvs[0] if answer.kvs else None

    def get_all(self, prefix: bytes, seconds: float = 10.0) -> list[pb.EtcdKeyValue]:
        """Return all keys with a prefix, with their values; they are few."""
        answer: pb.EtcdRangeResponse = self.ask(pb.EtcdRangeRequest(key=prefix, range_end=after(prefix)), seconds)
        return list(answer.kvs)

    def close(self) -> None:
        """End all calls, and close the connections."""
        self._closed.set()
        with self._lock:
            for channel in (*self._channels.values(), *self._old):
                channel.close()


def after(prefix: bytes) -> bytes:
    """Return where the range of all keys with a prefix ends."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def is_value(key: bytes, value: bytes) -> pb.EtcdCompare:
    """Return the condition that a key has a value."""
    return pb.EtcdCompare(result=0, target=3, key=key, value=value)


def is_created_at(key: bytes, revision: int) -> pb.EtcdCompare:
    """Return the condition that a key was created in a revision; 0: that it is not there."""
    return pb.EtcdCompare(result=0, target=1, key=key, create_revision=revision)


def put(key: bytes, value: bytes, lease_id: int = 0) -> pb.EtcdRequestOp:
    """Return the operation that writes a key."""
    return pb.EtcdRequestOp(request_put=pb.EtcdPutRequest(key=key, value=value, lease=lease_id))


def delete(first: bytes, end: bytes = b"") -> pb.EtcdRequestOp:
    """Return the operation that deletes a key, or a range of keys."""
    return pb.EtcdRequestOp(request_delete_range=pb.EtcdDeleteRangeRequest(key=first, range_end=end))
