"""Groups: complete, closed, broken, and slots that are used again."""

import numpy as np
import pytest
from domain_support import clear, close_groups, insert, partition, update

from tq_service.errors import InvalidArgumentError, NotFoundError, PreconditionError


@pytest.fixture
def train():
    return partition()


def complete(train, name, *, default=None, no_more=False):
    slots = train.groups.slots_of([name])
    return bool(train.groups.is_complete(slots, default, no_more=no_more)[0])


def counts(train, name):
    groups = train.groups
    (slot,) = groups.slots_of([name])
    return tuple(int(counter[slot]) for counter in (groups.members, groups.failed, groups.cleared))


def test_a_group_is_complete_at_its_declared_size(train):
    insert(train, 2, groups=["a", "a"], group_size=3)
    assert not complete(train, "a", default=2, no_more=True)
    insert(train, 1, groups=["a"])
    assert complete(train, "a")


def test_a_group_of_unknown_size_is_complete_at_the_samplers_size_or_when_no_more_come(train):
    insert(train, 2, groups=["a", "a"])
    assert not complete(train, "a")
    assert not complete(train, "a", default=3)
    assert complete(train, "a", default=2)
    assert complete(train, "a", no_more=True)


def test_a_closed_group_is_complete_and_takes_nobody(train):
    insert(train, 1, groups=["a"], group_size=8)
    close_groups(train, ["a"])
    assert complete(train, "a")
    with pytest.raises(PreconditionError, match="closed"):
        insert(train, 1, groups=["a"])
    assert train.inserted_count == 1
    close_groups(train, ["a"])


def test_an_unknown_group_closes_none(train):
    insert(train, 1, groups=["alpha"])
    with pytest.raises(NotFoundError, match="alpha", check=lambda error: error.reason == "GROUP_NOT_FOUND"):
        close_groups(train, ["alpha", "alpah"])
    assert not train.groups.closed.data.any()


@pytest.mark.parametrize(
    ("names", "size", "error"),
    [
        (["a", "a", ""], 0, PreconditionError),  # 3 of 3 already hold one
        (["a"], 4, InvalidArgumentError),
        (["b", "b", "b"], 2, PreconditionError),
        (["b"], -1, InvalidArgumentError),
    ],
)
def test_members_that_do_not_fit_are_refused(train, names, size, error):
    insert(train, 2, groups=["a", "a"], group_size=3)
    before = train.version
    with pytest.raises(error):
        insert(train, len(names), groups=names, group_size=size)
    assert (train.inserted_count, train.version, list(train.groups.slot_of)) == (2, before, ["a"])


def test_members_are_counted_by_what_became_of_them(train):
    insert(train, 4, groups=["a"] * 4)
    insert(train, 1, groups=["a"], state="held")
    insert(train, 1, groups=["a"], state="failed")
    assert counts(train, "a") == (6, 1, 0)
    update(train, [0, 4], state="failed")
    assert counts(train, "a") == (6, 3, 0)
    update(train, [1], state="held")
    update(train, [1], state="held")
    assert counts(train, "a") == (6, 3, 0)
    clear(train, np.array([0, 1, 2]))
    assert counts(train, "a") == (6, 2, 3)
    update(train, [3], state="live")
    assert counts(train, "a") == (6, 2, 3)


def test_slots_of_groups_that_are_gone_are_used_again(train):
    for step in range(50):
        names = [f"g{step}"] * 2 + [f"h{step}"] * 2
        indexes = insert(train, 4, groups=names, group_size=2)
        assert counts(train, f"g{step}") == (2, 0, 0)
        assert train.groups.names_of(train.table.find(np.array(indexes))) == names
        clear(train, np.array(indexes))
    assert len(train.groups) == 0
    assert train.groups.slots.count == 2
    assert train.groups.in_use
    groups = train.groups
    assert groups.members.data.sum() == groups.declared.data.sum() == groups.closed.data.sum() == 0


def test_a_group_stays_as_long_as_one_of_its_members(train):
    insert(train, 3, groups=["a", "a", ""], group_size=2)
    clear(train, np.array([0, 2]))
    assert counts(train, "a") == (2, 0, 1)
    with pytest.raises(PreconditionError, match="2 of 2"):
        insert(train, 1, groups=["a"])


def test_many_groups(train):
    names = [f"g{number}" for number in range(300)]
    insert(train, 300, groups=names)
    assert train.groups.names_of(np.arange(300)) == names
    assert [counts(train, name)[0] for name in names] == [1] * 300


def test_a_sample_stays_in_its_group(train):
    insert(train, 2, keys=["k0", "k1"], groups=["a", ""])
    insert(train, 2, keys=["k0", "k1"], groups=["a", ""])
    for names in (["b", ""], ["", "a"]):
        with pytest.raises(InvalidArgumentError, match="cannot change"):
            insert(train, 2, keys=["k0", "k1"], groups=names)
    assert counts(train, "a") == (1, 0, 0)
