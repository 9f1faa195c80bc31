"""Work that a service does again and again beside its calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)


async def regularly(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work every so many seconds until cancelled; a failure is logged, and the next time comes all the same."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:
            name = getattr(work, "__qualname__", work)
            _log.exception(LogMessage("periodic work failed and is tried again", work=name, retry_seconds=seconds))
