"""What the samples of a group share, in the state: what is located, what is freed, and which groups have begun."""

import asyncio

import numpy as np
import pytest
from domain_support import (
    BOOT,
    claim_rows,
    clear,
    clear_fields,
    commit,
    dense,
    insert,
    jagged,
    new_id,
    new_write,
    partition,
    release,
    seal,
    task_of,
    update,
    write_to,
)

from tq_service.errors import InvalidArgumentError, NewerVersionError
from tq_service.journal import codec
from tq_service.machine.group_cells import GroupsRemoved, GroupsWritten
from tq_service.machine.samples import SamplesTruncated, check_write
from tq_service.machine.state_machine import Change, decode_group, encode_change, encode_group
from tq_service.schema import Admission, FieldSpec
from tq_service.serving.admission import AdmissionQueue, demand_of
from tq_service.state.cells import CellSet, Put, live_cells
from tq_service.state.plan import LeaseTerms

SHARED = (FieldSpec("p", scope="group"), FieldSpec("q", scope="group"))


def shared(**settings):
    return partition(fields=SHARED, **settings)


def put_groups(train, names, columns=None, **arguments):
    """Put what groups share; return the put, and what that freed."""
    put = Put("s0", BOOT, new_id())
    change = GroupsWritten(partition_id="train", names=names, put=put, columns=columns or [dense("p", 2)], **arguments)
    return put, commit(train, change)[1]


def located(train, name="p"):
    """Return the put and row of the cell of each sample."""
    positions = train.table.present_positions()
    (runs,) = train.cells.locate([name], positions)
    rows = [
        (runs.puts[index], first + place)
        for index, first, count in zip(runs.put_indexes, runs.first_rows, runs.row_counts, strict=True)
        for place in range(count)
    ]
    return [row for row, count in zip(rows, runs.sample_counts, strict=True) for _ in range(count)]


def test_samples_of_a_group_have_one_cell_whichever_came_first():
    train = shared()
    early, _ = put_groups(train, ["a", "b"])
    insert(train, 4, groups=["b", "a", "b", "c"])
    late, _ = put_groups(train, ["c"])
    assert located(train) == [(early, 1), (early, 0), (early, 1), (late, 0)]
    assert [field.row_count for field in train.cells.fields.values()] == [4, 0, 4]
    positions = train.table.present_positions()
    assert sorted(train.cells.produced_by(positions)) == ["p", "x"]
    insert(train, 1)
    assert train.cells.produced(["p"], slice(0, 5)).tolist() == [True] * 4 + [False]
    assert train.cells.produced(["p", "q"], slice(0, 5)).tolist() == [False] * 5


def test_samples_of_a_group_that_follow_each_other_are_one_row_of_a_run():
    train = shared()
    put, _ = put_groups(train, ["a", "b", "c"])
    insert(train, 7, groups=[*"aaabbca"])
    (runs,) = train.cells.locate(["p"], train.table.present_positions())
    assert (runs.first_rows, runs.row_counts, runs.sample_counts) == ([0, 0], [3, 1], [3, 2, 1, 1])
    assert located(train) == [(put, row) for row in (0, 0, 0, 1, 1, 2, 0)]


def test_cells_are_freed_with_their_group_and_when_they_are_put_again():
    train = shared()
    first, _ = put_groups(train, ["a", "b"], [dense("p", 2), dense("q")])
    rows = insert(train, 4, (), groups=["a", "a", "b", "b"])
    second, freed = put_groups(train, ["b"])
    assert [(each.put, each.field_names, each.rows.tolist()) for each in freed] == [(first, ("p",), [1])]
    assert clear(train, np.array(rows[:1]))[1] == []
    assert update(train, rows[1:2], (), state="failed") == []
    (freed,) = clear(train, np.array(rows[1:2]))[1]
    assert (freed.put, sorted(freed.field_names), freed.rows.tolist()) == (first, ["p", "q"], [0])
    assert {each.put: each.rows is None for each in clear(train, np.array(rows[2:]))[1]} == {first: True, second: True}
    assert (len(train.groups), train.cells.used_bytes, train.cells.puts.all()) == (0, 0, [])


def test_cells_of_groups_are_cleared_by_name_and_the_groups_stay():
    train = shared()
    put_groups(train, ["a", "b", "c"], [dense("p", 2), dense("q")])
    insert(train, 4, groups=["a", "a", "b", ""])
    count, freed = clear_fields(train, ["p", "x"], [0, 3], groups=["a", "c", "a", "none"])
    assert count == 4  # of two samples and two groups
    assert [(each.field_names, each.rows.tolist()) for each in freed] == [(("x",), [0, 3]), (("p",), [0, 2])]
    assert train.cells.produced(["p"], slice(0, 4)).tolist() == [False, False, True, False]
    assert train.cells.produced(["q"], slice(0, 4)).tolist() == [True, True, True, False]
    assert sorted(train.groups.slot_of) == ["a", "b", "c"]
    assert clear_fields(train, ["p"], [2], groups=["a", "none"]) == (0, [])
    put_groups(train, ["a"])
    assert train.cells.produced(["p"], slice(0, 3)).tolist() == [True] * 3


def test_live_cells_are_those_of_groups_once():
    train = shared()
    whole, _ = put_groups(train, ["a", "b"])
    part, _ = put_groups(train, ["c", "d", "e"], [dense("q")])
    insert(train, 6, (), groups=["a", "b", "c", "a", "c", "c"])
    put_groups(train, ["d"], [dense("q")])
    found = {each.put: each for each in live_cells(train.cells.snapshot())}
    assert found[whole] == CellSet(put=whole)
    assert (found[part].field_names, found[part].rows.tolist()) == (("q",), [0, 2])


def test_groups_without_samples_go_by_name_or_with_the_seal():
    train = shared()
    first, _ = put_groups(train, ["a", "b", "c"])
    insert(train, 1, (), groups=["b"])
    count, freed = commit(train, GroupsRemoved(partition_id="train", names=["a", "b", "d"]))
    assert count == 1
    assert [each.rows.tolist() for each in freed] == [[0]]
    assert commit(train, GroupsRemoved(partition_id="train", names=["a", "b"])) == (None, [])
    seal(train)
    assert located(train) == [(first, 1)]
    assert list(train.groups.slot_of) == ["b"]
    put_groups(train, ["b"], must_exist=True)


def test_a_group_without_samples_has_not_begun():
    """Its first samples take places of admissions, as those of new groups do; further ones take none."""
    train = shared(admissions=(Admission("t", 1, unit="group"),))
    task_of(train, "t")
    put_groups(train, ["a", "b"])
    demand = demand_of(train, new_write(2, (), groups=["a", "a"]), 0)
    assert (demand.counts["group"], demand.groups) == (1, ("a",))
    insert(train, 1, (), groups=["a"])
    assert demand_of(train, new_write(2, (), groups=["a", "a"]), 0) is None
    assert demand_of(train, new_write(1, (), groups=["b"]), 0).groups == ("b",)
    assert AdmissionQueue(train).waits_for(demand_of(train, new_write(1, (), groups=["b"]), 0))
    assert train.groups.find(["a", "b", "c"]).tolist() == [train.groups.slots_of(["a"])[0], -1, -1]


def test_a_write_that_was_checked_before_a_group_was_made_is_checked_again():
    train = shared()
    checked = check_write(train, new_write(1, (), groups=["a"]))
    assert checked.is_current
    put_groups(train, ["a"])
    assert not checked.is_current


def test_slots_without_data_of_their_own_go_when_they_are_released():
    train = shared()
    task = task_of(train, "t")
    put_groups(train, ["a"])
    insert(train, 2, (), groups=["a", "a"], state="held")
    claim = claim_rows(train, task, range(2), lease=LeaseTerms(seconds=60.0, on_lost="remove"))
    release(train, task, claim.request_id)
    assert train.table.present_count == 0
    assert train.cells.puts.all() == []


def test_turns_have_what_the_outermost_group_has():
    train = shared()
    put, _ = put_groups(train, ["g"])
    write_to(train, new_write(4, (), groups=["g", "g", "", ""], rollouts=["r", "", "r", "s"]))
    assert train.cells.produced(["p"], slice(0, 4)).tolist() == [True, True, True, False]
    assert train.cells.locate(["p"], np.arange(3))[0].puts == (put,)


def test_lengths_of_samples_are_those_of_their_groups():
    train = shared()
    put_groups(train, ["a", "b"], [jagged("p", [5, 2])])
    insert(train, 4, groups=["b", "a", "", "c"])
    assert train.cells.fields["p"].lengths(slice(0, 4)).tolist() == [2, 5, -1, -1]
    assert train.cells.fields["p"].has_lengths
    put_groups(train, ["c"], [dense("p", 7, dtype="int64")])
    assert train.cells.lengths("p", np.arange(4)).tolist() == [2, 5, 0, 7]


def test_a_field_forgets_what_it_was_with_its_last_cell():
    train = shared()
    put_groups(train, ["a"])
    put_groups(train, ["a"], [jagged("p", [3])])  # replaces all there is
    rows = insert(train, 1, groups=["a"])
    clear(train, np.array(rows))
    assert train.cells.fields["p"].spec == SHARED[0]
    put_groups(train, ["b"], [dense("p", 4, dtype="int64")])


@pytest.mark.parametrize("names", [[], ["a", ""], ["a", "a"]])
def test_groups_are_named_once(names):
    train = shared()
    with pytest.raises(InvalidArgumentError):
        put_groups(train, names)
    assert not train.groups.in_use


def test_fields_of_groups_do_not_grow():
    train = shared()
    insert(train, 1, (), state="held")
    claim = claim_rows(train, task_of(train, "t"), [0], lease=LeaseTerms(seconds=60.0))
    change = SamplesTruncated(
        partition_id="train", global_indexes=np.array([0]), lengths=np.array([0]), field_names=["p"]
    )
    assert claim.request_id
    with pytest.raises(InvalidArgumentError, match="group scope"):
        commit(train, change)
    with pytest.raises(InvalidArgumentError, match="in a put of groups"):
        update(train, [0], [dense("p", 2)])


def test_a_change_is_read_as_it_was_written_and_an_older_version_says_that_it_is_newer():
    change = GroupsWritten(
        partition_id="train", names=["a"], put=Put("s", BOOT, bytes(16)), columns=[jagged("p", [3])], must_exist=True
    )
    (record,) = encode_group(1.0, [encode_change(change)])
    _, (read,) = decode_group(record)
    assert (read.names, read.put, read.must_exist) == (["a"], change.put, False)
    assert read.columns[0].spec == change.columns[0].spec
    with pytest.raises(NewerVersionError, match="GroupsWritten"):
        codec.decode_named(
            {name: kind for name, kind in Change.kinds.items() if kind is not GroupsWritten}, "GroupsWritten", {}
        )


def test_blocks_of_samples_without_names_end_with_the_first_group():
    async def story():
        train = shared()
        insert(train, 4, ())
        task = task_of(train, "t")
        task.kept_groups = 2
        clear(train, np.array([0]))
        assert task.skipped_count == 1
        put_groups(train, ["a"])
        assert task.skipped_count == 0

    asyncio.run(story())
