import gc

import numpy as np
import pytest

from tq_service.client.reads import decode_columns
from tq_service.errors import UnsupportedObjectError
from tq_service.wire.encoding import encode_columns
from tq_service.wire.objects import no_collection


@pytest.fixture
def collections():
    """How often the collector has run."""
    runs = []
    gc.callbacks.append(lambda phase, info: runs.append(info) if phase == "start" else None)
    yield runs
    gc.callbacks.pop()


def test_objects_are_written_and_read_without_collections(collections):
    values = [{"position": [position]} for position in range(5_000)]  # each some objects that the collector counts
    collections.clear()
    (column,) = encode_columns({"x": values})
    back = decode_columns([column], [np.frombuffer(b"".join(column.chunks), np.uint8)], as_torch=False)
    assert len(collections) <= 2  # of what was made before, when it may run again
    assert back["x"] == values
    assert gc.isenabled()


def test_the_collector_runs_again_after_an_error():
    with pytest.raises(UnsupportedObjectError):
        encode_columns({"x": [object()]})
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
