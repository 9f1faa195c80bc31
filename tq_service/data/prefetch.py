"""A stream that fetches ahead in a background thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import replace
from functools import partial

from tq_service.data.batch import End, FetchedBatch, StreamIdentity
from tq_service.data.prefetch_queue import PrefetchLimit, PrefetchQueue, QueuedStream
from tq_service.data.source import BatchFetcher, BatchSource, StreamClosedError

_Sized = tuple[FetchedBatch | End, int]


class PrefetchStream(QueuedStream[_Sized]):
    """Fetches batches ahead, bounded by number and bytes.

    Lifecycle::

        __init__ ── thread starts ──> fetches while the limit admits ──┬─ end ────> read() returns it
                                             ^                         ├─ error ──> read() raises it
                                   on_consumed of a batch              └─ close() or garbage collection: thread ends
    """

    def __init__(
        self, source: BatchSource, batch_index: int, identity: StreamIdentity | None, limit: PrefetchLimit
    ) -> None:
        queue, fetcher = PrefetchQueue[_Sized](limit), BatchFetcher(source, identity)
        thread = threading.Thread(target=_prefetch, args=(queue, fetcher, batch_index), name="tq-prefetch", daemon=True)
        super().__init__(batch_index, queue, fetcher, thread)
        self._fetcher = fetcher
        weakref.finalize(self, queue.close)
        thread.start()

    @property
    def fetched_until(self) -> int:
        """The batch_index behind the last batch that was fetched."""
        return self._fetcher.fetched_until

    def read(self) -> FetchedBatch | End | None:
        """Wait for the next batch, or the end; None once it is closed. An error of the thread is raised as it is."""
        item = self._queue.get()
        if item is None:
            return None
        fetched, size_bytes = item
        if isinstance(fetched, End):
            return fetched
        self.next_index += 1
        return replace(fetched, on_consumed=partial(self._queue.on_consumed, size_bytes))


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
