"""A stream that fetches ahead in a background thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import replace
from functools import partial

from tq_service.data.batch import FetchedBatch, StreamIdentity
from tq_service.data.end import End
from tq_service.data.prefetch_queue import PrefetchLimit, PrefetchQueue
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError

_Sized = tuple[FetchedBatch | End, int]

# How long `close` waits for the thread. A thread that is still in a call by then ends with it.
_JOIN_SECONDS = 5.0


class PrefetchStream:
    """Fetches batches ahead, bounded by number and bytes.

    Lifecycle::

        __init__ ── thread starts ──> fetches while the limit admits ──┬─ end ────> read() returns it
                                             ^                         ├─ error ──> read() raises it
                                   on_consumed of a batch              └─ close() or garbage collection: thread ends

    The thread refers to the queue only, never to the stream, so that a stream nobody reads any more is collected and
    ends its thread.
    """

    def __init__(
        self, source: BatchSource, batch_index: int, identity: StreamIdentity | None, limit: PrefetchLimit
    ) -> None:
        self._next_index = batch_index
        self._queue = PrefetchQueue[_Sized](limit)
        self._fetcher = BatchFetcher(source, identity)
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

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. An error of the thread is raised as it is."""
        item = self._queue.get()
        if item is None:
            return None
        fetched, size_bytes = item
        if isinstance(fetched, End):
            return fetched
        self._next_index += 1
        return replace(fetched, on_consumed=partial(self._queue.on_consumed, size_bytes))

    def close(self) -> None:
        """End the thread and drop what it fetched. Idempotent."""
        if self._queue.closed:
            return
        # In this order: closing the fetcher makes a call of the thread fail, an error that no reader shall see.
        self._queue.close()
        self._fetcher.close()
        # A cycle that holds the stream may be collected by the thread itself, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)


def _prefetch(queue: PrefetchQueue[_Sized], fetcher: BatchFetcher, batch_index: int) -> None:
    error: BaseException | None = None
    try:
        for index in itertools.count(batch_index):
            if not queue.begin():
                break
            fetched = fetcher.fetch(index, lambda: not queue.closed)
            size_bytes = 0 if isinstance(fetched, End) else fetched.size_bytes
            queue.put((fetched, size_bytes), size_bytes)
            if isinstance(fetched, End):
                break
            del fetched  # not kept alive while the limit is waited for
    except StreamClosedError:
        pass
    except BaseException as raised:  # whatever it is, it belongs to the reader
        error = raised
    finally:
        fetcher.close()
        queue.finish(error)
