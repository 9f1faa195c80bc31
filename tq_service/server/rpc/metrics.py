"""Counts calls and times them, under the names that go-grpc-middleware gave to such counts."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import grpc

from tq_service.observe.instruments import Instruments, MethodCounts
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware
from tq_service.wait_clock import WaitClock, wait_clock

# Codes of statuses by their number, as Go's gRPC names them.
CODES: Final = (
    "OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied",
    "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable",
    "DataLoss", "Unauthenticated",
)  # fmt: skip


class CallMetrics(Middleware):
    """Counts what becomes of calls, and how long they take; the outermost, so that it sees how each one ends.

    The time for which a call waited is counted apart, so that a long poll does not hide what handling takes.

    Args:
        instruments: where it is counted.
    """

    def __init__(self, instruments: Instruments) -> None:
        self._calls = instruments.calls

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what counts the calls of a method."""
        counts = self._calls.get(method.name)
        if counts is None:
            counts = self._calls[method.name] = _counts_of(method)
        handled, observe = counts.handled, counts.handling.observe
        observe_wait = None if counts.waits is None else counts.waits.observe

        async def call(request: Any, context: Context) -> Any:
            counts.started += 1
            began_at, code = time.perf_counter(), "OK"
            try:
                return await behavior(request, context)
            except BaseException as error:
                code = name_code(error, context)
                raise
            finally:
                handled[code] += 1
                observe(time.perf_counter() - began_at)

        async def waiting_call(request: Any, context: Context) -> Any:
            counts.started += 1
            clock = WaitClock()
            wait_clock.set(clock)  # for this call alone: gRPC makes a task of each
            began_at, code = time.perf_counter(), "OK"
            try:
                return await behavior(request, context)
            except BaseException as error:
                code = name_code(error, context)
                raise
            finally:
                handled[code] += 1
                observe(time.perf_counter() - began_at - clock.seconds)
                observe_wait(clock.seconds)  # type: ignore[misc]  # of a method that may wait it is there

        return call if observe_wait is None else waiting_call


def _counts_of(method: Method) -> MethodCounts:
    service, _, name = method.name.lstrip("/").rpartition("/")
    shapes = {
        (False, False): "unary",
        (True, False): "client_stream",
        (False, True): "server_stream",
        (True, True): "bidi_stream",
    }
    shape = shapes[method.has_request_stream, method.has_response_stream]
    return MethodCounts(service, name, shape, may_wait=method.waits)


def name_code(error: BaseException, context: Context) -> str:
    """Return the code that the client of a call which failed gets, if it is still there."""
    if isinstance(error, asyncio.CancelledError):
        remaining = context.time_remaining()
        return "DeadlineExceeded" if remaining is not None and remaining <= 0 else "Canceled"
    if isinstance(error, grpc.aio.InternalError):  # an answer was not taken
        return "Canceled"
    code: Any = context.code() if isinstance(error, grpc.aio.AbortError) else None
    if code is None:
        return "Internal"
    return CODES[code if isinstance(code, int) else code.value[0]]
