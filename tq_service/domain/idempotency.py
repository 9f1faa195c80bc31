"""What is remembered of requests for a time: their answers, so that a retry has no second effect and gets the same."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tq_service.errors import InvalidArgumentError

_BLOCK_ENTRIES = 1024
_ENTRY_BYTES = 256  # of an id, a time, and what holds them together


class Entry(NamedTuple):
    """What is remembered of an id, and since when, in seconds of wall-clock time."""

    key: bytes
    seconds: float
    value: Any


LogSnapshot = Sequence[Sequence[Entry]]
"""Entries in blocks, oldest first, as they were at one moment."""


def merged(*logs: LogSnapshot) -> LogSnapshot:
    """Return the entries of several logs as one."""
    return [sorted((entry for log in logs for block in log for entry in block), key=lambda entry: entry.seconds)]


class TtlLog:
    """Entries in order of time, found by id. Full blocks of them never change, so snapshots share them."""

    __slots__ = ("_blocks", "_entries", "_gone")

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._blocks: deque[list[Entry]] = deque()
        self._gone = 0  # entries of the first block that were dropped

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Return the newest entries of all ids."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """Return the newest entry of an id, None where there is none."""
        return self._entries.get(key)

    def add(self, key: bytes, seconds: float, value: Any) -> None:
        """Remember something from `seconds` on, which is not before any other entry."""
        entry = Entry(key, seconds, value)
        self._entries[key] = entry
        if not self._blocks or len(self._blocks[-1]) == _BLOCK_ENTRIES:
            self._blocks.append([])
        self._blocks[-1].append(entry)

    @property
    def oldest(self) -> Entry | None:
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


class IdempotencyCache:
    """Recorded answers by request_id, forgotten once no client can still be retrying.

    Refused requests are not recorded: they changed nothing, and may be right the next time. Times are those of the
    steps in which requests were made, so an answer is as old after a restart as it is.

    Attributes:
        used_bytes: about how much memory the answers take.
    """

    def __init__(
        self,
        keep_seconds: float,
        *,
        pack: Callable[[Any], Any] = lambda answer: answer,
        unpack: Callable[[Any], Any] = lambda packed: packed,
        max_bytes: int | None = None,
        weigh: Callable[[Any], int] = lambda packed: 0,
    ) -> None:
        """Make an empty cache.

        Args:
            keep_seconds: how long an answer is kept.
            pack: makes of an answer what is kept, which should be small: there may be a million of them.
            unpack: makes the answer of it again.
            max_bytes: what the answers may take; the oldest are forgotten sooner then. None: no bound.
            weigh: returns the bytes of what is kept of an answer.
        """
        self.pack = pack
        self._unpack = unpack
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._weigh = weigh
        self.used_bytes = 0
        self._answers: TtlLog = TtlLog()

    def __len__(self) -> int:
        return len(self._answers)

    def recorded(self, request_id: bytes, kind: type[object], now_seconds: float) -> Any | None:
        """Return the recorded answer, None where there is none, or it is too old by now.

        Raises:
            InvalidArgumentError: the id has not 16 bytes, or the recorded answer is not of this kind: it is that of
                another method, to which the caller gave the same id.
        """
        if len(request_id) != 16:
            raise InvalidArgumentError(
                f"request_id has {len(request_id)} bytes; send 16 random bytes, the same over retries",
                field="request_id",
            )
        known = self._answers.get(request_id)
        if known is None or known.seconds < now_seconds - self._keep_seconds:
            return None
        recorded = self._unpack(known.value)
        if not isinstance(recorded, kind):
            raise InvalidArgumentError(
                f"request_id {request_id.hex()} is that of another call, which was answered with a "
                f"{type(recorded).__name__}; make a new one for each call, the same over its retries",
                field="request_id",
            )
        return recorded

    def add(self, request_id: bytes, packed: Any, at_seconds: float) -> None:
        """Record an answer, and forget those that are too old or too many."""
        self._forget_old(at_seconds)
        self._answers.add(request_id, at_seconds, packed)
        self.used_bytes += _ENTRY_BYTES + self._weigh(packed)

    def _forget_old(self, now: float) -> None:
        while (oldest := self._answers.oldest) is not None:
            is_too_much = self._max_bytes is not None and self.used_bytes > self._max_bytes
            if not is_too_much and oldest.seconds >= now - self._keep_seconds:
                break
            self.used_bytes -= _ENTRY_BYTES + self._weigh(oldest.value)
            self._answers.drop_oldest()

    def snapshot(self) -> LogSnapshot:
        """Return the answers as they are now, packed."""
        return self._answers.snapshot()

    def restore(self, answers: LogSnapshot) -> None:
        """Record the answers of a snapshot, besides those that are here."""
        if len(self._answers):
            answers = merged(answers, self.snapshot())
            self._answers = TtlLog()
        self._answers.restore(answers)
        self.used_bytes = sum(_ENTRY_BYTES + self._weigh(entry.value) for entry in self._answers)
