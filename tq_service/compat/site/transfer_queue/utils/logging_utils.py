"""Drop-in replacement for TransferQueue's `utils.logging_utils` module."""

from __future__ import annotations

import logging
import os
from typing import Final

_FORMAT: Final = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """Return a logger with the level in TQ_LOGGING_LEVEL. If no handler is configured, add a stream handler."""
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger
