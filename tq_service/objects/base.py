"""What the service asks of an engine that keeps objects. A new one is an `ObjectStore` in a file, and an entry point.

An object is written once, under a name never used before, and is there whole or not at all. It is read, in ranges too,
and removed once. Engines promise less than that, each of them something else; what they must not do is described here,
and `tests/objects/test_contract.py` holds all of them to it:

- A name is used for one attempt of one writer (`names.py`). What a writer that was killed has left under it, half an
  object or a reservation, is never met by another one.
- Fewer copies than asked for is no error of the engine: `put` and `copies` say how many there are, by asking the engine
  and not by what was asked of it.
- Nothing is removed by force. An object that a reader has a lease on stays, and its name is returned to be asked again
  (`remover.py`).
- All bytes are behind a checksum (`sealed.py`); a read of a whole object that does not match it raises, so that a
  reader never sees bytes of two objects.
- Nothing blocks the event loop, and each call ends: with a result, or with an error of `tq_service.errors` within the
  time that the engine was given for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tq_service.errors import DataLossError

Buffer: TypeAlias = bytes | bytearray | memoryview

LARGEST_OBJECT_BYTES: Final = 64 << 20
"""What the service writes as one object; a larger put is cut into pieces. Engines take at least this much."""


class ObjectMissingError(DataLossError):
    """There is no complete object of this name: it was never put, is half written, was removed, or its copies are lost.

    To a client it is a `DataLossError`, since the service reads only what was acknowledged.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What an engine can do, and what it promises.

    Attributes:
        survives: what an acknowledged object outlives: the writer's process, the loss of a node, or also the loss of
            power of all nodes.
        largest_object_bytes: most bytes of one object, at least `LARGEST_OBJECT_BYTES`.
        fixed_copies: copies that each object has because the engine itself decides so; None where `put` decides. More
            than these cannot be required of it.
        reads_ranges: whether a part of an object is fetched without the rest of it.
        lists_by_prefix: whether `list_names` looks at the names with the prefix alone; else at all that there are.
    """

    survives: Literal["process", "node", "power"]
    largest_object_bytes: int = LARGEST_OBJECT_BYTES
    fixed_copies: int | None = None
    reads_ranges: bool = True
    lists_by_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an engine holds, of all its users together.

    Attributes:
        total_bytes: bytes it can hold, None where it does not know.
        used_bytes: bytes it holds, None where it does not know.
    """

    total_bytes: int | None = None
    used_bytes: int | None = None

    @property
    def free_bytes(self) -> int | None:
        """Bytes it takes yet, None where it does not know."""
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.total_bytes - self.used_bytes)


class ObjectStore(ABC):
    """Objects that are written once, under names never used before, and removed. Confined to one event loop.

    Calls may run beside each other; how many at a time reach the engine is bounded by it, and the others wait. A call
    that is cancelled may still take effect: a put may leave an object, which its name lets the remover find.
    """

    @property
    @abstractmethod
    def abilities(self) -> Abilities:
        """What it can do; known before `open`."""

    @abstractmethod
    async def open(self, node: str, offered_bytes: int) -> None:
        """Join the engine; once, before all other calls.

        Args:
            node: name of the node of this process, on which its own objects get no copy where the engine places them.
            offered_bytes: memory of this node to offer to the engine, for copies of other nodes; 0: none. Engines that
                have memory of their own take none.

        Raises:
            UnavailableError: the engine cannot be reached.
            InvalidArgumentError: the engine refuses its settings, such as a bucket that is not there.
        """

    @abstractmethod
    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        """Write an object, whole or not at all.

        Args:
            name: a name that was never used before, also not by an attempt that failed (`ObjectName`).
            parts: its bytes, one part after the other, which must not change until this returns or raises; a call that
                is cancelled waits until they are no longer read.
            copies: how many nodes are to hold it, the one of this process not counted where the engine places copies.

        Returns:
            How many complete copies there are; at least 1, and fewer than asked for where the engine has no more nodes.

        Raises:
            AlreadyExistsError: the name was used before, maybe by this call, whose first answer was lost; what is there
                stays as it is. (An engine that cannot see it answers with the copies of what is there.)
            QuotaExceededError: no other node has capacity for it; there is more when objects have been removed.
            InvalidArgumentError: the object is larger than the engine takes.
            UnavailableError: the engine did not answer, or refused. Whether an object is there is not known: another
                attempt takes another name, and this one goes to the remover.
        """

    @abstractmethod
    async def read(self, name: str, into: memoryview, start: int = 0) -> None:
        """Read bytes of an object from `start` on until `into` is full; what is in it after an error is not defined.

        Raises:
            ObjectMissingError: there is no complete object of this name.
            DataLossError: it is shorter, or does not match its checksum (which only a read of all of it can see).
            UnavailableError: it cannot be read now.
        """

    @abstractmethod
    async def copies(self, names: Sequence[str]) -> list[int]:
        """Return how many complete copies each object has; 0: there is none, or the object is half written.

        One on the node of this process counts here: another process may have placed it there.

        Raises:
            UnavailableError: the engine did not answer.
        """

    @abstractmethod
    async def remove(self, names: Sequence[str]) -> list[str]:
        """Remove objects, half-written ones too, unless they are leased; never by force.

        Returns:
            Names to be asked again after a second: of objects that are leased, or still being written, or of which the
            engine did not say that they are gone.

        Raises:
            UnavailableError: the engine did not answer; any of them may be gone.
        """

    @abstractmethod
    async def size(self, name: str) -> int:
        """Return the number of bytes that an object was put with.

        Raises:
            ObjectMissingError: there is no complete object of this name.
            UnavailableError: the engine did not answer.
        """

    @abstractmethod
    async def capacity(self) -> Capacity:
        """Return what the engine holds.

        Raises:
            UnavailableError: the engine did not answer.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Leave the engine; calls under way end with an error. Objects stay. A second call does nothing."""

    @abstractmethod
    def list_names(self, prefix: str) -> AsyncIterator[Sequence[str]]:
        """Yield the names of complete objects that begin with `prefix`, in any order, a page at a time.

        What is put or removed meanwhile may be missing or be there.

        Raises:
            UnavailableError: the engine did not answer.
        """

    async def remove_below(self, prefix: str) -> bool:
        """Remove the objects whose names begin with `prefix`, such as those of an instance that is gone; see `remove`.

        Returns:
            Whether none is left; False: ask again after a second.

        Raises:
            UnavailableError: the engine did not answer; any of them may be gone.
        """
        is_empty = True
        async for names in self.list_names(prefix):
            is_empty &= not await self.remove(names)
        return is_empty
