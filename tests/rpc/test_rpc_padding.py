"""Padded reads: every dtype, both sides, all ways in which bytes come, and what torch pads the same rows to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import AnyClient, LoopThread, StartServer
from property_settings import examples
from rpc_rows import bits
from test_rpc_slices import DTYPES, LONG, WAYS, Place, patched, random_rows

import tq_service as tq
from tq_service.client import padding
from tq_service.dataplane.bulk.connection import BulkConnection
from tq_service.wire.columns import ColumnReceiver


@pytest.fixture(scope="module", params=WAYS)
def place(
    request: pytest.FixtureRequest, loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with ExitStack() as stack, patched(request.param):
        yield Place(request.param, loop_thread, stack, tmp_path_factory.mktemp("data"))


@pytest.fixture
def client(start_server: StartServer, client_kind: Any) -> AnyClient:
    return start_server().client(client_kind)


def pad(rows: list[torch.Tensor], length: int | None, side: str, value: Any) -> torch.Tensor:
    """Pad rows along their first dimension, one by one."""
    width = max(map(len, rows)) if length is None else length
    padded = torch.full((len(rows), width, *rows[0].shape[1:]), 0, dtype=torch.uint8).to(rows[0].dtype)
    raw = _raw(padded)
    raw[:] = _raw(torch.tensor([value]).to(rows[0].dtype))[0] if raw.numel() else 0
    for at, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        if len(row):
            raw[at, start : start + len(row)] = _raw(row)
    return padded


def _raw(values: torch.Tensor) -> torch.Tensor:
    """Return values as whole numbers of the same size, which torch can do everything with."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return values.view(kinds[values.dtype.itemsize])


PROPERTY = settings(examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@PROPERTY
@given(data=st.data())
def test_rows_are_padded_as_one_by_one(place: Place, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6), label="rows")
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size), label="lengths")
    tail = data.draw(st.sampled_from([(), (3,), (2, 2)]), label="tail")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    rows = random_rows(lengths, tail, dtype, size)
    client, partition = place.clients[data.draw(st.integers(0, 1), label="client")], place.new_partition()
    client.create_partition(partition, fields=[tq.FieldSpec("x", layout="jagged")])
    puts = data.draw(st.integers(1, size), label="puts")
    for number in range(puts):
        some = rows[number * size // puts : (number + 1) * size // puts]
        client.put(partition, {"x": some, "y": torch.arange(len(some)), "o": ["a"] * len(some)})
    order = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8), label="order")
    rows = [rows[at] for at in order]
    side = data.draw(st.sampled_from(["right", "left"]), label="side")
    length = data.draw(st.none() | st.integers(9, 12), label="length")
    value = data.draw(st.sampled_from([0, 1]), label="value")
    got = client.get_data(
        partition,
        global_indexes=order,
        padded=data.draw(st.sampled_from([True, ["x"]]), label="padded"),
        pad_value=value,
        length=length,
        side=side,
        mask=True,
    )
    assert bits(got["x"]) == bits(pad(rows, length, side, value))
    ones = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    assert torch.equal(got["x_mask"], pad(ones, length, side, 0))
    assert tuple(got["y"].shape) == (len(order),)
    assert list(got["o"]) == ["a"] * len(order)


def test_padding_is_that_of_torch(client: AnyClient) -> None:
    rows = [torch.randn(length, 4) for length in (5, 0, 8)]
    meta = client.put("p", {"x": rows})
    for side in ("right", "left"):
        expected = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1.5, padding_side=side)
        assert torch.equal(client.get_data(meta, padded=True, pad_value=-1.5, side=side)["x"], expected)


def test_rows_are_received_where_they_belong(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rows, several fields of which one is padded by name; copied only where they lie in shared memory."""
    client, partition = place.clients[0], place.new_partition()
    rows = [torch.full((length,), length) for length in (300_000, 1, 70_000, 0)]
    meta = client.put(partition, {"x": rows, "w": torch.arange(4 * 50_000).reshape(4, -1), "z": rows[::-1]})
    copied: list[int] = []
    copy = padding._copy
    monkeypatch.setattr(padding, "_copy", lambda *args: (copied.append(args[3].size), copy(*args)))
    got = client.get_data(meta, padded=["x"], pad_value=-1)
    assert torch.equal(got["x"], torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1))
    assert torch.equal(got["w"], torch.arange(4 * 50_000).reshape(4, -1))
    assert [len(row) for row in got["z"].unbind()] == [0, 70_000, 1, 300_000]
    if place.way != "shared memory":
        assert copied == []


def test_cells_that_have_grown_are_padded(place: Place) -> None:
    client, partition = place.clients[1], place.new_partition()
    client.create_partition(partition)
    slots = client.acquire(partition, "rollout", count=3, lease=LONG)
    meta = client.append(slots, {"x": [[1], [1, 2], []]}, at=[0, 0, 0])
    meta = client.append(slots, {"x": [[2, 3], [], [7]]}, at=[1, 2, 0])
    assert client.get_data(meta, padded=True, pad_value=-1)["x"].tolist() == [[1, 2, 3], [1, 2, -1], [7, -1, -1]]
    cut = client.get_data(meta, padded=True, length=2, truncate=True, side="left", mask=True)
    assert cut["x"].tolist() == [[1, 2], [1, 2], [0, 7]]
    assert cut["x_mask"].tolist() == [[True, True], [True, True], [False, True]]


def test_rows_longer_than_the_length_are_an_error_or_cut_in_the_service(place: Place) -> None:
    client, partition = place.clients[0], place.new_partition()
    meta = client.put(partition, {"x": [torch.arange(5), torch.arange(1000)]})
    with pytest.raises(
        tq.errors.FieldMismatchError, match="row 1 of field 'x' has 1000 items in dimension 0; expected at"
    ):
        client.get_data(meta, padded=True, length=8)
    before = place.read_bytes()
    got = client.get_data(meta, padded=True, length=8, truncate=True, pad_value=-1)["x"]
    assert got.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1], list(range(8))]
    assert place.read_bytes() - before == 8 * (5 + 8)


def test_other_dimensions_dense_fields_and_no_rows(client: AnyClient) -> None:
    fields = [tq.FieldSpec("m", layout="jagged", row_shape=(3, -1)), tq.FieldSpec("i", layout="jagged")]
    client.create_partition("p", fields=fields)
    positions = [torch.arange(3 * length).reshape(3, length) for length in (2, 4)]
    meta = client.put("p", {"m": positions, "i": [torch.arange(2), torch.arange(3)], "d": torch.ones(2, 3)})
    got = client.get_data(meta, padded=["m", "d"], length={"d": 5}, mask=True, pad_value={"d": -1, "m": 9})
    assert got["m"].tolist() == [
        [[0, 1, 9, 9], [2, 3, 9, 9], [4, 5, 9, 9]],
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    ]
    assert got["d"].tolist() == [[1, 1, 1, -1, -1]] * 2
    assert got["m_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert got["i"].layout is torch.jagged
    none = client.get_data(meta.select_samples([]), padded=True, length={"i": 7}, mask=True)
    assert {name: tuple(none[name].shape) for name in ("m", "d", "i", "i_mask")} == {
        "m": (0, 3, 0),
        "d": (0, 3),
        "i": (0, 7),
        "i_mask": (0, 7),
    }


def test_parts_of_dense_rows_that_differ_are_padded(client: AnyClient) -> None:
    meta = client.put("p", {"d": torch.arange(8).reshape(2, 4)})
    got = client.get_data(meta, slices={"d": [(0, 1), (1, 4)]}, padded=True, mask=True, pad_value=-1)
    assert got["d"].tolist() == [[0, -1, -1], [5, 6, 7]]
    assert got["d_mask"].tolist() == [[True, False, False], [True] * 3]
    alike = client.get_data(meta, slices={"d": [(0, 2), (2, 4)]}, padded=True, mask=True)
    assert alike["d"].tolist() == [[0, 1], [6, 7]]
    assert "d_mask" not in alike


def test_parts_are_padded_too(client: AnyClient) -> None:
    meta = client.put("p", {"x": [torch.arange(9), torch.arange(2), torch.arange(0)]})
    assert client.get_data(meta, slices={"x": (-3, None)}, padded=True, pad_value=-1)["x"].tolist() == [
        [6, 7, 8],
        [0, 1, -1],
        [-1, -1, -1],
    ]
    share = tq.RowSlice.share(1, 2, fill=-2, positions="at")
    got = client.get_data(meta, slices={"x": share}, padded=True, pad_value=-1)
    assert got["x"].tolist() == [[3, 4, 5, 6, 7, 8], [1, -2, -1, -1, -1, -1], [-1] * 6]
    assert got["at"].tolist() == [[3, 4, 5, 6, 7, 8], [1, 2, -1, -1, -1, -1], [-1] * 6]


WRONG: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "side": ({"padded": True, "side": "both"}, "side is 'both'"),
    "length": ({"padded": True, "length": -1}, "length is -1"),
    "padded": ({"padded": "x"}, "padded is 'x'"),
    "not padded": ({"length": 3}, "padded is False; expected True or a list of fields because length is set"),
    "no length": ({"padded": True, "truncate": True}, "truncate is True without a length"),
    "not fetched": ({"padded": ["y"]}, "padded is field 'y', which is not fetched"),
    "other field": ({"padded": ["x"], "pad_value": {"y": 1}}, "pad_value is set for field 'y'"),
    "value alone": ({"pad_value": -1}, "padded is False; expected True or a list of fields because pad_value is set"),
    "not of the dtype": ({"padded": True, "pad_value": 0.5}, "pad_value 0.5 cannot be stored as int64"),
    "too large": ({"padded": True, "pad_value": 2**70}, "cannot be stored as int64"),
    "objects": ({"padded": ["o"]}, "field 'o' is object"),
    "single values": ({"padded": ["s"]}, "field 's' is float32 dense []"),
    "several dimensions": ({"padded": ["i"]}, "expected tensors whose rows differ in one dimension"),
    "mask": ({"padded": ["x"], "mask": True, "data_fields": ["x", "x_mask"]}, "but field 'x_mask' exists"),
    "layout": ({"padded": True, "layout": "jagged"}, "layout is 'jagged' and padded is set"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_padding_that_cannot_be_is_refused(client: AnyClient, wrong: str) -> None:
    data = {
        "x": [torch.arange(3), torch.arange(4)],
        "i": [torch.zeros(2, 3), torch.zeros(3, 2)],
        "o": ["a", "b"],
        "s": torch.zeros(2),
        "x_mask": torch.zeros(2),
    }
    meta = client.put("p", data)
    arguments, says = WRONG[wrong]
    with pytest.raises(tq.errors.InvalidArgumentError) as caught:
        client.get_data(meta, **{"data_fields": ["x", "i", "o", "s"], **arguments})
    assert says in str(caught.value)
    several = client.get_data(meta, data_fields=["x", "i"], padded=True)
    assert several["x"].shape == (2, 4)
    assert [tuple(row.shape) for row in several["i"]] == [(2, 3), (3, 2)]


def test_a_read_that_is_cut_off_is_read_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer ends after some bytes; the rows of the next one overwrite what it left in the buffer."""
    client, partition = place.clients[0], place.new_partition()
    rows = [torch.arange(length) for length in (50_000, 3, 40_000)]
    meta = client.put(partition, {"x": rows, "y": rows})
    written, tries = ColumnReceiver.write, []

    def break_off(receiver: ColumnReceiver, frame: memoryview) -> None:
        written(receiver, frame[: len(frame) // 2])
        if not tries:
            tries.append(len(frame))
            raise tq.errors.UnavailableError("the connection was lost")
        written(receiver, frame[len(frame) // 2 :])

    received = BulkConnection.receive_all

    def lose(connection: BulkConnection, targets: Sequence[memoryview], moved: Any) -> None:
        received(connection, targets[:1], moved)
        if not tries:
            tries.append(len(targets))
            raise ConnectionResetError
        received(connection, targets[1:], moved)

    monkeypatch.setattr(ColumnReceiver, "write", break_off)
    monkeypatch.setattr(BulkConnection, "receive_all", lose)
    got = client.get_data(meta, padded=["x"], slices={"y": (1, -1)}, pad_value=-1)
    assert torch.equal(got["x"], torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1))
    assert [row.tolist() for row in got["y"].unbind()] == [row[1:-1].tolist() for row in rows]
    assert len(tries) == 1
