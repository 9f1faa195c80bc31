"""Which rows a write means: keys by key_mode, indexes, new ones; and refusals that change nothing."""

import numpy as np
import pytest
from digest import keys_of
from domain_support import clear, insert, new_write, partition, seal, write_to

from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    KeyNotFoundError,
    PartitionSealedError,
    SampleNotFoundError,
)
from tq_service.machine.samples import check_write


@pytest.fixture
def train():
    """Samples 0 "a", 1 "b", 2 without a key; 3 "c" is cleared."""
    train = partition()
    insert(train, 2, keys=["a", "b"])
    insert(train, 1)
    insert(train, 1, keys=["c"])
    clear(train, np.array([3]))
    return train


def snapshot(train):
    return (
        train.inserted_count, train.table.present_count, keys_of(train), train.version,
        train.insert_size_gcd, list(train.cells.fields), train.meta.names(), len(train.groups),
        list(train.state_counts),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "mode", "positions"),
    [
        (["b", "a"], "upsert", [1, 0]),
        (["b", "new", "a"], "upsert", [1, -1, 0]),
        (["c"], "upsert", [-1]),
        (["c", "d"], "new", [-1, -1]),
        (["b"], "existing", [1]),
    ],
)
def test_keys_by_mode(train, keys, mode, positions):
    checked = check_write(train, new_write(len(keys), keys=keys, key_mode=mode))
    found = np.full(len(keys), -1) if checked.positions is None else checked.positions
    assert found.tolist() == positions
    assert found[checked.is_new].tolist() == [position for position in positions if position < 0]
    assert checked.new_count == positions.count(-1)


def test_indexes_and_new_rows(train):
    assert check_write(train, new_write(2, indexes=[2, 0])).positions.tolist() == [2, 0]
    checked = check_write(train, new_write(2))
    assert (checked.positions, checked.is_new, checked.new_count) == (None, slice(None), 2)


@pytest.mark.parametrize(
    ("write", "error", "words"),
    [
        (new_write(0), InvalidArgumentError, "the put contains 0 samples"),
        (new_write(2, keys=["d"]), InvalidArgumentError, "keys has 1 values for 2 samples"),
        (new_write(1, groups=["g", "h"]), InvalidArgumentError, "groups has 2 values for 1"),
        (new_write(1, indexes=[0, 1]), InvalidArgumentError, "global_indexes has 2 values for 1"),
        (new_write(2, keys=["d", "d"]), InvalidArgumentError, "'d' occurs twice"),
        (new_write(1, keys=[""]), InvalidArgumentError, "empty"),
        (new_write(1, keys=["a"], indexes=[0]), InvalidArgumentError, "both global_indexes and keys"),
        (new_write(2, indexes=[1, 1]), InvalidArgumentError, "twice"),
        (new_write(1, indexes=[3]), SampleNotFoundError, "no sample 3"),
        (new_write(2, indexes=[0, 4]), SampleNotFoundError, "no sample 4"),
        (new_write(1, indexes=[-1]), SampleNotFoundError, "no sample -1"),
        (new_write(2, keys=["d", "a"], key_mode="new"), AlreadyExistsError, "'a' already exists"),
        (new_write(2, keys=["a", "aa"], key_mode="existing"), KeyNotFoundError, "known: 'a'"),
        (new_write(1, keys=["c"], key_mode="existing"), KeyNotFoundError, "no key 'c'"),
        (new_write(1, ("x",), keys=["d"], meta=[{"v": 1}, {"v": 2}]), InvalidArgumentError, "2 values for 1"),
    ],
)
def test_refusals_change_nothing(train, write, error, words):
    before = snapshot(train)
    with pytest.raises(error, match=words):
        write_to(train, write)
    assert snapshot(train) == before


@pytest.mark.parametrize("write", [new_write(1), new_write(2, keys=["a", "d"]), new_write(1, keys=["d"])])
def test_a_sealed_partition_takes_no_new_samples(train, write):
    seal(train)
    before = snapshot(train)
    with pytest.raises(PartitionSealedError, match="1 new"):
        write_to(train, write)
    assert snapshot(train) == before


def test_a_sealed_partition_takes_columns_of_existing_samples(train):
    seal(train)
    write_to(train, new_write(1, ("y",), keys=["a"], key_mode="existing"))
    write_to(train, new_write(2, ("y",), indexes=[1, 2]))
    assert train.cells.fields["y"].produced_count == 3


def test_a_cleared_key_may_be_used_again(train):
    assert insert(train, 2, keys=["c", "a"]) == [4, 0]
    assert keys_of(train) == {"a": 0, "b": 1, "c": 4}
