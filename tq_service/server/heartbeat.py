"""Registers a storage service with a controller in another process by sending regular heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

import grpc

from tq_service.errors import DeadlineError, PreconditionError, TqError, UnavailableError
from tq_service.internal.v1 import storage_registry_pb2
from tq_service.internal.v1.storage_registry_pb2_grpc import StorageRegistryServiceStub
from tq_service.log_message import LogMessage
from tq_service.server.mirroring import Registration
from tq_service.server.peer import Peer, PeerOutage
from tq_service.server.receipts import ReceiptKeys
from tq_service.storage.engine import StorageEngine
from tq_service.v1.metadata_pb2 import MirrorStatus, StorageEndpoint
from tq_service.version import BUILD
from tq_service.wire.connection import CLUSTER_OPTIONS, CONNECTION_OPTIONS, Controllers, Credentials
from tq_service.wire.error_table import from_rpc_error, status_from_trailers
from tq_service.wire.messages import read_seconds, to_message

if TYPE_CHECKING:
    from tq_service.internal.v1.storage_registry_pb2_grpc import (
        StorageRegistryServiceAsyncStub,  # exists for type checkers only
    )

MOST_OVERDUE_PUTS: Final = 4096
"""Maximum number of puts that a heartbeat may ask about. Processing this many puts takes a few milliseconds."""
_log = logging.getLogger(__name__)
_CALL_SECONDS = 5.0
_CLUSTER_CALL_SECONDS = 1.5
_RETRY_SECONDS = 0.25
_CLUSTER_RETRY_SECONDS = 0.1  # short, because a new leader needs the registrations
_REFUSED_SECONDS = 1.0  # kept short, because a service that misses three heartbeats is considered lost
_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
}
_TAKES_NONE = (
    "the controller does not accept storage services; start it with this service's internal_secret_file, or with "
    "tokens that have the service role"
)


async def register_storage(
    engine: StorageEngine,
    keys: ReceiptKeys,
    endpoint: StorageEndpoint,
    controller: str,
    credentials: Credentials,
    *,
    registration: Registration | None = None,
    is_adopted: bool = False,
) -> None:
    """Send a storage service's heartbeats to a controller and drop puts that the controller does not know.

    In a cluster, the service registers with the leader. If a controller does not respond, the service searches for the
    leader again.

    An overdue put is dropped in two cases: its controller does not know the put, or this service has long been
    registered with a different controller.

    Args:
        engine: engine that stores the puts.
        keys: receipt keys, to which this function adds the key for sealing receipts.
        endpoint: endpoint at which clients reach the storage service.
        controller: address of the controller, or the comma-separated addresses of a cluster's controllers.
        credentials: credentials of this service.
        registration: the registration that each accepted heartbeat renews.
        is_adopted: whether this process adopted the puts from a lost storage service and registers them under that
            service's name.

    Raises:
        PreconditionError: another storage service has adopted the puts, so this process must stop serving them.
    """
    registration = registration or Registration()
    controller_id, controllers = b"", Controllers(controller)
    outage = PeerOutage(_log, "controller", address=controller)

    async def beat(address: str, peer: Peer[StorageRegistryServiceAsyncStub]) -> float:
        """Send a heartbeat. Return the number of seconds to wait before the next heartbeat."""
        nonlocal controller_id
        stat, overdue = engine.stat(), engine.puts.overdue(controller_id, MOST_OVERDUE_PUTS)
        request = storage_registry_pb2.RegisterStorageRequest(
            storage=endpoint,
            max_bytes=stat.max_bytes or 0,
            used_bytes=stat.used_bytes,
            run_id=engine.run_id,
            overdue_put_ids=overdue.put_ids,
            receipts_valid_from=overdue.valid_from,
            controller_id=controller_id,
            put_count=stat.put_count,
            version=BUILD,
            mirror=None if stat.mirror is None else to_message(MirrorStatus, stat.mirror),
            is_adopted=is_adopted,
        )
        sent_at = time.monotonic()
        timeout = _CLUSTER_CALL_SECONDS if controllers.has_several else _CALL_SECONDS
        try:
            answer = await peer.stub.RegisterStorage(request, timeout=timeout, metadata=peer.metadata())
            keys.check_epoch(answer.controller_id, answer.epoch)
        except (grpc.aio.AioRpcError, TqError) as error:
            if isinstance(error, grpc.aio.AioRpcError):
                peer.follow_files()
                _note(error, controllers, address)
            return _pause_after(error, outage, has_several=controllers.has_several)
        outage.is_over()
        interval_seconds = read_seconds("heartbeat_interval", answer.heartbeat_interval)
        registration.renew(sent_at, interval_seconds)
        dropped_count = 0
        if answer.controller_id == controller_id:  # if not, the request listed puts of another controller
            dropped_count = engine.on_answer(overdue, answer.unknown_put_ids)
        else:
            controller_id = answer.controller_id
            _log.info(LogMessage("registered with the controller", address=address, storage=engine.storage_id))
        keys.renew(controller_id, answer.receipt_key)
        for owner in engine.puts.absent_owners({controller_id}):
            for count in engine.delete_owned(owner):
                dropped_count += count
                await asyncio.sleep(0)
        if dropped_count:
            _log.warning(
                LogMessage(
                    "dropped puts that the controller does not know; their producers may have died",
                    count=dropped_count,
                )
            )
        return interval_seconds

    while True:
        address = controllers.current
        options = CLUSTER_OPTIONS if controllers.has_several else CONNECTION_OPTIONS
        peer: Peer[StorageRegistryServiceAsyncStub] = Peer(address, credentials, StorageRegistryServiceStub, options)
        async with contextlib.aclosing(peer):
            while address == controllers.current:
                pause_seconds = await beat(address, peer)
                await asyncio.sleep(pause_seconds)


def _note(error: grpc.aio.AioRpcError, controllers: Controllers, address: str) -> None:
    """Choose the controller to call next. Raise an error if another storage service has adopted the puts."""
    meant = from_rpc_error(error.code(), error.details(), status_from_trailers(error.trailing_metadata()))
    if isinstance(meant, DeadlineError):  # a paused controller accepts calls but does not respond
        meant = UnavailableError(f"timed out: {meant.message}")
    controllers.note(address, meant)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        raise PreconditionError(error.details() or "the puts were taken over") from error


def _pause_after(error: grpc.aio.AioRpcError | TqError, outage: PeerOutage, *, has_several: bool) -> float:
    """Log why a registration failed and return the number of seconds to wait before the next attempt.

    The storage service still reports that it is healthy, because it can serve reads. Otherwise, a failed health probe
    could trigger a restart of the service, and samples would be lost.
    """
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    if code is not None and code not in _REFUSALS:
        outage.lasts("does not answer", error)
        return _CLUSTER_RETRY_SECONDS if has_several else _RETRY_SECONDS
    reason = PreconditionError(_TAKES_NONE) if code is grpc.StatusCode.UNIMPLEMENTED else error
    outage.lasts("rejects this service", reason, logging.ERROR)
    return _REFUSED_SECONDS
