"""What a service cannot go on from ends it once, for all; its owner learns of it."""

import asyncio
import logging

import pytest

from tq_service.errors import ServiceFailedError
from tq_service.server.supervisor import Supervisor, failing_with, regularly


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.CRITICAL)
    return caplog


async def failed(supervisor):
    """Wait until a service has failed; return why."""
    done = asyncio.Event()
    supervisor.on_fatal(lambda _failure: done.set())
    async with asyncio.timeout(60):
        await done.wait()
    return supervisor.failure


async def raise_it(error):
    raise error


async def forever():
    await asyncio.Event().wait()


async def test_the_first_reason_counts_and_is_logged_once(logged):
    supervisor, heard = Supervisor(), []
    supervisor.on_fatal(heard.append)
    cause = ZeroDivisionError("first")
    supervisor.fatal("the journal is broken", cause)
    supervisor.fatal("something else")
    (record,) = logged.records
    assert record.levelno == logging.CRITICAL
    assert "the journal is broken" in record.getMessage()
    assert record.exc_info[1] is cause
    assert heard == [supervisor.failure]
    assert supervisor.failure.__cause__ is cause
    assert "the journal is broken" in str(supervisor.failure)


async def test_everybody_hears_of_it_even_where_one_fails_at_that():
    supervisor, heard = Supervisor(), []

    def fail(_failure):
        raise ValueError("no")

    supervisor.on_fatal(fail)
    supervisor.on_fatal(heard.append)
    supervisor.fatal("over")
    assert heard == [supervisor.failure]


async def test_a_background_task_that_raises_is_fatal(logged):
    supervisor = Supervisor()
    supervisor.start("housekeeping", raise_it(ZeroDivisionError("by nought")))
    failure = await failed(supervisor)
    assert "housekeeping ended by ZeroDivisionError: by nought" in str(failure)
    assert isinstance(failure.__cause__, ZeroDivisionError)
    assert len(logged.records) == 1


async def test_a_background_task_that_ends_is_fatal_unless_it_may(logged):
    supervisor = Supervisor()
    await supervisor.start("a look at all puts", asyncio.sleep(0), may_end=True)
    await asyncio.sleep(0)
    assert supervisor.failure is None
    supervisor.start("announcing", asyncio.sleep(0))
    assert "announcing has ended" in str(await failed(supervisor))


async def test_background_tasks_that_are_stopped_or_cancelled_are_not_fatal(logged):
    supervisor = Supervisor()
    cancelled, running = supervisor.start("one", forever()), supervisor.start("two", forever())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await supervisor.stop()
    assert running.cancelled()
    assert supervisor.failure is None
    assert not logged.records


async def test_a_failure_comes_out_of_the_body_that_waits():
    supervisor = Supervisor()
    with pytest.raises(ServiceFailedError, match="ended by ZeroDivisionError") as caught:
        async with failing_with(supervisor):
            supervisor.start("work", raise_it(ZeroDivisionError()))
            await forever()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_a_failure_that_the_body_causes_itself_leaves_no_cancellation_behind():
    supervisor = Supervisor()
    with pytest.raises(ServiceFailedError, match="over"):
        async with failing_with(supervisor):
            supervisor.fatal("over")
    await asyncio.sleep(0)


async def test_a_failure_takes_the_place_of_the_errors_it_brings_about():
    supervisor = Supervisor()
    with pytest.raises(ServiceFailedError, match="over") as caught:
        async with failing_with(supervisor):
            supervisor.fatal("over")
            raise ConnectionError("the service is gone")
    assert isinstance(caught.value.__context__, ConnectionError)
    await asyncio.sleep(0)


async def test_a_body_that_does_not_fail_is_left_alone():
    supervisor = Supervisor()
    async with failing_with(supervisor):
        await asyncio.sleep(0)
    supervisor.fatal("later")
    await asyncio.sleep(0)
    with pytest.raises(KeyError):
        async with failing_with(Supervisor()):
            raise KeyError


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_from_outside_stays_one(fails):
    supervisor, is_in = Supervisor(), asyncio.Event()

    async def own():
        async with failing_with(supervisor):
            is_in.set()
            await forever()

    owner = asyncio.ensure_future(own())
    await is_in.wait()
    owner.cancel()
    if fails:
        supervisor.fatal("over")
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert owner.cancelled()


async def test_an_owner_that_is_done_by_then_is_left_alone():
    """As in a fixture of a test, whose two halves are run by two tasks."""
    supervisor = Supervisor()
    scope = failing_with(supervisor)
    await asyncio.ensure_future(scope.__aenter__())
    supervisor.fatal("over")
    with pytest.raises(ServiceFailedError):
        await scope.__aexit__(None, None, None)
    assert asyncio.current_task().cancelling() == 0


async def test_a_failure_is_logged_and_the_next_time_comes(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([None, RuntimeError("once"), None])
    is_over = asyncio.Event()

    async def work() -> None:
        outcome = next(outcomes, is_over)
        if outcome is is_over:
            is_over.set()
        elif isinstance(outcome, Exception):
            raise outcome

    with caplog.at_level(logging.ERROR):
        task = asyncio.ensure_future(regularly(0.0, work))
        async with asyncio.timeout(60):
            await is_over.wait()
    task.cancel()
    (record,) = caplog.records
    assert "periodic work failed" in record.getMessage()
    assert record.exc_info
