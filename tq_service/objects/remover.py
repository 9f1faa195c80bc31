"""Removes objects in the background: asks again, each second, for those that are leased or that the engine kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

from tq_service.errors import TqError
from tq_service.objects.base import ObjectStore

_NAMES_A_CALL: Final = 500
_MOST_FAILURES: Final = 8


class Remover:
    """Names that are to be gone, and the task that sees to it. Confined to one event loop.

    What is left when the process ends stays in the engine; it is found by its beginning (`remove_below`), since a name
    says which instance of which storage service wrote it.

    Attributes:
        last_error: what the engine answered last to a call that failed, None when all calls were answered since.
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
            is_any_put_off = await self._remove_once()
            if not self.pending_count:
                self._empty.set()
                continue
            if is_any_put_off:
                await asyncio.sleep(self._interval_seconds)
            self._wanted.set()

    async def _remove_once(self) -> bool:
        """Ask for all that is pending; return whether something is to be asked again.

        A call that fails keeps nothing else from being removed, but after some of them the engine is away.
        """
        is_any_put_off, failure_count, last_error = False, 0, None
        names = list(self._names)
        calls: list[Callable[[], Awaitable[bool]]] = [partial(self._remove_prefix, each) for each in self._prefixes]
        calls += [
            partial(self._remove_names, names[first : first + _NAMES_A_CALL])
            for first in range(0, len(names), _NAMES_A_CALL)
        ]
        for call in calls:
            try:
                is_any_put_off |= not await call()
            except TqError as error:
                is_any_put_off, last_error = True, error
                failure_count += 1
                if failure_count >= _MOST_FAILURES:
                    break
        self.last_error = last_error
        return is_any_put_off

    async def _remove_prefix(self, prefix: str) -> bool:
        is_gone = await self._objects.remove_below(prefix)
        if is_gone:
            self._prefixes.pop(prefix, None)
        return is_gone

    async def _remove_names(self, names: Sequence[str]) -> bool:
        try:
            again = set(await self._objects.remove(names))
        except BaseException:
            for name in names:  # the others have their turn first
                self._names[name] = self._names.pop(name, None)
            raise
        for name in names:
            if name not in again:
                self._names.pop(name, None)
        return not again
