"""Times during which a service cannot be reached: logged when they last, and again when they are over."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from tq_service.errors import UnavailableError

_log = logging.getLogger(__name__)

_WARN_AFTER_SECONDS: Final = (1.0, 10.0)
_WARN_EVERY_SECONDS: Final = 60.0


class Outage:
    """What the calls on one channel know together about whether its service is reached. May be used by several threads.

    Args:
        address: of the service.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._began: float | None = None
        self._warn_at = 0.0
        self._warning_count = 0

    def lasts(self, began: float, failure: UnavailableError, remaining_seconds: float) -> None:
        """Note that a try failed, and log it when the outage lasts for one second, for ten, and then each minute.

        Args:
            began: when the try began, on the monotonic clock.
            failure: why it failed.
            remaining_seconds: for how long the call will be tried again.
        """
        now = time.monotonic()
        with self._lock:
            if self._began is None:
                self._began, self._warn_at, self._warning_count = began, began + _WARN_AFTER_SECONDS[0], 0
            if now < self._warn_at:
                return
            self._warning_count += 1
            self._warn_at = now + _WARN_EVERY_SECONDS
            if self._warning_count < len(_WARN_AFTER_SECONDS):
                self._warn_at = max(now, self._began + _WARN_AFTER_SECONDS[self._warning_count])
        is_of_connection = "address" in failure.metadata  # else the service has answered that it is unavailable
        reason = failure.message if is_of_connection else f"{self._address} is unavailable: {failure.message}"
        _log.warning("%s; retrying for %.0f s", reason, remaining_seconds)

    def is_over(self) -> None:
        """Note that the service has answered."""
        if self._began is None:  # which is so for nearly all calls, and needs no lock
            return
        with self._lock:
            began, self._began = self._began, None
            is_logged = self._warning_count > 0
        if began is not None and is_logged:
            _log.info("reached %s again after %.0f s", self._address, time.monotonic() - began)
