"""One line for each call, at log level debug: what was called, of which partition and task, and how it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tq_service.log_message import LogMessage
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware

_log = logging.getLogger(__name__)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class AccessLog(Middleware):
    """Logs calls; it is the outermost, so that it sees how they end. At a higher level it is in no call's way."""

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return a handler that logs its calls."""
        if not _log.isEnabledFor(logging.DEBUG):
            return behavior
        reads_stream = method.has_request_stream or caller.refusal is not None

        async def call(request: Any, context: Context) -> Any:
            began_at, seen = time.monotonic(), _Seen(request) if reads_stream else None
            outcome = "OK"
            try:
                return await behavior(request if seen is None else seen, context)
            except grpc.aio.AbortError:
                code: Any = context.code()
                outcome = _CODES.get(code, "UNKNOWN") if isinstance(code, int) else code.name
                raise
            except asyncio.CancelledError:
                outcome = "CANCELLED"
                raise
            except BaseException:
                outcome = "UNKNOWN"
                raise
            finally:
                message = request if seen is None else seen.first
                _log.debug(
                    LogMessage(
                        "call",
                        method=method.short_name,
                        partition=_partitions(method, message),
                        task=getattr(message, "task_name", "") or None,
                        outcome=outcome,
                        ms=round((time.monotonic() - began_at) * 1e3, 3),
                        request_id=_request_id(message),
                        caller=caller.name or None,
                        peer=context.peer(),
                    )
                )

        return call


class _Seen:
    """A stream of requests, the first of which stays known."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self.first: Any = None

    def __aiter__(self) -> _Seen:
        return self

    async def __anext__(self) -> Any:
        message = await anext(self._messages)
        if self.first is None:
            self.first = message
        return message


def _partitions(method: Method, message: Any) -> str | None:
    """Return the partitions that a request names, as far as it can be read."""
    try:
        names = [str(name) for name in method.partitions(message) if name] if message is not None else []
    except AttributeError:  # it is garbage
        names = []
    return " ".join(dict.fromkeys(names)) or None


def _request_id(message: Any) -> bytes | None:
    """Return what names the call over its retries: the id of a request or, of a put, that of its commit or its own."""
    for holder in (message, getattr(message, "header", message)):
        for part in (holder, getattr(holder, "commit", None)):
            if request_id := getattr(part, "request_id", b""):
                return bytes(request_id)
        if put_id := getattr(holder, "put_id", b""):
            return bytes(put_id)
    return None
