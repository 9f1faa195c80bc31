"""Writes objects under unique names, maintains lists of the objects, and removes objects that are no longer needed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from tq_service.errors import AlreadyExistsError, DataLossError, QuotaExceededError, TqError, UnavailableError
from tq_service.log_message import LogMessage
from tq_service.objects.base import Buffer, ObjectStore
from tq_service.objects.remover import Remover
from tq_service.storage.mirror.layout import WINDOW, Names, PutObject, cut, pack_list

_log = logging.getLogger(__name__)
_LIST_SECONDS: Final = 5.0
_LIST_BYTES_PER_SECOND: Final = 4e6  # maximum write rate for lists
_IDLE_LIST_SECONDS: Final = 1800.0  # well below the maximum age of lists that a search can find
_RETRY_SECONDS: Final = 1.0
_TOKEN_BYTES: Final = 16


class ObjectWriter:
    """Writes a storage service instance's objects, and lists of them. Each writer is confined to one event loop.

    opened (by `run`) -> a first list is written -> objects and more lists are written -> closed

    Args:
        objects: the object store, which may be shared with other writers.
        names: generates the names of this instance's objects.
        copies: number of copies that each object should have on other nodes.
        required: number of copies that each object must have, at least 1.
        generation: generation of the objects to write: 0, or the number of the takeover if this writer has taken over
            the puts of another storage service; see `layout`.
        may_remove: function that returns whether objects may be removed. The result is False if another storage service
            may have taken over the puts.

    Attributes:
        live: objects that exist or are being written, by generation and number.
        is_reachable: whether the last write to the object store succeeded, or None before the first write.
        error: reason why the last write failed, or empty if the last write succeeded.
    """

    def __init__(
        self,
        objects: ObjectStore,
        names: Names,
        *,
        copies: int,
        required: int,
        generation: int = 0,
        may_remove: Callable[[], bool] = lambda: True,
    ) -> None:
        self.objects = objects
        self.names = names
        self.copies = copies
        self.generation = generation
        self._required = max(required, 1)
        self.live: dict[tuple[int, int], PutObject] = {}
        self.is_reachable: bool | None = None
        self.error = ""
        self._next_number = 1
        self._listed_number: int | None = None  # number of the next object according to the last list, if any
        self._listed_at = 0.0
        self._list_bytes = 0
        self._list_second = 0
        self._list_names: list[str] = []
        self._list_due = asyncio.Event()
        self._may_number = asyncio.Event()
        self._remover = Remover(objects, may_remove=may_remove)

    async def run(self) -> None:
        """Write lists and remove objects until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._remover.run())
            while True:
                # Clear the event before checking. Waiting for an event that is already set returns without yielding, so
                # tasks that wait for an object number would never run.
                self._list_due.clear()
                if not self._is_list_due() or await self._write_list():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._pause()):
                            await self._list_due.wait()
                else:
                    await asyncio.sleep(_RETRY_SECONDS)

    async def begin_generation(self) -> None:
        """Find an unused generation, and record in the object store that this writer has taken over the puts.

        Raises:
            UnavailableError, QuotaExceededError: the record cannot be written.
        """
        while True:
            name, token = self.names.successor(self.generation), os.urandom(_TOKEN_BYTES)
            with suppress(AlreadyExistsError):
                await self.objects.put(name, [token], copies=self.copies)
                found = bytearray(_TOKEN_BYTES)
                await self.objects.read(name, memoryview(found))
                if found == token:
                    return
            self.generation += 1

    # Objects

    async def write(
        self, owner: bytes, partition_id: str, put_ids: Iterable[bytes], parts: Sequence[Buffer]
    ) -> tuple[PutObject | None, int]:
        """Write an object.

        Args:
            owner: controller that owns the puts.
            partition_id: partition of the puts.
            put_ids: ids of the puts.
            parts: bytes of the object, which must not change during the call.

        Returns:
            The object, and the number of its copies. If there are too few copies, the object is discarded and None is
            returned in its place.
        """
        pieces = cut(parts)
        stored = PutObject(self.generation, await self._take_number(), owner, partition_id, set(put_ids), len(pieces))
        self.live[self.generation, stored.number] = stored
        made = 0
        try:
            made = await self._put_all(self.names.pieces(stored), pieces)
        finally:
            if made < self._required:
                self.remove(stored)
        if made < self._required:
            return None, made
        stored.is_written, stored.is_short = True, made < self.copies
        return stored, made

    async def _put_all(self, names: Sequence[str], pieces: Sequence[Sequence[Buffer]]) -> int:
        """Store all chunks, starting with the last chunk. Return the number of copies of the chunk with the fewest.

        If the result is less than the required number, the remaining chunks were not stored. A result of 0 indicates
        that the object store failed.
        """
        made = self.copies
        for name, piece in reversed(list(zip(names, pieces, strict=True))):
            try:
                made = min(made, await self.objects.put(name, piece, copies=self.copies))
            except (UnavailableError, QuotaExceededError, AlreadyExistsError, DataLossError) as error:
                self.on_error(error)
                return 0
            if made < self._required:
                self.on_error(UnavailableError(f"an object has {made} copies; at least {self._required} are required"))
                return made
        if self.is_reachable is False:
            _log.info(LogMessage("the mirror accepts objects again"))
        self.is_reachable, self.error = True, ""
        return made

    async def _take_number(self) -> int:
        """Wait until a list covers the next object number, and return that number."""
        while self._listed_number is None or self._next_number >= self._listed_number + WINDOW:
            self._may_number.clear()
            self._list_due.set()
            await self._may_number.wait()
        number = self._next_number
        self._next_number += 1
        if number >= self._listed_number + WINDOW // 4:
            self._list_due.set()
        return number

    def remove(self, stored: PutObject) -> None:
        """Schedule the removal of an object."""
        self.live.pop((stored.generation, stored.number), None)
        self._remover.remove(self.names.pieces(stored))

    def on_error(self, error: TqError) -> None:
        """Record that the object store refused a write or could not be reached."""
        if self.is_reachable is not False:
            _log.warning(LogMessage("the mirror stopped accepting objects; puts are waiting", error=error.message))
        self.is_reachable, self.error = False, error.message

    # Lists

    def _is_list_due(self) -> bool:
        if self._listed_number is None:
            return True
        is_old = time.monotonic() - self._listed_at > _IDLE_LIST_SECONDS
        return is_old or self._next_number > self._listed_number

    def _pause(self) -> float:
        return max(_LIST_SECONDS, self._list_bytes / _LIST_BYTES_PER_SECOND)

    async def _write_list(self) -> bool:
        """Write a list of all existing objects. Return whether the write succeeded."""
        number, packed = self._next_number, pack_list(self._next_number, self.live.values())
        pieces = cut([packed])
        second = max(int(time.time()), self._list_second + 1)
        self._list_second = second
        names = [self.names.list_of(self.generation, second, piece) for piece in range(len(pieces))]
        if await self._put_all(names, pieces) < self._required:
            self._remover.remove(names)
            return False
        self._remover.remove(self._list_names)
        self._list_names, self._list_bytes = names, len(packed)
        self._listed_number, self._listed_at = number, time.monotonic()
        self._may_number.set()
        return True
