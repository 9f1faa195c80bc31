"""How far ahead of the consumer batches are fetched."""

from __future__ import annotations


class AheadBound:
    """Decides whether a further batch may be begun, by number and by bytes.

    A batch is ahead from `begin` until `take`; its size is known from `arrive` on. Until then it counts as much as the
    largest batch that has arrived, and before one has arrived only one is under way. So what is ahead stays within
    `max_bytes` as long as no batch is larger than all before it; one that is exceeds it by what it is larger, and
    counts for those after it. With nothing ahead a batch is always admitted, however large: the consumer waits for it.

    Not safe for several threads; its owner guards it.

    Args:
        max_batches: most batches ahead.
        max_bytes: most bytes of the batches ahead.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._under_way = 0
        self._arrived = 0
        self._arrived_bytes = 0
        self._largest_bytes: int | None = None

    def admits(self) -> bool:
        """Whether another batch may be begun."""
        ahead = self._under_way + self._arrived
        if ahead == 0:
            return True
        if ahead >= self._max_batches or self._largest_bytes is None:
            return False
        return self._arrived_bytes + (self._under_way + 1) * self._largest_bytes <= self._max_bytes

    def begin(self) -> None:
        """Count a batch that is asked for from now on."""
        self._under_way += 1

    def arrive(self, size_bytes: int) -> None:
        """Count a batch that was begun as `size_bytes` large."""
        self._under_way -= 1
        self._arrived += 1
        self._arrived_bytes += size_bytes
        self._largest_bytes = max(self._largest_bytes or 0, size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count a batch that arrived as the consumer's."""
        self._arrived -= 1
        self._arrived_bytes -= size_bytes
