"""StreamingDataLoader: fetches batches ahead of the trainer, in a thread or in worker processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any

from tq_service.data.dataset import StreamingDataset
from tq_service.data.prefetch import Fetcher, MicroBatchPrefetcher, PrefetchLimit, PrefetchStream
from tq_service.data.source import BatchFetcher, BatchSource, BatchStream, InlineStream, StreamIdentity
from tq_service.data.workers import WorkerPool, worker_context
from tq_service.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


class StreamingDataLoader:
    """Iterates a `StreamingDataset` and fetches its batches ahead.

    ::

        num_workers=0   thread ── batches, in order ──────────────┐
                                                                  ├──> thread that splits them ─> for ... in loader
        num_workers=2   worker 0 ── batches 0, 2, 3, ... ──┐      │
                        worker 1 ── batches 1, 4, 5, ... ──┴──────┘   (in order, none twice, none lost)

    An iterator that ends, breaks or raises stops the fetching and drops what was fetched ahead. That is still there
    for the next iterator, which asks for the same batches again. Worker processes stay for it, until `close()` or
    until the loader is garbage.

    The length is not known beforehand: `len()` raises TypeError.

    Args:
        dataset: what is iterated.
        num_workers: worker processes that share the batches of the rank; 0: a thread of this process.
        prefetch_factor: batches fetched ahead, by each worker or by the thread. 0 with `num_workers=0` fetches in the
            consumer's thread: for a fetch_batch_fn that takes part in collectives.
        multiprocessing_context: how workers are started: "fork", "spawn", "forkserver" or a context; None: forkserver,
            or fork where fetch_batch_fn cannot be pickled. Workers use a sync client of their own. Fork works with live
            clients in this process, as long as no other thread is inside a call when the workers start.
        prefetch_bytes: most bytes fetched ahead or under way, by the thread or by all workers together, where a batch
            whose size is not known yet counts as much as the largest so far. When nothing is ahead, the next batch is
            fetched whatever its size.
        persistent_workers: keep the worker processes between iterators.

    Raises:
        InvalidArgumentError: an argument cannot be right.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        multiprocessing_context: str | BaseContext | None = None,
        *,
        prefetch_bytes: int = 1 << 30,
        persistent_workers: bool = True,
    ) -> None:
        least_ahead = 1 if num_workers else 0
        for name, count, least, when in (
            ("num_workers", num_workers, 0, ""),
            ("prefetch_factor", prefetch_factor, least_ahead, ", or 0 without workers" if num_workers else ""),
            ("prefetch_bytes", prefetch_bytes, 1, ""),
        ):
            if count < least:
                raise InvalidArgumentError(f"{name}: got {count}; expected at least {least}{when}", field=name)
        self.dataset = dataset
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self._context = worker_context(multiprocessing_context, dataset.source) if num_workers else None
        self._prefetch_bytes = prefetch_bytes
        self._persistent_workers = persistent_workers
        self._stream: BatchStream | None = None
        # The stream that fetches, and how often the dataset had been moved when it was opened.
        self._fetching: tuple[InlineStream | PrefetchStream, int] | None = None
        self._pool: WorkerPool | None = None

    @property
    def batch_index(self) -> int:
        """The batch after the last one delivered."""
        return self.dataset.batch_index

    def __iter__(self) -> Iterator[Any]:
        """Yield micro-batches, from the batch after the last one delivered.

        Raises:
            RuntimeError: a worker process died. The next iterator starts new ones and goes on.
            Exception: whatever fetching raised, with its type; the next iterator asks for the same batch again.
        """
        try:
            yield from self.dataset.iterate(self._open_stream)
        except Exception:
            self._end_workers()
            raise
        finally:
            if not self._persistent_workers:
                self._end_workers()

    def _open_stream(self, dataset: StreamingDataset) -> BatchStream:
        """Return the one stream of this loader; the stream of another iterator is closed by it."""
        if self._stream is not None:
            self._stream.close()
        self._stream = dataset.open_stream(self._open_rest)
        if self.prefetch_factor and dataset.may_split_ahead:
            self._stream = MicroBatchPrefetcher(self._stream, dataset.split)
        return self._stream

    def _open_rest(self, source: BatchSource, batch_index: int, identity: StreamIdentity | None) -> BatchStream:
        stream: InlineStream | PrefetchStream
        if self.prefetch_factor:
            fetchers: Sequence[Fetcher] = [BatchFetcher(source, identity)]
            if self._context is not None:
                self._pool = self._pool or WorkerPool(source, self.num_workers, self._context)
                fetchers = self._pool.fetchers(source, identity)
            limit = PrefetchLimit(self.prefetch_factor * len(fetchers), self._prefetch_bytes)
            stream = PrefetchStream(fetchers, batch_index, limit)
        else:
            stream = InlineStream(source, batch_index, identity)
        self._fetching = stream, self.dataset.move_count
        return stream

    def _end_workers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            if self._stream is not None:
                self._stream.close()
            pool.close()

    def reset(self) -> None:
        """Start from the first batch again: the same batches, out of the replay buffer or fetched again."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Go to the first batch of another partition, with fresh state."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of the whole batches that the dataset's `replay_buffer_bytes` keeps, in order."""
        return self.dataset.get_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last micro-batch delivered; see `StreamingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue behind the last micro-batch delivered when the state was saved, with or without workers."""
        self.dataset.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop fetching and end the thread or the workers. Idempotent; iterating starts them again.

        Batches that were fetched ahead and not handed out are logged as a warning: the service counts them as consumed.
        """
        fetching, self._fetching = self._fetching, None
        if fetching is not None and fetching[1] == self.dataset.move_count:
            self._warn_of_fetched_ahead(fetching[0].fetched_until - self.batch_index)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._end_workers()

    def _warn_of_fetched_ahead(self, count: int) -> None:
        if count > 0:
            _log.warning(
                "the loader of task %r of partition %r was closed with %s batches fetched ahead that it has not handed "
                "out, from batch %s on. They count as consumed: a loader that continues from its state gets them, one "
                "that starts after reset_consumption(keep_consumed=True) does not",
                self.dataset.source.request.task_name, self.dataset.partition_id, count, self.batch_index,
            )  # fmt: skip

    def __enter__(self) -> StreamingDataLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
