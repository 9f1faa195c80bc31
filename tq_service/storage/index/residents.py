"""Which puts are in memory, and which of them leave it first, where the mirror of an engine keeps what it can spare.

complete -> in memory -> spilled (its bytes are in the mirror alone) -> fetched when it is read -> in memory
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from tq_service.storage.blobs.base import Blob

_KEPT_SECONDS: Final = 10.0  # after a read: it may be one of several parts, of which all are to be here at once
_LOOKED_AT: Final = 256
_SPARE_SHARE: Final = 16  # of the memory, which spilling leaves free, so that it is not for each put that comes


class Memory:
    """Bytes of memory that engines with one quota may use, and what of the quota is not in memory.

    Args:
        limit: bytes.

    Attributes:
        spilled_bytes: bytes that count for the quota and are in a mirror alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spilled_bytes = 0

    def has_free(self, used_bytes: int) -> bool:
        """Whether there is memory left, where so many bytes count for the quota."""
        return used_bytes - self.spilled_bytes < self.limit

    def to_spill(self, used_bytes: int) -> int:
        """Return how many bytes are to leave memory, of those that count for the quota."""
        excess = used_bytes - self.spilled_bytes - self.limit
        return excess + self.limit // _SPARE_SHARE if excess > 0 else 0


class Residents:
    """The puts of one engine that are in memory, those used longest ago first, and the spilled ones.

    Args:
        memory: that they share with other engines.
        clock: seconds.

    Attributes:
        spilled_bytes: bytes of the spilled puts.
    """

    def __init__(self, memory: Memory, clock: Callable[[], float]) -> None:
        self.memory = memory
        self._clock = clock
        self._kept_until: dict[bytes, float] = {}  # in the order of their last use
        self._spilled: dict[bytes, Blob] = {}  # what stands for their bytes, and has their charge
        self.spilled_bytes = 0

    def spilled(self) -> tuple[int, int]:
        """Return how many puts are spilled, and their bytes."""
        return len(self._spilled), self.spilled_bytes

    def add(self, put_id: bytes) -> None:
        """Take note of a put that has come, and may leave at once."""
        self._kept_until[put_id] = 0.0

    def fetched(self, put_id: bytes) -> None:
        """Take note that a put is in memory again, with its charge, and release what stood for it."""
        if (blob := self.remove(put_id)) is not None:
            blob.release()
        self._kept_until[put_id] = self._clock() + _KEPT_SECONDS

    def use(self, put_id: bytes) -> None:
        """Take note that a put is read now or soon; one that is not in memory is fetched for it."""
        if self._kept_until.pop(put_id, None) is not None:
            self._kept_until[put_id] = self._clock() + _KEPT_SECONDS

    def remove(self, put_id: bytes) -> Blob | None:
        """Forget a put; return what stood for it where it was spilled, to be released."""
        self._kept_until.pop(put_id, None)
        blob = self._spilled.pop(put_id, None)
        if blob is not None:
            self.spilled_bytes -= blob.charge
            self.memory.spilled_bytes -= blob.charge
        return blob

    def spill(self, put_id: bytes, blob: Blob) -> None:
        """Take note that a put is spilled, and what stands for it."""
        self._kept_until.pop(put_id, None)
        self._spilled[put_id] = blob
        self.spilled_bytes += blob.charge
        self.memory.spilled_bytes += blob.charge

    def coldest(self) -> list[bytes]:
        """Return some puts that may leave, in order. Those that cannot, `put_off`."""
        now = self._clock()
        return [put_id for put_id, until in islice(self._kept_until.items(), _LOOKED_AT) if until <= now]

    def put_off(self, put_id: bytes) -> None:
        """Look at a put again after all others: it cannot leave now."""
        self._kept_until[put_id] = self._kept_until.pop(put_id)
