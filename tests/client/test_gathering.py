"""Puts of one client that are sent as one: each caller gets what it would get alone, whatever becomes of the others."""

import asyncio
import pickle
from collections import Counter

import numpy as np
import pytest
from client_support import make_client
from fake_server import FakeController, FakeStorage, Script, abort_with, serving
from gathered_puts import COUNT, REFUSALS, Sent, assert_alike, at_once, many_threads, outcomes_of, row, seen, values_of
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer, LoopThread
from property_settings import examples

import tq_service as tq
from tq_service.client.gathering import MOST_ROWS
from tq_service.client.requests import new_id
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import INLINE_BYTES


@pytest.mark.parametrize("return_meta", ["written", "all"])
@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_reaches_its_caller_and_leaves_the_others_as_they_would_be_alone(client, name, return_meta):
    gathered = await outcomes_of(client, name, "gathered", return_meta, gathers=True)
    alone = await outcomes_of(client, name, "alone", return_meta, gathers=False)
    assert_alike(gathered, alone)
    assert await values_of(client, gathered) == await values_of(client, alone)


KEYS = [f"known{number}" for number in range(4)]
CALLS = st.fixed_dictionaries(
    {"key": st.sampled_from(["", "new", "known", "unknown"]), "mode": st.sampled_from([None, "new", "existing"])},
    optional={
        "meta": st.integers(0, 3),
        "group": st.booleans(),
        "state": st.sampled_from(["live", "held"]),
        "text": st.booleans(),
        "rows": st.integers(1, 2),
        "all": st.booleans(),
        "length": st.integers(1, 3),
    },
)


def call_of(drawn, number, partition):
    rows = drawn.get("rows", 1)
    names = {"new": f"new{number}-{{}}", "known": f"known{number}-{{}}", "unknown": f"unknown{number}-{{}}"}
    call = {"data": {"x": np.full((rows, 1), number)}, "target": partition}
    if drawn.get("text"):
        call["data"]["text"] = [f"{number}-{place}" for place in range(rows)]
    if "length" in drawn:
        call["data"]["tokens"] = np.full((rows, drawn["length"]), number)
    if drawn["key"]:
        call |= {"keys": [names[drawn["key"]].format(place) for place in range(rows)], "key_mode": drawn["mode"]}
    if "meta" in drawn:
        call["custom_meta"] = [{"number": number + drawn["meta"]}] * rows
    if drawn.get("group") and drawn["key"] != "known":
        call["groups"] = [f"g{number}"] * rows
    if "state" in drawn:
        call["state"] = drawn["state"]
    if drawn.get("all"):
        call["return_meta"] = "all"
    return call


@pytest.fixture(scope="module")
def live_service():
    loop = LoopThread()
    with LiveServer(loop) as server:
        yield server
    loop.stop()


@given(drawn=st.lists(CALLS, min_size=3, max_size=40))
@examples(8)
def test_whatever_is_put_at_once_ends_as_it_would_one_after_the_other(live_service, drawn):
    async def put_all(*, gathers):
        partition = new_id().hex()
        async with tq.AsyncClient(live_service.address, timeout=60, gathers_puts=gathers) as client:
            known = [f"known{number}-{place}" for number in range(len(drawn)) for place in range(2)]
            await client.put(partition, {"x": np.zeros((len(known), 1), np.int64)}, keys=known)
            calls = [client.put(**call_of(each, number, partition)) for number, each in enumerate(drawn)]
            if gathers:
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            else:
                outcomes = [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls]
            values = [
                None if isinstance(each, Exception) else (await client.get_data(each, data_fields=["x"]))["x"].tolist()
                for each in outcomes
            ]
            count = (await client.describe_partition(partition)).summary.inserted_count
            return list(map(seen, outcomes)), values, count

    gathered, alone = (asyncio.run(put_all(gathers=gathers)) for gathers in (True, False))
    assert gathered == alone


async def test_two_callers_with_one_new_key_are_told_apart(client):
    calls = [
        {"data": row(number), "target": "p", "keys": [f"k{number % 11}"], "key_mode": "new"} for number in range(COUNT)
    ]
    _, outcomes = await at_once(client, calls)
    refused = [number for number, each in enumerate(outcomes) if isinstance(each, tq.errors.AlreadyExistsError)]
    assert len(refused) == 1
    assert refused[0] in (0, 11)
    assert len({each.global_indexes[0] for each in outcomes if not isinstance(each, Exception)}) == 11


async def test_a_put_alone_is_sent_at_once_and_puts_that_differ_are_not_mixed(client):
    sent = Sent(client)
    await client.put("p", {"x": [1]})
    assert sent.row_counts == [1]
    calls = [
        {"data": {"x": [1]}, "target": "p"},
        {"data": {"x": [1]}, "target": "q"},
        {"data": {"x": [1, 2]}, "target": "p"},
        {"data": {"y": [1]}, "target": "p"},
        {"data": {"x": [1]}, "target": "p", "keys": ["a"]},
        {"data": {"x": [1]}, "target": "p", "state": "held"},
        {"data": {"x": [1]}, "target": "p", "custom_meta": [{"a": 1}]},
        {"data": {"x": [1]}, "target": "p", "custom_meta": [{"a": "text"}]},
        {"data": {"x": [1]}, "target": "p", "custom_meta": [{"a": None}]},
        {"data": {"x": [1]}, "target": "p", "return_meta": "all"},
    ]
    await asyncio.gather(*(client.put(**call) for call in calls))
    assert len(sent.joints) == 1 + len(calls)


async def test_a_batch_is_bounded_in_rows_and_bytes(client):
    sent, _ = await at_once(client, [{"data": {"x": np.arange(100)}, "target": "p"}] * 20)
    assert max(sent.row_counts) == MOST_ROWS // 100 * 100
    size = INLINE_BYTES // 3
    sent, _ = await at_once(client, [{"data": {"x": np.zeros((1, size), np.uint8)}, "target": "q"}] * 20)
    assert max(sent.row_counts) == 3
    sent, _ = await at_once(client, [{"data": {"x": np.zeros((1, size), np.uint8)}, "target": "q"}])
    assert sent.row_counts == [1]


async def test_a_client_that_does_not_gather_says_so_and_sends_each_put_by_itself(service):
    async with tq.AsyncClient(service, gathers_puts=False) as client:
        assert repr(client).endswith(", gathers_puts=False)")
        assert not pickle.loads(pickle.dumps(client)).gathers_puts
        assert pickle.loads(pickle.dumps(tq.AsyncClient(service))).gathers_puts
        sent = Sent(client)
        await asyncio.gather(*(client.put("p", {"x": [1]}) for _ in range(20)))
        assert sent.row_counts == [1] * 20
        assert {joint.request.write.rows_per_put for joint in sent.joints} == {0}


async def test_samples_without_data_and_inserts_are_gathered_too(client):
    many_threads()
    sent = Sent(client, is_held=True)
    puts = [
        asyncio.ensure_future(client.put("p", keys=[f"k{number}"], custom_meta=[{"n": number}]))
        for number in range(COUNT)
    ]
    inserts = [asyncio.ensure_future(client.insert("q", keys=[f"k{number}"])) for number in range(COUNT)]
    await sent.until(2 * COUNT)
    sent.let_go()
    for number, meta in enumerate(await asyncio.gather(*puts)):
        assert (meta.keys, meta.custom_meta) == ([f"k{number}"], [{"n": number}])
    for number, meta in enumerate(await asyncio.gather(*inserts)):
        assert (meta.keys, meta.partition_id) == ([f"k{number}"], "q")
    assert sum(sent.row_counts) == 2 * COUNT > len(sent.joints)
    found, _ = await client.lookup_samples("p", [f"k{number}" for number in range(COUNT)])
    assert found.custom_meta == [{"n": number} for number in range(COUNT)]


# Cancellation and deadlines


def number_of(member):
    return int(np.frombuffer(member.put.columns[0].chunks[0], np.int64)[0])


async def test_a_caller_that_is_cancelled_before_it_is_sent_leaves_the_batch(service):
    async with tq.AsyncClient(service, timeout=30) as client:
        sent = Sent(client, is_held=True)
        calls = [asyncio.ensure_future(client.put("p", {"x": [number]})) for number in range(COUNT)]
        await sent.until_sent(2)
        leaving = [number_of(member) for member in list(sent.line().waiting)[:2]]
        for number in leaving:
            calls[number].cancel()
        await sent.until(COUNT - 2)
        sent.let_go()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [number for number, each in enumerate(outcomes) if isinstance(each, BaseException)] == leaving
        assert (await client.describe_partition("p")).summary.inserted_count == COUNT - 2


@pytest.mark.parametrize("is_leader", [True, False])
async def test_a_caller_that_is_cancelled_afterwards_leaves_the_others_their_answer(service, is_leader):
    async with tq.AsyncClient(service, timeout=30) as client:
        sent = Sent(client, is_held=True)
        calls = [asyncio.ensure_future(client.put("p", {"x": [number]})) for number in range(COUNT)]
        await sent.until_sent(2)
        batch = max(sent.line().batches, key=lambda batch: len(batch.members))
        number = number_of(next(member for member in batch.members if member.leads == is_leader))
        calls[number].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[number]
        sent.let_go()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        found = [each for each in outcomes if not isinstance(each, BaseException)]
        assert len(found) == COUNT - 1
        assert len({meta.global_indexes[0] for meta in found}) == COUNT - 1
        assert (await client.describe_partition("p")).summary.inserted_count == COUNT  # once, by whoever led
        if is_leader:
            first, again = [joint for joint in sent.joints if joint is batch.joint]
            assert first is again


def answer(row_count):
    meta = metadata_pb2.BatchMeta(partition_id="p", incarnation=b"i" * 16)
    meta.global_indexes.extend(range(row_count))
    return storage_pb.PutResponse(commit=commit_pb2.CommitResponse(meta=meta))


class SlowStorage(FakeStorage):
    """Answers puts as `behaviour` does, given how many came before and the request."""

    def __init__(self, behaviour):
        super().__init__()
        self.behaviour = behaviour
        self.requests = []

    async def PutInline(self, request, context):  # noqa: N802  (the name of the rpc)
        self.requests.append(request.SerializeToString())
        await self.behaviour(len(self.requests), request, context)
        return storage_pb.PutInlineResponse(put=answer(request.header.row_count))


def embedded(storage):
    place = pb.PlacePutResponse(storages=[metadata_pb2.StorageEndpoint()], embedded=True, controller_id=b"c" * 16)
    return serving(FakeController(PlacePut=Script(place)), storage)


async def test_after_an_unknown_outcome_the_same_bytes_are_sent_again(kind):
    async def behave(count, request, context):
        if count % 2:
            await abort_with(context, tq.errors.UnavailableError("for now"))

    many_threads()
    storage = SlowStorage(behave)
    async with embedded(storage) as address:
        client = make_client(kind, address, timeout=30)
        metas = await asyncio.gather(*(client.put("p", {"x": [number]}) for number in range(COUNT)))
        await client.aclose()
    assert [meta.size for meta in metas] == [1] * COUNT
    times = Counter(storage.requests)
    assert max(times.values()) > 1
    headers = [storage_pb.PutInlineRequest.FromString(request).header for request in times]
    assert sum(header.row_count for header in headers) == COUNT
    assert len({header.commit.request_id for header in headers}) == len(headers)


async def test_an_outcome_that_stays_unknown_is_not_put_again_by_itself(kind):
    async def behave(count, request, context):
        await abort_with(context, tq.errors.InternalError("who knows"))

    many_threads()
    storage = SlowStorage(behave)
    async with embedded(storage) as address:
        client = make_client(kind, address, timeout=30)
        calls = [client.put("p", {"x": [number]}) for number in range(COUNT)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await client.aclose()
    assert set(map(type, outcomes)) == {tq.errors.InternalError}
    headers = [storage_pb.PutInlineRequest.FromString(request).header for request in set(storage.requests)]
    assert sum(header.row_count for header in headers) == COUNT


@pytest.mark.parametrize(
    "refusal", [tq.errors.LimitExceededError("too many calls"), tq.errors.UnauthenticatedError("who is it")]
)
async def test_a_call_that_is_not_let_in_does_not_say_what_became_of_the_try_before_it(kind, refusal):
    async def behave(count, request, context):
        await abort_with(context, refusal if request.SerializeToString() in storage.requests[:-1] else gone)

    many_threads()
    gone = tq.errors.UnavailableError("the connection broke")
    storage = SlowStorage(behave)
    async with embedded(storage) as address:
        client = make_client(kind, address, timeout=30)
        calls = [client.put("p", {"x": [number]}) for number in range(COUNT)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await client.aclose()
    assert {type(each) for each in outcomes} == {type(refusal)}
    headers = [storage_pb.PutInlineRequest.FromString(request).header for request in set(storage.requests)]
    assert sum(header.row_count for header in headers) == COUNT


async def test_a_put_without_capacity_is_sent_by_itself_and_so_are_those_that_follow(kind):
    async def behave(count, request, context):
        if request.header.never_waits:
            await abort_with(context, tq.errors.QuotaExceededError("full", retry_after_seconds=60.0))

    storage = SlowStorage(behave)
    async with embedded(storage) as address:
        client = make_client(kind, address, timeout=30)
        for _ in range(3):
            await client.put("p", {"x": [1]})
        await client.put("q", {"x": [1]})
        await client.aclose()
    headers = [storage_pb.PutInlineRequest.FromString(request).header for request in storage.requests]
    assert [header.never_waits for header in headers] == [True, False, False, False, True, False]
    assert len({header.commit.request_id for header in headers}) == len(headers)


async def test_each_caller_has_its_own_deadline(kind):
    async def behave(count, request, context):
        if count <= 2:
            await let_go.wait()

    many_threads()
    let_go = asyncio.Event()
    async with embedded(SlowStorage(behave)) as address:
        client = make_client(kind, address, timeout=60)
        sent = Sent(client)
        patient = [asyncio.ensure_future(client.put("p", {"x": [number]})) for number in range(4)]
        await sent.until(4)
        await sent.until_sent(2)
        hasty = [asyncio.ensure_future(client.put("p", {"x": [9]}, timeout=0.2)) for _ in range(4)]
        for call in hasty:
            with pytest.raises(tq.errors.DeadlineError, match=r"0\.2 s"):
                await call
        await sent.until(4)
        let_go.set()
        assert [meta.size for meta in await asyncio.gather(*patient)] == [1] * 4
        assert sum({id(joint): joint.request.write.row_count for joint in sent.joints}.values()) == 4
        await client.aclose()


async def test_during_an_outage_each_caller_is_told_why(kind):
    many_threads()
    client = make_client(kind, "127.0.0.1:1", timeout=8)
    outcomes = await asyncio.gather(*(client.put("p", {"x": [1]}) for _ in range(COUNT)), return_exceptions=True)
    assert set(map(type, outcomes)) == {tq.errors.UnavailableError}
    assert all("cannot reach 127.0.0.1:1" in str(each) and "tried for 8 s" in str(each) for each in outcomes)
    await client.aclose()


async def test_a_caller_that_goes_on_in_its_last_moment_is_told_of_the_tries_before(kind):
    """Two calls are under way, so two callers find the service unavailable; the others have no time for a try."""
    tries = []

    def send(joint, deadline, note):
        tries.append(joint)
        if len(tries) > 2:
            raise tq.errors.DeadlineError("no answer in 1 ms")
        failure = tq.errors.UnavailableError("cannot reach it")
        note(failure)
        raise failure

    async def send_async(*arguments):
        send(*arguments)

    many_threads()
    client = make_client(kind, "127.0.0.1:1", timeout=8)
    real = getattr(client, "client", client)
    real._send = send_async if real is client else send
    sent = Sent(client, is_held=True)
    calls = [asyncio.ensure_future(client.put("p", {"x": [1]})) for _ in range(COUNT)]
    await sent.until(COUNT)
    sent.let_go()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert len(tries) > 2
    assert set(map(type, outcomes)) == {tq.errors.UnavailableError}
    assert sum("cannot reach it; tried for 8 s" in str(each) for each in outcomes) >= COUNT - 2
    await client.aclose()


async def test_closing_a_client_sends_what_was_gathered(kind, service):
    many_threads()
    client = make_client(kind, service, timeout=30)
    sent = Sent(client, is_held=True)
    calls = [asyncio.ensure_future(client.put("p", {"x": [number]})) for number in range(COUNT)]
    await sent.until(COUNT)
    closing = asyncio.ensure_future(client.aclose())
    await asyncio.sleep(0)
    sent.let_go()
    await closing
    assert [meta.size for meta in await asyncio.gather(*calls)] == [1] * COUNT
    with pytest.raises(tq.errors.PreconditionError):
        await client.put("p", {"x": [1]})


async def test_closing_a_client_awaits_puts_that_are_answered_after_what_was_gathered(kind):
    is_second_there, is_third_there, is_closing = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def behave(count, request, context):
        if count == 2:
            is_second_there.set()
            await is_third_there.wait()
            await asyncio.sleep(0.3)
        elif count > 2:
            is_third_there.set()
        elif count == 1:
            await is_closing.wait()

    many_threads()
    storage = SlowStorage(behave)
    async with embedded(storage) as address:
        client = make_client(kind, address, timeout=30)
        sent = Sent(client)
        calls = [asyncio.ensure_future(client.put("p", {"x": [number]})) for number in range(COUNT)]
        await sent.until(COUNT)
        await is_second_there.wait()
        closing = asyncio.ensure_future(client.aclose())
        await asyncio.sleep(0)
        is_closing.set()
        await closing
        assert [meta.size for meta in await asyncio.gather(*calls)] == [1] * COUNT
        assert len(storage.requests) > 2


async def test_a_closed_client_does_not_wait_for_puts_that_nobody_answers(kind):
    async def behave(count, request, context):
        await asyncio.Event().wait()

    many_threads()
    async with embedded(SlowStorage(behave)) as address:
        client = make_client(kind, address, timeout=600)
        sent = Sent(client)
        calls = [asyncio.ensure_future(client.put("p", {"x": [number]})) for number in range(COUNT)]
        await sent.until(COUNT)
        await client.aclose()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in outcomes} <= {tq.errors.CallCancelledError, tq.errors.PreconditionError}


# Limits


async def test_puts_that_wait_for_capacity_do_not_wait_for_each_other(client):
    limit = tq.Admission("t", 3)
    await client.create_partition("p", admissions=[limit])
    many_threads()
    calls = [asyncio.ensure_future(client.put("p", {"x": [number]}, groups=[f"g{number}"])) for number in range(COUNT)]
    taken = []
    while len(taken) < COUNT:
        meta = await client.get_meta(
            partition_id="p", task_name="t", data_fields=["x"], batch_size=1, max_wait=20, timeout=20
        )
        taken += (await client.get_data(meta))["x"].tolist()
    await asyncio.gather(*calls)
    assert sorted(taken) == list(range(COUNT))


async def test_a_member_of_a_group_passes_puts_without_capacity(client):
    limit = tq.Admission("t", 2)
    await client.create_partition("p", admissions=[limit])
    many_threads()
    await client.put("p", {"x": [0]}, groups=["begun"])
    waiting = [
        asyncio.ensure_future(client.put("p", {"x": [1]}, groups=[f"g{number}"], timeout=60)) for number in range(COUNT)
    ]
    while (await client.describe_partition("p")).waiting_put_count < COUNT - 1:
        pass
    assert (await client.put("p", {"x": [2]}, groups=["begun"], timeout=20)).size == 1
    await client.clear_partition("p")
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_partition_is_sealed_by_the_put_that_reaches_its_size(client):
    await client.create_partition("p", expected_samples=8)
    _, outcomes = await at_once(client, [{"data": {"x": [1]}, "target": "p"}] * COUNT)
    refused = [each for each in outcomes if isinstance(each, tq.errors.PartitionSealedError)]
    assert len(refused) == COUNT - 8
    assert (await client.describe_partition("p")).summary.inserted_count == 8
