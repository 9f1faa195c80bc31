"""The one place where errors become statuses."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_status import rpc_status

from tq_service.errors import InternalError, InvalidArgumentError, TqError
from tq_service.log_message import LogMessage
from tq_service.server.rpc.inbox import Unread
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware
from tq_service.wire.columns import Garbled
from tq_service.wire.error_table import to_status

_log = logging.getLogger(__name__)
_grpc_log = logging.getLogger("grpc._cython.cygrpc")
# The last is raised where a message cannot be written since its client is gone.
_NO_FAULTS = (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError)


class ErrorStatuses(Middleware):
    """Ends calls that fail with a `google.rpc.Status`.

    Errors of the hierarchy travel with their text; anything else is a fault of ours, logged whole and sent as INTERNAL
    without its text. Bytes that are no message become INVALID_ARGUMENT.
    """

    def __init__(self) -> None:
        _grpc_log.addFilter(_UNTAKEN_ANSWERS)  # once, however many services the process has

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what ends failed calls of a method with their status."""
        has_request_stream = method.has_request_stream

        async def call(request: Any, context: Context) -> Any:
            try:
                if has_request_stream:
                    request = _ReadableRequests(request)
                elif isinstance(request, Garbled):
                    raise _unreadable(request)
                elif isinstance(request, Unread):
                    raise request.error
                return await behavior(request, context)
            except _NO_FAULTS:
                raise
            except Exception as error:
                failure = error
            # Not within the `except`: what is raised here must not refer to the failure, see `_end`.
            return await _end(context, failure, method, request)

        return call


class _ReadableRequests:
    """A stream of requests in which garbage is an error."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> _ReadableRequests:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if isinstance(request, Garbled):
            raise _unreadable(request)
        return request


def _unreadable(request: Garbled) -> InvalidArgumentError:
    return InvalidArgumentError(f"the request cannot be read: {request.reason}; send what the protos say")


async def _end(context: Context, error: Exception, method: Method, request: Any) -> None:
    if not isinstance(error, TqError):
        request_id = _request_id(request)
        _log.error(LogMessage("a call failed", method=method.name, request_id=request_id), exc_info=error)
        facts = {} if request_id is None else {"request_id": request_id.hex()}
        failed, error = error, InternalError("the service failed; its log has the details", metadata=facts)
    else:
        failed = error
    # The frames of the failed call have the bytes that came, and gRPC keeps its state until garbage is collected.
    traceback.clear_frames(failed.__traceback__)
    del failed
    await context.abort_with_status(rpc_status.to_status(to_status(error, method=method.name)))


def _request_id(request: Any) -> bytes | None:
    """Return the id under which a client repeats a request; a put has that of its commit, a stream and a read none."""
    header = getattr(request, "header", None)
    return getattr(request if header is None else header.commit, "request_id", None) or None


class _UntakenAnswers(logging.Filter):
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
        return _grpc_log.isEnabledFor(logging.INFO)


_UNTAKEN_ANSWERS = _UntakenAnswers()
