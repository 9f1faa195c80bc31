"""The batches kept for `reset()`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tq_service.data.batch import Batch, BatchStream


class ReplayBuffer:
    """Keeps the first batches since the start, as many as its bound allows.

    A replay goes through the batches from the first, so the first ones are worth keeping: a buffer of the latest ones
    would have dropped each batch just before it is asked for. Batches beyond the bound are fetched again, and are the
    same, since claims of ranks replay.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._batches: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def following(self, batch_index: int) -> list[Batch]:
        """Return the batches that are kept from `batch_index` on, up to the first one that is not."""
        indexes = itertools.takewhile(self._batches.__contains__, itertools.count(batch_index))
        return [self._batches[index] for index in indexes]

    def add(self, batch: Batch) -> None:
        """Keep the batch if there is room."""
        if len(self._batches) < self._max_batches:
            self._batches[batch.index] = replace(batch, items=None, taken=None)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of each batch kept, in the order of their batch indexes."""
        return [(batch.data, batch.meta) for _, batch in sorted(self._batches.items())]

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()


class ReplayStream:
    """Gives batches that are kept, and then those of the stream that goes on after them."""

    def __init__(self, kept: Sequence[Batch], rest: BatchStream) -> None:
        self._kept = deque(kept)
        self._rest = rest

    @property
    def next_index(self) -> int:
        """The batch_index that `read` gives next."""
        return self._kept[0].index if self._kept else self._rest.next_index

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._rest.closed

    def read(self) -> Batch | None:
        """Return the next batch; None at the end."""
        return self._kept.popleft() if self._kept else self._rest.read()

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._rest.close()
