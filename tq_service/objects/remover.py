"""Removes objects in the background; retries each second those that are leased or that the store did not remove."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tq_service.errors import TqError
from tq_service.objects.base import ObjectStore

_NAMES_PER_CALL: Final = 500
_MOST_FAILURES: Final = 8


class Remover:
    """Names of objects to remove; `run` removes them. Confined to one event loop.

    Names that are pending when the process ends stay in the store.

    Args:
        objects: the store that has them.
        interval_seconds: time after which a name is tried again.
        may_remove: returns whether objects may be removed now; called again after the interval.
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
        """Number of names not removed yet."""
        return len(self._names)

    def remove(self, names: Iterable[str]) -> None:
        """Queue objects for removal; returns at once."""
        self._names.update(dict.fromkeys(names))
        self._wanted.set()

    async def run(self) -> None:
        """Remove objects until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not self._may_remove() or not await self._remove_all():
                await asyncio.sleep(self._interval_seconds)
            if self._names:
                self._wanted.set()

    async def _remove_all(self) -> bool:
        """Try to remove all pending names once; return whether all of them are removed.

        A failed call does not keep other names from being removed. After several failures the store counts as down.
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
            self._names.update(dict.fromkeys(again))  # at the end: other names go first
            is_done &= not again
            if failure_count >= _MOST_FAILURES:
                break
        return is_done
