"""Client and loader timings, reported to the probes registered by `tq.instrument`.

For the consuming loop's `StepTimer`, the time that a batch spends in each stage is collected separately.
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
"""The name of a `Probe` method and the arguments for calling it."""


class Probe(Protocol):
    """Receiver of events from this process's clients and loaders, which may call the methods from any thread."""

    def fetched(self, seconds: float) -> None:
        """Record a completed call to `get_data`."""
        ...

    def received(self, size_bytes: int) -> None:
        """Record the number of bytes received from storage services."""
        ...

    def put(self, seconds: float, size_bytes: int) -> None:
        """Record a completed call to `put` with column data."""
        ...

    def claimed(self, seconds: float, status: str) -> None:
        """Record a completed call to `claim`."""
        ...

    def loaded(self, wait_seconds: float, work_seconds: float) -> None:
        """Record the time spent waiting for a micro-batch and the time spent working on the previous one."""
        ...

    def stepped(self, seconds: tuple[tuple[str, float], ...]) -> None:
        """Record all or part of a trainer's step as (stage, seconds) pairs. Stages that took no time are omitted."""
        ...


probes: Final[list[Probe]] = []
"""All probes registered in this process."""


class ProbeNotes:
    """A probe that buffers the events of a worker process until they are reported to the probes of the parent process.

    After a fork, a worker inherits its parent's probes, which would update counters that nothing reads. If
    prometheus-client ran in multiprocess mode, the inherited probes would even count each event twice. In a worker,
    `ProbeNotes` therefore replaces all other probes.
    """

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()  # client threads append to it

    def replace_probes(self) -> None:
        """Replace all probes of this process with this object."""
        probes[:] = [cast("Probe", self)]

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that buffers the name of a `Probe` method and the arguments of the call."""
        return lambda *values: self._notes.append((name, values))

    def take(self) -> tuple[Note, ...]:
        """Remove the buffered events and return them."""
        return tuple(self._notes.popleft() for _ in range(len(self._notes)))


def notify_probes(notes: Iterable[Note]) -> None:
    """Forward events from another process to this process's probes."""
    for name, values in notes:
        for probe in probes:
            getattr(probe, name)(*values)


carriers: Final[list[Callable[[], Sequence[tuple[str, str]]]]] = []
"""Functions that return metadata to send with each call, such as the trace context once `tq.trace` was called."""


class Stage(StrEnum):
    """Stages of a trainer's step, in the order in which a batch passes through them. See `StepTimes`."""

    WORK = "work"
    LOADER = "loader"
    ROLLOUTS = "rollouts"
    PLAN = "plan"
    TRANSFER = "transfer"
    HOST = "host"
    DEVICE = "device"
    PUT = "put"


class Span(NamedTuple):
    """A period that a batch spent in a stage.

    Attributes:
        stage: stage the batch was in during the span.
        began_at: start time in seconds, on the `time.perf_counter` clock, which all processes on a host share.
        ended_at: end time in seconds on the same clock.
        size_bytes: number of bytes transferred or processed during the span.
        is_call: whether the span covers all or part of a call, and therefore counts toward the cost per call.
    """

    stage: Stage
    began_at: float
    ended_at: float
    size_bytes: int = 0
    is_call: bool = False


_MOST_SPANS: Final = 4096  # limits memory use if a trainer makes calls but no longer reads from its loader


@dataclass(slots=True, eq=False)
class Collected:
    """Spans collected while a section of the program ran.

    Attributes:
        spans: collected spans, in no particular order.
        batch_count: number of batches that began during the section.
    """

    spans: list[Span] = field(default_factory=list)
    batch_count: int = 0

    def add(self, spans: Iterable[Span], batch_count: int = 0) -> None:
        """Add spans that were collected elsewhere, for example in the worker process that fetched a batch."""
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
        """Add a span that ends at `ended_at`, which defaults to the current time."""
        ended_at = time.perf_counter() if ended_at is None else ended_at
        self.add((Span(stage, began_at, ended_at, size_bytes, is_call),))


collected_here: Final[ContextVar[Collected | None]] = ContextVar("collected_here", default=None)
"""The collection that records the calls of the current thread or task, or None if calls are not collected."""

step_report: Final[ContextVar[Callable[[], Any] | None]] = ContextVar("step_report", default=None)
"""A function that returns the `StepTimes` to send with a rank's next claim, or None."""


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect the calls made in the `with` block, without adding them to any enclosing collection."""
    collected = Collected()
    token = collected_here.set(collected)
    try:
        yield collected
    finally:
        collected_here.reset(token)


class TimesSteps(Protocol):
    """Protocol implemented by `StepTimer`, which measures a trainer's steps."""

    clock: Callable[[], float]

    def add(self, began_at: float, asked_at: float, ended_at: float, *, calls: Collected, waits: Collected) -> None:
        """Add all or part of a step. See `StepTimer.add`."""
        ...


def timed(items: Iterable[T], timer: TimesSteps | None = None) -> Iterator[T]:
    """Yield a loader's micro-batches, and record how long the consumer waits for and works on each one.

    The client calls that the consumer makes between micro-batches are also collected. The generator runs in the
    consumer's context, so it keeps collecting these calls while the consumer works.
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
            del item  # otherwise, the item would exist until the next item arrives
    finally:
        if collected_here.get() in (calls, waits):  # false if the generator is garbage-collected in another thread
            collected_here.set(outer)
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
