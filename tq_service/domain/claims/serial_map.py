"""A map by ever larger numbers, of which one can be had as it is at a moment without a copy of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value")
_BLOCK_SHIFT = 10


class SerialMap(Generic[Value]):
    """Values by serial, in blocks; a block that was frozen is copied when it is first changed.

    Freezing costs a pointer for a thousand serials, a change at most the copy of one block.
    """

    __slots__ = ("_blocks", "_frozen", "_size")

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, Value]] = {}
        self._frozen: set[int] = set()  # blocks that somebody else may have too
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, serial: int) -> Value | None:
        """Return the value of a serial, None where there is none."""
        block = self._blocks.get(serial >> _BLOCK_SHIFT)
        return None if block is None else block.get(serial)

    def add(self, serial: int, value: Value) -> None:
        """Enter a value under a new serial."""
        self._own(serial >> _BLOCK_SHIFT)[serial] = value
        self._size += 1

    def update(self, values: Mapping[int, Value]) -> None:
        """Enter values under new serials."""
        for number, numbered in itertools.groupby(values.items(), lambda item: item[0] >> _BLOCK_SHIFT):
            self._own(number).update(numbered)
        self._size += len(values)

    def pop(self, serial: int) -> Value | None:
        """Remove a value and return it; None where there was none."""
        number = serial >> _BLOCK_SHIFT
        if serial not in self._blocks.get(number, ()):
            return None
        block = self._own(number)
        value = block.pop(serial)
        self._size -= 1
        if not block:
            del self._blocks[number]
        return value

    def clear(self) -> None:
        """Remove everything."""
        self._blocks = {}
        self._frozen.clear()
        self._size = 0

    def values(self) -> Iterator[Value]:
        """Return all values."""
        return (value for block in self._blocks.values() for value in block.values())

    def freeze(self) -> tuple[dict[int, Value], ...]:
        """Return the blocks as they are now; nobody changes them any more."""
        self._frozen.update(self._blocks)
        return tuple(self._blocks.values())

    def _own(self, number: int) -> dict[int, Value]:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = {}
            self._frozen.discard(number)
        elif number in self._frozen:
            block = self._blocks[number] = block.copy()
            self._frozen.discard(number)
        return block
