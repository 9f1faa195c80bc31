"""Reads the requests of calls, few at a time, so that what is on its way takes a bounded part of the memory.

gRPC reads a message whole, into memory that no quota counts, as soon as it is asked for one. Until then the client can
send no more than the window of the stream (`wire/connection.py`). So the bytes in flight are bounded by the number of
reads that run at once, each of one message of at most `max_message_bytes`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc

from tq_service.errors import DeadlineError, InvalidArgumentError, LimitExceededError, TqError
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Context
from tq_service.wire.columns import WAITING_BYTES, Garbled
from tq_service.wire.messages import MAX_REQUEST_BYTES, PART_BYTES

RETRY_AFTER_SECONDS: Final = 1.0
MAX_OPEN_REQUEST_BYTES: Final = 4096
"""Of a method that needs no token: it names a service."""

MAX_WAITING_BYTES: Final = 32 << 20
"""Of the requests of all calls that may wait for samples or capacity, while they run."""

_DECODED_AT_ONCE: Final = 512 << 10  # bytes, some milliseconds' work where they are varints
_EOF: Final = grpc.aio.EOF

awaits_end: Final[ContextVar[bool]] = ContextVar("awaits_end", default=False)
"""Set by a call that expects no further message but the end of its stream, which may take long: it needs no turn."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A request that was refused before it was read whole, and why."""

    error: TqError


class Turn:
    """A read, or several that belong together, of one connection in a lane.

    Attributes:
        connection: whose it is.
        is_aside: whether it was slow while others waited, so that it counts no more for those that run at once.
    """

    __slots__ = ("_began_at", "_is_ended", "_lane", "_task", "connection", "is_aside")

    def __init__(self, lane: Lane, connection: str) -> None:
        self._lane = lane
        self._task: asyncio.Task[Any] | None = None  # while it runs a step
        self._began_at = 0.0
        self._is_ended = False
        self.connection = connection
        self.is_aside = False

    async def run(self, step: Awaitable[Any]) -> Any:
        """Return what a step of the turn returns.

        Raises:
            DeadlineError: it took too long, and others wait.
        """
        task = self._task = asyncio.current_task()
        self._began_at = asyncio.get_running_loop().time()
        self._lane.watch(self)
        try:
            return await step
        except asyncio.CancelledError:
            if not self._is_ended or task is None or task.uncancel():  # by the caller, which has left
                raise
            raise DeadlineError(
                f"a message did not come within {self._lane.patience_seconds:g} s while others waited to be read; "
                "send it faster, or fewer at once",
                metadata={"limit_name": "patience", "limit": f"{self._lane.patience_seconds:g}"},
            ) from None
        finally:
            self._task = None
            self._lane.unwatch(self)

    @property
    def runs(self) -> bool:
        """Whether a step of it runs, and was not ended."""
        return self._task is not None and not self._is_ended

    def due(self) -> float:
        """Return when its step is slow."""
        return self._began_at + self._lane.patience_seconds

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

    A read that takes longer than the patience while others wait is slow. A few slow
    reads may go on aside, where they keep nobody waiting, and as long as they do, their connections leave the last
    place to others. When too many are aside, one ends: the oldest of the connection that has most of them.

    Args:
        most: reads at once.
        most_of_one: reads of one connection, those aside included.
        patience_seconds: how long a read may take while others wait.
        most_aside: slow reads that may go on.
        most_waiting_of_one: reads of one connection that may wait; None: no bound.

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
        most_waiting_of_one: int | None = None,
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
        if self._most_waiting_of_one is not None and len(queue) >= self._most_waiting_of_one:
            raise LimitExceededError(
                f"{len(queue)} such calls of this connection wait to be read; expected at most "
                f"{self._most_waiting_of_one}. Make fewer at once",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                metadata={"limit_name": "open_calls", "got": str(len(queue) + 1),
                          "limit": str(self._most_waiting_of_one)},
            )  # fmt: skip
        place: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._admit()
        try:
            return await place
        except BaseException:
            if place.done() and not place.cancelled():  # it came in the turn of the loop in which the wait was given up
                self.leave(place.result())
            else:
                place.cancel()
                self._forget(connection, place)
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

    def _forget(self, connection: str, place: asyncio.Future[Turn]) -> None:
        queue = self._waiting.get(connection)
        if queue is not None:
            with suppress(ValueError):
                queue.remove(place)
            if not queue:
                del self._waiting[connection]

    def _watch(self) -> None:
        """See to it that slow reads keep others waiting no longer."""
        if self._patrol is None and self._waiting and self._steps:
            loop = asyncio.get_running_loop()
            self._patrol = loop.call_at(max(next(iter(self._steps)).due(), loop.time()), self._part_with_slow)

    def _part_with_slow(self) -> None:
        self._patrol = None
        now = asyncio.get_running_loop().time()
        if self._waiting:
            for turn in list(self._steps):
                if turn.due() > now:
                    break
                del self._steps[turn]
                if self._most_aside:
                    self._put_aside(turn)
                else:
                    turn.end()
        self._admit()

    def _put_aside(self, turn: Turn) -> None:
        """Let a slow read go on beside the others; if too many do, one of them ends."""
        turn.is_aside = True
        self.running -= 1
        self._aside[turn] = None
        if len(self._aside) > self._most_aside:
            counts = Counter(slow.connection for slow in self._aside)
            victim = max((slow for slow in self._aside if slow.runs), key=lambda slow: counts[slow.connection])
            del self._aside[victim]
            victim.end()


class Inbox:
    """Reads the requests of all calls of a server.

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

    def reads(
        self, method: Method, is_stream: bool, behavior: Behavior, deserialize: Callable[[bytes], Any] | None
    ) -> Behavior:
        """Return a handler of raw messages that reads the request of a call, or passes on a stream of them."""

        async def call(_messages: Any, context: Context) -> Any:
            request = _Reader(self, method, context, deserialize)
            try:
                return await behavior(request if is_stream else await request.only(), context)
            finally:
                request.close()

        return call


class _Reader:
    """The requests of one call, read as they are asked for."""

    __slots__ = (
        "_connection", "_context", "_deserialize", "_frame", "_held_bytes", "_inbox", "_is_begun", "_large", "_method",
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
        self._is_begun = False

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> Any:
        if not self._is_begun:
            message = await self._first()
        else:
            # The frame before was taken: its turn ends with that, not with its arrival.
            self._leave_frame()
            if awaits_end.get():
                data = await self._context.read()
            else:
                self._frame = await self._inbox.frames.enter(self._connection)
                data = await self._frame.run(self._context.read())
            message = self._decoded(data)
        if message is _EOF:
            raise StopAsyncIteration
        return message

    async def only(self) -> Any:
        """Return the request of a method that has one, `Unread` or `Garbled` where there is none to be had."""
        try:
            message = await self._first()
        except TqError as error:
            return Unread(error)
        return Garbled("the call ended without one") if message is _EOF else message

    def close(self) -> None:
        """End its turns, and count what it held no more."""
        self._leave_frame()
        self._leave_large()
        self._release()

    async def _first(self) -> Any:
        """Return the first message; a thread decodes a large one, and joins one that comes in parts."""
        self._is_begun = True
        lane = self._inbox.open_calls if self._method.is_open else self._inbox.requests
        data = await self._message(lane)
        if data is _EOF:
            return data
        if self._method.is_open and len(data) > MAX_OPEN_REQUEST_BYTES:
            raise _too_large(len(data), MAX_OPEN_REQUEST_BYTES, "name one service")
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
                raise _too_large(size, MAX_REQUEST_BYTES, "write or name fewer samples at once")
            parts.append(part)
        return await asyncio.to_thread(b"".join, parts)

    def _decoded(self, data: Any) -> Any:
        return data if data is _EOF or self._deserialize is None else self._deserialize(data)

    async def _message(self, lane: Lane) -> Any:
        turn = await lane.enter(self._connection)
        try:
            return await turn.run(self._context.read())
        finally:
            turn.leave()

    def _hold(self, size: int) -> None:
        """Count a request among those of calls that may wait; one too large for that waits within its turn."""
        inbox = self._inbox
        if inbox.waiting_bytes + size <= MAX_WAITING_BYTES:
            self._held_bytes = size
            inbox.waiting_bytes += size
            self._leave_large()
        elif self._large is None:
            raise LimitExceededError(
                f"the requests of calls that may wait take {inbox.waiting_bytes + size} bytes; expected at most "
                f"{MAX_WAITING_BYTES}. Try again later, with fewer such calls at once",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                metadata={
                    "limit_name": WAITING_BYTES,
                    "got": str(inbox.waiting_bytes + size),
                    "limit": str(MAX_WAITING_BYTES),
                },
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


def _too_large(size: int, limit: int, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request is at least {size} bytes; expected at most {limit}. {remedy[:1].upper()}{remedy[1:]}",
        metadata={"got": str(size), "limit": str(limit)},
    )
