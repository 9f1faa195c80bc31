"""The catalog: partitions by name and life, and those who wait for one to appear."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from domain_support import ack, asks, claim_rows, clear, new_write, release, seal, task_of, turns

from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    LeaseExpiredError,
    LimitExceededError,
    PartitionClearedError,
    PartitionNotFoundError,
    SamplerError,
    StaleEpochError,
    StaleIncarnationError,
    UnavailableError,
)
from tq_service.machine.samples import check_write
from tq_service.samplers import PlanRunner, Sampler
from tq_service.schema import EndCounts, FieldSpec, Layout
from tq_service.serving.catalog import Catalog, Limits
from tq_service.serving.history import Watched
from tq_service.serving.lookup import Clearing, Selection
from tq_service.serving.planner import NotYet
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Condition, LeasedClaim, LeaseTerms


@pytest.fixture
async def catalog():
    return Catalog(PlanRunner())


def claim(catalog, rank=None, *, incarnation=b"", wait=1e6, name="train", **arguments):
    return asyncio.ensure_future(catalog.claim(name, incarnation, asks(rank, **arguments), wait))


async def test_the_first_samples_make_their_partition(catalog):
    written = catalog.write("train", b"", new_write(2, ("x",)))
    partition = written.partition
    assert catalog.get("train") is partition
    assert list(written.global_indexes) == [0, 1]
    assert catalog.write("train", partition.incarnation, new_write(1)).partition is partition
    assert list(catalog.names()) == ["train"]


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (new_write(1, keys=["a"], key_mode="existing"), PartitionNotFoundError),
        (new_write(1, indexes=[0]), PartitionNotFoundError),
        (new_write(0), InvalidArgumentError),
        (new_write(2, keys=["a", "a"]), InvalidArgumentError),
    ],
)
async def test_a_refused_write_leaves_no_partition(catalog, write, error):
    with pytest.raises(error):
        catalog.write("train", b"", write)
    with pytest.raises(PartitionNotFoundError):
        catalog.write("train", b"i" * 16, new_write(1))
    assert not list(catalog.names())


async def test_create_is_idempotent_and_refuses_other_settings(catalog):
    settings = PartitionSettings(expected_samples=4, fields=(FieldSpec("x", layout=Layout.JAGGED),))
    partition = catalog.create("train", settings)
    assert catalog.create("train", PartitionSettings(expected_samples=4, fields=settings.fields)) is partition
    with pytest.raises(AlreadyExistsError, match="expected_samples"):
        catalog.create("train", PartitionSettings(expected_samples=5))


@pytest.mark.parametrize("name", ["", "a\n", "x" * 513])
async def test_names_can_be_typed_and_printed(catalog, name):
    with pytest.raises(InvalidArgumentError, match="printable"):
        catalog.create(name, PartitionSettings())
    with pytest.raises(InvalidArgumentError, match="printable"):
        catalog.write(name, b"", new_write(1))


async def test_unknown_partitions_name_the_nearest(catalog):
    catalog.create("train@12", PartitionSettings())
    with pytest.raises(PartitionNotFoundError, match="known: 'train@12'"):
        catalog.get("train@13")


async def test_a_name_may_be_used_again_and_lives_are_told_apart(catalog):
    first = catalog.write("train", b"", new_write(3, ("x",))).partition
    freed, puts = [], list(catalog.get("train").cells.puts.all())
    catalog.on_freed = freed.extend
    count = catalog.remove("train", first.incarnation)
    assert (count, freed, len(puts)) == (3, puts, 1)
    second = catalog.write("train", b"", new_write(1)).partition
    assert second.incarnation != first.incarnation
    for call in (catalog.get, catalog.remove):
        with pytest.raises(StaleIncarnationError):
            call("train", first.incarnation)
    assert catalog.get("train", second.incarnation).inserted_count == 1


async def test_a_trainer_may_start_before_its_partition(catalog):
    early = claim(catalog, (0, 1, 0))
    await turns()
    catalog.write("other", b"", new_write(2, ("x",)))
    catalog.create("train", PartitionSettings())
    await turns()
    assert not early.done()
    partition = catalog.write("train", b"", new_write(2, ("x",))).partition
    claimed = await early
    assert claimed.partition is partition
    assert claimed.answer.rows.tolist() == [0, 1]
    assert not catalog._arrivals


async def test_waiting_for_a_partition_ends_in_time_and_leaves_nothing(catalog):
    for wait in (0, 0.001):
        claimed = await claim(catalog, wait=wait)
        assert (claimed.partition, claimed.answer) == (None, NotYet())
    leaver, stayer = claim(catalog), claim(catalog)
    await turns()
    leaver.cancel()
    await asyncio.wait([leaver])
    assert len(catalog._arrivals["train"]) == 1
    catalog.write("train", b"", new_write(2, ("x",)))
    assert (await stayer).answer.rows.tolist() == [0, 1]
    assert not catalog._arrivals


async def test_a_partition_gone_before_its_waiter_wakes_is_waited_for_again(catalog):
    call = claim(catalog)
    await turns()
    first = catalog.write("train", b"", new_write(2, ("x",))).partition
    catalog.remove("train", first.incarnation)
    await turns()
    assert not call.done()
    second = catalog.write("train", b"", new_write(2, ("x",))).partition
    assert (await call).partition is second


async def test_a_claim_on_an_earlier_life_is_refused(catalog):
    first = catalog.write("train", b"", new_write(2, ("x",))).partition
    catalog.remove("train", b"")
    with pytest.raises(StaleIncarnationError):
        await claim(catalog, incarnation=first.incarnation)
    catalog.write("train", b"", new_write(2, ("x",)))
    with pytest.raises(StaleIncarnationError):
        await claim(catalog, incarnation=first.incarnation)


async def test_clearing_ends_the_waits_on_a_partition(catalog):
    catalog.create("train", PartitionSettings())
    calls = [claim(catalog), claim(catalog, (0, 1, 0)), claim(catalog, task="other")]
    await turns()
    partition = catalog.get("train")
    assert (catalog.waiting_count(partition, "t"), catalog.waiting_count(partition, "none")) == (2, 0)
    catalog.remove("train", b"")
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), PartitionClearedError) for call in calls)
    assert not catalog._serving


async def test_tasks_consume_independently(catalog):
    partition = catalog.write("train", b"", new_write(2, ("x",))).partition
    seal(partition)
    for task in ("a", "b"):
        assert (await claim(catalog, task=task)).answer.rows.tolist() == [0, 1]
        assert (await claim(catalog, task=task)).answer == EndCounts(consumed_count=2)
    clear(partition, np.array([0, 1]))
    assert {name: each.consumed_count for name, each in partition.tasks.items()} == {"a": 2, "b": 2}


async def test_draining_answers_those_who_wait_and_those_who_come(catalog):
    catalog.write("train", b"", new_write(2, ("x",)))
    batch = (await claim(catalog, (0, 1, 0))).answer
    calls = [claim(catalog, (0, 1, 1)), claim(catalog), claim(catalog, name="elsewhere")]
    await turns()
    catalog.drain()
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), UnavailableError) for call in calls)
    for name in ("train", "elsewhere"):
        with pytest.raises(UnavailableError):
            await claim(catalog, (0, 1, 1), name=name)
    assert batch.rows.tolist() == [0, 1]


async def test_a_removed_partition_is_freed_without_the_garbage_collector(catalog):
    partition = catalog.write("train", b"", new_write(4, ("x",), keys=["a", "b", "c", "d"])).partition
    await claim(catalog, batch_size=1)
    waiting = claim(catalog, batch_size=100)
    await turns()
    gone = weakref.ref(partition)
    gc.disable()
    try:
        catalog.remove("train", b"")
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), PartitionClearedError)
        del partition, waiting
        await turns()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 513])
async def test_a_partition_that_can_never_appear_is_not_waited_for(catalog, name):
    with pytest.raises(InvalidArgumentError, match="partition_id is"):
        await catalog.claim(name, b"", asks(), 1e6)


async def test_samples_that_are_restored_count(catalog):
    written = catalog.write("train", b"", new_write(3, ["x"]))
    assert len(written.global_indexes) == 3
    restored = Catalog(PlanRunner(), Limits(max_samples=4))
    restored.write("early", b"", new_write(1, ["x"]))
    restored.remove("early", b"")
    restored.adopt([Partition.restore(each) for each in catalog.snapshot()])
    restored.write("train", b"", new_write(1, ["x"]))
    with pytest.raises(LimitExceededError, match="5 samples in all partitions"):
        restored.write("train", b"", new_write(1, ["x"]))


@pytest.mark.parametrize("by_key", [False, True], ids=["by index", "by key"])
async def test_samples_that_each_have_a_put_are_cleared_in_small_steps_with_turns_for_others(catalog, by_key):
    """Thousands of puts of one row each held the loop for a tenth of a second when their samples were cleared."""
    put_count, freed = 2000, []
    catalog.on_freed = freed.append
    for number in range(put_count):
        catalog.write("train", b"", new_write(1, ("x",), keys=[f"k{number}"]))
    catalog.write("train", b"", new_write(1000, ("x",), keys=[f"same put {number}" for number in range(1000)]))
    catalog.write("train", b"", new_write(1, ("y",), indexes=[0]))  # one more put of the first sample
    unknown = np.array([10**6])
    indexes = unknown if by_key else np.r_[unknown, np.random.default_rng(0).permutation(put_count + 1000)]
    names = [*(f"k{number}" for number in range(put_count)), *(f"same put {number}" for number in range(1000)), "none"]
    selection = Selection(indexes=indexes, keys=names if by_key else [])
    clearing = Clearing(catalog, "train", b"", selection)
    others, beginning = 0, asyncio.ensure_future(clearing.begin())
    while not beginning.done():
        others += 1
        await asyncio.sleep(0)
    await beginning
    assert clearing.finish() == put_count + 1000
    assert 128 <= max(map(len, freed)) <= 129  # of which the rows that share one put are one
    assert sum(map(len, freed)) == put_count + 2
    assert others >= len(freed) - 1 == (put_count + 2) // 128
    assert catalog.get("train").table.present_count == 0


async def test_a_write_is_checked_once_unless_its_partition_changes(catalog, monkeypatch):
    checks = []
    monkeypatch.setattr(
        "tq_service.serving.catalog.check_write", lambda *arguments: checks.append(1) or check_write(*arguments)
    )
    for expected in (1, 1):  # the first one makes the partition
        write = new_write(3, ("x",))
        async with catalog.capacity_for("train", b"", write) as checked:
            catalog.write("train", b"", write, checked)
        assert len(checks) == expected
        checks.clear()
    write = new_write(2, ("x",), keys=["a", "b"])
    async with catalog.capacity_for("train", b"", write) as checked:
        catalog.write("train", b"", new_write(1, ("x",), keys=["a"]))
        written = catalog.write("train", b"", write, checked)
    assert len(checks) == 3
    assert list(written.global_indexes) == [6, 7]  # the key that came meanwhile is not new


async def test_what_another_call_acknowledged_meanwhile_is_not_acknowledged_again(catalog):
    catalog.write("train", b"", new_write(4, ("x",)))
    task = task_of(catalog, "t")
    held = claim_rows(catalog, task, [0, 1, 2], lease=LeaseTerms(seconds=60.0)).request_id
    leased = LeasedClaim(task_name="t", request_id=held)
    write = new_write(2, ("y",), indexes=[0, 1], acks=leased)
    async with catalog.capacity_for("train", b"", write) as checked:
        assert ack(catalog, task, held, np.array([1])) == 1
        catalog.write("train", b"", write, checked)
    assert (task.leased_count, task.consumed_count) == (1, 3)
    async with catalog.capacity_for("train", b"", new_write(1, ("z",), indexes=[2], claim=leased)) as checked:
        release(catalog, task, held)
        with pytest.raises(LeaseExpiredError):
            catalog.write("train", b"", new_write(1, ("z",), indexes=[2], claim=leased), checked)
    assert "z" not in catalog.get("train").cells.fields


async def test_nothing_more_is_cleared_under_a_name_that_was_used_again(catalog):
    for _ in range(300):
        catalog.write("train", b"", new_write(1, ("x",)))
    clearing = Clearing(catalog, "train", b"", Selection(indexes=np.arange(300)))
    beginning = asyncio.ensure_future(clearing.begin())
    await turns(1)
    catalog.remove("train", b"")
    catalog.write("train", b"", new_write(300, ("x",)))
    with pytest.raises(StaleIncarnationError):
        await beginning
    assert catalog.get("train").table.present_count == 300


# Tasks whose calls are refused


class FailingSampler(Sampler):
    name = "failing"

    def __init__(self, *, inline):
        self.is_inline = inline

    def runs_inline(self, request):
        return self.is_inline

    def plan(self, view, request):
        raise ValueError("no plan")


REFUSED = {
    "epoch": ({"epoch": 3}, StaleEpochError),
    "where": ({"where": (Condition(column="tag", operator=">", values=(1,)),)}, InvalidArgumentError),
    "sampler": ({"sampler": FailingSampler(inline=True)}, SamplerError),
    "sampler off the loop": ({"sampler": FailingSampler(inline=False)}, SamplerError),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("rank", [None, (0, 1, 0)])
async def test_refused_calls_leave_no_task(catalog, name, rank):
    arguments, error = REFUSED[name]
    partition = catalog.write("train", b"", new_write(4, ("x",), meta=[{"tag": "a"}] * 4)).partition
    columns, listeners = list(partition.table.columns), len(partition.on_rows)
    start = catalog.history.mark()
    for number in range(300):
        with pytest.raises(error):
            await claim(catalog, rank, task=f"eval {number}", **arguments)
    assert not partition.tasks
    assert list(partition.table.columns) == columns
    assert (len(partition.on_rows), len(partition.on_reset)) == (listeners, listeners)
    changes = catalog.history.since(start, Watched(prefix="", is_shown=lambda _name: True))
    assert not any(changed.task_names or changed.blocks for changed in changes)
    assert not any(past.task_at for past in catalog.history._pasts.values())
    assert (await claim(catalog, rank, task="eval 0")).answer
    with pytest.raises(error):  # what is on record stays
        await claim(catalog, rank if rank is None else (0, 1, 1), task="eval 0", **arguments)
    assert list(partition.tasks) == ["eval 0"]


async def test_a_refused_call_leaves_a_task_for_which_others_wait_or_that_was_declared(catalog):
    catalog.create("val", PartitionSettings(tasks=("declared",)))
    catalog.write("train", b"", new_write(1, ("x",)))
    waiting = claim(catalog, task="waited for", batch_size=2)
    await turns()
    for name, task in (("val", "declared"), ("train", "waited for")):
        with pytest.raises(SamplerError):
            await claim(catalog, name=name, task=task, sampler=FailingSampler(inline=True))
        assert list(catalog.get(name).tasks) == [task]
    catalog.write("train", b"", new_write(1, ("x",)))
    assert (await waiting).answer.rows.tolist() == [0, 1]
