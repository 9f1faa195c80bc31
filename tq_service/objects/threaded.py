"""An engine whose client blocks: its calls run in threads of their own, bounded in number and in time.

Clients in C++ and Rust, and those that wait for a socket, let go of Python's lock while they work; so do checksums and
copies of large objects, which happen in the same threads. An engine says in blocking methods what it does.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar, Final, TypeVar

from tq_service.errors import TqError, UnavailableError
from tq_service.objects.base import Buffer, Capacity, ObjectStore
from tq_service.objects.sealed import seal
from tq_service.objects.threads import CallThreads, Landing

NAMES_A_PAGE: Final = 1000
RETRY_AFTER_SECONDS: Final = 1.0
_MESSAGE_CHARACTERS: Final = 300
_CLOSE_SECONDS: Final = 2.0
T = TypeVar("T")


class ThreadedObjects(ObjectStore):
    """Runs the blocking methods of a subclass, which may be called in several threads at a time.

    Each is called after `_connect` has returned; what they raise besides `TqError` becomes one by `_error`.
    """

    engine: ClassVar[str]
    """What messages and threads call it."""

    def __init__(self, place: str, *, threads: int, timeout_seconds: float) -> None:
        """Make an engine that is not open yet.

        Args:
            place: where its objects are, for messages.
            threads: how many calls run at a time; others wait.
            timeout_seconds: how long a call may take, its time of waiting for a thread included.
        """
        self.place = place
        self.timeout_seconds = timeout_seconds
        self._threads = CallThreads(self.engine, threads)
        self._is_open = False

    async def open(self, node: str, offered_bytes: int) -> None:
        await self._in_thread(lambda: self._connect(node, offered_bytes))
        self._is_open = True

    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        def put() -> int:
            header, views = seal(name, parts, self.abilities.largest_object_bytes)
            return self._put(name, header, views, copies)

        return await self._run(put)

    async def read(self, name: str, into: memoryview, start: int = 0) -> None:
        landing = Landing(into)
        await self._run(lambda: self._read(name, landing, start), landing)

    async def copies(self, names: Sequence[str]) -> list[int]:
        return await self._run(lambda: self._copies(names)) if names else []

    async def remove(self, names: Sequence[str]) -> list[str]:
        return await self._run(lambda: self._remove(names)) if names else []

    async def size(self, name: str) -> int:
        return await self._run(lambda: self._size(name))

    async def capacity(self) -> Capacity:
        return await self._run(self._capacity)

    async def list_names(self, prefix: str) -> AsyncIterator[Sequence[str]]:
        names = await self._run(lambda: self._list(prefix))
        for first in range(0, len(names), NAMES_A_PAGE):
            yield names[first : first + NAMES_A_PAGE]

    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            # A client in C++ that is closed while a call is in it takes the process with it. One with a call that does
            # not end is left as it is, until the call has ended.
            if await self._threads.wait_idle(_CLOSE_SECONDS):
                with contextlib.suppress(TqError):  # it is gone already
                    await self._in_thread(self._close)
        self._threads.close()

    async def _run(self, call: Callable[[], T], landing: Landing | None = None) -> T:
        if not self._is_open:
            raise UnavailableError(f"the {self.engine} engine of {self.place} is not open; open it before other calls")
        return await self._in_thread(call, landing)

    async def _in_thread(self, call: Callable[[], T], landing: Landing | None = None) -> T:
        try:
            return await self._threads.run(call, timeout_seconds=self.timeout_seconds, landing=landing)
        except TqError:
            raise
        except Exception as error:  # whatever the client of an engine raises
            raise self._error(error) from error

    def _error(self, error: Exception) -> TqError:
        """Return the error that the service knows for one of the engine's client."""
        return self.unavailable(error)

    def unavailable(self, detail: object) -> UnavailableError:
        """Return the error of a call that the engine did not answer, or refused."""
        kind = f"{type(detail).__name__}: " if isinstance(detail, Exception) else ""
        return UnavailableError(f"{self.engine} at {self.place}: {kind}{str(detail)[:_MESSAGE_CHARACTERS]}")

    @abstractmethod
    def _connect(self, node: str, offered_bytes: int) -> None: ...

    @abstractmethod
    def _put(self, name: str, header: bytes, views: Sequence[memoryview], copies: int) -> int: ...

    @abstractmethod
    def _read(self, name: str, landing: Landing, start: int) -> None: ...

    @abstractmethod
    def _copies(self, names: Sequence[str]) -> list[int]: ...

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> list[str]: ...

    @abstractmethod
    def _size(self, name: str) -> int: ...

    @abstractmethod
    def _capacity(self) -> Capacity: ...

    @abstractmethod
    def _list(self, prefix: str) -> list[str]: ...

    @abstractmethod
    def _close(self) -> None: ...
