"""Removes objects in the background: asks again, each second, for those that are leased or that the engine kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
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

    def __init__(self, objects: ObjectStore, *, interval_seconds: float = 1.0) -> None:
        """Make a remover; `start` begins its work.

        Args:
            objects: where objects are removed.
            interval_seconds: after how long a name that was put off is asked again.
        """
        self._objects = objects
        self._interval_seconds = interval_seconds
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
        self._task = asyncio.get_running_loop().create_task(self._run(), name="tq-object-remover")

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

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._remove_once()
                self.last_error = None
            except TqError as error:  # the engine is away; all that is pending is asked again
                self.last_error = error
            if not self.pending_count:
                self._empty.set()
                continue
            await asyncio.sleep(self._interval_seconds)
            self._wanted.set()

    async def _remove_once(self) -> None:
        for prefix in list(self._prefixes):
            if await self._objects.remove_below(prefix):
                self._prefixes.pop(prefix, None)
        names = list(self._names)
        for first in range(0, len(names), _NAMES_A_CALL):
            some = names[first : first + _NAMES_A_CALL]
            again = set(await self._objects.remove(some))
            for name in some:
                if name not in again:
                    self._names.pop(name, None)
