"""Writing samples: with capacity for them, once for each request_id, and with the put that has their cells.

    (stored elsewhere: its receipt is checked) -> admitted -> capacity for many rows is reserved in steps
        -> written and answered in one step -> confirmed there, later

Insert and Commit end here, and so do puts to a storage service in the process of the controller, which bring their
commit with them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import numpy as np

from tq_service.errors import (
    InvalidArgumentError,
    QuotaExceededError,
    TqError,
)
from tq_service.machine.samples import CheckedWrite, SampleWrite
from tq_service.schema import check_named_rows
from tq_service.server import converters
from tq_service.server.rpc.inbox import WaitingCalls, wait_until
from tq_service.server.storages import StorageRegistry
from tq_service.serving.catalog import Catalog
from tq_service.serving.lookup import MOST_NAMED, first_known
from tq_service.state.cells import Put
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.columns import ColumnShape, decode_headers
from tq_service.wire.metadata import read_indexes

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Answer = TypeVar("Answer", pb.InsertResponse, commit_pb2.CommitResponse)
_NO_ROWS: Final = np.zeros(0, np.int64)
MANY_ROWS: Final = 1 << 15  # threads read what is said of so many, and capacity for them is reserved in steps


async def columns_of(headers: Sequence[metadata_pb2.ColumnHeader], row_count: int) -> list[ColumnShape]:
    """Return the columns of a put, see `decode_headers`; a thread looks at the extents of many rows."""
    if row_count < MANY_ROWS:
        return decode_headers(headers, row_count)
    return await asyncio.to_thread(decode_headers, headers, row_count)


class Commits:
    """Writes samples to the catalog.

    Args:
        catalog: what is written to.
        storages: where puts are, and which there are.
        waiting: counts the calls that wait for capacity.
    """

    def __init__(self, *, catalog: Catalog, storages: StorageRegistry, waiting: WaitingCalls) -> None:
        self._catalog = catalog
        self._storages = storages
        self._puts = storages.puts
        self._waiting = waiting

    async def insert(self, request: pb.InsertRequest, context: Context) -> pb.InsertResponse:
        """Add samples without cells."""
        return await self._write_without_put(request, context, pb.InsertResponse)

    async def commit(self, request: commit_pb2.CommitRequest, context: Context) -> commit_pb2.CommitResponse:
        """Make a put that came before visible; a put that is refused is freed."""
        self.check(request)
        answer = await self._commit(request, context)
        await self.add_all_meta(request, answer)
        return answer

    async def _commit(self, request: commit_pb2.CommitRequest, context: Context) -> commit_pb2.CommitResponse:
        if not request.HasField("placement"):
            if request.columns:
                raise InvalidArgumentError("columns came without a placement; say where the put is", field="placement")
            return await self._write_without_put(request, context, commit_pb2.CommitResponse)
        put = converters.placement(request.placement)
        columns = await columns_of(request.columns, request.write.row_count)
        partition_id, receipt = request.write.partition_id, request.placement.receipt
        if (answer := self.recorded(request.request_id)) is not None:
            # Unless it is committed, it is a second put for the same commit, to be freed, or gone.
            with contextlib.suppress(TqError):
                self._storages.open_receipt(put, columns, partition_id, receipt)
                with self._puts.committing(put):
                    pass
            return answer
        self._puts.check_uncommitted(put)
        opened = self._storages.open_receipt(put, columns, partition_id, receipt)
        with self._puts.committing(put) as check_known:

            def check() -> None:
                check_known()
                self._storages.check_not_lost(put)

            async with self.admitted(request, sum(column.value_bytes for column in columns), context):
                return await self.commit_stored(
                    request, put, columns, for_existing_rows=opened.for_existing_rows, check=check
                )

    def check(self, request: commit_pb2.CommitRequest) -> None:
        """Refuse a commit that asks for more than one answer is about."""
        count = request.write.row_count
        if request.return_all_meta and count > MOST_NAMED:
            raise InvalidArgumentError(
                f"return_all_meta is set for {count} samples, at most {MOST_NAMED} expected; put them in several "
                "calls, or look them up after the put",
                field="return_all_meta",
                metadata={"got": str(count), "limit": str(MOST_NAMED)},
            )

    async def add_all_meta(self, request: commit_pb2.CommitRequest, answer: commit_pb2.CommitResponse) -> None:
        """Add to the answer of a commit what is known of its samples now, where that is asked for.

        Of many samples it is read part by part, while others have their turns. It is not recorded with the answer: what
        is recorded is kept for hours, and on disk.
        """
        rows = read_indexes(answer.meta) if request.return_all_meta else _NO_ROWS
        while rows.size:
            known = first_known(self._catalog, request.write.partition_id, answer.meta.incarnation, rows)
            if known is None:  # some of them were cleared since
                answer.ClearField("all_meta")
                break
            partition, some = known
            answer.all_meta.append(converters.all_meta(partition, some, self._storages.endpoint_of))
            rows = rows[some.size :]
            if rows.size:
                await asyncio.sleep(0)

    async def _write_without_put(
        self, request: pb.InsertRequest | commit_pb2.CommitRequest, context: Context, answer: type[Answer]
    ) -> Answer:
        """Write samples without cells, or metadata and state alone."""
        async with self.admitted(request, 0, context):
            recorded: Answer | None = self._catalog.recorded(request.request_id, answer)
            if recorded is not None:
                return recorded
            write = converters.sample_write(request.write)
            async with self._capacity(request.write, write) as checked:
                return self._catalog.run_once(
                    request.request_id, lambda: answer(meta=self._write(request.write, write, checked)), answer
                )

    @contextlib.asynccontextmanager
    async def admitted(
        self, request: pb.InsertRequest | commit_pb2.CommitRequest, size_bytes: int, context: Context
    ) -> AsyncIterator[None]:
        """Wait until a partition has capacity for new samples, and keep it for the `async with` that writes them.

        Raises:
            InvalidArgumentError: too many samples have keys or groups.
            QuotaExceededError, StalenessLimitError: there was none until the call was about to end, or never is.
            LimitExceededError: too many calls wait.
        """
        message = request.write
        check_named_rows("keys", len(message.keys))
        check_named_rows("groups", len(message.groups))
        queue = self._catalog.admission_queue(message.partition_id)
        if queue is None or self._catalog.recorded(request.request_id) is not None:
            yield
            return
        self._catalog.get(message.partition_id, message.incarnation)
        write = converters.sample_write(message)
        with self._waiting.one(context):
            capacity = await queue.enter(request.request_id, write, size_bytes, wait_until(context))
        with capacity:
            yield

    async def commit_stored(
        self,
        request: commit_pb2.CommitRequest,
        put: Put,
        columns: Sequence[ColumnShape],
        *,
        for_existing_rows: bool,
        check: Callable[[], object],
    ) -> commit_pb2.CommitResponse:
        """Make the columns of a stored put visible in one step, once for each request_id.

        Args:
            request: what is written to which samples.
            put: what has their cells.
            columns: of the put.
            for_existing_rows: whether it may have taken the reserve, so that no samples are made of it.
            check: raises where the put is not there any more.
        """
        recorded = self.recorded(request.request_id)
        if recorded is not None:
            return recorded
        write = converters.sample_write(request.write, put, columns)

        def change() -> commit_pb2.CommitResponse:
            check()
            if for_existing_rows and self.makes_samples(request.write):
                raise QuotaExceededError(
                    f"put {put.put_id.hex()} was put as columns for existing samples, which may use a reserve that new "
                    "ones may not, and its commit makes samples; put it again without for_existing_rows",
                    metadata={"limit_name": "reserve", "put_id": put.put_id.hex()},
                )
            with self._puts.commit(put):
                return commit_pb2.CommitResponse(meta=self._write(request.write, write, checked))

        async with self._capacity(request.write, write) as checked:
            return self._catalog.run_once(request.request_id, change, commit_pb2.CommitResponse)

    def makes_samples(self, write: commit_pb2.SampleWrite) -> bool:
        """Whether a write makes samples, as of now; one that is refused anyhow may or may not."""
        if write.global_indexes:
            return False
        if write.key_mode == commit_pb2.KEY_MODE_EXISTING or not write.keys:
            return not write.keys
        return not self._catalog.knows_keys(write.partition_id, write.incarnation, write.keys)

    def recorded(self, request_id: bytes) -> commit_pb2.CommitResponse | None:
        """Return the answer of a commit that was made under this request_id.

        Raises:
            InvalidArgumentError: it is that of another call.
        """
        return self._catalog.recorded(request_id, commit_pb2.CommitResponse)

    def _capacity(
        self, message: commit_pb2.SampleWrite, write: SampleWrite
    ) -> contextlib.AbstractAsyncContextManager[CheckedWrite | None]:
        """Reserve capacity for many new samples, see `Catalog.capacity_for`; few need no step of their own for it."""
        if write.row_count < MANY_ROWS:
            return contextlib.nullcontext()
        return self._catalog.capacity_for(message.partition_id, message.incarnation, write)

    def _write(
        self, message: commit_pb2.SampleWrite, write: SampleWrite, checked: CheckedWrite | None = None
    ) -> metadata_pb2.BatchMeta:
        return converters.written_meta(self._catalog.write(message.partition_id, message.incarnation, write, checked))
