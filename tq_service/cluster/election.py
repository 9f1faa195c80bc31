"""The controllers of a cluster: what they are together, which of them live, and which one leads.

That whose key is there leads, under a lease that it keeps alive. The lease only decides which controller tries. What a
leader may write is decided by the log, which compares the epoch, and what it may answer from memory by its own
monotonic clock: only while the lease cannot have ended.
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
_ALIVE_TIMES: Final = 4  # a lease is kept alive so often in its time
_MARGIN_SHARE: Final = 0.1  # of a lease, for clocks that do not go alike
_LOOK_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 0.1  # another member is asked, while etcd may be choosing its own leader
_FORMAT_VERSION: Final = 1


def controller_id_of(etcd: Etcd, keys: ClusterKeys, proposed: bytes) -> bytes:
    """Return the id that all controllers of a cluster have, the owner of its puts; blocks.

    Args:
        etcd: where the cluster is.
        keys: of the cluster.
        proposed: the id, where this is the first controller, or etcd has lost all: that of its data directory.

    Raises:
        JournalUnreachableError: etcd does not answer.
        NewerVersionError: a newer version has made the cluster.
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
            f"cluster {keys.cluster!r} has format {about['format_version']} and {about['shards']} shards, this version "
            f"knows format {_FORMAT_VERSION} and one shard; install a newer version"
        )
    return bytes.fromhex(str(about["controller_id"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The controller that leads.

    Attributes:
        address: where clients reach it.
        member_id: which one it is.
        epoch: higher than that of each leader before it.
    """

    address: str
    member_id: str
    epoch: int


class Lease:
    """A lease of etcd, kept alive by a thread from when it is made until `close`.

    Args:
        etcd: where it is.
        seconds: after which it ends, once it is not kept alive any more.
        on_lost: called by that thread, once, when it has ended without `close`.

    Attributes:
        id: of the lease.
        epoch: in which this controller leads under it, compared in each write of the log; 0: it has not led.
        is_over: whether it has ended.
        held_until: until when it cannot have ended, by the monotonic clock; later with each answer of etcd.

    Raises:
        JournalUnreachableError: etcd does not answer.
    """

    def __init__(self, etcd: Etcd, seconds: float, on_lost: Callable[[], None]) -> None:
        self._etcd = etcd
        self._on_lost = on_lost
        asked_at = time.monotonic()
        answer: pb.EtcdLeaseGrantResponse = etcd.once(pb.EtcdLeaseGrantRequest(ttl=max(1, round(seconds))))
        self.id: int = answer.id
        self.epoch = 0
        self.is_over = False
        # etcd may give more than was asked for; less than it gives is what is relied on.
        self._seconds = min(float(answer.ttl), max(1.0, seconds))
        self.held_until = asked_at + self._seconds * (1 - _MARGIN_SHARE)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="tq-lease", daemon=True)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Whether it cannot have ended at this moment, by the clock of this host, which goes on while it is paused."""
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
                    _log.debug(LogMessage("the lease was not kept alive", error=error))
                continue
            except InvalidArgumentError as error:
                _log.error(LogMessage("the lease cannot be kept alive", error=error))
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
        """End it, with its keys, so that another controller need not wait for its time to pass."""
        self._closed.set()
        self.held_until, self.is_over = 0.0, True
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with contextlib.suppress(JournalUnreachableError, InvalidArgumentError):
            self._etcd.once(pb.EtcdLeaseRevokeRequest(id=self.id))


class Election:
    """The election of a cluster, as one of its controllers sees it. May be used by several threads.

    Args:
        etcd: where it is.
        keys: of the cluster.
        member_id: of this controller.
        address: where clients reach it.
    """

    def __init__(self, etcd: Etcd, keys: ClusterKeys, member_id: str, address: str) -> None:
        self._etcd = etcd
        self._keys = keys
        self._member_id = member_id
        self._value = {"address": address, "member_id": f"{member_id}.{secrets.token_hex(8)}"}
        self._closed = threading.Event()

    def leader(self, seconds: float = 10.0) -> Leader | None:
        """Return the controller that leads, None where there is none; blocks.

        Raises:
            JournalUnreachableError: etcd does not answer.
        """
        found = self._etcd.get(self._keys.leader, seconds)
        return None if found is None else Leader(epoch=found.create_revision, **json.loads(found.value))

    def campaign(self, lease: Lease, on_leader: Callable[[Leader], None]) -> Lease:
        """Return the lease, with the epoch, once this controller leads; blocks until then.

        Args:
            lease: of this controller.
            on_leader: called with each leader that is seen meanwhile.

        Raises:
            SupersededError: `close` was called, or the lease has ended.
        """
        write = put(self._keys.leader, json.dumps(self._value).encode(), lease.id)
        request = pb.EtcdTxnRequest(compare=[is_created_at(self._keys.leader, 0)], success=[write])
        while not self._closed.is_set() and not lease.is_over:
            # Refused is the key of a lease that has just ended, too.
            with contextlib.suppress(JournalUnreachableError, InvalidArgumentError):
                leader = self.leader(0.0)
                if leader is None:
                    self._etcd.once(request)  # whoever was first is seen next
                    continue
                if leader.member_id == self._value["member_id"]:
                    lease.epoch = leader.epoch
                    return lease
                on_leader(leader)
            self._closed.wait(_LOOK_SECONDS)
        raise SupersededError("the election was left")

    def close(self) -> None:
        """Leave the election."""
        self._closed.set()

    def publish(self, applied_number: int, lease_id: int) -> None:
        """Let the others see this controller and the last record that it has applied, until a lease ends; blocks.

        Raises:
            JournalUnreachableError: etcd does not answer.
            InvalidArgumentError: the lease has ended.
        """
        record = {"member_id": self._member_id, "address": self._value["address"], "applied_number": applied_number}
        write = put(self._keys.members + self._member_id.encode(), json.dumps(record).encode(), lease_id)
        self._etcd.ask(pb.EtcdTxnRequest(success=[write]), seconds=0.0)

    def published(self, end_number: int) -> list[ControllerStatus]:
        """Return the other controllers that live, as standbys of this one, which has written so many records; blocks.

        Raises:
            JournalUnreachableError: etcd does not answer.
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
