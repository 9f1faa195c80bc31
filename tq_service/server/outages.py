"""Times during which another service does not answer: in the log once when they begin, and once when they are over."""

from __future__ import annotations

import logging
import time

import grpc

from tq_service.addresses import cause_of
from tq_service.log_message import LogMessage

_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class PeerOutage:
    """What the log says of calls to another service that fail and are tried again.

    Args:
        log: where the lines go.
        peer: the other service, as the log names it.
        fields: of each line, such as the address.
    """

    def __init__(self, log: logging.Logger, peer: str, **fields: str) -> None:
        self._log = log
        self._peer = peer
        self._fields = fields
        self._began: float | None = None
        self._problem = ""

    def lasts(self, problem: str, error: Exception, level: int = logging.WARNING) -> None:
        """Note that a call failed; logged where it is the first, or the problem is another than before.

        Args:
            problem: what the service does not do, such as "does not answer".
            error: why; its text may differ from try to try.
            level: of the log line.
        """
        if self._began is None:
            self._began = time.monotonic()
        if problem != self._problem:
            self._problem = problem
            self._log.log(level, LogMessage(f"{self._peer} {problem}", **self._fields, error=_reason(error)))

    def is_over(self) -> None:
        """Note that a call succeeded."""
        if self._began is not None:
            seconds = round(time.monotonic() - self._began, 1)
            self._log.info(LogMessage(f"{self._peer} answers again", **self._fields, after_seconds=seconds))
            self._began, self._problem = None, ""


def _reason(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    details = error.details() or error.code().name
    return cause_of(details) if error.code() in _NO_ANSWER else details
