"""A write of several puts that were gathered does what these do one after the other, or is refused."""

import contextlib

import numpy as np
import pytest
from domain_support import insert, new_write, partition
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import InvalidArgumentError, PartitionSealedError, PreconditionError


@pytest.mark.parametrize("rows_per_put", [-1, 4, 5])
def test_the_rows_are_those_of_whole_puts(rows_per_put):
    with pytest.raises(InvalidArgumentError, match=f"rows_per_put is {rows_per_put}; expected 0 or a divisor of 6"):
        new_write(6, rows_per_put=rows_per_put)


KEYS = st.lists(st.sampled_from([f"k{number}" for number in range(12)]), unique=True, min_size=1, max_size=12)


@given(
    known=KEYS,
    keys=KEYS,
    rows_per_put=st.integers(1, 3),
    expected=st.none() | st.integers(1, 16),
    has_keys=st.booleans(),
)
@examples(200)
def test_gathered_puts_leave_what_they_leave_one_after_the_other(known, keys, rows_per_put, expected, has_keys):
    keys = keys[: len(keys) // rows_per_put * rows_per_put]
    if not keys:
        return
    gathered, alone = (partition(expected_samples=expected) for _ in range(2))
    for target in (gathered, alone):
        with contextlib.suppress(PartitionSealedError):
            insert(target, len(known), keys=known)
    names = {"keys": keys} if has_keys else {}
    refused = False
    for first in range(0, len(keys), rows_per_put):
        some = {name: each[first : first + rows_per_put] for name, each in names.items()}
        try:
            insert(alone, rows_per_put, **some)
        except PartitionSealedError:
            refused = True
    if refused:
        with pytest.raises(PartitionSealedError):
            insert(gathered, len(keys), rows_per_put=rows_per_put, **names)
        return
    insert(gathered, len(keys), rows_per_put=rows_per_put, **names)
    assert gathered.inserted_count == alone.inserted_count
    assert gathered.insert_size_gcd == alone.insert_size_gcd
    assert gathered.sealed == alone.sealed


ROLLOUTS = st.lists(st.sampled_from(["", "r0", "r1", "r2"]), min_size=2, max_size=6)


@given(
    known=st.sampled_from(["", "r0", "r1"]),
    rollouts=ROLLOUTS,
    arguments=st.sampled_from([{}, {"ends_rollouts": True}, {"state": "failed"}]),
)
@examples(200)
def test_gathered_turns_leave_what_they_leave_one_after_the_other(known, rollouts, arguments):
    gathered, alone = partition(), partition()
    for target in (gathered, alone):
        insert(target, 1, keys=["k0"], rollouts=[known])
    keys = [f"k{number}" for number in range(len(rollouts))]
    rollouts[0] = known
    refused = False
    for key, rollout in zip(keys, rollouts, strict=True):
        try:
            insert(alone, 1, keys=[key], rollouts=[rollout], **arguments)
        except (InvalidArgumentError, PreconditionError):
            refused = True
    try:
        insert(gathered, len(keys), rows_per_put=1, keys=keys, rollouts=rollouts, **arguments)
    except (InvalidArgumentError, PreconditionError):
        assert refused
    else:
        assert not refused
        assert gathered.groups.rollout_names_of(np.arange(len(keys))) == [name or None for name in rollouts]
        slots = [target.groups.rollout_slot_of.find(sorted({*rollouts} - {""})) for target in (gathered, alone)]
        assert gathered.groups.closed[slots[0]].tolist() == alone.groups.closed[slots[1]].tolist()
