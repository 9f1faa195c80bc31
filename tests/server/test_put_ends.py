"""Every put comes to an end: its samples have it, or its storage service frees it, whatever happens to its commit.

A put is committed on the strength of its receipt, and its storage service hears of that later, or never; what is
between the two must neither leave a put that nobody knows of, nor free one that samples have.
"""

import asyncio
import contextlib
import os
import random

import grpc
import pytest
from split_driver import TTL_SECONDS, split_service

from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    PartitionNotFoundError,
    PutNotFoundError,
    TqError,
    UnavailableError,
)
from tq_service.internal.v1 import storage_registry_pb2
from tq_service.v1 import commit_pb2


@pytest.fixture
async def split(monkeypatch):
    async with split_service(monkeypatch) as service:
        yield service


def impossible(request):
    """Return a commit of the same put that is refused: of a key that is not there."""
    other = commit_pb2.CommitRequest()
    other.CopyFrom(request)
    other.request_id = os.urandom(16)
    unknown = [f"unknown-{number}" for number in range(other.write.row_count)]
    other.write.keys.extend(unknown)
    other.write.key_mode = commit_pb2.KEY_MODE_EXISTING
    return other


def again(request):
    """Return the commit under another request_id."""
    other = commit_pb2.CommitRequest()
    other.CopyFrom(request)
    other.request_id = os.urandom(16)
    return other


async def test_a_put_that_is_committed_stays(split):
    await split.commit(await split.store())
    assert await split.settled() == 1
    assert split.lost_puts() == []
    await split.clear()
    assert await split.settled() == 0


async def test_a_put_takes_no_call_between_services_and_many_are_confirmed_in_one(split):
    before = len(split.link.calls)
    for _ in range(20):
        await split.commit(await split.store())
        assert split.link.calls[before:] in ([], ["UpdatePuts"])
        split.link.calls[before:] = []
    requests = [await split.store() for _ in range(20)]
    await asyncio.gather(*map(split.commit, requests))
    await split.until(lambda: split.engine.stat().uncommitted_put_count == 0)
    assert split.link.calls[before:] == ["UpdatePuts"]


async def test_a_client_that_leaves_while_its_commit_waits_leaves_no_put(split):
    request = await split.store()
    split.hold(request)
    commit = split.commit(request)
    await split.turns(20)
    commit.cancel()
    await asyncio.wait([commit])
    assert await split.settled() == 0


async def test_a_put_whose_commit_waits_for_long_stays(split):
    request = await split.store()
    gate = split.hold(request)
    commit = split.commit(request)
    await split.turns(20)
    assert await split.settled() == 1
    gate.set()
    await commit
    assert await split.settled() == 1
    assert split.lost_puts() == []


@pytest.mark.parametrize("what", ["lose_request", "lose_answer"])
async def test_a_confirmation_that_gets_lost_comes_again(split, what):
    for _ in range(3):
        split.link.add("UpdatePuts", **{what: True})
    await split.commit(await split.store())
    await split.until(lambda: split.engine.stat().uncommitted_put_count == 0)
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_put_that_is_committed_and_not_confirmed_is_not_dropped(split):
    split.link.add("UpdatePuts", hold_request=True)
    await split.commit(await split.store())
    split.now += TTL_SECONDS + 1
    await split.heartbeats()
    assert split.engine.stat().put_count == 1  # it has asked
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_commit_with_a_valid_receipt_that_comes_after_the_question_is_refused(split):
    request = await split.store()
    split.now += TTL_SECONDS + 1
    fault = split.to_controller.add("RegisterStorage", hold_answer=True)
    await split.until(lambda: fault.is_made)  # it is said to be unknown, but still here
    with pytest.raises(PutNotFoundError, match="expired without a commit"):
        await split.commit(request)
    assert split.engine.stat().put_count == 1
    fault.answer.set()
    assert await split.settled() == 0
    await split.commit(await split.store(request.placement.put_id))
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_commit_that_comes_before_the_question_keeps_the_put(split):
    request = await split.store()
    split.now += TTL_SECONDS + 1
    fault = split.to_controller.add("RegisterStorage", hold_request=True)
    await split.turns(50)
    split.link.add("UpdatePuts", hold_request=True)
    await split.commit(request)
    fault.request.set()
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_receipt_is_void_once_a_controller_starts_again_and_the_put_gets_another_one(split):
    """The controller knows no more which puts it has said to be unknown, or has freed."""
    request = await split.store()
    split.restart_controller()
    await split.heartbeats()
    with pytest.raises(PutNotFoundError, match="was issued before its storage service or this controller restarted"):
        await split.commit(request)
    assert split.engine.stat().put_count == 1
    other = await split.store(request.placement.put_id)
    assert other.placement.receipt != request.placement.receipt
    await split.commit(other)
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_put_that_gets_another_receipt_while_it_is_asked_about_stays(split):
    request = await split.store()
    split.now += TTL_SECONDS + 1
    fault = split.to_controller.add("RegisterStorage", hold_answer=True)
    await split.until(lambda: fault.is_made)
    with pytest.raises(PutNotFoundError):
        await split.commit(request)
    last = await split.store(request.placement.put_id)
    fault.answer.set()
    await split.heartbeats()
    await split.commit(last)
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_storage_service_that_starts_again_gives_receipts_that_only_count_from_then_on(split):
    request = await split.store()
    await split.reconciled()
    with pytest.raises(PutNotFoundError, match="was issued before its storage service or this controller restarted"):
        await split.commit(request)
    await split.commit(await split.store(request.placement.put_id))
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_commit_that_is_refused_frees_its_put_at_once(split):
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(await split.store()))
    await split.until(lambda: split.engine.stat().put_count == 0)


async def test_a_receipt_of_a_put_that_was_refused_or_cleared_is_spent(split):
    refused, cleared = await split.store(), await split.store()
    split.link.add("UpdatePuts", hold_request=True)
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(refused))
    await split.commit(cleared)
    await split.clear()
    for request in (refused, cleared):
        with pytest.raises(PutNotFoundError, match="was freed"):
            await split.commit(again(request))
    assert split.lost_puts() == []


async def test_a_spent_receipt_stays_so_after_its_put_is_gone(split):
    refused, cleared = await split.store(), await split.store()
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(refused))
    await split.commit(cleared)
    await split.clear()
    await split.until(lambda: split.engine.stat().put_count == 0)
    await split.turns(50)
    for request in (refused, cleared):
        with pytest.raises(PutNotFoundError, match="was freed"):
            await split.commit(again(request))
    assert list(split.catalog.names()) == []


async def test_a_partition_that_is_cleared_while_a_commit_waits_leaves_no_put(split):
    first = await split.commit(await split.store())
    request = await split.store()
    request.write.incarnation = first.meta.incarnation
    gate = split.hold(request)
    commit = split.commit(request)
    await split.turns(20)
    await split.clear()
    gate.set()
    with pytest.raises(PartitionNotFoundError):
        await commit
    assert await split.settled() == 0


async def test_a_retry_beside_a_call_that_is_given_up_commits_the_put(split):
    request = await split.store()
    gate = split.hold(request)
    first = split.commit(request)
    await split.turns(20)
    second = split.commit(request)
    await split.turns(20)
    first.cancel()
    await asyncio.wait([first])
    split.now += 3 * TTL_SECONDS
    await split.turns(50)
    gate.set()
    await second
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_two_calls_that_are_both_given_up_leave_no_put(split):
    request = await split.store()
    other = again(request)
    for each in (request, other):
        split.hold(each)
    commits = [split.commit(request), split.commit(other)]
    await split.turns(20)
    for commit in commits:
        commit.cancel()
        await asyncio.wait([commit])
    assert await split.settled() == 0


async def test_a_call_that_is_refused_does_not_free_the_put_of_one_that_is_about_to_commit_it(split):
    request = await split.store()
    gate = split.hold(request)
    commit = split.commit(request)
    await split.turns(20)
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(request))
    await split.turns(50)
    gate.set()
    await commit
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_put_that_is_refused_and_then_given_up_by_another_call_goes(split):
    request = await split.store()
    split.hold(request)
    commit = split.commit(request)
    await split.turns(20)
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(request))
    assert split.engine.stat().put_count == 1
    commit.cancel()
    await asyncio.wait([commit])
    await split.until(lambda: split.engine.stat().put_count == 0)


async def test_a_put_that_is_cleared_while_it_is_committed_again_is_not_committed_without_its_bytes(split):
    request = await split.store()
    other = again(request)
    gate = split.hold(other)
    late = split.commit(other)
    await split.turns(20)
    await split.commit(request)
    await split.clear()
    await split.until(lambda: split.engine.stat().put_count == 0)
    gate.set()
    with pytest.raises(PutNotFoundError, match="was freed while another call was committing it"):
        await late
    assert split.lost_puts() == []
    assert await split.settled() == 0


async def test_a_second_commit_of_a_put_leaves_it_to_the_first(split):
    request = await split.store()
    await split.commit(request)
    with pytest.raises(AlreadyExistsError):
        await split.commit(again(request))
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_commit_that_is_made_again_after_its_put_was_cleared_gets_its_answer(split):
    request = await split.store()
    answer = await split.commit(request)
    await split.clear()
    assert await split.settled() == 0
    assert await split.commit(request) == answer


async def test_a_commit_that_was_made_with_another_put_has_its_second_one_freed(split):
    first, second = await split.store(), await split.store()
    second.request_id = first.request_id
    answer = await split.commit(first)
    assert await split.commit(second) == answer
    await split.until(lambda: split.engine.stat().put_count == 1)
    assert split.lost_puts() == []


async def test_two_puts_of_one_commit_at_once_leave_one(split):
    first, second = await split.store(), await split.store()
    second.request_id = first.request_id
    gate = split.hold(first)
    late = split.commit(first)
    await split.turns(20)
    del split.gates[second.request_id]
    answer = await split.commit(second)
    gate.set()
    assert await late == answer
    assert await split.settled() == 1
    assert split.lost_puts() == []


@pytest.mark.parametrize("what", ["lose_request", "lose_answer"])
async def test_what_is_freed_is_said_again_until_it_is_heard(split, what):
    await split.commit(await split.store())
    for _ in range(3):
        split.link.add("UpdatePuts", **{what: True})
    await split.clear()
    assert await split.settled() == 0


async def test_a_put_that_comes_again_while_its_free_is_repeated_is_committed_under_another_id(split):
    request = await split.store()
    await split.commit(request)
    await split.until(lambda: split.engine.stat().uncommitted_put_count == 0)
    fault = split.link.add("UpdatePuts", hold_answer=True, lose_answer=True)
    await split.clear()
    await split.until(lambda: fault.is_made)  # it is freed, and the controller does not know that
    same = await split.store(request.placement.put_id)
    with pytest.raises(PutNotFoundError, match="was freed"):
        await split.commit(same)
    other = await split.store()
    await split.commit(other)
    calls = len(split.link.calls)
    fault.answer.set()
    await split.until(lambda: len(split.link.calls) > calls)  # the same update again
    await split.turns(50)
    for late in (again(request), same):
        with pytest.raises(PutNotFoundError):
            await split.commit(late)
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_late_update_of_a_controller_that_has_ended_confirms_nothing_after_the_list_of_the_next(split):
    request = await split.store()
    late = split.link.add("UpdatePuts", hold_request=True)
    await split.commit(request)
    await split.until(lambda: "UpdatePuts" in split.link.calls)
    answer = split.to_controller.add("RegisterStorage", hold_answer=True)
    split.restart_controller()  # with the same id, and without the samples
    await split.until(lambda: answer.is_made)
    await split.until(lambda: any(stream.is_done for stream in split.link.streams[split._first_stream :]))
    late.request.set()  # the key of the next controller has not come yet
    await split.turns(50)
    assert split.engine.stat().uncommitted_put_count == 1
    answer.answer.set()
    assert await split.settled() == 0


async def test_a_connection_that_is_closed_during_a_call_ends_no_loop(split):
    """As where a certificate is replaced: gRPC raises CancelledError then, though nobody has cancelled anything."""
    split.link.add("UpdatePuts", lose_answer=True, error=asyncio.CancelledError())
    await split.commit(await split.store())
    await split.until(lambda: split.engine.stat().uncommitted_put_count == 0)
    split.link.add("UpdatePuts", lose_request=True, error=asyncio.CancelledError())
    await split.clear()
    await split.until(lambda: split.engine.stat().put_count == 0)


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_put_whose_commit_is_under_way_stays_where_it_is_said_which_puts_are_known(split, is_given_up):
    request = await split.store()
    gate = split.hold(request)
    commit = split.commit(request)
    await split.turns(20)
    await split.reconciled()
    assert split.engine.stat().put_count == 1
    if is_given_up:
        commit.cancel()
        await asyncio.wait([commit])
    gate.set()
    await asyncio.wait([commit])
    assert await split.settled() == (0 if is_given_up else 1)
    assert split.lost_puts() == []


@pytest.mark.parametrize("is_stable", [True, False])
async def test_puts_of_a_controller_that_is_gone_go_and_those_of_the_next_one_stay(split, is_stable):
    await split.commit(await split.store())
    await split.until(lambda: split.engine.stat().uncommitted_put_count == 0)
    fault = split.to_controller.add("RegisterStorage", hold_answer=True)
    split.is_stable = is_stable
    split.restart_controller()
    await split.until(lambda: fault.is_made)
    fault.answer.set()
    await split.heartbeats()
    assert split.engine.stat().put_count == (0 if is_stable else 1)  # another one may be a mistake: not at once
    await split.commit(await split.store())
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_puts_of_a_controller_that_comes_back_in_time_stay(split):
    await split.commit(await split.store())
    await split.until(lambda: split.engine.stat().uncommitted_put_count == 0)
    mine = split.controller
    split.is_stable = False
    split.restart_controller()
    await split.heartbeats()
    split.now += TTL_SECONDS - 1
    await split.heartbeats()
    split.to_controller._servicer = mine
    await split.heartbeats()
    split.now += 2 * TTL_SECONDS
    await split.heartbeats()
    assert split.engine.stat().put_count == 1


async def test_nothing_goes_while_the_controller_does_not_answer(split):
    await split.store()
    for _ in range(500):
        split.to_controller.add("RegisterStorage", lose_answer=True)
    assert await split.settled() == 1
    split.to_controller.faults.clear()
    assert await split.settled() == 0


async def test_a_heartbeat_that_asks_about_too_many_puts_is_refused(split):
    ask = storage_registry_pb2.RegisterStorageRequest(overdue_put_ids=[b"p"] * 4097)
    ask.storage.storage_id, ask.storage.address, ask.storage.boot_id = "s", "localhost:1", split.engine.boot_id
    with pytest.raises(InvalidArgumentError, match="expected at most 4096"):
        await split.controller.RegisterStorage(ask, None)


FAULTS = ["hold_request", "hold_answer", "lose_request", "lose_answer"]


@pytest.mark.parametrize(
    "seed", [*range(12), 198, 1061, 2080, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 40))]
)
async def test_whatever_happens_samples_have_their_puts_and_nothing_else_is_left(monkeypatch, seed):
    """Commits, retries, cancelled calls, clears, lost and late calls, controllers that restart, in any order.

    Every other run says again and again which puts are known, in small pieces.
    """
    monkeypatch.setattr("tq_service.server.puts._MOST_PUTS", 2)
    monkeypatch.setattr("tq_service.server.puts._MOST_RUNS", 2)
    monkeypatch.setattr("tq_service.storage.engine._MOST_WORK", 1)
    monkeypatch.setattr("tq_service.server.puts._FREED_PER_TURN", 1)
    calls = []
    async with split_service(monkeypatch, reconcile_seconds=3600.0 if seed % 2 else 0.0) as split:
        async for _ in act_at_random(split, random.Random(seed), calls):
            assert split.lost_puts() == []
        for call in calls:
            call.cancel()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert not isinstance(outcome, Exception) or isinstance(outcome, TqError | grpc.aio.AioRpcError)
        left = await split.settled()
        assert split.lost_puts() == []
        assert left == len({cells.put for cells in split.live()})


async def act_at_random(split, rng, calls):
    """Do one thing after the other and yield after each; `calls` gets the commits. In the end no call is held up."""
    requests, held, gates = [], [], []

    async def step():  # noqa: PLR0912  (one thing a case)
        match rng.randrange(12):
            case 0 | 1:
                requests.append(await split.store(partition_id=rng.choice("pq"), rows=rng.randint(1, 4)))
            case 2 | 3 if requests:
                request = rng.choice(requests)
                if rng.random() < 0.3:
                    gates.append(split.hold(request))
                calls.append(split.commit(rng.choice([request, request, again(request), impossible(request)])))
            case 4 if calls:
                rng.choice(calls).cancel()
            case 5 if rng.random() < 0.3:
                name = rng.choice("pq")
                if name in set(split.catalog.names()):
                    await split.clear(name)
            case 6 if requests:  # the client puts it again
                request = rng.choice(requests)
                with contextlib.suppress(PutNotFoundError):  # some of its cells were freed
                    stored = await split.store(
                        request.placement.put_id, partition_id=request.write.partition_id, rows=request.write.row_count
                    )
                    requests.append(stored)
            case 7 | 8:
                method = rng.choice(["UpdatePuts", "UpdatePuts", "ReconcilePuts", "RegisterStorage"])
                link = split.to_controller if method == "RegisterStorage" else split.link
                held.append(link.add(method, **{rng.choice(FAULTS): True}))
            case 9 if held:
                fault = rng.choice(held)
                fault.request.set()
                fault.answer.set()
            case 9 if gates:
                rng.choice(gates).set()
            case 10 if rng.random() < 0.1:
                split.is_stable = rng.random() < 0.7
                split.restart_controller()
            case 11:
                await split.clear_some(rng)
            case _:
                split.now += rng.uniform(0, TTL_SECONDS)
        await split.turns(rng.choice([0, 1, 3, 30]))

    for _ in range(150):
        # Put again while it is there for another partition or controller, or before a controller is known.
        with contextlib.suppress(InvalidArgumentError, UnavailableError):
            await step()
        yield
    split.link.faults.clear()
    split.to_controller.faults.clear()
    for gate in gates:
        gate.set()
    for fault in held:
        fault.request.set()
        fault.answer.set()
    await split.turns(100)
