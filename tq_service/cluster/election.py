"""Membership and leader election in a controller cluster, and the id shared by the cluster's controllers.

The leader is the controller that created the leader key under a lease and keeps this lease alive. The lease determines
only which controller tries to write. The log compares epochs to determine whether the controller may write. The leader
serves reads from memory only while its lease cannot have expired, according to its monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tq_service.cluster.etcd import ClusterKeys, Etcd, is_created_at, put
from tq_service.errors import InvalidArgumentError, JournalUnreachableError, NewerVersionError, SupersededError
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.log_message import LogMessage
from tq_service.results import ControllerStatus

_log = logging.getLogger(__name__)
_ALIVE_TIMES: Final = 4  # keep-alive requests per lease duration
_MARGIN_SHARE: Final = 0.1  # share of the lease duration reserved for clock drift
_LOOK_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 0.1  # delay before trying the next member, because etcd may be electing a leader
_FORMAT_VERSION: Final = 1


def controller_id_of(etcd: Etcd, keys: ClusterKeys, proposed: bytes) -> bytes:
    """Return the id shared by a cluster's controllers, which identifies the cluster as the owner of puts. Blocks.

    Args:
        etcd: connection to etcd.
        keys: keys that the controller cluster uses in etcd.
        proposed: id in this controller's data directory. The proposed id becomes the shared id if etcd contains no id
            yet, or has lost all data.

    Raises:
        JournalUnreachableError: etcd does not respond.
        NewerVersionError: the cluster was created by a newer version of the service.
    """
    about = {"format_version": _FORMAT_VERSION, "controller_id": proposed.hex(), "shards": 1}
    request = pb.EtcdTxnRequest(
        compare=[is_created_at(keys.about, 0)],
        success=[put(keys.about, json.dumps(about).encode())],
        failure=[pb.EtcdRequestOp(request_range=pb.EtcdRangeRequest(key=keys.about))],
    )
    answer: pb.EtcdTxnResponse = etcd.ask(request)
    if not answer.succeeded:
        about = json.loads(answer.responses[0].response_range.kvs[0].value)
    if about["format_version"] != _FORMAT_VERSION or about["shards"] != 1:
        raise NewerVersionError(
            f"cluster {keys.cluster!r} has format {about['format_version']} and {about['shards']} shards; this version "
            f"supports format {_FORMAT_VERSION} and one shard. Install a newer version."
        )
    return bytes.fromhex(str(about["controller_id"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The current leader of a controller cluster.

    Attributes:
        address: address at which clients reach the leader.
        member_id: id of the leader.
        epoch: number of the leader's term, which is higher than that of every earlier leader.
    """

    address: str
    member_id: str
    epoch: int


class Lease:
    """An etcd lease, kept alive by a thread until `close` is called.

    Args:
        etcd: connection to etcd.
        seconds: time without a keep-alive after which the lease expires.
        on_lost: called in the keep-alive thread if the lease expires before `close` is called.

    Attributes:
        id: id that etcd assigned to the lease.
        epoch: epoch of this controller's leadership, which each write to the log checks, or 0 before the election.
        is_over: whether the lease has expired or has been closed.
        held_until: monotonic time until which the lease cannot expire, extended by each response from etcd.

    Raises:
        JournalUnreachableError: etcd does not respond.
    """

    def __init__(self, etcd: Etcd, seconds: float, on_lost: Callable[[], None]) -> None:
        self._etcd = etcd
        self._on_lost = on_lost
        asked_at = time.monotonic()
        answer: pb.EtcdLeaseGrantResponse = etcd.once(pb.EtcdLeaseGrantRequest(ttl=max(1, round(seconds))))
        self.id: int = answer.id
        self.epoch = 0
        self.is_over = False
        # etcd may grant a longer lease than requested. Rely only on the shorter duration.
        self._seconds = min(float(answer.ttl), max(1.0, seconds))
        self.held_until = asked_at + self._seconds * (1 - _MARGIN_SHARE)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="tq-lease", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether the lease cannot have expired yet. The monotonic clock keeps running while the process is paused."""
        return time.monotonic() < self.held_until

    def _keep_alive(self) -> None:
        request = pb.EtcdLeaseKeepAliveRequest(id=self.id)
        pause = interval = self._seconds / _ALIVE_TIMES
        while not self._closed.wait(pause):
            asked_at, pause = time.monotonic(), _RETRY_SECONDS
            try:
                answer: pb.EtcdLeaseKeepAliveResponse = self._etcd.once(request, timeout=interval)
            except JournalUnreachableError as error:
                if not self._closed.is_set():
                    _log.debug(LogMessage("could not keep the lease alive; retrying", error=error))
                continue
            except InvalidArgumentError as error:
                _log.error(LogMessage("could not keep the lease alive", error=error))
                pause = interval
                continue
            if answer.ttl <= 0:
                self.held_until, self.is_over = 0.0, True
                if not self._closed.is_set():
                    self._on_lost()
                return
            self.held_until = asked_at + min(self._seconds, answer.ttl) * (1 - _MARGIN_SHARE)
            pause = interval

    def close(self) -> None:
        """Revoke the lease and delete its keys, so that another controller can take over before the lease expires."""
        self._closed.set()
        self.held_until, self.is_over = 0.0, True
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with contextlib.suppress(JournalUnreachableError, InvalidArgumentError):
            self._etcd.once(pb.EtcdLeaseRevokeRequest(id=self.id))


class Election:
    """A controller's participation in its cluster's leader election. Thread-safe.

    Args:
        etcd: connection to etcd.
        keys: keys that the controller cluster uses in etcd.
        member_id: id of this controller.
        address: address at which clients reach this controller.
    """

    def __init__(self, etcd: Etcd, keys: ClusterKeys, member_id: str, address: str) -> None:
        self._etcd = etcd
        self._keys = keys
        self._member_id = member_id
        self._value = {"address": address, "member_id": f"{member_id}.{secrets.token_hex(8)}"}
        self._closed = threading.Event()

    def leader(self, seconds: float = 10.0) -> Leader | None:
        """Return the current leader, or None if no controller leads. Blocks.

        Raises:
            JournalUnreachableError: etcd does not respond.
        """
        found = self._etcd.get(self._keys.leader, seconds)
        return None if found is None else Leader(epoch=found.create_revision, **json.loads(found.value))

    def campaign(self, lease: Lease, on_leader: Callable[[Leader], None]) -> Lease:
        """Wait until this controller becomes the leader, and return its lease with `epoch` set. Blocks.

        Args:
            lease: lease under which this controller stands for election.
            on_leader: called repeatedly with the current leader during the wait.

        Raises:
            SupersededError: `close` was called, or the lease has expired.
        """
        write = put(self._keys.leader, json.dumps(self._value).encode(), lease.id)
        request = pb.EtcdTxnRequest(compare=[is_created_at(self._keys.leader, 0)], success=[write])
        while not self._closed.is_set() and not lease.is_over:
            # etcd rejects the write if the lease has just expired.
            with contextlib.suppress(JournalUnreachableError, InvalidArgumentError):
                leader = self.leader(0.0)
                if leader is None:
                    self._etcd.once(request)  # the next read shows which controller has won
                    continue
                if leader.member_id == self._value["member_id"]:
                    lease.epoch = leader.epoch
                    return lease
                on_leader(leader)
            self._closed.wait(_LOOK_SECONDS)
        raise SupersededError("this controller left the election, or its lease expired")

    def close(self) -> None:
        """Leave the election, so that a running `campaign` raises SupersededError."""
        self._closed.set()

    def publish(self, applied_number: int, lease_id: int) -> None:
        """Publish this controller's address and last applied record under a lease. Blocks.

        Raises:
            JournalUnreachableError: etcd does not respond.
            InvalidArgumentError: the lease has expired.
        """
        record = {"member_id": self._member_id, "address": self._value["address"], "applied_number": applied_number}
        write = put(self._keys.members + self._member_id.encode(), json.dumps(record).encode(), lease_id)
        self._etcd.ask(pb.EtcdTxnRequest(success=[write]), seconds=0.0)

    def published(self, end_number: int) -> list[ControllerStatus]:
        """Return the status of every other live controller, including its lag behind record `end_number`. Blocks.

        Raises:
            JournalUnreachableError: etcd does not respond.
        """
        found = (json.loads(each.value) for each in self._etcd.get_all(self._keys.members, seconds=0.0))
        return [
            ControllerStatus(
                name=record["member_id"],
                address=record["address"],
                is_leader=False,
                epoch=0,
                lag_count=max(0, end_number - record["applied_number"]),
            )
            for record in found
            if record["member_id"] != self._member_id
        ]
