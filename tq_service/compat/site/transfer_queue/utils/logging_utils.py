"""TransferQueue's module of this name."""

from __future__ import annotations

import logging
import os
from typing import Final

_FORMAT: Final = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """Return a logger with the level TQ_LOGGING_LEVEL; add a stream handler if none is configured."""
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger
