"""Where clients and loaders say how long things took: to the probes that `tq.instrument` adds, to none without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

T = TypeVar("T")


class Probe(Protocol):
    """Is notified of what clients and loaders of this process have done; any thread may call it."""

    def fetched(self, seconds: float) -> None:
        """Note a `get_data` that has returned."""
        ...

    def received(self, size_bytes: int) -> None:
        """Note the bytes that a storage service sent."""
        ...

    def put(self, seconds: float, size_bytes: int) -> None:
        """Note a `put` of columns that has returned."""
        ...

    def claimed(self, seconds: float, status: str) -> None:
        """Note a `get_meta` that has returned."""
        ...

    def loaded(self, wait_seconds: float, work_seconds: float) -> None:
        """Note a micro-batch: how long a loader was waited for, and how long the one before it was worked on."""
        ...


probes: Final[list[Probe]] = []
"""All that are notified."""


carriers: Final[list[Callable[[], Sequence[tuple[str, str]]]]] = []
"""What returns metadata that calls carry beside their token: the context of traces, where `tq.trace` was called."""


def timed(items: Iterable[T]) -> Iterator[T]:
    """Yield the micro-batches of a loader, and have it noted how long they were waited for and worked on."""
    if not probes:
        yield from items
        return
    iterator = iter(items)
    delivered_at = time.perf_counter()
    try:
        while True:
            asked_at = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            work_seconds, delivered_at = asked_at - delivered_at, time.perf_counter()
            for probe in probes:
                probe.loaded(delivered_at - asked_at, work_seconds)
            yield item
            del item  # not kept alive while the next one is waited for
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
