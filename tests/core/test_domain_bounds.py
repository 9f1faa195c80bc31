"""What a partition has capacity for, and what is counted for it."""

import asyncio
import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from domain_support import (
    asks,
    batch_spec,
    clear,
    insert,
    new_id,
    new_write,
    plan_of,
    seal,
    task_of,
    turns,
    update,
    write_to,
)

from tq_service.admission_turn import PASSED_SECONDS, TURN_SECONDS
from tq_service.errors import (
    AdmissionLimitError,
    AlreadyExistsError,
    CallCancelledError,
    FieldMismatchError,
    InvalidArgumentError,
    PartitionClearedError,
    PartitionSealedError,
    QuotaExceededError,
    UnavailableError,
)
from tq_service.samplers import PlanRunner
from tq_service.schema import Admission, EndCounts, FieldSpec, Layout
from tq_service.serving import admission as queue
from tq_service.serving.admission import AdmissionQueue, demand_of
from tq_service.serving.catalog import Catalog
from tq_service.state.cells import ColumnWrite
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Condition


def column(name, value_bytes):
    return ColumnWrite(
        spec=FieldSpec(name, dtype="uint8", layout=Layout.DENSE, row_shape=(1,)), value_bytes=value_bytes
    )


def bounded(**settings):
    admissions = (Admission("t", **settings.pop("admission")),) if "admission" in settings else ()
    return Partition("p", PartitionSettings(admissions=admissions, **settings))


def used(partition):
    return partition.cells.used_bytes


# What is counted


def test_bytes_are_those_of_the_cells_and_go_with_them():
    train = bounded(max_bytes=1000)
    rows = insert(train, 4, [column("x", 400), column("y", 40)])
    assert used(train) == 440
    update(train, rows, [column("y", 80)])  # the cells of one field of the first put are gone
    assert used(train) == 400 + 80
    clear(train, np.array(rows[:2]))
    assert used(train) == 200 + 40
    update(train, rows[2:], state="failed")
    assert used(train) == 0


def test_cells_of_a_put_for_failed_samples_are_not_counted():
    train = bounded(max_bytes=1000)
    rows = insert(train, 4, [column("x", 40)])
    update(train, rows[:1], state="failed")
    update(train, rows, [column("y", 400)])
    assert used(train) == 30 + 300
    insert(train, 2, [column("x", 100)], state="failed")
    assert used(train) == 30 + 300


def test_the_last_cell_of_a_put_gives_the_rest_back_whatever_the_shares_were():
    train = bounded(max_bytes=1000)
    rows = insert(train, 3, [column("x", 100)])
    for row in rows:
        clear(train, np.array([row]))
    assert used(train) == 0
    insert(train, 3, [column("x", 7)])  # its slot is used again
    assert used(train) == 7


def test_samples_left_are_those_that_a_task_may_still_get():
    train = bounded(admission={"most": 100})
    task = task_of(train, "t")
    rows = insert(train, 6)
    insert(train, 2, state="held")
    insert(train, 1, state="failed")
    assert task.outstanding_count == 8  # it has not asked: all
    clear(train, np.array(rows[:1]))
    update(train, rows[1:2], state="failed")
    assert (task.outstanding_count, task.backlog) == (6, 6)


def test_existing_samples_need_no_capacity():
    train = bounded(max_bytes=10)
    insert(train, 2, [column("x", 10)], keys=["a", "b"])
    assert demand_of(train, new_write(2, [column("y", 1000)], indexes=[0, 1]), 1000) is None
    assert demand_of(train, new_write(2, [column("y", 1000)], keys=["a", "b"]), 1000) is None
    assert demand_of(train, new_write(2, state="failed"), 0) is None
    mixed = demand_of(train, new_write(4, [column("y", 1000)], keys=["a", "b", "c", "d"]), 1000)
    assert (mixed.sample_count, mixed.value_bytes) == (2, 500)


def test_what_the_partition_would_refuse_is_refused_before_it_waits():
    train = bounded(max_bytes=10)
    insert(train, 1, keys=["a"])
    with pytest.raises(AlreadyExistsError):
        demand_of(train, new_write(1, ["x"], keys=["a"], key_mode="new"), 4)
    with pytest.raises(FieldMismatchError):
        demand_of(train, new_write(1, [column("x", 4)]), 4)
    seal(train)
    with pytest.raises(PartitionSealedError):
        demand_of(train, new_write(1, ["x"]), 4)


@pytest.mark.parametrize(
    ("settings", "arguments", "error", "bound"),
    [
        ({"max_bytes": 10}, {"value_bytes": 11}, QuotaExceededError, "max_bytes"),
        ({"admission": {"most": 2}}, {"value_bytes": 1}, AdmissionLimitError, "most"),
    ],
)
async def test_what_never_fits_is_refused_at_once_and_says_by_which_bound(settings, arguments, error, bound):
    line = AdmissionQueue(bounded(**settings))
    with pytest.raises(error) as caught:
        await line.enter(new_id(), new_write(3, ["x"]), **arguments, deadline=None)
    assert caught.value.retry_after_seconds is None
    got, limit = caught.value.metadata["got"], caught.value.metadata["limit"]
    assert (caught.value.metadata["limit_name"], int(got) > int(limit)) == (bound, True)


# Waiting


async def test_the_deadline_says_which_bound_and_when_to_try_again():
    train = bounded(max_bytes=10, admission={"most": 100})
    line = AdmissionQueue(train)
    insert(train, 1, [column("x", 8)])
    with pytest.raises(QuotaExceededError, match="before the deadline") as caught:
        await line.enter(new_id(), new_write(1, [column("x", 4)]), 4, time.monotonic() + 0.01)
    assert caught.value.retry_after_seconds
    assert caught.value.metadata == {"limit_name": "max_bytes", "got": "12", "limit": "10"}
    assert line.waiting_count == 0


async def test_a_put_that_must_not_wait_is_refused_in_the_turn_in_which_it_comes():
    train = bounded(max_bytes=10)
    line = AdmissionQueue(train)
    insert(train, 1, [column("x", 8)])
    put = asyncio.ensure_future(line.enter(new_id(), new_write(1, [column("x", 4)]), 4, 0.0))
    await asyncio.sleep(0)
    assert (put.done(), line.waiting_count) == (True, 0)  # nobody sees it wait
    with pytest.raises(QuotaExceededError):
        await put


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


async def test_a_put_that_fits_passes_one_that_waits_for_consumption():
    """Here the sample for which the trainer waits is behind a put that is too large for now."""
    catalog = Catalog(PlanRunner())
    settings = PartitionSettings(admissions=(Admission("t", 4),))
    train = catalog.create("train", settings)
    line = catalog.admission_queue("train")
    insert(catalog, 3)
    trainer = asyncio.create_task(catalog.claim("train", b"", asks(batch_size=4), 30))
    await turns()
    larger = asyncio.create_task(line.enter(new_id(), new_write(2, ["x"]), 4, None))
    await turns()
    write = new_write(1, ["x"])
    with await line.enter(new_id(), write, 4, time.monotonic() + 5):
        write_to(catalog, write)
    assert (await trainer).answer.rows.tolist() == [0, 1, 2, 3]
    assert (await larger).demand.sample_count == 2
    assert train.tasks["t"].backlog == 0


@pytest.mark.parametrize(
    "settings",
    [{"max_bytes": 12}, {"admission": {"most": 3}}, {"admission": {"most": 3, "unit": "group"}}],
)
async def test_members_of_a_group_that_has_begun_are_not_refused_by_a_limit_that_it_has_passed(settings):
    train = bounded(**settings)
    line = AdmissionQueue(train)

    def member(group):
        return new_write(1, [column("x", 4)], groups=[group], group_size=3)

    for group in "abc":
        write = member(group)
        with await line.enter(new_id(), write, 4, None):
            write_to(train, write)
    first = asyncio.create_task(line.enter(new_id(), member("d"), 4, None))
    second = asyncio.create_task(line.enter(new_id(), member("d"), 4, None))
    await turns()
    for group in "abc" * 2:
        write = member(group)
        with await line.enter(new_id(), write, 4, time.monotonic() + 5):
            write_to(train, write)
    await turns()
    assert not first.done()
    write_to(train, member("d"))  # the group has begun while its members waited
    line.wake()
    assert (await second).demand is None
    assert (await first).demand is None


async def test_a_large_put_has_a_turn_in_which_nothing_passes_it_and_no_longer():
    train, clock = bounded(admission={"most": 4}), Clock()
    line = AdmissionQueue(train, clock=clock)
    insert(train, 2)

    async def put(count, deadline=None):
        write = new_write(count, ["x"])
        with await line.enter(new_id(), write, 4, deadline):
            write_to(train, write)

    large = asyncio.create_task(put(4))
    await turns()
    clock.now += PASSED_SECONDS - 1
    await put(1)
    clock.now += 1
    with pytest.raises(AdmissionLimitError, match="this includes an earlier put of 4 samples") as caught:
        await put(1, clock.now)
    assert caught.value.metadata == {
        "limit_name": "most", "got": "7", "limit": "4", "task_name": "t", "unit": "sample",
    }  # fmt: skip
    small = asyncio.create_task(put(1))
    await turns()
    assert not small.done()
    clock.now += TURN_SECONDS  # and it is over, so that one that never fits does not stop the others
    line.wake()
    await small
    assert not large.done()
    clock.now += PASSED_SECONDS
    clear(train, np.array([0]))
    line.wake()
    small = asyncio.create_task(put(1))
    await turns()
    clear(train, np.arange(1, 4))
    line.wake()
    await large
    assert not small.done()
    clear(train, np.array([4]))
    line.wake()
    await small


async def test_a_large_put_that_waits_is_not_looked_at_again_for_each_clear(monkeypatch):
    train = bounded(admission={"most": 10})
    line, looks = AdmissionQueue(train), []
    insert(train, 10)
    monkeypatch.setattr(queue, "demand_of", lambda *arguments: looks.append(1) or demand_of(*arguments))
    keys = [f"k{each}" for each in range(10)]
    waiting = asyncio.create_task(line.enter(new_id(), new_write(10, ["x"], keys=keys), 4, None))
    await turns()
    for index in range(9):
        clear(train, np.array([index]))
    assert len(looks) == 1
    clear(train, np.array([9]))
    assert (await waiting).demand.sample_count == 10


async def test_after_a_change_few_of_the_puts_that_wait_are_looked_at_and_a_new_one_always(monkeypatch):
    train = bounded(max_bytes=100)
    line, looks = AdmissionQueue(train), []
    insert(train, 1, [column("x", 50)])
    calls = [asyncio.create_task(line.enter(new_id(), new_write(1, ["y"]), 60, None)) for _ in range(1000)]
    await turns()
    fits = line._fits
    monkeypatch.setattr(line, "_fits", lambda *given, **options: looks.append(1) or fits(*given, **options))
    assert (await line.enter(new_id(), new_write(1, ["y"]), 10, None)).demand.value_bytes == 10
    assert len(looks) <= 257
    line.end(lambda: UnavailableError("over"))
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), UnavailableError) for call in calls)


async def test_a_deadlock_is_called_one():
    catalog = Catalog(PlanRunner())
    catalog.create("train", PartitionSettings(admissions=(Admission("t", 1),)))
    line = catalog.admission_queue("train")
    insert(catalog, 1, meta=[{"version": 0}])

    async def refusal():
        with pytest.raises(AdmissionLimitError) as caught:
            await line.enter(new_id(), new_write(1, ["x"]), 4, time.monotonic() + 0.01)
        return str(caught.value)

    assert "deadlock" not in await refusal()
    trainer = asyncio.create_task(catalog.claim("train", b"", asks(batch_size=4), 30))
    await turns()
    assert "deadlock unless samples that fit are still put: task 't' also waits" in await refusal()
    held = insert(catalog, 1, meta=[{"version": 0}], state="held")
    assert "deadlock" not in await refusal()  # it may become live
    clear(catalog, np.array(held))
    trainer.cancel()
    await asyncio.wait([trainer])
    where = (Condition(column="version", operator=">=", values=(1,)),)
    trainer = asyncio.create_task(catalog.claim("train", b"", asks(batch_size=4, where=where), 30))
    await turns()
    assert "and 1 samples are excluded by the conditions in where (version); clear these" in await refusal()
    trainer.cancel()
    await asyncio.wait([trainer])
    assert "for task 't' 1 samples are excluded by the conditions in where (version); clear these" in await refusal()


async def test_keys_that_become_known_meanwhile_need_no_capacity():
    train = bounded(admission={"most": 2})
    line = AdmissionQueue(train)
    insert(train, 1, keys=["a"])
    waiting = asyncio.create_task(line.enter(new_id(), new_write(2, ["x"], keys=["b", "c"]), 4, None))
    await turns()
    assert not waiting.done()
    insert(train, 2, keys=["b", "c"])
    assert (await waiting).demand is None


async def test_a_seal_ends_the_wait():
    train = bounded(admission={"most": 2})
    line = AdmissionQueue(train)
    insert(train, 2)
    waiting = asyncio.create_task(line.enter(new_id(), new_write(1, ["x"]), 4, None))
    await turns()
    seal(train)
    with pytest.raises(PartitionSealedError):
        await waiting


async def test_a_retry_of_what_was_let_in_takes_its_capacity_over():
    train = bounded(admission={"most": 2})
    line = AdmissionQueue(train)
    request_id, write = new_id(), new_write(2, ["x"])
    stalled = await line.enter(request_id, write, 4, None)
    other = asyncio.create_task(line.enter(new_id(), new_write(1, ["x"]), 4, None))
    await turns()
    retried = await line.enter(request_id, write, 4, None)
    with stalled:
        pass
    await turns()
    assert not other.done()  # the capacity is that of the retry
    with retried:
        pass
    assert (await other).demand.sample_count == 1


async def test_a_call_cancelled_in_the_turn_in_which_it_is_let_in_gives_its_capacity_back():
    train = bounded(admission={"most": 2})
    line = AdmissionQueue(train)
    insert(train, 2)
    waiting = asyncio.create_task(line.enter(new_id(), new_write(2, ["x"]), 4, None))
    await turns()
    clear(train, np.array([0, 1]))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await line.enter(new_id(), new_write(2, ["x"]), 4, None)).demand.sample_count == 2


async def test_claims_let_waiting_puts_in():
    catalog = Catalog(PlanRunner())
    train = catalog.create("p", PartitionSettings(admissions=(Admission("t", 4),)))
    insert(train, 4)
    line = catalog.admission_queue("p")
    waiting = asyncio.create_task(line.enter(new_id(), new_write(2, ["x"]), 4, None))
    await turns()
    assert catalog.waiting_put_count("p") == 1
    await catalog.claim("p", b"", asks((0, 1, 0)), 1.0)  # a batch of two
    assert (await waiting).demand.sample_count == 2
    assert catalog.waiting_put_count("p") == 0


async def test_a_clear_of_the_partition_and_a_drain_end_the_waits():
    catalog = Catalog(PlanRunner())
    settings = PartitionSettings(admissions=(Admission("t", 1),))
    for end, error in ((lambda: catalog.remove("p", b""), PartitionClearedError), (catalog.drain, UnavailableError)):
        insert(catalog.create("p", settings), 1)
        waiting = asyncio.create_task(catalog.admission_queue("p").enter(new_id(), new_write(1, ["x"]), 4, None))
        await turns()
        end()
        with pytest.raises(error):
            await waiting
    with pytest.raises(UnavailableError):
        await catalog.admission_queue("p").enter(new_id(), new_write(1, ["x"]), 4, None)


async def test_a_partition_that_writes_waited_for_is_freed_without_the_garbage_collector():
    catalog = Catalog(PlanRunner())
    partition = catalog.create("p", PartitionSettings(admissions=(Admission("t", 1),)))
    insert(partition, 1)
    line, retried, late = catalog.admission_queue("p"), new_id(), time.monotonic()
    gc.disable()
    try:
        calls = []
        for request_id, deadline in [(new_id(), late), (retried, None), (retried, None), (new_id(), None)]:
            calls.append(asyncio.create_task(line.enter(request_id, new_write(1, ["x"]), 4, deadline)))
            await turns()
        calls.pop().cancel()
        catalog.remove("p", b"")
        await asyncio.wait(calls)
        errors = [AdmissionLimitError, CallCancelledError, PartitionClearedError]
        assert [type(call.exception()) for call in calls] == errors
        gone = weakref.ref(partition)
        del partition, line, calls
        await turns()
        assert gone() is None
    finally:
        gc.enable()


async def test_a_partition_without_bounds_has_no_line():
    catalog = Catalog(PlanRunner())
    catalog.create("free", PartitionSettings())
    assert (catalog.admission_queue("free"), catalog.admission_queue("unknown"), catalog.waiting_put_count("free")) == (
        None,
        None,
        0,
    )


def test_the_same_partition_is_asked_for_with_the_same_bounds():
    catalog = Catalog(PlanRunner())
    settings = PartitionSettings(max_bytes=10, admissions=(Admission("t", 1),))

    async def create():
        assert catalog.create("p", settings) is catalog.create("p", settings)
        with pytest.raises(AlreadyExistsError, match="max_bytes is 10, got 11"):
            catalog.create("p", PartitionSettings(max_bytes=11))

    asyncio.run(create())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"most": 0}, "admissions"),
        ({"most": 1, "unit": "turn"}, "admissions"),
        ({"most": 1, "given_back": "saved"}, "admissions"),
        ({"most": 1, "policy": ""}, "policy"),
        ({"most": 1, "task_name": ""}, "task_name"),
    ],
)
def test_admissions_that_make_no_sense_are_refused(arguments, field):
    with pytest.raises(InvalidArgumentError) as caught:
        Admission(**{"task_name": "t"} | arguments)
    assert caught.value.field == field


def test_records_of_plans_that_do_not_consume_what_they_deliver_are_bounded_in_rows(monkeypatch):
    monkeypatch.setattr("tq_service.state.ledger._MOST_REUSING_ROWS", 10)
    train = bounded(max_bytes=1)
    task = task_of(train, "t")
    insert(train, 4)
    for size in (4, 4, 4, 12, 4):
        plan = replace(plan_of(np.arange(size) % 4), consumed=np.zeros(0, np.int64))
        task.deliver(plan, np.arange(4), batch_spec=batch_spec())
    assert (list(task.batches), task.last_forgotten) == ([4], 3)
    assert task.uses[:4].tolist() == [7, 7, 7, 7]
    for _ in range(2):
        task.deliver(plan, np.arange(4), batch_spec=batch_spec())
    assert list(task.batches) == [5, 6]


def test_names_of_claims_that_are_gone_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr("tq_service.state.ledger.MOST_PAST_NAMES", 3)
    train = bounded(max_bytes=1)
    task = task_of(train, "t")
    insert(train, 5)
    for number in range(5):
        task.deliver(plan_of([number]), np.array([number]), request_id=new_id(), name=f"{number}")
        task.on_rows_cleared(np.array([number]))
    task.reach_named_end("end", EndCounts())
    assert list(task.past_names) == ["3", "4", "end"]
    assert not task.names


def test_ids_of_released_claims_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr("tq_service.state.ledger._MOST_ENDED", 3)
    released = task_of(bounded(max_bytes=1), "t").ended
    ids = [new_id() for _ in range(5)]
    for request_id in ids:
        released.add(request_id, 0.0, is_expired=False)
    assert [request_id in released for request_id in ids] == [False, False, True, True, True]
