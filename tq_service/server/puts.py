"""The controller's puts, the only truth about which live: each is absent, being committed, or committed.

    controller, here                                   storage service (`storage/index/put_table.py`)

    absent                                             waiting: complete, with a receipt
      | Commit, its receipt is valid                     | overdue: asked for in the heartbeat; the receipt
    being committed -- refused by all calls -> freed     | is void from then on; dropped if absent here
      | the step that makes its samples                  |
    committed ----------- durable: confirmed ----------> committed
      | its last cell is freed                           |
    leaving: committed still -- durable: freed --------> dropped
      |
    absent; its receipt is revoked (`receipts.py`)

Why no put is lost, and none is left:

- *A commit under way* makes a put known: the storage service is not told to drop the put, and asks again.
- *A commit after the answer "unknown"* has a void receipt: the heartbeat that asked said from when on receipts are
  valid, and those of all overdue puts were given before.
- *A commit again after the put was freed* is refused for as long as a receipt that it had may be valid. What a client
  puts again has another id: so cells may be freed late, or twice.
- *A controller that has started again*, or a standby that took over, has other receipt keys, and all committed puts
  from its journal. It lists them to the storage service, which drops committed puts that are not listed, and asks
  about the others when they are overdue.
- *A put that is committed just when its storage service asks* is either known by then, or its receipt is void: taking
  note of the bound and answering are one step, and so are looking at the receipt and entering the put here.

A storage service is told what its controller knows in pieces, while puts come and go. What is freed after the moment of
the list is listed all the same, and freed by a call of its own. What is committed after it was confirmed after the
storage service had begun to listen, and so stays there; or its commit was under way at that moment, and it is listed.

Insert and Commit end here, and so do puts to a storage service in the process of the controller, which bring their
commit with them:

    (stored elsewhere: its receipt is checked) -> admitted -> capacity for many rows is reserved in steps
        -> written and answered in one step -> confirmed there, later
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
MANY_ROWS: Final = 1 << 15  # threads read what is said of so many, and capacity for them is reserved in steps
_FREED_PER_TURN: Final = 128  # puts, or parts of some, freed before others have their turns: a millisecond
_MOST_PUTS: Final = 1024  # in a piece of what is known: some milliseconds' work for the storage service
_MOST_RUNS: Final = 4096  # of rows in one message
_NO_ROWS: Final = np.zeros(0, np.int64)


class Holder(Protocol):
    """A storage service that holds puts: an `EmbeddedStorage` or a `RemoteStorage`."""

    storage_id: str
    boot_id: bytes

    def confirm(self, put_id: bytes) -> object:
        """Make a put stay, soon."""
        ...

    def open_receipt(self, put_id: bytes, partition_id: str, receipt: bytes) -> PutReceipt:
        """Return what the receipt of an uncommitted put of a partition says."""
        ...

    def free(self, cells: Sequence[PutCells]) -> None:
        """Free cells, in order, as soon as it can be reached."""
        ...


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls that are about to commit one put: how many, and whether one of them has come to an answer."""

    call_count: int = 0
    is_answered: bool = False


class Puts:
    """The puts that samples have or are about to get, and the cells that are to be freed. Confined to the event loop.

    Args:
        embedded_id: name of the storage service of this process; None: it has none.
        find: returns what holds the puts of an instance of a storage service; None: nothing that is known.
        require: returns what holds a put that is to be committed, or raises.
        snapshot_cells: returns the cells that samples have now, by partition.
        after_durable: calls something once all that has changed here so far cannot be lost any more.
        supervisor: runs the background task.

    Attributes:
        require: as above.
        has_some_elsewhere: whether storage services of other processes hold puts. The one of this process writes to
            the journal of the controller, after the controller: with it alone nothing waits for durability.
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
        self._leaving: deque[Freed] = deque()  # cells that no sample has any more, in order
        self._due_count = 0  # of these, those that may be freed now
        self._held_count = 0  # and those that came since `_hold_count` was 0
        self._hold_count = 0
        self._freeing: asyncio.Task[None] | None = None
        self._is_closed = False

    def recover(self) -> None:
        """Learn which puts are committed, once the samples have been recovered."""
        self._committed = {cells.put for each in self._snapshot_cells() for cells in live_cells(each)}

    def instances(self) -> set[tuple[str, bytes]]:
        """Return name and boot of all storage services that hold committed puts."""
        return {put[:2] for put in self._committed}

    def unknown(self, storage_id: str, boot_id: bytes, put_ids: Iterable[bytes]) -> list[bytes]:
        """Return those of some puts of a storage service that are neither committed nor being committed."""
        puts = (Put(storage_id, boot_id, put_id) for put_id in put_ids)
        return [put.put_id for put in puts if put not in self._committed and put not in self._uncommitted]

    def known(self, storage_id: str, boot_id: bytes) -> KnownPuts:
        """Return the puts of a storage service as of now."""
        return KnownPuts(
            storage_id=storage_id,
            boot_id=boot_id,
            cells=self._snapshot_cells(),
            leaving=tuple(self._leaving),
            uncommitted=tuple(self._uncommitted),
        )

    # Committing

    def is_committed(self, put: Put) -> bool:
        """Whether some samples have their cells in this put."""
        return put in self._committed

    def check_uncommitted(self, put: Put) -> None:
        """Refuse a second commit of a put: its cells would be freed with the samples of either."""
        if put in self._committed:
            raise AlreadyExistsError(
                f"put {put.put_id.hex()} is committed already under another request_id; put data once for each commit",
                metadata={"resource_type": "put", "resource_name": put.put_id.hex()},
            )

    @contextlib.contextmanager
    def committing(self, put: Put) -> Iterator[Callable[[], None]]:
        """Have a put known within the `with`, which is to commit it; yield what raises if it was freed meanwhile.

        Several calls may commit one put at once, such as a retry beside the call that was given up. A put that none of
        them has committed is freed by the last one, if one of them was refused. If all were cancelled, or a service was
        unavailable, a retry may still commit it.

        Raises:
            AlreadyExistsError: it is committed.
        """
        self.check_uncommitted(put)
        commits = self._uncommitted.setdefault(put, _Calls())
        commits.call_count += 1

        def check() -> None:
            if put not in self._committed and self._uncommitted.get(put) is not commits:
                raise PutNotFoundError(
                    f"put {put.put_id.hex()} was freed while it was committed again; put the data again under another "
                    "put_id",
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
        """Have a put committed by the step in the `with`, unless that raises.

        Raises:
            AlreadyExistsError: it is committed.
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
        # The engine of this process confirms at once: its put comes back from the journal together with the samples.
        if put.storage_id == self._embedded_id:
            self._confirm(put)
        else:
            self._when_durable(partial(self._confirm, put))

    @contextlib.contextmanager
    def placing(self, put: Put) -> Iterator[None]:
        """Have a put that is made here known until `mark_committed` or `free_now`; the latter if the `with` raises."""
        self._uncommitted[put] = _Calls(call_count=1)
        try:
            yield
        except BaseException:
            self.free_now([put])
            raise

    def mark_committed(self, puts: Sequence[Put]) -> None:
        """Take note that puts made here are committed by now."""
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
        """Free no more cells until the end of the `with`, so that those of its beginning can be read."""
        self._hold_count += 1
        try:
            yield
        finally:
            self._hold_count -= 1
            if not self._hold_count:
                count, self._held_count = self._held_count, 0
                self._when_durable(partial(self._free_more, count))

    def free(self, freed: Sequence[Freed]) -> None:
        """Free cells that samples had, in order, once a crash of this controller cannot bring the samples back.

        A few are freed at once; the rest of many, such as all of a partition, in small steps with turns for others.
        What is left when this process ends is unknown to the process that starts after it, and goes as such.
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
        """Free puts that were not committed, at once."""
        self._free(CellSet(put=put) for put in puts)

    def _free(self, freed: Iterable[CellSet]) -> None:
        """Free cells, each where it is held; a boot that is over has nothing to free."""
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
        """Free what may be, and end the background task."""
        self._is_closed = True
        if self._freeing is not None:
            self._freeing.cancel()
        await self._free_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPuts:
    """The puts of a storage service that are known.

    Attributes:
        storage_id: the storage service.
        boot_id: its boot.
        cells: those that samples have, by partition, of all storage services.
        leaving: those that samples had, and that are not freed yet, of all storage services.
        uncommitted: puts whose commit is under way, of all storage services.
    """

    storage_id: str
    boot_id: bytes
    cells: Sequence[CellsSnapshot] = ()
    leaving: Sequence[Freed] = ()
    uncommitted: Sequence[Put] = ()

    def staying(self) -> set[bytes]:
        """Return its puts that stay as they are: their commit is under way, or cells of them are about to be freed."""
        leaving = (freed_cells(each).put for each in self.leaving)
        return {put.put_id for put in chain(self.uncommitted, leaving) if self._is_own(put)}

    def parts(self) -> Iterator[PutCells]:
        """Yield the cells that samples have of all others, those of one put one after the other; any thread may."""
        staying = self.staying()
        for cells in chain.from_iterable(map(live_cells, self.cells)):
            if self._is_own(cells.put) and cells.put.put_id not in staying:
                yield put_cells(cells)

    def pieces(self) -> Iterator[storage_control_pb2.ReconcilePutsRequest]:
        """Yield the messages that follow the first one, each of about a thousand puts; any thread may."""
        staying = iter(self.staying())
        while some := list(islice(staying, _MOST_PUTS)):
            yield storage_control_pb2.ReconcilePutsRequest(staying_put_ids=some)
        for cells in in_messages(chain.from_iterable(map(encode_cells, self.parts())), _MOST_PUTS):
            yield storage_control_pb2.ReconcilePutsRequest(cells=cells)
        yield storage_control_pb2.ReconcilePutsRequest(is_last=True)

    def _is_own(self, put: Put) -> bool:
        return put[:2] == (self.storage_id, self.boot_id)


def put_cells(cells: CellSet) -> PutCells:
    """Return cells as their storage service names them."""
    if cells.rows is None:
        return PutCells(put_id=cells.put.put_id)
    return PutCells(put_id=cells.put.put_id, field_names=cells.field_names, rows=np.sort(cells.rows))


def encode_cells(cells: PutCells) -> Iterator[storage_control_pb2.PutCells]:
    """Yield cells in parts that each fit into one message."""
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
    """Yield cells, some for one message at a time: of `most` puts, with some thousand runs."""
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
    """Return the columns of a put, see `decode_headers`; a thread looks at the extents of many rows."""
    if row_count < MANY_ROWS:
        return decode_headers(headers, row_count)
    return await asyncio.to_thread(decode_headers, headers, row_count)


class Commits:
    """Writes samples to the catalog.

    Args:
        catalog: what is written to.
        puts: what is committed.
        endpoint_of: returns how clients reach an instance of a storage service.
        waiting: counts the calls that wait for capacity.
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
        if (answer := self.recorded(request.request_id)) is not None:
            # Unless it is committed, it is a second put for the same commit, to be freed, or gone.
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
        """Return what the receipt of a put says, which must have these columns.

        Raises:
            InvalidArgumentError: it has others.
        """
        opened = self._puts.require(put).open_receipt(put.put_id, request.write.partition_id, request.placement.receipt)
        if opened.columns_digest != columns_digest(columns):
            got = ", ".join(f"{column.spec.name} ({column.spec.describe()})" for column in columns)
            raise InvalidArgumentError(
                f"the commit has other columns than put {put.put_id.hex()}, got {got or 'none'}; send those of its "
                "header as they are",
                field="columns",
            )
        return opened

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
            answer.all_meta.append(converters.all_meta(partition, some, self._endpoint_of))
            rows = rows[some.size :]
            if rows.size:
                await asyncio.sleep(0)

    async def _write_without_put(
        self, request: pb.InsertRequest | commit_pb2.CommitRequest, context: Context, kind: type[Answer]
    ) -> Answer:
        """Write samples without cells, or metadata and state alone."""
        if request.write.append_at:
            raise InvalidArgumentError("append_at came without a placement; say where the put is", field="append_at")
        async with self.admitted(request, 0, context):
            return await self._write_once(request, kind, converters.sample_write(request.write))

    @contextlib.asynccontextmanager
    async def admitted(
        self, request: pb.InsertRequest | commit_pb2.CommitRequest, size_bytes: int, context: Context
    ) -> AsyncIterator[None]:
        """Wait until a partition has capacity for new samples, and keep it for the `async with` that writes them.

        Puts that were gathered do not wait.

        Raises:
            InvalidArgumentError: too many samples have keys or groups.
            QuotaExceededError, AdmissionLimitError: there was none until the call was about to end, or never is.
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
        """Make the columns of a stored put visible in one step, once for each request_id.

        Args:
            request: what is written to which samples.
            put: what has their cells.
            columns: of the put.
            for_existing_rows: whether it may have taken the reserve, so that no samples are made of it.
            check: raises where the put is not there any more.
        """

        def committing() -> contextlib.AbstractContextManager[None]:
            check()
            if for_existing_rows and self.makes_samples(request.write):
                raise QuotaExceededError(
                    f"put {put.put_id.hex()} was put as columns for existing samples, which may use a reserve that new "
                    "ones may not, and its commit makes samples; put it again without for_existing_rows",
                    metadata={"limit_name": "reserve", "put_id": put.put_id.hex()},
                )
            return self._puts.commit(put)

        write = converters.sample_write(request.write, put, columns)
        return await self._write_once(request, commit_pb2.CommitResponse, write, committing)

    async def _write_once(
        self,
        request: pb.InsertRequest | commit_pb2.CommitRequest,
        kind: type[Answer],
        write: SampleWrite,
        committing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Answer:
        """Write samples in one step within `committing`, once for each request_id, with capacity reserved for many."""
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
