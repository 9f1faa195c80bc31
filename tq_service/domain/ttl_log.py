"""What is remembered for a while by its id: the newest entry of each, forgotten oldest first."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
_BLOCK_ENTRIES = 1024


class Entry(NamedTuple, Generic[Value]):
    """What is remembered of an id, and since when, in seconds of wall-clock time."""

    key: bytes
    seconds: float
    value: Value


LogSnapshot = Sequence[Sequence[Entry[Any]]]
"""Entries in blocks, oldest first, as they were at one moment."""


def merged(*logs: LogSnapshot) -> LogSnapshot:
    """Return the entries of several logs as one."""
    return [sorted((entry for log in logs for block in log for entry in block), key=lambda entry: entry.seconds)]


class TtlLog(Generic[Value]):
    """Entries in order of time, found by id. Full blocks of them never change, so snapshots share them."""

    __slots__ = ("_blocks", "_entries", "_gone")

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry[Value]] = {}
        self._blocks: deque[list[Entry[Value]]] = deque()
        self._gone = 0  # entries of the first block that were dropped

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def get(self, key: bytes) -> Entry[Value] | None:
        """Return the newest entry of an id, None where there is none."""
        return self._entries.get(key)

    def add(self, key: bytes, seconds: float, value: Value) -> None:
        """Remember something from `seconds` on, which is not before any other entry."""
        entry = Entry(key, seconds, value)
        self._entries[key] = entry
        if not self._blocks or len(self._blocks[-1]) == _BLOCK_ENTRIES:
            self._blocks.append([])
        self._blocks[-1].append(entry)

    @property
    def oldest(self) -> Entry[Value] | None:
        """The entry that was remembered first, also where a newer one of its id has taken its place."""
        return self._blocks[0][self._gone] if self._blocks else None

    def drop_oldest(self) -> None:
        """Forget the oldest entry."""
        block = self._blocks[0]
        entry = block[self._gone]
        self._gone += 1
        if self._gone == len(block):
            self._blocks.popleft()
            self._gone = 0
        if self._entries[entry.key] is entry:
            del self._entries[entry.key]

    def drop_before(self, seconds: float) -> None:
        """Forget all entries from before a time."""
        while (oldest := self.oldest) is not None and oldest.seconds < seconds:
            self.drop_oldest()

    def snapshot(self) -> LogSnapshot:
        """Return all entries as they are now."""
        blocks = list(self._blocks)
        if blocks:
            blocks[-1] = blocks[-1].copy()
            blocks[0] = blocks[0][self._gone :]
        return blocks

    def restore(self, snapshot: LogSnapshot) -> None:
        """Remember the entries of a snapshot; for a log that is empty."""
        entries = itertools.chain.from_iterable(snapshot)
        while block := list(itertools.islice(entries, _BLOCK_ENTRIES)):
            self._blocks.append(block)
            self._entries.update((entry.key, entry) for entry in block)
