"""A stream whose batches are cut into micro-batches ahead of the consumer, in a background thread."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from tq_service.data.ahead import AheadBound
from tq_service.data.ahead_queue import AheadQueue
from tq_service.data.batch import Batch, BatchStream, CutBatch
from tq_service.data.end import End

_MOST_AHEAD: Final = 2
_JOIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is handed over: a micro-batch, with its batch if it is the first, or the end.

    A batch that has no micro-batch comes without one.
    """

    items: tuple[Any, ...]
    begins: Batch | End | None = None


class CutAheadStream:
    """Takes over the batches of another stream, and cuts each into its micro-batches before they are asked for.

    Lifecycle::

        __init__ ── thread starts ──> reads a batch ──> cuts it, two micro-batches ahead ──┬──> the next batch
                                                                                          └──> end, error
        close() or garbage collection: the stream below is closed, the thread ends

    A batch is dropped with its last cut, before the next one is read. The thread refers to the queue and the stream
    below only, so that a stream nobody reads any more is collected and ends its thread.
    """

    def __init__(self, below: BatchStream, cut: CutBatch) -> None:
        self._below = below
        self._next_index = below.next_index
        # The first cut of the next batch, which was found behind the last one of the batch before.
        self._begun: _Cut | None = None
        self._queue = AheadQueue[_Cut](AheadBound(_MOST_AHEAD, sys.maxsize))
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

    def read(self) -> Batch | End | None:
        """Wait for the next batch, or the end, leaving out what is left of the one before; None once it is closed."""
        while self._begun is None:
            if (cut := self._get()) is None:
                return None
            self._begun = cut if cut.begins is not None else None
        begun, self._begun = self._begun, None
        if not isinstance(begun.begins, Batch):
            return begun.begins
        self._next_index = begun.begins.index + 1
        taken = partial(self._take, begun.begins.taken)
        return replace(begun.begins, items=self._items(begun.items), taken=taken)

    def _get(self) -> _Cut | None:
        cut = self._queue.get(stays_ahead=True)
        if cut is not None and not isinstance(cut.begins, Batch):
            self._queue.taken(0)
        return cut

    def _take(self, take_below: Callable[[], None] | None) -> None:
        # In this order: once there is room for a further cut, the thread that makes it competes with this one.
        if take_below is not None:
            take_below()
        self._queue.taken(0)

    def _items(self, first: tuple[Any, ...]) -> Iterator[Any]:
        yield from first
        del first
        while (cut := self._get()) is not None:
            if cut.begins is not None:
                self._begun = cut
                return
            yield from cut.items
            del cut

    def close(self) -> None:
        """Stop fetching and cutting. Idempotent."""
        _end(self._below, self._queue, self._thread)


def _end(below: BatchStream, queue: AheadQueue[_Cut], thread: threading.Thread) -> None:
    if queue.closed:
        return
    queue.close()
    below.close()
    # A cycle that holds the stream may be collected by the thread itself.
    if threading.current_thread() is not thread:
        thread.join(_JOIN_SECONDS)


def _cut_ahead(below: BatchStream, cut: CutBatch, queue: AheadQueue[_Cut]) -> None:
    error: BaseException | None = None
    try:
        # Room is waited for before anything is cut; what is left of one batch is for the first of the next.
        wanted = queue.begin()
        while wanted and (batch := below.read()) is not None:
            if isinstance(batch, End):
                queue.put(_Cut((), batch), 0)
                break
            items = cut(batch)
            queue.put(_Cut(_next_of(items), batch), 0)
            del batch  # the items refer to it until the last one is cut
            while (wanted := queue.begin()) and (item := _next_of(items)):
                queue.put(_Cut(item), 0)
                del item
    except BaseException as raised:  # whatever it is, it belongs to the reader
        error = raised
    finally:
        queue.finish(error)


def _next_of(items: Iterator[Any]) -> tuple[Any, ...]:
    """Return the next item in a tuple, which is empty after the last one."""
    return tuple(itertools.islice(items, 1))
