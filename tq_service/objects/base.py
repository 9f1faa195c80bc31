"""The interface of an object engine, and the settings in its URL.

A new engine is an `ObjectStore` in a file, and an entry point.

An object is written once, under a name never used before, and is stored complete or not at all. It is read, from its
beginning, and removed once. Engines promise less than that, each of them something else; their duties are described
here, and `tests/objects/test_contract.py` holds all of them to it:

- A name is used for one attempt of one writer. Half an object or a reservation that a killed writer has left under it
  is never met by another writer.
- Fewer copies than requested are no error of the engine: `put` and `copies` ask it how many there are.
- Nothing is removed by force. An object that a reader has a lease on stays, and its name is returned to be asked again
  (`remover.py`).
- All bytes are behind a checksum (`sealed.py`). Reading a complete object that does not match it raises, so a reader
  never sees bytes of two objects.
- Nothing blocks the event loop, and each call ends: with a result, or with an error of `tq_service.errors` within the
  engine's time limit.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from tq_service.addresses import redacted
from tq_service.errors import DataLossError, InvalidArgumentError

Buffer: TypeAlias = bytes | bytearray | memoryview
Survives: TypeAlias = Literal["process", "node", "power"]

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
        survives: what an acknowledged object outlives: the writer's process, the loss of a node, or also the loss of
            power of all nodes.
        fixed_copies: copies of each object, if the engine itself decides that; None if `put` does. More than these
            cannot be required of it.
        lists_names: whether `list_names` looks at the names with the prefix alone; else it is not called.
    """

    survives: Survives
    fixed_copies: int | None = None
    lists_names: bool = False


class ObjectStore(ABC):
    """Objects that are written once, under names never used before, and removed. Confined to one event loop.

    Names are segments of letters, digits, '.', '_', ':' and '-', joined by '/'. Calls may run beside each other; the
    engine bounds how many at a time reach it, and the others wait. A call that is cancelled may still take effect: a
    put may leave an object, which its name lets the remover find.
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

    @abstractmethod
    async def aclose(self) -> None:
        """Leave the engine; calls under way end with an error. Objects stay. A second call does nothing."""

    def list_names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of complete objects that begin with `prefix`, in any order.

        Objects that are put or removed at the same time may be missing or included.

        Raises:
            UnavailableError: the engine did not answer.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not list names")


_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


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
