"""Which puts wait for their commit, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile


class Confirmations:
    """Puts that are not confirmed yet: new ones, and recovered ones of which it is not known whether they were.

    Those of the second kind do not expire before it is known which of them are: their controller may be down for long.

    Args:
        ttl_seconds: how long a new put waits.
        clock: what that is measured with.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._expiries: dict[bytes, float] = {}  # oldest first
        self._recovered: dict[bytes, None] = {}

    @property
    def waiting_count(self) -> int:
        """Number of puts that are not known to be confirmed."""
        return len(self._expiries) + len(self._recovered)

    def waiting(self) -> set[bytes]:
        """Return the puts that are not known to be confirmed."""
        return self._expiries.keys() | self._recovered.keys()

    def is_new(self, put_id: bytes) -> bool:
        """Whether a put was never confirmed."""
        return put_id in self._expiries

    def begin(self, put_id: bytes) -> None:
        """Have a put wait from now on."""
        self._expiries[put_id] = self._clock() + self._ttl_seconds

    def confirm(self, put_id: bytes) -> None:
        """Have a put wait no more."""
        self._expiries.pop(put_id, None)
        self._recovered.pop(put_id, None)

    def overdue(self, now: float) -> list[bytes]:
        """Return the puts that have waited for too long."""
        return [put_id for put_id, _ in takewhile(lambda item: item[1] <= now, self._expiries.items())]

    def add_recovered(self, put_ids: Iterable[bytes]) -> None:
        """Take note of recovered puts."""
        self._recovered |= dict.fromkeys(put_ids)

    def begin_recovered(self) -> None:
        """Have the recovered puts that were not confirmed meanwhile wait from now on, as new ones do."""
        expires_at = self._clock() + self._ttl_seconds
        self._expiries |= dict.fromkeys(self._recovered, expires_at)
        self._recovered.clear()
