"""Timers of processor time around functions of a program, and the service run with them.

The time of a stage excludes the stages within it. `python -m benchmarks.stage_timers FILE serve ...` runs
`tq-service serve ...` with timers around its stages. At each SIGUSR1 it writes to FILE the time of each stage since the
start.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final

Stages = Mapping[str, tuple[str, ...]]

SERVICE_STAGES: Final[Stages] = {
    "handler look-up": ("tq_service.server.rpc.calls:Services.service",),
    "middleware": (),  # timed below, without the stages within
    "deserialize": (),
    "serialize": (),
    "GetMeta: handler, rest": ("tq_service.server.controller_servicer:ControllerServicer.GetMeta",),
    "GetMeta: spec": ("tq_service.server.converters:claim_spec",),
    "GetMeta: request": ("tq_service.server.converters:claim_request",),
    "GetMeta: sampler": (
        "tq_service.samplers.service:SamplerRegistry.resolve_json",
        "tq_service.samplers.service:PlanRunner.check",
    ),
    "GetMeta: claim, rest": ("tq_service.serving.catalog:Catalog.claim",),
    "GetMeta: plan": ("tq_service.serving.planner:Planner._find_at_once",),
    "GetMeta: record": ("tq_service.serving.planner:Planner._record",),
    "GetMeta: answer": ("tq_service.server.converters:claim_answer",),
    "PutInline: handler, rest": ("tq_service.server.storage_servicer:StorageServicer.PutInline",),
    "PutInline: storage": (
        "tq_service.storage.engine:StorageEngine.reserve",
        "tq_service.storage.engine:StorageEngine.flush",
    ),
    "PutInline: commit, rest": ("tq_service.server.puts:Commits._commit",),
    "PutInline: write": ("tq_service.server.converters:sample_write",),
    "PutInline: check": ("tq_service.serving.catalog:Catalog._check_write",),
    "PutInline: answer": ("tq_service.server.converters:written_meta",),
    "apply and append changes": ("tq_service.machine.state_machine:StateMachine.commit_all",),
    "follow changes": ("tq_service.serving.catalog:Catalog._follow",),
}
CLIENT_STAGES: Final[Stages] = {
    "get_meta: rest": ("tq_service.client._async.claims:AsyncClaimCalls.get_meta",),
    "get_meta: request": ("tq_service.client._async.claims:get_meta_request",),
    "BatchMeta of an answer": ("tq_service.client.batch_meta:BatchMeta.from_proto",),
    "put: rest": ("tq_service.client._async.samples:AsyncSampleCalls.put",),
    "put: answer": ("tq_service.client.gathering:written_meta",),
    "call: retries": ("tq_service.client._async.calls:AsyncCalls.retried",),
    "call: gRPC": ("tq_service.client._async.calls:AsyncCalls.unary_once",),
}


class StageTimers:
    """Counts calls of functions, and the processor time of the thread that runs them, by stage.

    For a single thread; coroutines are timed only while they run.
    """

    def __init__(self) -> None:
        self._stages: dict[str, list[int]] = {}
        self._inner_ns = [0]  # for each running stage, the time of the stages within it

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return how often each stage was entered, and its seconds without the stages within it."""
        return {name: (count, spent_ns / 1e9) for name, (count, spent_ns) in self._stages.items()}

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with a timer around it."""
        totals = self._stages.setdefault(stage, [0, 0])

        def run(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._inner_ns.append(0)
            began_ns = time.thread_time_ns()
            try:
                return step(*args, **kwargs)
            finally:
                whole_ns = time.thread_time_ns() - began_ns
                totals[1] += whole_ns - self._inner_ns.pop()
                self._inner_ns[-1] += whole_ns

        if not inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                totals[0] += 1
                return run(function, *args, **kwargs)

            return call

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            totals[0] += 1
            return await _Steps(run, function(*args, **kwargs))

        return awaited

    def wrap_all(self, stages: Stages) -> None:
        """Put timers around the functions of all stages, named `module:function` or `module:class.function`."""
        for stage, names in stages.items():
            for name in names:
                module, _, path = name.partition(":")
                *owners, attribute = path.split(".")
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
                raw = inspect.getattr_static(owner, attribute)
                inner = getattr(raw, "__func__", raw)
                timed: Any = self.timed(stage, inner)
                setattr(owner, attribute, timed if inner is raw else type(raw)(timed))


class _Steps:
    """A coroutine whose steps are each run by a timer."""

    def __init__(self, run: Callable[..., Any], coroutine: Any) -> None:
        self._run = run
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        send, value = self._coroutine.send, None
        while True:
            try:
                awaited = self._run(send, value)
            except StopIteration as end:
                return end.value
            try:
                send, value = self._coroutine.send, (yield awaited)
            except BaseException as error:
                send, value = self._coroutine.throw, error


def _time_handlers(timers: StageTimers) -> None:
    """Put timers around the handlers of all methods, their middleware, and the code that reads and writes messages."""
    from tq_service.server.rpc.calls import Services

    make: Any = Services._wrapped

    def wrapped(self: Services, inner: Any, *args: Any) -> Any:
        if inner.request_deserializer is not None:
            inner = inner._replace(request_deserializer=timers.timed("deserialize", inner.request_deserializer))
        if inner.response_serializer is not None:
            inner = inner._replace(response_serializer=timers.timed("serialize", inner.response_serializer))
        handler = make(self, inner, *args)
        if handler.stream_unary is None:
            return handler
        return handler._replace(stream_unary=timers.timed("middleware", handler.stream_unary))

    Services._wrapped = wrapped  # type: ignore[method-assign]


def _serve(path: Path) -> None:
    """Run the service with timers; on request it writes them to a file."""
    timers = StageTimers()
    _time_handlers(timers)
    timers.wrap_all(SERVICE_STAGES)

    def write(*_: object) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(timers.totals()))
        part.replace(path)

    signal.signal(signal.SIGUSR1, write)
    from tq_service.cli import main

    main()


if __name__ == "__main__":
    where = Path(sys.argv.pop(1))
    _serve(where)
