"""The controllers of a cluster as those that call them see them: which one is asked, and which one next."""

from __future__ import annotations

import time
from typing import Final

from tq_service.addresses import split_addresses
from tq_service.errors import NotLeaderError, TqError, UnavailableError

_SILENT_SECONDS: Final = 4.0
_TIMED_OUT: Final = "timed out"  # what `addresses.cause_of` makes of it


class Controllers:
    """The addresses at which the controller is asked for; of several controllers one leads. For several threads.

    A standby says where the leader is, which is asked from then on, whether it was among the addresses given or not;
    where that does not answer, those that were given have their turns.

    Args:
        addresses: one, such as a DNS name of all controllers, or several with commas between them.

    Attributes:
        current: that which is asked next.
        has_several: whether there is more than one controller, as far as is known.
    """

    def __init__(self, addresses: str) -> None:
        self._given = split_addresses(addresses)
        self.current = self._given[0]
        self._silent_at: dict[str, float] = {}  # by address: when a call had no answer
        self.has_several = len(self._given) > 1

    def note(self, asked: str, failure: TqError) -> None:
        """Choose the controller that is asked next, after a call that failed; each thread may be late with its own."""
        if not isinstance(failure, UnavailableError) or asked != self.current:
            return
        leader = ""
        if isinstance(failure, NotLeaderError):
            self.has_several = True
            leader = failure.metadata.get("leader_address", "")
        elif _TIMED_OUT in failure.message:
            self._silent_at[asked] = time.monotonic()
        if leader and leader != asked and not self._is_silent(leader):
            self.current = leader
        else:
            at = self._given.index(asked) + 1 if asked in self._given else 0
            others = self._given[at:] + self._given[:at]
            self.current = next((each for each in others if not self._is_silent(each)), others[0])

    def _is_silent(self, address: str) -> bool:
        """Whether a controller did not answer just now: others name one that is paused until its lease ends."""
        return time.monotonic() - self._silent_at.get(address, -_SILENT_SECONDS) < _SILENT_SECONDS
