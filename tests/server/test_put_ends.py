"""Every put comes to an end: its samples have it, or its storage service frees it, whatever happens to its commit.

A put is confirmed by its storage service before it is committed, so that its bytes stay; what is between the two must
neither leave a put that nobody knows of, nor free one that samples have.
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
    KeyNotFoundError,
    PartitionNotFoundError,
    PutNotFoundError,
    TqError,
    UnavailableError,
)
from tq_service.v1 import controller_service_pb2 as pb


@pytest.fixture
async def split(monkeypatch):
    async with split_service(monkeypatch) as service:
        yield service


def impossible(request):
    """Return a commit of the same put that is refused: of a key that is not there."""
    other = pb.CommitRequest()
    other.CopyFrom(request)
    other.request_id = os.urandom(16)
    other.write.keys[:] = [f"unknown-{number}" for number in range(other.write.row_count)]
    other.write.key_mode = pb.KEY_MODE_EXISTING
    return other


def again(request):
    """Return the commit under another request_id."""
    other = pb.CommitRequest()
    other.CopyFrom(request)
    other.request_id = os.urandom(16)
    return other


async def test_a_put_that_is_committed_stays(split):
    await split.commit(await split.store())
    assert await split.settled() == 1
    assert split.lost_puts() == []
    await split.clear()
    assert await split.settled() == 0


@pytest.mark.parametrize("when", ["hold_request", "hold_answer"])
async def test_a_client_that_leaves_while_its_put_is_confirmed_leaves_no_put(split, when):
    fault = split.link.add("ConfirmPut", **{when: True})
    commit = split.commit(await split.store())
    await split.turns(20)
    commit.cancel()
    await asyncio.wait([commit])
    fault.request.set()
    fault.answer.set()
    assert await split.settled() == 0


@pytest.mark.parametrize("what", ["lose_request", "lose_answer"])
async def test_a_confirmation_that_gets_lost_leaves_no_put(split, what):
    split.link.add("ConfirmPut", **{what: True})
    with pytest.raises(UnavailableError):
        await split.commit(await split.store())
    assert await split.settled() == 0


async def test_a_commit_is_tried_again_after_the_answer_to_its_confirmation_got_lost(split):
    split.link.add("ConfirmPut", lose_answer=True)
    request = await split.store()
    with pytest.raises(UnavailableError):
        await split.commit(request)
    split.now += TTL_SECONDS / 2
    await split.turns(50)
    await split.commit(request)
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_commit_is_tried_again_after_its_put_was_given_up(split):
    split.link.add("ConfirmPut", lose_answer=True)
    request = await split.store()
    with pytest.raises(UnavailableError):
        await split.commit(request)
    assert await split.settled() == 0
    with pytest.raises(PutNotFoundError):
        await split.commit(request)
    await split.store(request.placement.put_id)
    await split.commit(request)
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_confirmation_that_comes_late_keeps_a_put_no_longer(split):
    """The controller has given it up, and the client has put it again under the same id, before it comes."""
    late = split.link.add("ConfirmPut", hold_request=True)
    request = await split.store()
    commit = split.commit(request)
    await split.turns(20)
    commit.cancel()
    await asyncio.wait([commit])
    assert await split.settled() == 0
    await split.store(request.placement.put_id)
    late.request.set()
    await split.until(lambda: late.is_made)
    assert await split.settled() == 0


async def test_a_put_whose_commit_is_refused_goes_at_once(split):
    await split.commit(await split.store())
    with pytest.raises(KeyNotFoundError):
        await split.commit(impossible(await split.store()))
    await split.turns(50)
    assert split.engine.stat().put_count == 1


async def test_a_partition_that_is_cleared_between_confirmation_and_commit_leaves_no_put(split):
    first = await split.commit(await split.store())
    request = await split.store()
    request.write.incarnation = first.meta.incarnation
    fault = split.link.add("ConfirmPut", hold_answer=True)
    commit = split.commit(request)
    await split.until(lambda: fault.is_made)
    await split.clear()
    fault.answer.set()
    with pytest.raises(PartitionNotFoundError):
        await commit
    assert await split.settled() == 0


async def test_a_retry_beside_a_call_that_is_given_up_commits_the_put(split):
    request = await split.store()
    first_fault = split.link.add("ConfirmPut", hold_answer=True)
    second_fault = split.link.add("ConfirmPut", hold_answer=True)
    first = split.commit(request)
    await split.turns(20)
    second = split.commit(request)
    await split.until(lambda: first_fault.is_made and second_fault.is_made)
    first.cancel()
    await asyncio.wait([first])
    split.now += 3 * TTL_SECONDS
    await split.turns(50)
    second_fault.answer.set()
    await second
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_two_calls_that_are_both_given_up_leave_no_put(split):
    request = await split.store()
    faults = [split.link.add("ConfirmPut", hold_answer=True) for _ in range(2)]
    commits = [split.commit(request), split.commit(again(request))]
    await split.until(lambda: all(fault.is_made for fault in faults))
    for commit in commits:
        commit.cancel()
        await asyncio.wait([commit])
    assert await split.settled() == 0


async def test_a_call_that_is_refused_does_not_free_the_put_of_one_that_is_about_to_commit_it(split):
    request = await split.store()
    fault = split.link.add("ConfirmPut", hold_answer=True)
    commit = split.commit(request)
    await split.until(lambda: fault.is_made)
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(request))
    await split.turns(50)
    fault.answer.set()
    await commit
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_a_put_that_is_refused_and_then_given_up_by_another_call_goes(split):
    request = await split.store()
    fault = split.link.add("ConfirmPut", hold_answer=True)
    commit = split.commit(request)
    await split.until(lambda: fault.is_made)
    with pytest.raises(PartitionNotFoundError):
        await split.commit(impossible(request))
    commit.cancel()
    await asyncio.wait([commit])
    await split.turns(50)
    assert split.engine.stat().put_count == 0


async def test_a_put_that_is_cleared_while_it_is_committed_again_is_not_committed_without_its_bytes(split):
    request = await split.store()
    fault = split.link.add("ConfirmPut", hold_answer=True)
    late = split.commit(again(request))
    await split.until(lambda: fault.is_made)
    await split.commit(request)
    await split.clear()
    await split.until(lambda: split.engine.stat().put_count == 0)
    fault.answer.set()
    with pytest.raises(UnavailableError, match="put it again"):
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


async def test_a_commit_that_names_another_partition_forgets_no_put(split):
    """What came of the confirmation before is not known; that of another partition says nothing about it."""
    request = await split.store()
    split.link.add("ConfirmPut", lose_answer=True)
    with pytest.raises(UnavailableError):
        await split.commit(request)
    wrong = again(request)
    wrong.write.partition_id = "q"
    with pytest.raises(InvalidArgumentError):
        await split.commit(wrong)
    assert await split.settled() == 0


@pytest.mark.parametrize("fault", [{}, {"lose_answer": True}, {"lose_request": True}])
async def test_a_commit_that_was_made_with_another_put_leaves_its_second_one_to_go(split, fault):
    first, second = await split.store(), await split.store()
    second.request_id = first.request_id
    answer = await split.commit(first)
    split.link.add("ConfirmPut", **fault)
    assert await split.commit(second) == answer
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_two_puts_of_one_commit_at_once_leave_one(split):
    first, second = await split.store(), await split.store()
    second.request_id = first.request_id
    fault = split.link.add("ConfirmPut", hold_answer=True)
    late = split.commit(first)
    await split.until(lambda: fault.is_made)
    answer = await split.commit(second)
    fault.answer.set()
    assert await late == answer
    assert await split.settled() == 1
    assert split.lost_puts() == []


@pytest.mark.parametrize("what", ["lose_request", "lose_answer"])
async def test_what_is_freed_is_said_again_until_it_is_heard(split, what):
    await split.commit(await split.store())
    for _ in range(3):
        split.link.add("FreeCells", **{what: True})
    await split.clear()
    assert await split.settled() == 0


async def test_a_connection_that_is_closed_during_a_call_ends_no_loop_and_no_commit(split):
    """As where a certificate is replaced: gRPC raises CancelledError then, though nobody has cancelled anything."""
    request = await split.store()
    split.link.add("ConfirmPut", lose_answer=True, error=asyncio.CancelledError())
    with pytest.raises(UnavailableError):
        await split.commit(request)
    await split.commit(request)
    split.link.add("FreeCells", lose_request=True, error=asyncio.CancelledError())
    await split.clear()
    await split.turns(200)
    assert split.engine.stat().put_count == 0


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_put_whose_commit_is_under_way_stays_where_it_is_said_which_puts_are_known(split, is_given_up):
    request = await split.store()
    fault = split.link.add("ConfirmPut", hold_answer=True)
    commit = split.commit(request)
    await split.until(lambda: fault.is_made)
    await split.reconciled()
    assert split.engine.stat().put_count == 1
    if is_given_up:
        commit.cancel()
        await asyncio.wait([commit])
    fault.answer.set()
    await asyncio.wait([commit])
    assert await split.settled() == (0 if is_given_up else 1)
    assert split.lost_puts() == []


async def test_puts_of_a_controller_that_is_gone_go_and_those_of_the_next_one_stay(split):
    await split.commit(await split.store())
    fault = split.to_controller.add("RegisterStorage", hold_answer=True)
    split.restart_controller()
    await split.until(lambda: fault.is_made)
    await split.until(lambda: split.engine.stat().put_count == 0)
    await split.commit(await split.store())
    fault.answer.set()  # the storage service learns only now that it is another controller
    assert await split.settled() == 1
    assert split.lost_puts() == []


async def test_nothing_goes_while_the_controller_does_not_answer(split):
    split.link.add("ConfirmPut", lose_answer=True)
    with pytest.raises(UnavailableError):
        await split.commit(await split.store())
    for _ in range(500):
        split.to_controller.add("RegisterStorage", lose_answer=True)
    assert await split.settled() == 1
    split.to_controller.faults.clear()
    assert await split.settled() == 0


async def test_a_heartbeat_that_asks_about_too_many_puts_is_refused(split):
    ask = pb.RegisterStorageRequest(unverified_put_ids=[b"p"] * 4097)
    ask.storage.storage_id, ask.storage.address, ask.storage.boot_id = "s", "localhost:1", split.engine.boot_id
    ask.storage.kind = "grpc"
    with pytest.raises(InvalidArgumentError, match="expected at most 4096"):
        await split.controller.RegisterStorage(ask, None)


FAULTS = ["hold_request", "hold_answer", "lose_request", "lose_answer"]


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens_samples_have_their_puts_and_nothing_else_is_left(monkeypatch, seed):
    """Commits, retries, cancelled calls, clears, lost and late calls, controllers that begin anew, in any order.

    Every other run says again and again which puts are known, in small pieces.
    """
    monkeypatch.setattr("tq_service.server.known_puts._MOST_PUTS", 2)
    monkeypatch.setattr("tq_service.server.known_puts._MOST_RUNS", 2)
    monkeypatch.setattr("tq_service.storage.engine._MOST_WORK", 1)
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
    requests, held = [], []

    async def step():
        match rng.randrange(12):
            case 0 | 1:
                requests.append(await split.store(partition_id=rng.choice("pq"), rows=rng.randint(1, 4)))
            case 2 | 3 if requests:
                request = rng.choice(requests)
                calls.append(split.commit(rng.choice([request, request, again(request), impossible(request)])))
            case 4 if calls:
                rng.choice(calls).cancel()
            case 5 if rng.random() < 0.3:
                name = rng.choice("pq")
                if name in set(split.catalog.names()):
                    await split.clear(name)
            case 6 if requests:  # the client puts it again
                request = rng.choice(requests)
                await split.store(
                    request.placement.put_id, partition_id=request.write.partition_id, rows=request.write.row_count
                )
            case 7 | 8:
                method = rng.choice(["ConfirmPut", "ConfirmPut", "FreeCells", "KeepPuts"])
                held.append(split.link.add(method, **{rng.choice(FAULTS): True}))
            case 9 if held:
                fault = rng.choice(held)
                fault.request.set()
                fault.answer.set()
            case 10 if rng.random() < 0.1:
                split.restart_controller()
            case 11:
                await split.clear_some(rng)
            case _:
                split.now += rng.uniform(0, TTL_SECONDS)
                split.engine.expire()
        await split.turns(rng.choice([0, 1, 3, 30]))

    for _ in range(150):
        with contextlib.suppress(InvalidArgumentError):  # put again while it is there for another partition
            await step()
        yield
    split.link.faults.clear()
    for fault in held:
        fault.request.set()
        fault.answer.set()
    await split.turns(100)
