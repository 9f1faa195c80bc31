"""Rows that a plan drops: pending no more, neither consumed nor delivered, and back after a reset or a release."""

import numpy as np
import pytest
from domain_support import ack, asks, clear, expire, insert, new_id, partition, release, reset, task_of

from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import LeaseTerms, Plan, RankPlan
from tq_service.state.table import DROPPED, UNCLAIMED


@pytest.fixture
def train():
    train = partition()
    insert(train, 8)
    return train


def plan_that_drops(*ranks):
    """Return a plan of `(rows, dropped)` for each rank."""
    parts = ((np.array(rows, np.int64), np.array(dropped, np.int64)) for rows, dropped in ranks)
    return RecordedPlan.of(Plan(ranks=tuple(RankPlan(rows=rows, dropped=dropped) for rows, dropped in parts)))


def record(train, *ranks):
    task, plan = task_of(train, "t"), plan_that_drops(*ranks)
    request = asks((0, len(ranks), task.next_batch_index))
    task.deliver(plan, train.table.find(plan.named), batch_spec=request.batch_spec)
    return task


def claim(train, rows, dropped, lease=None):
    plan, request_id = plan_that_drops((rows, dropped)), new_id()
    task = task_of(train, "t")
    task.deliver(plan, train.table.find(plan.named), request_id=request_id, lease=lease)
    return task, request_id


def counts(task):
    return task.consumed_count, task.dropped_count, task.backlog


def test_a_batch_gives_each_rank_its_rows_and_names_what_it_leaves_out(train):
    task = record(train, ([0, 1], [4]), ([2], [5, 6]))
    assert counts(task) == (3, 3, 2)
    part = task.recorded(asks((1, 2, 0)))
    assert (part.rows.tolist(), part.dropped.tolist()) == ([2], [5, 6])
    assert task.is_lost(np.arange(8)).tolist() == [False] * 4 + [True] * 3 + [False]


def test_a_rank_gets_its_batch_whatever_became_of_the_dropped_rows(train):
    task = record(train, ([0, 1], [4]), ([2], [5]))
    clear(train, np.array([4, 5]))
    assert task.recorded(asks((0, 2, 0))).rows.tolist() == [0, 1]
    clear(train, np.array([0, 1, 2]))
    assert not task.batches, "the record goes with what was delivered"
    assert counts(task) == (3, 2, 3)


def test_batches_that_deliver_nothing_are_kept_for_their_ranks_and_do_not_pile_up():
    train = partition()
    insert(train, 100)
    for row in range(100):
        task = record(train, ([], [row]), ([], []))
    assert task.recorded(asks((0, 2, 99))).rows.size == 0
    assert len(task.batches) <= 16


@pytest.mark.parametrize("keep_consumed", [False, True])
def test_a_reset_has_dropped_rows_claimable_again(train, keep_consumed):
    task = record(train, ([0, 1], [4, 5]))
    reset(train, task, keep_consumed=keep_consumed)
    assert counts(task) == ((2, 0, 6) if keep_consumed else (0, 0, 8))
    assert task.kept_count == (2 if keep_consumed else 0)
    assert (task.claim.data[4:6] == UNCLAIMED).all()


@pytest.mark.parametrize("rows", [[0, 1], []])
def test_a_released_claim_takes_back_what_it_dropped(train, rows):
    task, request_id = claim(train, rows, [4])
    assert counts(task) == (len(rows), 1, 7 - len(rows))
    release(train, task, request_id)
    assert counts(task) == (0, 0, 8)


def test_a_leased_claim_drops_with_its_acknowledgement(train):
    task, request_id = claim(train, [0, 1], [4], LeaseTerms(seconds=60.0))
    assert (counts(task), task.leased_count) == ((3, 0, 5), 3)
    assert ack(train, task, request_id, np.array([0, 4])) == 2
    assert counts(task) == (2, 1, 5)
    assert ack(train, task, request_id, np.array([0, 4])) == 0, "once more is fine"
    assert ack(train, task, request_id) == 1
    assert (counts(task), task.leased_count) == ((2, 1, 5), 0)
    assert task.claim[4] == DROPPED


def test_a_lease_that_runs_out_drops_nothing(train):
    task, request_id = claim(train, [0, 1], [4], LeaseTerms(seconds=60.0))
    expire(train, task, request_id)
    assert (counts(task), task.leased_count) == ((0, 0, 8), 0)


@pytest.mark.parametrize("named", [[0, 1], [0, 1, 3, 4]])
def test_a_dropped_row_goes_with_its_group(named):
    """Every part of a batch names all that the batch drops, also what is of the groups of other parts."""
    train = partition()
    insert(train, 6, groups=["a", "a", "a", "b", "b", "b"], group_size=3)
    task, request_id = claim(train, [0, 1, 5], [2, 3, 4], LeaseTerms(seconds=60.0, group_block_size=0))
    assert ack(train, task, request_id, np.array(named)) == 3
    assert (counts(task), task.leased_count) == ((5, 1, 0), 3)
    assert release(train, task, request_id) == 3
    assert counts(task) == (2, 1, 3)
