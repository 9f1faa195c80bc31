"""Writing samples: with room for them, once for each request_id, and with the put that has their cells.

    admitted -> (stored elsewhere: confirmed there) -> written and answered in one step

Insert and Commit end here, and so do puts to a storage service in the process of the controller, which bring their
commit with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

from tq_service.domain.catalog import Catalog
from tq_service.domain.cells import FreedCells
from tq_service.domain.puts import Put
from tq_service.domain.requests import RequestLog
from tq_service.domain.writes import SampleWrite
from tq_service.errors import InvalidArgumentError, PreconditionError, ResourceExhaustedError, TqError
from tq_service.server import from_proto, to_proto
from tq_service.server.call_limits import WaitingCalls
from tq_service.server.progress import wait_until
from tq_service.server.storages import StorageDirectory
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2
from tq_service.wire.columns import ColumnShape

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Commits:
    """Writes samples to the catalog.

    Args:
        catalog: what is written to.
        requests: the answers given so far.
        storages: where puts are.
        waiting: counts the calls that wait for room.
    """

    def __init__(
        self, *, catalog: Catalog, requests: RequestLog, storages: StorageDirectory, waiting: WaitingCalls
    ) -> None:
        self._catalog = catalog
        self._requests = requests
        self._storages = storages
        self._waiting = waiting

    async def insert(self, request: pb.InsertRequest, context: Context) -> pb.InsertResponse:
        """Add samples without cells."""

        def change() -> pb.InsertResponse:
            meta = self._write(request.write, from_proto.sample_write(request.write))
            return pb.InsertResponse(meta=meta)

        with await self.admit(request, 0, context):
            return self._requests.once(request.request_id, change, pb.InsertResponse)

    async def commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """Make a put that came before visible; a put that is refused is freed."""
        if not request.HasField("placement"):
            if request.columns:
                raise InvalidArgumentError("columns came without a placement; say where the put is", field="placement")
            with await self.admit(request, 0, context):
                return self.commit_stored(request, None, ())
        put, columns = from_proto.placement(request.placement), from_proto.put_columns(request)
        try:
            room = await self.admit(request, sum(column.value_bytes for column in columns), context)
        except (ResourceExhaustedError, PreconditionError):
            await self._give_up(put, request.write.partition_id)
            raise
        with room:
            if self._requests.recorded(request.request_id) is not None:
                answer = self.commit_stored(request, put, columns)
                await self._give_up(put, request.write.partition_id)  # where it was made with another put
                return answer
            self._storages.check_uncommitted(put)
            await self._storages.confirm(put, request.write.partition_id)
            try:
                return self.commit_stored(request, put, columns)
            finally:
                self._free_uncommitted(put)

    async def admit(
        self, request: pb.InsertRequest | pb.CommitRequest, size_bytes: int, context: Context
    ) -> contextlib.AbstractContextManager[object]:
        """Wait until a partition has room for new samples; return what keeps it for the `with` that writes them.

        Raises:
            QuotaExceededError, RunAheadError: there was none until the call was about to end, or never is.
            LimitExceededError: too many calls wait.
        """
        line = self._catalog.put_line(request.write.partition_id)
        if line is None or self._requests.recorded(request.request_id) is not None:
            return contextlib.nullcontext()
        from_proto.check_request_id(request.request_id, "request_id")
        self._catalog.get(request.write.partition_id, request.write.incarnation)
        write = from_proto.sample_write(request.write)
        with self._waiting.one(context):
            grant = await line.enter(request.request_id, write, size_bytes, wait_until(context))
        return grant or contextlib.nullcontext()

    def commit_stored(
        self, request: pb.CommitRequest, put: Put | None, columns: Sequence[ColumnShape]
    ) -> pb.CommitResponse:
        """Make the columns of a stored put visible in one step, once for each request_id.

        Args:
            request: what is written to which samples.
            put: what has their cells; None: nothing, as when only custom_meta is written.
            columns: of the put.
        """

        def change() -> pb.CommitResponse:
            if put is None:
                return pb.CommitResponse(meta=self._write(request.write, from_proto.sample_write(request.write)))
            self._storages.check_uncommitted(put)
            write = from_proto.sample_write(request.write, put, columns)
            with self._storages.committing(put):
                return pb.CommitResponse(meta=self._write(request.write, write))

        return self._requests.once(request.request_id, change, pb.CommitResponse)

    def recorded(self, request_id: bytes) -> pb.CommitResponse | None:
        """Return the answer of a commit that was made under this request_id.

        Raises:
            InvalidArgumentError: it is that of another call.
        """
        return self._requests.recorded(request_id, pb.CommitResponse)

    def _write(self, message: pb.SampleWrite, write: SampleWrite) -> metadata_pb2.BatchMeta:
        partition, written = self._catalog.write(message.partition_id, message.incarnation, write)
        self._storages.free(written.freed)
        return to_proto.written_meta(partition, written)

    async def _give_up(self, put: Put, partition_id: str) -> None:
        """Free a put that will not be committed; one of another partition is not this caller's to free."""
        if self._storages.is_committed(put):
            return
        with contextlib.suppress(TqError):  # it is another's, gone, or expires by itself
            await self._storages.confirm(put, partition_id)
            self._free_uncommitted(put)

    def _free_uncommitted(self, put: Put) -> None:
        if not self._storages.is_committed(put):
            self._storages.free([FreedCells(put=put)])
