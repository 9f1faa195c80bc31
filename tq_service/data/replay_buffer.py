"""The batches kept for `reset()`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tq_service.data.source import BatchStream, End, FetchedBatch


class ReplayBuffer:
    """Keeps the first batches since the start, up to the first one that does not fit into its bytes.

    A replay goes through the batches from the first, so the first ones are worth keeping: a buffer of the latest ones
    would have dropped each batch just before it is asked for. Batches beyond the bound are fetched again, and are the
    same, since claims of ranks replay.

    Args:
        max_bytes: most bytes kept, as `FetchedBatch.size_bytes` counts them; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._batches: dict[int, FetchedBatch] = {}
        self._max_bytes = self._left_bytes = max_bytes

    def following(self, batch_index: int) -> list[FetchedBatch]:
        """Return the batches that are kept from `batch_index` on, up to the first one that is not."""
        indexes = itertools.takewhile(self._batches.__contains__, itertools.count(batch_index))
        return [self._batches[index] for index in indexes]

    def add(self, batch: FetchedBatch) -> None:
        """Keep the batch if it fits; once one does not, none after it is kept, which a replay would not reach."""
        if not self._left_bytes or batch.index in self._batches:
            return
        size_bytes = batch.size_bytes
        if size_bytes > self._left_bytes:
            self._left_bytes = 0
            return
        self._left_bytes -= size_bytes
        self._batches[batch.index] = replace(batch, micro_batches=None, on_consumed=None)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of each batch kept, in the order of their batch indexes."""
        return [(batch.data, batch.meta) for _, batch in sorted(self._batches.items())]

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()
        self._left_bytes = self._max_bytes


class ReplayStream:
    """Gives the batches of a replay buffer, and then those of the stream that continues after them."""

    def __init__(self, kept: Sequence[FetchedBatch], rest: BatchStream) -> None:
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

    def read(self) -> FetchedBatch | End | None:
        """Return the next batch, or the end; None once it is closed."""
        return self._kept.popleft() if self._kept else self._rest.read()

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._rest.close()
