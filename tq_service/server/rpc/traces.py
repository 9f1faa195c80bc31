"""Creates an OpenTelemetry span for each call, as a child of the client's span. Requires the `traces` extra."""

from __future__ import annotations

from typing import Any, Final

from opentelemetry import propagate, trace

from tq_service.server.rpc.calls import CODES, code_of
from tq_service.server.rpc.methods import Behavior, Caller, Context, Method, Middleware
from tq_service.version import BUILD
from tq_service.wait_clock import WaitClock, wait_clock

_FAULTS: Final = {"Unknown", "DeadlineExceeded", "Unimplemented", "Internal", "Unavailable", "DataLoss"}


class CallSpans(Middleware):
    """Creates a span for each call. The embedding program's tracer provider exports the spans."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("tq_service", BUILD)
        self._fields = frozenset(propagate.get_global_textmap().fields)

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap a handler to create a span for each call. Handlers for health probes are returned unchanged."""
        if method.is_open:
            return behavior
        service, _, name = method.name.lstrip("/").rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}

        async def call(request: Any, context: Context) -> Any:
            metadata = context.invocation_metadata() or ()
            carrier = {key: value for key, value in metadata if key in self._fields and isinstance(value, str)}
            with self._tracer.start_as_current_span(
                f"{service}/{name}",
                context=propagate.extract(carrier),
                kind=trace.SpanKind.SERVER,
                attributes=attributes,
                record_exception=False,  # the message may contain partition names, and the status code is sufficient
                set_status_on_exception=False,
            ) as span:
                clock = wait_clock.get()
                if method.waits and clock is None:
                    clock = WaitClock()
                    wait_clock.set(clock)
                code = 0
                try:
                    return await behavior(request, context)
                except BaseException as error:
                    code = code_of(error, context)
                    raise
                finally:
                    span.set_attribute("rpc.grpc.status_code", code)
                    if CODES[code] in _FAULTS:
                        span.set_status(trace.StatusCode.ERROR, CODES[code])
                    if method.waits and clock is not None:
                        span.set_attribute("tq_service.wait_seconds", clock.seconds)

        return call
