"""A snapshot on its way from the controller that leads to one that needs records which the log has no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tq_service.durable.state_store import StateStore
from tq_service.errors import UnavailableError
from tq_service.internal.v1 import cluster_pb2 as pb
from tq_service.internal.v1.cluster_pb2_grpc import ClusterServiceServicer, ClusterServiceStub
from tq_service.journal.files import FileWriter, snapshot_path
from tq_service.server.peer import Peer
from tq_service.server.rpc.middleware import Context
from tq_service.wire.connection import Credentials

if TYPE_CHECKING:
    from tq_service.internal.v1.cluster_pb2_grpc import ClusterServiceAsyncStub  # exists for type checkers only

_PART_BYTES: Final = 1 << 20
_FETCH_SECONDS: Final = 600.0


class SnapshotServicer(ClusterServiceServicer):
    """Sends the newest snapshot of a controller.

    Args:
        store: has it.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def FetchSnapshot(  # noqa: N802  (the name of the rpc)
        self, request: pb.FetchSnapshotRequest, context: Context
    ) -> AsyncIterator[pb.FetchSnapshotResponse]:
        """Send it in parts."""
        number, path = await self._store.newest_snapshot(request.least_number)
        file = await asyncio.to_thread(path.open, "rb")  # open, it stays readable once a newer one has replaced it
        with file:
            size = os.fstat(file.fileno()).st_size
            while part := await asyncio.to_thread(file.read, _PART_BYTES):
                yield pb.FetchSnapshotResponse(number=number, size_bytes=size, data=part)


async def fetch_snapshot(address: str, credentials: Credentials, directory: Path, least_number: int) -> int:
    """Write a snapshot of a controller into a data directory, and return its number, which is so much at least.

    Raises:
        grpc.aio.AioRpcError: the controller does not send it.
        UnavailableError: it ended too early.
        OSError: it cannot be written.
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
            raise UnavailableError(f"the snapshot of {address} ended before it began")
        number, size, count = part.number, part.size_bytes, 0
        if number < least_number:
            raise UnavailableError(f"{address} sent snapshot {number}, at least {least_number} is needed")
        writer = FileWriter(snapshot_path(directory, number))
        try:
            while part is not None:
                count += await asyncio.to_thread(writer.file.write, part.data)
                part = await anext(parts, None)
            if count != size:
                raise UnavailableError(f"the snapshot of {address} ended after {count} of {size} bytes")
            await asyncio.to_thread(writer.commit)
        finally:
            writer.abort()
    return number
