"""Recorded answers of mutating requests, so that a retry has no second effect and gets the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

from tq_service.errors import InvalidArgumentError
from tq_service.schema import check_id

_MOST_FORGOTTEN: Final = 1024  # entries that stay in the list, and
_FORGOTTEN_SHARE: Final = 8  # one of so many
_ENTRY_BYTES: Final = 256  # of an id, a time, and what holds them together


class Entry(NamedTuple):
    """A recorded answer: the id of its request, when it was made, in seconds of wall-clock time, and the answer."""

    key: bytes
    seconds: float
    value: Any


def merged(*snapshots: Iterable[Entry]) -> list[Entry]:
    """Return the answers of several snapshots as one."""
    return sorted(chain.from_iterable(snapshots), key=attrgetter("seconds"))


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
        self._newest: dict[bytes, Entry] = {}  # of each id
        self._entries: list[Entry] = []  # in order of time; shared with snapshots
        self._forgotten_count = 0  # of them, in front

    def __len__(self) -> int:
        return len(self._newest)

    def recorded(self, request_id: bytes, kind: type[object], now_seconds: float) -> Any | None:
        """Return the recorded answer, None where there is none, or it is too old by now.

        Raises:
            InvalidArgumentError: the id has not 16 bytes, or the recorded answer is not of this kind: it is that of
                another method, to which the caller gave the same id.
        """
        check_id("request_id", request_id)
        known = self._newest.get(request_id)
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
        """Record an answer at a time that is not before that of any other; forget those that are too old or too many.

        An id is recorded twice where the settings kept its first answer for a shorter time than they do now.
        """
        self._forget_old(at_seconds)
        entry = self._newest[request_id] = Entry(request_id, at_seconds, packed)
        self._entries.append(entry)
        self.used_bytes += self._bytes_of(entry)

    def _forget_old(self, now: float) -> None:
        while self._newest:
            oldest = self._entries[self._forgotten_count]
            is_too_much = self._max_bytes is not None and self.used_bytes > self._max_bytes
            if not is_too_much and oldest.seconds >= now - self._keep_seconds:
                break
            self.used_bytes -= self._bytes_of(oldest)
            if self._newest[oldest.key] is oldest:
                del self._newest[oldest.key]
            self._forgotten_count += 1
        if self._forgotten_count > _MOST_FORGOTTEN + len(self._entries) // _FORGOTTEN_SHARE:
            self._entries, self._forgotten_count = self._entries[self._forgotten_count :], 0

    def _bytes_of(self, entry: Entry) -> int:
        return _ENTRY_BYTES + self._weigh(entry.value)

    def snapshot(self) -> Iterator[Entry]:
        """Return the answers as they are now, packed, to be read once, by any thread.

        It costs the same however many there are: the list only grows at its end, or another one takes its place.
        """
        return islice(self._entries, self._forgotten_count, len(self._entries))

    def restore(self, answers: Iterable[Entry]) -> None:
        """Record the answers of a snapshot, besides those that are here."""
        self._entries, self._forgotten_count = merged(answers, self.snapshot()), 0
        self._newest = {entry.key: entry for entry in self._entries}
        self.used_bytes = sum(map(self._bytes_of, self._entries))
