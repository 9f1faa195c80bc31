"""OpenTelemetry spans for client calls, enabled by `tq.trace`. Only `tq.trace` imports OpenTelemetry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tq_service.client import AsyncClient, Client
from tq_service.client_probes import carriers
from tq_service.errors import InvalidArgumentError

_NOT_TRACED: Final = {"aclose", "close"}
_ATTRIBUTES: Final = ("partition_id", "task_name", "dp_rank", "batch_index")


def trace() -> None:
    """Trace the clients in this process. Each call creates a span, which is the parent of the service's spans.

    The trace context is sent in the call metadata. It has the W3C traceparent format unless OTEL_PROPAGATORS is set.
    The spans are exported by the program's tracer provider. To configure a provider, use a tool such as
    `opentelemetry-instrument` and its OTEL_* variables. Without a provider, no spans are created. Calling `trace` again
    has no effect.

    Raises:
        InvalidArgumentError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import propagate  # noqa: PLC0415  (an optional dependency)
        from opentelemetry import trace as api  # noqa: PLC0415  (as above)
    except ModuleNotFoundError:
        raise InvalidArgumentError(
            "tq.trace requires opentelemetry-api, which is not installed. Install tq-service[traces]"
        ) from None
    if carriers:
        return

    def carry() -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return tuple((key.lower(), value) for key, value in carrier.items())

    tracer = api.get_tracer("tq_service")

    @contextmanager
    def span(name: str, given: dict[str, Any]) -> Iterator[None]:
        attributes = {f"tq_service.{key}": given[key] for key in _ATTRIBUTES if isinstance(given.get(key), str | int)}
        with tracer.start_as_current_span(f"tq_service.{name}", kind=api.SpanKind.CLIENT, attributes=attributes):
            yield

    for client in (AsyncClient, Client):
        for name, method in inspect.getmembers(client, inspect.isfunction):
            is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
            if not (name.startswith("_") or name in _NOT_TRACED or is_generator):
                setattr(client, name, _traced(method, name, span))
    carriers.append(carry)


def _traced(method: Callable[..., Any], name: str, span: Callable[[str, dict[str, Any]], Any]) -> Callable[..., Any]:
    """Wrap a method so that each call creates a span."""
    signature = inspect.signature(method)

    def opened(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return span(name, dict(signature.bind_partial(*arguments, **keywords).arguments))

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*arguments: Any, **keywords: Any) -> Any:
            with opened(arguments, keywords):
                return await method(*arguments, **keywords)

        return awaited

    @functools.wraps(method)
    def called(*arguments: Any, **keywords: Any) -> Any:
        with opened(arguments, keywords):
            return method(*arguments, **keywords)

    return called
