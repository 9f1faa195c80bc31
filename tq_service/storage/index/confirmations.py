"""Which puts wait for their commit, and until when.

    waiting -> confirmed, to be verified -> committed
       |                  |
    expires       dropped where the controller does not know it

A controller in another process confirms a put just before it commits it. Its answer may get lost, the commit refused or
cancelled: so a confirmed put is verified with the controller until that says that the put is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice, takewhile


class Confirmations:
    """Puts that are not confirmed yet: new ones, and recovered ones of which it is not known whether they were.

    Those of the second kind do not expire before it is known which of them are: their controller may be down for long.

    Args:
        ttl_seconds: how long a new put waits, and a confirmed one that its controller does not know.
        clock: what that is measured with.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._expiries: dict[bytes, float] = {}  # oldest first
        self._recovered: dict[bytes, None] = {}
        self._unverified: dict[bytes, float] = {}  # and when it was confirmed last

    @property
    def waiting_count(self) -> int:
        """Number of puts that are not known to be confirmed."""
        return len(self._expiries) + len(self._recovered)

    def is_new(self, put_id: bytes) -> bool:
        """Whether a put was never confirmed."""
        return put_id in self._expiries

    def is_recovered(self, put_id: bytes) -> bool:
        """Whether a put was recovered, and it is not known yet whether it was confirmed."""
        return put_id in self._recovered

    def begin(self, put_id: bytes) -> None:
        """Have a put wait from now on."""
        self._recovered.pop(put_id, None)
        self._expiries[put_id] = self._clock() + self._ttl_seconds

    def confirm(self, put_id: bytes, *, is_committed: bool = True) -> None:
        """Have a put wait no more; one of which it is not known whether it is committed is to be verified."""
        self.forget(put_id)
        if not is_committed:
            self._unverified[put_id] = self._clock()

    def forget(self, put_id: bytes) -> None:
        """Forget a put that is gone."""
        self._expiries.pop(put_id, None)
        self._recovered.pop(put_id, None)
        self._unverified.pop(put_id, None)

    def unverified(self, most: int) -> dict[bytes, float]:
        """Return puts that are to be verified, and when each was confirmed."""
        return dict(islice(self._unverified.items(), most))

    def verified(
        self, asked: Mapping[bytes, float], unknown: Collection[bytes], undecided: Collection[bytes]
    ) -> list[bytes]:
        """Take note of what the controller said of puts, and return those that are to be dropped.

        A put that was confirmed again after it was asked for stays: a later commit of it may be under way.
        """
        now, dropped = self._clock(), []
        for put_id, confirmed_at in asked.items():
            if self._unverified.get(put_id) != confirmed_at:
                continue
            del self._unverified[put_id]
            is_overdue = confirmed_at + self._ttl_seconds <= now
            if put_id in unknown and is_overdue:
                dropped.append(put_id)
            elif put_id in unknown or put_id in undecided:
                self._unverified[put_id] = confirmed_at  # to be asked for again, after the others
        return dropped

    def overdue(self, now: float) -> list[bytes]:
        """Return the puts that have waited for too long."""
        return [put_id for put_id, _ in takewhile(lambda item: item[1] <= now, self._expiries.items())]

    def add_recovered(self, put_ids: Iterable[bytes]) -> None:
        """Take note of recovered puts."""
        self._recovered |= dict.fromkeys(put_ids)
