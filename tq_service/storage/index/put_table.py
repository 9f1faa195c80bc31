"""The complete puts of an engine by name, and which of them wait for the confirmation that they are committed.

    waiting -> (overdue, asked for) -> confirmed
       |              |
       |        dropped where the controller does not know it
    confirmed

A controller in another process commits a put on the strength of its receipt and confirms it a short time later. So a
put that is overdue may be committed all the same, and its controller is asked before it is dropped. It must not commit
the put once it has said that it does not know it: receipts are numbered, and the controller learns in the same call
from which number on they are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Final, NamedTuple

from tq_service.schema import CONTROLLER_NAME_BYTES
from tq_service.storage.blobs.base import Blob
from tq_service.storage.index.put import StoredPut

_SHARDS: Final = 1024
_NO_RECEIPT: Final = -1


class _Waiting(NamedTuple):
    """Until when a put waits, by the clock, and the number of its receipt."""

    until: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """What a controller is asked.

    Attributes:
        numbers: the puts that are overdue, and the number of the receipt of each.
        receipts_from: receipts with lower numbers are void from now on, those of these puts among them.
    """

    numbers: dict[bytes, int]
    receipts_from: int


class Confirmations:
    """Puts that are not confirmed: new ones, and recovered ones of which it is not known whether they were.

    Those of the second kind are not overdue before it is known which of them were: their controller may be down for
    long.

    Args:
        ttl_seconds: how long a put waits.
        clock: what that is measured with.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._waiting: dict[bytes, _Waiting] = {}  # in the order of their times, and of their receipts' numbers
        self._recovered: dict[bytes, None] = {}
        self._next_number = 0
        self._valid_from = 0  # the controller takes no receipts with lower numbers

    @property
    def waiting_count(self) -> int:
        """Number of puts that are not known to be confirmed."""
        return len(self._waiting) + len(self._recovered)

    def is_waiting(self, put_id: bytes) -> bool:
        """Whether a put was never confirmed."""
        return put_id in self._waiting

    def is_recovered(self, put_id: bytes) -> bool:
        """Whether a put was recovered, and it is not known yet whether it was confirmed."""
        return put_id in self._recovered

    def begin(self, put_id: bytes, number: int = _NO_RECEIPT) -> None:
        """Have a put wait from now on."""
        self.forget(put_id)
        self._waiting[put_id] = _Waiting(self._clock() + self._ttl_seconds, number)

    def forget(self, put_id: bytes) -> None:
        """Have a put wait no more: it is confirmed, or gone."""
        self._waiting.pop(put_id, None)
        self._recovered.pop(put_id, None)

    def receipt_number(self, put_id: bytes) -> int | None:
        """Return the number for a receipt of a put, None where it is confirmed.

        A put has one valid receipt at a time, lest it be committed with one and, when it is freed, with the other.
        Where that is void it gets another number, and its time begins again.
        """
        if not (self.is_waiting(put_id) or self.is_recovered(put_id)):
            return None
        if not self.is_waiting(put_id) or self._waiting[put_id].number < self._valid_from:
            self.begin(put_id, self._next_number)
            self._next_number += 1
        return self._waiting[put_id].number

    def void_receipts(self) -> None:
        """Take note that all receipts so far are void."""
        self._valid_from = self._next_number

    def overdue(self, most: int | None = None) -> Overdue:
        """Return up to so many of the puts that have waited for too long; None: all of them."""
        now = self._clock()
        valid = (each.number for each in self._waiting.values() if each.until > now and each.number >= self._valid_from)
        return Overdue(
            numbers={put_id: self._waiting[put_id].number for put_id in islice(self._overdue(now), most)},
            receipts_from=next(valid, self._next_number),
        )

    def overdue_puts(self) -> Iterator[bytes]:
        """Yield the puts that have waited for too long, for as long as none comes or goes."""
        return self._overdue(self._clock())

    def _overdue(self, now: float) -> Iterator[bytes]:
        return (put_id for put_id, _ in takewhile(lambda item: item[1].until <= now, self._waiting.items()))

    def on_answer(self, asked: Overdue, unknown: Collection[bytes], undecided: Collection[bytes]) -> Iterator[bytes]:
        """Take note of what the controller does not know of overdue puts, and yield those that are to be dropped.

        A put that has got another receipt after it was asked for stays: that may be committed.
        """
        self._valid_from = max(self._valid_from, asked.receipts_from)
        for put_id, number in asked.numbers.items():
            if put_id not in self._waiting or self._waiting[put_id].number != number:
                continue
            if put_id in unknown:
                yield put_id
            elif put_id in undecided:
                self.begin(put_id)

    def add_recovered(self, put_id: bytes) -> None:
        """Take note of a recovered put."""
        self._recovered[put_id] = None


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
        self._confirmations: dict[bytes, Confirmations] = {}  # by owner
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
            self.confirmations(put.owner).add_recovered(put_id)
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
        self.confirmations_of(put_id).begin(put_id)

    def replace(self, put_id: bytes, put: StoredPut) -> None:
        """Have what is left of a put in its place."""
        self._shard(put_id)[put_id] = put

    def pop(self, put_id: bytes) -> Blob:
        """Remove a put and return the blob of its values."""
        self.confirmations_of(put_id).forget(put_id)
        self._count -= 1
        return self._shard(put_id).pop(put_id).values

    def owner_of(self, put_id: bytes) -> bytes:
        """Return the controller that owns a put."""
        return self._shard(put_id)[put_id].owner

    def confirmations_of(self, put_id: bytes) -> Confirmations:
        """Return those of the owner of a put."""
        return self.confirmations(self.owner_of(put_id))

    def confirmations(self, owner: bytes) -> Confirmations:
        """Return which puts of an owner wait."""
        if owner not in self._confirmations:
            self._confirmations[owner] = Confirmations(self._ttl_seconds, self._clock)
        return self._confirmations[owner]

    @property
    def waiting_count(self) -> int:
        """Number of puts that are not known to be confirmed."""
        return sum(each.waiting_count for each in self._confirmations.values())

    def overdue(self, most: int) -> list[bytes]:
        """Return up to so many puts, of whichever owners, that have waited for too long."""
        overdue = chain.from_iterable(each.overdue_puts() for each in self._confirmations.values())
        return list(islice(overdue, most))

    def absent_owners(self, controllers: Collection[bytes]) -> list[bytes]:
        """Return the owners that have been none of the controllers there are for the time that a put waits.

        And at once those that are an earlier start of one of them, which kept nothing.
        """
        now = self._clock()
        names = {controller[:CONTROLLER_NAME_BYTES] for controller in controllers}
        absent = (owner for owner in self._confirmations if owner not in controllers)
        self._absent_since = {owner: self._absent_since.get(owner, now) for owner in absent}
        return [
            owner
            for owner, since in self._absent_since.items()
            if since + self._ttl_seconds <= now or owner[:CONTROLLER_NAME_BYTES] in names
        ]

    def forget_owner(self, owner: bytes) -> None:
        """Forget an owner, unless puts of it wait: they came while the others were dropped, and go the next time."""
        if not self.confirmations(owner).waiting_count:
            del self._confirmations[owner]

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
