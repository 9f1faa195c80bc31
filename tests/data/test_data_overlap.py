"""What is under way while a batch is in use, for the thread and for worker processes alike."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tq_service.client.batch_meta import BatchMeta
from tq_service.data import StreamingDataLoader, StreamingDataset

ROW_BYTES = 1_000
FORK = multiprocessing.get_context("fork")


class NoClient:
    def close(self) -> None:
        pass


class Batches:
    """Fetches batches of given sizes, in whatever process, and tells the test what it fetches and when."""

    def __init__(self, row_counts: list[int], limit_bytes: int = 1 << 30) -> None:
        self._row_counts = row_counts
        self._limit_bytes = limit_bytes
        self._asked_for = FORK.Value("q", 0)
        self._seen = FORK.SimpleQueue()

    def __call__(self, *, batch_index: int, **others: Any) -> Any:
        if batch_index >= len(self._row_counts):
            return None, BatchMeta(status="end")
        self._seen.put(batch_index)
        ahead = self._row_counts[self._asked_for.value : batch_index + 1]
        if len(ahead) > 1 and sum(ahead) * ROW_BYTES > self._limit_bytes:
            raise AssertionError(f"batch {batch_index} is fetched while {ahead} rows are ahead")
        row_count = self._row_counts[batch_index]
        return (
            TensorDict({"x": torch.zeros(row_count, ROW_BYTES, dtype=torch.uint8)}, batch_size=[row_count]),
            BatchMeta(indexes=np.arange(row_count)),
        )

    def next_seen(self) -> int:
        """Wait until a further batch is being fetched."""
        return int(self._seen.get())

    def settle(self) -> None:
        """Give a loader that would fetch too much the time to do so."""
        time.sleep(0.1)

    def sees_nothing(self) -> bool:
        self.settle()
        return bool(self._seen.empty())

    def take(self, iterator: Any) -> int:
        with self._asked_for.get_lock():
            self._asked_for.value += 1
        micro_batch, _ = next(iterator)
        return int(micro_batch.batch_size[0])


def loader_of(
    fetch: Callable[..., Any], num_workers: int, *, replay_buffer_bytes: int = 0, **options: Any
) -> StreamingDataLoader:
    dataset = StreamingDataset(
        batch_size=1, data_fields=["x"], partition_id="p", task_name="t", fetch_batch_fn=fetch,
        client_factory=lambda address: NoClient(), replay_buffer_bytes=replay_buffer_bytes,
    )  # fmt: skip
    return StreamingDataLoader(dataset, num_workers, multiprocessing_context="fork", **options)


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(0, 1), (0, 3), (1, 1), (1, 3), (2, 1), (2, 2)])
def test_the_next_batches_are_fetched_before_they_are_asked_for(num_workers: int, prefetch_factor: int) -> None:
    batches = Batches([2] * 20)
    ahead_count = prefetch_factor * max(num_workers, 1)
    with loader_of(batches, num_workers, prefetch_factor=prefetch_factor) as loader:
        iterator = iter(loader)
        batches.take(iterator)
        for in_use in range(4):
            seen = {batches.next_seen() for _ in range(1 + ahead_count if in_use == 0 else 1)}
            assert seen == (set(range(1 + ahead_count)) if in_use == 0 else {in_use + ahead_count})
            assert batches.sees_nothing()
            batches.take(iterator)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_batch_that_is_larger_than_the_bound_is_fetched_alone(num_workers: int) -> None:
    batches = Batches([3] * 4, limit_bytes=1)
    with loader_of(batches, num_workers, prefetch_factor=4, prefetch_bytes=1) as loader:
        iterator = iter(loader)
        assert batches.take(iterator) == 3
        assert batches.next_seen() == 0
        for following in (1, 2, 3):
            assert batches.next_seen() == following
            assert batches.sees_nothing()
            assert batches.take(iterator) == 3
        assert next(iterator, None) is None


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("limit_rows", [1, 9, 10, 25, 1_000])
def test_what_is_ahead_stays_within_the_bytes(num_workers: int, limit_rows: int) -> None:
    row_counts = [9, *np.random.default_rng(0).integers(1, 10, 30).tolist()]
    # What a worker pickles of each batch counts as well.
    limit_bytes = limit_rows * ROW_BYTES + 6 * 500
    batches = Batches(row_counts, limit_bytes)
    with loader_of(batches, num_workers, prefetch_factor=6, prefetch_bytes=limit_bytes) as loader:
        iterator = iter(loader)
        assert [batches.take(iterator) for _ in row_counts] == row_counts
        assert next(iterator, None) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_replay_is_no_reason_to_fetch_more(num_workers: int) -> None:
    batches = Batches([1] * 6)
    with loader_of(batches, num_workers, prefetch_factor=1, replay_buffer_bytes=1 << 20) as loader:
        first = [meta.size for _, meta in loader]
        assert sorted(batches.next_seen() for _ in first) == list(range(6))
        loader.reset()
        assert [meta.size for _, meta in loader] == first
        assert batches.sees_nothing()
