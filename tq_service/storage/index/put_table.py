"""Tracks which of a storage engine's complete puts are committed, and how their bytes outlive the process.

Lifecycle of a put in its storage service:

    written -> waiting ------------- committed -> freed, row by row or at once
                 | overdue               |
                 |  (controller asked;   | the process restarts
                 |   dropped if unknown) v
                 +------------------- recovered -- listed by its controller -> committed
                          not listed -> waiting

A controller in another process commits a put when it receives the put's receipt, and confirms the put to the storage
service shortly afterward. An overdue put may therefore already be committed, so the storage service asks the controller
before dropping it. Once a controller has answered that it does not know a put, it must not commit that put. Two
timestamps prevent the controller from committing a put after such an answer. A receipt contains its time of issue, and
the storage service's query contains the earliest time of issue for valid receipts. If a client retries a put once half
of the put's waiting time has passed, the wait restarts with a new receipt. `server/puts.py` describes the controller's
side and explains why no put is lost.

If the store outlives the process (`PutJournal`), records are written in this order:

    blob written -> (copied, flushed) -> record appended to the journal -> the put is complete
    put dropped -> record of the drop appended to the journal -> record durable -> blob released

After a restart, the bytes of a put are verified before they are first read, and a background task verifies all puts at
a limited rate. The record of a small put includes its bytes. A put in shared memory becomes complete only after its
bytes have been copied to a blob in the store. Reads still use the shared memory while the process runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import chain, islice, takewhile
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from tq_service.errors import DataLossError, UnavailableError
from tq_service.journal import codec
from tq_service.log_message import LogMessage
from tq_service.results import MirrorStatus
from tq_service.schema import CONTROLLER_NAME_BYTES, FieldSpec
from tq_service.storage.blobs.memory import Blob, BlobStore, is_temporary
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.index.put import (
    PackedPut,
    PendingPut,
    PutCells,
    PutKind,
    Rows,
    RowSet,
    StoredColumn,
    StoredPut,
    packed_put,
    unpack_sizes,
)

_log = logging.getLogger(__name__)
_SHARDS: Final = 1024
_KEPT_SECONDS: Final = 10.0  # how long puts stay in memory after a read, which may be part of a larger read
_LOOKED_AT: Final = 256
_MOST_NAMED: Final = 5
_MOST_LISTED: Final = 100  # the metadata of a response has space for about twice this number
_SCRUB_BYTES_PER_SECOND: Final = 100e6
_LEAST_PAUSE_SECONDS: Final = 0.001
_RETRY_SECONDS: Final = 1.0
SourceT = TypeVar("SourceT", bound=Hashable)
AnyPut: TypeAlias = "StoredPut | RecoveredPut | PackedPut"
_ANY_ID: Final = bytes(16)  # a record starts with the put id, so the first match of this placeholder is the put id
_spec: Final = lru_cache(maxsize=1024)(FieldSpec)  # puts share a small number of specs


class PutState(Enum):
    """Commit state of a complete put, as known to the storage service."""

    WAITING = "waiting"  # the put waits for its commit
    RECOVERED = "recovered"  # the put is from an earlier process and may have been committed
    COMMITTED = "committed"


class Overdue(NamedTuple):
    """A query that asks a controller which of the given overdue puts it knows.

    Attributes:
        put_ids: ids of the overdue puts.
        valid_from: time from which receipts are valid. The receipts of all overdue puts are older than this time and
            therefore invalid.
    """

    put_ids: list[bytes]
    valid_from: float


class RecoveredPut(NamedTuple):
    """The state kept in memory for a put that has not been used since it was recovered or spilled.

    Attributes:
        values: blob that contains the put.
        owner: controller that owns the put.
        spilled_bytes: number of the put's bytes that were spilled from memory.
    """

    values: Blob
    owner: bytes
    spilled_bytes: int = 0

    @property
    def charge(self) -> int:
        """Number of quota bytes that the put uses."""
        return self.values.charge


class PutTable(Mapping[bytes, StoredPut]):
    """Maps ids to complete puts, and tracks which puts are not known to be committed.

    Recovered puts are loaded on demand because many are never read. A recovered put can become overdue only after its
    controller has listed its puts, because the controller may be down for a long time. Packed puts are unpacked for
    each access, but remain packed in the table. Puts are spread over many small dicts so that the table can be
    traversed in slices while puts are added and removed.

    Args:
        ttl_seconds: how long a put may remain unconfirmed before it is overdue.
        clock: time source for measuring waits.
        backing: loads recovered puts on demand.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float], backing: Backing[Any]) -> None:
        self._ttl_seconds = ttl_seconds
        self.clock = clock
        self._backing = backing
        backing.kept_puts = self._kept
        self._shards: list[dict[bytes, AnyPut]] = [{} for _ in range(_SHARDS)]
        self._owned: Counter[bytes] = Counter()  # number of puts by owner
        self._absent_since: dict[bytes, float] = {}  # time at which each missing owner was first absent
        # Start of each put's wait, in ascending order. The put's receipt contains this time.
        self._waiting: dict[bytes, float] = {}
        self._recovered: set[bytes] = set()

    def recover(self, puts: Mapping[bytes, RecoveredPut | PackedPut]) -> None:
        """Add the puts recovered from an earlier process."""
        for put_id, put in puts.items():
            self._shard(put_id)[put_id] = put
            self._owned[put.owner] += 1
        self._recovered.update(puts)

    def add(self, put_id: bytes, put: StoredPut) -> None:
        """Add a put, and start waiting for its confirmation."""
        self._shard(put_id)[put_id] = put
        self._owned[put.owner] += 1
        self.wait(put_id)

    def pack(self, put_id: bytes) -> None:
        """Convert a small put to its packed form to save memory."""
        shard = self._shard(put_id)
        put = shard[put_id]
        if isinstance(put, StoredPut) and (packed := self._backing.pack(put_id, put)) is not None:
            shard[put_id] = packed

    def unpack(self, put_id: bytes) -> StoredPut:
        """Unpack a put before it is changed, and return it. The put remains unpacked in the table."""
        shard = self._shard(put_id)
        if isinstance(packed := shard[put_id], PackedPut):
            self._backing.unpack(put_id, packed)
        put = shard[put_id] = self[put_id]
        return put

    def _kept(self) -> Iterator[tuple[bytes, AnyPut]]:
        """Return an iterator over all puts as stored (unpacked or packed). Any thread may use the iterator."""
        names = list(chain.from_iterable(self._shards))
        return zip(names, list(chain.from_iterable(map(dict.values, self._shards))), strict=True)

    def replace(self, put_id: bytes, put: StoredPut | RecoveredPut) -> StoredPut | RecoveredPut:
        """Replace a put with its compacted, spilled or fetched form, and return the previous form."""
        shard = self._shard(put_id)
        replaced, shard[put_id] = shard[put_id], put
        return self._with_blob(replaced)

    def pop(self, put_id: bytes) -> StoredPut | RecoveredPut:
        """Remove a put and return it."""
        self.confirm(put_id)
        put = self._shard(put_id).pop(put_id)
        self._owned[put.owner] -= 1
        return self._with_blob(put)

    def _with_blob(self, put: AnyPut) -> StoredPut | RecoveredPut:
        """Return a removed put with a releasable blob, creating the blob if the put was packed."""
        if not isinstance(put, PackedPut):
            return put
        blob = Blob(self._backing.store, 0)
        blob.charge = put.charge
        return RecoveredPut(blob, put.owner)

    # Commit state

    @property
    def uncommitted_count(self) -> int:
        """Number of puts that are not known to be committed."""
        return len(self._waiting) + len(self._recovered)

    def state_of(self, put_id: bytes) -> PutState:
        """Return the commit state of a stored put."""
        if put_id in self._waiting:
            return PutState.WAITING
        return PutState.RECOVERED if put_id in self._recovered else PutState.COMMITTED

    def wait(self, put_id: bytes) -> None:
        """Start or restart the wait for a put's confirmation."""
        self.confirm(put_id)
        self._waiting[put_id] = self.clock()

    def confirm(self, put_id: bytes) -> None:
        """Stop waiting for the confirmation of a put that has been committed or is being removed."""
        self._waiting.pop(put_id, None)
        self._recovered.discard(put_id)

    def receipt_time(self, put_id: bytes) -> float | None:
        """Return the timestamp for a put's receipt, or None if the put is committed.

        A retry of a put returns the previous receipt. Once half of the put's waiting time has passed, a retry instead
        restarts the wait and returns a new receipt.
        """
        if self.state_of(put_id) is PutState.COMMITTED:
            return None
        if self._waiting.get(put_id, -math.inf) + self._ttl_seconds / 2 <= self.clock():
            self.wait(put_id)
        return self._waiting[put_id]

    @property
    def valid_from(self) -> float:
        """Start of the oldest wait that is not overdue, or now if there is none. Older receipts are invalid."""
        now = self.clock()
        overdue_until = now - self._ttl_seconds
        return next((since for since in self._waiting.values() if since > overdue_until), now)

    def overdue(self, owner: bytes, most: int | None = None) -> Overdue:
        """Return up to `most` overdue puts of an owner, or all of them if `most` is None."""
        valid_from = self.valid_from
        overdue = takewhile(lambda put_id: self._waiting[put_id] < valid_from, self._waiting)
        own = (put_id for put_id in overdue if self.owner_of(put_id) == owner)
        return Overdue(list(islice(own, most)), valid_from)

    def on_answer(self, asked: Overdue, unknown: Collection[bytes]) -> list[bytes]:
        """Process a controller's response to a query, and return the puts to drop.

        Puts unknown to the controller are dropped. Puts known to the controller start a new wait for confirmation. Puts
        that received a new receipt after the query was sent are skipped, because they may be committed with that
        receipt.
        """
        old = [put_id for put_id in asked.put_ids if self._waiting.get(put_id, math.inf) < asked.valid_from]
        for put_id in old:
            if put_id not in unknown:
                self.wait(put_id)
        return [put_id for put_id in old if put_id in unknown]

    # Owners

    def owner_of(self, put_id: bytes) -> bytes:
        """Return the controller that owns a put."""
        return self._shard(put_id)[put_id].owner

    def absent_owners(self, controllers: Collection[bytes]) -> list[bytes]:
        """Return the owners that have been missing from `controllers` for at least the waiting time of a put.

        Earlier runs of listed controllers are returned immediately, because these runs persisted no state.
        """
        now = self.clock()
        names = {controller[:CONTROLLER_NAME_BYTES] for controller in controllers}
        absent = (owner for owner in +self._owned if owner not in controllers)
        self._absent_since = {owner: self._absent_since.get(owner, now) for owner in absent}
        return [
            owner
            for owner, since in self._absent_since.items()
            if since + self._ttl_seconds <= now or owner[:CONTROLLER_NAME_BYTES] in names
        ]

    def slices(self) -> Iterator[list[bytes]]:
        """Yield the ids of all puts in slices. Puts added or removed during the iteration may be missed."""
        for shard in self._shards:
            yield list(shard)

    def __getitem__(self, put_id: bytes) -> StoredPut:
        shard = self._shard(put_id)
        put = shard[put_id]
        if isinstance(put, PackedPut):
            return put.unpacked(self._backing.store)
        if isinstance(put, RecoveredPut):
            put = shard[put_id] = self._backing.load(put_id, put.values)
        return put

    def __contains__(self, put_id: object) -> bool:
        return put_id in self._shard(put_id)

    def __iter__(self) -> Iterator[bytes]:
        for shard in self._shards:
            yield from shard

    def __len__(self) -> int:
        return self._owned.total()

    def _shard(self, put_id: object) -> dict[bytes, AnyPut]:
        return self._shards[hash(put_id) & (_SHARDS - 1)]


class Residents:
    """The puts in memory that can be spilled, least recently used first.

    complete -> in memory -> spilled (its bytes are only in the mirror) -> fetched when it is read -> in memory

    Args:
        clock: time source, in seconds.
        can_spill: whether puts may be spilled.
    """

    def __init__(self, clock: Callable[[], float], *, can_spill: bool) -> None:
        self._clock = clock
        self._can_spill = can_spill
        self._kept_until: dict[bytes, float] = {}  # least recently used first

    def add(self, put_id: bytes) -> None:
        """Add a put that is now in memory. It can be spilled immediately."""
        if self._can_spill:
            self._kept_until[put_id] = 0.0

    def use(self, put_ids: Iterable[bytes]) -> None:
        """Keep puts in memory for ten seconds because they are about to be read. Ignore puts that are not in memory."""
        if self._can_spill:
            for put_id in put_ids:
                if self._kept_until.pop(put_id, None) is not None:
                    self._kept_until[put_id] = self._clock() + _KEPT_SECONDS

    def remove(self, put_id: bytes) -> None:
        """Remove a put that has been spilled or dropped."""
        self._kept_until.pop(put_id, None)

    def coldest(self) -> list[bytes]:
        """Return some of the puts that can be spilled, least recently used first.

        Call `put_off` for each returned put that cannot be spilled.
        """
        now = self._clock()
        return [put_id for put_id, until in islice(self._kept_until.items(), _LOOKED_AT) if until <= now]

    def put_off(self, put_id: bytes) -> None:
        """Move a put that cannot be spilled now to the end of the queue."""
        self._kept_until[put_id] = self._kept_until.pop(put_id)


# Reconciliation with a controller's list of puts, which arrives in parts


@dataclass(slots=True, eq=False)
class Reconciliation:
    """Progress in comparing an engine's puts with a controller's list.

    Other calls may confirm and free puts during the comparison.

    Attributes:
        owner: controller that lists its puts.
        staying: puts that were listed or were confirmed during the comparison. All other confirmed puts are dropped
            when the comparison ends.
        freed: puts freed during the comparison. These puts are not reported as missing, even if the list still contains
            them. If a new put is stored under the id of a freed put, the list does not refer to the new put.
        partial: puts for which the list contains only some of the cells.
        put_id: id of the put whose cells the controller is currently listing.
        parts: cells of the put `put_id` that have been listed so far.
        missing_put_ids: ids of listed puts that do not exist or are damaged. Contains only a limited number of ids.
        missing_count: number of listed puts that do not exist or are damaged.
        dropped_count: number of confirmed puts dropped because they were not listed.
    """

    owner: bytes = b""
    staying: set[bytes] = field(default_factory=set)
    freed: set[bytes] = field(default_factory=set)
    partial: set[bytes] = field(default_factory=set)
    put_id: bytes = b""
    parts: list[PutCells] = field(default_factory=list)
    missing_put_ids: list[bytes] = field(default_factory=list)
    missing_count: int = 0
    dropped_count: int = 0

    def miss(self, put_id: bytes) -> None:
        """Record that a listed put does not exist or is damaged."""
        self.missing_count += 1
        if len(self.missing_put_ids) < _MOST_LISTED:
            self.missing_put_ids.append(put_id)


def cells_besides(put_id: bytes, put: StoredPut, parts: Sequence[PutCells]) -> list[PutCells]:
    """Return the cells of a put that `parts` does not include."""
    kept: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {
        name: np.zeros(put.row_count, np.bool_) for name, column in put.columns.items() if column is not None
    }
    for part in parts:
        rows = part.rows_of(put.row_count)
        for name in part.field_names or kept:
            if name in kept:
                kept[name][rows] = True
    alike: dict[bytes, list[str]] = {}
    for name, mask in kept.items():
        if not mask.all():
            alike.setdefault(mask.tobytes(), []).append(name)
    return [
        PutCells(put_id=put_id, field_names=tuple(names), rows=np.flatnonzero(~kept[names[0]]))
        for names in alike.values()
    ]


# Preserving puts beyond the process


def check_sound(put_ids: Iterable[bytes], damaged: Mapping[bytes, str], storage_id: str) -> None:
    """Check that none of the puts is damaged.

    Raises:
        DataLossError: some puts are damaged. The error lists the damaged puts.
    """
    lost = [put_id for put_id in put_ids if put_id in damaged] if damaged else []
    if lost:
        raise lost_error(lost, damaged[lost[0]], storage_id)


def lost_error(put_ids: Sequence[bytes], reason: str, storage_id: str) -> DataLossError:
    """Return the error to raise when damaged puts are read. `reason` describes the damage to the first put."""
    names = ", ".join(put_id.hex() for put_id in put_ids[:_MOST_NAMED])
    more = f" and {len(put_ids) - _MOST_NAMED} more" if len(put_ids) > _MOST_NAMED else ""
    return DataLossError(
        f"storage service {storage_id!r} has lost the bytes of put {names}{more}: {reason}; put the data again, or "
        "clear the samples",
        metadata={"storage_id": storage_id, "put_ids": ",".join(put_id.hex() for put_id in put_ids[:_MOST_LISTED])},
    )


class Backing(Generic[SourceT]):
    """Base class of `PutJournal` (disk) and `Mirror` (other nodes), which preserve an engine's puts beyond its process.

    The base class itself preserves nothing. Instances are confined to the engine's event loop.

    Args:
        store: store for the bytes of all puts except those in shared memory.

    Attributes:
        store: store for the bytes of all puts except those in shared memory.
        damaged: reason why the bytes of each damaged put are lost, by put id. Puts that have not been verified yet are
            not listed, but may also be damaged.
        may_fetch: function that returns whether there is enough memory to fetch puts that no reader has requested.
        fetch_error: reason why the last fetch failed.
        on_recovered: function called with recovered puts, which it adds to the engine. The puts come from an earlier
            process or a lost engine.
        on_fetched: function called with the record and the bytes of each fetched put. The callback stores the bytes and
            returns the put, or None if all cells of the put were freed.
        on_looked_at: function called with each recovered put after it has been verified.
        kept_puts: function that returns all puts of the engine as stored (unpacked or packed).
        is_volatile: whether puts are lost when the process ends.
    """

    is_volatile: ClassVar[bool] = True

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.on_recovered: Callable[[Mapping[bytes, RecoveredPut | PackedPut]], None] = lambda _: None
        self.on_fetched: Callable[[PutStored, memoryview], StoredPut | None] = lambda *_: None
        self.on_looked_at: Callable[[bytes], None] = lambda _: None
        self.kept_puts: Callable[[], Iterator[tuple[bytes, AnyPut]]] = lambda: iter(())
        self.damaged: dict[bytes, str] = {}
        self.may_fetch: Callable[[], bool] = lambda: True
        self.fetch_error = ""
        # Puts that must be fetched or verified before they can be read, and where to fetch their bytes.
        self._unfetched: dict[bytes, SourceT] = {}
        self._to_scrub: Mapping[bytes, object] = self._unfetched  # puts to fetch even if no reader requests them
        self._to_free: dict[bytes, None] = {}  # puts to fetch first, because some of their cells must be freed
        self._has_to_free = asyncio.Event()
        self._fetching: dict[SourceT, asyncio.Task[None]] = {}

    async def flush(self, pending: PendingPut, deadline: float | None) -> None:
        """Wait until a put's bytes would survive a crash of this process. Call this before finishing the put.

        Args:
            pending: put whose bytes have all been written.
            deadline: time on the engine's clock at which to stop waiting. None means no deadline.
        """

    def record(self, put_id: bytes, put: StoredPut) -> None:
        """Record that a flushed put is complete."""

    def pack(self, put_id: bytes, put: StoredPut) -> PackedPut | None:
        """Return the packed form of a committed put, or None if the put must stay unpacked."""
        return put.packed()

    def unpack(self, put_id: bytes, packed: PackedPut) -> None:
        """Record that the engine has unpacked a put."""

    def delete(self, put_id: bytes, blob: Blob) -> None:
        """Remove a put, and release its blob as soon as it is safe to do so."""
        blob.release()

    def may_compact(self, put_id: bytes) -> bool:
        """Return whether a put can currently be moved to a smaller blob."""
        return put_id not in self.damaged and put_id not in self._unfetched

    def move(self, put_id: bytes, old: Blob, moved: StoredPut) -> None:
        """Record that a put was compacted and flushed, and release its old blob as soon as it is safe to do so."""
        old.release()

    def load(self, put_id: bytes, blob: Blob) -> StoredPut:
        """Load a recovered put.

        Raises:
            UnavailableError: the put must first be fetched from the mirror.
        """
        raise UnavailableError(f"put {put_id.hex()} is being fetched from the mirror; try again")

    def record_of(self, put_id: bytes) -> PutStored:
        """Return the record of a put that is stored in a file.

        Raises:
            TypeError: this backing stores puts in memory.
        """
        raise TypeError(f"put {put_id.hex()} has no record")

    def spill(self, put_id: bytes) -> bool:
        """Mark a put as stored only in this backing. Return False if this is not possible."""
        return False

    def partition_of(self, put_id: bytes) -> str | None:
        """Return a put's partition if only the put's id and owner are in memory; otherwise, return None."""
        return None

    def stat(self, spilled_bytes: int = 0) -> MirrorStatus | None:
        """Return the mirror's status, including `spilled_bytes`, or None if this backing is not a mirror."""
        return None

    # Unfetched puts

    def is_unfetched(self, put_id: bytes) -> bool:
        """Return whether `check` must be called to load a put's tables before they are used."""
        return put_id in self._unfetched

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Load and verify the bytes of recovered puts before they are read.

        Raises:
            UnavailableError: the bytes of a put are temporarily unavailable.
        """
        if not self._unfetched:
            return
        for _ in range(2):
            sources = {self._unfetched[put_id]: put_id for put_id in put_ids if put_id in self._unfetched}
            if not sources:
                return
            was_under_way = not self._fetching.keys().isdisjoint(sources)
            await asyncio.wait([self._start_fetch(put_id, source) for source, put_id in sources.items()])
            if not was_under_way:  # otherwise retry: the fetch in progress may have missed a recently spilled put
                break
        for put_id in put_ids:
            if put_id in self._unfetched:
                raise UnavailableError(f"put {put_id.hex()} cannot be read now ({self.fetch_error}); try again")

    async def scrub(self) -> None:
        """Load and verify all recovered puts at a limited rate.

        Puts with cells to free are loaded first and without pauses.
        """
        while waiting := self._to_free or self._to_scrub:
            self._has_to_free.clear()
            put_id = next(iter(waiting))
            pause_seconds = _RETRY_SECONDS
            if self._to_free or self.may_fetch():
                source = self._unfetched[put_id]
                await asyncio.wait([self._start_fetch(put_id, source)])
                if put_id not in self._unfetched:
                    pause_seconds = 0.0 if self._to_free else self._pause_after(source)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._has_to_free.wait()

    def _pause_after(self, source: SourceT) -> float:
        return _LEAST_PAUSE_SECONDS

    def fetch_to_free(self, put_id: bytes) -> None:
        """Schedule an unfetched put to be fetched next in the background, so that some of its cells can be freed."""
        self._to_free[put_id] = None
        self._has_to_free.set()

    def _start_fetch(self, put_id: bytes, source: SourceT) -> asyncio.Task[None]:
        task = self._fetching.get(source)
        if task is None:
            task = self._fetching[source] = asyncio.get_running_loop().create_task(self._fetch(put_id, source))
            task.add_done_callback(lambda _: self._fetching.pop(source, None))
        return task

    async def _fetch(self, put_id: bytes, source: SourceT) -> None:
        """Fetch the puts from a source. After a temporary failure, leave the puts unfetched and set `fetch_error`."""

    def _forget_unfetched(self, put_id: bytes) -> bool:
        self._to_free.pop(put_id, None)
        return self._unfetched.pop(put_id, None) is not None

    def mark_damaged(self, put_id: bytes, reason: str) -> None:
        """Record that a put is damaged and cannot be read."""
        if put_id not in self.damaged:
            _log.error(LogMessage("found a damaged put", put_id=put_id, reason=reason))
            self.damaged[put_id] = reason

    def clear_damage(self, put_id: bytes) -> bool:
        """Remove a put from the sets of damaged and unfetched puts. Return whether it was damaged."""
        self._forget_unfetched(put_id)
        return self.damaged.pop(put_id, None) is not None

    async def close(self) -> None:
        """Stop all background tasks."""


class ColumnRecord(NamedTuple):
    """A column's record: the spec, the total size of the values in bytes, and the index of its row set in the put."""

    name: str
    dtype: str
    layout: str
    row_shape: tuple[int, ...]
    encoding: str
    value_bytes: int
    row_set: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStored:
    """Record of a complete put, or of the columns and rows that remain in a compacted put.

    Attributes:
        put_id: id of the put.
        partition_id: partition of the put.
        row_count: original number of rows.
        columns: the remaining columns.
        row_sets: distinct row sets of the columns, as ascending row indices. None means all rows.
        freed_names: names of the freed columns.
        size_bytes: size of the tables and values in bytes.
        segment: number of the file that contains the tables and values, or 0 if they follow the record in the journal.
        checksum: XXH3 checksum of the file's contents.
        for_existing_rows: whether the put may only add columns to existing samples, not create samples.
        owner: controller that owns the put.
    """

    put_id: bytes
    partition_id: str
    row_count: int
    columns: tuple[ColumnRecord, ...]
    row_sets: tuple[Rows | None, ...]
    size_bytes: int
    freed_names: tuple[str, ...] = ()
    segment: int = 0
    checksum: int = 0
    for_existing_rows: bool = False
    owner: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutDropped:
    """Record that a put was dropped."""

    put_id: bytes


PutRecord: TypeAlias = PutStored | PutDropped
_KINDS: Final[dict[str, type[PutRecord]]] = {kind.__name__: kind for kind in (PutStored, PutDropped)}
_SIZE: Final = struct.Struct("<I")

EncodedPut: TypeAlias = tuple[bytes, bytes | bytearray]
"""A put's encoded record, and the values that follow the record if the put is small. Both are immutable."""


class PutLog(Protocol):
    """Interface of the log to which an engine appends changes to its puts."""

    @property
    def fatal(self) -> Callable[[str, BaseException], None]:
        """Function to call, with a message and a cause, if the log may have diverged from the state in memory."""
        ...

    def append_put(self, record: bytes, values: bytes | bytearray = b"") -> None:
        """Append a record to the log's buffer. Records become durable in order. `values` must not change afterward."""
        ...

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all records appended so far are durable."""
        ...


class PutJournal(Backing[Blob]):
    """Stores puts on disk, with records in a journal and bytes in segment files. Call `recover` before storing puts.

    Each instance is confined to the engine's event loop.

    Args:
        store: blob store of the engine.
    """

    is_volatile = False
    _log: PutLog  # set by `recover`

    def __init__(self, store: SegmentBlobs) -> None:
        super().__init__(store)
        self._store = store
        # Contains only puts that the engine stores unpacked, because a packed put already includes its record.
        self._records: dict[bytes, EncodedPut | PackedPut] = {}

    # Storing puts

    async def flush(self, pending: PendingPut, deadline: float | None = None) -> None:
        """Wait until a put's bytes would survive a crash of this process; see `StorageEngine.flush`."""
        stored = pending.require_complete()
        values = stored.values
        if values.store is not self._store:  # shared memory, which is lost with this process
            values.pin()  # if the put is aborted during the wait, its copy is freed as well
            try:
                values.copy = await self._store.allocate(stored.blob_bytes(self._store))
                values.copy.charge = 0
                pending.require_open()
            finally:
                values.unpin()
        try:
            if values.copy is not None:
                await self._store.copy(values.copy, memoryview(stored.tables()), values, stored.value_spans())
            await self._store.flush(values.copy or values)
        except OSError as error:
            raise UnavailableError(
                f"could not write the bytes of a put: {error}; put the data again", reason="DISK_FAILED"
            ) from error

    def record(self, put_id: bytes, put: StoredPut) -> None:
        """Append the record of a completed or moved put to the journal."""
        blob = put.values.copy or put.values
        if blob.store is not self._store:
            raise RuntimeError(f"put {put_id.hex()} was recorded before its bytes were flushed")
        if (packed := put.packed()) is not None:
            self._records[put_id], encoded = packed, encode_packed(put_id, packed)
        else:
            memory = b"" if blob.number else blob.memory
            values = memory if isinstance(memory, bytes | bytearray) else bytes(memory)
            self._records[put_id] = encoded = encode_put(describe_put(put_id, put)), values
        self._log.append_put(*encoded)

    def pack(self, put_id: bytes, put: StoredPut) -> PackedPut | None:
        """Return the packed form of a committed put, or None if its record is not packed."""
        kept = self._records[put_id]
        if not isinstance(kept, PackedPut) or not put.may_be_packed:
            return None
        del self._records[put_id]
        return kept

    def unpack(self, put_id: bytes, packed: PackedPut) -> None:
        """Keep the packed record of a put that was unpacked. The record still describes all rows of the put."""
        self._records[put_id] = packed

    # Dropping puts

    def delete(self, put_id: bytes, blob: Blob) -> None:
        """Record in the journal that a put was dropped. Release the put's blob when the record is durable."""
        self._records.pop(put_id, None)
        (blob.copy or blob).is_damaged = self.clear_damage(put_id)
        self._log.append_put(encode_put(PutDropped(put_id=put_id)))
        self._log.after_durable(blob.release)

    def move(self, put_id: bytes, old: Blob, moved: StoredPut) -> None:
        """Append a new record for a compacted and flushed put. Release the old blob when the record is durable."""
        try:
            self.record(put_id, moved)
        except Exception as error:  # the put has already been moved in memory
            self._log.fatal("could not persist a put that was moved", error)
            raise
        self._log.after_durable(old.release)

    def records(self) -> Iterator[bytes]:
        """Return an iterator over the current records of all puts. Any thread may use the iterator."""
        own = zip(list(self._records), list(self._records.values()), strict=True)
        packed = ((put_id, each) for put_id, each in self.kept_puts() if isinstance(each, PackedPut))
        return (
            b"".join(encode_packed(put_id, each) if isinstance(each, PackedPut) else each)
            for put_id, each in chain(own, packed)
        )

    # Recovery after a restart

    def recover(self, records: Iterable[bytes], log: PutLog) -> int:
        """Locate the bytes of recorded puts, and use `log` for all future changes.

        A put whose blob is missing is marked as damaged. Blob contents are verified later.

        Args:
            records: all records in the journal, in order.
            log: log for future records.

        Returns:
            The number of recovered puts.
        """
        self._log = log
        left = left_puts(records)
        recovered: dict[bytes, RecoveredPut | PackedPut] = {}
        for put_id, (record, encoded) in left.items():
            if (packed := _packed(record, encoded[1])) is None:
                self._records[put_id] = encoded
            else:
                recovered[put_id] = packed
        # Process the newest puts first. If the end of the journal was lost, including the record of a drop, the blob of
        # the dropped put may contain the bytes of a later put.
        puts = [
            (put_id, record, values)
            for put_id, (record, (_, values)) in reversed(left.items())
            if put_id not in recovered
        ]
        found = iter(
            self._store.recover([(record.segment, record.size_bytes) for _, record, _ in puts if record.segment])
        )
        for put_id, record, values in puts:
            blob = next(found) if record.segment else Blob(self._store, len(values), values)
            if blob is None:
                self.mark_damaged(put_id, f"segment {record.segment} is missing")
                blob = Blob(self._store, record.size_bytes)
            elif record.segment:
                self._unfetched[put_id] = blob
            recovered[put_id] = RecoveredPut(blob, record.owner)
        self.on_recovered(recovered)
        return len(recovered)

    def load(self, put_id: bytes, blob: Blob) -> StoredPut:
        """Load a recovered put from its record and blob."""
        put = put_of(self.record_of(put_id))
        put.place(blob, is_recovered=True)
        return put

    def record_of(self, put_id: bytes) -> PutStored:
        """Return the record of a put."""
        kept = self._records[put_id]
        record = kept if isinstance(kept, PackedPut) else decode_put(kept[0])[0]
        if not isinstance(record, PutStored):
            raise TypeError(f"record of put {put_id.hex()} is {type(record).__name__}; expected PutStored")
        return record

    def _pause_after(self, source: Blob) -> float:
        return max(source.size / _SCRUB_BYTES_PER_SECOND, _LEAST_PAUSE_SECONDS)

    async def _fetch(self, put_id: bytes, source: Blob) -> None:
        """Verify the bytes of a recovered put, and load its tables."""
        if put_id not in self._unfetched:
            return
        record, reason = self.record_of(put_id), ""
        try:
            found = await self._store.checksum(source, put_of(record).tables_bytes)
            if found != record.checksum:
                reason = f"segment {source.number} has checksum {found:016x}, expected {record.checksum:016x}"
        except OSError as error:
            if is_temporary(error):
                self.fetch_error = str(error)
                _log.warning(LogMessage("could not verify a recovered put", put_id=put_id, error=error))
                return
            reason = f"its segment cannot be read: {error}"
        if self._forget_unfetched(put_id):
            if reason:
                self.mark_damaged(put_id, reason)
            self.on_looked_at(put_id)


def encode_put(record: PutRecord) -> bytes:
    """Encode a record, prefixed with its size as a uint32. The caller must append the values of a small put."""
    encoded = codec.encode_named(record)
    return _SIZE.pack(len(encoded)) + encoded


def encode_packed(put_id: bytes, put: PackedPut) -> EncodedPut:
    """Return the record of a packed put, and the values that follow the record."""
    sizes, values = put.parts()
    before, after = _around_id(put.kind, sizes, len(values))
    return before + put_id + after, values


@lru_cache(maxsize=256)
def _around_id(kind: PutKind, sizes: bytes, size_bytes: int) -> tuple[bytes, bytes]:
    """Return a record's bytes before and after the put id. Puts of equal kind and sizes share these bytes."""
    columns = zip(kind.specs, unpack_sizes(sizes), strict=True)
    record = PutStored(
        put_id=_ANY_ID,
        partition_id=kind.partition_id,
        row_count=kind.row_count,
        columns=tuple(_column_record(spec, value_bytes, 0) for spec, value_bytes in columns),
        row_sets=(None,),
        size_bytes=size_bytes,
        for_existing_rows=kind.for_existing_rows,
        owner=kind.owner,
    )
    before, _, after = encode_put(record).partition(_ANY_ID)
    return before, after


def _packed(record: PutStored, values: bytes | bytearray) -> PackedPut | None:
    """Return the packed form of a put, or None if its record lacks the values or some of the original rows."""
    if record.segment or record.freed_names or any(rows is not None for rows in record.row_sets):
        return None
    return packed_put(
        [(_spec_of(column), column.value_bytes) for column in record.columns],
        bytes(values),
        record.row_count,
        record.partition_id,
        for_existing_rows=record.for_existing_rows,
        owner=record.owner,
    )


def decode_put(data: bytes) -> tuple[PutRecord, EncodedPut]:
    """Decode a record. Return the record, its encoded bytes and the values that follow it.

    Raises:
        NewerVersionError: the record has an unknown kind or field.
        ValueError, TypeError, KeyError, struct.error: the data is not a valid record.
    """
    end = _SIZE.size + _SIZE.unpack_from(data)[0]
    return codec.decode_named(_KINDS, *codec.unpack(data[_SIZE.size : end])), (data[:end], data[end:])


def left_puts(records: Iterable[bytes]) -> dict[bytes, tuple[PutStored, EncodedPut]]:
    """Apply all records, and return the remaining puts in the order of each put's last record."""
    left: dict[bytes, tuple[PutStored, EncodedPut]] = {}
    for data in records:
        record, encoded = decode_put(data)
        left.pop(record.put_id, None)
        if isinstance(record, PutStored):
            left[record.put_id] = record, encoded
    return left


def describe_put(put_id: bytes, put: StoredPut) -> PutStored:
    """Return a record of a put's current state."""
    blob = put.values.copy or put.values
    row_sets = put.row_sets()
    return PutStored(
        put_id=put_id,
        partition_id=put.partition_id,
        row_count=put.row_count,
        columns=tuple(
            _column_record(column.spec, column.value_bytes, row_sets.index(column.row_set))
            for column in put.left_columns()
        ),
        size_bytes=blob.size,
        row_sets=tuple(row_set.rows for row_set in row_sets),
        freed_names=tuple(name for name, column in put.columns.items() if column is None),
        segment=blob.number,
        checksum=blob.checksum,
        for_existing_rows=put.for_existing_rows,
        owner=put.owner,
    )


def _column_record(spec: FieldSpec, value_bytes: int, row_set: int) -> ColumnRecord:
    layout, row_shape, encoding = spec.layout or "", spec.row_shape or (), spec.encoding or ""
    return ColumnRecord(spec.name, spec.dtype, layout, row_shape, encoding, value_bytes, row_set)


def _spec_of(column: ColumnRecord) -> FieldSpec:
    return _spec(column.name, column.dtype, column.layout, column.row_shape, column.encoding or None)


def put_of(record: PutStored) -> StoredPut:
    """Create a put from its record, without placing it in a blob."""
    row_sets = [RowSet(record.row_count if rows is None else rows.size, rows) for rows in record.row_sets]
    columns: dict[str, StoredColumn | None] = dict.fromkeys(record.freed_names)
    for column in record.columns:
        columns[column.name] = StoredColumn(_spec_of(column), row_sets[column.row_set], column.value_bytes)
    return StoredPut(
        columns,
        record.row_count,
        record.partition_id,
        for_existing_rows=record.for_existing_rows,
        owner=record.owner,
    )
