"""Calls of an AsyncClient that are under way together: in a stream, and each as if it were made by itself."""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from certificates import add_token
from fake_server import FakeController, Script, abort_with, pb, serving

import tq_service as tq
from tq_service.client import call_stream, transport
from tq_service.client.transport import Deadline
from tq_service.config import ServeSettings
from tq_service.server.app import running
from tq_service.server.rpc import batches
from tq_service.testing import ServiceProcess
from tq_service.v1.metadata_pb2 import BATCH_STATUS_END

TRAIN = {"partition_id": "train", "task_name": "t", "data_fields": ["x"]}
QUEUE = {**TRAIN, "batch_size": 1}
WAITS = {**TRAIN, "task_name": "other", "data_fields": ["later"], "batch_size": 1, "max_wait": 60.0}
RANKS = 8


def rank(number, **more):
    return {**TRAIN, "batch_size": 2, "dp_rank": number, "dp_size": RANKS, "batch_index": 0, **more}


def streams_of(client):
    return client._calls.endpoint("").unary._streams


@contextlib.asynccontextmanager
async def beside_one_that_waits(client):
    """Have a call under way, so that all others go in a stream."""
    waits = asyncio.ensure_future(client.get_meta(**WAITS))
    await asyncio.sleep(0.05)
    try:
        yield waits
    finally:
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)


@pytest.fixture
async def app():
    async with running(ServeSettings(host="127.0.0.1", port=0, max_bytes=64 << 20, stall_seconds=30)) as app:
        yield app


@pytest.fixture
async def client(app):
    async with tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20) as client:
        await client.put("train", {"x": np.arange(64)})
        yield client


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (of the service)
            await asyncio.sleep(0.01)


async def test_one_call_goes_alone_and_several_go_together(client):
    await client.get_meta(**rank(0))
    await client.put("other", {"x": np.arange(2)})
    assert streams_of(client) == []
    metas = await asyncio.gather(*(client.get_meta(**rank(number)) for number in range(RANKS)))
    assert sorted(index for meta in metas for index in meta.global_indexes) == list(range(16))
    (stream,) = streams_of(client)
    assert next(stream._ids) == RANKS  # all but the first
    assert metas[0] == await client.get_meta(**rank(0))
    assert next(stream._ids) == RANKS + 1


async def test_acks_extensions_and_releases_go_together_too(client):
    async with beside_one_that_waits(client):
        metas = await asyncio.gather(*(client.get_meta(**QUEUE, lease=60.0) for _ in range(3)))
        counts = await asyncio.gather(client.ack(metas[0]), client.extend(metas[1], 30.0), client.release(metas[2]))
    assert counts == [1, 1, 1]
    (stream,) = streams_of(client)
    assert next(stream._ids) >= 7  # the one that waits may ask again meanwhile
    assert (await client.check_consumption("train", "t")).consumed_count == 2


async def _expired(client):
    meta = await client.get_meta(**QUEUE, lease=0.05)
    await asyncio.sleep(0.3)
    await client.ack(meta)


async def _disagree(client):
    await client.get_meta(**rank(0, task_name="d"))
    await client.get_meta(**rank(1, task_name="d", batch_size=3))


async def _wait_for(client, seconds):
    request = pb.GetMetaRequest(request_id=b"i" * 16, partition_id="train", task_name="t", data_fields=["later"])
    request.batch_size = request.max_wait.seconds = 50
    await client._calls.unary_once(pb.GetMetaResponse, request, Deadline.after(seconds))


async def _undeclared(client):
    await client.create_partition("declared", tasks=["a"])
    await client.get_meta(**{**QUEUE, "partition_id": "declared", "max_wait": 0})


REFUSED = {
    "an argument": lambda client: client.get_meta(**{**QUEUE, "data_fields": []}),
    "an unknown sampler": lambda client: client.get_meta(**QUEUE, sampler="none"),
    "another incarnation": lambda client: client.get_meta(**QUEUE, incarnation=b"i" * 16),
    "another epoch": lambda client: client.get_meta(**rank(0, epoch=7)),
    "a task that is not declared": _undeclared,
    "ranks that disagree": _disagree,
    "a lease that is over": _expired,
    "a deadline": lambda client: _wait_for(client, 0.3),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_errors_are_those_of_calls_by_themselves(app, name):
    found = []
    for is_alone in (True, False):
        async with tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20) as client:
            if is_alone:
                await client.put("train", {"x": np.arange(64)})
            async with contextlib.AsyncExitStack() as stack:
                if not is_alone:
                    await stack.enter_async_context(beside_one_that_waits(client))
                with pytest.raises(tq.TqError) as caught:
                    await REFUSED[name](client)
            assert bool(streams_of(client)) != is_alone
        error = caught.value
        found.append((type(error), error.message, error.reason, error.metadata))
    alone, together = found
    assert alone[0] is together[0]
    assert alone[2:] == together[2:]
    assert _without_ids(alone[1]) == _without_ids(together[1])


def _without_ids(message):
    return " ".join(word for word in message.split() if not any(digit in word for digit in "0123456789"))


async def test_a_call_that_is_cancelled_leaves_the_others_and_waits_no_more(app, client):
    async with beside_one_that_waits(client):
        calls = [asyncio.ensure_future(client.get_meta(**WAITS)) for _ in range(4)]
        await until(lambda: app.waiting.count == 5)
        calls[0].cancel()
        calls[2].cancel()
        await until(lambda: app.waiting.count == 3)
        assert [call.done() for call in calls] == [True, False, True, False]
        never_sent = asyncio.ensure_future(client.get_meta(**QUEUE))
        await asyncio.sleep(0)
        never_sent.cancel()
        await asyncio.gather(never_sent, return_exceptions=True)
        for call in calls:
            call.cancel()
    await until(lambda: app.waiting.count == 0)
    assert (await client.check_consumption("train", "t", missing_ok=True)).consumed_count == 0


async def test_a_deadline_ends_one_call_here_and_there(app, client):
    async with beside_one_that_waits(client):
        late = asyncio.ensure_future(_wait_for(client, 1.0))
        await until(lambda: app.waiting.count == 2)
        with pytest.raises(tq.errors.DeadlineError):
            await late
        await until(lambda: app.waiting.count == 1)
        assert (await client.get_meta(**QUEUE)).size == 1


async def test_a_stream_that_is_not_used_ends(app, client, monkeypatch):
    monkeypatch.setattr(call_stream, "_IDLE_SECONDS", 0.1)
    async with beside_one_that_waits(client):
        await client.get_meta(**QUEUE)
        (stream,) = streams_of(client)
        await until(lambda: stream.is_over)
        await until(lambda: not app.controller.batches._streams)
        await until(stream._reader.done)  # it learns of the end after the service
        assert not stream.is_refused
        await client.get_meta(**QUEUE)
        assert streams_of(client) != [stream]


async def test_calls_go_alone_where_streams_are_refused_and_again_in_one_later(app, client, monkeypatch):
    monkeypatch.setattr(app.controller.batches, "_places", batches.WaitingCalls(0, 2, "call_streams"))
    monkeypatch.setattr(transport, "_REFUSED_SECONDS", 0.5)
    metas = await asyncio.gather(*(client.get_meta(**rank(number)) for number in range(RANKS)))
    assert sorted(index for meta in metas for index in meta.global_indexes) == list(range(16))
    (refused,) = streams_of(client)
    assert refused.is_refused
    await asyncio.gather(*(client.get_meta(**rank(number)) for number in range(RANKS)))
    assert streams_of(client) == [refused]  # it is not tried with each call
    monkeypatch.setattr(app.controller.batches, "_places", batches.WaitingCalls())
    await asyncio.sleep(0.6)
    await asyncio.gather(*(client.get_meta(**rank(number)) for number in range(RANKS)))
    assert not streams_of(client)[-1].is_refused


async def test_calls_go_alone_beyond_those_that_a_stream_takes(app, client, monkeypatch):
    monkeypatch.setattr(call_stream, "MOST_BATCHED_CALLS", 3)
    calls = [asyncio.ensure_future(client.get_meta(**WAITS)) for _ in range(6)]
    await until(lambda: app.waiting.count == 6)
    assert len(streams_of(client)[0]._waiting) == 3
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: app.waiting.count == 0)


async def test_a_large_request_goes_alone(client):
    async with beside_one_that_waits(client):
        found = await client.get_meta(**QUEUE, where=[("tag", "in", [f"{n:0100}" for n in range(200)])], max_wait=0)
        assert found.status == "not_yet"
    assert streams_of(client) == []


async def test_calls_of_a_stream_that_breaks_are_made_again_under_the_same_ids():
    seen = []

    class Breaks(FakeController):
        async def CallMany(self, requests, context):  # noqa: N802  (the name of the rpc)
            async for message in requests:
                seen.append([pb.GetMetaRequest.FromString(call.request).request_id for call in message.calls])
                if len(seen) == 1:
                    await abort_with(context, tq.errors.UnavailableError("broken"))
                answers = [
                    pb.BatchedAnswer(call_id=call.call_id, answer=claimed.SerializeToString()) for call in message.calls
                ]
                await context.write(pb.CallManyResponse(answers=answers))

    claimed = pb.GetMetaResponse()
    claimed.meta.status = BATCH_STATUS_END
    script = Script(asyncio.Event(), claimed)
    async with serving(Breaks(GetMeta=script)) as address, tq.AsyncClient(address, timeout=20) as client:
        first = asyncio.ensure_future(client.get_meta(**WAITS))
        await script.entered.wait()
        await asyncio.gather(*(client.get_meta(**QUEUE) for _ in range(3)))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert len(seen[0]) == 3
    assert sorted(seen[0]) == sorted(request_id for some in seen[1:] for request_id in some)


async def test_closing_the_client_ends_calls_in_a_stream(client):
    calls = [asyncio.ensure_future(client.get_meta(**WAITS)) for _ in range(4)]
    await asyncio.sleep(0.2)
    await client.aclose()
    assert {type(each) for each in await asyncio.gather(*calls, return_exceptions=True)} == {
        tq.errors.CallCancelledError
    }


async def test_a_new_token_opens_another_stream_and_the_old_one_ends_with_its_calls(tmp_path):
    tokens, token = tmp_path / "tokens.toml", tmp_path / "token"
    token.write_text(add_token(tokens, "first", ["consume", "produce"]))
    settings = ServeSettings(host="127.0.0.1", port=0, auth_tokens_file=str(tokens))
    async with running(settings) as app, tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=20, token=token) as client:
        await client.put("train", {"x": np.arange(64)})
        async with beside_one_that_waits(client):
            await client.get_meta(**QUEUE)
            second = add_token(tokens, "second", ["consume", "produce"])
            await until(lambda: len(app.listener._tokens.tokens) == 2)
            token.write_text(second)
            os.utime(token, (time.time() + 5, time.time() + 5))
            await asyncio.sleep(1.2)
            assert (await client.get_meta(**QUEUE)).size == 1
            assert len(streams_of(client)) == 2
            assert len({stream.token for stream in streams_of(client)}) == 2


async def test_a_claim_that_was_durable_but_not_answered_is_answered_by_the_retry(tmp_path):
    """The service is killed when the ranges of several ranks, in one stream, are durable and not answered."""
    marker = tmp_path / "marker"
    command = (sys.executable, str(Path(__file__).with_name("service_killed_before_answering.py")), str(marker))
    with ServiceProcess("--durability", "process", data_dir=tmp_path / "data", command=command) as server:
        async with tq.AsyncClient(server.address, timeout=60) as client:
            await client.put("train", {"x": np.arange(64)})
            waits = asyncio.ensure_future(client.get_meta(**WAITS))
            await asyncio.sleep(0.2)
            marker.touch()
            claiming = [
                asyncio.ensure_future(client.get_meta(**rank(number), batch_count=2)) for number in range(RANKS)
            ]
            await asyncio.to_thread(server.wait, 60)
            assert not marker.exists()
            assert streams_of(client)
            await asyncio.to_thread(server.start)
            ranges = await asyncio.gather(*claiming)
            for index in range(2):
                got = [row for metas in ranges for row in metas[index].global_indexes if len(metas) > index]
                assert len(got) == len(set(got)) == 2 * RANKS
            again = await asyncio.gather(*(client.get_meta(**rank(number), batch_count=2) for number in range(RANKS)))
            assert again == ranges
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)


@pytest.mark.nightly
async def test_queue_claims_are_delivered_once_while_the_service_is_killed(tmp_path):
    with ServiceProcess("--durability", "process", data_dir=tmp_path) as server:
        async with tq.AsyncClient(server.address, timeout=60) as client:
            await client.put("train", {"x": np.arange(2_000)})
            taken = []

            async def work():
                while True:
                    meta = await client.get_meta(**QUEUE, max_wait=0, finite=True)
                    if meta.status == "end":
                        return
                    taken.extend(meta.global_indexes)

            workers = [asyncio.ensure_future(work()) for _ in range(8)]
            for _ in range(2):
                await asyncio.sleep(0.3)
                server.kill()
                await asyncio.to_thread(server.wait, 60)
                await asyncio.to_thread(server.start)
            await asyncio.gather(*workers)
            assert sorted(taken) == list(range(2_000))
