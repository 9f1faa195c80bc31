"""The controller's view of a storage service in another process.

The controller reports committed and freed puts to the service in order, combined into batches. Each batch is resent
until the service responds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.driver import AsyncDriver, AsyncGrpcDriver
from tq_service.errors import DataLossError, PermissionDeniedError, TqError, UnauthenticatedError, UnavailableError
from tq_service.internal.v1 import put_receipt_pb2, storage_control_pb2, storage_registry_pb2
from tq_service.internal.v1.storage_control_pb2_grpc import StorageControlServiceStub
from tq_service.log_message import LogMessage
from tq_service.results import MirrorStatus, StorageStatus
from tq_service.server.peer import Peer, PeerOutage
from tq_service.server.puts import KnownPuts, encode_cells, in_messages
from tq_service.server.receipts import ReceiptBook, key_id
from tq_service.server.supervisor import Supervisor
from tq_service.storage.index.put import PutCells
from tq_service.wire.connection import Credentials
from tq_service.wire.error_table import from_rpc_error, status_from_trailers
from tq_service.wire.messages import read_message

if TYPE_CHECKING:
    from tq_service.internal.v1.storage_control_pb2_grpc import (
        StorageControlServiceAsyncStub,  # exists for type checkers only
    )

_log = logging.getLogger(__name__)
T = TypeVar("T")
_CALL_SECONDS = 10.0
_ADOPT_SECONDS = 30.0
_RECONCILIATION_SECONDS = 1800.0
_RECONCILE_SECONDS = 3600.0
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 10.0
_MOST_CONFIRMED_PER_CALL = 4096
_MOST_FREED_PER_CALL = 1024  # takes the storage service a few milliseconds
_CONFIRM_SECONDS = 0.05  # delay before confirmations are sent, so that they can be batched
_MOST_NAMED = 5
_MOST_EARLIER_RUNS = 16
_ARRIVAL_SECONDS = 1.0  # after this time, a placed put is either included in heartbeats or has failed
UNBOUNDED_BYTES: Final = 1 << 62


class RemoteStorage:
    """A storage service process that the controller reaches over gRPC.

    The controller first sends the service the list of known puts, split into several messages. Other puts may be
    confirmed or freed while the list is being sent.

    Args:
        request: the first heartbeat that the process sent.
        known: function that returns the service's puts that are known to the controller.
        silence_seconds: how long after the last heartbeat puts may still be placed in the service.
        credentials: credentials of this controller.
        controller_id: id under which this controller owns puts.
        epoch: this controller's epoch if it leads a cluster.
        supervisor: runs the background tasks, or None to create a supervisor.
        replaces: the service's previously registered process, or None if there was none.

    Attributes:
        run_id: id of the storage service process.
        earlier_run_ids: ids of earlier processes registered under the service's name.
        heard: status reported in the last heartbeat.
        turns: for each size class, the virtual start time and the size in bytes of the last put placed here. See
            `StorageRegistry.place`.
    """

    def __init__(
        self,
        request: storage_registry_pb2.RegisterStorageRequest,
        known: Callable[[], KnownPuts],
        silence_seconds: float,
        credentials: Credentials,
        *,
        controller_id: bytes = b"",
        epoch: int = 0,
        supervisor: Supervisor | None = None,
        replaces: RemoteStorage | None = None,
    ) -> None:
        self._supervisor = supervisor or Supervisor()
        self.endpoint = request.storage
        self.storage_id = self.endpoint.storage_id
        self.boot_id = self.endpoint.boot_id
        self.run_id = request.run_id
        earlier = () if replaces is None else (*replaces.earlier_run_ids, replaces.run_id)
        self.earlier_run_ids: tuple[bytes, ...] = earlier[-_MOST_EARLIER_RUNS:]
        self._controller_id = controller_id
        self._epoch = epoch
        self._known = known
        self._silence_seconds = silence_seconds
        self._receipts = ReceiptBook()
        self._credentials = credentials
        self._peer: Peer[StorageControlServiceAsyncStub] = Peer(
            self.endpoint.address, credentials, StorageControlServiceStub
        )
        self._outage = PeerOutage(_log, "storage service", storage=self.storage_id, address=self.endpoint.address)
        self._bulk: Peer[AsyncGrpcDriver] | None = None  # separate, so that data does not delay confirmations
        self.turns: dict[int, tuple[float, int]] = {}
        self._placed: dict[bytes, tuple[int, float]] = {}  # size and time of placed puts that no heartbeat includes yet
        self._placed_bytes = 0
        self._to_confirm: dict[bytes, None] = {}
        self._to_free: list[storage_control_pb2.PutCells] = []
        self._delivering: asyncio.Task[None] | None = None
        self._is_closed = False
        self.on_heartbeat(request)
        self._reconciling = self._supervisor.start(
            f"reconciling storage {self.storage_id}", self._reconcile_always(), may_end=True
        )

    @property
    def receipt_key(self) -> bytes:
        """Key with which the service seals receipts for this controller."""
        return self._receipts.key

    def on_heartbeat(self, request: storage_registry_pb2.RegisterStorageRequest) -> None:
        """Record a heartbeat from the service."""
        self.heard = StorageStatus(
            storage_id=self.storage_id,
            address=self.endpoint.address,
            used_bytes=request.used_bytes,
            max_bytes=request.max_bytes or None,
            put_count=request.put_count,
            version=request.version,
            heard_ago_seconds=0.0,
            is_silent=False,
            mirror=read_message(MirrorStatus, request.mirror) if request.HasField("mirror") else None,
            is_adopted=request.is_adopted,
        )
        self._heard_at = time.monotonic()
        arrived = takewhile(lambda each: self._heard_at - each[1][1] >= _ARRIVAL_SECONDS, self._placed.items())
        for put_id, _ in list(arrived):
            self.withdraw(put_id)
        self._receipts.void_before(request.receipts_valid_from)

    @property
    def is_silent(self) -> bool:
        """Whether the service's last heartbeat is too old. No puts are placed in a silent service."""
        return time.monotonic() - self._heard_at > self._silence_seconds

    @property
    def max_bytes(self) -> int | None:
        """Quota of the service in bytes, or None if the capacity is unlimited."""
        return self.heard.max_bytes

    def free_bytes(self) -> int:
        """Return the number of free bytes. Bytes expected from placed puts do not count as free."""
        limit = UNBOUNDED_BYTES if self.heard.max_bytes is None else self.heard.max_bytes
        return limit - self.heard.used_bytes - self._placed_bytes

    def expect(self, put_id: bytes, size_bytes: int) -> None:
        """Count the bytes of a placed put as used until a heartbeat accounts for the put."""
        self._placed[put_id] = size_bytes, time.monotonic()
        self._placed_bytes += size_bytes

    def withdraw(self, put_id: bytes) -> bool:
        """Stop counting the bytes of a placed put. Return whether the bytes were still being counted."""
        size_bytes, _ = self._placed.pop(put_id, (None, 0.0))
        self._placed_bytes -= size_bytes or 0
        return size_bytes is not None

    def status(self) -> StorageStatus:
        """Return the status reported in the last heartbeat and the time since that heartbeat."""
        return replace(self.heard, heard_ago_seconds=time.monotonic() - self._heard_at, is_silent=self.is_silent)

    def open_receipt(self, put_id: bytes, partition_id: str, receipt: bytes) -> put_receipt_pb2.PutReceipt:
        """Return the contents of an uncommitted put's receipt."""
        return self._receipts.open(receipt, put_id, partition_id)

    def confirm(self, put_id: bytes) -> None:
        """Report to the service that a put is committed. Such reports are batched and sent in the background."""
        if not self._is_closed:
            self._to_confirm[put_id] = None
            self._deliver()

    async def take_over(self, instance: tuple[str, bytes], search_id: bytes) -> int:
        """Ask the service to adopt the puts of a lost instance, and return the number of puts adopted.

        Args:
            instance: name and instance id of the lost instance.
            search_id: id of the search for a successor.

        Raises:
            NotFoundError: the service's mirror contains no data of the instance.
            TqError: the service could not adopt the puts, but a later attempt might succeed.
        """
        storage_id, boot_id = instance
        request = storage_control_pb2.AdoptRequest(
            storage_id=storage_id,
            boot_id=boot_id,
            controller_id=self._controller_id,
            epoch=self._epoch,
            search_id=search_id,
        )
        with _typed_errors():
            answer = await self._peer.stub.Adopt(request, timeout=_ADOPT_SECONDS, metadata=self._peer.metadata())
        return answer.put_count

    @property
    def driver(self) -> AsyncDriver:
        """Driver that writes puts to the service and reads their bytes."""
        if self._bulk is None:
            self._bulk = Peer(self.endpoint.address, self._credentials, self._bulk_calls)
        self._bulk.follow_files()
        return self._bulk.stub

    def _bulk_calls(self, channel: grpc.aio.Channel) -> AsyncGrpcDriver:
        return AsyncGrpcDriver(
            channel,
            metadata=self._credentials.metadata,
            errors=lambda _: _typed_errors(),
            bulk=BulkLink(self.endpoint.address, self._credentials.tls),
        )

    def free(self, cells: Sequence[PutCells]) -> None:
        """Free the cells as soon as the service is reachable."""
        if self._is_closed:  # after a restart, the list of known puts omits these cells
            return
        for each in cells:
            self._to_free += encode_cells(each)
            if each.is_whole:
                self._receipts.revoke(each.put_id)
                self.withdraw(each.put_id)
        self._deliver()

    def _deliver(self) -> None:
        if self._delivering is None or self._delivering.done():
            name = f"updating puts of storage {self.storage_id}"
            self._delivering = self._supervisor.start(name, self._deliver_all(), may_end=True)

    async def _reconcile_always(self) -> None:
        """Send the list of known puts about every hour, retrying each time until the service accepts the list."""
        while True:
            try:
                answer = await self._repeat("does not accept the list of known puts", self._reconcile)
            except DataLossError:
                return  # a new instance of the service will register
            report_reconciled(self.storage_id, answer.missing_put_ids, answer.missing_count, answer.dropped_count)
            await asyncio.sleep(_RECONCILE_SECONDS)

    async def _repeat(self, outage: str, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until it succeeds, because a failed service may recover. Return the response.

        Raises:
            DataLossError: a different instance of the service responded.
        """
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                with _closing_is_an_error():
                    answer = await call()
            except (grpc.aio.AioRpcError, TqError) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DATA_LOSS:
                    raise DataLossError(f"storage service {self.storage_id!r} has a new instance id") from error
                self._outage.lasts(outage, error)
                self._peer.follow_files()
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_SECONDS)
            else:
                self._outage.is_over()
                return answer

    async def _reconcile(self) -> storage_control_pb2.ReconcilePutsResponse:
        call = self._peer.stub.ReconcilePuts(timeout=_RECONCILIATION_SECONDS, metadata=self._peer.metadata())
        try:
            with contextlib.suppress(
                asyncio.InvalidStateError
            ):  # raised if the service has ended the call with an error
                await call.write(
                    storage_control_pb2.ReconcilePutsRequest(
                        boot_id=self.boot_id,
                        controller_id=self._controller_id,
                        epoch=self._epoch,
                        key_id=key_id(self.receipt_key),
                    )
                )
                await call.initial_metadata()  # from now on, the service keeps newly confirmed puts
                pieces = self._known().pieces()
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    await call.write(piece)
                await call.done_writing()
            return await call
        finally:
            call.cancel()

    async def _deliver_all(self) -> None:
        while self._to_confirm or self._to_free:
            if not self._to_free:
                await asyncio.sleep(_CONFIRM_SECONDS)
            put_ids = list(islice(self._to_confirm, _MOST_CONFIRMED_PER_CALL))
            for put_id in put_ids:
                del self._to_confirm[put_id]
            cells = next(in_messages(self._to_free, _MOST_FREED_PER_CALL), [])  # freed by the service in a single step
            del self._to_free[: len(cells)]
            request = storage_control_pb2.UpdatePutsRequest(
                boot_id=self.boot_id,
                controller_id=self._controller_id,
                key_id=key_id(self.receipt_key),
                epoch=self._epoch,
                committed_put_ids=put_ids,
                freed=cells,
            )
            answer = await self._repeat("does not accept updates of puts", partial(self._update, request))
            whole = [each.put_id for each in cells if not (each.first_rows or each.field_names)]
            self._receipts.on_freed(whole, answer.freed_at)
            self._receipts.void_before(answer.receipts_valid_from)

    async def _update(self, request: storage_control_pb2.UpdatePutsRequest) -> storage_control_pb2.UpdatePutsResponse:
        return await self._peer.stub.UpdatePuts(request, timeout=_CALL_SECONDS, metadata=self._peer.metadata())

    async def close(self) -> None:
        """Stop the background tasks and close the channels."""
        self._is_closed = True
        self._reconciling.cancel()
        if self._delivering is not None:
            self._delivering.cancel()
        await self._peer.aclose()
        if self._bulk is not None:
            await self._bulk.aclose()


@contextlib.contextmanager
def _closing_is_an_error() -> Iterator[None]:
    """Raise UnavailableError if a call fails because its channel is closed.

    If a channel is closed, gRPC raises CancelledError. This error would end tasks that were not cancelled, such as the
    task that frees cells.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnavailableError("the connection to the storage service was closed during the call; retry") from None


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Convert gRPC errors to TqErrors, and rejected controller credentials to UnavailableError."""
    try:
        with _closing_is_an_error():
            yield
    except grpc.aio.AioRpcError as error:
        meant = from_rpc_error(error.code(), error.details(), status_from_trailers(error.trailing_metadata()))
        if isinstance(meant, UnauthenticatedError | PermissionDeniedError):
            meant = UnavailableError(f"a storage service rejected its controller: {meant.message}")
        raise meant from error


def report_reconciled(
    storage_id: str, missing_put_ids: Sequence[bytes], missing_count: int, dropped_count: int
) -> None:
    """Log the result of reconciling a storage service's puts."""
    if missing_count:
        put_ids = ",".join(put_id.hex() for put_id in missing_put_ids[:_MOST_NAMED])
        _log.error(
            LogMessage(
                "a storage service lost puts that samples still refer to",
                storage=storage_id,
                count=missing_count,
                put_ids=put_ids,
            )
        )
    if dropped_count:
        _log.warning(
            LogMessage("a storage service dropped puts that no sample needs", storage=storage_id, count=dropped_count)
        )
