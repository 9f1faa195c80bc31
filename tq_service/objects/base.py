"""The interface of an object engine, the settings in its URL, and how the engine of a URL is found.

A new engine is a file and an entry point: an `ObjectStore` if its client is for asyncio, a `BlockingObjectStore` if it
blocks.

An object is written once, under a name never used before, and is stored complete or not at all. It is read, from its
beginning, and removed once. Engines promise less than that, each of them something else; their duties are described
here, and `tests/objects/test_contract.py` holds all of them to it:

- A name is used for one attempt of one writer. Half an object or a reservation that a killed writer has left under it
  is never met by another writer.
- Fewer copies than requested are no error of the engine: `put` and `copies` ask it how many there are.
- Nothing is removed by force. An object that a reader has a lease on stays, and its name is returned to be asked again
  (`remover.py`).
- All bytes are behind a checksum: an object is stored sealed, with a header of size and checksum. Reading a complete
  object that does not match it raises, so a reader never sees bytes of two objects.
- Nothing blocks the event loop, and each call ends: with a result, or with an error of `tq_service.errors` within the
  engine's time limit.

The clients of most engines block, and `BlockingObjectStore` calls them in daemon threads. Those in C++ and Rust, and
those that wait for a socket, release Python's lock while they work; so do checksums and copies of large objects, which
happen in the same thread. A call that does not end in time costs its thread until it ends: the caller gets an error,
and `Landing` keeps the call from writing to the caller's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import xxhash

from tq_service.addresses import redacted
from tq_service.daemon_threads import start_daemon_thread
from tq_service.errors import (
    DataLossError,
    InvalidArgumentError,
    QuotaExceededError,
    TqError,
    UnavailableError,
    nearest,
)

Buffer: TypeAlias = bytes | bytearray | memoryview
Survives: TypeAlias = Literal["process", "node", "power"]

_RETRY_AFTER_SECONDS: Final = 1.0
_MESSAGE_CHARACTERS: Final = 300
_CLOSE_SECONDS: Final = 2.0
_HEADER: Final = struct.Struct("<8sQQ8x")
_MAGIC: Final = b"tqobj\x00\x00\x01"
HEADER_BYTES: Final = _HEADER.size
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
T = TypeVar("T")

LARGEST_OBJECT_BYTES: Final = 64 << 20
"""Most bytes of one object; a larger put is cut into pieces."""


class ObjectMissingError(DataLossError):
    """No complete object has this name: it was never put, is half written, was removed, or its copies are lost.

    To a client it is a `DataLossError`, since the service reads only acknowledged objects.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The promises of an engine.

    Attributes:
        survives: a failure that an acknowledged object outlives: the writer's process, the loss of a node, or also the
            loss of power of all nodes.
        fixed_copies: copies of each object, if the engine itself decides that; None if `put` does. More than these
            cannot be required of it.
        lists_names: whether `list_names` looks at the names with the prefix alone; else it is not called.
    """

    survives: Survives
    fixed_copies: int | None = None
    lists_names: bool = False


class ObjectStore(ABC):
    """Objects that are written once, under names never used before, and removed. Confined to one event loop.

    Names are segments of letters, digits, '.', '_', ':' and '-', joined by '/'. Calls may run concurrently; the
    engine bounds how many at a time reach it, and the others wait. A call that is cancelled may still take effect: a
    put may leave an object, which its name lets the remover find.

    An engine whose client is for asyncio subclasses this; one whose client blocks, `BlockingObjectStore`.
    """

    @property
    @abstractmethod
    def abilities(self) -> Abilities:
        """The promises of the engine; known before `open`."""

    @abstractmethod
    async def open(self, node: str, offered_bytes: int) -> None:
        """Join the engine; once, before all other calls.

        Args:
            node: name of the node of this process, on which its own objects get no copy if the engine places them.
            offered_bytes: memory of this node to offer to the engine, for copies of other nodes; 0: none. Engines that
                have their own memory take none.

        Raises:
            UnavailableError: the engine cannot be reached.
            InvalidArgumentError: the engine refuses its settings, such as a bucket that does not exist.
        """

    @abstractmethod
    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        """Write an object, complete or not at all.

        Args:
            name: a name that was never used before, also not by an attempt that failed.
            parts: its bytes in parts, which must not change until this returns or raises; a call that is cancelled
                waits until they are no longer read.
            copies: how many nodes are to hold it, the one of this process not counted if the engine places copies.

        Returns:
            Number of complete copies; at least 1, and fewer than requested if the engine has no more nodes.

        Raises:
            AlreadyExistsError: the name was used before, maybe by this call, whose first answer was lost; the stored
                object stays as it is. (An engine that cannot see it returns the copies of the stored object.)
            QuotaExceededError: no other node has capacity for it; there is more when objects have been removed.
            InvalidArgumentError: it has more than `LARGEST_OBJECT_BYTES`.
            UnavailableError: the engine did not answer, or refused. Whether an object is stored is unknown: another
                attempt takes another name, and this one goes to the remover.
        """

    @abstractmethod
    async def read(self, name: str, into: memoryview) -> None:
        """Read the first bytes of an object until `into` is full; its content after an error is undefined.

        Raises:
            ObjectMissingError: no complete object has this name.
            DataLossError: it is shorter, or does not match its checksum (which only a read of all of it can see).
            UnavailableError: it cannot be read now.
        """

    @abstractmethod
    async def copies(self, names: Sequence[str]) -> list[int]:
        """Return how many complete copies each object has; 0: none, or the object is half written.

        One on the node of this process counts here: another process may have placed it there.

        Raises:
            UnavailableError: the engine did not answer.
        """

    @abstractmethod
    async def remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, half-written ones too, unless they are leased; never by force.

        Returns:
            Names to be asked again after a second: of objects that are leased, or still being written, or that the
            engine did not report as removed.

        Raises:
            UnavailableError: the engine did not answer; any of them may be gone.
        """

    @abstractmethod
    async def size(self, name: str) -> int:
        """Return the number of bytes that an object was put with.

        Raises:
            ObjectMissingError: no complete object has this name.
            UnavailableError: the engine did not answer.
        """

    def list_names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of complete objects that begin with `prefix`, in any order; only where `lists_names`.

        Objects that are put or removed at the same time may be missing or included.

        Raises:
            UnavailableError: the engine did not answer.
        """
        raise TypeError(f"{type(self).__qualname__} does not list names, as its abilities say")

    @abstractmethod
    async def aclose(self) -> None:
        """Leave the engine; calls under way end with an error. Objects stay. A second call does nothing."""


class BlockingObjectStore(ObjectStore):
    """An engine whose client blocks: each call runs in one of its threads, with a time limit.

    A subclass has one blocking method for each call, named as that one with a `_`. They run several at a time, after
    `_connect` has returned; their exceptions other than `TqError` become one by `_error`.

    Args:
        url: of the engine, whose settings `threads` and `timeout_seconds` go before the following ones.
        threads: how many calls run at a time; others wait.
        timeout_seconds: how long a call may take, its wait for a thread included.

    Attributes:
        place: its objects' place, for messages.
    """

    engine: ClassVar[str]
    """Its name in messages and of threads."""

    def __init__(self, url: EngineUrl, *, threads: int = 8, timeout_seconds: float = 30.0) -> None:
        self.place = url.redacted
        self.timeout_seconds = url.seconds("timeout_seconds", timeout_seconds)
        self._free = asyncio.Semaphore(url.count("threads", threads))
        self._running: set[asyncio.Future[Callable[[], Any]]] = set()
        self._is_open = False

    @classmethod
    def from_url(cls, url: str) -> ObjectStore:
        """Make the engine that a URL describes, without opening it."""
        parsed = EngineUrl(url)
        made = cls(parsed)
        parsed.check_all_used()
        return made

    # A subclass implements

    @abstractmethod
    def _connect(self, node: str, offered_bytes: int) -> None:
        """Join the engine, see `open`."""

    @abstractmethod
    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int:
        """Write an object as it is sealed; return the number of its copies."""

    @abstractmethod
    def _read(self, name: str, landing: Landing) -> None:
        """Write to `landing` the first bytes of an object, as many as it takes."""

    @abstractmethod
    def _copies(self, names: Sequence[str]) -> list[int]:
        """Return how many complete copies each object has; there is at least one name."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, at least one; return the names to be asked again."""

    @abstractmethod
    def _size(self, name: str) -> int:
        """Return the number of bytes that an object was put with."""

    def _close(self) -> None:
        """Close the client; many have no connection that stays."""

    def _error(self, error: Exception) -> TqError:
        """Return the service's error for one of the engine's client."""
        return self._unavailable(f"{type(error).__name__}: {error}")

    # The calls, in threads

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

    def _unavailable(self, detail: str) -> UnavailableError:
        """Return the error of a call that the engine did not answer, or refused."""
        return UnavailableError(f"{self.engine} at {self.place}: {detail[:_MESSAGE_CHARACTERS]}")

    def _full(self, detail: str) -> QuotaExceededError:
        """Return the error of a put for which the engine has no capacity."""
        return QuotaExceededError(
            f"{self.place} is full ({detail[:_MESSAGE_CHARACTERS]}); remove objects or give it more capacity",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )


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


class EngineUrl:
    """A URL such as `s3://bucket/prefix?region=us-east-1`.

    It may contain a password, so messages show `redacted` instead of it.

    Attributes:
        scheme: name of the engine.
        host: the part between `//` and the next `/`, without user and password.
        path: the part after it, without the first `/`.
        username, password: of the URL, or None.
    """

    def __init__(self, url: str) -> None:
        """Read a URL.

        Raises:
            InvalidArgumentError: it is not a URL, or names a setting twice.
        """
        parts = urlsplit(url)
        if not parts.scheme or "://" not in url:
            raise InvalidArgumentError(
                f"got an object store {redacted(url)!r}, expected a URL such as s3://bucket/prefix"
            )
        self.scheme = parts.scheme
        self.host = parts.netloc.rpartition("@")[2]
        self.path = unquote(parts.path.removeprefix("/"))
        self.username = None if parts.username is None else unquote(parts.username)
        self.password = None if parts.password is None else unquote(parts.password)
        self.redacted = redacted(url)
        self._options: dict[str, str] = {}
        for name, values in parse_qs(parts.query, keep_blank_values=True).items():
            if len(values) != 1:
                raise InvalidArgumentError(f"{self.redacted}: {name} is given {len(values)} times, expected once")
            self._options[name] = values[0]
        self._asked: set[str] = set()

    @property
    def location(self) -> str:
        """Host and path together."""
        return f"{self.host}/{self.path}" if self.path else self.host

    def text(self, name: str, default: str) -> str:
        """Return a setting as it stands in the URL."""
        self._asked.add(name)
        return self._options.get(name, default)

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return a setting that is one of some words."""
        value = self.text(name, default)
        if value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """Return a setting that is a whole number."""
        value = self.text(name, str(default))
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise self._wrong(name, value, f"a whole number of at least {least}")
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        """Return a setting that is a time in seconds, more than 0."""
        value = self.text(name, str(default))
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise self._wrong(name, value, "seconds, more than 0")
        return seconds

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self.text(name, str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise self._wrong(name, value, "true or false")
        return value in _TRUE

    def secret(self, name: str, variable: str) -> str | None:
        """Return a secret: of the file that the setting `<name>_file` names, else of an environment variable.

        Raises:
            InvalidArgumentError: the file cannot be read.
        """
        found = self.file(f"{name}_file")
        return os.environ.get(variable) if found is None else found.decode().strip()

    def file(self, name: str) -> bytes | None:
        """Return the content of the file that a setting names, or None if it names none.

        Raises:
            InvalidArgumentError: the file cannot be read.
        """
        path = self.text(name, "")
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            raise InvalidArgumentError(
                f"{self.redacted}: {name} {path} cannot be read ({type(error).__name__}); expected a file"
            ) from error

    def check_all_used(self) -> None:
        """Refuse settings that no engine has read.

        Raises:
            InvalidArgumentError: it has some.
        """
        unknown = sorted(self._options.keys() - self._asked)
        if unknown:
            raise InvalidArgumentError(
                f"{self.redacted}: got the settings {', '.join(unknown)}, which {self.scheme} does not know; known: "
                f"{', '.join(sorted(self._asked)) or 'none'}"
            )

    def _wrong(self, name: str, value: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.redacted}: {name} is {value!r}, expected {expected}", field=name)


ENTRY_POINT_GROUP: Final = "tq_service.object_stores"
"""Entry points of packages: the name is the scheme, the value a callable that makes an `ObjectStore` of a URL."""

_BUILT_IN: Final[dict[str, tuple[str, str, str]]] = {
    # scheme: module, class, extra that brings the packages which it imports
    **dict.fromkeys(("s3", "gs", "az", "memory"), ("tq_service.objects.buckets", "BucketObjects", "obstore")),
    "file": ("tq_service.objects.buckets", "DirectoryObjects", "obstore"),
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), ("tq_service.objects.valkey", "ValkeyObjects", "valkey")),
    "mooncake": ("tq_service.objects.mooncake", "MooncakeObjects", "mooncake"),
}


def make_object_store(url: str) -> ObjectStore:
    """Make the engine that a URL names, without opening it.

    Args:
        url: such as `file:///mnt/shared/tq`; docs/engines.md describes its settings.

    Raises:
        InvalidArgumentError: no engine has its scheme, the engine's package is not installed, or a setting is wrong.
    """
    parsed = EngineUrl(url)
    store = _factory(parsed)(url)
    if not isinstance(store, ObjectStore):
        raise InvalidArgumentError(
            f"{parsed.redacted}: the engine {parsed.scheme!r} made {type(store).__qualname__}, expected a subclass of "
            "tq_service.objects.base.ObjectStore"
        )
    return store


def object_store_schemes() -> list[str]:
    """Return the schemes of all engines that could be made, whether what they import is installed or not."""
    return sorted({*_BUILT_IN, *(point.name for point in _entry_points())})


def _factory(url: EngineUrl) -> Callable[[str], Any]:
    built_in = _BUILT_IN.get(url.scheme)
    if built_in is not None:
        module, name, extra = built_in
        try:
            factory: Callable[[str], Any] = getattr(importlib.import_module(module), name).from_url
        except ImportError as error:
            raise InvalidArgumentError(
                f"{url.redacted}: the engine needs a package that cannot be imported here ({error}); install "
                f"tq-service[{extra}]"
            ) from error
        return factory
    for point in _entry_points():
        if point.name == url.scheme:
            try:
                loaded: Callable[[str], Any] = point.load()
            except Exception as error:  # code of others: it may raise anything
                raise InvalidArgumentError(
                    f"{url.redacted}: the engine {point.value} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
            return loaded
    raise InvalidArgumentError(
        f"{url.redacted}: no engine has the scheme {url.scheme!r}; install one as an entry point of "
        f"{ENTRY_POINT_GROUP!r}; {nearest(url.scheme, object_store_schemes(), all_known=True)}"
    )


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
