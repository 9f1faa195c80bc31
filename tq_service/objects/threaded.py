"""The base of engines whose client blocks: each call runs in a daemon thread, bounded in number and time.

Clients in C++ and Rust, and those that wait for a socket, release Python's lock while they work; so do checksums and
copies of large objects, which happen in the same thread. A call that does not end in time costs its thread until it
ends: the caller gets an error, and `Landing` keeps the call from writing to the caller's memory.

Engines store an object sealed: a header with size and checksum, and the bytes. So a reader sees from the first bytes
what the complete object must be, whatever an engine has mixed, cut or lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import xxhash

from tq_service.daemon_threads import start_daemon_thread
from tq_service.errors import DataLossError, InvalidArgumentError, QuotaExceededError, TqError, UnavailableError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, Buffer, ObjectMissingError, ObjectStore

_HEADER: Final = struct.Struct("<8sQQ8x")
_MAGIC: Final = b"tqobj\x00\x00\x01"
HEADER_BYTES: Final = _HEADER.size


def seal(name: str, parts: Sequence[Buffer]) -> list[memoryview]:
    """Return the header of an object and its parts, all as flat bytes.

    Raises:
        InvalidArgumentError: it has more than `LARGEST_OBJECT_BYTES`.
    """
    views = [memoryview(part).cast("B") for part in parts]
    size = sum(map(len, views))
    if size > LARGEST_OBJECT_BYTES:
        raise InvalidArgumentError(
            f"object {name}: got {size} bytes, expected at most {LARGEST_OBJECT_BYTES}; cut it into pieces",
            field="parts",
        )
    return [memoryview(_HEADER.pack(_MAGIC, size, _checksum(views))), *views]


def joined(sealed: Sequence[memoryview]) -> memoryview:
    """Return a sealed object in one piece, copied without holding Python's lock."""
    whole = memoryview(bytearray(sum(map(len, sealed))))
    fill(whole, sealed)
    return whole


def fill(into: memoryview, views: Sequence[memoryview]) -> None:
    """Copy bytes to the beginning of `into` without holding Python's lock, which `bytes.join` would hold."""
    start = 0
    for view in filter(len, views):
        end = start + len(view)
        np.copyto(np.frombuffer(into[start:end], np.uint8), np.frombuffer(view, np.uint8))
        start = end


def size_of(name: str, header: Buffer) -> int:
    """Return the size of the object behind a header, without the header.

    Raises:
        ObjectMissingError: it is shorter than a header: half written.
        DataLossError: it is not a header.
    """
    return _parse(name, header)[0]


def check(name: str, header: Buffer, data: memoryview) -> None:
    """Check the first bytes of an object, which were read after its header.

    Raises:
        ObjectMissingError: the header is incomplete.
        DataLossError: the object is shorter, or `data` is all of it and does not match its checksum.
    """
    size, checksum = _parse(name, header)
    if len(data) > size:
        raise DataLossError(f"object {name} has {size} bytes, expected at least {len(data)}; it is another put's")
    if len(data) == size and _checksum([data]) != checksum:
        raise DataLossError(f"object {name}: {size} bytes do not match their checksum; the copy is damaged or was cut")


def _parse(name: str, header: Buffer) -> tuple[int, int]:
    if len(header) < HEADER_BYTES:
        raise ObjectMissingError(f"object {name} has {len(header)} bytes, fewer than its header; it is half written")
    magic, size, checksum = _HEADER.unpack(bytes(header[:HEADER_BYTES]))
    if magic != _MAGIC:
        raise DataLossError(f"object {name} begins with {magic!r}, expected {_MAGIC!r}; another program wrote it")
    return size, checksum


def _checksum(views: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


_RETRY_AFTER_SECONDS: Final = 1.0
_MESSAGE_CHARACTERS: Final = 300
_CLOSE_SECONDS: Final = 2.0
T = TypeVar("T")


class Landing:
    """Memory of a caller that a thread fills, for as long as the caller waits for it."""

    def __init__(self, name: str, into: memoryview) -> None:
        self._name = name
        self._into = into
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of bytes that it takes."""
        return len(self._into)

    def write(self, header: Buffer, data: Buffer) -> None:
        """Copy the first bytes of an object to it, and check them.

        Raises:
            ObjectMissingError: the header is incomplete.
            DataLossError: see `check`.
        """
        with self._lock:
            if not self._is_closed:
                fill(self._into, (memoryview(data)[: len(self)],))
                check(self._name, header, self._into)

    def close(self) -> None:
        """Let nothing be written any more; waits for a copy under way."""
        with self._lock:
            self._is_closed = True


class ThreadedObjects(ObjectStore):
    """Runs the blocking methods of a subclass, several of which may run at a time.

    Each is called after `_connect` has returned; its exceptions other than `TqError` become one by `_error`.

    Args:
        place: its objects' place, for messages.
        threads: how many calls run at a time; others wait.
        timeout_seconds: how long a call may take, its wait for a thread included.
    """

    engine: ClassVar[str]
    """Its name in messages and of threads."""

    def __init__(self, place: str, *, threads: int, timeout_seconds: float) -> None:
        self.place = place
        self.timeout_seconds = timeout_seconds
        self._free = asyncio.Semaphore(threads)
        self._running: set[asyncio.Future[Callable[[], Any]]] = set()
        self._is_open = False

    async def open(self, node: str, offered_bytes: int) -> None:
        await self._in_thread(lambda: self._connect(node, offered_bytes))
        self._is_open = True

    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        return await self._run(lambda: self._put(name, seal(name, parts), copies))

    async def read(self, name: str, into: memoryview) -> None:
        landing = Landing(name, into)
        try:
            await self._run(lambda: self._read(name, landing))
        finally:
            landing.close()

    async def copies(self, names: Sequence[str]) -> list[int]:
        return await self._run(lambda: self._copies(names)) if names else []

    async def remove(self, names: Sequence[str]) -> list[str]:
        return await self._run(lambda: self._remove(names)) if names else []

    async def size(self, name: str) -> int:
        return await self._run(lambda: self._size(name))

    async def aclose(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        # A client in C++ that is closed while a call is in it takes the process with it: one with a call that does not
        # end stays open until the process ends.
        if not self._running or not (await asyncio.wait(self._running, timeout=_CLOSE_SECONDS))[1]:
            with contextlib.suppress(TqError):  # it is gone already
                await self._in_thread(self._close)

    async def _run(self, call: Callable[[], T]) -> T:
        if not self._is_open:
            raise UnavailableError(f"the {self.engine} engine of {self.place} is not open; open it before other calls")
        return await self._in_thread(call)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Return the result of a call; a cancelled caller waits for its end too, since it reads the caller's memory."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                await self._free.acquire()
        except TimeoutError:
            raise self._late("no thread was free") from None
        running = start_daemon_thread(call, thread_name=f"tq-{self.engine}")
        self._running.add(running)
        running.add_done_callback(self._end)
        cancelled: asyncio.CancelledError | None = None
        while not running.done() and loop.time() < until:
            try:
                await asyncio.wait((running,), timeout=until - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if not running.done():
            raise self._late("the call continues in its thread")
        try:
            return running.result()()
        except TqError:
            raise
        except Exception as error:  # whatever the client of an engine raises
            raise self._error(error) from error

    def _end(self, running: asyncio.Future[Callable[[], Any]]) -> None:
        self._running.discard(running)
        self._free.release()

    def _late(self, detail: str) -> UnavailableError:
        return UnavailableError(f"{self.engine} did not answer within {self.timeout_seconds:g} s ({detail})")

    def _error(self, error: Exception) -> TqError:
        """Return the service's error for one of the engine's client."""
        return self._unavailable(f"{type(error).__name__}: {error}")

    def _unavailable(self, detail: str) -> UnavailableError:
        """Return the error of a call that the engine did not answer, or refused."""
        return UnavailableError(f"{self.engine} at {self.place}: {detail[:_MESSAGE_CHARACTERS]}")

    def _full(self, detail: str) -> QuotaExceededError:
        """Return the error of a put for which the engine has no capacity."""
        return QuotaExceededError(
            f"{self.place} is full ({detail[:_MESSAGE_CHARACTERS]}); remove objects or give it more capacity",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )

    @abstractmethod
    def _connect(self, node: str, offered_bytes: int) -> None: ...

    @abstractmethod
    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int: ...

    @abstractmethod
    def _read(self, name: str, landing: Landing) -> None: ...

    @abstractmethod
    def _copies(self, names: Sequence[str]) -> list[int]: ...

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> list[str]: ...

    @abstractmethod
    def _size(self, name: str) -> int: ...

    @abstractmethod
    def _close(self) -> None: ...
