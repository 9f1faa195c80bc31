"""Look-ups that wait for samples, in both clients against a real service."""

import asyncio
import time

import numpy as np
import pytest
import torch
from client_support import make_client

import tq_service as tq
from tq_service.config import ServeSettings
from tq_service.server.app import running

DONE = [("status", "==", "done")]


def put(client, keys, status="running", **more):
    custom_meta = [{"status": status} for _ in keys]
    return client.put("p", {"x": torch.arange(len(keys))}, keys=keys, custom_meta=custom_meta, **more)


@pytest.fixture
async def short_service():
    """A service of which no call waits longer than a moment."""
    async with running(ServeSettings(host="127.0.0.1", port=0, max_wait_cap_seconds=0.02)) as app:
        yield f"127.0.0.1:{app.port}"


@pytest.fixture
async def other(kind, service):
    client = make_client(kind, service, timeout=20)
    yield client
    await client.aclose()


async def waiting(client, *arguments, **named):
    """Start a look-up that waits, and return it once the service has it."""
    call = asyncio.ensure_future(client.lookup_samples(*arguments, **{"max_wait": 30.0, **named}))
    await asyncio.sleep(0.05)
    assert not call.done()
    return call


async def test_it_answers_when_so_many_samples_have_their_metadata(client, other):
    meta = await put(client, ["a", "b", "c", "d"])
    call = await waiting(other, "p", where=DONE, min_count=2)
    await client.set_custom_meta(meta.select_samples([2]), [{"status": "done"}])
    await client.put(meta.select_samples([0]), {"y": torch.zeros(1)}, custom_meta=[{"status": "done"}])
    found, missing = await call
    assert (found.keys, missing) == (["a", "c"], [])
    assert (await other.get_data(found, data_fields=["y"], missing="skip"))["y"].tolist() == [0.0]


async def test_it_answers_with_what_there_is_when_its_time_is_over(client):
    await put(client, ["a"], status="done")
    await put(client, ["b"])
    found, _ = await client.lookup_samples("p", where=DONE, min_count=2, max_wait=0.05)
    assert found.keys == ["a"]
    found, missing = await client.lookup_samples("p", ["a", "z"], min_count=2, max_wait=0.05)
    assert (found.keys, missing) == (["a"], ["z"])


async def test_one_sample_is_waited_for_where_no_number_is_given(client, other):
    call = await waiting(other, "p", groups=["g"])
    await put(client, ["a"], groups=["h"])
    await put(client, ["b", "c"], groups=["g", "g"])
    assert (await call)[0].keys == ["b", "c"]


async def test_without_a_wait_it_answers_at_once(client):
    await put(client, ["a"])
    assert (await client.lookup_samples("p", min_count=5))[0].keys == ["a"]


async def test_a_partition_that_never_comes_is_missing_all_the_same(client):
    with pytest.raises(tq.errors.PartitionNotFoundError):
        await client.lookup_samples("p", max_wait=0.05)
    found, missing = await client.lookup_samples("p", ["a"], max_wait=0.05, missing_ok=True)
    assert (found.size, missing) == (0, ["a"])


async def test_a_seal_ends_it_where_there_are_too_few(client, other):
    await put(client, ["a", "b"], status="done")
    call = await waiting(other, "p", where=DONE, min_count=3)
    await client.seal_partition("p")
    assert (await call)[0].keys == ["a", "b"]
    found, _ = await other.lookup_samples("p", where=DONE, min_count=3, max_wait=30.0)
    assert found.keys == ["a", "b"]


async def test_a_clear_ends_it(client, other):
    await put(client, ["a"])
    call = await waiting(other, "p", where=DONE, missing_ok=True)
    await client.clear_partition("p")
    with pytest.raises(tq.errors.PartitionClearedError):
        await call


async def test_many_samples_come_in_pages_after_the_wait(client, other, monkeypatch):
    monkeypatch.setattr("tq_service.serving.lookup._MOST_OF_A_PAGE", 100)
    call = await waiting(other, "p", where=DONE, min_count=950)
    for first in range(0, 2000, 500):
        meta = await put(client, [f"k{number}" for number in range(first, first + 500)])
        await client.set_custom_meta(meta.select_samples(np.arange(0, 500, 2)), [{"status": "done"}] * 250)
    found, _ = await call
    assert found.size >= 950
    assert found.keys == [f"k{number}" for number in range(0, 2 * found.size, 2)]


async def test_the_service_may_end_a_call_sooner_and_the_client_asks_again(kind, short_service):
    client, other = (make_client(kind, short_service, timeout=20) for _ in range(2))
    call = await waiting(other, "p", where=DONE, min_count=2)
    await put(client, ["a"], status="done")
    await asyncio.sleep(0.1)
    assert not call.done()
    await put(client, ["b"], status="done")
    assert (await call)[0].keys == ["a", "b"]
    await client.aclose()
    await other.aclose()


async def test_what_cannot_be_waited_for_is_refused(client):
    for arguments, field in (
        ({"max_wait": -1.0}, "max_wait"),
        ({"max_wait": 1.0, "min_count": -1}, "min_count"),
        ({"max_wait": 1.0, "keys": [f"k{number}" for number in range(20_000)]}, "max_wait"),
        ({"max_wait": 1.0, "where": [("status", "in", [f"{number:0999}" for number in range(300)])]}, "where"),
    ):
        with pytest.raises(tq.errors.InvalidArgumentError) as raised:
            await client.lookup_samples("p", **arguments)
        assert raised.value.field == field
    await put(client, ["a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="status"):
        await client.lookup_samples("p", where=[("status", ">", 3)], max_wait=10.0)


async def test_the_time_is_beyond_the_timeout(client):
    began = time.monotonic()
    with pytest.raises(tq.errors.PartitionNotFoundError):
        await client.lookup_samples("p", max_wait=1.5, timeout=1.0)
    assert time.monotonic() - began >= 1.5
