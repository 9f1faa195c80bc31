"""Finding the puts that a storage service has left in its mirror, for another one to take over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

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
_SECONDS_AHEAD: Final = 600  # by which the clocks of two nodes may differ
_NAMES_A_CALL: Final = 512
_CALLS_AT_A_TIME: Final = 8
_TRIES: Final = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a storage service has left.

    Attributes:
        next_generation: that of the one that takes it over.
        objects: what is there, oldest first.
    """

    next_generation: int
    objects: Sequence[PutObject]


class _Found(Protocol):
    """What says which objects are there."""

    async def copies(self, names: Sequence[str]) -> list[int]:
        """Return how many copies each object has, 0: there is none."""
        ...


class _Listed:
    """The names below a prefix, listed at once: with so many to be looked at, much cheaper where an engine does it."""

    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix
        self._names: set[str] | None = None

    async def copies(self, names: Sequence[str]) -> list[int]:
        if self._names is None:
            self._names = {name async for name in self._objects.list_names(self._prefix)}
        await asyncio.sleep(0)  # the caller looks at many
        return [int(name in self._names) * (self._objects.abilities.fixed_copies or 1) for name in names]

    def forget(self) -> None:
        """Have the names listed again: some are gone by now."""
        self._names = None


@dataclass(frozen=True, slots=True)
class _Source:
    """An engine to search, what says which objects it has, and their names."""

    objects: ObjectStore
    there: _Found
    names: Names


async def find_left(
    objects: ObjectStore,
    names: Names,
    *,
    copies: int,
    clock: Callable[[], float] = time.time,
) -> Left:
    """Find the objects that an instance of a storage service has left, and those that took its puts over before.

    Args:
        objects: the engine.
        names: of the instance.
        copies: copies that each object is to have; those with fewer are to be mirrored again.
        clock: seconds since the epoch, as storage services have them.

    Raises:
        NotFoundError: it has left nothing, or its last list is older than 6 hours.
        UnavailableError: the engine did not answer.
        DataLossError: its list is damaged.
    """
    there = _Listed(objects, names.prefix) if objects.abilities.lists_names else objects
    source = _Source(objects, there, names)
    begun = await _copies(there, [names.heir(number) for number in range(1, _MOST_GENERATIONS)])
    newest = max((number for number, count in enumerate(begun, 1) if count), default=0)
    found: dict[tuple[int, int], PutObject] = {}
    has_list = False
    # Of all generations: the writer of an early one may have come back, and have gone on after a later one began. What
    # a later list says of an object is newer; what was dropped since is dropped again once the controller is asked.
    for generation in range(newest + 1):
        some = await _of_generation(source, generation, int(clock()))
        has_list |= some is not None
        found |= {(each.generation, each.number): each for each in some or ()}
    if not has_list:
        raise NotFoundError(
            f"the mirror has no list of puts of storage service {names.storage_id!r} under boot {names.boot_id.hex()}; "
            "either it had no mirror, or it ended before its first put",
        )
    oldest_first = [found[key] for key in sorted(found)]
    return Left(next_generation=newest + 1, objects=await _complete(source, oldest_first, copies))


async def _of_generation(source: _Source, generation: int, now: int) -> list[PutObject] | None:
    """Return the objects that the last list of a generation leads to; None where it has no list: it wrote nothing."""
    for _ in range(_TRIES):
        second = await _last_list(source, generation, now)
        if second is None:
            return None
        try:
            listed_number, listed = unpack_list(await _read_list(source, generation, second))
        except ObjectMissingError:  # there is a newer one
            if isinstance(source.there, _Listed):
                source.there.forget()
            continue
        return [*listed, *await _after_list(source, generation, listed_number)]
    raise UnavailableError(
        f"the lists of storage service {source.names.storage_id!r} in the mirror go before they are read; try again"
    )


async def _last_list(source: _Source, generation: int, now: int) -> int | None:
    """Return the second of the last list of a generation, None where there is none."""
    searched = range(now + _SECONDS_AHEAD, now - _SECONDS_BACK, -1)
    for at in range(0, len(searched), _NAMES_A_CALL):
        seconds = searched[at : at + _NAMES_A_CALL]
        counts = await source.there.copies([source.names.list_of(generation, second) for second in seconds])
        for second, count in zip(seconds, counts, strict=True):
            if count:
                return second
    return None


async def _read_list(source: _Source, generation: int, second: int) -> memoryview:
    objects, names = source.objects, source.names
    first = names.list_of(generation, second)
    size = await objects.size(first)
    head = memoryview(bytearray(size))
    await objects.read(first, head)
    data = memoryview(bytearray(list_bytes(head)))
    data[:size] = head
    for piece in range(1, piece_count_of(len(data))):
        start = piece * LARGEST_OBJECT_BYTES
        name = names.list_of(generation, second, piece)
        await objects.read(name, data[start : start + LARGEST_OBJECT_BYTES])
    return data


async def _after_list(source: _Source, generation: int, first: int) -> list[PutObject]:
    """Return the objects that were written after the last list."""
    numbers = range(first, first + WINDOW)
    counts = await _copies(source.there, source.names.numbered(generation, numbers))
    written = [PutObject(generation, number, b"", "") for number, count in zip(numbers, counts, strict=True) if count]
    described = await _at_a_time([partial(_describe, source, each) for each in written])
    return [each for each in described if each is not None]


async def _describe(source: _Source, stored: PutObject) -> PutObject | None:
    """Learn from an object itself what is in it; None where it is gone."""
    name = source.names.pieces(stored)[0]
    try:
        size = await source.objects.size(name)
        wanted = HEAD_BYTES
        while True:
            head = memoryview(bytearray(min(size, wanted)))
            await source.objects.read(name, head)
            heads = unpack_heads(head)
            if not isinstance(heads, int):
                break
            wanted = heads
    except ObjectMissingError:
        return None
    for encoded, _, _ in heads[0]:
        record, _ = decode_put(encoded)
        if isinstance(record, PutStored):
            stored.owner, stored.partition_id = record.owner, record.partition_id
            stored.put_ids.add(record.put_id)
    stored.piece_count, stored.is_written = piece_count_of(heads[1]), True
    return stored


async def _complete(source: _Source, found: Sequence[PutObject], copies: int) -> list[PutObject]:
    """Return the objects that are there, and take note of those that are to be mirrored again.

    Where the engine says nothing of where copies are, one may be on the node of the storage service that asks.
    """
    are_fixed = source.objects.abilities.fixed_copies is not None
    first_pieces = [source.names.pieces(each)[0] for each in found]
    counts = await _copies(source.there if are_fixed else source.objects, first_pieces)
    complete = []
    for each, count in zip(found, counts, strict=True):
        if count:
            each.is_written, each.is_short = True, count < copies
            each.is_to_renew = each.is_short or not are_fixed
            complete.append(each)
    return complete


async def _copies(objects: _Found, names: Sequence[str]) -> list[int]:
    starts = range(0, len(names), _NAMES_A_CALL)
    calls = [partial(objects.copies, names[start : start + _NAMES_A_CALL]) for start in starts]
    return [count for counts in await _at_a_time(calls) for count in counts]


async def _at_a_time(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    limit = asyncio.Semaphore(_CALLS_AT_A_TIME)

    async def call(one: Callable[[], Awaitable[T]]) -> T:
        async with limit:
            return await one()

    return await asyncio.gather(*map(call, calls))
