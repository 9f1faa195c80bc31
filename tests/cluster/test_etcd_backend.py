"""What the log in etcd does when answers are lost, another controller leads, or etcd is not what it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import grpc
import pytest
from cluster_support import KEYS, Member, members, running_etcd
from etcd_stand_in import EtcdStandIn

from tq_service.cluster import etcd_backend
from tq_service.cluster.etcd import Etcd, put
from tq_service.cluster.etcd_backend import EtcdBackend
from tq_service.durable.state_store import Stream
from tq_service.errors import (
    InvalidArgumentError,
    JournalDamagedError,
    JournalUnreachableError,
    PreconditionError,
    SupersededError,
)
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.journal.log import Record


@pytest.fixture
def etcd() -> Iterator[EtcdStandIn]:
    stand_in = EtcdStandIn()
    yield stand_in
    stand_in.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (it is of the stand-in's threads)
            await asyncio.sleep(0.01)


async def append(member: Member, *records: bytes) -> None:
    for record in records:
        member.log.append(Stream.CHANGES, record)
    await member.log.wait_durable()


def data_of(member: Member, number: int = 0) -> list[bytes]:
    return [record.data for record in member.log.read(number)]


@pytest.mark.parametrize("fault", ["lost_answers", "refusals"])
async def test_an_append_without_an_answer_has_one_effect(etcd: EtcdStandIn, tmp_path: Path, fault: str) -> None:
    with members([etcd.address], tmp_path, "a") as (leader,):
        assert leader.open() == []
        for number in range(6):
            setattr(etcd, fault, number % 3)
            leader.log.append(Stream.CHANGES, b"%d" % number)
            await leader.log.wait_durable()
        setattr(etcd, fault, 2)  # of a group in pieces
        await append(leader, b"x" * 3_000_000, b"end")
    with members([etcd.address], tmp_path, "a") as (again,):
        assert [each.data for each in again.open()] == [
            *(b"%d" % number for number in range(6)),
            b"x" * 3_000_000,
            b"end",
        ]


async def test_a_batch_that_may_have_been_written_is_tried_again_as_it_was(
    etcd: EtcdStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdBackend, "patience_seconds", 0.0)
    with members([etcd.address], tmp_path, "a") as (leader,):
        assert leader.open() == []
        etcd.lost_answers = 1
        leader.log.append(Stream.CHANGES, b"written")
        with pytest.raises(JournalUnreachableError, match="could not write to the journal"):
            await leader.log.wait_durable()
        assert leader.log.has_unflushed
        await append(leader, b"later", b"on")
        assert not leader.log.has_unflushed
    with members([etcd.address], tmp_path, "a") as (again,):
        assert [each.data for each in again.open()] == [b"written", b"later", b"on"]


async def test_a_controller_that_was_superseded_writes_nothing_more(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a", "b") as (old, new):
        assert old.open() == []
        await append(old, b"of the old one")
        assert old.backend.leadership is not None
        assert old.backend.leadership.is_held
        etcd.end_leases()
        assert [each.data for each in await asyncio.to_thread(new.open)] == [b"of the old one"]
        old.log.append(Stream.CHANGES, b"too late")
        with pytest.raises(SupersededError, match="another controller leads"):
            await old.log.wait_durable()
        await append(new, b"of the new one")
        await until(lambda: old.lost)
        assert not old.backend.leadership.is_held
        assert new.backend.leadership is not None
        assert new.backend.leadership.epoch > old.backend.leadership.epoch
        with pytest.raises(SupersededError):  # nor later
            await old.log.wait_durable()
        old.log.abandon(SupersededError("over"))
    with members([etcd.address], tmp_path, "c") as (reader,):
        assert data_of(reader) == [b"of the old one", b"of the new one"]


async def test_a_superseded_controller_writes_nothing_before_the_new_one_has(etcd: EtcdStandIn, tmp_path: Path) -> None:
    """The lease has ended, and no other controller has written yet: that it lost the key is enough."""
    with members([etcd.address], tmp_path, "a") as (old,):
        assert old.open() == []
        etcd.end_leases()
        await until(lambda: KEYS.leader not in etcd.kvs)
        old.log.append(Stream.CHANGES, b"too late")
        with pytest.raises(SupersededError):
            await old.log.wait_durable()
        old.log.abandon(SupersededError("over"))
    with members([etcd.address], tmp_path, "c") as (reader,):
        assert data_of(reader) == []


async def test_pieces_of_an_append_that_was_not_finished_are_no_records(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a", "b") as (old, new):
        assert old.open() == []
        await append(old, b"before")
        batch = etcd_backend.Batch.of(old.backend._end, 1, [(1, [b"y" * 3_000_000])])  # type: ignore[arg-type]
        stray = {KEYS.batch(batch.first, number): piece for number, piece in enumerate(batch.pieces()) if number}
        assert len(stray) == 2
        for key, piece in stray.items():
            old.etcd.ask(pb.EtcdTxnRequest(success=[put(key, piece)]))
        etcd.end_leases()
        assert [each.data for each in await asyncio.to_thread(new.open)] == [b"before"]
        await append(new, b"z" * 1_500_000)
        old.log.abandon(SupersededError("over"))
    with members([etcd.address], tmp_path, "c") as (reader,):
        assert data_of(reader) == [b"before", b"z" * 1_500_000]


async def test_while_etcd_is_silent_nothing_is_durable_and_then_all_is(
    etcd: EtcdStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdBackend, "patience_seconds", 0.1)
    with members([etcd.address], tmp_path, "a") as (leader,):
        assert leader.open() == []
        etcd.is_silent = True
        leader.log.append(Stream.CHANGES, b"it waits")
        with pytest.raises(JournalUnreachableError):
            await leader.log.wait_durable()
        etcd.is_silent = False
        await leader.log.wait_durable()
        assert not leader.log.has_unflushed
    with members([etcd.address], tmp_path, "a") as (again,):
        assert data_of(again) == [b"it waits"]


async def test_a_standby_follows_while_another_leads_and_then_goes_on(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a", "b") as (leader, standby):
        assert leader.open() == []
        await append(leader, b"0", b"1")
        following = standby.backend.follow(0)
        found = [await anext(following), await anext(following)]
        await append(leader, b"2" * 2_000_000)
        found.append(await anext(following))
        assert [record.data[:1] for record in found] == [b"0", b"1", b"2"]
        with pytest.raises(RuntimeError, match="not open for appends"):
            standby.log.append(Stream.CHANGES, b"not by a standby")
        await following.aclose()
        await append(leader, b"3")
        leader.lease.close()  # type: ignore[union-attr]
        assert [each.data for each in await asyncio.to_thread(standby.open, found[-1].number + 1)] == [b"3"]
        await append(standby, b"4")
        leader.log.abandon(SupersededError("over"))
    with members([etcd.address], tmp_path, "c") as (reader,):
        assert [data[:1] for data in data_of(reader)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_standby_that_cannot_reach_etcd_goes_on_once_it_can(
    etcd: EtcdStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with members([etcd.address], tmp_path, "a", "b") as (leader, standby):
        assert leader.open() == []
        for number in range(200):  # more than are read at once
            leader.log.append(Stream.CHANGES, b"%d" % number)
            if number % 2:
                await leader.log.wait_durable()
        following = standby.backend.follow(0)
        assert [(await anext(following)).data for _ in range(200)] == [b"%d" % number for number in range(200)]
        real, failures = standby.etcd.ask, 3

        def failing(*arguments: object, **options: object) -> object:
            nonlocal failures
            if failures:
                failures -= 1
                raise JournalUnreachableError("no answer")
            return real(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(standby.etcd, "ask", failing)
        await append(leader, b"later")
        assert (await anext(following)).data == b"later"
        assert not failures
        await following.aclose()  # type: ignore[attr-defined]


async def test_what_two_controllers_need_is_not_given_up(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a", "b") as (leader, standby):
        assert leader.open() == []
        standby.etcd.ask(pb.EtcdTxnRequest(success=[put(KEYS.members + b"b", b"{}")]))
        for number in range(30):
            await append(leader, b"%d" % number)
        number = leader.log.rotate()
        await leader.log.wait_durable()  # the rotation is a batch too
        before = len(etcd.keys(KEYS.log))
        await asyncio.to_thread(leader.backend.truncate_before, number)
        assert len(etcd.keys(KEYS.log)) == before  # the standby has no snapshot
        await asyncio.to_thread(standby.backend.truncate_before, 11)
        await asyncio.to_thread(leader.backend.truncate_before, number)
        assert before - 11 <= len(etcd.keys(KEYS.log)) < before - 8
        assert etcd.compacted > 1
        assert data_of(standby, 11) == [b"%d" % each for each in range(9, 30)]
        with pytest.raises(PreconditionError):
            data_of(Member([etcd.address], tmp_path / "late", "late"), 5)


async def test_etcd_that_was_restored_from_an_older_state_is_refused_unless_the_loss_is_accepted(
    etcd: EtcdStandIn, tmp_path: Path
) -> None:
    with members([etcd.address], tmp_path, "a") as (leader,):
        assert leader.open() == []
        await append(leader, b"0", b"1")
        backup = etcd.backup()
        await append(leader, b"2", b"3")
        snapshot = leader.log.rotate()
        leader.backend.sync_rotated(snapshot)
        etcd.restore(backup)
        leader.log.abandon(SupersededError("over"))
    for number in (0, snapshot):
        expected = pytest.raises(JournalDamagedError, match=r"restored from an older state.*--accept-journal-loss")
        with members([etcd.address], tmp_path, "a") as (refused,), expected:
            refused.open(number)
    with members([etcd.address], tmp_path, "b") as (other,):  # another one fills it up again
        assert [each.data for each in other.open()] == [b"0", b"1"]
        await append(other, *(b"other %d" % number for number in range(9)))
    with (
        members([etcd.address], tmp_path, "a") as (refused,),
        pytest.raises(JournalDamagedError, match="differ from those that this controller has seen"),
    ):
        refused.open(snapshot)
    accepting = Member([etcd.address], tmp_path / "a", "a", accept_loss=True)
    assert accepting.open(snapshot) == []
    await append(accepting, b"goes on")
    accepting.backend.sync_rotated(accepting.log.rotate())
    accepting.close()
    with members([etcd.address], tmp_path, "a") as (again,):
        assert [each.data for each in again.open(snapshot)] == [b"goes on"]


async def test_a_batch_that_is_missing_or_has_changed_is_damage(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a") as (leader,):
        assert leader.open() == []
        for number in range(5):
            await append(leader, b"%d" % number)
    key = etcd.keys(KEYS.log)[3]
    kept = etcd.kvs[key]
    for damage in ("missing", "changed", "cut off"):
        etcd.kvs.pop(key, None)
        if damage != "missing":
            value = kept.value[:20] if damage == "cut off" else kept.value[:-1] + b"x"
            etcd.kvs[key] = pb.EtcdKeyValue(key=key, value=value)
        with members([etcd.address], tmp_path, "c") as (reader,), pytest.raises(JournalDamagedError, match="restore"):
            data_of(reader)
    etcd.kvs[key] = kept
    with members([etcd.address], tmp_path, "c") as (reader,):
        assert len(data_of(reader)) == 5


def test_a_call_goes_to_the_next_member_and_shows_its_user(etcd: EtcdStandIn, tmp_path: Path) -> None:
    etcd.users["tq"] = "secret"
    password = tmp_path / "password"
    password.write_text("wrong\n")
    gone = EtcdStandIn()
    gone.stop()
    client = Etcd((gone.address, etcd.address), user="tq", password_file=password)
    with pytest.raises(InvalidArgumentError, match="authentication failed"):
        client.get(b"key")
    password.write_text("secret\n")
    assert client.get(b"key") is None
    usual = etcd.token_refusal
    for refusal in (
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
        (grpc.StatusCode.UNKNOWN, "etcdserver: revision of auth store is old"),
        usual,
    ):
        etcd.token_refusal = refusal
        etcd.tokens.clear()  # as when it has begun again, or rights have changed
        assert client.get(b"key") is None
    client.close()
    nameless = Etcd((etcd.address,))
    with pytest.raises(InvalidArgumentError, match="rejected a request from the journal"):
        nameless.get(b"key")
    nameless.close()
    with pytest.raises(JournalUnreachableError, match="closed"):
        nameless.get(b"key")


async def test_one_controller_leads_at_a_time_and_the_next_one_when_it_ends(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a", "b") as (first, second):
        first.lead()
        leading = asyncio.ensure_future(asyncio.to_thread(second.lead))
        await asyncio.sleep(0)
        leader = await asyncio.to_thread(first.election.leader)
        assert leader is not None
        assert leader.address == "a:50051"
        assert not leading.done()
        first.lease.close()  # type: ignore[union-attr]
        began = time.monotonic()
        await leading
        assert time.monotonic() - began < 60
        again = await asyncio.to_thread(second.election.leader)
        assert again is not None
        assert again.address == "b:50051"
        assert again.epoch > leader.epoch


async def test_an_answer_that_was_lost_does_not_cost_the_election(etcd: EtcdStandIn, tmp_path: Path) -> None:
    with members([etcd.address], tmp_path, "a") as (member,):
        etcd.lost_answers = 1
        await asyncio.to_thread(member.lead)
        assert member.backend.leadership is not None
        assert member.backend.leadership.epoch == etcd.kvs[KEYS.leader].create_revision


@pytest.fixture(params=["stand-in", "etcd"])
def leader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Member]:
    """A member that leads a log without records."""
    with running_etcd(request.param, tmp_path / "etcd") as addresses:
        member = Member(addresses, tmp_path / "member")
        try:
            assert member.open() == []
            yield member
        finally:
            member.close()


async def test_a_follower_sees_each_record_in_order_and_once(leader: Member) -> None:
    log = leader.log
    first = log.append(Stream.CHANGES, b"0")
    await log.wait_durable()

    async def follow(count: int) -> list[bytes]:
        async with aclosing(cast("AsyncGenerator[Record, None]", leader.backend.follow(first))) as records:
            return [(await anext(records)).data for _ in range(count)]

    following = asyncio.ensure_future(follow(60))
    for number in range(1, 60):
        log.append(Stream.CHANGES, b"%d" % number)
        if number % 11 == 0:
            log.rotate()
        if number % 3 == 0:
            await log.wait_durable()
    await log.wait_durable()
    async with asyncio.timeout(60):
        assert await following == [b"%d" % number for number in range(60)]
    following = asyncio.ensure_future(follow(61))  # waits for the next record
    await asyncio.sleep(0.1)
    following.cancel()
    await asyncio.wait((following,))
    assert following.cancelled()


async def test_a_follower_that_is_cancelled_just_as_a_record_comes_ends(leader: Member) -> None:
    async def follow() -> None:
        async with aclosing(cast("AsyncGenerator[Record, None]", leader.backend.follow(0))) as records:
            async for _ in records:
                await asyncio.sleep(0)

    for number in range(12):
        following = asyncio.ensure_future(follow())
        await append(leader, b"%d" % number)
        following.cancel()
        done, _ = await asyncio.wait((following,), timeout=60)
        assert done


async def test_a_follower_from_the_middle_sees_the_rest_and_one_that_is_too_late_an_error(leader: Member) -> None:
    numbers = []
    for number in range(10):
        numbers.append(leader.log.append(Stream.CHANGES, b"%d" % number))
        await leader.log.wait_durable()
    following = leader.backend.follow(numbers[6])
    assert [(await anext(following)).data for _ in range(4)] == [b"6", b"7", b"8", b"9"]
    await following.aclose()  # type: ignore[attr-defined]
    beginning = leader.log.rotate()
    await append(leader, b"later")
    await asyncio.to_thread(leader.backend.truncate_before, beginning)
    with pytest.raises(PreconditionError, match="start from that snapshot"):
        await anext(leader.backend.follow(numbers[6]))
    following = leader.backend.follow(beginning)
    assert (await anext(following)).data == b"later"
    await following.aclose()  # type: ignore[attr-defined]
