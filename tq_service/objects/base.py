"""The object store interface, and functions that parse store URLs and create stores from them.

In messages and in docs/engines.md, an object store is called an engine. To add an engine, subclass `ObjectStore` (for
an asyncio client) or `BlockingObjectStore` (for a blocking client), and register the module as an entry point.

An object is written once, under a name that has never been used before, and is stored either completely or not at all.
Objects are always read from the beginning. Backends themselves often guarantee less, but every store must fulfill the
following contract, which `tests/objects/test_contract.py` checks:

- A name is used for only one attempt by one writer. A writer therefore never finds a partial object, or a reservation
  left by a killed writer, under the name that it uses.
- A store may make fewer copies than requested without raising an error. `put` and `copies` return the number of copies.
- Objects are never removed by force. An object leased by a reader is kept, and its name is returned for a later retry
  (`remover.py`).
- A checksum covers all bytes. Each object starts with a header that contains its size and checksum. Reading a complete
  object that does not match its checksum raises an error, so a reader never receives a mix of two objects.
- Calls do not block the event loop. Each call ends within its time limit, either with a result or with an error from
  `tq_service.errors`.

Most clients are blocking, so `BlockingObjectStore` calls them in daemon threads. Clients written in C++ or Rust release
the GIL while they work, and so do clients waiting for a socket. Checksumming and copying large objects also release the
GIL. A call that exceeds its time limit still occupies its thread until it ends. The caller receives an error
immediately, and `Landing` prevents the late call from writing to the caller's memory.
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
"""Maximum size of an object in bytes. A larger put is split into several objects."""


class ObjectMissingError(DataLossError):
    """Raised if no complete object has the given name.

    The object was never put, is only partially written, was removed, or lost all its copies. Clients receive a
    `DataLossError` instead, because the service reads only objects that were acknowledged.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Guarantees and capabilities of an object store.

    Attributes:
        survives: worst failure that an acknowledged object survives. "process" means the death of the writer's process,
            "node" the loss of a node, and "power" a power failure on all nodes.
        fixed_copies: number of copies per object if the store determines this number, or None if the caller of `put`
            does. Callers cannot require more copies than this.
        lists_names: whether the store supports `list_names` and reads only names with the given prefix. If False,
            `list_names` must not be called.
    """

    survives: Survives
    fixed_copies: int | None = None
    lists_names: bool = False


class ObjectStore(ABC):
    """A store for objects that are written once, under new names. Each store must be used from a single event loop.

    Object names consist of segments of letters, digits, '.', '_', ':' and '-', separated by '/'. Calls may run
    concurrently. The store limits the number of concurrent calls to the backend and queues further calls. A cancelled
    call may still take effect. For example, a cancelled put may leave an object behind. The remover can remove such an
    object by name.

    To add a store, derive from this class if the store's client uses asyncio, or from `BlockingObjectStore` if the
    client blocks.
    """

    @property
    @abstractmethod
    def abilities(self) -> Abilities:
        """Guarantees and capabilities of the store. This attribute can be read even before `open` is called."""

    @abstractmethod
    async def open(self, node: str, offered_bytes: int) -> None:
        """Connect to the store. Call this method once, before any other method.

        Args:
            node: name of this process's node. A store that controls placement must not place copies of this process's
                objects on that node.
            offered_bytes: number of bytes of this node's memory that the store may use for objects of other nodes.
                Stores with separate memory ignore this argument.

        Raises:
            UnavailableError: the store cannot be reached.
            InvalidArgumentError: the store rejects its settings, for example because the bucket does not exist.
        """

    @abstractmethod
    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        """Write an object, either completely or not at all.

        Args:
            name: a name that has never been used before, not even by a failed attempt.
            parts: bytes of the object, as a sequence of buffers. The buffers must not change until `put` returns or
                raises an error. A cancelled call ends only after it has stopped reading the buffers.
            copies: number of nodes that should store the object. If the store controls placement, this process's node
                does not count.

        Returns:
            The number of complete copies, which is at least 1. It is lower than requested if the store has too few
            nodes.

        Raises:
            AlreadyExistsError: the name has been used before, possibly because an earlier attempt in this call
                succeeded but its response was lost. The stored object is unchanged. Stores that cannot detect this case
                instead return how many copies of the stored object exist.
            QuotaExceededError: no other node has capacity for the object. Removing objects frees capacity.
            InvalidArgumentError: the object is larger than `LARGEST_OBJECT_BYTES`.
            UnavailableError: the store did not respond, or rejected the call. It is unknown whether the object was
                stored. Retry under a new name, and pass the old name to the remover.
        """

    @abstractmethod
    async def read(self, name: str, into: memoryview) -> None:
        """Fill `into` with the first bytes of an object. After an error, the content of `into` is undefined.

        Raises:
            ObjectMissingError: no complete object has this name.
            DataLossError: the object is shorter than `into`, or does not match its checksum. The checksum is verified
                only if the entire object is read.
            UnavailableError: the object is temporarily unavailable.
        """

    @abstractmethod
    async def copies(self, names: Sequence[str]) -> list[int]:
        """Return each object's number of complete copies, which is 0 if it is missing or partially written.

        The result includes copies on this process's node, because another process may have placed them there.

        Raises:
            UnavailableError: the store did not respond.
        """

    @abstractmethod
    async def remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, including partially written ones, unless they are leased. Removal is never forced.

        Returns:
            Names whose removal should be retried after one second. The named objects are leased or still being written,
            or the store did not confirm their removal.

        Raises:
            UnavailableError: the store did not respond. Some of the objects may nevertheless have been removed.
        """

    @abstractmethod
    async def size(self, name: str) -> int:
        """Return the size of an object in bytes, excluding the header.

        Raises:
            ObjectMissingError: no complete object has this name.
            UnavailableError: the store did not respond.
        """

    def list_names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the name of each complete object whose name begins with `prefix`, in any order.

        This method requires `abilities.lists_names`. Objects that are put or removed during the call may or may not be
        included.

        Raises:
            UnavailableError: the store did not respond.
        """
        raise TypeError(f"{type(self).__qualname__} cannot list names; check abilities.lists_names before the call")

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect from the store without removing objects. Running calls fail. This method is idempotent."""


class BlockingObjectStore(ObjectStore):
    """An object store with a blocking client. The store runs each call in a thread, with a time limit.

    For each public call, a subclass implements a blocking method with the same name, prefixed with `_`. These methods
    may run concurrently once `_connect` has returned. If a method raises an exception other than `TqError`, `_error`
    converts the exception to a service error.

    Args:
        url: URL of the store. The settings `threads` and `timeout_seconds` in the URL override the arguments below.
        threads: maximum number of concurrent calls. Further calls wait.
        timeout_seconds: maximum duration of a call, including its wait for a thread.

    Attributes:
        place: the redacted URL, for use in messages.
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
        """Create the store for a URL without opening it."""
        parsed = EngineUrl(url)
        made = cls(parsed)
        parsed.check_all_used()
        return made

    # Implemented by subclasses

    @abstractmethod
    def _connect(self, node: str, offered_bytes: int) -> None:
        """Connect to the store (see `open`)."""

    @abstractmethod
    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int:
        """Write a sealed object, and return its number of copies."""

    @abstractmethod
    def _read(self, name: str, landing: Landing) -> None:
        """Write as many of an object's first bytes as fit into `landing`."""

    @abstractmethod
    def _copies(self, names: Sequence[str]) -> list[int]:
        """Return the number of complete copies of each object. `names` is never empty."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, and return the names of those for which removal must be retried. `names` is never empty."""

    @abstractmethod
    def _size(self, name: str) -> int:
        """Return the size of an object in bytes, excluding the header."""

    def _close(self) -> None:
        """Close the client. By default, do nothing, because many clients keep no connection open."""

    def _error(self, error: Exception) -> TqError:
        """Convert a client exception to a service error."""
        return self._unavailable(f"{type(error).__name__}: {error}")

    # Calls, which run in threads

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
        # Closing a C++ client during a call crashes the process, so the client stays open if a call hangs.
        if not self._running or not (await asyncio.wait(self._running, timeout=_CLOSE_SECONDS))[1]:
            with contextlib.suppress(TqError):  # the backend may already be unavailable
                await self._in_thread(self._close)

    async def _run(self, call: Callable[[], T]) -> T:
        if not self._is_open:
            raise UnavailableError(f"the {self.engine} engine at {self.place} is not open; call open first")
        return await self._in_thread(call)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run a call in a thread. On cancellation, wait until the call ends, because it may use the caller's memory."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                await self._free.acquire()
        except TimeoutError:
            raise self._late("no thread became available") from None
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
            raise self._late("the call is still running in its thread")
        try:
            return running.result()()
        except TqError:
            raise
        except Exception as error:  # the client may raise any exception
            raise self._error(error) from error

    def _end(self, running: asyncio.Future[Callable[[], Any]]) -> None:
        self._running.discard(running)
        self._free.release()

    def _late(self, detail: str) -> UnavailableError:
        return UnavailableError(f"{self.engine} did not respond within {self.timeout_seconds:g} s ({detail})")

    def _unavailable(self, detail: str) -> UnavailableError:
        """Return the error for a call that the store rejected or did not answer."""
        return UnavailableError(f"{self.engine} at {self.place}: {detail[:_MESSAGE_CHARACTERS]}")

    def _full(self, detail: str) -> QuotaExceededError:
        """Return the error for a put that exceeds the store's capacity."""
        return QuotaExceededError(
            f"{self.place} is full ({detail[:_MESSAGE_CHARACTERS]}); remove objects, or increase the store's capacity",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )


class Landing:
    """The memory of a caller who waits while a thread fills it."""

    def __init__(self, name: str, into: memoryview) -> None:
        self._name = name
        self._into = into
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the size of the memory in bytes."""
        return len(self._into)

    def write(self, header: Buffer, data: Buffer) -> None:
        """Copy the first bytes of an object into the memory, and verify them.

        Raises:
            ObjectMissingError: the header is incomplete.
            DataLossError: see `check`.
        """
        with self._lock:
            if not self._is_closed:
                fill(self._into, (memoryview(data)[: len(self)],))
                check(self._name, header, self._into)

    def close(self) -> None:
        """Wait for any copy in progress to finish, and ignore all later writes."""
        with self._lock:
            self._is_closed = True


def seal(name: str, parts: Sequence[Buffer]) -> list[memoryview]:
    """Return an object's header followed by its parts, all as flat byte views.

    Raises:
        InvalidArgumentError: the object is larger than `LARGEST_OBJECT_BYTES`.
    """
    views = [memoryview(part).cast("B") for part in parts]
    size = sum(map(len, views))
    if size > LARGEST_OBJECT_BYTES:
        raise InvalidArgumentError(
            f"object {name} has {size} bytes; expected at most {LARGEST_OBJECT_BYTES}. Split the data into several "
            f"objects",
            field="parts",
        )
    return [memoryview(_HEADER.pack(_MAGIC, size, _checksum(views))), *views]


def joined(sealed: Sequence[memoryview]) -> memoryview:
    """Return a sealed object as a single contiguous buffer. The function releases the GIL while copying."""
    whole = memoryview(bytearray(sum(map(len, sealed))))
    fill(whole, sealed)
    return whole


def fill(into: memoryview, views: Sequence[memoryview]) -> None:
    """Copy bytes to the start of `into`. Unlike `bytes.join`, this function releases the GIL."""
    start = 0
    for view in filter(len, views):
        end = start + len(view)
        np.copyto(np.frombuffer(into[start:end], np.uint8), np.frombuffer(view, np.uint8))
        start = end


def size_of(name: str, header: Buffer) -> int:
    """Return the object size recorded in a header, excluding the header itself.

    Raises:
        ObjectMissingError: the object is too short to contain a header, so it was only partially written.
        DataLossError: `header` is not a valid object header.
    """
    return _parse(name, header)[0]


def check(name: str, header: Buffer, data: memoryview) -> None:
    """Check bytes read from the start of an object against the object's header.

    Raises:
        ObjectMissingError: the header is incomplete.
        DataLossError: the object is shorter than `data`, or `data` is the complete object but does not match the
            checksum.
    """
    size, checksum = _parse(name, header)
    if len(data) > size:
        raise DataLossError(f"object {name} has {size} bytes; expected at least {len(data)}. A different put wrote it")
    if len(data) == size and _checksum([data]) != checksum:
        raise DataLossError(
            f"the {size} bytes of object {name} do not match their checksum; this copy is corrupt or truncated"
        )


def _parse(name: str, header: Buffer) -> tuple[int, int]:
    if len(header) < HEADER_BYTES:
        raise ObjectMissingError(
            f"object {name} has only {len(header)} bytes; expected at least a header. The object is only partially "
            f"written"
        )
    magic, size, checksum = _HEADER.unpack(bytes(header[:HEADER_BYTES]))
    if magic != _MAGIC:
        raise DataLossError(f"object {name} begins with {magic!r}; expected {_MAGIC!r}. A different program wrote it")
    return size, checksum


def _checksum(views: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


class EngineUrl:
    """An object store URL such as `s3://bucket/prefix?region=us-east-1`.

    The URL may contain a password, so messages show the attribute `redacted` instead.

    Attributes:
        scheme: name of the backend.
        host: part between `//` and the next `/`, excluding the user name and password.
        path: part after the host, excluding the leading `/`.
        username, password: user name and password in the URL, or None.
    """

    def __init__(self, url: str) -> None:
        """Parse a URL.

        Raises:
            InvalidArgumentError: `url` is not a URL, or contains a setting more than once.
        """
        parts = urlsplit(url)
        if not parts.scheme or "://" not in url:
            raise InvalidArgumentError(f"object store is {redacted(url)!r}; expected a URL such as s3://bucket/prefix")
        self.scheme = parts.scheme
        self.host = parts.netloc.rpartition("@")[2]
        self.path = unquote(parts.path.removeprefix("/"))
        self.username = None if parts.username is None else unquote(parts.username)
        self.password = None if parts.password is None else unquote(parts.password)
        self.redacted = redacted(url)
        self._options: dict[str, str] = {}
        for name, values in parse_qs(parts.query, keep_blank_values=True).items():
            if len(values) != 1:
                raise InvalidArgumentError(f"{self.redacted}: {name} is set {len(values)} times; expected once")
            self._options[name] = values[0]
        self._asked: set[str] = set()

    @property
    def location(self) -> str:
        """The host and path, separated by `/`."""
        return f"{self.host}/{self.path}" if self.path else self.host

    def text(self, name: str, default: str) -> str:
        """Return a setting as text."""
        self._asked.add(name)
        return self._options.get(name, default)

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return a setting whose value must be one of `choices`."""
        value = self.text(name, default)
        if value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """Return the value of an integer setting, which must be at least `least`."""
        value = self.text(name, str(default))
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise self._wrong(name, value, f"a whole number of at least {least}")
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        """Return a setting as a positive number of seconds."""
        value = self.text(name, str(default))
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise self._wrong(name, value, "a number of seconds greater than 0")
        return seconds

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a setting as a boolean."""
        value = self.text(name, str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise self._wrong(name, value, "true or false")
        return value in _TRUE

    def secret(self, name: str, variable: str) -> str | None:
        """Return the secret in the file that `<name>_file` names or, without that setting, in an environment variable.

        Raises:
            InvalidArgumentError: the file cannot be read.
        """
        found = self.file(f"{name}_file")
        return os.environ.get(variable) if found is None else found.decode().strip()

    def file(self, name: str) -> bytes | None:
        """Return the content of the file named by a setting, or None if the setting is missing or empty.

        Raises:
            InvalidArgumentError: the file cannot be read.
        """
        path = self.text(name, "")
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            raise InvalidArgumentError(
                f"{self.redacted}: {name} is {path}, which cannot be read ({type(error).__name__}); expected a "
                "readable file"
            ) from error

    def check_all_used(self) -> None:
        """Check that the store has read all settings in the URL. Unread settings count as unknown.

        Raises:
            InvalidArgumentError: the URL contains unknown settings.
        """
        unknown = sorted(self._options.keys() - self._asked)
        if unknown:
            raise InvalidArgumentError(
                f"{self.redacted} has unknown settings {', '.join(unknown)}; {self.scheme} accepts "
                f"{', '.join(sorted(self._asked)) or 'none'}"
            )

    def _wrong(self, name: str, value: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.redacted}: {name} is {value!r}; expected {expected}", field=name)


ENTRY_POINT_GROUP: Final = "tq_service.object_stores"
"""Entry point group for third-party stores. Each entry point maps a URL scheme to a function that creates a store."""

_BUILT_IN: Final[dict[str, tuple[str, str, str]]] = {
    # scheme: module, class, and extra that installs the packages imported by the module
    **dict.fromkeys(("s3", "gs", "az", "memory"), ("tq_service.objects.buckets", "BucketObjects", "obstore")),
    "file": ("tq_service.objects.buckets", "DirectoryObjects", "obstore"),
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), ("tq_service.objects.valkey", "ValkeyObjects", "valkey")),
    "mooncake": ("tq_service.objects.mooncake", "MooncakeObjects", "mooncake"),
}


def make_object_store(url: str) -> ObjectStore:
    """Create the object store for a URL without opening it.

    Args:
        url: a URL such as `file:///mnt/shared/tq`. See docs/engines.md for the available settings.

    Raises:
        InvalidArgumentError: the scheme is unknown, the store's package is not installed, or a setting is invalid.
    """
    parsed = EngineUrl(url)
    store = _factory(parsed)(url)
    if not isinstance(store, ObjectStore):
        raise InvalidArgumentError(
            f"{parsed.redacted}: the engine {parsed.scheme!r} returned {type(store).__qualname__}; expected a subclass "
            "of tq_service.objects.base.ObjectStore"
        )
    return store


def object_store_schemes() -> list[str]:
    """Return the URL schemes of all known object stores, even if their packages are not installed."""
    return sorted({*_BUILT_IN, *(point.name for point in _entry_points())})


def _factory(url: EngineUrl) -> Callable[[str], Any]:
    built_in = _BUILT_IN.get(url.scheme)
    if built_in is not None:
        module, name, extra = built_in
        try:
            factory: Callable[[str], Any] = getattr(importlib.import_module(module), name).from_url
        except ImportError as error:
            raise InvalidArgumentError(
                f"{url.redacted}: could not import a package that the engine requires ({error}). Install "
                f"tq-service[{extra}]"
            ) from error
        return factory
    for point in _entry_points():
        if point.name == url.scheme:
            try:
                loaded: Callable[[str], Any] = point.load()
            except Exception as error:  # third-party code may raise any error
                raise InvalidArgumentError(
                    f"{url.redacted}: could not load the engine {point.value}: {type(error).__name__}: {error}"
                ) from error
            return loaded
    raise InvalidArgumentError(
        f"{url.redacted}: no engine has the scheme {url.scheme!r}; "
        f"{nearest(url.scheme, object_store_schemes(), all_known=True)}. For other schemes, install a package with an "
        f"entry point in {ENTRY_POINT_GROUP!r}"
    )


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
