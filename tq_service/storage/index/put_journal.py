"""What lets puts outlive the process: their blobs in a store that does, and a record of each written down.

    blob written -> (copied, flushed) -> record written down -> the put is complete
    the put is dropped -> that is written down -> when it cannot be lost any more: the blob is released

After a restart the bytes of a put are looked at before they are first read, and all of them slowly in the background.

A small put has its bytes in its record. Those of a put in shared memory are copied to a blob of the store before it is
complete, and go on being read from the shared memory as long as the process lives.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from tq_service.errors import DiskFailedError, UnavailableError
from tq_service.journal import codec
from tq_service.log_message import LogMessage
from tq_service.schema import FieldSpec
from tq_service.storage.blobs.base import Blob, DurableBlobStore, is_temporary
from tq_service.storage.blobs.memory import LocalBlob
from tq_service.storage.cells import Rows
from tq_service.storage.index.put import PendingPut, RowSet, StoredColumn, StoredPut
from tq_service.storage.index.put_table import RecoveredPut

_log = logging.getLogger(__name__)
_SCRUB_BYTES_PER_SECOND: Final = 100e6
_LEAST_PAUSE_SECONDS: Final = 0.001
_RETRY_SECONDS: Final = 1.0
_spec: Final = lru_cache(maxsize=1024)(FieldSpec)  # every put brings the same few


class ColumnRecord(NamedTuple):
    """A column of a put: its spec, and the bytes of all its values."""

    name: str
    dtype: str
    layout: str
    row_shape: tuple[int, ...]
    value_bytes: int
    encoding: str


class LeftRows(NamedTuple):
    """The rows in the put that are left of some of its columns, ascending; none: these columns are gone."""

    names: tuple[str, ...]
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStored:
    """A put is complete, or this is what is left of it from now on.

    Attributes:
        put_id: its name.
        partition_id: the partition it is for.
        row_count: number of rows that it was put with.
        columns: those that are left.
        size_bytes: size of its tables and values.
        segment: number of the file with these; 0: they follow the record, and nothing else does.
        checksum: XXH3 of what is in the file.
        left_rows: of the columns that do not have all rows.
        for_existing_rows: whether no new samples may be made of it.
        owner: the controller that owns it.
    """

    put_id: bytes
    partition_id: str
    row_count: int
    columns: tuple[ColumnRecord, ...]
    size_bytes: int
    segment: int = 0
    checksum: int = 0
    left_rows: tuple[LeftRows, ...] = ()
    for_existing_rows: bool = False
    owner: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutDropped:
    """A put is gone."""

    put_id: bytes


PutRecord: TypeAlias = PutStored | PutDropped
_KINDS: Final[dict[str, type[PutRecord]]] = {kind.__name__: kind for kind in (PutStored, PutDropped)}
_SIZE: Final = struct.Struct("<I")

EncodedPut: TypeAlias = tuple[bytes, bytes | bytearray]
"""The bytes of a record, and of a small put the values that follow them; neither ever changes."""


class PutLog(Protocol):
    """Where an engine writes down what becomes of its puts."""

    @property
    def fatal(self) -> Callable[[str, BaseException], None]:
        """Called with a reason and its cause where what is written down may not be what is in memory."""
        ...

    def append_put(self, record: bytes, values: bytes | bytearray = b"") -> None:
        """Take a record into memory; it becomes durable in order. The values must not change from now on."""
        ...

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was appended before cannot be lost any more."""
        ...


class PutJournal:
    """The part of an engine that keeps its puts. Confined to the engine's event loop.

    Args:
        store: the engine's.

    Attributes:
        damaged: puts whose bytes are not as they were put, and why; those not looked at yet are not known to be.
        on_looked_at: called with each recovered put once it was looked at.
    """

    def __init__(self, store: DurableBlobStore) -> None:
        self._store = store
        self._log: PutLog | None = None
        self.damaged: dict[bytes, str] = {}
        self.on_looked_at: Callable[[bytes], None] = lambda _: None
        self._expected: dict[bytes, tuple[Blob, int]] = {}  # checksums of recovered puts that were not looked at yet
        self._checking: dict[bytes, asyncio.Task[None]] = {}
        self._records: dict[bytes, EncodedPut] = {}
        self._to_free: dict[bytes, None] = {}  # puts to be looked at first: cells of them are to be freed
        self._has_to_free = asyncio.Event()

    def mark_damaged(self, put_id: bytes, reason: str) -> None:
        """Take note of a put that cannot be read."""
        if put_id not in self.damaged:
            _log.error(LogMessage("a put is damaged", put_id=put_id, reason=reason))
            self.damaged[put_id] = reason

    def forget(self, put_id: bytes) -> bool:
        """Forget whether a put is sound; return whether it was damaged."""
        self._expected.pop(put_id, None)
        self._to_free.pop(put_id, None)
        return self.damaged.pop(put_id, None) is not None

    # Taking puts

    async def flush(self, pending: PendingPut, deadline: float | None = None) -> None:
        """Wait until the bytes of a put are where they outlive this process; see `StorageEngine.flush`."""
        stored = pending.whole()
        if stored is None:
            return
        values = stored.values
        copied = None if values.copy is None else (memoryview(stored.tables()), values, stored.value_spans())
        try:
            checksum = await self._store.flush(values.copy or values, copied)
        except OSError as error:
            raise DiskFailedError(f"the bytes of a put could not be written: {error}; put it again") from error
        if checksum is not None:
            pending.checksum = checksum

    def record(self, put_id: bytes, put: StoredPut, checksum: int | None) -> None:
        """Write down that a put is complete, or was moved."""
        blob = put.values.copy or put.values
        if blob.number and checksum is None:
            raise RuntimeError(f"put {put_id.hex()} was finished before it was flushed")
        record = describe_put(put_id, put, checksum=(blob.number and checksum) or 0)
        self._append(record, b"" if blob.number else self._store.inline(blob))

    def _append(self, record: PutStored, values: bytes | bytearray = b"") -> None:
        encoded = self._records[record.put_id] = encode_put(record), values
        self._needed_log.append_put(*encoded)

    @property
    def _needed_log(self) -> PutLog:
        if self._log is None:
            raise RuntimeError("puts came before it was said where they are to be written down")
        return self._log

    # Giving them back

    def drop(self, put_id: bytes, blob: Blob) -> None:
        """Write down that a put is gone, and release its blob once that cannot be lost any more."""
        self._records.pop(put_id, None)
        (blob.copy or blob).is_damaged = self.forget(put_id)
        self._needed_log.append_put(encode_put(PutDropped(put_id=put_id)))
        self._release_later(blob)

    def may_compact(self, put_id: bytes) -> bool:
        """Whether a put may be moved now."""
        return put_id not in self._expected and put_id not in self.damaged

    def move(self, put_id: bytes, old: Blob, moved: StoredPut, checksum: int | None) -> None:
        """Write down a put that was compacted and flushed, and release its old blob once that cannot be lost."""
        try:
            self.record(put_id, moved, checksum)
        except Exception as error:  # the put is in its new place already
            self._needed_log.fatal("a put was moved and could not be written down", error)
            raise
        self._release_later(old)

    async def close(self) -> None:
        """Do nothing: what is under way ends by itself."""

    def _release_later(self, blob: Blob) -> None:
        self._needed_log.after_durable(blob.release)

    def records(self) -> Sequence[EncodedPut]:
        """Return what is written down of each put now."""
        return list(self._records.values())

    # After a restart

    def recover(self, records: Iterable[bytes], log: PutLog) -> dict[bytes, RecoveredPut]:
        """Find the bytes of puts that were written down, and write down what becomes of puts from now on.

        A put whose blob is missing is damaged. What is in the blobs is not looked at yet.

        Returns:
            The blob of each put, and its owner.
        """
        self._log = log
        left = left_puts(records)
        self._records = {put_id: encoded for put_id, (_, encoded) in left.items()}
        # Newest first: where the end of a put was lost with a part of the journal, its blob may have the bytes of a
        # later one.
        puts = [(put_id, record, values) for put_id, (record, (_, values)) in reversed(left.items())]
        found = iter(
            self._store.recover([(record.segment, record.size_bytes) for _, record, _ in puts if record.segment])
        )
        recovered = {}
        for put_id, record, values in puts:
            blob = next(found) if record.segment else LocalBlob(self._store, len(values), values)
            if blob is None:
                self.mark_damaged(put_id, f"segment {record.segment} is missing")
                blob = LocalBlob(self._store, record.size_bytes, b"")
            elif record.segment:
                self._expected[put_id] = blob, record.checksum
            recovered[put_id] = RecoveredPut(blob, record.owner)
        return recovered

    def load(self, put_id: bytes, blob: Blob) -> StoredPut:
        """Return a recovered put."""
        record, _ = decode_put(self._records[put_id][0])
        if not isinstance(record, PutStored):
            raise TypeError(f"put {put_id.hex()} was written down as {type(record).__name__}")
        return restore_put(record, blob)

    def is_unfetched(self, put_id: bytes) -> bool:
        """Whether a put was not looked at since it was recovered: its tables are in its segment alone."""
        return put_id in self._expected

    def partition_of(self, put_id: bytes) -> str | None:
        """Return None: the record of each put is here."""
        return None

    # Whether the bytes of recovered puts are as they were put

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Look at those of these puts that were not looked at yet.

        Raises:
            UnavailableError: one of them cannot be looked at now, since this process lacks files or memory.
        """
        if self._expected:
            tasks = [self._start(put_id) for put_id in put_ids if put_id in self._expected]
            if tasks:
                await asyncio.wait(tasks)
                for task in tasks:
                    task.result()

    async def scrub(self) -> None:
        """Look at all puts that were not looked at yet, one after the other, slowly; at those to be freed at once."""
        while self._expected:
            self._has_to_free.clear()
            put_id = next(iter(self._to_free or self._expected))
            blob, _ = self._expected[put_id]
            task = self._start(put_id)
            await asyncio.wait([task])
            if (error := task.exception()) is not None:
                _log.warning(LogMessage("the check of recovered puts is tried again later", error=error))
                await asyncio.sleep(_RETRY_SECONDS)
            elif not self._to_free:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(blob.size / _SCRUB_BYTES_PER_SECOND, _LEAST_PAUSE_SECONDS)):
                        await self._has_to_free.wait()

    def fetch_to_free(self, put_id: bytes) -> None:
        """Have a put looked at next."""
        self._to_free[put_id] = None
        self._has_to_free.set()

    def _start(self, put_id: bytes) -> asyncio.Task[None]:
        task = self._checking.get(put_id)
        if task is None:
            task = self._checking[put_id] = asyncio.get_running_loop().create_task(self._check(put_id))
            task.add_done_callback(lambda done: self._end(put_id, done))
        return task

    def _end(self, put_id: bytes, task: asyncio.Task[None]) -> None:
        del self._checking[put_id]
        if not task.cancelled():
            task.exception()  # where no caller waits any more, it is not to be reported

    async def _check(self, put_id: bytes) -> None:
        blob, expected = self._expected.get(put_id, (None, 0))
        if blob is None:
            return
        reason = ""
        try:
            found = await self._store.checksum(blob, self.load(put_id, blob).tables_bytes)
            if found != expected:
                reason = f"segment {blob.number} has checksum {found:016x}, expected {expected:016x}"
        except OSError as error:
            if is_temporary(error):
                raise UnavailableError(f"put {put_id.hex()} cannot be looked at now ({error}); try again") from error
            reason = f"its segment cannot be read: {error}"
        if self._expected.pop(put_id, None) is not None:
            self._to_free.pop(put_id, None)
            if reason:
                self.mark_damaged(put_id, reason)
            self.on_looked_at(put_id)


def encode_put(record: PutRecord) -> bytes:
    """Return the bytes of a record: its size (uint32) and the record. The values of a small put are to follow."""
    encoded = codec.encode_named(record)
    return _SIZE.pack(len(encoded)) + encoded


def decode_put(data: bytes) -> tuple[PutRecord, EncodedPut]:
    """Return a record, and its bytes apart from the values that follow.

    Raises:
        NewerVersionError: it has an unknown kind or field.
        ValueError, TypeError, KeyError, struct.error: the bytes are not those of a record.
    """
    end = _SIZE.size + _SIZE.unpack_from(data)[0]
    return codec.decode_named(_KINDS, *codec.unpack(data[_SIZE.size : end])), (data[:end], data[end:])


def left_puts(records: Iterable[bytes]) -> dict[bytes, tuple[PutStored, EncodedPut]]:
    """Return the puts that records leave, in the order in which they were last written down."""
    left: dict[bytes, tuple[PutStored, EncodedPut]] = {}
    for data in records:
        record, encoded = decode_put(data)
        left.pop(record.put_id, None)
        if isinstance(record, PutStored):
            left[record.put_id] = record, encoded
    return left


def describe_put(put_id: bytes, put: StoredPut, *, checksum: int = 0) -> PutStored:
    """Return the record of a put as it is now.

    Args:
        put_id: its name.
        put: the put.
        checksum: of what is in the file of its bytes, where they are in one.
    """
    blob = put.values.copy or put.values
    columns = [(column.spec, column.value_bytes) for column in put.columns.values() if column is not None]
    return PutStored(
        put_id=put_id,
        partition_id=put.partition_id,
        row_count=put.row_count,
        columns=tuple(
            ColumnRecord(
                spec.name, spec.dtype, spec.layout or "", spec.row_shape or (), value_bytes, spec.encoding or ""
            )
            for spec, value_bytes in columns
        ),
        size_bytes=blob.size,
        segment=blob.number,
        checksum=checksum,
        left_rows=_left_rows(put),
        for_existing_rows=put.for_existing_rows,
        owner=put.owner,
    )


def restore_put(record: PutStored, blob: Blob) -> StoredPut:
    """Return the put of a record; the blob has its tables and after them its values."""
    put = put_of(record)
    put.place(blob, is_recovered=True)
    return put


def put_of(record: PutStored) -> StoredPut:
    """Return the put of a record, which is not placed yet."""
    row_sets: dict[str, RowSet] = {}
    columns: dict[str, StoredColumn | None] = {}
    for names, left in record.left_rows:
        if left.size:
            row_sets |= dict.fromkeys(names, RowSet(left.size, left))
        else:
            columns |= dict.fromkeys(names)
    whole = RowSet(record.row_count)
    for name, dtype, layout, row_shape, value_bytes, encoding in record.columns:
        spec = _spec(name, dtype, layout, row_shape, encoding or None)
        columns[name] = StoredColumn(spec, row_sets.get(name, whole), value_bytes)
    return StoredPut(
        columns,
        record.row_count,
        record.partition_id,
        for_existing_rows=record.for_existing_rows,
        owner=record.owner,
    )


def _left_rows(put: StoredPut) -> tuple[LeftRows, ...]:
    gone = tuple(name for name, column in put.columns.items() if column is None)
    left = [LeftRows(gone, np.zeros(0, np.int64))] if gone else []
    left += [
        LeftRows(tuple(put.members(row_set)), row_set.rows) for row_set in put.row_sets() if row_set.rows is not None
    ]
    return tuple(left)
