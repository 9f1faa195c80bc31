"""Timings of clients and loaders, reported to the probes that `tq.instrument` registers.

The stages of a batch are collected separately, for the `StepTimer` of the loop that consumes the batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

T = TypeVar("T")

Note = tuple[str, tuple[Any, ...]]
"""The name of a `Probe` method, and its arguments."""


class Probe(Protocol):
    """Receives events of clients and loaders of this process, from any thread."""

    def fetched(self, seconds: float) -> None:
        """Record a finished `get_data`."""
        ...

    def received(self, size_bytes: int) -> None:
        """Record bytes received from storage services."""
        ...

    def put(self, seconds: float, size_bytes: int) -> None:
        """Record a finished `put` of columns."""
        ...

    def claimed(self, seconds: float, status: str) -> None:
        """Record a finished `get_meta`."""
        ...

    def loaded(self, wait_seconds: float, work_seconds: float) -> None:
        """Record a micro-batch: the wait for the loader, and the work on the previous micro-batch."""
        ...

    def stepped(self, seconds: tuple[tuple[str, float], ...]) -> None:
        """Record a part of a trainer's step: seconds by stage, without stages of 0."""
        ...


probes: Final[list[Probe]] = []
"""All registered probes."""


class ProbeNotes:
    """Buffers the events of a worker process until they are reported to the probes of its parent.

    A probe inherited through a fork would update counters that nothing reads or, with prometheus-client's multiprocess
    files, count events twice. Therefore `ProbeNotes` replaces all other probes of the worker.
    """

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()  # threads of the client append

    def replace_probes(self) -> None:
        """Become the only probe of this process."""
        probes[:] = [cast("Probe", self)]

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method of `Probe` that stores its arguments."""
        return lambda *values: self._notes.append((name, values))

    def take(self) -> tuple[Note, ...]:
        """Return the events since the last call."""
        return tuple(self._notes.popleft() for _ in range(len(self._notes)))


def notify_probes(notes: Iterable[Note]) -> None:
    """Report events of another process to the probes of this one."""
    for name, values in notes:
        for probe in probes:
            getattr(probe, name)(*values)


carriers: Final[list[Callable[[], Sequence[tuple[str, str]]]]] = []
"""Functions that return call metadata to send with the token: the trace context, if `tq.trace` was called."""


class Stage(StrEnum):
    """Stages of a trainer's step, in the order a batch passes through them; see `StepTimes`."""

    WORK = "work"
    LOADER = "loader"
    ROLLOUTS = "rollouts"
    PLAN = "plan"
    TRANSFER = "transfer"
    HOST = "host"
    DEVICE = "device"
    PUT = "put"


class Span(NamedTuple):
    """Time that a batch spent in a stage.

    Attributes:
        stage: the stage.
        began_at: start, in seconds of `time.perf_counter`, which all processes of a host share.
        ended_at: end, on the same clock.
        size_bytes: bytes moved.
        is_call: whether the span is one call, or part of one, and counts towards the cost per call.
    """

    stage: Stage
    began_at: float
    ended_at: float
    size_bytes: int = 0
    is_call: bool = False


_MOST_SPANS: Final = 4096  # bounds memory if a trainer calls clients but never reads from its loader again


@dataclass(slots=True, eq=False)
class Collected:
    """Spans collected in a section of a program.

    Attributes:
        spans: the spans, in no particular order.
        batch_count: number of batches begun.
    """

    spans: list[Span] = field(default_factory=list)
    batch_count: int = 0

    def add(self, spans: Iterable[Span], batch_count: int = 0) -> None:
        """Add spans, such as those of a batch that were collected elsewhere."""
        self.batch_count += batch_count
        if len(self.spans) < _MOST_SPANS:
            self.spans.extend(spans)

    def note(
        self,
        stage: Stage,
        began_at: float,
        ended_at: float | None = None,
        size_bytes: int = 0,
        *,
        is_call: bool = False,
    ) -> None:
        """Add a span, which ends now unless `ended_at` is given."""
        ended_at = time.perf_counter() if ended_at is None else ended_at
        self.add((Span(stage, began_at, ended_at, size_bytes, is_call),))


collected_here: Final[ContextVar[Collected | None]] = ContextVar("collected_here", default=None)
"""Collects the calls of this thread or task; None if they are not collected."""

step_report: Final[ContextVar[Callable[[], Any] | None]] = ContextVar("step_report", default=None)
"""Returns the `StepTimes` that a rank sends with a claim; it may return None."""


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect the calls made within a block, separately from any enclosing collection."""
    collected = Collected()
    token = collected_here.set(collected)
    try:
        yield collected
    finally:
        collected_here.reset(token)


class TimesSteps(Protocol):
    """Protocol of `StepTimer`, which times the steps of a trainer."""

    clock: Callable[[], float]

    def add(self, began_at: float, asked_at: float, ended_at: float, *, calls: Collected, waits: Collected) -> None:
        """Add a step or a part of one."""
        ...


def timed(items: Iterable[T], timer: TimesSteps | None = None) -> Iterator[T]:
    """Yield the micro-batches of a loader, and record the time spent waiting for and working on each.

    Client calls of the consumer between micro-batches are collected too: the generator runs in the consumer's context,
    so its collection stays active while the consumer works.
    """
    if not probes and timer is None:
        yield from items
        return
    clock = time.perf_counter if timer is None else timer.clock
    outer = collected_here.get()
    iterator = iter(items)
    delivered_at, calls = clock(), Collected()
    waits = calls
    try:
        while True:
            began_at, asked_at, waits = delivered_at, clock(), Collected()
            collected_here.set(waits)
            is_over = False
            try:
                item = next(iterator)
            except StopIteration:
                is_over = True
            delivered_at = clock()
            if timer is not None:
                timer.add(began_at, asked_at, delivered_at, calls=calls, waits=waits)
            if is_over:
                return
            for probe in probes:
                probe.loaded(delivered_at - asked_at, asked_at - began_at)
            calls = Collected()
            collected_here.set(calls)
            yield item
            del item  # not kept alive during the wait for the next one
    finally:
        if collected_here.get() in (calls, waits):  # a garbage-collected generator may end in any thread
            collected_here.set(outer)
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
