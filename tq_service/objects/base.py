"""The interface of an object store, the settings in its URL, and how the store of a URL is found.

Messages and docs/engines.md call an object store an engine. A new one is a file and an entry point: an `ObjectStore` if
its client is for asyncio, a `BlockingObjectStore` if the client blocks.

An object is written once, under a name never used before, and is stored complete or not at all. It is read from its
start, and removed once. Backends promise less than that, and each promises something else. Their duties are described
here, and `tests/objects/test_contract.py` holds all of them to it:

- A name is used for one attempt of one writer. Another writer never meets the partial object or reservation that a
  killed writer has left under it.
- Fewer copies than requested are not an error: `put` and `copies` return the number of copies.
- Nothing is removed by force. An object that a reader has a lease on stays, and its name is returned for another
  attempt (`remover.py`).
- All bytes are covered by a checksum: an object is stored sealed, with a header of size and checksum. Reading a
complete
  object that does not match it raises, so a reader never sees bytes of two objects.
- Nothing blocks the event loop, and each call ends within its time limit: with a result, or with an error of
  `tq_service.errors`.

Most clients block, and `BlockingObjectStore` calls them in daemon threads. Clients in C++ and Rust release Python's
lock while they work, as do clients that wait for a socket. Checksums and copies of large objects also release it, in
the same thread. A call that does not end in time occupies its thread until it ends: the caller gets an error, and
`Landing` keeps the call from writing to the caller's memory.
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
"""Maximum size of one object; a larger put is cut into pieces."""


class ObjectMissingError(DataLossError):
    """No complete object has this name: it was never put, is partially written, was removed, or its copies are lost.

    To a client it is a `DataLossError`, since the service reads only acknowledged objects.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The promises of an object store.

    Attributes:
        survives: the worst failure that an acknowledged object survives: the end of the writer's process, the loss of a
            node, or a loss of power on all nodes.
        fixed_copies: copies of each object, if the store itself decides that; None if `put` does. More copies than
            these cannot be required.
        lists_names: whether `list_names` reads only the names with the prefix; if false, it is not called.
    """

    survives: Survives
    fixed_copies: int | None = None
    lists_names: bool = False


class ObjectStore(ABC):
    """Objects that are written once, under names never used before, and removed. Confined to one event loop.

    Names are segments of letters, digits, '.', '_', ':' and '-', joined by '/'. Calls may run concurrently; the store
    bounds how many reach the backend at a time, and the others wait. A cancelled call may still take effect: a put may
    leave an object, which the remover can find by its name.

    A store whose client is for asyncio subclasses this; one whose client blocks, `BlockingObjectStore`.
    """

    @property
    @abstractmethod
    def abilities(self) -> Abilities:
        """The promises of the store; known before `open`."""

    @abstractmethod
    async def open(self, node: str, offered_bytes: int) -> None:
        """Connect to the store. Call it once, before all other calls.

        Args:
            node: name of this process's node. A store that places copies puts none of this process's objects there.
            offered_bytes: memory of this node to offer to the store, for copies of other nodes; 0: none. Stores with
                their own memory ignore it.

        Raises:
            UnavailableError: the store cannot be reached.
            InvalidArgumentError: the store refuses its settings, such as a bucket that does not exist.
        """

    @abstractmethod
    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        """Write an object, complete or not at all.

        Args:
            name: a name that was never used before, not even by a failed attempt.
            parts: its bytes in parts, which must not change until this returns or raises; a cancelled call waits until
                they are no longer read.
            copies: number of nodes to hold it. If the store places copies, the node of this process does not count.

        Returns:
            Number of complete copies: at least 1, and fewer than requested if the store lacks nodes.

        Raises:
            AlreadyExistsError: the name was used before, maybe by this call if its first answer was lost; the stored
                object is unchanged. (A store that cannot detect this returns the copies of the stored object.)
            QuotaExceededError: no other node has capacity for it; removing objects frees capacity.
            InvalidArgumentError: it has more than `LARGEST_OBJECT_BYTES`.
            UnavailableError: the store did not answer, or refused. Whether an object is stored is unknown: retry under
                another name, and give this name to the remover.
        """

    @abstractmethod
    async def read(self, name: str, into: memoryview) -> None:
        """Read the first bytes of an object until `into` is full; after an error the content of `into` is undefined.

        Raises:
            ObjectMissingError: no complete object has this name.
            DataLossError: it is shorter, or does not match its checksum (which only a complete read detects).
            UnavailableError: it cannot be read now.
        """

    @abstractmethod
    async def copies(self, names: Sequence[str]) -> list[int]:
        """Return how many complete copies each object has; 0: none, or the object is partially written.

        A copy on the node of this process counts here: another process may have placed it there.

        Raises:
            UnavailableError: the store did not answer.
        """

    @abstractmethod
    async def remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, partially written ones too, unless they are leased; never by force.

        Returns:
            Names to try again after a second: objects that are leased or still being written, or whose removal the
            store did not confirm.

        Raises:
            UnavailableError: the store did not answer; any of the objects may be gone.
        """

    @abstractmethod
    async def size(self, name: str) -> int:
        """Return the number of bytes put under a name, without the header.

        Raises:
            ObjectMissingError: no complete object has this name.
            UnavailableError: the store did not answer.
        """

    def list_names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of complete objects with a prefix, in any order; only if the store has `lists_names`.

        Objects that are put or removed at the same time may be missing or included.

        Raises:
            UnavailableError: the store did not answer.
        """
        raise TypeError(f"{type(self).__qualname__} does not list names; check abilities.lists_names")

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect from the store; running calls end with an error. Objects stay. A second call does nothing."""


class BlockingObjectStore(ObjectStore):
    """A store whose client blocks: each call runs in one of its threads, with a time limit.

    A subclass has one blocking method for each call, with the same name and a leading `_`. They run concurrently, after
    `_connect` has returned. `_error` converts their exceptions other than `TqError`.

    Args:
        url: URL of the store; its settings `threads` and `timeout_seconds` override the following arguments.
        threads: number of concurrent calls; others wait.
        timeout_seconds: maximum duration of a call, with its wait for a thread.

    Attributes:
        place: the redacted URL, for messages.
    """

    engine: ClassVar[str]
    """Name of the backend in messages and thread names."""

    def __init__(self, url: EngineUrl, *, threads: int = 8, timeout_seconds: float = 30.0) -> None:
        self.place = url.redacted
        self.timeout_seconds = url.seconds("timeout_seconds", timeout_seconds)
        self._free = asyncio.Semaphore(url.count("threads", threads))
        self._running: set[asyncio.Future[Callable[[], Any]]] = set()
        self._is_open = False

    @classmethod
    def from_url(cls, url: str) -> ObjectStore:
        """Create the store that a URL describes, without opening it."""
        parsed = EngineUrl(url)
        made = cls(parsed)
        parsed.check_all_used()
        return made

    # A subclass implements

    @abstractmethod
    def _connect(self, node: str, offered_bytes: int) -> None:
        """Connect to the store, see `open`."""

    @abstractmethod
    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int:
        """Write a sealed object; return the number of its copies."""

    @abstractmethod
    def _read(self, name: str, landing: Landing) -> None:
        """Write the first bytes of an object to `landing`, as many as fit."""

    @abstractmethod
    def _copies(self, names: Sequence[str]) -> list[int]:
        """Return how many complete copies each object has; there is at least one name."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, at least one; return the names to try again."""

    @abstractmethod
    def _size(self, name: str) -> int:
        """Return the number of bytes put under a name, without the header."""

    def _close(self) -> None:
        """Close the client; many clients keep no connection open."""

    def _error(self, error: Exception) -> TqError:
        """Convert an exception of the client to an error of the service."""
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
        # Closing a client in C++ during a call crashes the process, so a client with a hanging call stays open.
        if not self._running or not (await asyncio.wait(self._running, timeout=_CLOSE_SECONDS))[1]:
            with contextlib.suppress(TqError):  # the backend is gone already
                await self._in_thread(self._close)

    async def _run(self, call: Callable[[], T]) -> T:
        if not self._is_open:
            raise UnavailableError(f"the {self.engine} engine of {self.place} is not open; open it before other calls")
        return await self._in_thread(call)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Return the result of a call; a cancelled caller also waits for its end, as it reads the caller's memory."""
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
        except Exception as error:  # any exception of the client
            raise self._error(error) from error

    def _end(self, running: asyncio.Future[Callable[[], Any]]) -> None:
        self._running.discard(running)
        self._free.release()

    def _late(self, detail: str) -> UnavailableError:
        return UnavailableError(f"{self.engine} did not answer within {self.timeout_seconds:g} s ({detail})")

    def _unavailable(self, detail: str) -> UnavailableError:
        """Return the error of a call that the store did not answer, or refused."""
        return UnavailableError(f"{self.engine} at {self.place}: {detail[:_MESSAGE_CHARACTERS]}")

    def _full(self, detail: str) -> QuotaExceededError:
        """Return the error of a put that exceeds the capacity of the store."""
        return QuotaExceededError(
            f"{self.place} is full ({detail[:_MESSAGE_CHARACTERS]}); remove objects or give it more capacity",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )


class Landing:
    """Memory of a caller that a thread fills while the caller waits for it."""

    def __init__(self, name: str, into: memoryview) -> None:
        self._name = name
        self._into = into
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of bytes that fit."""
        return len(self._into)

    def write(self, header: Buffer, data: Buffer) -> None:
        """Copy the first bytes of an object into the memory, and check them.

        Raises:
            ObjectMissingError: the header is incomplete.
            DataLossError: see `check`.
        """
        with self._lock:
            if not self._is_closed:
                fill(self._into, (memoryview(data)[: len(self)],))
                check(self._name, header, self._into)

    def close(self) -> None:
        """Prevent further writes; waits for a running copy."""
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
    """Copy bytes to the start of `into` without holding Python's lock, which `bytes.join` would hold."""
    start = 0
    for view in filter(len, views):
        end = start + len(view)
        np.copyto(np.frombuffer(into[start:end], np.uint8), np.frombuffer(view, np.uint8))
        start = end


def size_of(name: str, header: Buffer) -> int:
    """Return the size of the object behind a header, without the header.

    Raises:
        ObjectMissingError: it is shorter than a header: partially written.
        DataLossError: it is not a header.
    """
    return _parse(name, header)[0]


def check(name: str, header: Buffer, data: memoryview) -> None:
    """Check the first bytes of an object, given its header.

    Raises:
        ObjectMissingError: the header is incomplete.
        DataLossError: the object is shorter, or `data` is all of it and does not match its checksum.
    """
    size, checksum = _parse(name, header)
    if len(data) > size:
        raise DataLossError(f"object {name} has {size} bytes; expected at least {len(data)}. It is from another put")
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
        scheme: name of the backend.
        host: the part between `//` and the next `/`, without user and password.
        path: the part after it, without the first `/`.
        username, password: from the URL, or None.
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
        """Return a setting as text from the URL."""
        self._asked.add(name)
        return self._options.get(name, default)

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return a setting with one of a few values."""
        value = self.text(name, default)
        if value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """Return a setting that is an integer."""
        value = self.text(name, str(default))
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise self._wrong(name, value, f"a whole number of at least {least}")
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        """Return a setting that is a time in seconds, greater than 0."""
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
        """Return a secret: from the file named by the setting `<name>_file`, else from an environment variable.

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
        """Refuse unknown settings, which no code has read.

        Raises:
            InvalidArgumentError: the URL has unknown settings.
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
"""Entry points of packages: the name is the scheme, the value a callable that makes an `ObjectStore` from a URL."""

_BUILT_IN: Final[dict[str, tuple[str, str, str]]] = {
    # scheme: module, class, extra that installs the packages it imports
    **dict.fromkeys(("s3", "gs", "az", "memory"), ("tq_service.objects.buckets", "BucketObjects", "obstore")),
    "file": ("tq_service.objects.buckets", "DirectoryObjects", "obstore"),
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), ("tq_service.objects.valkey", "ValkeyObjects", "valkey")),
    "mooncake": ("tq_service.objects.mooncake", "MooncakeObjects", "mooncake"),
}


def make_object_store(url: str) -> ObjectStore:
    """Create the object store that a URL names, without opening it.

    Args:
        url: such as `file:///mnt/shared/tq`; docs/engines.md describes its settings.

    Raises:
        InvalidArgumentError: no store has its scheme, the store's package is not installed, or a setting is wrong.
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
    """Return the schemes of all known object stores, whether their packages are installed or not."""
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
            except Exception as error:  # third-party code may raise anything
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
