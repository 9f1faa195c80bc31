"""Changes of claims: what is refused changes nothing, what changes nothing is no change, times come with the change."""

import numpy as np
import pytest
from digest import digest
from domain_support import (
    ack,
    asks,
    claim_rows,
    clear,
    expire,
    extend,
    insert,
    new_id,
    partition,
    plan_of,
    release,
    reset,
    task_of,
)

from tq_service.errors import (
    ClaimReleasedError,
    InvalidArgumentError,
    LeaseExpiredError,
    PreconditionError,
    StaleEpochError,
    TaskNotFoundError,
)
from tq_service.machine.claims import ClaimReleased, ConsumptionReset, LeaseExpired, SamplesClaimed, TaskSeen
from tq_service.machine.state_machine import State, StateMachine
from tq_service.state.plan import LeaseTerms

TERMS = LeaseTerms(seconds=10.0)
GROUPED = LeaseTerms(seconds=10.0, group_block_size=2)


@pytest.fixture
def train():
    train = partition()
    insert(train, 8)
    return train


def refused(train, error, change, *arguments, **named):
    before, version = digest(train), train.version
    with pytest.raises(error):
        change(train, task_of(train, "t"), *arguments, **named)
    assert (digest(train), train.version) == (before, version)


def test_what_is_refused_changes_nothing(train):
    task = task_of(train, "t")
    leased = claim_rows(train, task, [0, 1], lease=TERMS).request_id
    grouped = claim_rows(train, task, [2, 3], lease=GROUPED).request_id
    unleased = claim_rows(train, task, [4, 5]).request_id
    refused(train, InvalidArgumentError, ack, leased, np.array([0, 7]))
    refused(train, InvalidArgumentError, ack, grouped, np.array([2]))
    refused(train, PreconditionError, ack, unleased)
    refused(train, LeaseExpiredError, ack, new_id())
    refused(train, InvalidArgumentError, release, grouped, np.array([3]))
    refused(train, InvalidArgumentError, release, unleased, np.array([4]))
    refused(train, PreconditionError, extend, unleased, 5.0)
    refused(train, LeaseExpiredError, extend, new_id(), 5.0)
    refused(train, LookupError, expire, unleased)
    ack(train, task, leased)
    refused(train, PreconditionError, extend, leased, 5.0)
    refused(train, LookupError, expire, leased)
    task.name = "unknown"
    with pytest.raises(TaskNotFoundError):
        reset(train, task, keep_consumed=True)


def test_what_changes_nothing_is_not_written_down(train):
    task = task_of(train, "t")
    leased = claim_rows(train, task, [0, 1], lease=TERMS).request_id
    ack(train, task, leased, np.array([0]))
    before, version = digest(train), train.version
    assert ack(train, task, leased, np.array([0])) == 0
    assert release(train, task, leased, np.array([0, 7])) == 0
    state = State()
    state.partitions["train"] = train
    facts = {"partition_id": "train", "task_name": "t"}
    assert TaskSeen(**facts).prepare(state) is None
    assert ClaimReleased(**facts, request_id=new_id(), is_final=False).prepare(state) is None
    assert (digest(train), train.version) == (before, version)


def test_an_epoch_is_ended_by_who_means_it(train):
    machine = StateMachine(State())
    machine.state.partitions["train"] = train
    task = task_of(train, "t")
    change = ConsumptionReset(partition_id="train", task_name="t", keep_consumed=True, epoch=0)
    assert machine.commit(change) == 1
    with pytest.raises(StaleEpochError):
        machine.commit(change)
    assert task.epoch == 1


def test_ids_of_ended_claims_are_as_old_as_the_changes_that_ended_them(train):
    """Also where these are applied again much later: the time of a change is written down with it."""
    machine, facts = StateMachine(State()), {"partition_id": "train", "task_name": "t"}
    machine.state.partitions["train"] = train
    machine.replay(TaskSeen(**facts), 1000.0)
    ids = [new_id() for _ in range(3)]
    for number, (request_id, at_seconds) in enumerate(zip(ids, (1000.0, 1500.0, 1950.0), strict=True)):
        machine.replay(SamplesClaimed(**facts, request_id=request_id, plan=plan_of([number]), lease=TERMS), at_seconds)
        kind = LeaseExpired if number == 1 else ClaimReleased
        machine.replay(kind(**facts, request_id=request_id), at_seconds)
    task = train.tasks["t"]
    assert task.ended[ids[1]] == (1500.0, True)
    assert task.recorded(asks(request_id=ids[0])) is None  # forgotten after 900 seconds
    with pytest.raises(ClaimReleasedError):
        task.recorded(asks(request_id=ids[2]))
    with pytest.raises(LeaseExpiredError):
        task.recorded(asks(request_id=ids[1]))


def test_an_expired_lease_is_not_acknowledged_though_its_samples_were_cleared(train):
    task = task_of(train, "t")
    leased = claim_rows(train, task, [0, 1], lease=TERMS).request_id
    clear(train, np.array([0, 1]))
    assert ack(train, task, leased, np.array([0, 1])) == 0  # gone with the claim: nobody else will do their work
    other = claim_rows(train, task, [2], lease=TERMS).request_id
    expire(train, task, other)
    clear(train, np.array([2]))
    with pytest.raises(LeaseExpiredError):
        ack(train, task, other, np.array([2]))


def test_an_expired_claim_stays_expired_though_its_worker_releases_it(train):
    task, request = task_of(train, "t"), asks()
    claim_rows(train, task, [0, 1], request.request_id, lease=TERMS)
    expire(train, task, request.request_id)
    release(train, task, request.request_id)
    clear(train, np.array([0, 1]))
    with pytest.raises(LeaseExpiredError):
        ack(train, task, request.request_id, np.array([0, 1]))
    with pytest.raises(LeaseExpiredError):
        task.recorded(request)
