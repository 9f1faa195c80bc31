"""How much may come in at once, and how slowly: requests, calls that wait, and streams that must make progress.

gRPC reads a message whole, into memory that no quota counts, as soon as it is asked for one. Until then the client can
send no more than the window of the stream (`wire/connection.py`). So the bytes in flight are bounded by the number of
reads that run at once, each of one message of at most `max_message_bytes`.
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
"""What must come, or go, within the time that a stream may stall; less is as good as nothing."""

GRACE_SECONDS: Final = 10.0
"""How long the other side of a stream may be waited for before it must keep to a rate."""

RETRY_AFTER_SECONDS: Final = 1.0
MAX_OPEN_REQUEST_BYTES: Final = 4096
"""Of a method that needs no token: it names a service."""

MAX_WAITING_BYTES: Final = 32 << 20
"""Of the requests of all calls that may wait for samples or capacity, while they run."""

_DECODED_AT_ONCE: Final = 512 << 10  # bytes, some milliseconds' work if they are varints
_EOF: Final = grpc.aio.EOF
_ROUNDED_SHARE: Final = 0.035
"""gRPC rounds timeouts up on the way, and sends one of up to 3.3 % more if it has just sent that (both measured)."""

needs_no_turn: Final[ContextVar[bool]] = ContextVar("needs_no_turn", default=False)
"""Set by a call whose next message may take long to come: the end of its stream, or further calls of a batch."""


def wait_until(context: Context) -> float | None:
    """Return until when a call may wait, by `time.monotonic`, so that a refusal still arrives before its deadline."""
    remaining = context.time_remaining()
    if remaining is None:
        return None
    return time.monotonic() + remaining * (1 - _ROUNDED_SHARE) - min(1.0, remaining / 4)


def too_many_calls(limit_name: str, got: int, limit: int, whose: str = "") -> LimitExceededError:
    """Return the error of a call beyond a limit on calls at once."""
    return _beyond(
        limit_name,
        got,
        limit,
        f"there would be {got} such calls {whose}at once, at most {limit} expected ({limit_name}); make fewer at once, "
        "or try again later",
    )


def _beyond(limit_name: str, got: int, limit: int, message: str) -> LimitExceededError:
    return LimitExceededError(
        message,
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": limit_name, "got": str(got), "limit": str(limit)},
    )


class WaitingCalls:
    """Counts calls that wait, such as for samples or capacity, and rejects those beyond a limit.

    A client is a connection.

    Args:
        most: calls that may wait.
        most_of_one: of them, calls of one client.
        limit_name: of `most`.

    Attributes:
        count: calls that wait.
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
        """Count a call for the time of a `with`.

        Raises:
            LimitExceededError: it is one too many.
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
    """A read, or several that belong together, of one connection in a lane.

    Attributes:
        connection: whose it is.
        due_at: when its step is slow, by the clock of the loop.
        is_aside: whether it was slow while others waited, so that it no longer counts among those that run at once.
    """

    __slots__ = ("_is_ended", "_lane", "_task", "connection", "due_at", "is_aside")

    def __init__(self, lane: Lane, connection: str) -> None:
        self._lane = lane
        self._task: asyncio.Task[Any] | None = None  # while it runs a step
        self._is_ended = False
        self.connection = connection
        self.due_at = 0.0
        self.is_aside = False

    async def run(self, step: Awaitable[Any]) -> Any:
        """Return what a step of the turn returns.

        Raises:
            DeadlineError: it took too long, and others wait.
        """
        task = self._task = asyncio.current_task()
        self._lane.watch(self)
        try:
            return await step
        except asyncio.CancelledError:
            if not self._is_ended or task is None or task.uncancel():  # by the caller, which has left
                raise
            seconds = self._lane.patience_seconds
            raise DeadlineError(
                f"a message did not come within {seconds:g} s while others waited to be read; send it faster, or fewer "
                "at once",
                metadata={"limit_name": "patience", "limit": f"{seconds:g}"},
            ) from None
        finally:
            self._task = None
            self._lane.unwatch(self)

    @property
    def runs(self) -> bool:
        """Whether a step of it runs, and was not ended."""
        return self._task is not None and not self._is_ended

    def end(self) -> None:
        """End its step, and with that its call."""
        if self._task is not None and not self._is_ended:
            self._is_ended = True
            self._task.cancel()

    def leave(self) -> None:
        """End it, and let others have theirs."""
        self._lane.leave(self)


class Lane:
    """Lets some reads run at once, of which some for one connection; the others wait, and connections take turns.

    A read that takes longer than the patience while others wait is slow. A few slow reads may go on aside, where they
    keep nobody waiting, and as long as they do, their connections leave the last place to others. When too many are
    aside, one ends: the oldest of the connection that has most of them.

    Args:
        most: reads at once.
        most_of_one: reads of one connection, those aside included.
        patience_seconds: how long a read may take while others wait.
        most_aside: slow reads that may go on.
        most_waiting_of_one: reads of one connection that may wait.

    Attributes:
        running: reads that run, but for those aside.
        patience_seconds: how long a read may take while others wait.
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
        self._by_connection: dict[str, int] = {}  # turns, those aside included
        self._waiting: dict[str, deque[asyncio.Future[Turn]]] = {}
        self._steps: dict[Turn, None] = {}  # turns that run a step and are not aside, the oldest step first
        self._aside: dict[Turn, None] = {}
        self._patrol: asyncio.TimerHandle | None = None
        self.running = 0
        self.patience_seconds = patience_seconds

    async def enter(self, connection: str) -> Turn:
        """Wait for a turn, which the caller has to leave.

        Raises:
            LimitExceededError: too many reads of the connection wait already.
        """
        if not self._waiting and self._has_place(connection):
            return self._start(connection)
        queue = self._waiting.setdefault(connection, deque())
        if len(queue) >= self._most_waiting_of_one:
            raise _beyond(
                "open_calls",
                len(queue) + 1,
                self._most_waiting_of_one,
                f"{len(queue)} such calls of this connection wait to be read; expected at most "
                f"{self._most_waiting_of_one}. Make fewer at once",
            )
        place: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._admit()
        try:
            return await place
        except BaseException:
            if place.done() and not place.cancelled():  # it came in the turn of the loop in which the wait was given up
                self.leave(place.result())
            else:
                with contextlib.suppress(ValueError):
                    queue.remove(place)
                if not queue and self._waiting.get(connection) is queue:
                    del self._waiting[connection]
            raise

    def leave(self, turn: Turn) -> None:
        """End a turn, and let others have theirs."""
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
        """Count a step that begins."""
        turn.due_at = asyncio.get_running_loop().time() + self.patience_seconds
        if not turn.is_aside:
            self._steps[turn] = None
            if self._waiting:
                self._watch()

    def unwatch(self, turn: Turn) -> None:
        """Count a step no more that has ended."""
        self._steps.pop(turn, None)

    def _has_place(self, connection: str) -> bool:
        is_slow = bool(self._aside) and any(slow.connection == connection for slow in self._aside)
        return self.running + is_slow < self._most and self._by_connection.get(connection, 0) < self._most_of_one

    def _start(self, connection: str) -> Turn:
        self.running += 1
        self._by_connection[connection] = self._by_connection.get(connection, 0) + 1
        return Turn(self, connection)

    def _admit(self) -> None:
        """Start reads that waited, connection by connection in turns."""
        while (connection := next(filter(self._has_place, self._waiting), None)) is not None:
            queue = self._waiting.pop(connection)
            place = queue.popleft()
            if queue:
                self._waiting[connection] = queue  # at the end
            if not place.done():
                place.set_result(self._start(connection))
        self._watch()

    def _watch(self) -> None:
        """See to it that slow reads do not keep others waiting any longer."""
        if self._patrol is None and self._waiting and self._steps:
            loop = asyncio.get_running_loop()
            self._patrol = loop.call_at(max(next(iter(self._steps)).due_at, loop.time()), self._part_with_slow)

    def _part_with_slow(self) -> None:
        """Let slow reads go on beside the others; if too many do, or none may, one of them ends."""
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
    """Bounds the requests of all calls of a server.

    Attributes:
        open_calls: the requests of methods that need no token.
        requests: those of other methods, and the first message of a stream.
        frames: the other messages of streams, each until the next one is read.
        large: requests that come in parts, each until its call ends, or until it is among those that may wait.
        waiting_bytes: of the requests of calls that may wait for samples or capacity.
    """

    def __init__(self) -> None:
        self.open_calls = Lane(4, 2, 0.5, most_waiting_of_one=64)
        self.requests = Lane(4, 2, 1.0, most_aside=2)
        self.frames = Lane(4, 2, 1.0, most_aside=4)
        self.large = Lane(1, 1, 10.0)
        self.waiting_bytes = 0

    def reads(self, method: Method, behavior: Behavior, deserialize: Callable[[bytes], Any] | None) -> Behavior:
        """Return a handler of raw messages, which passes on what reads the requests of a call: a `Requests`."""

        async def call(_messages: Any, context: Context) -> Any:
            requests = Requests(self, method, context, deserialize)
            try:
                return await behavior(requests, context)
            finally:
                requests.close()

        return call


class Requests:
    """The requests of one call, read as they are asked for.

    Attributes:
        first: the first of them, None until it was read.
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
        # The frame before was taken: its turn ends with that, not with its arrival.
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
        """Return the first message, with which the stream still begins then, None for a stream without any."""
        if not self._is_begun:
            self._is_begun = True
            self.first = await self._read_first()
        return self.first

    async def only(self) -> Any:
        """Return the request of a method that has one.

        Raises:
            InvalidArgumentError: there is none, or it cannot be read.
        """
        message = self.first = await self._read_first()
        if message is None:
            raise _unreadable("the call ended without one")
        return message

    def close(self) -> None:
        """End its turns, and count what it held no more."""
        self._leave_frame()
        self._leave_large()
        if self._held_bytes:
            self._release()

    async def _read_first(self) -> Any:
        """Read the first message; a thread decodes a large one, and joins one that comes in parts."""
        lane = self._inbox.open_calls if self._method.is_open else self._inbox.requests
        data = await self._message(lane)
        if data is _EOF:
            return None
        if self._method.is_open and len(data) > MAX_OPEN_REQUEST_BYTES:
            raise _too_large(len(data), MAX_OPEN_REQUEST_BYTES, "Name one service")
        if len(data) == PART_BYTES:
            self._hold(PART_BYTES)  # while it waits for its turn
            self._large = await self._inbox.large.enter(self._connection)
            data = await self._large.run(self._joined(data, lane))
            self._release()
        if self._method.waits:
            self._hold(len(data))
        return self._decoded(data) if len(data) < _DECODED_AT_ONCE else await asyncio.to_thread(self._decoded, data)

    async def _joined(self, first: bytes, lane: Lane) -> bytes:
        """Return a request that comes in parts."""
        parts, size = [first], len(first)
        while len(parts[-1]) == PART_BYTES:
            part = await self._message(lane)
            if part is _EOF:
                break
            size += len(part)
            if size > MAX_REQUEST_BYTES:
                raise _too_large(size, MAX_REQUEST_BYTES, "Write or name fewer samples at once")
            parts.append(part)
        return await asyncio.to_thread(b"".join, parts)

    def _decoded(self, data: Any) -> Any:
        if self._deserialize is None:
            return data
        try:
            message = self._deserialize(data)
        except DecodeError:
            raise _unreadable(f"{len(data)} bytes that are no message of this method") from None
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
        """Count a request among those of calls that may wait; one too large for that waits within its turn."""
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
                f"the requests of calls that may wait take {total} bytes; expected at most {MAX_WAITING_BYTES}. Try "
                "again later, with fewer such calls at once",
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
    return InvalidArgumentError(f"the request cannot be read: {reason}; send what the protos say")


def _too_large(size: int, limit: int, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request is at least {size} bytes; expected at most {limit}. {remedy}",
        metadata={"got": str(size), "limit": str(limit)},
    )


class Progress:
    """Counts down while the other side of a stream is waited for, and starts again whenever enough bytes have moved.

    Args:
        seconds: how long it may take to move `LEAST_PROGRESS_BYTES`.
        what: what did not come or go, for the error.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._left_seconds = seconds
        self._counted_from = 0.0  # since when the step under way uses them up
        self._moved_bytes = 0
        self._what = what
        self._total_bytes = 0
        self._waited_seconds = 0.0
        self._step: tuple[asyncio.Timeout, float] | None = None  # the one under way, and when it began
        self._least_rate: float | None = None  # of a stream that was ended for being slower

    async def wait_for(self, step: Awaitable[Part]) -> Part:
        """Return what a step of the stream returns.

        Raises:
            DeadlineError: the time is over, or others need what the stream holds and it is too slow.
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
        """Count bytes, of the step under way too."""
        self._total_bytes += size_bytes
        self._moved_bytes += size_bytes
        if self._moved_bytes >= LEAST_PROGRESS_BYTES:
            self._moved_bytes = 0
            self._left_seconds = self._seconds
            if self._step is not None and not self._step[0].expired() and self._least_rate is None:
                self._counted_from = time.monotonic()
                self._step[0].reschedule(asyncio.get_running_loop().time() + self._seconds)

    def end_if_slower(self, bytes_per_second: float) -> None:
        """End the step under way if the other side was slower than this, the grace period not counted."""
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
                f"{self._what} within {self._seconds:g} s (stall_seconds); the call is ended so that it holds no "
                "memory of the service",
                metadata={"limit_name": "stall_seconds", "limit": f"{self._seconds:g}"},
            )
        least = f"{self._least_rate:.0f}"
        return DeadlineError(
            f"{self._total_bytes} bytes moved in {self._waited_seconds:.1f} s while other puts wait for capacity; "
            f"expected {least} per second after {GRACE_SECONDS:g} s (min_stream_rate_bytes, shared by all streams). "
            "Use a faster connection, or lower the setting.",
            metadata={"limit_name": "min_stream_rate_bytes", "got": str(self._total_bytes), "limit": least},
        )


class LeastRate:
    """The rate that the streams of a storage service must keep together while puts wait for capacity.

    A stream holds the bytes that it sends or fills, so a slow one keeps them from those puts. Each of n streams must
    keep an nth of the rate: many that share a network are no slower than they can be. Confined to one event loop.

    Args:
        bytes_per_second: of all streams together; 0: any.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._streams: set[Progress] = set()

    @contextlib.contextmanager
    def watching(self, progress: Progress) -> Iterator[None]:
        """Have a stream keep to the rate for the time of a `with`."""
        self._streams.add(progress)
        try:
            yield
        finally:
            self._streams.discard(progress)

    def enforce(self) -> None:
        """End the streams that are too slow; to be called every second or so while puts wait."""
        for progress in self._streams:
            progress.end_if_slower(self._bytes_per_second / len(self._streams))


class received(AsyncIterator[Part]):  # noqa: N801  (reads as a function does)
    """The messages of a stream as they come; it keeps none of them, as a generator would that is not resumed.

    Args:
        parts: the stream.
        progress: counts the time in which it is waited for.
        size: returns the bytes of a message.

    Raises:
        DeadlineError: they come too slowly.
    """

    def __init__(self, parts: AsyncIterator[Part], progress: Progress, size: Callable[[Part], int]) -> None:
        self._progress = progress
        self._parts = aiter(parts)
        self._size = size

    async def __anext__(self) -> Part:
        part = await self._progress.wait_for(anext(self._parts))
        self._progress.moved(self._size(part))
        return part
