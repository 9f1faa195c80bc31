"""The controller's authoritative record of puts. Each put is absent, being committed, or committed.

    controller, here                                   storage service (`storage/index/put_table.py`)

    absent                                             waiting: complete, with a receipt
      | Commit with a valid receipt                      | overdue: listed in the heartbeat; the receipt
    being committed -- refused by all calls -> freed     | is void from then on; dropped if absent here
      | the step that makes its samples                  |
    committed ----------- durable: confirmed ----------> committed
      | its last cell is freed                           |
    leaving: still committed -- durable: freed --------> dropped
      |
    absent; its receipt is revoked (`receipts.py`)

No put is lost or leaked, for the following reasons:

- *A commit is in flight.* The controller knows the put, so the storage service keeps it and asks about it again later.
- *A commit arrives after the controller reported the put as unknown.* By then, the put's receipt is void. The heartbeat
  that asked about the put also raised the earliest valid issue time. The receipts of all overdue puts were issued
  before that time.
- *A second commit arrives after the put was freed.* The commit is rejected for as long as any receipt of the put may be
  valid. Freeing cells late or twice is harmless, because a client that puts the data again uses a new put_id.
- *The controller restarts, or a standby takes over.* The controller creates new receipt keys and reads all committed
  puts from its journal. The controller sends the list of committed puts to the storage service, which drops committed
  puts that are not listed. When uncommitted puts become overdue, the storage service asks about them.
- *A commit races with a heartbeat about its put.* Either the controller already knows the put, or the receipt is void.
  In a single step, the controller records the earliest valid issue time and responds to the heartbeat. Checking the
  receipt and recording the put is also a single step.

The list of known puts is sent in several messages, between which other puts may be committed or freed. A put that is
freed after the list was created is still listed, and a later call frees it. If a put is committed after the list was
created, the storage service does not drop it. If the commit was already in flight, the list contains the put.
Otherwise, the put is confirmed after the storage service has started recording confirmations.

This module implements Insert and Commit. It also implements puts that include a commit, if they are sent to a storage
service in the controller's process:

    (receipt check if the put is stored in another process) -> admission -> capacity for many rows is reserved in steps
        -> write and response in a single step -> later confirmation to the storage service
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import grpc
import numpy as np

from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    PutNotFoundError,
    QuotaExceededError,
    TqError,
    UnavailableError,
)
from tq_service.internal.v1 import storage_control_pb2
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.machine.group_cells import GroupsWritten
from tq_service.machine.samples import SampleWrite
from tq_service.schema import check_named_rows
from tq_service.server import converters
from tq_service.server.rpc.inbox import WaitingCalls, wait_until
from tq_service.server.supervisor import Supervisor
from tq_service.serving.catalog import Catalog
from tq_service.serving.lookup import MOST_NAMED, first_known
from tq_service.state.cells import CellSet, CellsSnapshot, Freed, Put, freed_cells, live_cells
from tq_service.storage.index.put import PutCells
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.columns import ColumnShape, columns_digest, decode_headers
from tq_service.wire.metadata import read_indexes, runs_of

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Answer = TypeVar("Answer", pb.InsertResponse, commit_pb2.CommitResponse)
MANY_ROWS: Final = 1 << 15  # from this many rows, columns are decoded in a thread and capacity is reserved in steps
_FREED_PER_TURN: Final = 128  # (parts of) puts freed before yielding to the event loop, which takes about 1 ms
_MOST_PUTS: Final = 1024  # puts per message of the known-puts list, which takes a few milliseconds to process
_MOST_RUNS: Final = 4096  # runs of rows per message
_NO_ROWS: Final = np.zeros(0, np.int64)


class Holder(Protocol):
    """Interface of a storage service, implemented by `EmbeddedStorage` and `RemoteStorage`."""

    storage_id: str
    boot_id: bytes

    def confirm(self, put_id: bytes) -> object:
        """Mark a put as committed, possibly in the background."""
        ...

    def open_receipt(self, put_id: bytes, partition_id: str, receipt: bytes) -> PutReceipt:
        """Return the contents of an uncommitted put's receipt."""
        ...

    def free(self, cells: Sequence[PutCells]) -> None:
        """Free cells in the given order, as soon as the storage service is reachable."""
        ...


@dataclass(slots=True, eq=False)
class _Calls:
    """Counts the in-flight calls that commit the same put, and records whether any succeeded or was rejected."""

    call_count: int = 0
    is_answered: bool = False


class Puts:
    """Tracks committed puts, puts that are being committed, and cells to free. Use this class only on the event loop.

    Args:
        embedded_id: name of the storage service in this process, or None if there is none.
        find: function that returns the storage service holding an instance's puts, or None if the instance is unknown.
        require: function that returns an uncommitted put's storage service, or raises an error if the put cannot be
            committed.
        snapshot_cells: function that returns, for each partition, the cells that samples currently use.
        after_durable: function that calls its argument once all changes made so far are durable.
        supervisor: runs the background task that frees cells.

    Attributes:
        require: function that returns an uncommitted put's storage service, or raises an error if the put cannot be
            committed.
        has_some_elsewhere: whether any puts are stored by storage services in other processes. If no other storage
            service stores puts, put updates take effect immediately, because the embedded storage service and the
            controller share a journal. In that journal, the controller's record of a change precedes the storage
            service's record.
    """

    def __init__(
        self,
        embedded_id: str | None,
        find: Callable[[str, bytes], Holder | None],
        require: Callable[[Put], Holder],
        snapshot_cells: Callable[[], Sequence[CellsSnapshot]],
        *,
        after_durable: Callable[[Callable[[], None]], None],
        supervisor: Supervisor,
    ) -> None:
        self.has_some_elsewhere = False
        self._embedded_id = embedded_id
        self._find = find
        self.require = require
        self._snapshot_cells = snapshot_cells
        self._after_durable = after_durable
        self._supervisor = supervisor
        self._uncommitted: dict[Put, _Calls] = {}
        self._committed: set[Put] = set()
        self._leaving: deque[Freed] = deque()  # cells that samples no longer use, in order
        self._due_count = 0  # entries of `_leaving` that may be freed now
        self._held_count = 0  # entries added to `_leaving` since `_hold_count` was last 0
        self._hold_count = 0
        self._freeing: asyncio.Task[None] | None = None
        self._is_closed = False

    def recover(self) -> None:
        """Rebuild the set of committed puts from recovered samples."""
        self._committed = {cells.put for each in self._snapshot_cells() for cells in live_cells(each)}

    def instances(self) -> set[tuple[str, bytes]]:
        """Return the name and instance id of each storage service that stores committed puts."""
        return {put[:2] for put in self._committed}

    def unknown(self, storage_id: str, boot_id: bytes, put_ids: Iterable[bytes]) -> list[bytes]:
        """Return the ids of puts that are neither committed nor being committed."""
        puts = (Put(storage_id, boot_id, put_id) for put_id in put_ids)
        return [put.put_id for put in puts if put not in self._committed and put not in self._uncommitted]

    def known(self, storage_id: str, boot_id: bytes) -> KnownPuts:
        """Return a snapshot of those puts of a storage service that the controller knows."""
        return KnownPuts(
            storage_id=storage_id,
            boot_id=boot_id,
            cells=self._snapshot_cells(),
            leaving=tuple(self._leaving),
            uncommitted=tuple(self._uncommitted),
        )

    # Committing

    def is_committed(self, put: Put) -> bool:
        """Return whether any sample uses a cell of a put."""
        return put in self._committed

    def check_uncommitted(self, put: Put) -> None:
        """Reject a second commit of a put, because clearing either commit's samples would free the cells of both."""
        if put in self._committed:
            raise AlreadyExistsError(
                f"put {put.put_id.hex()} was already committed under another request_id; put the data again",
                metadata={"resource_type": "put", "resource_name": put.put_id.hex()},
            )

    @contextlib.contextmanager
    def committing(self, put: Put) -> Iterator[Callable[[], None]]:
        """Record a put as being committed during the `with` block.

        Several calls may commit a put concurrently, such as an abandoned call and its retry. If all of these calls end
        without committing the put and at least one of them was rejected, the last one frees the put. If all of these
        calls were cancelled or failed with `UnavailableError`, the put is kept, because a retry may still commit it.

        Yields:
            A function that raises an error if the put has been freed.

        Raises:
            AlreadyExistsError: the put was already committed.
        """
        self.check_uncommitted(put)
        commits = self._uncommitted.setdefault(put, _Calls())
        commits.call_count += 1

        def check() -> None:
            if put not in self._committed and self._uncommitted.get(put) is not commits:
                raise PutNotFoundError(
                    f"put {put.put_id.hex()} was freed while another call was committing it. Put the data again under "
                    "another put_id",
                    metadata={"put_id": put.put_id.hex()},
                )

        try:
            yield check
            commits.is_answered = True
        except TqError as error:
            commits.is_answered |= not isinstance(error, UnavailableError)
            raise
        finally:
            commits.call_count -= 1
            if not commits.call_count and self._uncommitted.get(put) is commits:
                if commits.is_answered:
                    self.free_now([put])
                else:
                    del self._uncommitted[put]

    @contextlib.contextmanager
    def commit(self, put: Put) -> Iterator[None]:
        """Record a put as committed unless the `with` block raises an error.

        Raises:
            AlreadyExistsError: the put was already committed.
        """
        self.check_uncommitted(put)
        commits = self._uncommitted.pop(put, None)
        self._committed.add(put)
        try:
            yield
        except BaseException:
            self._committed.discard(put)
            if commits is not None:
                self._uncommitted[put] = commits
            raise
        # Confirm puts in this process's engine immediately, because one journal restores both puts and samples.
        if put.storage_id == self._embedded_id:
            self._confirm(put)
        else:
            self._when_durable(partial(self._confirm, put))

    @contextlib.contextmanager
    def placing(self, put: Put) -> Iterator[None]:
        """Treat a put created by the controller as uncommitted until `mark_committed` or `free_now` is called.

        If the `with` block raises an error, the put is freed.
        """
        self._uncommitted[put] = _Calls(call_count=1)
        try:
            yield
        except BaseException:
            self.free_now([put])
            raise

    def mark_committed(self, puts: Sequence[Put]) -> None:
        """Record that puts created by the controller are committed."""
        for put in puts:
            with self.commit(put):
                pass

    def _confirm(self, put: Put) -> None:
        if put in self._committed and (holder := self._find(*put[:2])) is not None:
            holder.confirm(put.put_id)

    def _when_durable(self, action: Callable[[], None]) -> None:
        if self.has_some_elsewhere:
            self._after_durable(action)
        else:
            action()

    # Freeing

    @contextlib.contextmanager
    def holding_frees(self) -> Iterator[None]:
        """Keep all cells readable inside the `with` block. Cells are not freed until the block ends."""
        self._hold_count += 1
        try:
            yield
        finally:
            self._hold_count -= 1
            if not self._hold_count:
                count, self._held_count = self._held_count, 0
                self._when_durable(partial(self._free_more, count))

    def free(self, freed: Sequence[Freed]) -> None:
        """Free these unused cells in the given order once the current change is durable.

        A small number of cells is freed immediately. Many cells, such as all cells of a partition, are freed in small
        steps that yield to the event loop. If this process ends before the cells are freed, the next controller process
        does not know these cells, so storage services drop them.
        """
        self._leaving += freed
        if self._hold_count:
            self._held_count += len(freed)
        else:
            self._when_durable(partial(self._free_more, len(freed)))

    def _free_more(self, count: int) -> None:
        if self._is_closed:
            return
        is_first = not self._due_count
        self._due_count += count
        if is_first:
            self._free_some()
        if self._due_count and (self._freeing is None or self._freeing.done()):
            self._freeing = self._supervisor.start("freeing cells", self._free_all(), may_end=True)

    async def _free_all(self) -> None:
        while self._due_count:
            await asyncio.sleep(0)
            self._free_some()

    def _free_some(self) -> None:
        count = min(self._due_count, _FREED_PER_TURN)
        self._due_count -= count
        self._free(freed_cells(self._leaving.popleft()) for _ in range(count))

    def free_now(self, puts: Iterable[Put]) -> None:
        """Free uncommitted puts immediately."""
        self._free(CellSet(put=put) for put in puts)

    def _free(self, freed: Iterable[CellSet]) -> None:
        """Free cells at their storage services.

        Storage instances that no longer exist are skipped, because their cells are gone.
        """
        cells_of: dict[tuple[str, bytes], list[PutCells]] = {}
        for each in freed:
            if each.rows is None:
                self._committed.discard(each.put)
                self._uncommitted.pop(each.put, None)
            cells_of.setdefault(each.put[:2], []).append(put_cells(each))
        for instance, cells in cells_of.items():
            if (holder := self._find(*instance)) is not None:
                holder.free(cells)

    async def close(self) -> None:
        """Stop the background task and free all cells that are still waiting to be freed."""
        self._is_closed = True
        if self._freeing is not None:
            self._freeing.cancel()
        await self._free_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPuts:
    """A snapshot of a storage service's puts that are known to the controller.

    Attributes:
        storage_id: name of the storage service.
        boot_id: instance id of the storage service.
        cells: cells in all storage services that samples use, by partition.
        leaving: cells, across all storage services, that samples no longer use but that have not yet been freed.
        uncommitted: puts that are being committed, across all storage services.
    """

    storage_id: str
    boot_id: bytes
    cells: Sequence[CellsSnapshot] = ()
    leaving: Sequence[Freed] = ()
    uncommitted: Sequence[Put] = ()

    def staying(self) -> set[bytes]:
        """Return the ids of puts that stay unchanged: those being committed, and those with cells yet to be freed."""
        leaving = (freed_cells(each).put for each in self.leaving)
        return {put.put_id for put in chain(self.uncommitted, leaving) if self._is_own(put)}

    def parts(self) -> Iterator[PutCells]:
        """Yield the cells that samples use, except cells of puts that must stay unchanged. Thread-safe."""
        staying = self.staying()
        for cells in chain.from_iterable(map(live_cells, self.cells)):
            if self._is_own(cells.put) and cells.put.put_id not in staying:
                yield put_cells(cells)

    def pieces(self) -> Iterator[storage_control_pb2.ReconcilePutsRequest]:
        """Yield the messages that follow the list's first message, each with about a thousand puts. Thread-safe."""
        staying = iter(self.staying())
        while some := list(islice(staying, _MOST_PUTS)):
            yield storage_control_pb2.ReconcilePutsRequest(staying_put_ids=some)
        for cells in in_messages(chain.from_iterable(map(encode_cells, self.parts())), _MOST_PUTS):
            yield storage_control_pb2.ReconcilePutsRequest(cells=cells)
        yield storage_control_pb2.ReconcilePutsRequest(is_last=True)

    def _is_own(self, put: Put) -> bool:
        return put[:2] == (self.storage_id, self.boot_id)


def put_cells(cells: CellSet) -> PutCells:
    """Convert cells to the representation used by storage services."""
    if cells.rows is None:
        return PutCells(put_id=cells.put.put_id)
    return PutCells(put_id=cells.put.put_id, field_names=cells.field_names, rows=np.sort(cells.rows))


def encode_cells(cells: PutCells) -> Iterator[storage_control_pb2.PutCells]:
    """Encode a put's cells in parts, each of which fits in a message."""
    if cells.rows is None:
        yield storage_control_pb2.PutCells(put_id=cells.put_id, field_names=cells.field_names)
        return
    first_rows, row_counts = runs_of(cells.rows)
    for start in range(0, first_rows.size, _MOST_RUNS):
        yield storage_control_pb2.PutCells(
            put_id=cells.put_id,
            field_names=cells.field_names,
            first_rows=first_rows[start : start + _MOST_RUNS].tolist(),
            row_counts=row_counts[start : start + _MOST_RUNS].tolist(),
        )


def in_messages(
    cells: Iterable[storage_control_pb2.PutCells], most: int
) -> Iterator[list[storage_control_pb2.PutCells]]:
    """Group cells into messages. Each message contains at most `most` entries and a few thousand runs of rows."""
    message: list[storage_control_pb2.PutCells] = []
    message_runs = 0
    for each in cells:
        run_count = max(1, len(each.first_rows))
        if message and (message_runs + run_count > _MOST_RUNS or len(message) == most):
            yield message
            message, message_runs = [], 0
        message.append(each)
        message_runs += run_count
    if message:
        yield message


# Writing samples


async def columns_of(headers: Sequence[metadata_pb2.ColumnHeader], row_count: int) -> list[ColumnShape]:
    """Decode a put's columns. If there are many rows, use a thread. See `decode_headers`."""
    if row_count < MANY_ROWS:
        return decode_headers(headers, row_count)
    return await asyncio.to_thread(decode_headers, headers, row_count)


class Commits:
    """Writes samples to the catalog and commits the puts that contain the samples' cells.

    Args:
        catalog: catalog to write to.
        puts: record of puts, updated by each commit.
        endpoint_of: function that returns the endpoint at which clients reach a storage service instance.
        waiting: counter of calls that wait for capacity.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        puts: Puts,
        endpoint_of: Callable[[str, bytes], metadata_pb2.StorageEndpoint | None],
        waiting: WaitingCalls,
    ) -> None:
        self._catalog = catalog
        self._puts = puts
        self._endpoint_of = endpoint_of
        self._waiting = waiting

    async def insert(self, request: pb.InsertRequest, context: Context) -> pb.InsertResponse:
        """Add samples without cells."""
        return await self._write_without_put(request, context, pb.InsertResponse)

    async def commit(self, request: commit_pb2.CommitRequest, context: Context) -> commit_pb2.CommitResponse:
        """Make a stored put visible, or free the put if the commit is rejected."""
        self.check(request)
        answer = await self._commit(request, context)
        await self.add_all_meta(request, answer)
        return answer

    async def _commit(self, request: commit_pb2.CommitRequest, context: Context) -> commit_pb2.CommitResponse:
        if not request.HasField("placement"):
            if request.columns:
                raise InvalidArgumentError(
                    "columns are set without a placement; expected the put's placement as well", field="placement"
                )
            return await self._write_without_put(request, context, commit_pb2.CommitResponse)
        put = converters.placement(request.placement)
        columns = await columns_of(request.columns, request.write.row_count)
        if (answer := self.recorded(request.request_id)) is not None:
            # This call is a retry. If its put is uncommitted, free the put, because the client has put the data twice.
            with contextlib.suppress(TqError):
                self._open_receipt(request, put, columns)
                with self._puts.committing(put):
                    pass
            return answer
        self._puts.check_uncommitted(put)
        opened = self._open_receipt(request, put, columns)
        with self._puts.committing(put) as check_known:

            def check() -> None:
                check_known()
                self._puts.require(put)

            async with self.admitted(request, sum(column.value_bytes for column in columns), context):
                return await self.commit_stored(
                    request, put, columns, for_existing_rows=opened.for_existing_rows, check=check
                )

    def _open_receipt(self, request: commit_pb2.CommitRequest, put: Put, columns: Sequence[ColumnShape]) -> PutReceipt:
        """Check that a put has the given columns, and return the contents of the put's receipt.

        Raises:
            InvalidArgumentError: the put's columns differ from the given columns.
        """
        opened = self._puts.require(put).open_receipt(put.put_id, request.write.partition_id, request.placement.receipt)
        if opened.columns_digest != columns_digest(columns):
            got = ", ".join(f"{column.spec.name} ({column.spec.describe()})" for column in columns)
            raise InvalidArgumentError(
                f"the commit's columns differ from those of put {put.put_id.hex()}: got {got or 'none'}. Send the "
                "columns from the put's header unchanged",
                field="columns",
            )
        return opened

    def check(self, request: commit_pb2.CommitRequest) -> None:
        """Reject a commit that requests metadata for more samples than a response may contain."""
        count = request.write.row_count
        if request.return_all_meta and count > MOST_NAMED:
            raise InvalidArgumentError(
                f"return_all_meta is set for {count} samples; expected at most {MOST_NAMED}. Put the samples "
                "in several smaller calls, or look them up after the put",
                field="return_all_meta",
                metadata={"got": str(count), "limit": str(MOST_NAMED)},
            )

    async def add_all_meta(self, request: commit_pb2.CommitRequest, answer: commit_pb2.CommitResponse) -> None:
        """If a commit's request asks for it, add the samples' current metadata to the response.

        If there are many samples, the method reads their metadata in parts and yields to the event loop between parts.
        Metadata is omitted from the recorded response, because recorded responses are kept in memory and on disk for
        hours.
        """
        rows = read_indexes(answer.meta) if request.return_all_meta else _NO_ROWS
        while rows.size:
            known = first_known(self._catalog, request.write.partition_id, answer.meta.incarnation, rows)
            if known is None:  # some samples have been cleared
                answer.ClearField("all_meta")
                break
            partition, some = known
            answer.all_meta.append(converters.all_meta(partition, some, self._endpoint_of))
            rows = rows[some.size :]
            if rows.size:
                await asyncio.sleep(0)

    async def _write_without_put(
        self, request: pb.InsertRequest | commit_pb2.CommitRequest, context: Context, kind: type[Answer]
    ) -> Answer:
        """Perform a write without a put. The write adds samples without cells, or contains only metadata and state."""
        if request.write.of_groups:
            raise InvalidArgumentError(
                "of_groups is set without a placement; expected the put's placement as well", field="placement"
            )
        if request.write.append_at:
            raise InvalidArgumentError(
                "append_at is set without a placement; expected the put's placement as well", field="append_at"
            )
        async with self.admitted(request, 0, context):
            return await self._write_once(request, kind, converters.sample_write(request.write))

    @contextlib.asynccontextmanager
    async def admitted(
        self, request: pb.InsertRequest | commit_pb2.CommitRequest, size_bytes: int, context: Context
    ) -> AsyncIterator[None]:
        """Wait until the partition has capacity for new samples, and reserve it during the `async with` block.

        Puts that are combined into one call do not wait: they fail immediately if there is no capacity. Group puts do
        not wait for capacity, but their bytes reduce the capacity available to later samples.

        Raises:
            InvalidArgumentError: the request contains too many keys, groups or rollouts.
            QuotaExceededError, AdmissionLimitError: capacity did not become available before the deadline, or the write
                can never fit.
            LimitExceededError: too many calls are already waiting.
        """
        message = request.write
        check_named_rows("keys", len(message.keys))
        check_named_rows("groups", len(message.groups))
        check_named_rows("rollouts", len(message.rollouts))
        queue = None if message.of_groups else self._catalog.admission_queue(message.partition_id)
        if queue is None or self._catalog.recorded(request.request_id) is not None:
            yield
            return
        self._catalog.get(message.partition_id, message.incarnation)
        write = converters.sample_write(message)
        until = 0.0 if message.rows_per_put else wait_until(context)
        with self._waiting.one(context):
            capacity = await queue.enter(request.request_id, write, size_bytes, until)
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
        """Make a stored put's columns visible in a single step, once per request_id.

        Args:
            request: commit request that describes the samples to write.
            put: put that contains the cells.
            columns: columns of the put.
            for_existing_rows: whether the put may use the capacity reserved for rows of existing samples. Committing
                such a put must not create samples.
            check: function that raises an error if the put no longer exists.
        """

        def committing() -> contextlib.AbstractContextManager[None]:
            check()
            if for_existing_rows and self.makes_samples(request.write):
                raise QuotaExceededError(
                    f"put {put.put_id.hex()} was sent with for_existing_rows, but its commit creates samples. New "
                    "samples must not use capacity reserved for existing rows. Put the data again without "
                    "for_existing_rows",
                    metadata={"limit_name": "reserve", "put_id": put.put_id.hex()},
                )
            return self._puts.commit(put)

        if request.write.of_groups:
            return self._write_groups_once(request, converters.group_write(request.write, put, columns), committing)
        write = converters.sample_write(request.write, put, columns)
        return await self._write_once(request, commit_pb2.CommitResponse, write, committing)

    def _write_groups_once(
        self,
        request: commit_pb2.CommitRequest,
        change: GroupsWritten,
        committing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> commit_pb2.CommitResponse:
        """Write groups within the `committing` context, in a single step and only once per request_id."""

        def answer() -> commit_pb2.CommitResponse:
            with committing():
                written = self._catalog.write_groups(request.write.incarnation, change)
                return commit_pb2.CommitResponse(meta=converters.groups_meta(written))

        return self._catalog.run_once(request.request_id, answer, commit_pb2.CommitResponse)

    async def _write_once(
        self,
        request: pb.InsertRequest | commit_pb2.CommitRequest,
        kind: type[Answer],
        write: SampleWrite,
        committing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Answer:
        """Write samples in a single step within the `committing` context, once per request_id.

        Before a write of many rows, capacity is reserved in several steps.
        """
        message = request.write
        where = message.partition_id, message.incarnation
        recorded: Answer | None = self._catalog.recorded(request.request_id, kind)
        if recorded is not None:
            return recorded
        many = write.row_count >= MANY_ROWS
        async with self._catalog.capacity_for(*where, write) if many else contextlib.nullcontext() as checked:

            def change() -> Answer:
                with committing():
                    return kind(meta=converters.written_meta(self._catalog.write(*where, write, checked)))

            return self._catalog.run_once(request.request_id, change, kind)

    def makes_samples(self, write: commit_pb2.SampleWrite) -> bool:
        """Return whether a write would create samples. The result is undefined if the write is invalid.

        A put for groups is assumed to create samples unless its key mode allows only existing groups.
        """
        if write.of_groups:
            return write.key_mode != commit_pb2.KEY_MODE_EXISTING
        if write.global_indexes:
            return False
        if write.key_mode == commit_pb2.KEY_MODE_EXISTING or not write.keys:
            return not write.keys
        return not self._catalog.knows_keys(write.partition_id, write.incarnation, write.keys)

    def recorded(self, request_id: bytes) -> commit_pb2.CommitResponse | None:
        """Return the recorded response to a commit, or None if there is none.

        Raises:
            InvalidArgumentError: the request_id belongs to a different call.
        """
        return self._catalog.recorded(request_id, commit_pb2.CommitResponse)
