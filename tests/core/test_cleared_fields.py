"""Fields of samples that are cleared: the samples stay, and all that looks at cells sees them as never put."""

from dataclasses import replace

import numpy as np
import pytest
from digest import digest, keys_of
from domain_support import (
    claim_rows,
    clear,
    clear_fields,
    dense,
    insert,
    jagged,
    new_write,
    partition,
    release,
    task_of,
    update,
)

from tq_service.errors import LeaseExpiredError
from tq_service.machine.samples import check_write
from tq_service.schema import FieldSpec, Layout
from tq_service.state.partition import Partition
from tq_service.state.plan import LeasedClaim, LeaseTerms


def produced(train, name):
    """Return whether each sample has a field."""
    return train.cells.produced([name], train.table.present_positions()).tolist()


def sized(column, value_bytes):
    return replace(column, value_bytes=value_bytes)


def test_cells_are_freed_and_the_samples_stay():
    train = partition()
    columns = [sized(dense("x"), 12), sized(dense("big", 8), 300)]
    insert(train, 3, columns, keys=list("abc"), groups=["g", "g", ""], meta=[{"v": row} for row in range(3)])
    task = task_of(train, "t")
    claim_rows(train, task, [0])
    count, (freed,) = clear_fields(train, ["big"], [2, 0, 2, 99])
    assert (count, freed.field_names, freed.rows.tolist()) == (2, ("big",), [0, 2])
    assert (produced(train, "x"), produced(train, "big")) == ([True] * 3, [False, True, False])
    assert train.cells.used_bytes == 12 + 100
    assert (keys_of(train), train.groups.names_of(np.arange(3))) == ({"a": 0, "b": 1, "c": 2}, ["g", "g", None])
    assert train.meta.read("v", np.arange(3)).values.tolist() == [0, 1, 2]
    assert task.consumed_count == 1
    assert clear_fields(train, ["x", "big"], [0, 1, 2])[0] == 4
    assert (train.cells.puts.all(), train.cells.used_bytes, train.table.present_count) == ([], 0, 3)


def test_several_fields_of_one_put_are_freed_together():
    train = partition()
    insert(train, 4, ("x", "y", "z"))
    insert(train, 2, ("y",))
    count, freed = clear_fields(train, ["x", "y"], [1, 2, 4, 5])
    assert count == 6
    assert [(each.field_names, None if each.rows is None else each.rows.tolist()) for each in freed] == [
        (("x", "y"), [1, 2]),
        ((), None),
    ]


def test_what_is_not_there_is_ignored():
    train = partition(fields=(FieldSpec("declared"),))
    insert(train, 2)
    update(train, [1], state="failed")
    before, version = digest(train), train.version
    assert clear_fields(train, ["none", "declared"], [0, 1]) == (0, [])
    assert clear_fields(train, ["x"], [1, 7]) == (0, [])
    assert (digest(train), train.version) == (before, version)


def test_a_field_without_cells_is_as_declared_and_known_by_its_last_spec():
    train = partition(fields=(FieldSpec("declared", layout=Layout.JAGGED),))
    insert(train, 2, [dense("x", 3), dense("declared", 4)])
    clear_fields(train, ["x", "declared"], [0, 1])
    assert list(train.cells.fields) == ["declared"]
    assert train.cells.fields["declared"].spec == FieldSpec("declared", layout=Layout.JAGGED)
    assert train.cells.last_spec("x").row_shape == (3,)
    update(train, [0], [jagged("x", [7])])
    assert train.cells.lengths("x", np.arange(2)).tolist() == [7, 0]


def test_a_write_once_field_takes_a_value_again():
    train = partition(fields=(FieldSpec("x", write_once=True),))
    insert(train, 2)
    clear_fields(train, ["x"], [1])
    update(train, [1], ("x",))
    assert produced(train, "x") == [True] * 2


def test_the_state_is_the_same_after_a_restart():
    train = partition()
    insert(train, 4, [dense("x"), jagged("y", [1, 2, 3, 4]), dense("z")])
    clear_fields(train, ["y", "z"], [0, 1, 2, 3])
    insert(train, 1, [jagged("y", [5])])
    restored = Partition.restore(train.snapshot())
    assert digest(restored) == digest(train)
    assert restored.cells.last_spec("z") == train.cells.last_spec("z")


def test_a_write_that_was_checked_before_is_checked_again():
    train = partition(fields=(FieldSpec("x", write_once=True),))
    insert(train, 1)
    checked = check_write(train, new_write(1, ("y",), indexes=[0]))
    assert checked.is_current
    clear_fields(train, ["x"], [0])
    assert not checked.is_current


def test_a_worker_that_lost_its_lease_clears_nothing():
    train = partition()
    insert(train, 2)
    task = task_of(train, "t")
    claim = claim_rows(train, task, [0, 1], lease=LeaseTerms(seconds=60.0))
    fence = LeasedClaim(task_name="t", request_id=claim.request_id)
    assert clear_fields(train, ["x"], [0], claim=fence)[0] == 1
    release(train, task, claim.request_id)
    with pytest.raises(LeaseExpiredError):
        clear_fields(train, ["x"], [1], claim=fence)
    assert produced(train, "x") == [False, True]


def test_a_slot_that_lost_all_fields_has_no_data():
    train = partition()
    insert(train, 2, ("x", "y"), state="held")
    task = task_of(train, "t")
    claim = claim_rows(train, task, [0, 1], lease=LeaseTerms(seconds=60.0, on_lost="fail"))
    clear_fields(train, ["x", "y"], [0])
    clear_fields(train, ["x"], [1])
    release(train, task, claim.request_id)
    assert train.table.index[train.table.present_positions()].tolist() == [1]


def test_samples_are_cleared_after_their_fields():
    train = partition()
    rows = insert(train, 3, ("x", "y"))
    clear_fields(train, ["x"], rows)
    update(train, rows[:1], ("x",))
    assert clear(train, np.array(rows))[0] == 3
    assert (train.cells.puts.all(), list(train.cells.fields)) == ([], [])
