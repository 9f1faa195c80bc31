"""Drop-in replacement for TransferQueue's `utils.logging_utils` module."""

from __future__ import annotations

import logging
import os
from typing import Final

_FORMAT: Final = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """Return a logger whose level is set by TQ_LOGGING_LEVEL, and add a stream handler if no handler is configured."""
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger
