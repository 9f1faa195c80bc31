"""Background removal of objects. Failed removals, for example of leased objects, are retried every second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tq_service.errors import TqError
from tq_service.objects.base import ObjectStore

_NAMES_PER_CALL: Final = 500
_MOST_FAILURES: Final = 8


class Remover:
    """A queue of objects that `run` removes from a store. A remover belongs to one event loop.

    If the process ends, objects that have not been removed remain in the store.

    Args:
        objects: store that contains the objects.
        interval_seconds: time to wait before a retry.
        may_remove: function that returns whether objects may be removed. If the function returns False, it is called
            again after the interval.
    """

    def __init__(
        self, objects: ObjectStore, *, interval_seconds: float = 1.0, may_remove: Callable[[], bool] = lambda: True
    ) -> None:
        self._objects = objects
        self._interval_seconds = interval_seconds
        self._may_remove = may_remove
        self._names: dict[str, None] = {}
        self._wanted = asyncio.Event()

    @property
    def pending_count(self) -> int:
        """Number of queued objects that have not yet been removed."""
        return len(self._names)

    def remove(self, names: Iterable[str]) -> None:
        """Queue objects for removal, and return immediately."""
        self._names.update(dict.fromkeys(names))
        self._wanted.set()

    async def run(self) -> None:
        """Remove queued objects until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not self._may_remove() or not await self._remove_all():
                await asyncio.sleep(self._interval_seconds)
            if self._names:
                self._wanted.set()

    async def _remove_all(self) -> bool:
        """Try to remove each pending object once, and return whether all of them were removed.

        If a call fails, the method continues with the remaining objects. After several failures, the method returns
        early, because the store is probably down.
        """
        names, failure_count, is_done = list(self._names), 0, True
        for first in range(0, len(names), _NAMES_PER_CALL):
            again: Sequence[str] = names[first : first + _NAMES_PER_CALL]
            asked = dict.fromkeys(again)
            try:
                again = await self._objects.remove(again)
            except TqError:
                failure_count += 1
            for name in asked:
                self._names.pop(name, None)
            self._names.update(dict.fromkeys(again))  # move to the end of the queue, so other names are tried first
            is_done &= not again
            if failure_count >= _MOST_FAILURES:
                break
        return is_done
