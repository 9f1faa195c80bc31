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
the put once it has answered that it does not know it: receipts are numbered, and the question says from which number on
they are valid. A put that is asked for again by its client gets another receipt then. The controller's side, and why
no put is lost: `server/puts.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile
from typing import Final, NamedTuple

from tq_service.log_message import LogMessage
from tq_service.schema import CONTROLLER_NAME_BYTES
from tq_service.storage.blobs.base import Blob
from tq_service.storage.index.put import PendingPut, StoredPut

_log = logging.getLogger(__name__)
_SHARDS: Final = 1024


class PutState(Enum):
    """Whether a complete put is committed, as far as its storage service knows."""

    WAITING = "waiting"  # for its commit
    RECOVERED = "recovered"  # from an earlier process, which may have known that it was committed
    COMMITTED = "committed"


class _Waiting(NamedTuple):
    """Until when a put waits, by the clock, and the number of its receipt."""

    until: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """The question to a controller.

    Attributes:
        put_ids: puts that are overdue.
        receipts_from: receipts with lower numbers are void from now on, those of all overdue puts among them.
    """

    put_ids: list[bytes]
    receipts_from: int


class UncommittedPuts:
    """The puts of one controller that are not known to be committed.

    Recovered ones are not overdue before the controller has listed its puts: it may be down for long.

    Args:
        ttl_seconds: how long a put waits.
        clock: measures that.

    Attributes:
        next_number: that of the next receipt.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._waiting: dict[bytes, _Waiting] = {}  # in the order of their times and numbers
        self._recovered: set[bytes] = set()
        self.next_number = 0
        self._valid_from = 0  # the controller is told to take no receipts with lower numbers

    def __len__(self) -> int:
        return len(self._waiting) + len(self._recovered)

    @property
    def oldest_number(self) -> int:
        """The number of the oldest receipt of a put that waits."""
        return next((each.number for each in self._waiting.values()), self.next_number)

    def state_of(self, put_id: bytes) -> PutState:
        """Return the state of a put of this controller."""
        if put_id in self._waiting:
            return PutState.WAITING
        return PutState.RECOVERED if put_id in self._recovered else PutState.COMMITTED

    def wait(self, put_id: bytes) -> None:
        """Have a put wait from now on, with another receipt."""
        self.remove(put_id)
        self._waiting[put_id] = _Waiting(self._clock() + self._ttl_seconds, self.next_number)
        self.next_number += 1

    def remove(self, put_id: bytes) -> None:
        """Have a put wait no more: it is committed, or gone."""
        self._waiting.pop(put_id, None)
        self._recovered.discard(put_id)

    def recover(self, put_id: bytes) -> None:
        """Take note of a recovered put."""
        self._recovered.add(put_id)

    def receipt_number(self, put_id: bytes) -> int | None:
        """Return the number for a receipt of a put, None if it is committed.

        If the one that it had is void, it waits anew, with another number.
        """
        state = self.state_of(put_id)
        if state is PutState.COMMITTED:
            return None
        if state is PutState.RECOVERED or self._waiting[put_id].number < self._valid_from:
            self.wait(put_id)
        return self._waiting[put_id].number

    def overdue(self, most: int | None = None) -> Overdue:
        """Return up to so many of the puts that have waited for too long (None: all), whose receipts are void now."""
        now = self._clock()
        valid = (each.number for each in self._waiting.values() if each.until > now)
        self._valid_from = next(valid, self.next_number)
        overdue = takewhile(lambda put_id: self._waiting[put_id].until <= now, self._waiting)
        return Overdue(put_ids=list(islice(overdue, most)), receipts_from=self._valid_from)

    def on_answer(self, asked: Overdue, unknown: Collection[bytes]) -> list[bytes]:
        """Return the puts to be dropped, which the controller does not know; other ones that were asked for wait anew.

        A put that has got another receipt since stays as it is: it may be committed with that.
        """
        old = [
            put_id
            for put_id in asked.put_ids
            if put_id in self._waiting and self._waiting[put_id].number < asked.receipts_from
        ]
        for put_id in old:
            if put_id not in unknown:
                self.wait(put_id)
        return [put_id for put_id in old if put_id in unknown]


class RecoveredPut(NamedTuple):
    """What is in memory of a put that was recovered or unloaded, and not needed since: its blob and its owner."""

    values: Blob
    owner: bytes


class PutTable(Mapping[bytes, StoredPut]):
    """Puts by name; recovered ones, of which many may never be asked for, are loaded when needed.

    They are in many small dicts, so that all can be looked at in slices while others come and go.

    Args:
        ttl_seconds: how long a put waits for its confirmation.
        clock: what that is measured with.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._shards: list[dict[bytes, StoredPut | RecoveredPut]] = [{} for _ in range(_SHARDS)]
        self._count = 0
        self._load: Callable[[bytes, Blob], StoredPut] | None = None
        self._uncommitted: dict[bytes, UncommittedPuts] = {}  # by owner
        self._absent_since: dict[bytes, float] = {}  # owners that no controller is

    def recover(self, puts: Mapping[bytes, RecoveredPut], load: Callable[[bytes, Blob], StoredPut]) -> None:
        """Take over puts of an earlier process.

        Args:
            puts: their blobs and owners.
            load: makes the put of a blob when it is needed.
        """
        self.load_with(load)
        for put_id, put in puts.items():
            self._shard(put_id)[put_id] = put
            self.uncommitted(put.owner).recover(put_id)
        self._count = len(puts)

    def load_with(self, load: Callable[[bytes, Blob], StoredPut]) -> None:
        """Make puts of blobs with a function when they are needed."""
        self._load = load

    def unload(self, put_id: bytes, values: Blob) -> None:
        """Have a blob in the place of a put, until it is loaded or replaced."""
        shard = self._shard(put_id)
        shard[put_id] = RecoveredPut(values, shard[put_id].owner)

    def add(self, put_id: bytes, put: StoredPut) -> None:
        """Add a put, which waits for its confirmation from now on."""
        self._shard(put_id)[put_id] = put
        self._count += 1
        self.uncommitted(put.owner).wait(put_id)

    def replace(self, put_id: bytes, put: StoredPut) -> None:
        """Have what is left of a put in its place."""
        self._shard(put_id)[put_id] = put

    def pop(self, put_id: bytes) -> Blob:
        """Remove a put and return the blob of its values."""
        self.uncommitted(self.owner_of(put_id)).remove(put_id)
        self._count -= 1
        return self._shard(put_id).pop(put_id).values

    def owner_of(self, put_id: bytes) -> bytes:
        """Return the controller that owns a put."""
        return self._shard(put_id)[put_id].owner

    def state_of(self, put_id: bytes) -> PutState:
        """Return the state of a put that is here."""
        owner = self.owner_of(put_id)
        return self._uncommitted[owner].state_of(put_id) if owner in self._uncommitted else PutState.COMMITTED

    def uncommitted(self, owner: bytes) -> UncommittedPuts:
        """Return the puts of an owner that are not known to be committed."""
        if owner not in self._uncommitted:
            self._uncommitted[owner] = UncommittedPuts(self._ttl_seconds, self._clock)
        return self._uncommitted[owner]

    @property
    def uncommitted_count(self) -> int:
        """Number of puts that are not known to be committed."""
        return sum(map(len, self._uncommitted.values()))

    def absent_owners(self, controllers: Collection[bytes]) -> list[bytes]:
        """Return the owners that have been none of the controllers there are for the time that a put waits.

        And at once those that are an earlier start of one of them, which kept nothing.
        """
        now = self._clock()
        names = {controller[:CONTROLLER_NAME_BYTES] for controller in controllers}
        absent = (owner for owner in self._uncommitted if owner not in controllers)
        self._absent_since = {owner: self._absent_since.get(owner, now) for owner in absent}
        return [
            owner
            for owner, since in self._absent_since.items()
            if since + self._ttl_seconds <= now or owner[:CONTROLLER_NAME_BYTES] in names
        ]

    def remove_owner(self, owner: bytes) -> None:
        """Forget an owner, unless puts of it wait: they came while the others were dropped, and go the next time."""
        if not self.uncommitted(owner):
            del self._uncommitted[owner]

    def slices(self) -> Iterator[list[bytes]]:
        """Yield the names of all puts, some at a time; of those that come or go meanwhile some."""
        for shard in self._shards:
            yield list(shard)

    def __getitem__(self, put_id: bytes) -> StoredPut:
        shard = self._shard(put_id)
        put = shard[put_id]
        if isinstance(put, RecoveredPut):
            if self._load is None:
                raise KeyError(put_id)
            put = shard[put_id] = self._load(put_id, put.values)
        return put

    def __contains__(self, put_id: object) -> bool:
        return put_id in self._shard(put_id)

    def __iter__(self) -> Iterator[bytes]:
        for shard in self._shards:
            yield from shard

    def __len__(self) -> int:
        return self._count

    def _shard(self, put_id: object) -> dict[bytes, StoredPut | RecoveredPut]:
        return self._shards[hash(put_id) & (_SHARDS - 1)]


class Backing:
    """What keeps the puts of an engine beyond its process: this one nothing; `PutJournal` a disk, `Mirror` other nodes.

    Confined to the engine's event loop.

    Attributes:
        damaged: puts whose bytes are lost, and why; those that were not looked at yet are not known to be.
    """

    def __init__(self) -> None:
        self.damaged: dict[bytes, str] = {}

    async def flush(self, pending: PendingPut, deadline: float | None) -> None:
        """Wait until the bytes of a put outlive this process, before it is finished.

        Args:
            pending: all of it is written.
            deadline: until when to wait, by the engine's clock; None: for as long as the caller is not cancelled.
        """

    def record(self, put_id: bytes, put: StoredPut, checksum: int | None) -> None:
        """Take note that a put is complete: it was flushed."""

    def delete(self, put_id: bytes, blob: Blob) -> None:
        """Forget a put, and release its blob when it may be."""
        blob.release()

    def may_compact(self, put_id: bytes) -> bool:
        """Whether a put may be moved to a smaller blob now."""
        return put_id not in self.damaged

    def move(self, put_id: bytes, old: Blob, moved: StoredPut, checksum: int | None) -> None:
        """Take note that a put was compacted and flushed, and release its old blob when it may be."""
        old.release()

    def is_unfetched(self, put_id: bytes) -> bool:
        """Whether the tables of a put are not in memory until `check` has read or fetched it."""
        return False

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of a put that is known by name and owner alone, None for others."""
        return None

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Have the bytes of recovered puts here, and look at them, before they are read.

        Raises:
            UnavailableError: that cannot be done now.
        """

    def fetch_to_free(self, put_id: bytes) -> None:
        """Have an unfetched put checked soon, in the background, since cells of it are to be freed."""

    async def scrub(self) -> None:
        """Have the bytes of all recovered puts here, and look at them, slowly."""

    def mark_damaged(self, put_id: bytes, reason: str) -> None:
        """Take note of a put that cannot be read."""
        if put_id not in self.damaged:
            _log.error(LogMessage("a put is damaged", put_id=put_id, reason=reason))
            self.damaged[put_id] = reason

    def clear_damage(self, put_id: bytes) -> bool:
        """Forget whether a put is sound; return whether it was damaged."""
        return self.damaged.pop(put_id, None) is not None

    async def close(self) -> None:
        """End what it has in the background."""
