"""Removes objects in the background: asks again, each second, for those that are leased or that the engine kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

from tq_service.errors import TqError
from tq_service.objects.base import ObjectStore

_NAMES_A_CALL: Final = 500


class Remover:
    """Names that are to be gone, and the task that sees to it. Confined to one event loop.

    What is left when the process ends stays in the engine; it is found by its beginning (`remove_below`), since a name
    says which instance of which storage service wrote it.

    Attributes:
        last_error: what the engine answered last, None when it removed what it was asked to or put it off.
    """

    def __init__(
        self, objects: ObjectStore, *, interval_seconds: float = 1.0, may_remove: Callable[[], bool] = lambda: True
    ) -> None:
        """Make a remover; `start` begins its work, or a task of the caller that awaits `run`.

        Args:
            objects: where objects are removed.
            interval_seconds: after how long a name that was put off is asked again.
            may_remove: whether objects may be removed now; asked again after the interval.
        """
        self._objects = objects
        self._interval_seconds = interval_seconds
        self._may_remove = may_remove
        self._names: dict[str, None] = {}
        self._prefixes: dict[str, None] = {}
        self._wanted = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._task: asyncio.Task[None] | None = None
        self.last_error: TqError | None = None

    @property
    def pending_count(self) -> int:
        """Number of names and prefixes that are not gone yet."""
        return len(self._names) + len(self._prefixes)

    def start(self) -> None:
        """Begin to remove."""
        self._task = asyncio.get_running_loop().create_task(self.run(), name="tq-object-remover")

    def remove(self, names: Iterable[str]) -> None:
        """Have objects removed; returns at once."""
        self._names.update(dict.fromkeys(names))
        self._wake()

    def remove_below(self, prefix: str) -> None:
        """Have all objects removed whose names begin with `prefix`; returns at once."""
        self._prefixes[prefix] = None
        self._wake()

    async def wait_empty(self) -> None:
        """Wait until all that was asked for is gone."""
        await self._empty.wait()

    async def aclose(self) -> None:
        """Stop; what is pending stays in the engine."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def _wake(self) -> None:
        if self.pending_count:
            self._empty.clear()
            self._wanted.set()

    async def run(self) -> None:
        """Remove what is asked for until it is cancelled."""
        while True:
            await self._wanted.wait()
            if not self._may_remove():
                await asyncio.sleep(self._interval_seconds)
                continue
            self._wanted.clear()
            try:
                is_any_put_off, self.last_error = await self._remove_once(), None
            except TqError as error:  # the engine is away; all that is pending is asked again
                is_any_put_off, self.last_error = True, error
            if not self.pending_count:
                self._empty.set()
                continue
            if is_any_put_off:
                await asyncio.sleep(self._interval_seconds)
            self._wanted.set()

    async def _remove_once(self) -> bool:
        """Ask for all that is pending; return whether something is to be asked again."""
        is_any_put_off = False
        for prefix in list(self._prefixes):
            if await self._objects.remove_below(prefix):
                self._prefixes.pop(prefix, None)
            else:
                is_any_put_off = True
        names = list(self._names)
        for first in range(0, len(names), _NAMES_A_CALL):
            some = names[first : first + _NAMES_A_CALL]
            again = set(await self._objects.remove(some))
            is_any_put_off |= bool(again)
            for name in some:
                if name not in again:
                    self._names.pop(name, None)
        return is_any_put_off
