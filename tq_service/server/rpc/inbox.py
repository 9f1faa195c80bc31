"""Reads the requests of calls, few at a time, so that what is on its way takes a bounded part of the memory.

gRPC reads a message whole, into memory that no quota counts, as soon as it is asked for one. Until then the client can
send no more than the window of the stream (`wire/connection.py`). So the bytes in flight are bounded by the number of
reads that run at once, each of one message of at most `max_message_bytes`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc

from tq_service.errors import DeadlineError, InvalidArgumentError, LimitExceededError, TqError
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Context
from tq_service.wire.frames import WAITING_BYTES, Garbled
from tq_service.wire.parts import MAX_REQUEST_BYTES, PART_BYTES

RETRY_AFTER_SECONDS: Final = 1.0
MAX_OPEN_REQUEST_BYTES: Final = 4096
"""Of a method that needs no token: it names a service."""

MAX_WAITING_BYTES: Final = 32 << 20
"""Of the requests of all calls that may wait for samples or capacity, while they run."""

_EOF: Final = grpc.aio.EOF

awaits_end: Final[ContextVar[bool]] = ContextVar("awaits_end", default=False)
"""Set by a call that expects no further message but the end of its stream, which may take long: it needs no turn."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A request that was refused before it was read whole, and why."""

    error: TqError


class Lane:
    """Lets some reads run at once, of which some for one connection; the others wait, and connections take turns.

    A read that has run for longer than the patience is ended if others wait: its client is slow, or does not send.

    Args:
        most: reads at once.
        most_of_one: of them, reads of one connection.
        patience_seconds: how long a read may take while others wait.
        most_waiting_of_one: reads of one connection that may wait; None: no bound.

    Attributes:
        running: reads that run.
    """

    def __init__(
        self, most: int, most_of_one: int, patience_seconds: float, most_waiting_of_one: int | None = None
    ) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._patience_seconds = patience_seconds
        self._most_waiting_of_one = most_waiting_of_one
        self._by_connection: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._reads: dict[asyncio.Timeout, float] = {}  # since when they run, the oldest first
        self._patrol: asyncio.TimerHandle | None = None
        self.running = 0

    async def enter(self, connection: str) -> None:
        """Wait for a turn; `leave` ends it.

        Raises:
            LimitExceededError: too many reads of the connection wait already.
        """
        if not self._waiting and self.running < self._most and self._by_connection[connection] < self._most_of_one:
            self._start(connection)
            return
        queue = self._waiting.setdefault(connection, deque())
        if self._most_waiting_of_one is not None and len(queue) >= self._most_waiting_of_one:
            raise LimitExceededError(
                f"{len(queue)} such calls of this connection wait to be read; expected at most "
                f"{self._most_waiting_of_one}. Make fewer at once",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                metadata={"limit_name": "open_calls", "got": str(len(queue) + 1),
                          "limit": str(self._most_waiting_of_one)},
            )  # fmt: skip
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._admit()
        self._watch()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came in the turn of the loop in which the wait was given up
                self.leave(connection)
            else:
                turn.cancel()
                self._forget(connection, turn)
            raise

    def leave(self, connection: str) -> None:
        """End a turn, and let others have theirs."""
        self.running -= 1
        self._by_connection[connection] -= 1
        if not self._by_connection[connection]:
            del self._by_connection[connection]
        self._admit()

    async def read(self, context: Context) -> Any:
        """Return the next message of a call, `grpc.aio.EOF` at its end; within a turn.

        Raises:
            DeadlineError: it did not come in time, and others wait.
        """
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._reads[patience] = asyncio.get_running_loop().time()
                self._watch()
                return await context.read()
        except TimeoutError:
            raise DeadlineError(
                f"a message did not come within {self._patience_seconds:g} s while others waited to be read; send it "
                "faster, or fewer at once",
                metadata={"limit_name": "patience", "limit": f"{self._patience_seconds:g}"},
            ) from None
        finally:
            self._reads.pop(patience, None)

    def _start(self, connection: str) -> None:
        self.running += 1
        self._by_connection[connection] += 1

    def _admit(self) -> None:
        """Start reads that waited, connection by connection in turns."""
        while self._waiting and self.running < self._most:
            for connection in self._waiting:
                if self._by_connection[connection] < self._most_of_one:
                    break
            else:
                return
            queue = self._waiting.pop(connection)
            turn = queue.popleft()
            if queue:
                self._waiting[connection] = queue  # at the end
            if not turn.done():
                self._start(connection)
                turn.set_result(None)

    def _forget(self, connection: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(connection)
        if queue is not None:
            with suppress(ValueError):
                queue.remove(turn)
            if not queue:
                del self._waiting[connection]

    def _watch(self) -> None:
        """See to it that slow reads end as long as others wait."""
        if self._patrol is None and self._waiting and self._reads:
            loop = asyncio.get_running_loop()
            due = next(iter(self._reads.values())) + self._patience_seconds
            self._patrol = loop.call_at(max(due, loop.time()), self._end_slow)

    def _end_slow(self) -> None:
        self._patrol = None
        now = asyncio.get_running_loop().time()
        if self._waiting:
            for patience, began_at in list(self._reads.items()):
                if began_at + self._patience_seconds > now:
                    break
                del self._reads[patience]
                patience.reschedule(now)
        self._watch()


class Inbox:
    """Reads the requests of all calls of a server.

    Attributes:
        open_calls: the requests of methods that need no token.
        requests: those of other methods, and the first message of a stream.
        frames: the other messages of streams, each until the next one is read.
        large: requests that come in parts, each until its call ends.
        waiting_bytes: of the requests of calls that may wait for samples or capacity.
    """

    def __init__(self) -> None:
        self.open_calls = Lane(4, 2, 0.5, most_waiting_of_one=64)
        self.requests = Lane(4, 2, 1.0)
        self.frames = Lane(4, 2, 10.0)
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

    __slots__ = ("_connection", "_context", "_deserialize", "_held_bytes", "_inbox", "_is_begun", "_lanes", "_method")

    def __init__(
        self, inbox: Inbox, method: Method, context: Context, deserialize: Callable[[bytes], Any] | None
    ) -> None:
        self._inbox = inbox
        self._method = method
        self._context = context
        self._connection = context.peer()
        self._deserialize = deserialize
        self._held_bytes = 0
        self._lanes: list[Lane] = []  # in which it has a turn
        self._is_begun = False

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> Any:
        if not self._is_begun:
            data = await self._first()
        else:
            # The frame before was taken: its turn ends with that, not with its arrival.
            self._leave(self._inbox.frames)
            if awaits_end.get():
                data = await self._context.read()
            else:
                await self._enter(self._inbox.frames)
                data = await self._inbox.frames.read(self._context)
        if data is _EOF:
            raise StopAsyncIteration
        return data if self._deserialize is None else self._deserialize(data)

    async def only(self) -> Any:
        """Return the request of a method that has one, `Unread` or `Garbled` where there is none to be had."""
        try:
            data = await self._first()
        except TqError as error:
            return Unread(error)
        if data is _EOF:
            return Garbled("the call ended without one")
        return data if self._deserialize is None else self._deserialize(data)

    def close(self) -> None:
        """End its turns, and count what it held no more."""
        for lane in list(self._lanes):
            self._leave(lane)
        self._inbox.waiting_bytes -= self._held_bytes
        self._held_bytes = 0

    async def _first(self) -> Any:
        """Return the first message, joined where it comes in parts."""
        self._is_begun = True
        lane = self._inbox.open_calls if self._method.is_open else self._inbox.requests
        data = await self._message(lane)
        if data is _EOF:
            return data
        if self._method.is_open and len(data) > MAX_OPEN_REQUEST_BYTES:
            raise _too_large(len(data), MAX_OPEN_REQUEST_BYTES, "name one service")
        if len(data) == PART_BYTES:
            return await self._joined(data, lane)
        if self._method.waits:
            self._hold(len(data))
        return data

    async def _joined(self, first: bytes, lane: Lane) -> bytes:
        """Return a request that comes in parts; there is one such request at a time."""
        await self._enter(self._inbox.large)
        parts, size = [first], len(first)
        while len(parts[-1]) == PART_BYTES:
            part = await self._message(lane)
            if part is _EOF:
                break
            size += len(part)
            if size > MAX_REQUEST_BYTES:
                raise _too_large(size, MAX_REQUEST_BYTES, "write or name fewer samples at once")
            parts.append(part)
        return b"".join(parts)

    async def _message(self, lane: Lane) -> Any:
        await self._enter(lane)
        try:
            return await lane.read(self._context)
        finally:
            self._leave(lane)

    def _hold(self, size: int) -> None:
        inbox = self._inbox
        if inbox.waiting_bytes + size > MAX_WAITING_BYTES:
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
        self._held_bytes = size
        inbox.waiting_bytes += size

    async def _enter(self, lane: Lane) -> None:
        await lane.enter(self._connection)
        self._lanes.append(lane)

    def _leave(self, lane: Lane) -> None:
        if lane in self._lanes:
            self._lanes.remove(lane)
            lane.leave(self._connection)


def _too_large(size: int, limit: int, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request is at least {size} bytes; expected at most {limit}. {remedy[:1].upper()}{remedy[1:]}",
        metadata={"got": str(size), "limit": str(limit)},
    )
