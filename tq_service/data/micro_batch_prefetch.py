"""A stream whose batches are split into micro-batches ahead of the consumer, in a background thread."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from tq_service.data.batch import BatchStream, End, FetchedBatch, SplitBatch
from tq_service.data.prefetch_queue import PrefetchLimit, PrefetchQueue, QueuedStream, end

_MOST_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """An item of the queue: a micro-batch, with its batch if it is the first, or the end.

    A batch that has no micro-batch comes without one.
    """

    micro_batches: tuple[Any, ...]
    begins: FetchedBatch | End | None = None


class MicroBatchPrefetcher(QueuedStream[_Prefetched]):
    """Reads the batches of another stream, and splits each into its micro-batches before they are asked for.

    Lifecycle::

        __init__ ── thread starts ──> reads a batch ──> splits it, two micro-batches ahead ──┬──> the next batch
                                                                                            └──> end, error
        close() or garbage collection: the inner stream is closed, the thread ends

    A batch is dropped with its last micro-batch, before the next one is read.
    """

    def __init__(self, inner: BatchStream, split: SplitBatch) -> None:
        queue = PrefetchQueue[_Prefetched](PrefetchLimit(_MOST_AHEAD, sys.maxsize))
        thread = threading.Thread(target=_split_ahead, args=(inner, split, queue), name="tq-split-ahead", daemon=True)
        super().__init__(inner.next_index, queue, inner, thread)
        # The first item of the next batch, which was found behind the last one of the batch before.
        self._begun: _Prefetched | None = None
        weakref.finalize(self, end, queue, inner, thread)
        thread.start()

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
            self._queue.on_consumed(0)
        return item

    def _on_consumed(self, on_inner_consumed: Callable[[], None] | None) -> None:
        # The inner stream first: the thread that splits competes with this one as soon as it may go on.
        if on_inner_consumed is not None:
            on_inner_consumed()
        self._queue.on_consumed(0)

    def _micro_batches(self, first: tuple[Any, ...]) -> Iterator[Any]:
        yield from first
        del first
        while (item := self._get()) is not None:
            if item.begins is not None:
                self._begun = item
                return
            yield from item.micro_batches
            del item


def _split_ahead(inner: BatchStream, split: SplitBatch, queue: PrefetchQueue[_Prefetched]) -> None:
    error: BaseException | None = None
    try:
        # Each item is counted before it is made. The one that found no further micro-batch in its batch is used for the
        # first of the next batch.
        wanted = queue.begin()
        while wanted and (batch := inner.read()) is not None:
            if isinstance(batch, End):
                queue.put(_Prefetched((), batch), 0)
                break
            micro_batches = split(batch)
            queue.put(_Prefetched(_next_of(micro_batches), batch), 0)
            del batch  # the iterator refers to it until the last micro-batch is made
            while (wanted := queue.begin()) and (micro_batch := _next_of(micro_batches)):
                queue.put(_Prefetched(micro_batch), 0)
                del micro_batch
    except BaseException as raised:  # whatever it is, it belongs to the reader
        error = raised
    finally:
        queue.finish(error)


def _next_of(micro_batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return the next one in a tuple, which is empty after the last one."""
    return tuple(itertools.islice(micro_batches, 1))
