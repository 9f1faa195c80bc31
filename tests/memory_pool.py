"""An engine in memory that does, on request, what real ones were seen to do.

It has nodes that can be lost, leases that put off a removal, calls that wait or are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tq_service.errors import AlreadyExistsError, QuotaExceededError, UnavailableError
from tq_service.objects.base import (
    HEADER_BYTES,
    Abilities,
    Buffer,
    EngineUrl,
    ObjectMissingError,
    ObjectStore,
    check,
    joined,
    seal,
    size_of,
)

_DEFAULT_NODE_BYTES: Final = 1 << 30


@dataclass(slots=True)
class _Held:
    data: bytes
    nodes: set[str]


class MemoryPool:
    """Nodes and the objects on them, shared by the engines of one name; what goes wrong in it is set by tests.

    Attributes:
        nodes: bytes that each node can hold, by its name.
        objects: sealed objects by name.
        leased: names that are not removed now.
        half_written: names whose writer was killed in the middle.
        refusal: raised by each call, None for none.
        gate: what each call waits for first, None for nothing.
    """

    def __init__(self, nodes: dict[str, int]) -> None:
        self.nodes = nodes
        self.objects: dict[str, _Held] = {}
        self.leased: set[str] = set()
        self.half_written: set[str] = set()
        self.refusal: Exception | None = None
        self.gate: asyncio.Event | None = None

    def used_bytes(self, node: str) -> int:
        """Return the bytes that a node holds."""
        return sum(len(held.data) for held in self.objects.values() if node in held.nodes)

    def lose_node(self, node: str) -> None:
        """Lose a node, with its copies."""
        self.nodes.pop(node, None)
        for name, held in list(self.objects.items()):
            held.nodes.discard(node)
            if not held.nodes:
                del self.objects[name]


_POOLS: Final[dict[str, MemoryPool]] = {}


def memory_pool(name: str, *, node_count: int = 1, node_bytes: int = _DEFAULT_NODE_BYTES) -> MemoryPool:
    """Return the pool of a name, made with so many nodes if it is new."""
    if name not in _POOLS:
        _POOLS[name] = MemoryPool({f"pool-{number}": node_bytes for number in range(node_count)})
    return _POOLS[name]


def forget_memory_pool(name: str) -> None:
    """Drop a pool and its objects, as a restart of an engine without a disk does."""
    _POOLS.pop(name, None)


class PoolObjects(ObjectStore):
    """Objects of a pool in this process: `pool://NAME?nodes=1&node_bytes=...`, besides nodes that offer memory."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._node = ""
        self._is_closed = False

    @classmethod
    def from_url(cls, url: str) -> PoolObjects:
        parsed = EngineUrl(url)
        node_count = parsed.count("nodes", 1, least=0)
        node_bytes = parsed.count("node_bytes", _DEFAULT_NODE_BYTES)
        parsed.check_all_used()
        return cls(memory_pool(parsed.location, node_count=node_count, node_bytes=node_bytes))

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives="process")

    async def open(self, node: str, offered_bytes: int) -> None:
        await self._begin()
        self._node = node
        if offered_bytes:
            self._pool.nodes[node] = offered_bytes

    async def put(self, name: str, parts: Sequence[Buffer], *, copies: int) -> int:
        data = bytes(joined(seal(name, parts)))
        await self._begin()
        pool = self._pool
        if name in pool.objects or name in pool.half_written:
            raise AlreadyExistsError(f"object {name} is there; take another attempt's name")
        others = [node for node in pool.nodes if node != self._node]
        free = [node for node in others if pool.nodes[node] - pool.used_bytes(node) >= len(data)]
        if not free:
            raise QuotaExceededError(
                f"no other node has capacity for object {name} of {len(data)} bytes; remove objects or add nodes",
                retry_after_seconds=1.0,
            )
        nodes = set(sorted(free, key=pool.used_bytes)[:copies])
        pool.objects[name] = _Held(data, nodes)
        return len(nodes)

    async def read(self, name: str, into: memoryview) -> None:
        await self._begin()
        data = self._held(name).data
        found = memoryview(data)[HEADER_BYTES : HEADER_BYTES + len(into)]
        into[: len(found)] = found
        check(name, data, into)

    async def copies(self, names: Sequence[str]) -> list[int]:
        await self._begin()
        held = (self._pool.objects.get(name) for name in names)
        return [len(each.nodes) if each else 0 for each in held]

    async def remove(self, names: Sequence[str]) -> list[str]:
        await self._begin()
        again = [name for name in names if name in self._pool.leased]
        for name in set(names).difference(again):
            self._pool.objects.pop(name, None)
            self._pool.half_written.discard(name)
        return again

    async def size(self, name: str) -> int:
        await self._begin()
        return size_of(name, self._held(name).data)

    async def aclose(self) -> None:
        self._is_closed = True

    async def _begin(self) -> None:
        if self._pool.gate is not None:
            await self._pool.gate.wait()
        if self._pool.refusal is not None:
            raise self._pool.refusal
        if self._is_closed:
            raise UnavailableError("the engine is closed; open another one")

    def _held(self, name: str) -> _Held:
        held = self._pool.objects.get(name)
        if held is None:
            raise ObjectMissingError(f"object {name} is not there; it was removed, or all of its copies are lost")
        return held
