"""A stream that fetches ahead in a background thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque

from tq_service.data.batch import Batch, Life
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError

# How long `close` waits for the thread. A thread that is still in a call by then ends with it.
_JOIN_SECONDS = 5.0


class PrefetchStream:
    """Fetches batches ahead, bounded by number and bytes.

    Lifecycle::

        __init__ ── thread starts ──> fetches while there is room ──┬─ end ────> read() returns None
                                             ^                      ├─ error ──> read() raises it
                                        read() makes room           └─ close() or garbage collection: the thread ends

    The thread refers to the queue only, never to the stream, so that a stream nobody reads any more is collected and
    ends its thread.
    """

    def __init__(
        self, source: BatchSource, batch_index: int, life: Life | None, *, max_batches: int, max_bytes: int
    ) -> None:
        self._next_index = batch_index
        self._queue = _BatchQueue(max_batches, max_bytes)
        self._fetcher = BatchFetcher(source, life)
        self._thread = threading.Thread(
            target=_prefetch, args=(self._queue, self._fetcher, batch_index), name="tq-prefetch", daemon=True
        )
        weakref.finalize(self, self._queue.close)
        self._thread.start()

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        return self._next_index

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._queue.closed

    def read(self) -> Batch | None:
        """Wait for the next batch; None at the end. An error of the thread is raised as it is."""
        batch = self._queue.get()
        if batch is not None:
            self._next_index += 1
        return batch

    def close(self) -> None:
        """End the thread and drop what it fetched. Idempotent."""
        if self._queue.closed:
            return
        self._queue.close()
        self._fetcher.close()
        # A cycle that holds the stream may be collected by the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)


def _prefetch(queue: _BatchQueue, fetcher: BatchFetcher, batch_index: int) -> None:
    error: BaseException | None = None
    try:
        for index in itertools.count(batch_index):
            if not queue.wait_for_room():
                break
            batch = fetcher.fetch(index, lambda: not queue.closed)
            if batch is None:
                break
            queue.put(batch)
            del batch  # not kept alive while waiting for room
    except StreamClosedError:
        pass
    except BaseException as raised:  # whatever it is, it belongs to the reader
        error = raised
    finally:
        fetcher.close()
        queue.finish(error)


class _BatchQueue:
    """A bounded queue with one writer and one reader; one condition, predicate waits, `close` wakes both."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        # The condition's lock is reentrant: `close` may run in a finalizer, in a thread that holds it.
        self._changed = threading.Condition()
        self._batches: deque[tuple[Batch, int]] = deque()
        self._held_bytes = 0
        self._finished = False
        self._error: BaseException | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def wait_for_room(self) -> bool:
        """Wait until another batch may be fetched; false if the queue was closed."""
        with self._changed:
            self._changed.wait_for(self._has_room_or_closed)
            return not self._closed

    def _has_room_or_closed(self) -> bool:
        return self._closed or (len(self._batches) < self._max_batches and self._held_bytes < self._max_bytes)

    def put(self, batch: Batch) -> None:
        size_bytes = batch.size_bytes
        with self._changed:
            if not self._closed:
                self._batches.append((batch, size_bytes))
                self._held_bytes += size_bytes
                self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        """Say that no further batch comes, because of `error` or the end."""
        with self._changed:
            self._finished = True
            self._error = error
            self._changed.notify_all()

    def get(self) -> Batch | None:
        """Wait for a batch; None after the last one. Batches fetched before an error come before the error."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._finished or self._closed)
            if self._closed or not self._batches:
                error, self._error = self._error, None
                if error is not None and not self._closed:
                    raise error
                return None
            batch, size_bytes = self._batches.popleft()
            self._held_bytes -= size_bytes
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._held_bytes = 0
            self._changed.notify_all()
