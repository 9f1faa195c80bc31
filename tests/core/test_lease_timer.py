"""Leases run out in their time, by one timer however many there are, and leave nothing behind."""

import asyncio
from types import SimpleNamespace

import pytest
from domain_support import ack, asks, expire, extend, insert, plan_of, seal
from planner_bench import Bench, finished, rows

from tq_service.serving.catalog import LeaseTimer
from tq_service.state.ledger import Claim
from tq_service.state.plan import LeaseTerms


class SkippingTime:
    """Stands in for the clock of the running loop; what is due happens within the next turns."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.seconds, self._real = 0.0, loop.time
        loop.time = lambda: self._real() + self.seconds

    async def skip(self, seconds, turns=5):
        self.seconds += seconds
        for _ in range(turns):
            await asyncio.sleep(0)


def leased(seconds, **arguments):
    return {"lease": LeaseTerms(seconds=seconds), "batch_size": 1, **arguments}


def timers():
    return [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]


async def test_thousands_of_leases_have_one_timer_and_run_out_in_order():
    time, bench = SkippingTime(), Bench()
    bench.insert(4_000)
    for number in range(4_000):
        await bench.planner.claim(asks(**leased(100.0 if number % 2 else 200.0)), 0)
    assert bench.task.leased_count == 4_000
    assert len(timers()) == 1
    await time.skip(150.0, turns=1000)
    assert bench.task.leased_count == 2_000
    assert set((bench.task.claim.data[:4_000] < 0).nonzero()[0] % 2) == {0}
    await time.skip(100.0, turns=1000)
    assert bench.task.leased_count == 0
    assert not (timers() or bench.catalog._serving[bench.partition].lease_timer._deadlines)


async def test_the_loop_turns_while_thousands_run_out():
    time, bench = SkippingTime(), Bench()
    bench.insert(1000)
    for _ in range(1000):
        await bench.planner.claim(asks(**leased(10.0)), 0)
    await time.skip(20.0, turns=2)
    assert 0 < bench.task.leased_count < 1000


async def test_deadlines_of_leases_that_ended_are_dropped():
    SkippingTime()
    bench = Bench()
    bench.insert(1)
    insert(bench.catalog, 999)
    first = asks(**leased(50.0))
    await bench.planner.claim(first, 0)
    for _ in range(900):
        request = asks(**leased(1000.0))
        await bench.planner.claim(request, 0)
        extend(bench.catalog, bench.task, first.request_id, 2000.0)
        assert ack(bench.catalog, bench.task, request.request_id) == 1
    assert len(bench.catalog._serving[bench.partition].lease_timer._deadlines) < 100
    assert len(timers()) == 1


async def test_a_worker_that_waits_gets_what_runs_out_and_then_the_end():
    time, bench = SkippingTime(), Bench()
    bench.insert(2)
    seal(bench.catalog)
    await bench.planner.claim(asks(**leased(10.0, batch_size=2)), 0)
    request = asks(**leased(10.0, batch_size=2))
    waiting = asyncio.ensure_future(bench.planner.claim(request, 1e6))
    await asyncio.sleep(0)
    await time.skip(5.0)
    assert not waiting.done()
    await time.skip(10.0)
    assert rows(await finished(waiting)) == [0, 1]
    last = bench.ask()
    await time.skip(1.0)
    assert not last.done()
    ack(bench.catalog, bench.task, request.request_id)
    assert (await finished(last)).result().skipped_count == 0


async def test_an_extended_lease_runs_out_when_it_was_extended_to():
    time, bench = SkippingTime(), Bench()
    bench.insert(1)
    request = asks(**leased(100.0))
    await bench.planner.claim(request, 0)
    await time.skip(50.0)
    assert extend(bench.catalog, bench.task, request.request_id, 500.0) == 1
    await time.skip(400.0)
    assert bench.task.leased_count == 1
    assert extend(bench.catalog, bench.task, request.request_id, 10.0) == 1
    await time.skip(20.0)
    assert bench.task.leased_count == 0


async def test_a_snapshot_has_a_lease_as_it_was_before_it_was_extended():
    """It is written in a thread, while leases of the task go on."""
    SkippingTime()
    bench = Bench()
    bench.insert(1)
    request = asks(**leased(100.0))
    await bench.planner.claim(request, 0)
    (before,) = bench.task.snapshot().claims
    assert extend(bench.catalog, bench.task, request.request_id, 500.0) == 1
    assert before.lease.seconds == 100.0
    assert bench.task.claims[request.request_id].lease.seconds == 500.0


@pytest.mark.parametrize("end", [lambda catalog: catalog.drain(), lambda catalog: catalog.remove("train", b"")])
async def test_nothing_runs_out_once_the_catalog_drains_or_the_partition_was_cleared(end):
    time, bench = SkippingTime(), Bench()
    bench.insert(1)
    await bench.planner.claim(asks(**leased(10.0)), 0)
    end(bench.catalog)
    await time.skip(100.0)
    assert (bench.task.leased_count, timers()) == (1, [])


async def test_leases_of_all_tasks_of_a_partition_have_one_timer():
    time, bench = SkippingTime(), Bench()
    bench.insert(2)
    for number, task in enumerate(("t", "u")):
        await bench.catalog.claim("train", b"", asks(task=task, **leased(100.0 * (number + 1))), 0)
    assert len(timers()) == 1
    await time.skip(150.0)
    assert [bench.partition.tasks[name].leased_count for name in ("t", "u")] == [0, 1]
    await time.skip(100.0)
    assert bench.partition.tasks["u"].leased_count == 0
    assert not timers()


def test_a_lease_that_is_due_while_another_begins_on_uvloop():
    """A uvloop timer for a time that has come is a handle that cannot tell its time."""

    def claim(serial, seconds):
        return Claim(
            request_id=bytes([serial]), serial=serial, plan=plan_of([0]), lease=LeaseTerms(seconds=seconds),
            leased_count=1,
        )  # fmt: skip

    async def lease_two():
        claims = {each.request_id: each for each in (claim(2, 1e-9), claim(3, 100.0))}
        ran_out = asyncio.get_running_loop().create_future()
        timer = LeaseTimer({"t": SimpleNamespace(claims=claims)}, lambda *named: ran_out.set_result(named))
        for each in claims.values():
            timer.start("t", each)
        return await ran_out

    with asyncio.Runner(loop_factory=pytest.importorskip("uvloop").new_event_loop) as runner:
        assert runner.run(lease_two()) == ("t", bytes([2]))


async def test_part_of_a_group_that_is_dead_lettered_is_a_failed_member():
    SkippingTime()
    bench = Bench()
    bench.insert(3, groups=["a"] * 3, group_size=3)
    request = asks(lease=LeaseTerms(seconds=10.0, max_deliveries=1), batch_size=1)
    await bench.planner.claim(request, 0)
    expire(bench.catalog, bench.task, request.request_id)
    seal(bench.catalog)
    skips = asks(batch_size=1, batch_unit="group")
    end = await bench.planner.claim(skips, 1.0)
    assert end.skipped_count == 3
