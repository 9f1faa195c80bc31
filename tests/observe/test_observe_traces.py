"""Spans of clients and of the service: one trace for what one call of a client causes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tq_service as tq
from tq_service.client_probes import carriers
from tq_service.v1.controller_service_pb2 import ListSamplersRequest

sys.path.insert(0, str(Path(__file__).parent.parent))
from live_server import AnyClient, ClientKind, LiveServer, LoopThread

ASKS: dict[str, Any] = {"task_name": "t", "data_fields": ["x"], "batch_size": 2}


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.fixture(scope="module")
def live(loop_thread: LoopThread, exporter: InMemorySpanExporter) -> Iterator[LiveServer]:
    with LiveServer(loop_thread, traces=True) as started:
        yield started


def untrace() -> None:
    """Trace no more: the clients' methods are inherited, those that are traced are the classes' own."""
    for kind in (tq.AsyncClient, tq.Client):
        for name, method in list(vars(kind).items()):
            if hasattr(method, "__wrapped__"):
                delattr(kind, name)
    carriers.clear()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    tq.trace()
    tq.trace()  # which does nothing
    exporter.clear()
    yield exporter
    untrace()


def ended(exporter: InMemorySpanExporter, live: LiveServer, calls: int = 1) -> tuple[ReadableSpan, ...]:
    """The spans that have ended, once those of `calls` calls of the service are among them.

    A caller has its answer before the service's span ends, by a few turns of the loop or more on a busy machine."""
    deadline = time.monotonic() + 20
    while True:
        live.settle()
        found = exporter.get_finished_spans()
        if sum(span.kind is trace.SpanKind.SERVER for span in found) >= calls or time.monotonic() > deadline:
            return found
        time.sleep(0.005)


@pytest.fixture
def client(live: LiveServer, client_kind: ClientKind) -> AnyClient:
    return live.client(client_kind)


def test_calls_of_the_service_are_below_those_of_the_client(
    client: AnyClient, live: LiveServer, spans: InMemorySpanExporter
) -> None:
    name = f"traced-{client.kind}"
    client.put(name, {"x": np.arange(4)})
    meta = client.get_meta(partition_id=name, **ASKS)
    client.get_data(meta)
    found = ended(spans, live, calls=3)
    of_client = {span.name: span for span in found if span.kind is trace.SpanKind.CLIENT}
    assert set(of_client) == {"tq_service.put", "tq_service.get_meta", "tq_service.get_data"}
    assert dict(of_client["tq_service.get_meta"].attributes or {}) == {
        "tq_service.partition_id": name,
        "tq_service.task_name": "t",
    }
    below = {
        (span.name.rpartition("/")[2], span.parent.span_id)
        for span in found
        if span.kind is trace.SpanKind.SERVER and span.parent is not None
    }
    ids = {key: span.get_span_context().span_id for key, span in of_client.items()}  # type: ignore[union-attr]
    assert ("GetMeta", ids["tq_service.get_meta"]) in below
    assert ("PutInline", ids["tq_service.put"]) in below
    assert ("GetInline", ids["tq_service.get_data"]) in below
    (handled,) = [span for span in found if span.name.endswith("/GetMeta")]
    attributes = dict(handled.attributes or {})
    assert attributes.pop("tq_service.wait_seconds") == 0
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.service": "tq_service.v1.ControllerService",
        "rpc.method": "GetMeta",
        "rpc.grpc.status_code": 0,
    }


def test_a_call_that_fails_says_how(client: AnyClient, live: LiveServer, spans: InMemorySpanExporter) -> None:
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.describe_partition("nothing")
    of_client, of_service = sorted(ended(spans, live), key=lambda span: span.kind.value, reverse=True)
    assert of_client.status.status_code is trace.StatusCode.ERROR
    assert (of_service.attributes or {})["rpc.grpc.status_code"] == 5
    assert of_service.status.status_code is trace.StatusCode.UNSET  # it did what it was asked


def test_a_wait_is_told_from_the_work(client: AnyClient, live: LiveServer, spans: InMemorySpanExporter) -> None:
    assert client.get_meta(partition_id=f"none-{client.kind}", max_wait=0.2, **ASKS).status == "not_yet"
    waits = [span for span in ended(spans, live) if span.name.endswith("/GetMeta")]
    assert sum((span.attributes or {})["tq_service.wait_seconds"] for span in waits) >= 0.1


def test_a_context_from_around_is_carried_on(live: LiveServer, spans: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("step") as step:
        live.client().list_partitions()
    (listing,) = [span for span in ended(spans, live) if span.name.endswith("/ListPartitions")]
    assert listing.context is not None
    assert listing.context.trace_id == step.get_span_context().trace_id


def test_calls_that_share_a_stream_have_the_traces_of_their_callers(
    live: LiveServer, spans: InMemorySpanExporter
) -> None:
    client = live.client("async").real

    async def claim_together() -> None:
        asks = [client.get_meta(partition_id=f"none-{number}", max_wait=0.2, **ASKS) for number in range(4)]
        await asyncio.gather(*asks)
        assert client._calls.endpoint().unary._streams

    live.loop.run(claim_together())
    found = ended(spans, live, calls=4)
    of_client = {span.context.span_id for span in found if span.name == "tq_service.get_meta" and span.context}
    of_service = [span for span in found if span.name.endswith("/GetMeta")]
    assert len(of_client) == 4
    assert {span.parent.span_id for span in of_service if span.parent} == of_client
    live.loop.run(client.aclose())
    assert len(ended(spans, live, calls=5)) == 9  # with that of the stream


def test_calls_without_a_trace_have_one_of_their_own(live: LiveServer, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    live.client().list_partitions()
    (span,) = ended(exporter, live)
    assert span.parent is None
    live.controller.ListSamplers(ListSamplersRequest(), metadata=[("traceparent", "garbage")])
    assert len(ended(exporter, live, calls=2)) == 2


def test_without_it_nothing_is_wrapped() -> None:
    before = tq.Client.put, tq.AsyncClient.get_meta
    tq.trace()
    assert tq.Client.put is not before[0]
    assert asyncio.iscoroutinefunction(tq.AsyncClient.get_meta)
    untrace()
    assert (tq.Client.put, tq.AsyncClient.get_meta) == before
    assert carriers == []
