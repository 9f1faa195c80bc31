"""The batches kept for `reset()`."""

from __future__ import annotations

from typing import Any

from tq_service.data.batch import Batch


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

    def get(self, batch_index: int) -> Batch | None:
        """Return the batch if it is kept."""
        return self._batches.get(batch_index)

    def add(self, batch: Batch) -> None:
        """Keep the batch if there is room."""
        if len(self._batches) < self._max_batches:
            self._batches[batch.index] = batch.owned()

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return `(data, meta)` of each batch kept, in the order of their batch indexes."""
        return [(batch.data, batch.meta) for _, batch in sorted(self._batches.items())]

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()
