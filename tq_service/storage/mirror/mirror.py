"""Mirroring of a storage service's puts to an object store on other nodes. The originals are in the service's memory.

    bytes written -> mirrored with the required number of copies -> the put is complete
    put dropped -> its memory is freed immediately, its object is removed soon

Freeing rows or compacting puts changes only the service's memory. An object is removed when the last of its puts is
dropped. Therefore, a storage service that was wrongly declared dead cannot destroy data that its successor has taken
over.

Puts that were taken over from a lost storage service are unfetched: only their ids, owners and partitions are known.
Unfetched puts are fetched on first read or in the background, whichever comes first. Spilled puts, whose bytes are no
longer in memory, are fetched when they are read or when some of their cells must be freed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tq_service.errors import DataLossError, QuotaExceededError, TqError, UnavailableError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, Buffer
from tq_service.results import MirrorStatus
from tq_service.storage.blobs.memory import RETRY_AFTER_SECONDS, Blob, MemoryBlobs
from tq_service.storage.index.put import PackedPut, PendingPut, StoredPut
from tq_service.storage.index.put_table import Backing, PutStored, RecoveredPut, decode_put, describe_put, encode_put
from tq_service.storage.mirror.layout import PutObject, pack_puts, unpack_heads
from tq_service.storage.mirror.writer import ObjectWriter

_log = logging.getLogger(__name__)
SMALL_PUT_BYTES: Final = 256 << 10
"""Size in bytes below which puts are combined into one object."""

_GATHER_SECONDS: Final = 0.002
_MOST_GATHERED: Final = 64
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 1.0
_NOTHING: Final[Sequence[Buffer]] = ()
_Kind: TypeAlias = tuple[bytes, str]
"""Owner and partition of puts. Puts with the same owner and partition may share an object."""


@dataclass(slots=True, eq=False)
class _Copy:
    """Mirroring state of a put. The put starts as pending and is then stored in an object.

    Attributes:
        put_id: id of the put.
        stored: object that contains the put, or None if it has not been written.
        record: record of the put, written together with the put's bytes.
        parts: bytes of the put, kept until they are written.
        blob: blob that contains the put's bytes. The blob stays pinned until these bytes are written.
        size: size of the put in bytes.
        is_needed: whether the put still exists and still needs this copy.
        batch: batch of puts that includes this put, kept until the put is written.
        replaces: older copy of the put, which is dropped once this copy is written.
    """

    put_id: bytes
    stored: PutObject | None = None
    record: bytes = b""
    parts: Sequence[Buffer] = _NOTHING
    blob: Blob | None = None
    size: int = 0
    is_needed: bool = True
    batch: _Batch | None = None
    replaces: _Copy | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch of puts that is written as a single object.

    Attributes:
        kind: owner and partition that the puts have in common.
        written: future that completes when the puts are written.
        copies: mirroring state of each put in the batch.
        made_count: number of copies made by the last attempt that did not make enough.
        task: asyncio task that writes the puts, or None if writing has not started.
    """

    kind: _Kind
    written: asyncio.Future[None]
    copies: list[_Copy] = field(default_factory=list)
    made_count: int = 0
    task: asyncio.Task[None] | None = None


class Mirror(Backing[PutObject]):
    """Mirrors an engine's puts to an object store. Instances are confined to the engine's event loop.

    Args:
        writer: `ObjectWriter` that stores the puts as objects.
        required: number of copies that must exist before a put is complete. If 0, a put completes first and is mirrored
            afterward.
        url: URL of the object store, for display.
        clock: time source for deadlines.
    """

    is_volatile = False

    def __init__(
        self,
        writer: ObjectWriter,
        *,
        required: int,
        url: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(MemoryBlobs())
        self._writer = writer
        self._required = required
        self._url = url
        self._clock = clock
        self._copies: dict[bytes, _Copy] = {}
        self._flushed: dict[bytes, _Copy] = {}  # puts that have been flushed but not finished
        self._gathered: dict[_Kind, _Batch] = {}
        self._small_count = 0  # batches of small puts being written
        self._tasks: set[asyncio.Task[None]] = set()
        # Puts that were taken over. If memory is available, they are fetched even without a reader's request.
        self._to_scrub: dict[bytes, None] = {}
        self._unmirrored_bytes = self._short_put_count = 0
        self._is_closed = False

    def stat(self, spilled_bytes: int = 0) -> MirrorStatus:
        """Return the mirror's status, including the number of bytes spilled by the engine."""
        return MirrorStatus(
            url=self._url,
            is_reachable=self._writer.is_reachable,
            unmirrored_bytes=self._unmirrored_bytes,
            short_put_count=self._short_put_count,
            unfetched_put_count=len(self._to_scrub),
            spilled_bytes=spilled_bytes,
        )

    def on_unreachable(self, error: UnavailableError) -> None:
        """Record that the object store is unreachable.

        `stat` then reports the outage even if nothing has been written yet.
        """
        self._writer.on_error(error)

    async def run(self) -> None:
        """Run the background tasks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run())
            while True:
                await self._has_to_free.wait()
                self._has_to_free.clear()
                await self.scrub()

    async def flush_all(self, seconds: float) -> int:
        """Wait up to `seconds` for all puts to be mirrored. Return the number of bytes not yet mirrored."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        for batch in list(self._gathered.values()):
            self._send(batch)
        while self._tasks and loop.time() < end:
            await asyncio.wait(self._tasks, timeout=end - loop.time())
        return self._unmirrored_bytes

    async def close(self) -> None:
        """Stop writing. Objects are kept for the storage service that takes over the puts."""
        self._is_closed = True
        tasks = [*self._tasks, *self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Writing puts

    async def flush(self, pending: PendingPut, deadline: float | None) -> None:
        """Wait until a put has the required number of copies. If no copies are required, only start mirroring the put.

        Raises:
            QuotaExceededError: the put did not have the required copies by the deadline.
        """
        copy = self._begin(pending.put_id, pending.require_complete())
        try:
            if self._required and copy.batch is not None:
                await self._wait(copy.batch, copy.size, deadline)
            pending.require_open()
        except BaseException:
            self._abandon(copy)
            raise
        self._flushed[pending.put_id] = copy

    async def _wait(self, batch: _Batch, size: int, deadline: float | None) -> None:
        try:
            async with asyncio.timeout(None if deadline is None else deadline - self._clock()):
                await asyncio.shield(batch.written)
        except TimeoutError:
            raise QuotaExceededError(
                f"a put of {size} bytes had only {batch.made_count} of the {self._required} copies required on other "
                f"nodes by the deadline: {self._writer.error or 'the mirror is slow'}. Put the data again, add "
                "capacity or nodes to the mirror, or lower mirror_required.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                metadata={
                    "limit_name": "mirror_required",
                    "got": str(batch.made_count),
                    "limit": str(self._required),
                },
            ) from None

    def _begin(self, put_id: bytes, put: StoredPut) -> _Copy:
        """Start mirroring a put in its current state. Small puts are combined into batches."""
        copy = _Copy(put_id)
        copy.record = encode_put(describe_put(put_id, put))
        view = put.values.view()
        values = [view[start : start + size] for start, size in put.value_spans() if size]
        copy.parts = [*put.table_views(), *values]
        copy.size = sum(map(len, copy.parts))
        copy.blob = put.values
        copy.blob.pin()
        self._unmirrored_bytes += copy.size
        kind, is_small = (put.owner, put.partition_id), copy.size < SMALL_PUT_BYTES
        loop = asyncio.get_running_loop()
        batch = self._gathered.get(kind) if is_small else None
        if batch is None:
            batch = _Batch(kind, loop.create_future())
            if is_small:  # start immediately unless another small batch is being written, otherwise after a short delay
                self._gathered[kind] = batch
                loop.call_later(_GATHER_SECONDS if self._small_count else 0.0, self._send, batch)
        copy.batch = batch
        batch.copies.append(copy)
        if not is_small:
            self._start(batch)
        elif len(batch.copies) >= _MOST_GATHERED:
            self._send(batch)
        return copy

    def _send(self, batch: _Batch) -> None:
        """Start writing a batch of small puts unless writing has already started."""
        if self._gathered.get(batch.kind) is batch and not self._is_closed:
            del self._gathered[batch.kind]
            self._small_count += 1
            self._start(batch).add_done_callback(self._end_small)

    def _end_small(self, _task: asyncio.Task[None]) -> None:
        self._small_count -= 1

    def _start(self, batch: _Batch) -> asyncio.Task[None]:
        task = batch.task = asyncio.get_running_loop().create_task(self._write(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._end(batch.copies))
        return task

    async def _write(self, batch: _Batch) -> None:
        """Write a batch as one object. Retry until the required copies exist or the puts are no longer needed."""
        pause = _FIRST_PAUSE_SECONDS
        while needed := [copy for copy in batch.copies if copy.is_needed]:
            parts = pack_puts([(copy.record, copy.parts) for copy in needed])
            stored, made = await self._writer.write(*batch.kind, [copy.put_id for copy in needed], parts)
            if stored is not None:
                self._take_written(needed, stored)
                batch.written.set_result(None)
                return
            batch.made_count = made
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def _end(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            self._unmirrored_bytes -= copy.size
            copy.parts, copy.record, copy.batch = _NOTHING, b"", None
            if copy.blob is not None:
                copy.blob.unpin()
                copy.blob = None

    def _take_written(self, copies: Sequence[_Copy], stored: PutObject) -> None:
        for copy in copies:
            copy.stored = stored
            self._short_put_count += stored.is_short
            if not copy.is_needed:
                self._leave(copy)
                continue
            if copy.replaces is not None:
                self._abandon(copy.replaces)
                copy.replaces = None

    def _abandon(self, copy: _Copy) -> None:
        """Record that a copy is no longer needed. A copy that is being written is removed after the write."""
        if not copy.is_needed:
            return
        copy.is_needed = False
        if copy.stored is not None:
            self._leave(copy)
        if copy.replaces is not None:
            self._abandon(copy.replaces)
        batch = copy.batch
        if batch is not None and batch.task is not None and not any(each.is_needed for each in batch.copies):
            batch.task.cancel()

    def _leave(self, copy: _Copy) -> None:
        stored = copy.stored
        if stored is not None:
            self._short_put_count -= stored.is_short
            stored.put_ids.discard(copy.put_id)
            if not stored.put_ids:
                self._writer.remove(stored)

    def record(self, put_id: bytes, put: StoredPut) -> None:
        """Record that a flushed put is complete."""
        self._copies[put_id] = self._flushed.pop(put_id)

    def pack(self, put_id: bytes, put: StoredPut) -> PackedPut | None:
        """Return None. Puts stay unpacked, because their blobs are mirrored, spilled and fetched."""
        return None

    # Dropping puts

    def delete(self, put_id: bytes, blob: Blob) -> None:
        """Free the memory of a put immediately, and schedule the removal of its object."""
        self.clear_damage(put_id)
        copy = self._copies.pop(put_id, None)
        if copy is not None:
            self._abandon(copy)
        blob.release()

    # Puts outside memory

    def spill(self, put_id: bytes) -> bool:
        """Mark a put as stored only in the mirror. Return False if the mirror does not have all requested copies."""
        copy = self._copies.get(put_id)
        if copy is None or copy.stored is None or copy.blob is not None or put_id in self.damaged:
            return False
        if copy.stored.is_short:
            return False
        self._unfetched[put_id] = copy.stored
        return True

    def fetch_to_free(self, put_id: bytes) -> None:
        """Fetch a spilled put in the background. Puts that `scrub` will fetch anyway are ignored."""
        if put_id not in self._to_scrub:
            super().fetch_to_free(put_id)

    def _forget_unfetched(self, put_id: bytes) -> bool:
        self._to_scrub.pop(put_id, None)
        return super()._forget_unfetched(put_id)

    def take_over(self, objects: Iterable[PutObject]) -> int:
        """Take over the puts of a lost engine, and return how many puts were taken over.

        If several objects contain the same put, the last of them is used. The bytes are fetched by the first read of
        the put or by `scrub`.
        """
        puts: dict[bytes, RecoveredPut] = {}
        for stored in objects:
            self._writer.live[stored.generation, stored.number] = stored
            for put_id in list(stored.put_ids):
                if (older := self._copies.get(put_id)) is not None:
                    self._abandon(older)
                self._copies[put_id] = _Copy(put_id, stored)
                self._short_put_count += stored.is_short
                self._unfetched[put_id] = stored
                self._to_scrub[put_id] = None
                puts[put_id] = RecoveredPut(Blob(self.store, 0), stored.owner)
        self.on_recovered(puts)
        return len(puts)

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of an unfetched put, or None for other puts."""
        stored = self._unfetched.get(put_id)
        return None if stored is None else stored.partition_id

    async def _fetch(self, put_id: bytes, source: PutObject) -> None:
        """Fetch the puts of an object that have not been fetched yet, or mark them as damaged if the object is lost."""
        try:
            data = await self._read(source)
            heads = unpack_heads(data)
            if isinstance(heads, int):
                raise DataLossError(
                    f"object {source.number} has {len(data)} bytes, but its records end at byte {heads}"
                )
        except DataLossError as error:
            for each in [each for each in source.put_ids if self._unfetched.get(each) is source]:
                self._forget_unfetched(each)
                self.mark_damaged(each, error.message)
            return
        except TqError as error:
            self._writer.error = self.fetch_error = error.message
            return
        is_shared = len(heads[0]) > 1
        for record, start, end in heads[0]:
            some = data[start:end]
            self._wake(source, record, memoryview(bytes(some)) if is_shared else some)
            await asyncio.sleep(0)

    def _wake(self, stored: PutObject, encoded: bytes, data: memoryview) -> None:
        record, _ = decode_put(encoded)
        if not isinstance(record, PutStored) or self._unfetched.get(record.put_id) is not stored:
            return
        self._forget_unfetched(record.put_id)
        put = self.on_fetched(record, data)
        if put is not None and stored.is_to_renew:
            older = self._copies[record.put_id]
            copy = self._copies[record.put_id] = self._begin(record.put_id, put)
            copy.replaces = older

    async def _read(self, stored: PutObject) -> memoryview:
        objects, names = self._writer.objects, self._writer.names.pieces(stored)
        last_bytes = await objects.size(names[-1])
        data = memoryview(bytearray((len(names) - 1) * LARGEST_OBJECT_BYTES + last_bytes))
        for number, name in enumerate(names):
            start = number * LARGEST_OBJECT_BYTES
            await objects.read(name, data[start : start + LARGEST_OBJECT_BYTES])
        return data
