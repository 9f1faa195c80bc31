"""The storage service's gRPC methods, which stream bytes to and from the storage engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import grpc

from tq_service.dataplane.bulk.connection import BulkConnection, Moved
from tq_service.dataplane.bulk.server import BulkServer, Transfer
from tq_service.dataplane.receiving import Deadline, Received
from tq_service.dataplane.shared_memory.server import Session, SharedMemoryServer
from tq_service.errors import (
    DataLossError,
    InvalidArgumentError,
    LimitExceededError,
    PreconditionError,
    UnavailableError,
)
from tq_service.internal.v1 import storage_control_pb2
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.log_message import LogMessage
from tq_service.schema import check_id, check_name, check_passed_on
from tq_service.server.mirroring import Mirroring
from tq_service.server.puts import MANY_ROWS, Commits, columns_of
from tq_service.server.receipts import ReceiptKeys, not_registered
from tq_service.server.rpc.inbox import (
    LEAST_PROGRESS_BYTES,
    RETRY_AFTER_SECONDS,
    LeastRate,
    Progress,
    WaitingCalls,
    needs_no_turn,
    received,
    wait_until,
)
from tq_service.server.rpc.methods import token_name
from tq_service.state.cells import Put
from tq_service.storage.blobs.memory import Blob, BlobStore, SharedMemory
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put import PendingPut, PutCells
from tq_service.storage.index.reading import Reading, UnreadableError
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.wire.columns import (
    DEFAULT_FRAME_BYTES,
    INLINE_BYTES,
    MAX_ROWS,
    REGION_KEY,
    SEND_AS_BULK,
    SEND_AS_FD,
    SEND_AS_FRAMES,
    SEND_AS_KEY,
    SEND_AS_REGION,
    TICKET_KEY,
    Column,
    ColumnReceiver,
    ColumnShape,
    columns_digest,
    decode_put_request,
    encode_header,
    encode_part,
    iter_frames,
)
from tq_service.wire.messages import to_message
from tq_service.wire.metadata import CellRuns, decode_integers, expand_runs

_log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Part: TypeAlias = pb.PutHeader | memoryview
Receive = Callable[[PendingPut], Awaitable[None]]
SERVICE = "tq_service.v1.StorageService"
_SENT_BYTES: Final = 12 << 20  # total size of the frames of all concurrent gets
_LEAST_FRAME_BYTES: Final = 16 << 10


def endpoint_of(engine: StorageEngine, address: str) -> metadata_pb2.StorageEndpoint:
    """Return the endpoint of an engine. If `address` is empty, clients use the controller's address."""
    return metadata_pb2.StorageEndpoint(storage_id=engine.storage_id, boot_id=engine.boot_id, address=address)


class EngineDriver:
    """An `AsyncDriver` that calls this process's engine directly. Use each driver from a single event loop."""

    def __init__(
        self, engine: StorageEngine, mirroring: Mirroring | None = None, keys: ReceiptKeys | None = None
    ) -> None:
        """Create a driver for an engine.

        Args:
            engine: this process's engine.
            mirroring: provider of the engines for instances adopted from lost storage services, or None if there is no
                mirror.
            keys: receipt keys for controllers in other processes, or None if the controller runs in this process.
        """
        self._engine = engine
        self._mirroring = mirroring
        self._keys = keys

    @contextlib.asynccontextmanager
    async def storing(
        self,
        header: pb.PutHeader,
        columns: Sequence[ColumnShape],
        *,
        until: float | None,
        for_existing_rows: bool = False,
        store: BlobStore | None = None,
        waiting: contextlib.AbstractContextManager[None] | None = None,
    ) -> AsyncIterator[PendingPut | None]:
        """Reserve capacity for a put, let the `async with` block write the bytes, and then complete the put.

        If the block raises an error, the put is removed.

        Yields:
            The pending put to write the bytes to, or None if the put is already complete.

        Args:
            header: header of the put.
            columns: the put's columns, as described in the header.
            until: time on the engine's clock at which to stop waiting, or None to wait indefinitely.
            for_existing_rows: whether the put may use the capacity reserved for rows of existing samples.
            store: blob store for the put's bytes. See `StorageEngine.reserve`.
            waiting: context manager that is active while the put waits for capacity.
        """
        with waiting or contextlib.nullcontext():
            pending = await self._engine.reserve(
                header.put_id,
                columns,
                partition_id=header.partition_id,
                for_existing_rows=for_existing_rows,
                deadline=0.0 if header.never_waits else until,
                owner=header.controller_id,
                token=token_name.get(),
                store=store,
            )
        if pending is None:
            yield None
            return
        try:
            yield pending
            await self._engine.flush(pending, until)
            pending.finish()
        except BaseException:
            pending.abort()  # aborts only this attempt, because a retry may have completed the put
            raise

    async def put(self, header: pb.PutHeader, columns: Sequence[Column], deadline: Deadline) -> pb.PutResponse:
        """Store a put. See `AsyncDriver`."""
        async with self.storing(header, columns, until=time.monotonic() + deadline.remaining()) as pending:
            if pending is not None:
                for chunk in chain.from_iterable(column.chunks for column in columns):
                    await pending.write(chunk)
        return pb.PutResponse()

    async def get(
        self, request: pb.GetRequest, row_count: int, deadline: Deadline, size_bytes: int | None = None
    ) -> list[Received]:
        """Read columns, copying their bytes in a thread. See `AsyncDriver`."""
        with await self.open(request) as reading:
            receiver = ColumnReceiver(reading.headers)
            async for part in reading.parts():
                await asyncio.to_thread(receiver.write_all, part)
            return list(zip(reading.headers, receiver.finish(), strict=True))

    async def open(self, request: pb.GetRequest) -> Reading:
        """Open the requested cells for reading. The cells do not change until the reading is closed.

        Use the returned reading as a context manager, so that it is closed at the end of the block.
        """
        engine = self.engine_of(request.boot_id)
        await engine.check(request.put_ids)
        runs = [CellRuns.from_proto(each, with_extents=request.joins_extents) for each in request.runs]
        return await engine.open_long_read(runs, list(request.put_ids), request.slices)

    def engine_of(self, boot_id: bytes) -> StorageEngine:
        """Return the engine for an instance id: either this service's own engine or the engine of an adopted instance.

        Raises:
            DataLossError: this storage service does not know the instance.
            UnavailableError: the instance is unknown, and this process has not yet registered since it was restarted.
            InvalidArgumentError: `boot_id` is not a valid instance id.
        """
        if boot_id == self._engine.boot_id:
            return self._engine
        adopted = None if self._mirroring is None else self._mirroring.adopted.get(boot_id)
        if adopted is None:
            check_passed_on("boot_id", boot_id)
            if self._keys is not None and not self._keys.is_registered:
                raise UnavailableError(
                    f"storage service {self._engine.storage_id!r} has restarted and is not yet registered with "
                    "a controller, so it cannot tell whether another service has taken over these cells. Retry later."
                )
            raise DataLossError(
                f"storage service {self._engine.storage_id!r} has restarted since these cells were put, so they are "
                f"lost. Put the data again, or clear the cells",
                metadata={"storage_id": self._engine.storage_id},
            )
        return adopted.engine


class StorageServicer:
    """Implements `StorageService` and `StorageControlService`. Each method is documented in the protos.

    Args:
        engine: engine that stores the bytes.
        endpoint: endpoint at which clients reach the engine.
        commits: handler that commits puts to the controller in this process, or None if the controller runs in another
            process.
        keys: receipt keys, which are needed only if the controller runs in another process.
        controller_id: id of the controller in this process.
        shared_memory: server that shares memory with clients on this host, or None if shared memory is off.
        bulk: server that transfers the bytes of large puts and gets, or None if the bulk port is off.
        bulk_address: address of the bulk port, sent to clients as `StatResponse.bulk_address`.
        stall_seconds: time within which a client must transfer at least 64 KiB; otherwise, the stream is
            ended.
        min_stream_rate_bytes: minimum combined transfer rate of all streams, in bytes per second, while puts wait for
            capacity.
        waiting: counter of calls waiting for capacity.
        max_puts: maximum number of stored puts.
        max_uncommitted_puts: maximum number of stored puts waiting for a separate Commit call.
        mirroring: manager that adopts the puts of lost storage services, or None without a mirror.
    """

    def __init__(
        self,
        engine: StorageEngine,
        endpoint: metadata_pb2.StorageEndpoint,
        *,
        commits: Commits | None = None,
        keys: ReceiptKeys | None = None,
        controller_id: bytes = b"",
        shared_memory: SharedMemoryServer | None = None,
        bulk: BulkServer | None = None,
        bulk_address: str = "",
        stall_seconds: float = 60.0,
        min_stream_rate_bytes: int = 0,
        waiting: WaitingCalls | None = None,
        max_puts: int = sys.maxsize,
        max_uncommitted_puts: int = sys.maxsize,
        mirroring: Mirroring | None = None,
    ) -> None:
        self._engine = engine
        self._mirroring = mirroring
        self._commits = commits
        self._keys = keys or ReceiptKeys()
        self._driver = EngineDriver(engine, mirroring, self._keys if commits is None else None)
        self._controller_id = controller_id
        self._stall_seconds = stall_seconds
        self._least_rate = LeastRate(min_stream_rate_bytes)
        self._waiting = waiting or WaitingCalls()
        self._max_puts = max_puts
        self._max_uncommitted_puts = max_uncommitted_puts
        self._shared_memory = shared_memory
        self._bulk = bulk
        self._bulk_address = bulk_address
        self._endpoint = endpoint
        self._get_count = 0

    def end_slow_streams(self) -> None:
        """If puts are waiting for capacity, end streams that are slower than their minimum rate."""
        if self._engine.has_waiting_puts:
            self._least_rate.enforce()

    def bulk_handler(self) -> grpc.GenericRpcHandler:
        """Return handlers for Put and Get that replace the generated handlers and use their own frame encoding."""
        put = grpc.stream_unary_rpc_method_handler(self.Put, decode_put_request, pb.PutResponse.SerializeToString)
        get = grpc.unary_stream_rpc_method_handler(self.Get, pb.GetRequest.FromString, encode_part)
        return grpc.method_handlers_generic_handler(SERVICE, {"Put": put, "Get": get})

    async def Put(self, parts: AsyncIterator[Part], context: Context) -> pb.PutResponse:
        async def receive_frames(pending: PendingPut) -> None:
            await context.send_initial_metadata(((SEND_AS_KEY, SEND_AS_FRAMES),))
            with self._least_rate.watching(progress):
                async for part in parts:
                    await pending.write(_frame(part))
                    del part  # a reference would keep the part in memory until the next part arrives

        async def receive_bulk(pending: PendingPut, server: BulkServer) -> None:
            stored = pending.require_open()
            blob, start = stored.values, stored.values_at

            def fill(connection: BulkConnection, first: int, end: int, moved: Moved) -> None:
                blob.fill(start + first, start + end, lambda target: connection.receive_into(target, moved))

            blob.pin()
            transfer = server.open(blob.size - start, fill, on_moved=progress.moved, on_unused=blob.unpin)
            pending.end_transfer = transfer.close
            with contextlib.closing(transfer), self._least_rate.watching(progress):
                needs_no_turn.set(True)
                ticket = transfer.ticket.SerializeToString()
                await context.send_initial_metadata(((SEND_AS_KEY, SEND_AS_BULK), (TICKET_KEY, ticket)))
                try:
                    await progress.wait_for(transfer.done())
                except UnavailableError:
                    pending.require_open()  # raises if a retry has taken over the put and closed the transfer
                    raise
            await _read_end(parts, "bulk connections")
            await pending.end_filling()

        progress = Progress(self._stall_seconds, f"fewer than {LEAST_PROGRESS_BYTES} bytes arrived")
        parts = received(parts, progress, _progress_bytes)
        header = await _read_header(parts)
        session = self._session_for_put(header)
        if session is not None:
            receive = _receive_region if session.is_own_user else _receive_fd
            store = self._engine.shared_store(is_own_user=session.is_own_user)
            return await self._take(
                header, lambda pending: receive(pending, session, parts, context), context, store=store
            )
        if self._bulk is not None and header.takes_bulk and self._bulk.takes(header.size_bytes):
            server = self._bulk
            return await self._take(header, lambda pending: receive_bulk(pending, server), context)
        return await self._take(header, receive_frames, context)

    async def PutInline(self, request: pb.PutInlineRequest, context: Context) -> pb.PutInlineResponse:
        async def receive(pending: PendingPut) -> None:
            if len(values) != request.header.size_bytes:
                raise InvalidArgumentError(
                    f"values has {len(values)} bytes, but size_bytes is {request.header.size_bytes}; send the bytes of "
                    "all columns",
                    field="values",
                    metadata={"got": str(len(values)), "expected": str(request.header.size_bytes)},
                )
            await pending.write(values)

        values = request.values
        if request.header.allocates:
            return await self._allocate(request, context)
        if len(values) > INLINE_BYTES:
            raise InvalidArgumentError(
                f"values has {len(values)} bytes; PutInline accepts at most {INLINE_BYTES}. Use Put for larger puts.",
                field="values",
                metadata={"got": str(len(values)), "limit": str(INLINE_BYTES)},
            )
        return pb.PutInlineResponse(put=await self._take(request.header, receive, context))

    async def _allocate(self, request: pb.PutInlineRequest, context: Context) -> pb.PutInlineResponse:
        """Allocate a put without data and offer its shared-memory region to the client, which fills it later."""
        blobs: list[Blob] = []

        async def receive(pending: PendingPut) -> None:
            blobs.append(pending.require_open().values)
            await pending.end_filling()

        session = self._session_for_put(request.header)
        if session is None or not session.can_allocate:
            raise PreconditionError(
                "no shared memory is available for a put whose data is filled in later; send the data with the put"
            )
        _check_allocates(request)
        answer = pb.PutInlineResponse(
            put=await self._take(request.header, receive, context, store=self._engine.regions)
        )
        for blob in blobs:  # empty if the put was already stored
            blob.pin()
            offer = session.offer_for_a_while([blob.backing], blob.unpin)
            answer.region.offer_id, answer.region.region = offer.offer_id, blob.backing.number
        return answer

    def _session_for_put(self, header: pb.PutHeader) -> Session | None:
        """Return the shared-memory session that receives a put's bytes.

        The result is None if the bytes are sent over gRPC or bulk connections.
        """
        if self._shared_memory is None or header.size_bytes <= INLINE_BYTES:
            return None
        session = self._session(header.shared_memory_session)
        count = self._engine.regions.fd_count + self._engine.memfds.fd_count
        if session is None or not self._shared_memory.takes_memory(count):
            return None
        return session

    async def _take(
        self, header: pb.PutHeader, receive: Receive, context: Context, *, store: BlobStore | None = None
    ) -> pb.PutResponse:
        """Reserve capacity for a put, store the bytes from `receive`, and commit the put if a commit is included.

        If an error occurs, the put is removed. If `store` is None, the bytes are stored in the engine's default store.
        """
        check_id("put_id", header.put_id)
        _check_commit(header)
        commits = self._commits if header.HasField("commit") else None
        answer = pb.PutResponse(storage=self._endpoint)
        if header.HasField("commit"):
            if commits is None:
                raise InvalidArgumentError(
                    "commit is set, but this storage service is not in the controller's process; send Commit to the "
                    "controller after the put instead",
                    field="commit",
                )
            commits.check(header.commit)
            if (recorded := commits.recorded(header.commit.request_id)) is not None:
                answer.commit.CopyFrom(recorded)
                await commits.add_all_meta(header.commit, answer.commit)
                return answer
        columns = await columns_of(header.columns, header.row_count)
        if header.size_bytes != sum(column.value_bytes for column in columns):
            raise InvalidArgumentError(
                f"size_bytes is {header.size_bytes}, but the columns contain "
                f"{sum(column.value_bytes for column in columns)} bytes. Set size_bytes to the total size of all "
                "columns",
                field="size_bytes",
            )
        self._check_controller(header)
        self._check_put_counts(header)
        # A put without a commit waits for partition capacity in the separate Commit call.
        admitted = commits.admitted(header.commit, header.size_bytes, context) if commits else contextlib.nullcontext()
        async with admitted:
            async with self._driver.storing(
                header,
                columns,
                until=wait_until(context),
                # Do not trust the client's flag: a put that creates samples must not use the reserve.
                for_existing_rows=header.for_existing_rows
                and not (commits and commits.makes_samples(header.commit.write)),
                store=store,
                waiting=self._waiting.one(context),
            ) as pending:
                if pending is None:
                    await self._engine.check([header.put_id])
                else:
                    await receive(pending)
            try:
                stored = self._engine.complete_put(header.put_id, header.partition_id)
                if commits is not None:
                    put_id = header.put_id if pending is None else pending.put_id  # reuse the same bytes object
                    answer.commit.CopyFrom(
                        await commits.commit_stored(
                            header.commit,
                            Put(self._engine.storage_id, self._engine.boot_id, put_id),
                            columns if pending is not None else stored.shapes(),  # a retry's columns may differ
                            for_existing_rows=stored.for_existing_rows,
                            check=lambda: self._engine.complete_put(header.put_id, header.partition_id),
                        )
                    )
                elif self._commits is None:
                    answer.receipt = self._receipt(header)
            except BaseException:
                if pending is not None:  # a put that was already complete may still be committed by an earlier call
                    self._engine.delete_waiting(header.put_id)
                raise
        if commits is not None:
            await commits.add_all_meta(header.commit, answer.commit)
        return answer

    def _receipt(self, header: pb.PutHeader) -> bytes:
        """Return the receipt of a complete put, or b"" if the put has already been committed."""
        given_at = self._engine.receipt_time(header.put_id)
        if given_at is None:
            return b""
        put = self._engine.complete_put(header.put_id, header.partition_id)
        receipt = PutReceipt(
            put_id=header.put_id,
            partition_id=header.partition_id,
            given_at=given_at,
            for_existing_rows=put.for_existing_rows,
            columns_digest=columns_digest(put.shapes()),
        )
        return self._keys.seal(header.controller_id, receipt)

    def _check_controller(self, header: pb.PutHeader) -> None:
        """Reject a put unless its controller runs in this process or has registered this storage service."""
        if self._commits is None:
            self._keys.check_registered(header.controller_id)
            return
        if header.controller_id and header.controller_id != self._controller_id:
            check_passed_on("controller_id", header.controller_id)
            raise not_registered(header.controller_id)
        header.controller_id = self._controller_id

    def _check_put_counts(self, header: pb.PutHeader) -> None:
        """Reject a new put if the maximum number of puts has been reached. Accept retries of stored puts."""
        stat = self._engine.stat()
        counts = [("max_puts", stat.put_count, self._max_puts)]
        if not header.HasField("commit"):
            counts.append(("max_uncommitted_puts", stat.uncommitted_put_count, self._max_uncommitted_puts))
        for limit_name, count, limit in counts:
            if count >= limit and self._engine.partition_of(header.put_id) is None:
                raise LimitExceededError(
                    f"this storage service already stores {count} puts, and {limit_name} is {limit}. Put more "
                    "samples per call, or clear consumed samples",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                    metadata={"limit_name": limit_name, "got": str(count + 1), "limit": str(limit)},
                )

    async def Get(self, request: pb.GetRequest, context: Context) -> None:
        progress = Progress(self._stall_seconds, f"fewer than {LEAST_PROGRESS_BYTES} bytes of the answer were read")
        with contextlib.ExitStack() as stack:
            reading = stack.enter_context(await self._driver.open(request))
            session, memories, shared = self._shared_part(request, reading)
            offer = None if session is None else stack.enter_context(contextlib.closing(session.offer(memories)))
            if offer is not None:
                shared.offer_id = offer.offer_id
            transfer, without = None, _indexes(shared)
            if self._bulk is not None and request.takes_bulk and self._bulk.takes(reading.value_bytes(without)):
                transfer = await self._send_bulk(self._bulk, reading, without, progress, stack)
            header = await _encoded(reading, shared, None if transfer is None else transfer.ticket)
            with self._least_rate.watching(progress):
                await progress.wait_for(context.write(header))
                if transfer is None:
                    await self._send_frames(reading, without, progress, context)
                else:
                    try:
                        await progress.wait_for(transfer.done())
                    except UnreadableError as error:
                        raise reading.note_unreadable(error) from error.cause
            if offer is not None:
                await progress.wait_for(offer.wait())

    async def _send_frames(
        self, reading: Reading, without: Collection[int], progress: Progress, context: Context
    ) -> None:
        self._get_count += 1
        try:
            async for part in reading.parts(without):
                for frame in iter_frames(part, self._frame_bytes()):
                    await progress.wait_for(context.write(frame))
                    progress.moved(sum(map(len, frame)))
        finally:
            self._get_count -= 1

    async def _send_bulk(
        self,
        server: BulkServer,
        reading: Reading,
        without: Collection[int],
        progress: Progress,
        stack: contextlib.ExitStack,
    ) -> Transfer:
        """Open the bulk transfer for a get.

        The transfer takes over the resources on `stack`. Closing `stack` closes the transfer.
        """
        slices = await reading.gather_list(without)

        def send(connection: BulkConnection, start: int, end: int, moved: Moved) -> None:
            if slices.is_local and connection.sends_slices:
                connection.send_slices(*slices.addresses(start, end), moved)
            else:
                connection.send(slices.chunks(start, end), moved)

        held = stack.pop_all()
        transfer = server.open(reading.value_bytes(without), send, on_moved=progress.moved, on_unused=held.close)
        stack.callback(transfer.close)
        return transfer

    def _frame_bytes(self) -> int:
        """Return the size, in bytes, of a get's next frame.

        The more gets are running, the smaller the frames, because each get keeps a frame in memory until the client
        reads the frame.
        """
        return max(_LEAST_FRAME_BYTES, min(DEFAULT_FRAME_BYTES, _SENT_BYTES // self._get_count))

    async def GetInline(self, request: pb.GetInlineRequest, context: Context) -> pb.GetInlineResponse:
        with contextlib.ExitStack() as stack:
            reading = stack.enter_context(await self._driver.open(request.get))
            session, memories, shared = self._shared_part(request.get, reading)
            without = _indexes(shared)
            size = reading.value_bytes(without)
            if size > INLINE_BYTES:
                return pb.GetInlineResponse(size_bytes=size)
            values = b"".join([chunk async for part in reading.parts(without) for chunk in part])
            header = _get_header(reading, shared)
            if session is not None:
                header.shared.offer_id = session.offer_for_a_while(memories, stack.pop_all().close).offer_id
            return pb.GetInlineResponse(header=header, values=values, size_bytes=size)

    def _shared_part(
        self, request: pb.GetRequest, reading: Reading
    ) -> tuple[Session | None, Sequence[SharedMemory], pb.SharedColumns]:
        """Return the session, the `SharedMemory` objects and the columns that can be read through shared memory.

        The session is None if no column can be read through shared memory.
        """
        memories, columns = reading.shared_part(with_regions=True) if request.shared_memory_session else ([], [])
        session = self._session(request.shared_memory_session) if columns else None
        if session is not None and not session.is_own_user:
            memories, columns = reading.shared_part(with_regions=False)
        if session is None or not columns:
            return None, (), pb.SharedColumns()
        return session, memories, pb.SharedColumns(memories=[each.number for each in memories], columns=columns)

    def _session(self, session_id: bytes) -> Session | None:
        return self._shared_memory.session(session_id) if self._shared_memory is not None and session_id else None

    async def Stat(self, request: pb.StatRequest, context: Context) -> pb.StatResponse:
        return to_message(
            pb.StatResponse,
            self._engine.stat(),
            storage=self._endpoint,
            shared_memory_socket="" if self._shared_memory is None else str(self._shared_memory.path),
            shared_memory_count=self._engine.shared_memory_count,
            bulk_address=self._bulk_address,
        )

    async def UpdatePuts(
        self, request: storage_control_pb2.UpdatePutsRequest, context: Context
    ) -> storage_control_pb2.UpdatePutsResponse:
        self._keys.check_epoch(request.controller_id, request.epoch)
        cells = [_put_cells(cells) for cells in request.freed]
        with contextlib.suppress(DataLossError):  # raised for an unknown instance, which has no puts to update
            engine = self._driver.engine_of(request.boot_id)
            self._keys_of(request.boot_id).check_key(request.controller_id, request.key_id)

            def may_change(put_id: bytes) -> bool:
                return put_id not in engine.puts or engine.puts.owner_of(put_id) == request.controller_id

            gone = {each.put_id for each in cells}  # puts that an earlier attempt of this call may have freed
            for put_id in filter(may_change, request.committed_put_ids):
                if not engine.confirm(put_id) and put_id not in gone:
                    _log.error(LogMessage("a put is missing although samples use its cells", put_id=put_id))
            freed_at = engine.puts.clock()
            engine.free([each for each in cells if may_change(each.put_id)])
            return storage_control_pb2.UpdatePutsResponse(freed_at=freed_at, receipts_valid_from=engine.puts.valid_from)
        return storage_control_pb2.UpdatePutsResponse()

    def _keys_of(self, boot_id: bytes) -> ReceiptKeys:
        """Return the receipt keys of an instance, which is either this storage service or an adopted instance."""
        adopted = None if self._mirroring is None else self._mirroring.adopted.get(boot_id)
        return self._keys if adopted is None else adopted.keys

    async def ReconcilePuts(
        self, parts: AsyncIterator[storage_control_pb2.ReconcilePutsRequest], context: Context
    ) -> storage_control_pb2.ReconcilePutsResponse:
        state, engine = None, self._engine
        controller_id, epoch = b"", 0
        try:
            progress = Progress(self._stall_seconds, "the next part of the list did not arrive")
            async for part in received(parts, progress, lambda _: LEAST_PROGRESS_BYTES):
                if state is None:
                    self._keys.check_epoch(part.controller_id, part.epoch)
                    epoch, controller_id = part.epoch, part.controller_id
                    engine = self._driver.engine_of(part.boot_id)
                    self._keys_of(part.boot_id).expect(controller_id, part.key_id)
                    state = engine.begin_reconciliation(part.controller_id)
                    await context.send_initial_metadata(())
                engine.reconcile(
                    state,
                    cells=map(_put_cells, part.cells),
                    staying=part.staying_put_ids,
                )
                if part.is_last:
                    self._keys.check_epoch(controller_id, epoch)  # a newer leader may have called in the meantime
                    for _ in engine.finish_reconciliation(state):
                        await asyncio.sleep(0)
                    if state.dropped_count:
                        _log.warning(LogMessage("dropped puts unknown to the controller", count=state.dropped_count))
                    return to_message(storage_control_pb2.ReconcilePutsResponse, state)
                await asyncio.sleep(0)  # reading parts that have already arrived does not yield to the event loop
        finally:
            if state is not None:
                engine.end_reconciliation(state)
        raise InvalidArgumentError(
            "the stream ended before its last message, so no puts were dropped. Send the list again", field="is_last"
        )

    async def Adopt(
        self, request: storage_control_pb2.AdoptRequest, context: Context
    ) -> storage_control_pb2.AdoptResponse:
        check_id("boot_id", request.boot_id)
        self._keys.check_epoch(request.controller_id, request.epoch)
        if self._mirroring is None:
            raise PreconditionError(
                f"storage service {self._engine.storage_id!r} has no mirror from which to take over puts. Start the "
                "service with the mirror setting"
            )
        adopted = await self._mirroring.take_over(request.storage_id, request.boot_id, self._engine, request.search_id)
        return storage_control_pb2.AdoptResponse(put_count=adopted.engine.stat().put_count)


def _check_commit(header: pb.PutHeader) -> None:
    """Reject a put whose commit is for another partition or sets fields reserved for a separate Commit call."""
    check_name("partition_id", header.partition_id)
    if not header.HasField("commit"):
        return
    for name, is_sent in (("placement", header.commit.HasField("placement")), ("columns", header.commit.columns)):
        if is_sent:
            raise InvalidArgumentError(
                f"the put's commit sets {name}, which the put itself defines; unset the field in PutHeader.commit",
                field=name,
            )
    if not header.commit.HasField("write"):
        raise InvalidArgumentError(
            "the put's commit does not set write; set it to describe the samples that the rows belong to", field="write"
        )
    if header.commit.write.partition_id != header.partition_id:
        raise InvalidArgumentError(
            f"the put is for partition {header.partition_id!r}, but its commit is for "
            f"{header.commit.write.partition_id!r}; use the same partition in both",
            field="partition_id",
        )


def _check_allocates(request: pb.PutInlineRequest) -> None:
    """Reject a put that sets `allocates` but contains values, a commit, or object columns."""
    header = request.header
    has_objects = any(column.spec.layout == metadata_pb2.LAYOUT_OBJECT for column in header.columns)
    for name, is_wrong in (("values", request.values), ("commit", header.HasField("commit")), ("columns", has_objects)):
        if is_wrong:
            raise InvalidArgumentError(
                "a put with allocates set must not contain values, a commit, or object columns. Send only numeric "
                "columns, and call Commit once the data is written",
                field=name,
            )


async def _read_header(parts: AsyncIterator[Part]) -> pb.PutHeader:
    async for part in parts:
        if isinstance(part, pb.PutHeader):
            return part
        raise InvalidArgumentError(f"a put must begin with its header; got {_name(part)}", field="header")
    raise InvalidArgumentError("a put must begin with its header; got an empty stream", field="header")


async def _read_end(parts: AsyncIterator[Part], way: str) -> None:
    async for part in parts:
        raise InvalidArgumentError(
            f"got {_name(part)}; expected the end of the stream, because the bytes of this put are sent over {way}",
            field="frame",
        )


async def _receive_region(pending: PendingPut, session: Session, parts: AsyncIterator[Part], context: Context) -> None:
    """Offer a put's shared-memory region to the client and wait until the client has filled the region."""
    region = pending.require_open().values.backing
    with contextlib.closing(session.offer([region])) as offer:
        needs_no_turn.set(True)
        named = pb.RegionOffer(offer_id=offer.offer_id, region=region.number).SerializeToString()
        await context.send_initial_metadata(((SEND_AS_KEY, SEND_AS_REGION), (REGION_KEY, named)))
        await _read_end(parts, "shared memory")
    if not offer.is_filled:
        raise UnavailableError("the client did not fill the put's shared memory; retry the put over gRPC")
    await pending.end_filling()


async def _receive_fd(pending: PendingPut, session: Session, parts: AsyncIterator[Part], context: Context) -> None:
    """Receive a put's bytes in a sealed memory file, whose descriptor the client sends over the session."""
    with session.awaiting(pending.put_id) as take_fd:
        needs_no_turn.set(True)
        await context.send_initial_metadata(((SEND_AS_KEY, SEND_AS_FD),))
        await _read_end(parts, "shared memory")
        try:
            await pending.map_fd(take_fd())
        except OSError as error:
            raise UnavailableError(f"the put's shared memory could not be used: {error}") from error


def _progress_bytes(part: Part) -> int:
    return len(part) if isinstance(part, memoryview) else LEAST_PROGRESS_BYTES


def _frame(part: Part) -> memoryview:
    if isinstance(part, memoryview):
        return part
    raise InvalidArgumentError(f"a put's header must be followed by frames; got {_name(part)}", field="frame")


def _name(part: Part) -> str:
    return "a second header" if isinstance(part, pb.PutHeader) else f"a frame of {len(part)} bytes"


def _get_header(reading: Reading, shared: pb.SharedColumns, ticket: pb.BulkTicket | None = None) -> pb.GetHeader:
    """Return the header of a get response, which describes the columns and how their bytes are sent."""
    return pb.GetHeader(
        row_count=reading.row_count,
        columns=map(encode_header, reading.headers),
        shared=shared if shared.columns else None,
        bulk=ticket,
    )


async def _encoded(reading: Reading, shared: pb.SharedColumns, ticket: pb.BulkTicket | None) -> bytes:
    """Encode the header of a get response. Headers with many rows are encoded in a separate thread."""
    if reading.row_count < MANY_ROWS:
        return encode_part(_get_header(reading, shared, ticket))
    return await asyncio.to_thread(lambda: encode_part(_get_header(reading, shared, ticket)))


def _indexes(shared: pb.SharedColumns) -> Collection[int]:
    """Return the indexes of the columns that are sent through shared memory."""
    return frozenset(column.column_index for column in shared.columns)


def _put_cells(cells: storage_control_pb2.PutCells) -> PutCells:
    """Decode a `PutCells` message.

    Raises:
        InvalidArgumentError: `first_rows` and `row_counts` differ in length, or the message lists more rows than a put
            may contain.
    """
    if len(cells.first_rows) != len(cells.row_counts):
        raise InvalidArgumentError(
            f"the put's cells contain {len(cells.first_rows)} first_rows and {len(cells.row_counts)} row_counts; "
            f"expected equally many. Send one of each per run of rows, or neither to select all rows",
            field="cells",
        )
    rows = None
    if cells.first_rows:
        counts = decode_integers(cells.row_counts)
        if counts.min() < 0 or counts.max() > MAX_ROWS or counts.sum() > MAX_ROWS:
            raise InvalidArgumentError(
                f"the put's cells contain runs of {counts.min()} to {counts.max()} rows, {counts.sum()} in total; "
                f"expected 0 to {MAX_ROWS} rows",
                field="cells",
            )
        rows = expand_runs(decode_integers(cells.first_rows), counts)
    return PutCells(put_id=cells.put_id, field_names=tuple(cells.field_names), rows=rows)
