"""What an AsyncClient does on the event loop of its caller: little, whatever is put and got."""

import threading

import numpy as np
import pytest
import torch
from client_support import make_client
from stand_in_device import standing_in

from tq_service.client import gathering, requests
from tq_service.client._async import fetches, samples
from tq_service.client.transport import are_light
from tq_service.config import ServeSettings
from tq_service.errors import UnsupportedObjectError
from tq_service.schema import Encoding
from tq_service.server.app import running
from tq_service.wire.encoding import encode_columns

MANY = 5000
LARGE = {
    "dicts": [{"role": "user", "content": f"hello {number}"} for number in range(MANY)],
    "tensors": [torch.ones(3)] * MANY,
    "numbers": list(range(MANY)),
    "transposed": torch.ones(64, MANY).t(),
    "objects": np.array([f"{number}" for number in range(MANY)], object),
}


@pytest.fixture
def threads(monkeypatch):
    """Note which threads encode and decode, by what they do."""
    noted = {}

    def note(module, name):
        function = getattr(module, name)

        def noting(*args, **arguments):
            noted.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **arguments)

        monkeypatch.setattr(module, name, noting)

    note(samples, "encode_columns")
    note(samples, "encode_meta_columns")
    note(gathering, "write_message")
    note(requests, "encode_meta_columns")
    for name in ("plan_reads", "merge_answers", "to_batch"):
        note(fetches, name)
    return noted


@pytest.fixture
async def async_client():
    async with (
        running(ServeSettings(host="127.0.0.1", port=0, max_bytes=256 << 20)) as app,
        make_client("async", f"127.0.0.1:{app.port}") as client,
    ):
        yield client


@pytest.mark.parametrize("field", LARGE)
async def test_large_columns_are_encoded_and_decoded_by_a_thread(async_client, threads, field):
    meta = await async_client.put("p", {"x": LARGE[field]})
    back = await async_client.get_data(meta)
    assert len(back["x"]) == MANY
    here = threading.get_ident()
    for name in ("encode_columns", "write_message", "merge_answers", "to_batch"):
        assert here not in threads[name], name


async def test_tensors_on_a_device_are_encoded_by_a_thread_in_the_order_of_the_callers_stream(
    async_client, threads, monkeypatch
):
    with standing_in(monkeypatch) as stand_in:
        side = stand_in.new_stream(torch.device("cpu"))
        with stand_in.using(side):
            meta = await async_client.put("p", {"x": stand_in.later(torch.arange(4))})
    assert threading.get_ident() not in threads["encode_columns"]
    back = await async_client.get_data(meta)
    assert back["x"].tolist() == [0, 1, 2, 3]


async def test_many_names_and_values_are_encoded_by_a_thread(async_client, threads):
    meta = [{"step": number} for number in range(MANY)]
    batch = await async_client.insert("p", keys=[f"k{number}" for number in range(MANY)], custom_meta=meta)
    await async_client.set_custom_meta(batch, meta)
    await async_client.put("q", {"x": np.arange(MANY)}, custom_meta=meta)
    assert threading.get_ident() not in threads["write_message"] | threads["encode_meta_columns"]


async def test_small_puts_are_encoded_at_once(async_client, threads):
    data = {"x": np.arange(4), "t": ["a", "b", "c", "d"], "large": torch.ones(4, 1 << 16), "o": [{"a": 1}] * 4}
    batch = await async_client.put("p", data, keys=list("abcd"), custom_meta=[{"s": 1}] * 4)
    await async_client.set_custom_meta(batch, {"s": np.arange(4)})
    back = await async_client.get_data(batch, data_fields=["x", "t"])
    assert back["x"].tolist() == [0, 1, 2, 3]
    here = {threading.get_ident()}
    assert threads["encode_columns"] == threads["write_message"] == threads["encode_meta_columns"] == here
    await async_client.get_data(batch, data_fields=["x", "t"])
    assert threads["plan_reads"] == here


PART = 1 << 16


class Parts(list):
    """A list of which no call may go over more values than a part has: no other thread runs meanwhile."""

    def __iter__(self):
        assert len(self) <= PART
        return super().__iter__()

    def __getitem__(self, where):
        found = super().__getitem__(where)
        return Parts(found) if isinstance(where, slice) else found


@pytest.mark.parametrize(
    "make",
    [str, lambda number: str(number).encode(), int, np.float32, lambda number: {"n": number}, lambda number: (number,)],
    ids=["texts", "bytes", "ints", "numpy", "dicts", "tuples"],
)
def test_lists_are_encoded_in_parts(make):
    values = [make(number) for number in range(PART + 1000)]
    (column,) = encode_columns({"x": Parts(values)})
    halves = [encode_columns({"x": values[:PART]})[0], encode_columns({"x": values[PART:]})[0]]
    assert column.spec == halves[0].spec == halves[1].spec
    assert b"".join(column.chunks) == b"".join(chunk for half in halves for chunk in half.chunks)
    assert column.row_bytes().tolist() == [size for half in halves for size in half.row_bytes().tolist()]


def test_what_cannot_be_encoded_is_named_by_its_place_in_the_whole_list():
    with pytest.raises(UnsupportedObjectError, match=rf"x\[{PART + 5}\]"):
        encode_columns({"x": [{"a": 1}] * (PART + 5) + [object()]})
    (column,) = encode_columns({"x": ["a"] * PART + ["\ud800"]})
    assert (column.spec.encoding, column.row_count) == (Encoding.MSGPACK, PART + 1)


def test_what_is_light():
    light = [None, 1, "text", ["a"] * 50, {"x": torch.ones(1 << 20)}, {"x": np.zeros((4, 1 << 20))}, {"x": [{"a": 1}]}]
    heavy = [
        ["a"] * 1000,
        ["a" * (1 << 20)],
        {"x": [{"deep": [[[0] * 1000]]}]},
        {"x": torch.ones(1 << 10, 1 << 10).t()},
        {"x": np.ones((1 << 10, 1 << 10)).T},
        {"x": torch.ones(8, device="meta")},
        {f"field {number}": 1 for number in range(1000)},
        np.array(["a"] * 1000),
    ]
    assert [value for value in light if not are_light([value])] == []
    assert [value for value in heavy if are_light([value])] == []
