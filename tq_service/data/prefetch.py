"""A stream that fetches ahead in a background thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import replace
from functools import partial

from tq_service.data.ahead import AheadBound
from tq_service.data.ahead_queue import AheadQueue
from tq_service.data.batch import Batch, Life
from tq_service.data.end import End
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError

_Sized = tuple[Batch | End, int]

# How long `close` waits for the thread. A thread that is still in a call by then ends with it.
_JOIN_SECONDS = 5.0


class PrefetchStream:
    """Fetches batches ahead, bounded by number and bytes.

    Lifecycle::

        __init__ ── thread starts ──> fetches while there is room ──┬─ end ────> read() returns it
                                             ^                      ├─ error ──> read() raises it
                                        read() makes room           └─ close() or garbage collection: the thread ends

    The thread refers to the queue only, never to the stream, so that a stream nobody reads any more is collected and
    ends its thread.
    """

    def __init__(self, source: BatchSource, batch_index: int, life: Life | None, bound: AheadBound) -> None:
        self._next_index = batch_index
        self._queue = AheadQueue[_Sized](bound)
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

    def read(self) -> Batch | End | None:
        """Wait for the next batch, or the end; None once it is closed. An error of the thread is raised as it is."""
        arrived = self._queue.get(stays_ahead=True)
        if arrived is None:
            return None
        fetched, size_bytes = arrived
        if isinstance(fetched, End):
            return fetched
        self._next_index += 1
        return replace(fetched, taken=partial(self._queue.taken, size_bytes))

    def close(self) -> None:
        """End the thread and drop what it fetched. Idempotent."""
        if self._queue.closed:
            return
        self._queue.close()
        self._fetcher.close()
        # A cycle that holds the stream may be collected by the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)


def _prefetch(queue: AheadQueue[_Sized], fetcher: BatchFetcher, batch_index: int) -> None:
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
            del fetched  # not kept alive while waiting for room
    except StreamClosedError:
        pass
    except BaseException as raised:  # whatever it is, it belongs to the reader
        error = raised
    finally:
        fetcher.close()
        queue.finish(error)
