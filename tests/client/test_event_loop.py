"""What an AsyncClient does on the event loop of its caller: little, whatever is put and got."""

import threading

import numpy as np
import pytest
import torch
from client_support import make_client

from tq_service.client._async import fetches, samples
from tq_service.client.concurrency import are_light
from tq_service.config import ServeSettings
from tq_service.server.app import running

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

    for name in ("encode_columns", "fill_write", "encode_meta_columns"):
        note(samples, name)
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
    meta = await async_client.put({"x": LARGE[field]}, partition_id="p")
    back = await async_client.get_data(meta)
    assert len(back["x"]) == MANY
    here = threading.get_ident()
    for name in ("encode_columns", "fill_write", "merge_answers", "to_batch"):
        assert here not in threads[name], name


async def test_many_names_and_values_are_encoded_by_a_thread(async_client, threads):
    meta = [{"step": number} for number in range(MANY)]
    batch = await async_client.insert("p", keys=[f"k{number}" for number in range(MANY)], custom_meta=meta)
    await async_client.set_custom_meta(batch, meta)
    await async_client.put({"x": np.arange(MANY)}, partition_id="q", custom_meta=meta)
    assert threading.get_ident() not in threads["fill_write"] | threads["encode_meta_columns"]


async def test_small_puts_are_encoded_at_once(async_client, threads):
    data = {"x": np.arange(4), "t": ["a", "b", "c", "d"], "large": torch.ones(4, 1 << 16), "o": [{"a": 1}] * 4}
    batch = await async_client.put(data, partition_id="p", keys=list("abcd"), custom_meta=[{"s": 1}] * 4)
    await async_client.set_custom_meta(batch, {"s": np.arange(4)})
    back = await async_client.get_data(batch, data_fields=["x", "t"])
    assert back["x"].tolist() == [0, 1, 2, 3]
    here = {threading.get_ident()}
    assert threads["encode_columns"] == threads["fill_write"] == threads["encode_meta_columns"] == here
    await async_client.get_data(batch, data_fields=["x", "t"])
    assert threads["plan_reads"] == here


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
