"""Clients that are closed while they are used: every call ends at once, with an error of ours."""

import asyncio
import logging

import pytest
import torch
from client_support import Awaited, make_client

import tq_service as tq

LARGE = {"x": torch.zeros(1, 1 << 18)}
QUEUE = {"partition_id": "later", "task_name": "t", "data_fields": ["x"], "batch_size": 1, "max_wait": 600.0}

CALLS = {
    "list_partitions": lambda client, meta: client.list_partitions(),
    "get_data": lambda client, meta: client.get_data(meta),
    "put": lambda client, meta: client.put("p", LARGE),
    "get_meta": lambda client, meta: client.get_meta(**QUEUE),
}


@pytest.fixture
async def meta(service):
    async with tq.AsyncClient(service, timeout=60) as client:
        return await client.put("p", LARGE)


async def until_it_fails(call):
    with pytest.raises(tq.TqError) as caught:
        while True:
            await call()
    return caught.value


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 20, 60])
async def test_async_calls_end_when_their_client_is_closed(service, meta, call, steps, caplog):
    client = tq.AsyncClient(service, timeout=600)
    calls = [asyncio.ensure_future(until_it_fails(lambda: call(client, meta))) for _ in range(3)]
    for _ in range(steps):
        await asyncio.sleep(0)
    await client.aclose()
    errors = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert {type(error) for error in errors} <= {tq.errors.CallCancelledError, tq.errors.PreconditionError}
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_sync_calls_end_when_their_client_is_closed_by_another_thread(service, meta, call, caplog):
    for number in range(12):
        client = Awaited(tq.Client(service, timeout=600))
        calls = [asyncio.ensure_future(until_it_fails(lambda: call(client, meta))) for _ in range(3)]  # noqa: B023
        await asyncio.sleep(number / 1000)
        await client.aclose()
        errors = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert {type(error) for error in errors} <= {tq.errors.CallCancelledError, tq.errors.PreconditionError}
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 20, 60])
async def test_a_put_that_is_cancelled_is_cancelled_and_its_client_goes_on(service, steps):
    async with tq.AsyncClient(service, timeout=60) as client:
        await client.list_partitions()
        call = asyncio.ensure_future(client.put("p", LARGE, keys=["k"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await client.put("p", LARGE, keys=["k"])).keys == ["k"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_call_that_waits_to_be_tried_again_ends_with_its_client(kind):
    client = make_client(kind, "127.0.0.1:1", timeout=600)
    call = asyncio.ensure_future(until_it_fails(client.list_partitions))
    await asyncio.sleep(0.2)
    await client.aclose()
    assert isinstance(await asyncio.wait_for(call, 60), tq.errors.PreconditionError | tq.errors.CallCancelledError)
