"""What gets of a client are likely to be sent: whether one message will do, or a stream is needed."""

from __future__ import annotations

from typing import Final

from tq_service.v1.storage_service_pb2 import GetRequest
from tq_service.wire.frames import INLINE_BYTES

_MOST_REMEMBERED: Final = 1024


class SentSizes:
    """Remembers for each set of fields how many bytes a row took in the last answer.

    Batches of one task are of like size. A guess that is wrong costs a round trip, or the price of a stream for little.
    """

    def __init__(self) -> None:
        self._row_bytes: dict[tuple[str, ...], float] = {}

    def is_small(self, request: GetRequest, row_count: int) -> bool:
        """Return whether the answer to a get is likely to fit into one message; the first of its kind is tried."""
        return self._row_bytes.get(_fields(request), 0.0) * row_count <= INLINE_BYTES

    def note(self, request: GetRequest, row_count: int, size_bytes: int) -> None:
        """Take note of what was sent, or would be."""
        if len(self._row_bytes) >= _MOST_REMEMBERED:
            self._row_bytes.clear()
        self._row_bytes[_fields(request)] = size_bytes / max(row_count, 1)


def _fields(request: GetRequest) -> tuple[str, ...]:
    return tuple(name for run in request.runs for name in run.field_names)
