"""A stream whose batches are cut into micro-batches ahead of the consumer, in a background thread."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tq_service.data.ahead import AheadBound
from tq_service.data.batch import Batch, BatchStream, CutBatch
from tq_service.data.handover import Handover

# The end of a batch, the next batch, and two of its micro-batches.
_MOST_AHEAD: Final = 4
_JOIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Item:
    value: Any


class _EndOfBatch:
    pass


_Entry = Batch | _Item | _EndOfBatch


class CutAheadStream:
    """Takes over the batches of another stream, and cuts each into its micro-batches before they are asked for.

    Lifecycle::

        __init__ ── thread starts ──> reads a batch ──> cuts it, two or three micro-batches ahead ──┬──> the next batch
                                                                                                   └──> end, error
        close() or garbage collection: the stream below is closed, the thread ends

    A batch is dropped with its last cut, before the next one is read. The thread refers to the queue and the stream
    below only, so that a stream nobody reads any more is collected and ends its thread.
    """

    def __init__(self, below: BatchStream, cut: CutBatch) -> None:
        self._below = below
        self._next_index = below.next_index
        self._queue = Handover[_Entry](AheadBound(_MOST_AHEAD, sys.maxsize))
        self._thread = threading.Thread(
            target=_cut_ahead, args=(below, cut, self._queue), name="tq-cut-ahead", daemon=True
        )
        weakref.finalize(self, _end, below, self._queue, self._thread)
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
        """Wait for the next batch, leaving out what is left of the one before; None at the end."""
        while (entry := self._get()) is not None:
            if isinstance(entry, Batch):
                self._next_index = entry.index + 1
                return replace(entry, items=self._items())
        return None

    def _items(self) -> Iterator[Any]:
        while isinstance(entry := self._get(), _Item):
            yield entry.value

    def _get(self) -> _Entry | None:
        entry = self._queue.get()
        self._queue.taken(0)
        return entry

    def close(self) -> None:
        """Stop fetching and cutting. Idempotent."""
        _end(self._below, self._queue, self._thread)


def _end(below: BatchStream, queue: Handover[_Entry], thread: threading.Thread) -> None:
    if queue.closed:
        return
    queue.close()
    below.close()
    # A cycle that holds the stream may be collected by the thread itself.
    if threading.current_thread() is not thread:
        thread.join(_JOIN_SECONDS)


def _cut_ahead(below: BatchStream, cut: CutBatch, queue: Handover[_Entry]) -> None:
    error: BaseException | None = None
    try:
        while _cut_next(below, cut, queue):
            pass
    except BaseException as raised:  # whatever it is, it belongs to the reader
        error = raised
    finally:
        queue.finish(error)


def _cut_next(below: BatchStream, cut: CutBatch, queue: Handover[_Entry]) -> bool:
    """Cut one batch; false if there is none, or nobody wants it."""
    if not queue.begin() or (batch := below.read()) is None:
        return False
    queue.put(batch, 0)
    items = cut(batch)
    del batch  # the items refer to it until the last one is cut
    while queue.begin():
        try:
            item = _Item(next(items))
        except StopIteration:
            queue.put(_EndOfBatch(), 0)
            return True
        queue.put(item, 0)
        del item
    return False
