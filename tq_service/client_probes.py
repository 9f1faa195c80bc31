"""Where clients and loaders say how long things took: to the probes that `tq.instrument` adds, to none without it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

T = TypeVar("T")

Note = tuple[str, tuple[Any, ...]]
"""A method of `Probe`, and what it was called with."""


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


class ProbeNotes:
    """Keeps what happens in a worker process until its parent is notified, whose probes are those that count.

    A probe that a fork has left here counts where nothing reads it, or, with prometheus-client's files for several
    processes, what the parent counts as well; so this one takes the place of all.
    """

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()  # threads of the client append

    def replace_probes(self) -> None:
        """Be the only probe of this process."""
        probes[:] = [cast("Probe", self)]

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method of `Probe`, which keeps what it is called with."""
        return lambda *values: self._notes.append((name, values))

    def take(self) -> tuple[Note, ...]:
        """Return what has been kept since the last call."""
        return tuple(self._notes.popleft() for _ in range(len(self._notes)))


def notify_probes(notes: Iterable[Note]) -> None:
    """Tell the probes of this process what happened in another one."""
    for name, values in notes:
        for probe in probes:
            getattr(probe, name)(*values)


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
