"""Answers that their client did not take: said in one line, since nothing is wrong with the service."""

from __future__ import annotations

import logging
from typing import Final

import grpc

from tq_service.log_message import LogMessage

_LOGGER: Final = logging.getLogger("grpc._cython.cygrpc")


class _OneLine(logging.Filter):
    """Makes one line at level INFO of what gRPC logs as an error with its traceback.

    gRPC does not say why: the client may have disconnected or cancelled the call while the answer was on its way, or
    have refused it for its size, which the client's own error says (RESOURCE_EXHAUSTED).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):
            return True
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        error_text = record.getMessage()
        record.args = ()
        record.msg = LogMessage(
            "an answer was not taken: its client disconnected, or takes no message of that size", error=error_text
        )
        record.exc_info = record.exc_text = None
        return _LOGGER.isEnabledFor(logging.INFO)


_ONE_LINE: Final = _OneLine()


def log_untaken_answers_in_one_line() -> None:
    """Do so from now on, in this process."""
    _LOGGER.addFilter(_ONE_LINE)
