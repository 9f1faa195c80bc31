"""Reading files again that were replaced while the service runs, but never a half-written one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tq_service.errors import InvalidArgumentError
from tq_service.wire.credentials import Signature

_log = logging.getLogger(__name__)


class FollowedFiles:
    """Files that belong together, which were read once and are looked at again and again.

    They are read when they have changed and then stayed the same from one look to the next: a file that is written in
    its place is empty for a moment, and an empty file of tokens is a valid one. What cannot be used is logged once and
    tried again at each look, since what was wrong may not show in the files: their mode, or too many open files.

    Args:
        signature: returns what differs once one of them has changed.
        read: reads them, and takes what it read; raises InvalidArgumentError where they cannot be used.
        what_stays: what is said of the time until they can be used.
    """

    def __init__(self, signature: Callable[[], Signature], read: Callable[[], object], what_stays: str) -> None:
        self._signature = signature
        self._read = read
        self._what_stays = what_stays
        self._taken = self._seen = signature()
        self._refused = ""
        read()

    def look(self) -> None:
        """Read the files again if they have changed."""
        signature = self._signature()
        has_settled, self._seen = signature == self._seen, signature
        if not has_settled or signature == self._taken:
            return
        try:
            self._read()
        except InvalidArgumentError as error:
            if str(error) != self._refused:
                _log.error("%s; %s", error, self._what_stays)
            self._refused = str(error)
        else:
            self._taken, self._refused = signature, ""
