"""What claims evict: samples that their `where` excludes, and groups of which too few members are left."""

import asyncio

import numpy as np
import pytest
from digest import digest
from domain_support import (
    SlowSampler,
    asks,
    claim_rows,
    clear,
    close_groups,
    expire,
    insert,
    new_write,
    release,
    reset,
    seal,
    set_meta,
    turns,
    update,
)
from domain_support import ack as ack_claim
from domain_support import meta as meta_columns

from tq_service.errors import InvalidArgumentError, RankDisagreementError
from tq_service.machine.claims import ClaimAcked, ClaimReleased, ConsumptionReset, LeaseExpired
from tq_service.machine.policies import VersionPublished
from tq_service.machine.samples import PartitionSealed, SamplesWritten
from tq_service.planning import eviction
from tq_service.planning.view import Readiness
from tq_service.results import EvictedUnit
from tq_service.samplers import GRPOGroupNSampler, PlanRunner, SequentialSampler
from tq_service.schema import Admission, EndCounts, Published
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.serving.status import evicted_by
from tq_service.state import ledger
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Condition, LeaseTerms, RankPlan, Refill
from tq_service.state.table import STATE_NAMES

FRESH = (Condition("version", ">=", (1,)),)
NEWEST = (Condition("version", ">=", published=Published()),)
SKIPPING = GRPOGroupNSampler(n_samples_per_prompt=4)
TAKING = GRPOGroupNSampler(n_samples_per_prompt=4, incomplete_groups="take")
LEASE = LeaseTerms(seconds=60.0)


def catalog_of(**settings):
    catalog = Catalog(PlanRunner())
    return catalog, catalog.create("train", PartitionSettings(**settings))


def put(catalog, versions, group=None, **arguments):
    """Add samples, each with its version, of one group if it is named."""
    groups = {} if group is None else {"groups": [group] * len(versions), "group_size": 4}
    entries = [{} if version is None else {"version": version} for version in versions]
    return insert(catalog, len(versions), meta=entries, **groups, **arguments)


async def claim(catalog, *, max_wait=0.0, unmatched="clear", where=FRESH, batch_size=4, **arguments):
    request = asks(where=where, unmatched=unmatched, batch_size=batch_size, **arguments)
    return (await catalog.claim("train", b"", request, max_wait)).answer


def states(train, rows):
    """Return the state of each of some samples."""
    positions = train.table.find(np.array(rows))
    return [STATE_NAMES[train.state[at]] if at >= 0 else "cleared" for at in positions]


def publish(catalog, version):
    catalog.commit(VersionPublished(policy="default", version=version))


@pytest.mark.parametrize(("unmatched", "expected"), [("wait", "live"), ("fail", "failed"), ("clear", "cleared")])
@pytest.mark.parametrize("has_plan", [True, False])
async def test_what_where_excludes_waits_or_is_evicted_with_a_plan_or_without_one(unmatched, expected, has_plan):
    catalog, train = catalog_of()
    rows = put(catalog, [0, 1, 0, 1])
    answer = await claim(catalog, unmatched=unmatched, batch_size=2 if has_plan else 3)
    assert answer.rows.tolist() == [rows[1], rows[3]] if has_plan else isinstance(answer, NotYet)
    assert states(train, rows) == [expected, "live", expected, "live"]
    assert train.tasks["t"].unmatched_count == (0 if unmatched == "wait" else 2)


async def test_only_what_can_never_satisfy_the_conditions_is_evicted():
    catalog, train = catalog_of()
    rows = put(catalog, [0, None], fields=("x",)) + put(catalog, [None], fields=()) + put(catalog, [0], state="held")
    assert isinstance(await claim(catalog), NotYet)
    # With all its data a sample without a value is excluded; without it the value may come with the data.
    assert states(train, rows) == ["cleared", "cleared", "live", "held"]
    late = put(catalog, [3])
    assert isinstance(await claim(catalog, where=(Condition("version", "<=", published=Published()),)), NotYet)
    assert states(train, late) == ["live"]  # it satisfies the condition once version 3 is published


async def test_leased_and_delivered_samples_stay():
    catalog, train = catalog_of()
    rows = put(catalog, [0] * 4)
    mine, other = catalog.task(train, "t"), catalog.task(train, "other")
    claim_rows(catalog, mine, np.array(rows[:1]))
    claim_rows(catalog, mine, np.array(rows[1:2]), lease=LEASE)
    leased = claim_rows(catalog, other, np.array(rows[2:3]), lease=LEASE)
    assert isinstance(await claim(catalog), NotYet)
    assert states(train, rows) == ["live", "live", "live", "cleared"]
    ack_claim(catalog, other, leased.request_id)  # what another task has consumed may go
    assert isinstance(await claim(catalog), NotYet)
    assert states(train, rows) == ["live", "live", "cleared", "cleared"]


async def test_a_claim_that_waits_evicts_what_comes_and_what_is_no_longer_leased():
    catalog, train = catalog_of()
    other = catalog.task(train, "other")
    waiting = asyncio.ensure_future(claim(catalog, max_wait=60.0))
    await turns()
    (row,) = put(catalog, [0])
    await turns()
    assert states(train, [row]) == ["cleared"]
    held = put(catalog, [0], state="held")
    leased = claim_rows(catalog, other, np.array(put(catalog, [1])), lease=LEASE)
    set_meta(catalog, leased.rows, meta_columns([{"version": 0}]))
    await turns()
    assert states(train, [*held, *leased.rows]) == ["held", "live"]
    ack_claim(catalog, other, leased.request_id)
    update(catalog, held, state="live")
    await turns()
    assert states(train, [*held, *leased.rows]) == ["cleared", "cleared"]
    good = put(catalog, [1] * 4)
    assert (await waiting).rows.tolist() == good


async def test_a_published_version_evicts_what_has_become_too_old():
    catalog, train = catalog_of()
    rows = put(catalog, [0, 1])
    publish(catalog, 0)
    waiting = asyncio.ensure_future(claim(catalog, where=NEWEST, max_wait=60.0))
    await turns()
    assert states(train, rows) == ["live", "live"]
    publish(catalog, 1)
    await turns()
    assert states(train, rows) == ["cleared", "live"]
    put(catalog, [1] * 3)
    assert (await waiting).rows.size == 4


@pytest.mark.parametrize("given_back", ["delivered", "trained", "published"])
@pytest.mark.parametrize("unmatched", ["fail", "clear"])
@pytest.mark.parametrize("unit", ["sample", "group"])
async def test_places_come_back_with_the_eviction_so_no_admission_stands_still(unit, unmatched, given_back):
    catalog, train = catalog_of(admissions=(Admission("t", 8, unit=unit, given_back=given_back),))
    for group in "ab":
        put(catalog, [0] * 4, group)
    task = train.tasks["t"]
    assert task.outstanding_count == (8 if unit == "sample" else 2)
    queue = catalog.admission_queue("train")
    entering = asyncio.ensure_future(
        queue.enter(b"r" * 16, new_write(8, groups=["c"] * 4 + ["d"] * 4, group_size=4), 0, None)
    )
    await turns()
    assert entering.done() == (unit == "group")  # which has 8 places
    assert isinstance(await claim(catalog, sampler=SKIPPING, unmatched=unmatched), NotYet)
    await turns()
    assert task.outstanding_count == 0
    assert entering.done()
    assert task.unmatched_count == 2
    (await entering).__exit__()


@pytest.mark.parametrize("group", ["a", None])
@pytest.mark.parametrize(("unmatched", "gone"), [("fail", "failed"), ("clear", "cleared")])
async def test_one_excluded_member_evicts_a_group_that_is_kept_whole(group, unmatched, gone):
    catalog, train = catalog_of()
    rows = put(catalog, [1, 1, 0, 1], group)
    others = put(catalog, [1] * 4, None if group is None else "b")
    answer = await claim(catalog, sampler=SKIPPING, unmatched=unmatched)
    assert answer.rows.tolist() == others
    assert states(train, rows) == [gone] * 4
    task = train.tasks["t"]
    assert (task.unmatched_count, task.too_small_count) == (1, 0)
    assert (task.backlog, task.skipped_count) == (0, 0)


@pytest.mark.parametrize("reason", ["incomplete", "held", "leased by another", "delivered"])
@pytest.mark.parametrize("sampler", [SKIPPING, TAKING])
async def test_a_group_with_work_in_progress_stays(reason, sampler):
    catalog, train = catalog_of()
    rows = put(catalog, [0, 1, 1], "a")
    if reason != "incomplete":
        rows += put(catalog, [1], "a", state="held" if reason == "held" else "live")
    last = np.array(rows[-1:])
    if reason == "leased by another":
        leased = claim_rows(catalog, catalog.task(train, "other"), last, lease=LEASE)
    elif reason == "delivered":
        claim_rows(catalog, catalog.task(train, "t"), last)
    assert isinstance(await claim(catalog, sampler=sampler), NotYet)
    assert states(train, rows)[:3] == ["live"] * 3
    if reason == "incomplete":
        rows += put(catalog, [1], "a")
    elif reason == "held":
        update(catalog, rows[-1:], state="live")
    elif reason == "leased by another":
        release(catalog, train.tasks["other"], leased.request_id)
    else:
        return
    answer = await claim(catalog, sampler=sampler, batch_unit="group", batch_size=1)
    if sampler is SKIPPING:
        assert isinstance(answer, NotYet)
        assert states(train, rows) == ["cleared"] * 4
    else:
        assert answer.rows.tolist() == rows[1:]  # siblings of the one that is too old
        assert states(train, rows) == ["cleared", "live", "live", "live"]


async def test_where_the_rest_of_groups_is_taken_members_go_one_by_one_and_the_group_with_too_few():
    catalog, train = catalog_of()
    few, none, enough = (put(catalog, versions, name) for name, versions in
                         [("few", [0, 0, 0, 1]), ("none", [0] * 4), ("enough", [0, 0, 1, 1])])  # fmt: skip
    answer = await claim(catalog, sampler=TAKING, batch_unit="group", batch_size=1, least_members=2, unmatched="fail")
    assert answer.rows.tolist() == enough[2:]
    assert states(train, few + none) == ["failed"] * 8
    assert states(train, enough) == ["failed", "failed", "live", "live"]
    task = train.tasks["t"]
    assert (task.unmatched_count, task.too_small_count) == (1 + 2, 1)  # the group "none", and two members


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("sampler", [SKIPPING, TAKING])
@pytest.mark.parametrize("loss", ["failed", "cleared", "dead-lettered"])
async def test_a_group_that_has_lost_too_many_is_evicted(loss, sampler, name):
    catalog, train = catalog_of()
    task = catalog.task(train, "t")
    small, enough = put(catalog, [1] * 4, name), put(catalog, [1] * 4, name and "b")
    for lost in (small[:2], enough[:1]):
        if loss == "failed":
            update(catalog, lost, state="failed")
        elif loss == "cleared":
            clear(catalog, np.array(lost))
        else:
            lease = LeaseTerms(seconds=1.0, max_deliveries=1)
            expire(catalog, task, claim_rows(catalog, task, np.array(lost), lease=lease).request_id)
    answer = await claim(catalog, sampler=sampler, batch_unit="group", batch_size=1, least_members=3)
    assert states(train, small) == ["cleared"] * 4  # those that had failed too: the name is free again
    assert states(train, enough[1:]) == ["live"] * 3
    assert answer.rows.tolist() == enough[1:] if sampler is TAKING else isinstance(answer, NotYet)
    assert (task.unmatched_count, task.too_small_count) == (0, 1)
    assert [unit.reason for unit in task.evicted] == ["too_small"]
    if name:
        assert put(catalog, [1] * 4, name) == [8, 9, 10, 11]


async def test_a_closed_group_may_be_too_small_though_it_lost_nothing():
    catalog, train = catalog_of()
    rows = put(catalog, [1], "a")
    single = put(catalog, [1])  # without a group it is no small one
    assert isinstance(await claim(catalog, sampler=TAKING, least_members=2), NotYet)
    assert states(train, rows) == ["live"]  # more may come
    close_groups(catalog, ["a"])
    answer = await claim(catalog, sampler=TAKING, least_members=2, batch_unit="group", batch_size=1)
    assert answer.rows.tolist() == single
    assert states(train, rows) == ["cleared"]


async def test_a_group_that_was_delivered_and_cleared_in_part_is_not_too_small():
    catalog, train = catalog_of()
    rows = put(catalog, [1] * 4, "a")
    assert (await claim(catalog, sampler=SKIPPING, rank=(0, 1, 0), least_members=4)).rows.tolist() == rows
    clear(catalog, np.array(rows[:3]))
    await claim(catalog, sampler=SKIPPING, rank=(0, 1, 1), least_members=4)
    assert states(train, rows[3:]) == ["live"]


async def test_the_end_counts_what_was_evicted():
    for unmatched, counts in (("fail", {"failed_count": 3}), ("clear", {"cleared_count": 3}),
                              ("wait", {"excluded_count": 3})):  # fmt: skip
        catalog, _ = catalog_of()
        put(catalog, [0, 0, 0])
        seal(catalog)
        assert await claim(catalog, unmatched=unmatched) == EndCounts(**counts)


async def test_ranks_must_agree_on_what_is_evicted():
    catalog, _ = catalog_of()
    put(catalog, [1, 1])
    assert isinstance(await claim(catalog, batch_size=1, rank=(0, 2, 0)), RankPlan)
    with pytest.raises(RankDisagreementError, match=r"unmatched of batch_index 0 .* is clear, got fail"):
        await claim(catalog, batch_size=1, rank=(1, 2, 0), unmatched="fail")
    with pytest.raises(RankDisagreementError, match=r"least_members of batch_index 0 .* is 0, got 2"):
        await claim(catalog, batch_size=1, rank=(1, 2, 0), least_members=2)


def test_a_least_number_of_members_needs_to_be_told_what_to_do():
    with pytest.raises(InvalidArgumentError, match="least_members is 2, but unmatched is 'wait'"):
        asks(least_members=2)
    with pytest.raises(InvalidArgumentError, match="least_members is -1"):
        asks(least_members=-1, unmatched="fail")


async def test_a_slow_sampler_evicts_too_and_its_plan_stays_good():
    catalog, train = catalog_of()
    stale, fresh = put(catalog, [0] * 4, "a"), put(catalog, [1] * 4, "b")
    slow = SlowSampler(SKIPPING, turns=3)
    task = asyncio.ensure_future(claim(catalog, sampler=slow, max_wait=60.0))
    assert (await task).rows.tolist() == fresh
    assert states(train, stale) == ["cleared"] * 4
    assert slow.call_count == 1


async def test_a_group_of_which_all_are_dead_lettered_is_too_small():
    catalog, train = catalog_of()
    task = catalog.task(train, "t")
    rows = put(catalog, [1] * 4, "a")
    lease = LeaseTerms(seconds=1.0, max_deliveries=1)
    expire(catalog, task, claim_rows(catalog, task, np.array(rows), lease=lease).request_id)
    await claim(catalog, sampler=TAKING)
    assert states(train, rows) == ["live"] * 4
    await claim(catalog, sampler=TAKING, least_members=1)
    assert states(train, rows) == ["cleared"] * 4
    assert [unit.reason for unit in task.evicted] == ["too_small"]


async def test_a_version_that_goes_back_while_a_slow_sampler_plans_evicts_nothing():
    catalog, train = catalog_of()
    rows = put(catalog, [1] * 2)
    publish(catalog, 2)
    slow = SlowSampler(SequentialSampler())
    waiting = asyncio.ensure_future(claim(catalog, sampler=slow, where=NEWEST, batch_size=2, max_wait=60.0))
    await slow.started.wait()
    catalog.commit(VersionPublished(policy="default", version=1, rewind=True))
    slow.go.set()
    assert (await waiting).rows.tolist() == rows
    assert train.tasks["t"].evicted_count == 0


async def test_many_are_evicted_off_the_event_loop_in_several_steps(monkeypatch):
    monkeypatch.setattr(eviction, "MOST_EVICTED_AT_ONCE", 8)
    monkeypatch.setattr("tq_service.planning.view.MOST_EVICTED_AT_ONCE", 8)
    catalog, train = catalog_of()
    rows = put(catalog, [0] * 50)
    good = put(catalog, [1] * 4)
    assert (await claim(catalog, max_wait=60.0, unmatched="fail")).rows.tolist() == good
    waiting = asyncio.ensure_future(claim(catalog, max_wait=60.0, unmatched="fail"))
    for _ in range(500):
        await asyncio.sleep(0.001)
        if states(train, rows) == ["failed"] * 50:
            break
    assert states(train, rows) == ["failed"] * 50
    waiting.cancel()


async def test_later_claims_look_only_at_what_is_new(monkeypatch):
    catalog, _ = catalog_of()
    put(catalog, [1] * 2000)
    seen = []
    excluded = "tq_service.planning.view.Readiness.excluded"
    plain = Readiness.excluded
    monkeypatch.setattr(excluded, lambda self, rows: (seen.append(self.table.index[rows].size), plain(self, rows))[1])
    for index in range(3):
        await claim(catalog, rank=(0, 1, index))
    assert sum(seen) < 2100
    seen.clear()
    put(catalog, [0, 1])
    await claim(catalog, rank=(0, 1, 3))
    assert 0 < sum(seen) < 10
    seen.clear()
    await claim(catalog, rank=(0, 1, 4), unmatched="wait")
    assert not seen


async def test_evictions_are_in_a_snapshot():
    catalog, train = catalog_of()
    put(catalog, [0, 0, 1])
    await claim(catalog, unmatched="fail")
    restored = Partition.restore(train.snapshot())
    assert digest(restored) == digest(train)
    assert restored.tasks["t"].unmatched_count == 2


async def test_a_sampler_of_single_samples_evicts_single_ones_though_they_are_in_groups():
    catalog, train = catalog_of()
    rows = put(catalog, [0, 1, 1, 1], "a")
    answer = await claim(catalog, sampler=SequentialSampler(), batch_size=3)
    assert answer.rows.tolist() == rows[1:]
    assert states(train, rows) == ["cleared", "live", "live", "live"]


# What is on record of it


def units(task, after=0, most=1024):
    """Return serial, unit, group, key, reason, version, count, refill and rollout of units."""
    return [tuple(getattr(each, name) for name in EvictedUnit.__slots__) for each in task.evicted_after(after, most)]


async def test_evicted_units_are_on_record_with_their_names_reasons_and_version():
    catalog, train = catalog_of()
    put(catalog, [0, 1, 1, 1], "mixed", keys=["m0", "m1", "m2", "m3"])
    put(catalog, [3], "small", keys=["s"])
    close_groups(catalog, ["small"])
    put(catalog, [0], keys=["single"])
    publish(catalog, 7)
    asks_for = {"where": (Condition("version", ">=", published=Published(offset=-6)),), "batch_unit": "group"}
    await claim(catalog, sampler=TAKING, least_members=2, batch_size=3, **asks_for)
    expected = [
        (1, "sample", "mixed", "m0", "unmatched", 7, 1, None, None),
        (2, "group", "small", "s", "too_small", 7, 1, None, None),
        (3, "sample", None, "single", "unmatched", 7, 1, None, None),
    ]
    task = train.tasks["t"]
    assert units(task) == expected
    assert units(task, after=1, most=1) == expected[1:2]
    assert units(task, after=3) == []
    assert (task.unmatched_count, task.too_small_count) == (2, 1)
    reset(catalog, task, keep_consumed=False)
    put(catalog, [0])
    await claim(catalog)  # of no policy
    assert units(task, after=3) == [(4, "sample", None, None, "unmatched", None, 1, None, None)]
    restored = Partition.restore(train.snapshot())
    assert digest(restored) == digest(train)
    assert units(restored.tasks["t"])[:3] == expected


async def test_the_oldest_units_are_forgotten_and_counted(monkeypatch):
    monkeypatch.setattr(ledger, "MOST_EVICTED", 4)
    catalog, train = catalog_of()
    for _ in range(3):
        put(catalog, [0, 0])
        await claim(catalog)
    task = train.tasks["t"]
    assert [unit[0] for unit in units(task)] == [3, 4, 5, 6]
    assert task.evicted_count == 6
    known = {after: evicted_by(task, after, 0) for after in (0, 1, 2, 5, 6, 9)}
    assert {after: each.dropped_count for after, each in known.items()} == {0: 2, 1: 1, 2: 0, 5: 0, 6: 0, 9: 0}
    assert [unit.serial for unit in known[5].units] == [6]
    assert evicted_by(task, 0, 2).units == known[0].units[:2]
    for wrong in ((-1, 0), (0, -1), (0, 1025)):
        with pytest.raises(InvalidArgumentError, match=r"(after|limit) is -?\d+; expected"):
            evicted_by(task, *wrong)


async def test_an_answer_has_no_more_names_than_fit():
    catalog, train = catalog_of()
    put(catalog, [0] * 1024, keys=[f"{at:0511d}" for at in range(1024)], groups=[f"{at:0511d}" for at in range(1024)])
    await claim(catalog)
    task, serials = train.tasks["t"], []
    while found := evicted_by(task, serials[-1] if serials else 0, 0).units:
        assert sum(len(unit.group + unit.key) for unit in found) <= 1 << 19
        serials += [unit.serial for unit in found]
    assert serials == list(range(1, 1025))


# Refills


def prompts_of(catalog, *keys, **arguments):
    prompts = catalog.create("prompts", PartitionSettings(**arguments))
    catalog.commit(SamplesWritten(partition_id="prompts", write=new_write(len(keys), ("x",), keys=list(keys))))
    return prompts


async def take(catalog, count=1, **arguments):
    request = asks(task="rollout", batch_size=count, **arguments)
    return (await catalog.claim("prompts", b"", request, 0.0)).answer


def outcomes(train, after=0):
    return [unit.refill for unit in train.tasks["t"].evicted_after(after, 1024)]


def refilled(**arguments):
    return {"sampler": SKIPPING, "refill": Refill(partition_id="prompts", task_name="rollout", **arguments)}


async def test_the_prompt_of_an_evicted_group_is_claimable_again_a_few_times():
    catalog, train = catalog_of()
    prompts = prompts_of(catalog, "p0", "p1", admissions=(Admission("rollout", 8),))
    rollout = prompts.tasks["rollout"]
    for attempt in range(3):
        taken = await take(catalog, 2 if attempt == 0 else 1)
        assert taken.rows.tolist() == ([0, 1] if attempt == 0 else [0])
        assert (rollout.consumed_count, rollout.backlog, rollout.outstanding_count) == (2, 0, 0)
        put(catalog, [0] * 4, "p0")
        assert isinstance(await claim(catalog, **refilled(max_refills=2)), NotYet)
        assert outcomes(train, after=attempt) == ["refilled" if attempt < 2 else "used_up"]
    assert isinstance(await take(catalog), NotYet)
    assert rollout.refilled_count == 2
    restored = Partition.restore(prompts.snapshot())
    assert digest(restored) == digest(prompts)
    catalog.commit(ConsumptionReset(partition_id="prompts", task_name="rollout", keep_consumed=False))
    await take(catalog, 2)
    put(catalog, [0] * 4, "p0")
    await claim(catalog, **refilled(max_refills=2))
    assert outcomes(train, after=3) == ["refilled"]  # it counts anew in each epoch


@pytest.mark.parametrize("end", ["ack", "release", "expire"])
async def test_a_prompt_that_is_leased_is_claimable_once_its_worker_is_done(end):
    catalog, train = catalog_of()
    prompts = prompts_of(catalog, "p0", "p1")
    lease = LeaseTerms(seconds=60.0, max_deliveries=1 if end == "expire" else None)
    leased = await take(catalog, 2, lease=LEASE if end != "expire" else lease)
    rollout = prompts.tasks["rollout"]
    put(catalog, [0] * 4, "p0")
    await claim(catalog, **refilled())
    put(catalog, [0] * 4, "p0")
    await claim(catalog, **refilled())
    assert outcomes(train) == ["refilled", "pending"]
    assert rollout.leased_count == 2
    restored = Partition.restore(prompts.snapshot())
    assert digest(restored) == digest(prompts)
    kind = {"ack": ClaimAcked, "release": ClaimReleased, "expire": LeaseExpired}[end]
    catalog.commit(kind(partition_id="prompts", task_name="rollout", request_id=leased.request_id))
    if end == "ack":
        assert (await take(catalog)).rows.tolist() == [0]
        assert isinstance(await take(catalog), NotYet)  # the other one is done
        change = ClaimAcked(partition_id="prompts", task_name="rollout", request_id=leased.request_id)
        assert catalog.commit(change) is None  # once more is fine
    elif end == "release":
        assert (await take(catalog, 2)).rows.tolist() == [0, 1]
    else:
        assert isinstance(await take(catalog), NotYet)
        assert rollout.dead_lettered_count == 2
    assert rollout.refilled_count == 1


async def test_what_cannot_be_refilled_says_why():
    catalog, train = catalog_of()
    for name in ("elsewhere", "nobody"):
        put(catalog, [0] * 4, name)
        await claim(catalog, **refilled())
    prompts = prompts_of(catalog, "left", "failed", "twice")
    put(catalog, [0] * 4, "left")
    await claim(catalog, **refilled())
    await take(catalog, 3)
    catalog.commit(
        SamplesWritten(partition_id="prompts", write=new_write(1, keys=["failed"], key_mode="existing", state="failed"))
    )
    for name in ("failed", "unknown"):
        put(catalog, [0] * 4, name)
    put(catalog, [0], keys=["twice"])  # a sample without a group goes by its own key
    await claim(catalog, **refilled())
    assert outcomes(train) == ["unknown", "unknown", "pending", "given_up", "unknown", "refilled"]
    assert (await take(catalog)).rows.tolist() == [2]
    assert prompts.tasks["rollout"].refilled_count == 1


async def test_a_refill_wakes_the_workers_that_wait():
    catalog, _ = catalog_of()
    prompts_of(catalog, "p0")
    await take(catalog)
    waiting = asyncio.ensure_future(catalog.claim("prompts", b"", asks(task="rollout", batch_size=1), 60.0))
    await turns()
    put(catalog, [0] * 4, "p0")
    await claim(catalog, **refilled())
    assert (await waiting).answer.rows.tolist() == [0]


async def test_ranks_whose_batch_is_refilled_go_on():
    catalog, _ = catalog_of()
    prompts = prompts_of(catalog, "p0", "p1")
    assert (await take(catalog, rank=(0, 1, 0))).rows.tolist() == [0]
    assert (await take(catalog, rank=(0, 1, 1))).rows.tolist() == [1]
    put(catalog, [0] * 4, "p0")
    await claim(catalog, **refilled())
    assert (await take(catalog, rank=(0, 1, 2))).rows.tolist() == [0]
    assert prompts.tasks["rollout"].consumed_count == 2
    catalog.commit(PartitionSealed(partition_id="prompts"))
    assert isinstance(await take(catalog, rank=(0, 1, 3)), EndCounts)
    put(catalog, [0] * 4, "p0")
    await claim(catalog, **refilled())
    assert outcomes(catalog.get("train")) == ["refilled", "given_up"]


def test_a_refill_needs_to_be_told_what_is_evicted():
    refill = Refill(partition_id="prompts", task_name="rollout")
    with pytest.raises(InvalidArgumentError, match="refill is rollout of prompts, at most 3 times, but unmatched is"):
        asks(refill=refill)
    for wrong in ({"partition_id": ""}, {"task_name": ""}, {"max_refills": 0}):
        with pytest.raises(InvalidArgumentError):
            Refill(**{"partition_id": "p", "task_name": "t", **wrong})
