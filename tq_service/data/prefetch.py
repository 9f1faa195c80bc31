"""Fetching and splitting ahead of the consumer: bounded queues that background threads fill, and streams of them."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from tq_service.data.source import BatchStream, End, FetchedBatch, StreamClosedError

S = TypeVar("S", bound="Fetcher | BatchStream")
T = TypeVar("T")

# How long closing a stream waits for a thread. A thread that is still in a call by then ends with it.
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
    """A bounded queue of numbered items with one reader; one condition, predicate waits, `close` wakes all.

    Writers begin items in the order of their numbers, and put them in any order; the reader gets them in order.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, limit: PrefetchLimit) -> None:
        self._limit = limit
        # The condition's lock is reentrant: `close` may run in a finalizer, in a thread that holds it.
        self._changed = threading.Condition()
        self._items: dict[int, T] = {}
        self._begun_count = self._read_count = 0
        self._end: tuple[int, BaseException | None] | None = None  # the first number without an item, and why
        self.closed = False

    def begin(self) -> int | None:
        """Wait until the limit admits another item, and return its number; None once there is an end."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._end or self._limit.admits())
            if self.closed or self._end:
                return None
            self._limit.begin()
            self._begun_count += 1
            return self._begun_count - 1

    @contextmanager
    def filling(self, number: int) -> Iterator[None]:
        """Make an error of a block, in which the item of this number is made, the end of the queue."""
        try:
            yield
        except StreamClosedError:
            self.end(number)
        except BaseException as error:  # whatever it is, it belongs to the reader
            self.end(number, error)

    def put(self, number: int, item: T, size_bytes: int = 0) -> None:
        """Add an item that was begun; it is dropped if the queue was closed meanwhile."""
        with self._changed:
            self._limit.arrive(size_bytes)
            if not self.closed:
                self._items[number] = item
                self._changed.notify_all()

    def end(self, number: int, error: BaseException | None = None) -> None:
        """Have no items from this number on; an error is raised to the reader once it has those before."""
        with self._changed:
            if self._end is None or number < self._end[0]:
                self._end = number, error
            self._changed.notify_all()

    def get(self) -> T | None:
        """Wait for the next item; None after the last one.

        The item stays ahead until `on_consumed`: its reader may not begin with it at once.
        """

        def is_over() -> bool:
            return self.closed or (self._end is not None and self._end[0] <= self._read_count)

        with self._changed:
            self._changed.wait_for(lambda: self._read_count in self._items or is_over())
            if self._read_count in self._items:
                self._read_count += 1
                return self._items.pop(self._read_count - 1)
            if self._end is not None and not self.closed:
                number, error = self._end
                self._end = number, None
                if error is not None:
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


class _QueuedStream(Generic[S, T]):
    """A stream whose items background threads put into a queue, one thread for each source.

    The threads refer to the queue and the sources only, never to the stream, so that a stream that is no longer read is
    collected and ends its threads.

    Attributes:
        next_index: the batch_index that `read` gives next.
    """

    def __init__(
        self,
        next_index: int,
        sources: Sequence[S],
        limit: PrefetchLimit,
        fill: Callable[[S, PrefetchQueue[T]], None],
        thread_name: str,
    ) -> None:
        self.next_index = next_index
        self._sources = sources
        self._queue = PrefetchQueue[T](limit)
        threads = [
            threading.Thread(target=fill, args=(source, self._queue), name=thread_name, daemon=True)
            for source in sources
        ]
        self._end = weakref.finalize(self, _end, self._queue, sources, threads)
        for thread in threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._queue.closed

    def close(self) -> None:
        """End the threads and drop what they put into the queue. Idempotent."""
        self._end()


def _end(queue: PrefetchQueue[Any], sources: Sequence[Fetcher | BatchStream], threads: list[threading.Thread]) -> None:
    """Close a queue and what its items are read from, and wait for the threads that do so."""
    # In this order: a reader must find the stream closed before the source is. It would take None for the end, and an
    # error of a call that a thread is in for one that concerns it.
    queue.close()
    for source in sources:
        source.close()
    for thread in threads:
        # A cycle that holds the stream may be collected by a thread itself, which cannot join itself.
        if threading.current_thread() is not thread:
            thread.join(_JOIN_SECONDS)


class Fetcher(Protocol):
    """Fetches batches in the thread that calls it, or by a worker process."""

    fetched_until: int
    """The batch_index behind the last batch that was fetched."""

    def fetch(self, batch_index: int, is_wanted: Callable[[], bool]) -> FetchedBatch | End:
        """Wait for a batch, or the end, and return it; StreamClosedError once it is not wanted any more."""
        ...

    def close(self) -> None:
        """End the call of `fetch` in progress in another thread. Idempotent."""
        ...


class PrefetchStream(_QueuedStream[Fetcher, FetchedBatch | End]):
    """Fetches batches ahead with one or more fetchers, bounded by number and bytes.

    Lifecycle::

        __init__ ── threads start ──> fetch while the limit admits ──┬─ end ────> read() returns it
                                             ^                       ├─ error ──> read() raises it
                                   on_consumed of a batch            └─ close() or garbage collection: threads end

    Each thread takes the next batch that nobody fetches; `read` gives them in order.
    """

    def __init__(self, fetchers: Sequence[Fetcher], batch_index: int, limit: PrefetchLimit) -> None:
        super().__init__(batch_index, fetchers, limit, partial(_fetch_ahead, batch_index), "tq-prefetch")

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched."""
        return max(fetcher.fetched_until for fetcher in self._sources)

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. An error of a thread is raised as it is."""
        fetched = self._queue.get()
        if isinstance(fetched, FetchedBatch):
            self.next_index += 1
        return fetched


def _fetch_ahead(first_index: int, fetcher: Fetcher, queue: PrefetchQueue[FetchedBatch | End]) -> None:
    try:
        while (number := queue.begin()) is not None:
            with queue.filling(number):
                fetched = fetcher.fetch(first_index + number, lambda: not queue.closed)
                if isinstance(fetched, End):
                    queue.put(number, fetched)
                    queue.end(number + 1)
                else:
                    size_bytes = fetched.size_bytes
                    queue.put(number, replace(fetched, on_consumed=partial(queue.on_consumed, size_bytes)), size_bytes)
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


class MicroBatchPrefetcher(_QueuedStream[BatchStream, _Prefetched]):
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
        super().__init__(inner.next_index, [inner], limit, partial(_split_ahead, split), "tq-split-ahead")

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
    split: Callable[[FetchedBatch], Iterator[Any]], inner: BatchStream, queue: PrefetchQueue[_Prefetched]
) -> None:
    items = _items_of(inner, split)
    # Each item is counted before it is made.
    while (number := queue.begin()) is not None:
        with queue.filling(number):
            item = next(items, None)
            if item is None:
                queue.end(number)
            else:
                queue.put(number, item)
            del item


def _items_of(inner: BatchStream, split: Callable[[FetchedBatch], Iterator[Any]]) -> Iterator[_Prefetched]:
    while (batch := inner.read()) is not None:
        if isinstance(batch, End):
            yield _Prefetched((), batch)
            return
        micro_batches = split(batch)
        yield _Prefetched(_next_of(micro_batches), batch)
        del batch  # the iterator refers to it until the last micro-batch is made
        yield from map(_Prefetched, iter(partial(_next_of, micro_batches), ()))  # keeps none of them alive


def _next_of(micro_batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return the next one in a tuple, which is empty after the last one."""
    return tuple(itertools.islice(micro_batches, 1))
