"""The `StreamingDataLoader`, which prefetches the batches of a `StreamingDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tq_service import data
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

_PREFETCHED_BATCHES = 2


class StreamingDataLoader(data.StreamingDataLoader[Any]):
    """A loader that iterates over a dataset once. Batches are prefetched by a thread or by worker processes.

    Args:
        dataset: the dataset to iterate over.
        num_workers: number of worker processes. If 0, a thread prefetches the batches.
        collate_fn: function called with each micro-batch and its meta. The loader yields the function's results.
        pin_memory: whether to copy tensors to page-locked memory.
        worker_init_fn: ignored, because workers only fetch data.
        multiprocessing_context: multiprocessing context used to start the workers.
        prefetch_factor: number of batches that each worker prefetches. Defaults to 2.
        persistent_workers: whether to keep worker processes alive between iterations.
        pin_memory_device: ignored.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            num_workers,
            _PREFETCHED_BATCHES if prefetch_factor is None else prefetch_factor,
            multiprocessing_context,
            persistent_workers=persistent_workers,
        )
        self._collate, self._pin_memory = collate_fn, pin_memory

    def __iter__(self) -> Iterator[Any]:
        """Yield each micro-batch with its meta."""
        for batch, meta in super().__iter__():
            pinned = (batch.pin_memory() if self._pin_memory else batch), meta
            yield pinned if self._collate is None else self._collate(pinned)
