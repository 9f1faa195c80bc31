"""Code shared by the sync and async clients: addresses, channels, deadlines, retries, outages and waits.

Code that differs between asyncio and threads is at the end of the module, in pairs of functions and classes with
identical interfaces. To generate the sync client, `scripts/unasync.py` replaces the async member of each pair with its
sync counterpart.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions
from grpc_health.v1 import health_pb2

from tq_service.addresses import DEFAULT_ADDRESS, cause_of, parse_address
from tq_service.client.call_stream import CallStream, RefusedError
from tq_service.client.connection_check import find_fault
from tq_service.client_probes import carriers
from tq_service.errors import DeadlineError, NotLeaderError, PreconditionError, TqError, UnavailableError
from tq_service.log_message import LogMessage
from tq_service.results import WaitReason
from tq_service.v1 import controller_service_pb2, method_rule_pb2, storage_service_pb2
from tq_service.v1.controller_service_pb2 import CallManyResponse
from tq_service.wire.columns import is_tensor
from tq_service.wire.connection import (
    CONNECTION_OPTIONS,
    MOST_BATCHED_METADATA_BYTES,
    MOST_BATCHED_REQUEST_BYTES,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Metadata,
    Tls,
    cluster_options,
    in_parts,
)
from tq_service.wire.device import on_these_streams
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

T = TypeVar("T")
Response = TypeVar("Response", bound=Message)
_log = logging.getLogger(__name__)

ADDRESS_VARIABLE: Final = "TQ_ADDRESS"
MAX_MESSAGE_BYTES: Final = 256 << 20

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *CONNECTION_OPTIONS,
    # Forked children must not use connections of their parent process.
    ("grpc.use_local_subchannel_pool", 1),
    # In the sync client, the calling thread reads the stream of a get itself, so no other thread has to wake it.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)


CLUSTER_CHANNEL_OPTIONS: Final = cluster_options(CHANNEL_OPTIONS)
"""Channel options for a cluster of controllers, in which a paused controller may delay calls during a takeover."""


class Method(NamedTuple):
    """A gRPC method of the controller or storage service.

    Attributes:
        name: full name of the method.
        request: request type of the method.
        is_batched: whether a `CallMany` stream may contain calls to the method.
    """

    name: str
    request: type[Message]
    is_batched: bool

    @property
    def short_name(self) -> str:
        """Name of the method without the service name."""
        return self.name.rpartition("/")[2]


@cache
def method_of(answer: Descriptor) -> Method:
    """Return the method that has this response type. Each response type belongs to only one method."""
    return next(
        Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            method.GetOptions().Extensions[method_rule_pb2.rule].is_batched,
        )
        for module in (controller_service_pb2, storage_service_pb2, health_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.output_type is answer
    )


def resolve_address(address: str | Sequence[str] | None) -> str:
    """Return the addresses, joined by commas. The default is `TQ_ADDRESS`, or else localhost:50051.

    Raises:
        InvalidArgumentError: the address is not valid.
    """
    if address is not None:
        if not isinstance(address, str) and isinstance(address, Sequence):
            address = ",".join(map(parse_address, address))
        return parse_address(address)
    return parse_address(os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS, name=ADDRESS_VARIABLE)


_WARN_AFTER_SECONDS: Final = 5.0
_WARN_EVERY_SECONDS: Final = 60.0
_CHECK_EVERY_SECONDS: Final = 10.0  # longer than a check takes

FIRST_PAUSE_SECONDS: Final = 0.05
SHORTEST_TRY_SECONDS: Final = 0.02
_LONGEST_TRY_SECONDS: Final = 1e9  # gRPC treats a deadline that overflows 64 bits of nanoseconds as already past
LONGEST_PAUSE_SECONDS: Final = 0.5
_REFUSED_SECONDS: Final = 10.0
LONGEST_CLUSTER_PAUSE_SECONDS: Final = 0.2
"""This limit is lower than for a single controller, because finding the leader may take up to three attempts."""

_GRPC_MESSAGE: Final = "grpc_message"
_FINDING: Final = "finding"


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a call, on the monotonic clock."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """Return a deadline `timeout` seconds from now."""
        return cls(time.monotonic() + timeout, timeout)

    def remaining(self) -> float:
        """Return the remaining seconds, limited to the longest timeout that gRPC supports, or 0 after the deadline."""
        return min(max(0.0, self.at - time.monotonic()), _LONGEST_TRY_SECONDS)


@dataclass(slots=True)
class Backoff:
    """Pauses between the attempts of one call, up to the call's deadline.

    Pauses include random jitter, and double after each attempt. If a controller names another controller as the leader,
    the call is retried without a pause. If that attempt also fails, the back-off resumes, because both controllers may
    be wrong.
    """

    deadline: Deadline
    draw: Callable[[], float] = field(default=random.random)
    tries: int = 0
    _last: UnavailableError | None = field(default=None, init=False)
    _longest: float = field(default=LONGEST_PAUSE_SECONDS, init=False)
    _has_followed: bool = field(default=False, init=False)

    def pause(self) -> float:
        """Return the next pause in seconds: a random time between half the current step and the full step."""
        step = min(self._longest, FIRST_PAUSE_SECONDS * (1 << min(self.tries, 16)))
        self.tries += 1
        return step * (0.5 + self.draw() / 2)

    def after(self, failure: TqError) -> float:
        """Return the number of seconds to pause before the call is retried.

        Raises:
            UnavailableError: there is too little time left for another attempt, or the attempt timed out. The error
                contains the reason for the last failure.
            TqError: the failure itself, if a retry cannot succeed.
        """
        if isinstance(failure, DeadlineError) and self._last is not None:
            raise self._given_up(self._last, ", plus one attempt without a response") from self._last
        if not isinstance(failure, UnavailableError):
            raise failure
        names_leader = False
        if isinstance(failure, NotLeaderError):
            self._longest = LONGEST_CLUSTER_PAUSE_SECONDS
            names_leader = bool(failure.metadata.get("leader_address"))
        if self._last is None or isinstance(self._last, NotLeaderError) or not names_leader:
            self._last = failure  # otherwise, keep the failure of the leader itself
        pause, remaining = self.pause(), self.deadline.remaining()
        if remaining < SHORTEST_TRY_SECONDS:
            raise self._given_up(self._last) from failure
        self._has_followed = names_leader and not self._has_followed
        return 0.0 if self._has_followed else min(pause, remaining / 2)

    def _given_up(self, failure: UnavailableError, more: str = "") -> UnavailableError:
        times = "once" if self.tries == 1 else f"{self.tries} times"
        message = f"{failure.message}; tried for {self.deadline.timeout:g} s ({times}{more})"
        grpc_message = failure.metadata.get(_GRPC_MESSAGE)
        if grpc_message is not None:
            if _FINDING not in failure.metadata:
                # The reason reported by gRPC may refer to another address of the host name, and rarely mentions TLS.
                message += "; is the service running there, and do both sides agree on TLS and certificates?"
            message += f" (gRPC: {grpc_message})"
        return UnavailableError(message, metadata=failure.metadata)


def unavailable_until(deadline: Deadline, failure: UnavailableError) -> UnavailableError:
    """Return the error for a put whose deadline passed while calls for its batch kept failing."""
    return UnavailableError(f"{failure.message}; tried for {deadline.timeout:g} s", metadata=failure.metadata)


# Python equivalents of names from the protos in messages of the service.
_IN_PYTHON: Final = {
    "skip_missing": "missing='skip'",
    "skip_missing_fields": "missing_fields='skip'",
    "authorization metadata": f"set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}",
}
_PROTO_NAME: Final = re.compile(rf"\b(?:{'|'.join(_IN_PYTHON)})\b")


def error_of(error: grpc.RpcError, address: str, finding: str | None = None) -> TqError:
    """Convert the gRPC error of a failed call to a TqError.

    If gRPC itself raised the error, the TqError includes the address. If the address is unreachable, the TqError
    explains why, and its metadata contains gRPC's message.

    Args:
        error: error raised by the call.
        address: address of the service.
        finding: `Outage`'s diagnosis of the address, if available.
    """
    status = status_from_trailers(error.trailing_metadata())
    failure = from_rpc_error(error.code(), error.details(), status)
    if status is not None:
        if hints := [_IN_PYTHON[name] for name in dict.fromkeys(_PROTO_NAME.findall(failure.message))]:
            failure.message += f" (in Python: {', '.join(hints)})"
        return failure
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        metadata = {"address": address, _GRPC_MESSAGE: failure.message}
        if finding is not None:
            metadata[_FINDING] = finding
        cause = finding or cause_of(failure.message)
        return UnavailableError(f"cannot reach {address}: {cause}", metadata=metadata)
    failure.message = f"{failure.message} (calling {address})"
    failure.metadata.setdefault("address", address)
    return failure


class Outage:
    """A thread-safe record of whether the service is reachable on a channel, shared by all calls on that channel.

    Args:
        address: address of the service.
        tls: TLS settings, or None for plaintext.

    Attributes:
        finding: problem that was found at the address but that gRPC itself does not report, or None.
    """

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.finding: str | None = None
        self._address = address
        self._tls = tls
        self._lock = threading.Lock()
        self._began: float | None = None
        self._check_at = self._warn_at = 0.0
        self._warning_count = 0

    def lasts(self, began: float, failure: UnavailableError, remaining_seconds: float) -> None:
        """Record a failed attempt. Log the outage after five seconds or once its cause is known, then every minute.

        Args:
            began: start time of the attempt, on the monotonic clock.
            failure: the error with which the attempt failed.
            remaining_seconds: number of seconds left for retries of the call.
        """
        now = time.monotonic()
        with self._lock:
            if self._began is None:
                self._began, self._warn_at, self._warning_count = began, began + _WARN_AFTER_SECONDS, 0
            is_check_due = _GRPC_MESSAGE in failure.metadata and now >= self._check_at
            if is_check_due:
                self._check_at = now + _CHECK_EVERY_SECONDS
            is_news = _FINDING in failure.metadata and not self._warning_count  # such a fault rarely resolves itself
            is_logged = now >= self._warn_at or is_news
            if is_logged:
                self._warning_count += 1
                self._warn_at = now + _WARN_EVERY_SECONDS
        if is_check_due:  # in a thread, so that the check does not block calls or the event loop
            threading.Thread(target=self._check, name="tq-connection-check", daemon=True).start()
        if is_logged:
            _log.warning(
                LogMessage(
                    "the service is unavailable; retrying",
                    address=self._address,
                    retry_seconds=round(remaining_seconds),
                    error=failure.message,
                )
            )

    def _check(self) -> None:
        finding = find_fault(self._address, self._tls)
        with self._lock:
            if self._began is not None:  # do not warn if the service has responded in the meantime
                self.finding = finding

    def is_over(self) -> None:
        """Record that the service has responded, which ends the outage."""
        if self._began is None:  # nearly all calls return here without taking the lock
            return
        with self._lock:
            began, self._began = self._began, None
            self.finding, self._check_at = None, 0.0
            is_logged = self._warning_count > 0
        if began is not None and is_logged:
            seconds = round(time.monotonic() - began)
            _log.info(LogMessage("the service is available again", address=self._address, after_seconds=seconds))


_FIRST_REPORT_SECONDS: Final = 10.0
_NEXT_REPORT_SECONDS: Final = 60.0
_TOLERANCE_SECONDS: Final = 0.5  # a wait of 10 s may end slightly earlier


def warn_of_wait(reason: WaitReason) -> None:
    """Log why a call or a loader is waiting. This function is the default for `on_wait`."""
    _log.warning(LogMessage("waiting for a batch", task=reason.task_name, reason=reason.text))


@dataclass(slots=True)
class WaitReports:
    """A schedule of reports on a wait. The wait begins when this object is created."""

    began_at: float = field(default_factory=time.monotonic)
    next_seconds: float = field(default_factory=lambda: _FIRST_REPORT_SECONDS)

    @property
    def waited_seconds(self) -> float:
        """Number of seconds since the wait began."""
        return time.monotonic() - self.began_at

    def seconds_left(self) -> float:
        """Return the number of seconds until the next report is due, or 0 if a report is due now."""
        return max(0.0, self.next_seconds - self.waited_seconds)

    def is_due_after(self, seconds: float) -> bool:
        """Return whether a report will be due in `seconds` seconds."""
        return self.seconds_left() <= seconds + _TOLERANCE_SECONDS

    def lasts_after(self, seconds: float) -> bool:
        """Return whether the wait will be long enough to be explained if it lasts another `seconds` seconds."""
        return self.waited_seconds + seconds >= _FIRST_REPORT_SECONDS - _TOLERANCE_SECONDS

    def made(self) -> None:
        """Schedule the next report after a report has been made."""
        self.next_seconds = self.waited_seconds + _NEXT_REPORT_SECONDS


_MOST_VALUES: Final = 128  # examining and encoding this many values takes about as long as starting a thread
HEAVY: Final = range(_MOST_VALUES)
"""An input that forces `async_unless_light` to run the work in a thread."""
_TEXTS: Final = (str, bytes, bytearray, memoryview)
_BYTES_A_VALUE: Final = 4096  # copying this many bytes takes about as long as processing one value

async_sleep = asyncio.sleep
sleep = time.sleep


async def async_gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run calls concurrently and return their results.

    On the first failure, cancel the other calls and raise the error.
    """
    if len(calls) == 1:
        return [await calls[0]()]
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def gather(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls in threads and return their results. If a call fails, raise its error when all calls have ended."""
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(max_workers=max(1, len(calls)), thread_name_prefix="tq-client") as pool:
        futures = [pool.submit(contextvars.copy_context().run, call) for call in calls]
        return [future.result() for future in futures]


async def async_unless_light(work: Callable[[], T], *inputs: Any) -> T:
    """Run `work` and return its result. Large inputs are processed in a thread to keep the event loop responsive.

    The thread uses the caller's current device streams, so that operations on device tensors stay in order.
    """
    return work() if are_light(inputs) else await asyncio.to_thread(on_these_streams(work))


def unless_light(work: Callable[[], T], *_inputs: Any) -> T:
    """Run `work` in the caller's thread and return its result."""
    return work()


def are_light(values: Iterable[Any]) -> bool:
    """Examine a few of the values to estimate whether all of them can be processed quickly."""
    return _left_after(values, _MOST_VALUES) > 0


def answer_weight(value_count: int, value_bytes: int) -> range:
    """Return an input for `async_unless_light` that represents the cost of decoding this many values and bytes."""
    is_ready = "tensordict" in sys.modules or not has_tensordict()
    return range(value_count + value_bytes // _BYTES_A_VALUE) if is_ready else HEAVY


@cache
def has_tensordict() -> bool:
    """Return whether torch and tensordict are installed. If so, batches are returned as TensorDicts."""
    return find_spec("torch") is not None and find_spec("tensordict") is not None


def import_tensordict() -> None:
    """Import the libraries that `get_data` uses.

    These imports take several seconds, so call this function before a lease or deadline starts.
    """
    if has_tensordict():
        import tensordict  # noqa: F401, PLC0415  (optional, slow to import)


def _left_after(values: Iterable[Any], left: int) -> int:
    """Return how many more values to examine at most after `values`. A result of 0 or less means none."""
    for value in values:
        if value is None:  # None is common, and costs nothing to process
            continue
        left -= 1 + _copied_bytes(value) // _BYTES_A_VALUE
        if isinstance(value, np.ndarray):
            pass
        elif left > 0 and hasattr(value, "batch_size"):  # a tensordict type: columns, or one value per row
            is_columns = type(value).__name__ == "TensorDict"
            left = _left_after(value.values(), left) if is_columns else left - math.prod(value.batch_size)
        elif left > 0 and isinstance(value, Mapping):
            left = _left_after(value.values(), left - len(value) // 2)
        elif left > 0 and isinstance(value, Sequence | set | frozenset) and not isinstance(value, _TEXTS):
            left = _left_after(value, left) if len(value) < left else 0
        if left <= 0:
            break
    return left


def _copied_bytes(value: Any) -> int:
    """Return the minimum number of bytes that must be copied to encode a value.

    Values on a device count as large, because copying from the device blocks.
    """
    if isinstance(value, _TEXTS):
        return len(value)
    if isinstance(value, np.ndarray):
        is_view = value.flags.c_contiguous and value.dtype.kind not in "OUST"
        return 0 if is_view else value.size * max(value.itemsize, _BYTES_A_VALUE if value.dtype.kind in "OUST" else 1)
    if not is_tensor(value):
        return 0
    if value.device.type != "cpu":
        return _MOST_VALUES * _BYTES_A_VALUE
    return 0 if not value.is_nested and value.is_contiguous() else value.numel() * value.element_size()


def async_is_of_closing(error: BaseException) -> bool:
    """Return whether grpc raised this error because the channel was closed rather than the caller cancelled."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, grpc.aio.UsageError)


def is_of_closing(error: BaseException) -> bool:
    """Return whether grpc raised this error because the channel was closed."""
    return isinstance(error, ValueError) and not isinstance(error, TqError)


async def async_next_answer(call: Any) -> Any | None:
    """Return the next message of a stream, or None if the stream has ended or this process cancelled it."""
    try:
        answer = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return None
    return None if answer is grpc.aio.EOF else answer


def next_answer(call: Any) -> Any | None:
    """Return the next message of a stream, or None if the stream has ended or this process cancelled it."""
    try:
        return next(call, None)
    except grpc.RpcError:
        if call.cancelled():
            return None
        raise


class AsyncSignal:
    """A signal that wakes the one coroutine waiting for it. A signal that is set before the wait is not lost."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """End the current wait, or make the next wait return immediately."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_until(self, deadline: Deadline) -> None:
        """Wait for the signal or the deadline. If the signal has been set since the last wait, return immediately."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_at(deadline.at, self.set)
            try:
                await self._waiter
            finally:
                timer.cancel()
        self._is_set = False


class Signal(threading.Event):
    """A signal that wakes the one thread waiting for it. A signal that is set before the wait is not lost."""

    def wait_until(self, deadline: Deadline) -> None:
        """Wait for the signal or the deadline. If the signal has been set since the last wait, return immediately."""
        self.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))
        self.clear()


def carried() -> Metadata:
    """Return the trace context to send with a call, or () if calls are not traced."""
    return tuple(pair for carry in carriers for pair in carry()) if carriers else ()


def metadata_of(token: Metadata | None, trace: Metadata) -> Metadata | None:
    """Return the metadata for a call outside a stream: the token and the trace context."""
    return (*(token or ()), *trace) if trace else token


class _Calls:
    """Base class for the sync and async forms of unary calls on a channel.

    Args:
        channel: the channel on which to make the calls.
        token: function that returns the authorization metadata.
    """

    def __init__(self, channel: Any, token: Callable[[], Metadata | None]) -> None:
        self._channel = channel
        self._token = token
        self._opened: dict[tuple[type[Message], bool], Any] = {}

    def _alone(self, kind: type[Response], request: bytes, deadline: Deadline) -> Any:
        """Start a separate call and return the call object. Large requests are sent in parts."""
        name = method_of(kind.DESCRIPTOR).name
        first, *others = in_parts(request, name)
        key = kind, bool(others)
        call = self._opened.get(key)
        if call is None:
            make = self._channel.stream_unary if others else self._channel.unary_unary
            call = self._opened[key] = make(name, response_deserializer=kind.FromString)
        metadata = metadata_of(self._token(), carried())
        return call(iter((first, *others)) if others else first, timeout=deadline.remaining(), metadata=metadata)


class UnaryCalls(_Calls):
    """Unary calls made from threads.

    The calls do not share a stream, because a stream would need two additional threads (ADR 48).
    """

    def make(self, kind: type[Response], request: bytes, deadline: Deadline) -> Response:
        """Make a call and return the response.

        Raises:
            grpc.RpcError: the call failed.
            InvalidArgumentError: the request is larger than the service accepts.
        """
        answer: Response = self._alone(kind, request, deadline)
        return answer

    def close(self) -> None:
        """Do nothing, because closing the channel ends all calls."""


class AsyncUnaryCalls(_Calls):
    """Unary calls made in an event loop.

    Concurrent batchable calls share a stream, which reduces the cost for the client and the service by a third. A call
    that is not concurrent with others is made separately. If the service rejects streams, all calls are made
    separately.
    """

    def __init__(self, channel: Any, token: Callable[[], Metadata | None]) -> None:
        super().__init__(channel, token)
        # New calls use the last stream. Earlier streams were opened with older tokens, and end after their last call.
        self._streams: list[CallStream] = []
        self._under_way = 0  # batchable calls in flight
        self._alone_until = 0.0

    async def make(self, kind: type[Response], request: bytes, deadline: Deadline) -> Response:
        """Make a call and return the response.

        Raises:
            grpc.RpcError: the call failed.
            InvalidArgumentError: the request is larger than the service accepts.
        """
        method = method_of(kind.DESCRIPTOR)
        if method.is_batched:
            self._under_way += 1
        try:
            if method.is_batched and self._under_way > 1 and len(request) <= MOST_BATCHED_REQUEST_BYTES:
                trace, stream = carried(), self._stream()
                if stream is not None and _size_of(trace) <= MOST_BATCHED_METADATA_BYTES:
                    with suppress(RefusedError):
                        return kind.FromString(
                            await stream.make(method.short_name, request, deadline.remaining(), trace)
                        )
            answer: Response = await self._alone(kind, request, deadline)
            return answer
        finally:
            if method.is_batched:
                self._under_way -= 1

    def _stream(self) -> CallStream | None:
        """Return the stream for a new call, or None if the call must be made separately."""
        token, stream = self._token(), self._streams[-1] if self._streams else None
        if stream is not None and not stream.is_over and stream.token == token:
            return stream if stream.has_place else None
        if stream is not None and stream.is_refused:
            self._alone_until = stream.ended_at + _REFUSED_SECONDS
        if time.monotonic() < self._alone_until:
            return None
        stream = CallStream(self._channel, method_of(CallManyResponse.DESCRIPTOR).name, token)
        self._streams = [*(each for each in self._streams if not each.is_over), stream]
        return stream

    def close(self) -> None:
        """Cancel the calls in all streams."""
        for stream in self._streams:
            stream.close()


def _size_of(metadata: Sequence[tuple[str, str]]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in metadata)


class AsyncBackgroundCalls:
    """Calls that outlive their caller. Each call runs as an asyncio task, and `drain` waits for these tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Start a call as a task. If the call fails, log the error."""

        async def logged() -> None:
            with logging_failure():
                await call()

        for task in self._tasks.copy():
            if task.get_loop().is_closed():  # the task will never finish
                self._tasks.discard(task)
        task = asyncio.get_running_loop().create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait until the background calls of this event loop have finished."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._tasks.copy() if task.get_loop() is loop))


class BackgroundCalls:
    """The sync form of `AsyncBackgroundCalls`. Each call is made immediately in the caller's thread."""

    def run(self, call: Callable[[], None]) -> None:
        """Make a call. If the call fails, log the error."""
        with logging_failure():
            call()

    def drain(self) -> None:
        """Do nothing, because all calls have already been made."""


@contextmanager
def logging_failure() -> Iterator[None]:
    """Log a TqError raised in the `with` block instead of propagating it."""
    try:
        yield
    except TqError as error:
        _log.warning(LogMessage("a background call failed", error=error))


# Id of the process that opened an asyncio channel. A forked child of this process would hang or abort if it opened a
# channel.
_async_process_id: int | None = None


def async_current_home() -> asyncio.AbstractEventLoop:
    """Return the running event loop, to which newly opened channels will belong.

    Raises:
        PreconditionError: this process was forked from a process that used an asyncio client.
    """
    global _async_process_id  # noqa: PLW0603  (state of the process)
    if _async_process_id not in (None, os.getpid()):
        raise PreconditionError(
            "could not use an AsyncClient, because this process was forked after its parent used one, and gRPC's "
            "asyncio channels would hang. Use multiprocessing.get_context('spawn') to start the process, or use "
            "tq.Client",
            reason="FORKED_CLIENT",
            metadata={"cause": "fork"},
        )
    _async_process_id = os.getpid()
    return asyncio.get_running_loop()


def current_home() -> int:
    """Return the id of this process, to which newly opened channels will belong.

    Each forked child needs its own channels.
    """
    return os.getpid()


def async_is_over(home: asyncio.AbstractEventLoop) -> bool:
    """Return whether an event loop is closed, so that its channels can be dropped."""
    return home.is_closed()


def is_over(home: int) -> bool:
    """Return whether the channels belong to a parent process and are therefore unusable in this process."""
    return home != os.getpid()


def async_leave(
    home: asyncio.AbstractEventLoop, endpoints: Mapping[Any, Any], close: Callable[[], Awaitable[None]]
) -> None:
    """Close another event loop's channels in that loop, or leave them to garbage collection if the loop is not running.

    This function does not wait for the other loop, because that loop may be waiting for the current one.
    """
    if home.is_running():
        home.call_soon_threadsafe(lambda: asyncio.ensure_future(close()))
    else:
        for endpoint in endpoints.values():
            endpoint.driver.close()


# Channels opened by a parent process. Closing or destroying them in a forked child could hang.
_ABANDONED: Final[list[object]] = []


def leave(_home: int, endpoints: Mapping[Any, Any], _close: Callable[[], None]) -> None:
    """Keep references to a parent process's channels to prevent them from being closed."""
    _ABANDONED.append(endpoints)
