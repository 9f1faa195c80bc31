"""How far ahead of the consumer batches are fetched, the queue in which they wait, and what streams with one share."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Generic, Protocol, TypeVar

T = TypeVar("T")

# How long closing a stream waits for its thread. A thread that is still in a call by then ends with it.
_JOIN_SECONDS: Final = 5.0


class PrefetchLimit:
    """Decides whether a further batch may be begun, by number and by bytes.

    A batch is ahead from `begin` until `consume`; its size is known from `arrive` on. Until then it counts as much as
    the largest batch that has arrived, and before one has arrived only one is under way. So as long as no batch is
    larger than all before it, what is ahead stays within `max_bytes`. Larger ones may exceed it, each by its difference
    to the largest before it, and are the measure for those that follow. With nothing ahead a batch is always admitted,
    however large: the consumer waits for it.

    Not safe for several threads; its owner guards it.

    Args:
        max_batches: most batches ahead.
        max_bytes: most bytes of the batches ahead.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._under_way = 0
        self._arrived = 0
        self._arrived_bytes = 0
        self._largest_bytes: int | None = None

    def admits(self) -> bool:
        """Whether another batch may be begun."""
        ahead = self._under_way + self._arrived
        if ahead == 0:
            return True
        if ahead >= self._max_batches or self._largest_bytes is None:
            return False
        return self._arrived_bytes + (self._under_way + 1) * self._largest_bytes <= self._max_bytes

    def begin(self) -> None:
        """Count a batch that is requested from now on."""
        self._under_way += 1

    def arrive(self, size_bytes: int) -> None:
        """Count a batch that was begun as `size_bytes` large."""
        self._under_way -= 1
        self._arrived += 1
        self._arrived_bytes += size_bytes
        self._largest_bytes = max(self._largest_bytes or 0, size_bytes)

    def consume(self, size_bytes: int) -> None:
        """Count a batch that had arrived as no longer ahead."""
        self._arrived -= 1
        self._arrived_bytes -= size_bytes


class PrefetchQueue(Generic[T]):
    """A bounded queue with one writer and one reader; one condition, predicate waits, `close` wakes both."""

    def __init__(self, limit: PrefetchLimit) -> None:
        self._limit = limit
        # The condition's lock is reentrant: `close` may run in a finalizer, in a thread that holds it.
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._finished = False
        self._error: BaseException | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def begin(self) -> bool:
        """Wait until the limit admits another item, and count it; false if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._limit.admits())
            self._limit.begin()
            return not self._closed

    def put(self, item: T, size_bytes: int) -> None:
        """Append the item that was begun; it is dropped if the queue was closed meanwhile."""
        with self._changed:
            self._limit.arrive(size_bytes)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        """Mark the end: no further item comes, because of `error` or because there is none."""
        with self._changed:
            self._finished = True
            self._error = error
            self._changed.notify_all()

    def get(self) -> T | None:
        """Wait for an item; None after the last one. Items that were put before an error come before the error.

        The item stays ahead until `on_consumed`: its reader may not begin with it at once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._closed or not self._items:
                error, self._error = self._error, None
                if error is not None and not self._closed:
                    raise error
                return None
            return self._items.popleft()

    def on_consumed(self, size_bytes: int) -> None:
        """Admit a further item: one of this size is in use and not ahead any more."""
        with self._changed:
            self._limit.consume(size_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the items, and end the waits of both sides. Idempotent."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Source(Protocol):
    """What a stream reads from."""

    def close(self) -> None:
        """End what it does, also calls of other threads. Idempotent."""
        ...


class QueuedStream(Generic[T]):
    """A stream whose items a background thread puts into a queue.

    The thread refers to the queue and the source only, never to the stream, so that a stream that is no longer read is
    collected and ends its thread.

    Attributes:
        next_index: the batch_index that `read` gives next.
    """

    def __init__(self, next_index: int, queue: PrefetchQueue[T], source: Source, thread: threading.Thread) -> None:
        self.next_index = next_index
        self._queue = queue
        self._source = source
        self._thread = thread

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._queue.closed

    def close(self) -> None:
        """End the thread and drop what it put into the queue. Idempotent."""
        end(self._queue, self._source, self._thread)


def end(queue: PrefetchQueue[T], source: Source, thread: threading.Thread) -> None:
    """Close a queue and what its items are read from, and wait for the thread that does so. Idempotent."""
    if queue.closed:
        return
    # In this order: a reader must find the stream closed before the source is. It would take None for the end, and an
    # error of a call that the thread is in for one that concerns it.
    queue.close()
    source.close()
    # A cycle that holds the stream may be collected by the thread itself, which cannot join itself.
    if threading.current_thread() is not thread:
        thread.join(_JOIN_SECONDS)
