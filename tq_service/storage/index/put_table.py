"""The complete puts of an engine: their names, whether each is committed, and what keeps them beyond the process.

A put's life in its storage service:

    written -> waiting ------------- committed -> freed, row by row or whole
                 | overdue               |
                 | (asked for; dropped   | the process starts again
                 |  if it is unknown)    v
                 +------------------- recovered -- listed by its controller -> committed
                          not listed -> waiting

A controller in another process commits a put on the strength of its receipt and confirms it a short time later. So a
put that is overdue may be committed all the same, and its controller is asked before it is dropped. It must not commit
the put once it has answered that it does not know it: a receipt says when it was given, and the question from when on
receipts are valid. A put that its client puts again waits anew, with another receipt, if half of its time is over. The
controller's side, and why no put is lost: `server/puts.py`.

With a store that outlives the process (`PutJournal`):

    blob written -> (copied, flushed) -> record written down -> the put is complete
    the put is dropped -> that is written down -> when it cannot be lost any more: the blob is released

After a restart the bytes of a put are looked at before they are first read, and all of them slowly in the background. A
small put has its bytes in its record. Those of a put in shared memory are copied to a blob of the store before it is
complete, and go on being read from the shared memory as long as the process lives.
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
_KEPT_SECONDS: Final = 10.0  # after a read: it may be one of several parts, of which all are to be here at once
_LOOKED_AT: Final = 256
_MOST_NAMED: Final = 5
_MOST_LISTED: Final = 100  # the metadata of an answer has capacity for about twice as many
_SCRUB_BYTES_PER_SECOND: Final = 100e6
_LEAST_PAUSE_SECONDS: Final = 0.001
_RETRY_SECONDS: Final = 1.0
SourceT = TypeVar("SourceT", bound=Hashable)
AnyPut: TypeAlias = "StoredPut | RecoveredPut | PackedPut"
_ANY_ID: Final = bytes(16)  # comes first in a record, so that no other bytes of it are taken for it
_spec: Final = lru_cache(maxsize=1024)(FieldSpec)  # every put brings the same few


class PutState(Enum):
    """Whether a complete put is committed, as far as its storage service knows."""

    WAITING = "waiting"  # for its commit
    RECOVERED = "recovered"  # from an earlier process, which may have known that it was committed
    COMMITTED = "committed"


class Overdue(NamedTuple):
    """The question to a controller.

    Attributes:
        put_ids: puts that are overdue.
        valid_from: receipts that were given before are void from now on, those of all overdue puts among them.
    """

    put_ids: list[bytes]
    valid_from: float


class RecoveredPut(NamedTuple):
    """What is in memory of a put that was recovered or spilled, and not needed since.

    Attributes:
        values: its blob.
        owner: the controller that owns it.
        spilled_bytes: bytes of it that left memory.
    """

    values: Blob
    owner: bytes
    spilled_bytes: int = 0

    @property
    def charge(self) -> int:
        """Bytes of the quota that it takes."""
        return self.values.charge


class PutTable(Mapping[bytes, StoredPut]):
    """Puts by name, and which of them are not known to be committed.

    Recovered ones, of which many may never be asked for, are loaded when needed. They are not overdue before their
    controller has listed its puts: it may be down for long. Packed ones are unpacked for each look at them, and stay
    packed. Puts are in many small dicts, so that all can be looked at in slices while others come and go.

    Args:
        ttl_seconds: how long a put waits for its confirmation.
        clock: what that is measured with.
        backing: makes the put of a blob when it is needed.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float], backing: Backing[Any]) -> None:
        self._ttl_seconds = ttl_seconds
        self.clock = clock
        self._backing = backing
        backing.kept_puts = self._kept
        self._shards: list[dict[bytes, AnyPut]] = [{} for _ in range(_SHARDS)]
        self._owned: Counter[bytes] = Counter()  # puts by owner
        self._absent_since: dict[bytes, float] = {}  # owners that no controller is
        self._waiting: dict[bytes, float] = {}  # since when, ascending: their receipts were given until then
        self._recovered: set[bytes] = set()

    def recover(self, puts: Mapping[bytes, RecoveredPut | PackedPut]) -> None:
        """Take over puts of an earlier process."""
        for put_id, put in puts.items():
            self._shard(put_id)[put_id] = put
            self._owned[put.owner] += 1
        self._recovered.update(puts)

    def add(self, put_id: bytes, put: StoredPut) -> None:
        """Add a put, which waits for its confirmation from now on."""
        self._shard(put_id)[put_id] = put
        self._owned[put.owner] += 1
        self.wait(put_id)

    def pack(self, put_id: bytes) -> None:
        """Have a small put take less memory."""
        shard = self._shard(put_id)
        put = shard[put_id]
        if isinstance(put, StoredPut) and (packed := self._backing.pack(put_id, put)) is not None:
            shard[put_id] = packed

    def unpack(self, put_id: bytes) -> StoredPut:
        """Return a put that is about to change, which is no longer packed."""
        shard = self._shard(put_id)
        if isinstance(packed := shard[put_id], PackedPut):
            self._backing.unpack(put_id, packed)
        put = shard[put_id] = self[put_id]
        return put

    def _kept(self) -> Iterator[tuple[bytes, AnyPut]]:
        """Return all puts as they are kept now, to be read once, by any thread."""
        names = list(chain.from_iterable(self._shards))
        return zip(names, list(chain.from_iterable(map(dict.values, self._shards))), strict=True)

    def replace(self, put_id: bytes, put: StoredPut | RecoveredPut) -> StoredPut | RecoveredPut:
        """Have what is left of a put in its place, or what it is loaded from; return what was there."""
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
        """Return a put that leaves with a blob to be released."""
        if not isinstance(put, PackedPut):
            return put
        blob = Blob(self._backing.store, 0)
        blob.charge = put.charge
        return RecoveredPut(blob, put.owner)

    # Which are committed

    @property
    def uncommitted_count(self) -> int:
        """Number of puts that are not known to be committed."""
        return len(self._waiting) + len(self._recovered)

    def state_of(self, put_id: bytes) -> PutState:
        """Return the state of a put that is here."""
        if put_id in self._waiting:
            return PutState.WAITING
        return PutState.RECOVERED if put_id in self._recovered else PutState.COMMITTED

    def wait(self, put_id: bytes) -> None:
        """Have a put wait from now on."""
        self.confirm(put_id)
        self._waiting[put_id] = self.clock()

    def confirm(self, put_id: bytes) -> None:
        """Have a put wait no more: it is committed, or gone."""
        self._waiting.pop(put_id, None)
        self._recovered.discard(put_id)

    def receipt_time(self, put_id: bytes) -> float | None:
        """Return the time for a receipt of a put; None if it is committed.

        A put that is put again gets the receipt that it had. It waits anew once half of its time is over.
        """
        if self.state_of(put_id) is PutState.COMMITTED:
            return None
        if self._waiting.get(put_id, -math.inf) + self._ttl_seconds / 2 <= self.clock():
            self.wait(put_id)
        return self._waiting[put_id]

    @property
    def valid_from(self) -> float:
        """Since when receipts are valid: as the oldest put that waits and is not overdue; none of others is of use."""
        now = self.clock()
        overdue_until = now - self._ttl_seconds
        return next((since for since in self._waiting.values() if since > overdue_until), now)

    def overdue(self, owner: bytes, most: int | None = None) -> Overdue:
        """Return up to so many of an owner's puts that have waited for too long; None: all."""
        valid_from = self.valid_from
        overdue = takewhile(lambda put_id: self._waiting[put_id] < valid_from, self._waiting)
        own = (put_id for put_id in overdue if self.owner_of(put_id) == owner)
        return Overdue(list(islice(own, most)), valid_from)

    def on_answer(self, asked: Overdue, unknown: Collection[bytes]) -> list[bytes]:
        """Return the puts to be dropped, which the controller does not know; others start waiting again.

        A put that has got another receipt since stays as it is: it may be committed with that.
        """
        old = [put_id for put_id in asked.put_ids if self._waiting.get(put_id, math.inf) < asked.valid_from]
        for put_id in old:
            if put_id not in unknown:
                self.wait(put_id)
        return [put_id for put_id in old if put_id in unknown]

    # Whose they are

    def owner_of(self, put_id: bytes) -> bytes:
        """Return the controller that owns a put."""
        return self._shard(put_id)[put_id].owner

    def absent_owners(self, controllers: Collection[bytes]) -> list[bytes]:
        """Return the owners that have been none of the controllers there are for the time that a put waits.

        And at once those that are an earlier start of one of them, which kept nothing.
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
        """Yield the names of all puts, some at a time; of those that come or go meanwhile some."""
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
    """The puts of one engine that are in memory and may leave it, those used longest ago first.

    complete -> in memory -> spilled (its bytes are in the mirror alone) -> fetched when it is read -> in memory

    Args:
        clock: seconds.
        can_spill: whether any of them may leave memory.
    """

    def __init__(self, clock: Callable[[], float], *, can_spill: bool) -> None:
        self._clock = clock
        self._can_spill = can_spill
        self._kept_until: dict[bytes, float] = {}  # in the order of their last use

    def add(self, put_id: bytes) -> None:
        """Take note of a put that has come, and may leave at once."""
        if self._can_spill:
            self._kept_until[put_id] = 0.0

    def use(self, put_ids: Iterable[bytes]) -> None:
        """Take note that puts are read now or soon; those that are not in memory are fetched for it."""
        if self._can_spill:
            for put_id in put_ids:
                if self._kept_until.pop(put_id, None) is not None:
                    self._kept_until[put_id] = self._clock() + _KEPT_SECONDS

    def remove(self, put_id: bytes) -> None:
        """Forget a put, which has left memory."""
        self._kept_until.pop(put_id, None)

    def coldest(self) -> list[bytes]:
        """Return some puts that may leave, in order. Those that cannot, `put_off`."""
        now = self._clock()
        return [put_id for put_id, until in islice(self._kept_until.items(), _LOOKED_AT) if until <= now]

    def put_off(self, put_id: bytes) -> None:
        """Look at a put again after all others: it cannot leave now."""
        self._kept_until[put_id] = self._kept_until.pop(put_id)


# What a controller says of the puts it knows, in pieces


@dataclass(slots=True, eq=False)
class Reconciliation:
    """How far it is said which puts are known. From its begin to its end other calls confirm and free puts.

    Attributes:
        owner: the controller that says so.
        staying: puts that are known, or were confirmed meanwhile: whatever else is confirmed is dropped at the end.
        freed: puts that were freed meanwhile: they may be listed, and are not missing. A put that is stored later under
            the id of one of them is another put, of which the list says nothing.
        partial: puts of which cells were listed.
        put_id: the one whose cells are being listed.
        parts: what was listed of it so far.
        missing_put_ids: some of the known puts that are not here, or damaged.
        missing_count: number of all of them.
        dropped_count: number of confirmed puts that are not known, and were dropped.
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
        """Count a put that is known, but not here."""
        self.missing_count += 1
        if len(self.missing_put_ids) < _MOST_LISTED:
            self.missing_put_ids.append(put_id)


def cells_besides(put_id: bytes, put: StoredPut, parts: Sequence[PutCells]) -> list[PutCells]:
    """Return the cells of a put that are in none of the parts."""
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


# What keeps puts beyond the process


def check_sound(put_ids: Iterable[bytes], damaged: Mapping[bytes, str], storage_id: str) -> None:
    """Refuse to read puts that are damaged.

    Raises:
        DataLossError: some are; it names them.
    """
    lost = [put_id for put_id in put_ids if put_id in damaged] if damaged else []
    if lost:
        raise lost_error(lost, damaged[lost[0]], storage_id)


def lost_error(put_ids: Sequence[bytes], reason: str, storage_id: str) -> DataLossError:
    """Return the error of a read of damaged puts, the first of which is so for this reason."""
    names = ", ".join(put_id.hex() for put_id in put_ids[:_MOST_NAMED])
    more = f" and {len(put_ids) - _MOST_NAMED} more" if len(put_ids) > _MOST_NAMED else ""
    return DataLossError(
        f"storage service {storage_id!r} has lost the bytes of put {names}{more}: {reason}; put them again, or clear "
        "them",
        metadata={"storage_id": storage_id, "put_ids": ",".join(put_id.hex() for put_id in put_ids[:_MOST_LISTED])},
    )


class Backing(Generic[SourceT]):
    """What keeps the puts of an engine beyond its process: this one nothing; `PutJournal` a disk, `Mirror` other nodes.

    Confined to the engine's event loop.

    Args:
        store: where the bytes of the puts are, but for those in shared memory.

    Attributes:
        store: as above.
        damaged: puts whose bytes are lost, and why; those that were not looked at yet are not known to be.
        may_fetch: whether there is memory for puts that no reader has asked for.
        fetch_error: why the last one could not be fetched.
        on_recovered: called with puts of an earlier process, or of an engine that is gone, which the engine takes over.
        on_fetched: called with the record and the bytes of each put that was fetched, which it keeps; returns the put,
            None where nothing of it is left.
        on_looked_at: called with each recovered put once it was looked at.
        kept_puts: returns all puts of the engine as it keeps them.
        is_volatile: whether it keeps nothing.
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
        # Puts that are not to be read before they are fetched, or looked at, and what has their bytes.
        self._unfetched: dict[bytes, SourceT] = {}
        self._to_scrub: Mapping[bytes, object] = self._unfetched  # those to be fetched though nobody reads them
        self._to_free: dict[bytes, None] = {}  # those to be fetched next: cells of them are to be freed
        self._has_to_free = asyncio.Event()
        self._fetching: dict[SourceT, asyncio.Task[None]] = {}

    async def flush(self, pending: PendingPut, deadline: float | None) -> None:
        """Wait until the bytes of a put outlive this process, before it is finished.

        Args:
            pending: all of it is written.
            deadline: until when to wait, by the engine's clock; None: for as long as the caller is not cancelled.
        """

    def record(self, put_id: bytes, put: StoredPut) -> None:
        """Take note that a put is complete: it was flushed."""

    def pack(self, put_id: bytes, put: StoredPut) -> PackedPut | None:
        """Return a put that is committed as it is to be kept; None if it stays as it is."""
        return put.packed()

    def unpack(self, put_id: bytes, packed: PackedPut) -> None:
        """Take note that a put is no longer kept as it was packed."""

    def delete(self, put_id: bytes, blob: Blob) -> None:
        """Forget a put, and release its blob when it may be."""
        blob.release()

    def may_compact(self, put_id: bytes) -> bool:
        """Whether a put may be moved to a smaller blob now."""
        return put_id not in self.damaged and put_id not in self._unfetched

    def move(self, put_id: bytes, old: Blob, moved: StoredPut) -> None:
        """Take note that a put was compacted and flushed, and release its old blob when it may be."""
        old.release()

    def load(self, put_id: bytes, blob: Blob) -> StoredPut:
        """Return a recovered put.

        Raises:
            UnavailableError: it has to be fetched first.
        """
        raise UnavailableError(f"put {put_id.hex()} is being fetched from the mirror; try again")

    def spill(self, put_id: bytes) -> bool:
        """Have a put in here alone, unfetched; return whether that can be."""
        return False

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of a put that is known by name and owner alone, None for others."""
        return None

    def stat(self, spilled_bytes: int = 0) -> MirrorStatus | None:
        """Return how the mirror is, with the bytes of the puts that its engine has spilled; None: this is none."""
        return None

    # Puts that are not here until they are fetched

    def is_unfetched(self, put_id: bytes) -> bool:
        """Whether the tables of a put are not in memory until `check` has read or fetched it."""
        return put_id in self._unfetched

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Have the bytes of recovered puts here, and look at them, before they are read.

        Raises:
            UnavailableError: that cannot be done now.
        """
        if not self._unfetched:
            return
        for _ in range(2):
            sources = {self._unfetched[put_id]: put_id for put_id in put_ids if put_id in self._unfetched}
            if not sources:
                return
            was_under_way = not self._fetching.keys().isdisjoint(sources)
            await asyncio.wait([self._start_fetch(put_id, source) for source, put_id in sources.items()])
            if not was_under_way:  # else once more: such a fetch may have passed a put that was spilled since
                break
        for put_id in put_ids:
            if put_id in self._unfetched:
                raise UnavailableError(f"put {put_id.hex()} cannot be read now ({self.fetch_error}); try again")

    async def scrub(self) -> None:
        """Have the bytes of all recovered puts here, and look at them, slowly; those with cells to be freed at once."""
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
        """Have an unfetched put fetched next, in the background, since cells of it are to be freed."""
        self._to_free[put_id] = None
        self._has_to_free.set()

    def _start_fetch(self, put_id: bytes, source: SourceT) -> asyncio.Task[None]:
        task = self._fetching.get(source)
        if task is None:
            task = self._fetching[source] = asyncio.get_running_loop().create_task(self._fetch(put_id, source))
            task.add_done_callback(lambda _: self._fetching.pop(source, None))
        return task

    async def _fetch(self, put_id: bytes, source: SourceT) -> None:
        """Fetch what a source has; where that cannot be done now, it stays unfetched, and `fetch_error` says why."""

    def _forget_unfetched(self, put_id: bytes) -> bool:
        self._to_free.pop(put_id, None)
        return self._unfetched.pop(put_id, None) is not None

    def mark_damaged(self, put_id: bytes, reason: str) -> None:
        """Take note of a put that cannot be read."""
        if put_id not in self.damaged:
            _log.error(LogMessage("a put is damaged", put_id=put_id, reason=reason))
            self.damaged[put_id] = reason

    def clear_damage(self, put_id: bytes) -> bool:
        """Forget whether a put is sound; return whether it was damaged."""
        self._forget_unfetched(put_id)
        return self.damaged.pop(put_id, None) is not None

    async def close(self) -> None:
        """End what it has in the background."""


class ColumnRecord(NamedTuple):
    """A column of a put: its spec, the bytes of all its values, and which of the sets of rows of the put it has."""

    name: str
    dtype: str
    layout: str
    row_shape: tuple[int, ...]
    encoding: str
    value_bytes: int
    row_set: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStored:
    """A put is complete, or this is what is left of it from now on.

    Attributes:
        put_id: its name.
        partition_id: the partition it is for.
        row_count: number of rows that it was put with.
        columns: those that are left.
        row_sets: the sets of rows that its columns have in memory, ascending; None: all rows.
        freed_names: names of the columns that are gone.
        size_bytes: size of its tables and values.
        segment: number of the file with these; 0: they follow the record, and nothing else does.
        checksum: XXH3 of what is in the file.
        for_existing_rows: whether no new samples may be made of it.
        owner: the controller that owns it.
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


class PutJournal(Backing[Blob]):
    """Keeps puts on a disk: their records in a journal, their bytes in its store. It takes none before `recover`.

    Confined to the engine's event loop.

    Args:
        store: the engine's.
    """

    is_volatile = False
    _log: PutLog  # from `recover` on

    def __init__(self, store: SegmentBlobs) -> None:
        super().__init__(store)
        self._store = store
        # Of puts that the engine does not keep packed: a packed put says all that its record does.
        self._records: dict[bytes, EncodedPut | PackedPut] = {}

    # Taking puts

    async def flush(self, pending: PendingPut, deadline: float | None = None) -> None:
        """Wait until the bytes of a put are where they outlive this process; see `StorageEngine.flush`."""
        stored = pending.require_complete()
        values = stored.values
        if values.store is not self._store:  # shared memory, which no other process will find
            values.pin()  # a put that is aborted meanwhile frees its copy, too
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
                f"the bytes of a put could not be written: {error}; put it again", reason="DISK_FAILED"
            ) from error

    def record(self, put_id: bytes, put: StoredPut) -> None:
        """Write down that a put is complete, or was moved."""
        blob = put.values.copy or put.values
        if blob.store is not self._store:
            raise RuntimeError(f"put {put_id.hex()} was finished before it was flushed")
        if (packed := put.packed()) is not None:
            self._records[put_id], encoded = packed, encode_packed(put_id, packed)
        else:
            memory = b"" if blob.number else blob.memory
            values = memory if isinstance(memory, bytes | bytearray) else bytes(memory)
            self._records[put_id] = encoded = encode_put(describe_put(put_id, put)), values
        self._log.append_put(*encoded)

    def pack(self, put_id: bytes, put: StoredPut) -> PackedPut | None:
        """Return a committed put as it was recorded, if it was packed for that."""
        kept = self._records[put_id]
        if not isinstance(kept, PackedPut) or not put.may_be_packed:
            return None
        del self._records[put_id]
        return kept

    def unpack(self, put_id: bytes, packed: PackedPut) -> None:
        """Keep the record of a put, which goes on being that of the whole put."""
        self._records[put_id] = packed

    # Giving them back

    def delete(self, put_id: bytes, blob: Blob) -> None:
        """Write down that a put is gone, and release its blob once that cannot be lost any more."""
        self._records.pop(put_id, None)
        (blob.copy or blob).is_damaged = self.clear_damage(put_id)
        self._log.append_put(encode_put(PutDropped(put_id=put_id)))
        self._log.after_durable(blob.release)

    def move(self, put_id: bytes, old: Blob, moved: StoredPut) -> None:
        """Write down a put that was compacted and flushed, and release its old blob once that cannot be lost."""
        try:
            self.record(put_id, moved)
        except Exception as error:  # the put is in its new place already
            self._log.fatal("a put was moved and could not be written down", error)
            raise
        self._log.after_durable(old.release)

    def records(self) -> Iterator[bytes]:
        """Return what is written down of each put now, to be read once, by any thread."""
        own = zip(list(self._records), list(self._records.values()), strict=True)
        packed = ((put_id, each) for put_id, each in self.kept_puts() if isinstance(each, PackedPut))
        return (
            b"".join(encode_packed(put_id, each) if isinstance(each, PackedPut) else each)
            for put_id, each in chain(own, packed)
        )

    # After a restart

    def recover(self, records: Iterable[bytes], log: PutLog) -> int:
        """Find the bytes of puts that were written down, and write down what becomes of puts from now on.

        A put whose blob is missing is damaged. What is in the blobs is not looked at yet.

        Args:
            records: all that were written down, in order.
            log: takes those to come.

        Returns:
            How many puts there are.
        """
        self._log = log
        left = left_puts(records)
        recovered: dict[bytes, RecoveredPut | PackedPut] = {}
        for put_id, (record, encoded) in left.items():
            if (packed := _packed(record, encoded[1])) is None:
                self._records[put_id] = encoded
            else:
                recovered[put_id] = packed
        # Newest first: where the end of a put was lost with a part of the journal, its blob may have the bytes of a
        # later one.
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
        """Return a recovered put."""
        put = put_of(self._record_of(put_id))
        put.place(blob, is_recovered=True)
        return put

    def _record_of(self, put_id: bytes) -> PutStored:
        kept = self._records[put_id]
        record = kept if isinstance(kept, PackedPut) else decode_put(kept[0])[0]
        if not isinstance(record, PutStored):
            raise TypeError(f"put {put_id.hex()} was written down as {type(record).__name__}")
        return record

    def _pause_after(self, source: Blob) -> float:
        return max(source.size / _SCRUB_BYTES_PER_SECOND, _LEAST_PAUSE_SECONDS)

    async def _fetch(self, put_id: bytes, source: Blob) -> None:
        """Look at the bytes of a recovered put, and have its tables in memory."""
        if put_id not in self._unfetched:
            return
        record, reason = self._record_of(put_id), ""
        try:
            found = await self._store.checksum(source, put_of(record).tables_bytes)
            if found != record.checksum:
                reason = f"segment {source.number} has checksum {found:016x}, expected {record.checksum:016x}"
        except OSError as error:
            if is_temporary(error):
                self.fetch_error = str(error)
                _log.warning(LogMessage("a recovered put cannot be looked at now", put_id=put_id, error=error))
                return
            reason = f"its segment cannot be read: {error}"
        if self._forget_unfetched(put_id):
            if reason:
                self.mark_damaged(put_id, reason)
            self.on_looked_at(put_id)


def encode_put(record: PutRecord) -> bytes:
    """Return the bytes of a record: its size (uint32) and the record. The values of a small put are to follow."""
    encoded = codec.encode_named(record)
    return _SIZE.pack(len(encoded)) + encoded


def encode_packed(put_id: bytes, put: PackedPut) -> EncodedPut:
    """Return the record of a packed put, and the values that follow it."""
    sizes, values = put.parts()
    before, after = _around_id(put.kind, sizes, len(values))
    return before + put_id + after, values


@lru_cache(maxsize=256)
def _around_id(kind: PutKind, sizes: bytes, size_bytes: int) -> tuple[bytes, bytes]:
    """Return what is before and after the name of a put in its record, which puts of one kind and size share."""
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
    """Return a put that was written down whole, with its values; None for others."""
    if record.segment or record.freed_names or record.row_sets != (None,):
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


def describe_put(put_id: bytes, put: StoredPut) -> PutStored:
    """Return the record of a put as it is now."""
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
    """Return the put of a record, which is not placed yet."""
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
