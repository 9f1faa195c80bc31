"""When a wait that lasts is to be explained: after 10 s, then each minute."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final

from tq_service.log_message import LogMessage
from tq_service.results import WaitReason

_log = logging.getLogger(__name__)

_FIRST_REPORT_SECONDS: Final = 10.0
_NEXT_REPORT_SECONDS: Final = 60.0
_TOLERANCE_SECONDS: Final = 0.5  # a wait of 10 s may end a little before


def warn_of_wait(reason: WaitReason) -> None:
    """Log why a call or a loader waits: what both do unless they are given another `on_wait`."""
    _log.warning(LogMessage("waiting for a batch", task=reason.task_name, reason=reason.text))


@dataclass(slots=True)
class WaitReports:
    """The reports of one wait, from the moment on at which this is made."""

    began_at: float = field(default_factory=time.monotonic)
    next_seconds: float = field(default_factory=lambda: _FIRST_REPORT_SECONDS)

    @property
    def waited_seconds(self) -> float:
        """For how long the wait has lasted."""
        return time.monotonic() - self.began_at

    def seconds_left(self) -> float:
        """Return the seconds until the next report is due."""
        return max(0.0, self.next_seconds - self.waited_seconds)

    def is_due_after(self, seconds: float) -> bool:
        """Whether a report will be due when the wait has lasted so much longer."""
        return self.seconds_left() <= seconds + _TOLERANCE_SECONDS

    def lasts_after(self, seconds: float) -> bool:
        """Whether the wait will have lasted so long that it is explained, when it has lasted so much longer."""
        return self.waited_seconds + seconds >= _FIRST_REPORT_SECONDS - _TOLERANCE_SECONDS

    def made(self) -> None:
        """Note that a report was made."""
        self.next_seconds = self.waited_seconds + _NEXT_REPORT_SECONDS
