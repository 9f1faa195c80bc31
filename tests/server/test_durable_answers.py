"""Answers and errors wait until what they say is durable; nothing is done while nothing can be written down."""

import asyncio

import pytest

from tq_service.errors import DiskFullError, InvalidArgumentError, QuotaExceededError
from tq_service.server.rpc.calls import DurableAnswers
from tq_service.server.rpc.methods import Caller, Method


class Disk:
    """A journal that becomes durable when the test says so."""

    def __init__(self):
        self.written = self.synced = 0
        self.is_failing = self.is_full = self.is_disk_low = False
        self.events = []

    @property
    def has_unflushed(self):
        return self.synced < self.written

    def write(self):
        self.written += 1
        self.events.append("written")

    async def wait_durable(self):
        await asyncio.sleep(0)
        if self.is_full:
            self.is_failing = True
            raise QuotaExceededError("the disk is full", retry_after_seconds=1.0)
        self.is_failing = False
        self.synced = self.written
        self.events.append("durable")


async def change(request, context):
    context.write()
    if request == "refuse":
        raise InvalidArgumentError("refused")
    return "done"


async def look(request, context):
    return "seen"


def wrapped(behavior, disk, **known):
    return DurableAnswers(disk).wrap(Method(name="/test/Method", **known), Caller(), behavior)


def call(behavior, request, disk, **known):
    return asyncio.run(wrapped(behavior, disk, **known)(request, disk))


def test_an_answer_waits_for_the_change():
    disk = Disk()
    assert call(change, "x", disk) == "done"
    assert disk.events == ["written", "durable"]


def test_what_changes_nothing_waits_for_nothing():
    disk = Disk()
    assert call(look, "x", disk) == "seen"
    assert disk.events == []


def test_a_look_waits_for_the_change_of_another():
    disk = Disk()
    disk.write()
    assert call(look, "x", disk) == "seen"
    assert disk.events == ["written", "durable"]


def test_an_error_waits_too():
    disk = Disk()
    with pytest.raises(InvalidArgumentError, match="refused"):
        call(change, "refuse", disk)
    assert disk.events == ["written", "durable"]


def test_what_says_only_what_is_durable_waits_for_nothing():
    disk = Disk()
    disk.is_failing = disk.is_full = True
    disk.write()
    assert call(look, "x", disk, is_answer_durable=True) == "seen"
    assert disk.events == ["written"]


def test_a_change_that_cannot_be_written_is_not_acknowledged_but_is_there_for_the_retry():
    disk = Disk()
    disk.is_full = True
    with pytest.raises(QuotaExceededError):
        call(change, "x", disk)
    assert disk.written == 1
    with pytest.raises(QuotaExceededError):
        call(change, "x", disk)
    assert disk.written == 1  # while it is stuck nothing more is changed
    disk.is_full = False
    assert call(look, "x", disk) == "seen"
    assert disk.synced == 1
    assert not disk.is_failing


def test_what_fills_the_disk_is_refused_while_it_is_disk_low_and_what_frees_space_goes_on():
    disk = Disk()
    disk.is_disk_low = True
    with pytest.raises(DiskFullError, match="Clear samples") as refused:
        call(change, "x", disk, fills_disk=True)
    assert refused.value.retry_after_seconds > 0
    assert disk.written == 0
    assert call(change, "x", disk) == "done"


def test_a_call_that_leaves_waits_for_nothing():
    disk = Disk()

    async def leave(request, context):
        context.write()
        await asyncio.sleep(60)

    async def main():
        task = asyncio.ensure_future(wrapped(leave, disk)("x", disk))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert disk.events == ["written"]
