"""Which gets are asked for in one message."""

import pytest

from tq_service.client import sent_sizes
from tq_service.client.sent_sizes import SentSizes
from tq_service.v1 import metadata_pb2
from tq_service.v1.storage_service_pb2 import GetRequest
from tq_service.wire.frames import INLINE_BYTES


def request_of(*names):
    return GetRequest(runs=[metadata_pb2.CellRuns(field_names=[name]) for name in names])


def test_the_first_get_of_some_fields_is_tried():
    assert SentSizes().is_small(request_of("x"), 1 << 20)


@pytest.mark.parametrize(("row_count", "is_small"), [(1, True), (10, True), (11, False), (1000, False)])
def test_later_ones_are_as_the_last_was(row_count, is_small):
    sizes = SentSizes()
    sizes.note(request_of("x", "y"), 100, INLINE_BYTES * 10)
    assert sizes.is_small(request_of("x", "y"), row_count) is is_small
    assert sizes.is_small(request_of("x"), row_count)
    sizes.note(request_of("x", "y"), 100, 100)
    assert sizes.is_small(request_of("x", "y"), row_count)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(sent_sizes, "_MOST_REMEMBERED", 8)
    sizes = SentSizes()
    for number in range(100):
        sizes.note(request_of(f"field {number}"), 1, INLINE_BYTES * 2)
        assert not sizes.is_small(request_of(f"field {number}"), 1)
    assert len(sizes._row_bytes) <= 8
