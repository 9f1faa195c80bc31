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
    seal,
    set_meta,
    turns,
    update,
)
from domain_support import ack as ack_claim
from domain_support import meta as meta_columns

from tq_service.errors import InvalidArgumentError, RankDisagreementError
from tq_service.machine.policies import VersionPublished
from tq_service.planning import eviction
from tq_service.samplers import GRPOGroupNSampler, PlanRunner, SequentialSampler
from tq_service.schema import Admission, EndCounts, Published
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Condition, LeaseTerms, RankPlan
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
    with pytest.raises(InvalidArgumentError, match="least_members is 2 and unmatched is 'wait'"):
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
    from tq_service.planning.view import Readiness

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
