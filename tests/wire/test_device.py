"""Tensors on a device, through a stand-in for one: what is copied when, and what is pinned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_in_device import StandIn, set_pinned_memory, standing_in

import tq_service
from tq_service.errors import InvalidArgumentError
from tq_service.wire import device
from tq_service.wire.columns import Column
from tq_service.wire.encoding import encode_columns
from tq_service.wire.host_memory import PinnedMemory

HERE = torch.device("cpu")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(monkeypatch) as stand_in:
        yield stand_in


def host_bytes(column: Column) -> bytes:
    return b"".join(bytes(view) for views in device.on_host(column.chunks) for view in views)


def encoded(**data: object) -> Column:
    (column,) = encode_columns(data)
    return column


def bytes_of(*tensors: torch.Tensor) -> bytes:
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)


def test_a_copy_waits_for_the_work_that_makes_the_tensor(stand_in: StandIn) -> None:
    values = torch.arange(12).reshape(4, 3)
    side = stand_in.new_stream(HERE)
    with stand_in.using(side):
        column = encoded(x=stand_in.later(values))
    assert host_bytes(column) == bytes_of(values)
    waited = stand_in.log.index(("synchronize", side.name))
    assert waited < next(at for at, (what, _) in enumerate(stand_in.log) if what == "down")


def test_no_other_stream_is_waited_for(stand_in: StandIn) -> None:
    busy = stand_in.new_stream(HERE)
    busy.give(lambda: pytest.fail("another stream was waited for"))
    column = encoded(x=stand_in.later(torch.arange(4)))
    stand_in.default.give(lambda: pytest.fail("what the caller has begun since was waited for"))
    assert host_bytes(column) == bytes_of(torch.arange(4))


def test_each_kind_of_column_is_that_of_the_same_tensors_on_the_host(stand_in: StandIn) -> None:
    rows = [torch.arange(size, dtype=torch.float32) for size in (3, 0, 5)]
    large = [torch.full((40_000,), number) for number in range(3)]
    kinds = {
        "dense": (torch.arange(6).reshape(3, 2), stand_in.later(torch.arange(6).reshape(3, 2))),
        "transposed": (torch.arange(6).reshape(2, 3).t(), stand_in.put(torch.arange(6).reshape(2, 3)).t()),
        "bfloat16": (torch.ones(3, dtype=torch.bfloat16), stand_in.put(torch.ones(3, dtype=torch.bfloat16))),
        "nested": (torch.nested.as_nested_tensor(rows, layout=torch.jagged), stand_in.nested(rows)),
        "rows": (rows, [stand_in.put(row) for row in rows]),
        "large rows": (large, [stand_in.later(row) for row in large]),
        "scalars": ([torch.tensor(number) for number in range(3)], list(stand_in.put(torch.arange(3)))),
        "empty": (torch.empty(3, 0), stand_in.put(torch.empty(3, 0))),
        "objects": ([{"x": torch.arange(4)}] * 3, [{"x": stand_in.later(torch.arange(4))}] * 3),
    }
    for name, (host, on_device) in kinds.items():
        stand_in.default.run() if name in ("rows", "large rows") else None  # a gather is a kernel, done at once here
        expected, column = encoded(x=host), encoded(x=on_device)
        assert column.spec == expected.spec, name
        assert column.value_bytes == expected.value_bytes, name
        assert np.array_equal(column.extents, expected.extents) or column.extents is expected.extents, name
        assert host_bytes(column) == host_bytes(expected), name


def test_rows_on_a_device_are_put_together_there(stand_in: StandIn) -> None:
    rows = [stand_in.put(torch.full((40_000,), number)) for number in range(50)]
    column = encoded(x=rows)
    host_bytes(column)
    assert len([what for what, _ in stand_in.log if what == "down"]) == -(-column.value_bytes // (8 << 20))


def test_pinned_memory_is_bounded_and_used_again(stand_in: StandIn) -> None:
    values = torch.arange(3 << 20)  # 24 MiB
    for _ in range(5):
        assert host_bytes(encoded(x=stand_in.put(values))) == bytes_of(values)
    assert stand_in.most_pinned_bytes <= 24 << 20
    assert stand_in.pin_count <= 3


def test_pageable_memory_takes_the_place_of_what_may_not_be_pinned(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.arange(3 << 20)
    monkeypatch.setenv("TQ_PINNED_BYTES", "0")
    set_pinned_memory(monkeypatch, None)
    assert host_bytes(encoded(x=stand_in.put(values))) == bytes_of(values)
    assert (stand_in.pin_count, caplog.messages) == (0, [])
    stand_in.refuses = True
    set_pinned_memory(monkeypatch, 1 << 30)
    for _ in range(2):
        assert host_bytes(encoded(x=stand_in.put(values))) == bytes_of(values)
    assert [message.split(";")[0] for message in caplog.messages] == ["could not pin memory"]


def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PINNED_BYTES", "1GiB")
    with pytest.raises(InvalidArgumentError, match="TQ_PINNED_BYTES is '1GiB'; expected a number of bytes"):
        PinnedMemory().check_limit()


def test_nothing_waits_for_a_whole_device() -> None:
    sources = [path.read_text() for path in Path(tq_service.__file__).parent.rglob("*.py")]
    assert not [source for source in sources if re.search(r"cuda\.synchronize|empty_cache|memory_stats", source)]


def test_work_of_another_thread_has_the_streams_of_the_caller(stand_in: StandIn) -> None:
    side = stand_in.new_stream(HERE)
    with stand_in.using(side):
        work = device.on_these_streams(lambda: stand_in.current_stream(HERE))
    assert stand_in.current_stream(HERE) is stand_in.default
    assert work() is side
    assert device.on_these_streams(work) is work


def test_devices_that_are_not_there_are_refused() -> None:
    assert device.find_device(None) is device.find_device("cpu") is device.find_device(HERE) is None
    for name in ("cuda:99", "mps", "no device", 3.5):
        with pytest.raises(InvalidArgumentError, match="device is "):
            device.find_device(name)
