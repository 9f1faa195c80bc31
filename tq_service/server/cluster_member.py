"""A clustered controller that follows the log, leads after its election, and exits when another controller takes over.

    open -> restore snapshot -> follow the log ... elected -> read the rest of the log -> serve ... superseded: fatal

A superseded controller may have changes in memory that are not in the log, so it cannot become a standby. Instead, its
process exits, and the restarted controller becomes a standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from tq_service.cluster.election import (
    Election,
    Leader,
    Lease,
    controller_id_of,
)
from tq_service.cluster.etcd import ClusterKeys, Etcd
from tq_service.cluster.etcd_backend import EtcdBackend
from tq_service.config import ServeSettings
from tq_service.durable.data_dir import DataDir
from tq_service.durable.state_store import StateStore
from tq_service.errors import (
    InvalidArgumentError,
    JournalUnreachableError,
    SupersededError,
    TqError,
    UnavailableError,
)
from tq_service.internal.v1 import cluster_pb2 as pb
from tq_service.internal.v1.cluster_pb2_grpc import (
    ClusterServiceServicer,
    ClusterServiceStub,
    add_ClusterServiceServicer_to_server,
)
from tq_service.journal.files import FileWriter, snapshot_numbers, snapshot_path
from tq_service.journal.log import Log
from tq_service.log_message import LogMessage
from tq_service.machine.samples import SnapshotNeeded
from tq_service.results import ControllerStatus
from tq_service.server.peer import Peer
from tq_service.server.rpc.methods import Context
from tq_service.server.supervisor import Supervisor
from tq_service.serving.catalog import Catalog
from tq_service.wire.connection import Credentials, Tls

if TYPE_CHECKING:
    from tq_service.internal.v1.cluster_pb2_grpc import ClusterServiceAsyncStub  # exists for type checkers only

_log = logging.getLogger(__name__)
_PUBLISH_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.2
_CATCH_UP_SECONDS: Final = 0.05
_NEAR_RECORDS: Final = 50
_PART_BYTES: Final = 1 << 20
_FETCH_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.05  # interval between checks of a lease that may have expired


class ClusterMember:
    """A controller's cluster membership. Use each member from a single event loop. Calls to etcd run in threads.

    Args:
        settings: configuration of the service.
        address: address at which clients reach this controller.
        credentials: credentials for calls to other controllers.
        supervisor: runs background tasks and is notified of fatal failures.

    Attributes:
        store: store that persists the controller's state.
        controller_id: id shared by all controllers in the cluster.
        name: name of the cluster.
        member_id: name of this controller in the cluster. The name remains the same until the data directory is
            deleted.

    Raises:
        JournalUnreachableError: etcd does not respond.
        DataDirError: the data directory is in use, or belongs to another controller.
    """

    def __init__(self, settings: ServeSettings, address: str, credentials: Credentials, supervisor: Supervisor) -> None:
        if settings.data_dir is None or settings.cluster is None:
            raise InvalidArgumentError("a cluster needs two settings; set both cluster and data_dir", field="cluster")
        self.address = address
        self._credentials = credentials
        self._supervisor = supervisor
        self._lease_seconds = settings.lease_seconds
        self._keys = ClusterKeys(settings.cluster)
        tls = None
        if settings.etcd_ca is not None or settings.etcd_cert is not None:
            tls = Tls(ca=settings.etcd_ca, cert=settings.etcd_cert, key=settings.etcd_key)
        with contextlib.ExitStack() as on_error:
            data_dir = DataDir.open(settings.data_dir)
            on_error.callback(data_dir.close)
            self._etcd = Etcd(
                settings.etcd_members,
                tls=tls,
                user=settings.etcd_user,
                password_file=settings.etcd_password_file,
            )
            on_error.callback(self._etcd.close)
            self.controller_id = controller_id_of(self._etcd, self._keys, data_dir.identity.controller_boot_id)
            data_dir.join(self.controller_id, settings.cluster)
            on_error.pop_all()
        self.name = settings.cluster
        self.member_id = f"{socket.gethostname()}-{data_dir.identity.storage_boot_id.hex()[:8]}"
        self._backend = EtcdBackend(
            self._etcd,
            self._keys,
            member_id=self.member_id,
            directory=data_dir.path,
            accept_loss=settings.accept_journal_loss,
        )
        self.store = StateStore(data_dir, Log(self._backend))
        self.store.is_shared = True
        self._election = Election(self._etcd, self._keys, self.member_id, address)
        self._standing_by = ThreadPoolExecutor(1, thread_name_prefix="tq-election")  # used only by a standby
        self._lease: Lease | None = None
        self._leader: Leader | None = None
        self._leadership: Lease | None = None
        self._is_serving = False
        self._standbys: list[ControllerStatus] = []  # updated about every second while this controller leads

    def add_services(self, server: Any) -> None:
        """Register, on a gRPC server, the service that the cluster's other controllers call."""
        add_ClusterServiceServicer_to_server(SnapshotServicer(self.store), server)

    # Status

    @property
    def may_answer(self) -> bool:
        """Whether this controller leads the cluster and is certain that no other controller does."""
        return self._is_serving and self._leadership is not None and self._leadership.is_held

    @property
    def leader_address(self) -> str:
        """Address of the leader, or "" if the leader is unknown or is this controller."""
        return "" if self._leader is None or self._leader.address == self.address else self._leader.address

    @property
    def epoch(self) -> int:
        """Epoch of the leader, or 0 if no leader is known."""
        if self._leadership is not None:
            return self._leadership.epoch
        return 0 if self._leader is None else self._leader.epoch

    def statuses(self) -> list[ControllerStatus]:
        """Return the status of each controller in the cluster. The result is valid only while this controller leads."""
        own = ControllerStatus(name=self.member_id, address=self.address, is_leader=True, epoch=self.epoch, lag_count=0)
        return [own, *self._standbys]

    def lags(self) -> dict[str, int]:
        """Return the number of records by which each standby lags, keyed by standby name.

        The result is valid only while this controller leads.
        """
        return {each.name: each.lag_count for each in self._standbys}

    # Lifecycle

    async def run(self, catalog: Catalog, take_up: Callable[[], None], on_standing: Callable[[bool], None]) -> None:
        """Run as a standby until elected, then start leading the cluster. Return once this controller leads.

        Args:
            catalog: the controller's partitions, initially empty.
            take_up: function called once the state is complete and calls can be served.
            on_standing: function called with False when another controller may lead, and with True if this controller's
                lease turns out to be valid after all.

        Raises:
            TqError: a fatal failure occurred.
        """
        number = await self._restore(catalog)
        has_lost = await asyncio.to_thread(self._backend.has_lost, number)
        await self._begin_lease()
        self._supervisor.start("publishing this controller to the others", self._publish_always())
        following: asyncio.Future[Any] = asyncio.ensure_future(
            asyncio.Event().wait() if has_lost else self.store.follow(self._backend.follow(max(number, 1)))
        )
        following.add_done_callback(_retrieve)
        try:
            await self._catch_up(following)
            leadership = await self._elected(following)
        finally:
            following.cancel()
            await asyncio.wait((following,))
        began = time.monotonic()
        self._backend.leadership = leadership
        self._leadership = leadership
        record_count = await self.store.take_over()
        if leadership.is_over:  # the lease expired before this controller learned of its election
            raise SupersededError("this controller's lease has expired, so another controller may lead")
        take_up()
        self._is_serving = True
        self._supervisor.start("watching the lease", self._watch_lease(leadership, on_standing))
        _log.info(
            LogMessage(
                "this controller now leads the cluster",
                cluster=self.name,
                epoch=leadership.epoch,
                partitions=len(catalog.names()),
                samples=catalog.sample_count(),
                replayed_records=record_count,
                seconds=round(time.monotonic() - began, 3),
            )
        )

    async def _watch_lease(self, lease: Lease, on_standing: Callable[[bool], None]) -> None:
        """Report when the lease may have expired, and when it is held again. Needs only the clock, not etcd."""
        was_held = True
        while True:
            await asyncio.sleep(max(_LOOK_SECONDS, lease.held_until - time.monotonic()))
            is_held = lease.is_held
            if is_held == was_held:
                continue
            was_held = is_held
            if is_held:
                _log.info(LogMessage("the lease is still valid in etcd; accepting calls again", cluster=self.name))
            else:
                _log.warning(LogMessage("the lease may have expired; rejecting calls", cluster=self.name))
            on_standing(is_held)

    async def _restore(self, catalog: Catalog) -> int:
        """Restore the newest local snapshot or, if the log lacks any record after it, the leader's snapshot."""
        number = max(snapshot_numbers(self.store.data_dir.path), default=0)

        def has_log_since() -> bool:
            end = self._backend.end().number
            return number > end or not end or self._backend.first_key(max(number, 1)) != 0

        if not await asyncio.to_thread(has_log_since):
            number = await self._fetch(number + 1)
        self.store.restore(catalog)
        return number

    async def _fetch(self, number: int) -> int:
        """Wait for the leader's snapshot `number` or a later one, fetch that snapshot, and return its number."""
        while True:
            leader = await asyncio.to_thread(self._election.leader)
            if leader is None or leader.address == self.address:
                _log.error(
                    LogMessage(
                        "this controller needs a snapshot from the leader, but no other controller leads. Start the "
                        "controller that led last, or restore a checkpoint into another cluster",
                        cluster=self.name,
                        snapshot=number,
                    )
                )
                await asyncio.sleep(self._lease_seconds)
                continue
            try:
                return await fetch_snapshot(leader.address, self._credentials, self.store.data_dir.path, number)
            except (grpc.aio.AioRpcError, TqError, OSError) as error:
                _log.warning(
                    LogMessage("could not fetch a snapshot from the leader", address=leader.address, error=error)
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    def _soon(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a thread-safe function that schedules `callback` on this event loop unless the loop is closed."""
        loop = asyncio.get_running_loop()

        def call(*arguments: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, *arguments)

        return call

    async def _begin_lease(self) -> None:
        while True:
            try:
                self._lease = await asyncio.to_thread(Lease, self._etcd, self._lease_seconds, self._soon(self._lose))
            except JournalUnreachableError as error:
                _log.warning(LogMessage("could not obtain a lease; retrying", error=error))
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return

    def _lose(self) -> None:
        if self._leadership is not None:
            self._supervisor.fatal("this controller's lease has expired, so another controller may lead")

    async def _catch_up(self, following: asyncio.Future[Any]) -> None:
        """Wait until this controller has almost caught up with the log, or until no other controller leads.

        A controller that is far behind must not win the election against a controller that could lead immediately. The
        log keeps growing while this controller waits.
        """
        while not following.done():
            with contextlib.suppress(JournalUnreachableError):
                end_number = (await asyncio.to_thread(self._backend.end)).number
                if end_number - self._backend.seen_number <= _NEAR_RECORDS:
                    return
                leader = await asyncio.to_thread(self._election.leader)
                if leader is None:
                    return
                self._note_leader(leader)
            await asyncio.sleep(_CATCH_UP_SECONDS)

    async def _elected(self, following: asyncio.Future[Any]) -> Lease:
        """Wait until this controller is elected. Raise an error if this controller can no longer follow the log."""
        while True:
            lease = self._lease
            if lease is None or lease.is_over:
                await self._begin_lease()
                continue
            campaign = asyncio.get_running_loop().run_in_executor(
                self._standing_by, self._election.campaign, lease, self._soon(self._note_leader)
            )
            campaign.add_done_callback(_retrieve)
            try:
                await asyncio.wait((campaign, following), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not campaign.done():
                    self._election.close()
                    await asyncio.wait((campaign,))
            if following.done():
                try:
                    following.result()
                except SnapshotNeeded as needed:
                    await self._fetch(needed.number)
                    raise SupersededError("this controller must restart from the leader's snapshot") from None
                raise SupersededError("this controller can no longer follow the log")
            try:
                return campaign.result()
            except SupersededError:
                if not lease.is_over:
                    raise

    def _note_leader(self, leader: Leader) -> None:
        if leader != self._leader:
            self._leader = leader
            _log.info(
                LogMessage(
                    "this controller is now a standby", cluster=self.name, leader=leader.address, epoch=leader.epoch
                )
            )

    async def _publish_always(self) -> None:
        while True:
            lease, number = self._lease, self._backend.seen_number
            with contextlib.suppress(JournalUnreachableError, InvalidArgumentError):
                if lease is not None and not lease.is_over:
                    await asyncio.to_thread(self._election.publish, number, lease.id)
                if self._leadership is not None:
                    self._standbys = await asyncio.to_thread(self._election.published, number)
            await asyncio.sleep(_PUBLISH_SECONDS)

    async def close(self) -> None:
        """Leave the cluster so that another controller can lead immediately. Close the state store first."""
        self._is_serving = False
        self._election.close()
        self._standing_by.shutdown(wait=False)
        if self._lease is not None:
            await asyncio.to_thread(self._lease.close)
        self._etcd.close()


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception. Otherwise, asyncio would log the exception if no task awaited the future."""
    if not done.cancelled():
        done.exception()


class SnapshotServicer(ClusterServiceServicer):
    """Sends this controller's newest snapshot to other controllers.

    Args:
        store: state store that contains the snapshot.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def FetchSnapshot(  # noqa: N802  (the name of the rpc)
        self, request: pb.FetchSnapshotRequest, context: Context
    ) -> AsyncIterator[pb.FetchSnapshotResponse]:
        """Send the newest snapshot in chunks."""
        number, path = await self._store.newest_snapshot(request.least_number)
        file = await asyncio.to_thread(path.open, "rb")  # the open file stays readable if a newer snapshot replaces it
        with file:
            size = os.fstat(file.fileno()).st_size
            while part := await asyncio.to_thread(file.read, _PART_BYTES):
                yield pb.FetchSnapshotResponse(number=number, size_bytes=size, data=part)


async def fetch_snapshot(address: str, credentials: Credentials, directory: Path, least_number: int) -> int:
    """Download a controller's newest snapshot to a data directory and return the snapshot's number.

    Raises:
        grpc.aio.AioRpcError: the call failed before the complete snapshot was received.
        UnavailableError: the snapshot is incomplete, or its number is lower than `least_number`.
        OSError: the snapshot could not be written.
    """
    peer: Peer[ClusterServiceAsyncStub] = Peer(address, credentials, ClusterServiceStub)
    async with contextlib.aclosing(peer):
        parts = aiter(
            peer.stub.FetchSnapshot(
                pb.FetchSnapshotRequest(least_number=least_number), timeout=_FETCH_SECONDS, metadata=peer.metadata()
            )
        )
        part = await anext(parts, None)
        if part is None:
            raise UnavailableError(f"the snapshot from {address} is empty")
        number, size, count = part.number, part.size_bytes, 0
        if number < least_number:
            raise UnavailableError(f"{address} sent snapshot {number}; expected snapshot {least_number} or later")
        writer = FileWriter(snapshot_path(directory, number))
        try:
            while part is not None:
                count += await asyncio.to_thread(writer.file.write, part.data)
                part = await anext(parts, None)
            if count != size:
                raise UnavailableError(f"the snapshot from {address} ended after {count} of {size} bytes")
            await asyncio.to_thread(writer.commit)
        finally:
            writer.abort()
    return number
