"""What is cleared goes with its clear: gRPC keeps what calls hold until garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from live_server import LiveServer


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "asked", [{}, {"lease": 60.0}, {"dp_rank": 0, "dp_size": 1, "batch_index": 0}], ids=["queue", "lease", "rank"]
)
def test_a_cleared_partition_is_kept_by_no_call(server: LiveServer, asked: dict[str, float]) -> None:
    client = server.client()
    client.put("p", {"x": [b"one", b"two"]})
    meta = client.get_meta(partition_id="p", task_name="t", data_fields=["x"], batch_size=2, **asked)
    assert meta.size == 2
    catalog = server.app.controller.catalog
    assert catalog is not None
    reference = weakref.ref(catalog.get("p"))
    client.clear_partition("p")
    while reference() is not None:
        server.settle()
