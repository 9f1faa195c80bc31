"""Search for a lost storage service's mirrored puts, which another storage service then takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from tq_service.errors import NotFoundError, UnavailableError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, ObjectMissingError, ObjectStore
from tq_service.storage.index.put_table import PutStored, decode_put
from tq_service.storage.mirror.layout import (
    HEAD_BYTES,
    WINDOW,
    Names,
    PutObject,
    list_bytes,
    piece_count_of,
    unpack_heads,
    unpack_list,
)

_MOST_GENERATIONS: Final = 256
_SECONDS_BACK: Final = 6 * 3600
_SECONDS_AHEAD: Final = 600  # maximum clock difference between two nodes
_NAMES_A_CALL: Final = 512
_CALLS_AT_A_TIME: Final = 8
_TRIES: Final = 5
T = TypeVar("T")


class Left(NamedTuple):
    """The mirrored objects of a lost storage service.

    Attributes:
        next_generation: generation of the storage service that takes over the objects.
        objects: the existing objects, oldest first.
    """

    next_generation: int
    objects: Sequence[PutObject]


async def find_left(
    objects: ObjectStore,
    names: Names,
    *,
    copies: int,
    clock: Callable[[], float] = time.time,
) -> Left:
    """Find the objects of a lost storage service instance and of its earlier successors.

    Args:
        objects: the object store to search.
        names: generator of the instance's object names.
        copies: number of copies that each object should have. Objects with fewer copies are marked for mirroring again.
        clock: function that returns the time in seconds since the epoch. This clock must agree with the clocks of the
            storage services.

    Raises:
        NotFoundError: the instance wrote no list of its puts, or its last list is older than 6 hours.
        UnavailableError: the object store did not respond.
        DataLossError: a list is damaged.
    """
    search = _Search(objects, names)
    begun = await search.copies([names.successor(number) for number in range(1, _MOST_GENERATIONS)])
    newest = max((number for number, count in enumerate(begun, 1) if count), default=0)
    found: dict[tuple[int, int], PutObject] = {}
    has_list = False
    # Search all generations, because the writer of an earlier generation may have continued after a later generation
    # started. If several lists contain an object, the latest list is used. Puts that were dropped after that list was
    # written are dropped again when the controller is asked about them.
    for generation in range(newest + 1):
        some = await search.of_generation(generation, int(clock()))
        has_list |= some is not None
        found |= {(each.generation, each.number): each for each in some or ()}
    if not has_list:
        raise NotFoundError(
            f"the mirror has no list of puts for storage service {names.storage_id!r} with instance id "
            f"{names.boot_id.hex()}; either that service had no mirror, or it stopped before its first put",
        )
    return Left(newest + 1, await search.complete([found[key] for key in sorted(found)], copies))


class _Search:
    """A search of an object store for the objects of an instance.

    If the object store can list names, the search lists them once. A single listing is much cheaper than looking up
    many names.
    """

    def __init__(self, objects: ObjectStore, names: Names) -> None:
        self._objects = objects
        self._names = names
        self._listed: set[str] | None = None

    async def copies(self, names: Sequence[str], *, counted: bool = False) -> list[int]:
        """Return each object's number of copies, or 0 for a missing object. With `counted`, always query the store."""
        if counted or not self._objects.abilities.lists_names:
            starts = range(0, len(names), _NAMES_A_CALL)
            calls = [self._objects.copies(names[start : start + _NAMES_A_CALL]) for start in starts]
            return [count for counts in await _at_a_time(calls) for count in counts]
        if self._listed is None:
            self._listed = {name async for name in self._objects.list_names(self._names.prefix)}
        await asyncio.sleep(0)  # let other tasks run, because the caller checks many names
        return [int(name in self._listed) * (self._objects.abilities.fixed_copies or 1) for name in names]

    async def of_generation(self, generation: int, now: int) -> list[PutObject] | None:
        """Return a generation's objects, as recorded in its last list. Return None if there is no list."""
        for _ in range(_TRIES):
            second = await self._last_list(generation, now)
            if second is None:
                return None
            try:
                first, listed = unpack_list(await self._read_list(generation, second))
            except ObjectMissingError:  # the list was replaced by a newer list and partly removed
                self._listed = None
                continue
            # At most `WINDOW` objects have been written since the list.
            numbers = range(first, first + WINDOW)
            counts = await self.copies(self._names.numbered(generation, numbers))
            there = [number for number, count in zip(numbers, counts, strict=True) if count]
            described = await _at_a_time([self._describe(PutObject(generation, number, b"", "")) for number in there])
            return [*listed, *(each for each in described if each is not None)]
        raise UnavailableError(
            f"the lists that storage service {self._names.storage_id!r} wrote to the mirror were replaced before they "
            "could be read; try again"
        )

    async def _last_list(self, generation: int, now: int) -> int | None:
        """Return the time of a generation's last list, in seconds since the epoch, or None if no list exists."""
        searched = range(now + _SECONDS_AHEAD, now - _SECONDS_BACK, -1)
        for at in range(0, len(searched), _NAMES_A_CALL):
            seconds = searched[at : at + _NAMES_A_CALL]
            counts = await self.copies([self._names.list_of(generation, second) for second in seconds])
            for second, count in zip(seconds, counts, strict=True):
                if count:
                    return second
        return None

    async def _read_list(self, generation: int, second: int) -> memoryview:
        data = await self._read(self._names.list_of(generation, second))
        pieces = [data]
        for piece in range(1, piece_count_of(list_bytes(data))):
            pieces.append(await self._read(self._names.list_of(generation, second, piece)))  # noqa: PERF401
        return memoryview(b"".join(pieces))

    async def _read(self, name: str, most_bytes: int = LARGEST_OBJECT_BYTES) -> memoryview:
        data = memoryview(bytearray(min(await self._objects.size(name), most_bytes)))
        await self._objects.read(name, data)
        return data

    async def _describe(self, stored: PutObject) -> PutObject | None:
        """Fill in `stored` from its object's records. Return `stored`, or None if the object is missing."""
        name, heads = self._names.pieces(stored)[0], unpack_heads(b"")
        try:
            while isinstance(heads, int):
                heads = unpack_heads(await self._read(name, max(heads, HEAD_BYTES)))
        except ObjectMissingError:
            return None
        for encoded, _, _ in heads[0]:
            record, _ = decode_put(encoded)
            if isinstance(record, PutStored):
                stored.owner, stored.partition_id = record.owner, record.partition_id
                stored.put_ids.add(record.put_id)
        stored.piece_count, stored.is_written = piece_count_of(heads[1]), True
        return stored

    async def complete(self, found: Sequence[PutObject], copies: int) -> list[PutObject]:
        """Return the objects that exist, and mark those that must be mirrored again.

        If the caller of `put` determines the number of copies, one copy may be on the calling service's own node. In
        this case, all objects are therefore mirrored again.
        """
        are_fixed = self._objects.abilities.fixed_copies is not None
        counts = await self.copies([self._names.pieces(each)[0] for each in found], counted=not are_fixed)
        for each, count in zip(found, counts, strict=True):
            each.is_written, each.is_short = count > 0, count < copies
            each.is_to_renew = each.is_short or not are_fixed
        return [each for each in found if each.is_written]


async def _at_a_time(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    limit = asyncio.Semaphore(_CALLS_AT_A_TIME)

    async def call(one: Coroutine[Any, Any, T]) -> T:
        async with limit:
            return await one

    return await asyncio.gather(*map(call, calls))
