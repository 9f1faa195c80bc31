"""Limits on request size, concurrent reads, waiting calls, and the transfer rate of streams.

gRPC reads each message completely into memory that does not count toward any quota. Before the service starts reading a
message, the client can send no more than the stream's window (`wire/connection.py`). Each read returns a single message
of at most `max_message_bytes`. A limit on concurrent reads is therefore also a limit on the bytes in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError

from tq_service.errors import DeadlineError, InvalidArgumentError, LimitExceededError
from tq_service.server.rpc.methods import Behavior, Context, Method
from tq_service.wire.columns import WAITING_BYTES, Garbled
from tq_service.wire.connection import MAX_REQUEST_BYTES, PART_BYTES

Part = TypeVar("Part")

LEAST_PROGRESS_BYTES: Final = 64 * 1024
"""Minimum number of bytes per `stall_seconds`. A stream that transfers fewer bytes is ended as stalled."""

GRACE_SECONDS: Final = 10.0
"""Part of a stream's waiting time that is ignored when the stream's transfer rate is compared with the minimum."""

RETRY_AFTER_SECONDS: Final = 1.0
MAX_OPEN_REQUEST_BYTES: Final = 4096
"""Maximum request size, in bytes, for methods that need no token. Such requests contain only a service name."""

MAX_WAITING_BYTES: Final = 32 << 20
"""Maximum total size, in bytes, of the requests of running calls that may wait for samples or capacity."""

_DECODED_AT_ONCE: Final = 512 << 10  # bytes, which take a few milliseconds to decode if they are varints
_EOF: Final = grpc.aio.EOF
_ROUNDED_SHARE: Final = 0.035
"""Safety margin for timeouts. In measurements, gRPC sent timeouts that were up to 3.3 % longer than requested."""

needs_no_turn: Final[ContextVar[bool]] = ContextVar("needs_no_turn", default=False)
"""Whether the current call reads without a `Turn`.

Streams that may be idle for a long time, such as CallMany, read without a `Turn`.
"""


def wait_until(context: Context) -> float | None:
    """Return the `time.monotonic` time until which a call may wait, or None if the call has no deadline.

    A call that stops waiting at this time can still send an error before its deadline.
    """
    remaining = context.time_remaining()
    if remaining is None:
        return None
    return time.monotonic() + remaining * (1 - _ROUNDED_SHARE) - min(1.0, remaining / 4)


def too_many_calls(limit_name: str, got: int, limit: int, whose: str = "") -> LimitExceededError:
    """Create the error for a call that exceeds a limit on concurrent calls."""
    return _beyond(
        limit_name,
        got,
        limit,
        f"the number of concurrent calls {whose}counted by {limit_name} would be {got}; expected at most {limit}. "
        "Make fewer calls at once, or retry later.",
    )


def _beyond(limit_name: str, got: int, limit: int, message: str) -> LimitExceededError:
    return LimitExceededError(
        message,
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": limit_name, "got": str(got), "limit": str(limit)},
    )


class WaitingCalls:
    """Counts the calls that are waiting, for example for samples or capacity, and rejects calls beyond a limit.

    For these limits, each connection counts as a separate client.

    Args:
        most: maximum number of waiting calls of all clients together.
        most_of_one: maximum number of waiting calls per client.
        limit_name: name that error messages use for the total limit. The per-client limit has the suffix "_per_client".

    Attributes:
        count: number of waiting calls.
    """

    def __init__(
        self, most: int = sys.maxsize, most_of_one: int = sys.maxsize, limit_name: str = "max_waiting_calls"
    ) -> None:
        self._limit_name = limit_name
        self._most = most
        self._most_of_one = most_of_one
        self._by_client: Counter[str] = Counter()
        self.count = 0

    @contextlib.contextmanager
    def one(self, context: Context) -> Iterator[None]:
        """Count a call as waiting during the `with` block.

        Raises:
            LimitExceededError: the limit on waiting calls, in total or for this client, has been reached.
        """
        counts, client = self._by_client, context.peer()
        if counts[client] >= self._most_of_one:
            name = f"{self._limit_name}_per_client"
            raise too_many_calls(name, counts[client] + 1, self._most_of_one, "of this client ")
        if self.count >= self._most:
            raise too_many_calls(self._limit_name, self.count + 1, self._most)
        self.count += 1
        counts[client] += 1
        try:
            yield
        finally:
            self.count -= 1
            counts[client] -= 1
            if not counts[client]:
                del counts[client]


class Turn:
    """Permission to perform one or more related reads on a connection. A `Lane` grants turns.

    Attributes:
        connection: name by which gRPC identifies the connection's peer.
        due_at: time on the event loop's clock after which the running step is considered slow.
        is_aside: whether the turn has been moved aside because it was slow while other reads waited. A turn that has
            been moved aside does not count as a concurrent read.
    """

    __slots__ = ("_is_ended", "_lane", "_task", "connection", "due_at", "is_aside")

    def __init__(self, lane: Lane, connection: str) -> None:
        self._lane = lane
        self._task: asyncio.Task[Any] | None = None  # the task that runs the current step
        self._is_ended = False
        self.connection = connection
        self.due_at = 0.0
        self.is_aside = False

    async def run(self, step: Awaitable[Any]) -> Any:
        """Await a step of the turn and return its result.

        Raises:
            DeadlineError: the step was cancelled because it was slow while other reads waited.
        """
        task = self._task = asyncio.current_task()
        self._lane.watch(self)
        try:
            return await step
        except asyncio.CancelledError:
            if not self._is_ended or task is None or task.uncancel():  # cancelled by the caller
                raise
            seconds = self._lane.patience_seconds
            raise DeadlineError(
                f"a message did not arrive within {seconds:g} s while other messages were waiting to be read. Send "
                "messages faster, or send fewer messages at once",
                metadata={"limit_name": "patience", "limit": f"{seconds:g}"},
            ) from None
        finally:
            self._task = None
            self._lane.unwatch(self)

    @property
    def runs(self) -> bool:
        """Whether a step is running and has not been cancelled by `end`."""
        return self._task is not None and not self._is_ended

    def end(self) -> None:
        """Cancel the running step, which also cancels its call."""
        if self._task is not None and not self._is_ended:
            self._is_ended = True
            self._task.cancel()

    def leave(self) -> None:
        """End the turn so that a waiting read can start."""
        self._lane.leave(self)


class Lane:
    """Limits concurrent reads, both in total and per connection. Waiting connections take turns.

    A read is slow if it takes longer than `patience_seconds` while other reads wait. A limited number of slow reads are
    moved aside. Such reads continue but no longer count as concurrent reads. The last free slot is reserved for
    connections without reads that were moved aside. If too many reads have been moved aside, the lane picks the
    connection with the most such reads, and ends the oldest of them.

    Args:
        most: maximum number of concurrent reads.
        most_of_one: maximum number of concurrent reads per connection; reads that were moved aside also count.
        patience_seconds: maximum duration of a read while other reads wait.
        most_aside: maximum number of reads that are moved aside at the same time. If 0, the lane ends every slow read.
        most_waiting_of_one: maximum number of waiting reads per connection.

    Attributes:
        running: number of reads in progress, not counting those moved aside.
        patience_seconds: maximum duration of a read while other reads wait.
    """

    def __init__(
        self,
        most: int,
        most_of_one: int,
        patience_seconds: float,
        *,
        most_aside: int = 0,
        most_waiting_of_one: int = sys.maxsize,
    ) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._most_aside = most_aside
        self._most_waiting_of_one = most_waiting_of_one
        self._by_connection: dict[str, int] = {}  # number of turns, including turns aside
        self._waiting: dict[str, deque[asyncio.Future[Turn]]] = {}
        self._steps: dict[Turn, None] = {}  # turns with a running step, except turns aside; oldest step first
        self._aside: dict[Turn, None] = {}
        self._patrol: asyncio.TimerHandle | None = None
        self.running = 0
        self.patience_seconds = patience_seconds

    async def enter(self, connection: str) -> Turn:
        """Wait for a turn and return it. The caller must end the turn by calling `leave`.

        Raises:
            LimitExceededError: too many reads on the connection are already waiting.
        """
        if not self._waiting and self._has_place(connection):
            return self._start(connection)
        queue = self._waiting.setdefault(connection, deque())
        if len(queue) >= self._most_waiting_of_one:
            raise _beyond(
                "open_calls",
                len(queue) + 1,
                self._most_waiting_of_one,
                f"{len(queue)} calls on this connection are waiting to be read; expected at most "
                f"{self._most_waiting_of_one}. Make fewer calls at once.",
            )
        place: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._admit()
        try:
            return await place
        except BaseException:
            if place.done() and not place.cancelled():  # the turn was granted just before the cancellation
                self.leave(place.result())
            else:
                with contextlib.suppress(ValueError):
                    queue.remove(place)
                if not queue and self._waiting.get(connection) is queue:
                    del self._waiting[connection]
            raise

    def leave(self, turn: Turn) -> None:
        """End a turn, and start reads that are waiting for one."""
        if turn.is_aside:
            self._aside.pop(turn, None)
        else:
            self.running -= 1
        left = self._by_connection.pop(turn.connection) - 1
        if left:
            self._by_connection[turn.connection] = left
        if self._waiting:
            self._admit()

    def watch(self, turn: Turn) -> None:
        """Record that a turn has started a step."""
        turn.due_at = asyncio.get_running_loop().time() + self.patience_seconds
        if not turn.is_aside:
            self._steps[turn] = None
            if self._waiting:
                self._watch()

    def unwatch(self, turn: Turn) -> None:
        """Record that a turn's step has ended."""
        self._steps.pop(turn, None)

    def _has_place(self, connection: str) -> bool:
        is_slow = bool(self._aside) and any(slow.connection == connection for slow in self._aside)
        return self.running + is_slow < self._most and self._by_connection.get(connection, 0) < self._most_of_one

    def _start(self, connection: str) -> Turn:
        self.running += 1
        self._by_connection[connection] = self._by_connection.get(connection, 0) + 1
        return Turn(self, connection)

    def _admit(self) -> None:
        """Admit waiting reads as long as slots are free. The connections take turns."""
        while (connection := next(filter(self._has_place, self._waiting), None)) is not None:
            queue = self._waiting.pop(connection)
            place = queue.popleft()
            if queue:
                self._waiting[connection] = queue  # moves the connection behind all other connections
            if not place.done():
                place.set_result(self._start(connection))
        self._watch()

    def _watch(self) -> None:
        """Schedule the check for slow reads if any reads are waiting."""
        if self._patrol is None and self._waiting and self._steps:
            loop = asyncio.get_running_loop()
            self._patrol = loop.call_at(max(next(iter(self._steps)).due_at, loop.time()), self._part_with_slow)

    def _part_with_slow(self) -> None:
        """Move slow reads aside, and end one if too many are aside. If no reads may be moved, end all slow reads."""
        self._patrol = None
        now = asyncio.get_running_loop().time()
        for turn in list(self._steps) if self._waiting else ():
            if turn.due_at > now:
                break
            del self._steps[turn]
            if not self._most_aside:
                turn.end()
                continue
            turn.is_aside = True
            self.running -= 1
            self._aside[turn] = None
            if len(self._aside) > self._most_aside:
                counts = Counter(slow.connection for slow in self._aside)
                victim = max((slow for slow in self._aside if slow.runs), key=lambda slow: counts[slow.connection])
                del self._aside[victim]
                victim.end()
        self._admit()


class Inbox:
    """Request limits shared by all calls to a server.

    Attributes:
        open_calls: lane for requests to methods that need no token.
        requests: lane for all other requests, including the first message of each stream.
        frames: lane for all messages after the first in each stream. A message's turn lasts until the next message is
            read.
        large: lane for requests sent in parts. A request keeps its turn until its call ends or its size has been added
            to `waiting_bytes`.
        waiting_bytes: total size, in bytes, of the requests of running calls that may wait for samples or capacity.
    """

    def __init__(self) -> None:
        self.open_calls = Lane(4, 2, 0.5, most_waiting_of_one=64)
        self.requests = Lane(4, 2, 1.0, most_aside=2)
        self.frames = Lane(4, 2, 1.0, most_aside=4)
        self.large = Lane(1, 1, 10.0)
        self.waiting_bytes = 0

    def reads(self, method: Method, behavior: Behavior, deserialize: Callable[[bytes], Any] | None) -> Behavior:
        """Return a gRPC handler that calls `behavior` with a `Requests` object, which reads messages on demand."""

        async def call(_messages: Any, context: Context) -> Any:
            requests = Requests(self, method, context, deserialize)
            try:
                return await behavior(requests, context)
            finally:
                requests.close()

        return call


class Requests:
    """The request messages of a call, read on demand.

    Attributes:
        first: the first message, or None until that message has been read.
    """

    __slots__ = (
        "_connection", "_context", "_deserialize", "_frame", "_held_bytes", "_inbox", "_is_begun", "_is_first_taken",
        "_large", "_method", "first",
    )  # fmt: skip

    def __init__(
        self, inbox: Inbox, method: Method, context: Context, deserialize: Callable[[bytes], Any] | None
    ) -> None:
        self._inbox = inbox
        self._method = method
        self._context = context
        self._connection = context.peer()
        self._deserialize = deserialize
        self._held_bytes = 0
        self._frame: Turn | None = None
        self._large: Turn | None = None
        self._is_begun = self._is_first_taken = False
        self.first: Any = None

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        if not self._is_first_taken:
            self._is_first_taken = True
            message = await self.begin()
            if message is None:
                raise StopAsyncIteration
            return message
        # The previous frame's turn ends here because the frame has now been processed.
        self._leave_frame()
        if needs_no_turn.get():
            data = await self._context.read()
        else:
            self._frame = await self._inbox.frames.enter(self._connection)
            data = await self._frame.run(self._context.read())
        if data is _EOF:
            raise StopAsyncIteration
        return self._decoded(data)

    async def begin(self) -> Any:
        """Return the first message without consuming it, or None if the stream is empty."""
        if not self._is_begun:
            self._is_begun = True
            self.first = await self._read_first()
        return self.first

    async def only(self) -> Any:
        """Read and return the request of a unary method.

        Raises:
            InvalidArgumentError: the request is missing or is not a message of the method's request type.
        """
        message = self.first = await self._read_first()
        if message is None:
            raise _unreadable("the call ended without a request")
        return message

    def close(self) -> None:
        """End the call's turns and subtract the size of its request from `waiting_bytes`."""
        self._leave_frame()
        self._leave_large()
        if self._held_bytes:
            self._release()

    async def _read_first(self) -> Any:
        """Read the first message. The parts of a large message are joined and decoded in threads."""
        lane = self._inbox.open_calls if self._method.is_open else self._inbox.requests
        data = await self._message(lane)
        if data is _EOF:
            return None
        if self._method.is_open and len(data) > MAX_OPEN_REQUEST_BYTES:
            raise _too_large(len(data), MAX_OPEN_REQUEST_BYTES, "Name a single service")
        if len(data) == PART_BYTES:
            self._hold(PART_BYTES)  # counts the first part while the request waits for its turn
            self._large = await self._inbox.large.enter(self._connection)
            data = await self._large.run(self._joined(data, lane))
            self._release()
        if self._method.waits:
            self._hold(len(data))
        return self._decoded(data) if len(data) < _DECODED_AT_ONCE else await asyncio.to_thread(self._decoded, data)

    async def _joined(self, first: bytes, lane: Lane) -> bytes:
        """Read the remaining parts of a request and return the complete request."""
        parts, size = [first], len(first)
        while len(parts[-1]) == PART_BYTES:
            part = await self._message(lane)
            if part is _EOF:
                break
            size += len(part)
            if size > MAX_REQUEST_BYTES:
                raise _too_large(size, MAX_REQUEST_BYTES, "Write or specify fewer samples at once")
            parts.append(part)
        return await asyncio.to_thread(b"".join, parts)

    def _decoded(self, data: Any) -> Any:
        if self._deserialize is None:
            return data
        try:
            message = self._deserialize(data)
        except DecodeError:
            raise _unreadable(f"the {len(data)} bytes received are not a valid message for this method") from None
        if isinstance(message, Garbled):
            raise _unreadable(message.reason)
        return message

    async def _message(self, lane: Lane) -> Any:
        turn = await lane.enter(self._connection)
        try:
            return await turn.run(self._context.read())
        finally:
            turn.leave()

    def _hold(self, size: int) -> None:
        """Add the size of a request to `waiting_bytes`.

        If the request does not fit, it keeps its turn in `large`, or is rejected if it has no turn.
        """
        inbox = self._inbox
        total = inbox.waiting_bytes + size
        if total <= MAX_WAITING_BYTES:
            self._held_bytes = size
            inbox.waiting_bytes = total
            self._leave_large()
        elif self._large is None:
            raise _beyond(
                WAITING_BYTES,
                total,
                MAX_WAITING_BYTES,
                f"requests of calls that may wait would use {total} bytes of memory; expected at most "
                f"{MAX_WAITING_BYTES}. Make fewer such calls at once, or retry later.",
            )

    def _release(self) -> None:
        self._inbox.waiting_bytes -= self._held_bytes
        self._held_bytes = 0

    def _leave_frame(self) -> None:
        if self._frame is not None:
            self._frame.leave()
            self._frame = None

    def _leave_large(self) -> None:
        if self._large is not None:
            self._large.leave()
            self._large = None


def _unreadable(reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request cannot be read: {reason}; send a message of the type that the protos define for the method"
    )


def _too_large(size: int, limit: int, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request is at least {size} bytes; expected at most {limit}. {remedy}",
        metadata={"got": str(size), "limit": str(limit)},
    )


class Progress:
    """A stall timer for a stream, which runs while the stream waits for its client.

    The timer restarts once enough bytes have been transferred.

    Args:
        seconds: maximum time that a transfer of `LEAST_PROGRESS_BYTES` may take.
        what: beginning of the error message, such as "the next part did not arrive".
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._left_seconds = seconds
        self._counted_from = 0.0  # time since which the current step has been using up `_left_seconds`
        self._moved_bytes = 0
        self._what = what
        self._total_bytes = 0
        self._waited_seconds = 0.0
        self._step: tuple[asyncio.Timeout, float] | None = None  # timeout and start time of the current step
        self._least_rate: float | None = None  # minimum rate, set once the stream has been ended for being too slow

    async def wait_for(self, step: Awaitable[Part]) -> Part:
        """Await a step of the stream and return its result.

        Raises:
            DeadlineError: the stream stalled or did not reach its minimum rate while puts waited for capacity.
        """
        began_at = self._counted_from = time.monotonic()
        try:
            async with asyncio.timeout(self._left_seconds) as timeout:
                self._step = timeout, began_at
                return await step
        except TimeoutError:
            raise self._error() from None
        finally:
            self._step = None
            now = time.monotonic()
            self._left_seconds -= now - self._counted_from
            self._waited_seconds += now - began_at

    def moved(self, size_bytes: int) -> None:
        """Record that bytes were transferred. This method may be called during a step."""
        self._total_bytes += size_bytes
        self._moved_bytes += size_bytes
        if self._moved_bytes >= LEAST_PROGRESS_BYTES:
            self._moved_bytes = 0
            self._left_seconds = self._seconds
            if self._step is not None and not self._step[0].expired() and self._least_rate is None:
                self._counted_from = time.monotonic()
                self._step[0].reschedule(asyncio.get_running_loop().time() + self._seconds)

    def end_if_slower(self, bytes_per_second: float) -> None:
        """End the current step if the transfer rate since the grace period is below `bytes_per_second`."""
        if self._step is None or self._least_rate is not None:
            return
        timeout, began_at = self._step
        waited = self._waited_seconds + time.monotonic() - began_at
        if self._total_bytes < bytes_per_second * (waited - GRACE_SECONDS):
            self._least_rate = bytes_per_second
            timeout.reschedule(asyncio.get_running_loop().time())

    def _error(self) -> DeadlineError:
        if self._least_rate is None:
            return DeadlineError(
                f"{self._what} within {self._seconds:g} s (stall_seconds), so the call was ended to release its memory",
                metadata={"limit_name": "stall_seconds", "limit": f"{self._seconds:g}"},
            )
        least = f"{self._least_rate:.0f}"
        return DeadlineError(
            f"{self._total_bytes} bytes were transferred in {self._waited_seconds:.1f} s while puts waited for "
            f"capacity; expected {least} bytes per second after the first {GRACE_SECONDS:g} s (min_stream_rate_bytes, "
            "divided among all streams). Use a faster connection, or lower the setting.",
            metadata={"limit_name": "min_stream_rate_bytes", "got": str(self._total_bytes), "limit": least},
        )


class LeastRate:
    """Enforces a minimum transfer rate for the streams of a storage service while puts wait for capacity.

    A stream occupies the memory that it reads or fills, so a slow stream delays waiting puts. All streams may share the
    same network, so each of n streams needs to reach only 1/n of the rate. Use this class from a single event loop.

    Args:
        bytes_per_second: minimum combined rate of all streams, or 0 for no minimum.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._streams: set[Progress] = set()

    @contextlib.contextmanager
    def watching(self, progress: Progress) -> Iterator[None]:
        """Enforce the minimum rate for a stream until the `with` block ends."""
        self._streams.add(progress)
        try:
            yield
        finally:
            self._streams.discard(progress)

    def enforce(self) -> None:
        """End streams slower than the minimum rate. Call this method every second while puts are waiting."""
        for progress in self._streams:
            progress.end_if_slower(self._bytes_per_second / len(self._streams))


class received(AsyncIterator[Part]):  # noqa: N801  (used like a function)
    """Iterates over the messages of a stream as they arrive.

    Unlike a generator, this iterator does not keep the last message in memory.

    Args:
        parts: messages of the stream.
        progress: stall timer that limits the time spent waiting for messages.
        size: function that returns the size of a message in bytes.

    Raises:
        DeadlineError: the messages arrived too slowly.
    """

    def __init__(self, parts: AsyncIterator[Part], progress: Progress, size: Callable[[Part], int]) -> None:
        self._progress = progress
        self._parts = aiter(parts)
        self._size = size

    async def __anext__(self) -> Part:
        part = await self._progress.wait_for(anext(self._parts))
        self._progress.moved(self._size(part))
        return part
