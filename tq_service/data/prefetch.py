"""Fetching and splitting ahead of the consumer: bounded queues that background threads fill, and streams of them."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from tq_service.data.source import (
    BatchFetcher,
    BatchSource,
    BatchStream,
    End,
    FetchedBatch,
    StreamClosedError,
    StreamIdentity,
)

T = TypeVar("T")

# How long closing a stream waits for its thread. A thread that is still in a call by then ends with it.
_JOIN_SECONDS: Final = 5.0
_MICRO_BATCHES_AHEAD: Final = 2


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
    """A bounded queue with one writer and one reader; one condition, predicate waits, `close` wakes both.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, limit: PrefetchLimit) -> None:
        self._limit = limit
        # The condition's lock is reentrant: `close` may run in a finalizer, in a thread that holds it.
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._finished = False
        self._error: BaseException | None = None
        self.closed = False

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Mark the end after a block: no further item comes. An error of the block is raised to the reader."""
        error: BaseException | None = None
        try:
            yield
        except StreamClosedError:
            pass
        except BaseException as raised:  # whatever it is, it belongs to the reader
            error = raised
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def begin(self) -> bool:
        """Wait until the limit admits another item, and count it; false if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._limit.admits())
            self._limit.begin()
            return not self.closed

    def put(self, item: T, size_bytes: int = 0) -> None:
        """Append the item that was begun; it is dropped if the queue was closed meanwhile."""
        with self._changed:
            self._limit.arrive(size_bytes)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()

    def get(self) -> T | None:
        """Wait for an item; None after the last one. Items that were put before an error come before the error.

        The item stays ahead until `on_consumed`: its reader may not begin with it at once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self.closed)
            if self._items:
                return self._items.popleft()
            error, self._error = self._error, None
            if error is not None and not self.closed:
                raise error
            return None

    def on_consumed(self, size_bytes: int = 0) -> None:
        """Admit a further item: one of this size is in use and not ahead any more."""
        with self._changed:
            self._limit.consume(size_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the items, and end the waits of both sides. Idempotent."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class _QueuedStream(Generic[T]):
    """A stream whose items a background thread puts into a queue.

    The thread refers to the queue and the source only, never to the stream, so that a stream that is no longer read is
    collected and ends its thread.

    Attributes:
        next_index: the batch_index that `read` gives next.
    """

    def __init__(
        self,
        next_index: int,
        source: BatchFetcher | BatchStream,
        limit: PrefetchLimit,
        fill: Callable[[PrefetchQueue[T]], None],
        thread_name: str,
    ) -> None:
        self.next_index = next_index
        self._queue = PrefetchQueue[T](limit)
        thread = threading.Thread(target=fill, args=(self._queue,), name=thread_name, daemon=True)
        self._end = weakref.finalize(self, _end, self._queue, source, thread)
        thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._queue.closed

    def close(self) -> None:
        """End the thread and drop what it put into the queue. Idempotent."""
        self._end()


def _end(queue: PrefetchQueue[Any], source: BatchFetcher | BatchStream, thread: threading.Thread) -> None:
    """Close a queue and what its items are read from, and wait for the thread that does so."""
    # In this order: a reader must find the stream closed before the source is. It would take None for the end, and an
    # error of a call that the thread is in for one that concerns it.
    queue.close()
    source.close()
    # A cycle that holds the stream may be collected by the thread itself, which cannot join itself.
    if threading.current_thread() is not thread:
        thread.join(_JOIN_SECONDS)


class PrefetchStream(_QueuedStream[FetchedBatch | End]):
    """Fetches batches ahead, bounded by number and bytes.

    Lifecycle::

        __init__ ── thread starts ──> fetches while the limit admits ──┬─ end ────> read() returns it
                                             ^                         ├─ error ──> read() raises it
                                   on_consumed of a batch              └─ close() or garbage collection: thread ends
    """

    def __init__(
        self, source: BatchSource, batch_index: int, identity: StreamIdentity | None, limit: PrefetchLimit
    ) -> None:
        self._fetcher = BatchFetcher(source, identity)
        fill = partial(_fetch_ahead, self._fetcher, batch_index)
        super().__init__(batch_index, self._fetcher, limit, fill, "tq-prefetch")

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched."""
        return self._fetcher.fetched_until

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. An error of the thread is raised as it is."""
        fetched = self._queue.get()
        if isinstance(fetched, FetchedBatch):
            self.next_index += 1
        return fetched


def _fetch_ahead(fetcher: BatchFetcher, batch_index: int, queue: PrefetchQueue[FetchedBatch | End]) -> None:
    with queue.finishing():
        try:
            for index in itertools.count(batch_index):
                if not queue.begin():
                    break
                fetched = fetcher.fetch(index, lambda: not queue.closed)
                if isinstance(fetched, End):
                    queue.put(fetched)
                    break
                size_bytes = fetched.size_bytes
                queue.put(replace(fetched, on_consumed=partial(queue.on_consumed, size_bytes)), size_bytes)
                del fetched  # not kept alive while the limit is waited for
        finally:
            fetcher.close()


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """An item of the queue: a micro-batch, with its batch if it is the first, or the end.

    A batch that has no micro-batch comes without one.
    """

    micro_batches: tuple[Any, ...]
    begins: FetchedBatch | End | None = None


class MicroBatchPrefetcher(_QueuedStream[_Prefetched]):
    """Reads the batches of another stream, and splits each into its micro-batches before they are asked for.

    Lifecycle::

        __init__ ── thread starts ──> reads a batch ──> splits it, two micro-batches ahead ──┬──> the next batch
                                                                                            └──> end, error
        close() or garbage collection: the inner stream is closed, the thread ends

    A batch is dropped with its last micro-batch, before the next one is read.
    """

    def __init__(self, inner: BatchStream, split: Callable[[FetchedBatch], Iterator[Any]]) -> None:
        # The first item of the next batch, which was found behind the last one of the batch before.
        self._begun: _Prefetched | None = None
        limit = PrefetchLimit(_MICRO_BATCHES_AHEAD, sys.maxsize)
        super().__init__(inner.next_index, inner, limit, partial(_split_ahead, inner, split), "tq-split-ahead")

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end, leaving out what is left of the one before; None once it is closed."""
        while self._begun is None:
            if (item := self._get()) is None:
                return None
            self._begun = item if item.begins is not None else None
        begun, self._begun = self._begun, None
        if not isinstance(begun.begins, FetchedBatch):
            return begun.begins
        self.next_index = begun.begins.index + 1
        on_consumed = partial(self._on_consumed, begun.begins.on_consumed)
        return replace(begun.begins, micro_batches=self._micro_batches(begun.micro_batches), on_consumed=on_consumed)

    def _get(self) -> _Prefetched | None:
        item = self._queue.get()
        # The first micro-batch of a batch stays ahead until the batch is consumed; each other one is consumed at once.
        if item is not None and not isinstance(item.begins, FetchedBatch):
            self._queue.on_consumed()
        return item

    def _on_consumed(self, on_inner_consumed: Callable[[], None] | None) -> None:
        # The inner stream first: the thread that splits competes with this one as soon as it may go on.
        if on_inner_consumed is not None:
            on_inner_consumed()
        self._queue.on_consumed()

    def _micro_batches(self, first: tuple[Any, ...]) -> Iterator[Any]:
        yield from first
        del first
        while (item := self._get()) is not None:
            if item.begins is not None:
                self._begun = item
                return
            yield from item.micro_batches
            del item


def _split_ahead(
    inner: BatchStream, split: Callable[[FetchedBatch], Iterator[Any]], queue: PrefetchQueue[_Prefetched]
) -> None:
    with queue.finishing():
        # Each item is counted before it is made. The one that found no further micro-batch in its batch is used for the
        # first of the next batch.
        wanted = queue.begin()
        while wanted and (batch := inner.read()) is not None:
            if isinstance(batch, End):
                queue.put(_Prefetched((), batch))
                break
            micro_batches = split(batch)
            queue.put(_Prefetched(_next_of(micro_batches), batch))
            del batch  # the iterator refers to it until the last micro-batch is made
            while (wanted := queue.begin()) and (micro_batch := _next_of(micro_batches)):
                queue.put(_Prefetched(micro_batch))
                del micro_batch


def _next_of(micro_batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return the next one in a tuple, which is empty after the last one."""
    return tuple(itertools.islice(micro_batches, 1))
