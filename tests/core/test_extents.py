"""Held samples that grow: which bytes an append and a truncation free, how cells are located, and what is refused."""

import numpy as np
import pytest
from domain_support import ack, claim_rows, clear, commit, dense, insert, jagged, new_write, partition, task_of, update

from tq_service.errors import FieldMismatchError, InvalidArgumentError, LeaseExpiredError, PreconditionError
from tq_service.machine.samples import SamplesTruncated, SamplesWritten
from tq_service.schema import WHOLE_EXTENT, FieldSpec, Layout
from tq_service.state.plan import LeasedClaim, LeaseTerms


class Worker:
    """Leases held samples of a partition, and changes them."""

    def __init__(self, count=2, **settings):
        self.train = partition(**settings)
        insert(self.train, count, (), state="held")
        self.task = task_of(self.train, "t")
        self.request_id = claim_rows(self.train, self.task, range(count), lease=LeaseTerms(seconds=60.0)).request_id
        self.claim = LeasedClaim(task_name="t", request_id=self.request_id)

    def append(self, added, at, rows=None, name="x", columns=None):
        """Add to samples; return what that freed, each as (last byte of the put, fields, rows)."""
        write = new_write(
            len(added),
            columns or [jagged(name, added)],
            indexes=range(len(added)) if rows is None else rows,
            claim=self.claim,
            append_at=np.array(at),
        )
        return named(commit(self.train, SamplesWritten(partition_id="train", write=write))[1])

    def truncate(self, lengths, rows=None, names=("x",)):
        """Cut samples; return what that freed."""
        change = SamplesTruncated(
            partition_id="train",
            global_indexes=np.array(range(len(lengths)) if rows is None else rows),
            lengths=np.array(lengths),
            field_names=names,
            claim=self.claim,
        )
        return named(commit(self.train, change)[1])

    def located(self, rows, name="x"):
        """Return of each row of the located runs: its row in the put; and the counts and lengths of extents."""
        (runs,) = self.train.cells.locate([name], np.array(rows))
        firsts = [
            first + place
            for first, count in zip(runs.first_rows, runs.row_counts, strict=True)
            for place in range(count)
        ]
        return firsts, runs.extent_counts, runs.extent_lengths


def named(freed):
    """Return the rows that were freed, of whole puts None."""
    return [None if each.rows is None else (list(each.field_names), each.rows.tolist()) for each in freed]


def test_a_cell_that_was_written_once_has_no_extent():
    worker = Worker()
    assert worker.append([3, 0], [0, 0]) == []
    assert worker.train.cells.extents.count == 0
    assert worker.located([0, 1]) == ([0, 1], (), ())
    assert worker.train.cells.fields["x"].spec.row_shape == (-1,)


def test_an_append_adds_an_extent_and_frees_rows_that_add_nothing():
    worker = Worker()
    worker.append([3, 2], [0, 0])
    assert worker.append([0, 4], [3, 2]) == [(["x"], [0])]
    assert worker.append([0, 0], [3, 6]) == [None]
    assert worker.located([1, 0]) == ([1, 1, 0], [2, 1], [2, 4, WHOLE_EXTENT])
    assert worker.train.cells.lengths("x", np.array([0, 1])).tolist() == [3, 6]


def test_a_truncation_frees_whole_extents_from_the_end_and_cuts_one():
    worker = Worker(1)
    for at in (0, 2, 4, 6):
        worker.append([2], [at])
    assert worker.truncate([4]) == [None, None]
    assert worker.located([0]) == ([0, 0], [2], [2, 2])
    assert worker.truncate([3]) == []
    assert worker.located([0]) == ([0, 0], [2], [2, 1])
    worker.append([1], [3])
    assert worker.located([0]) == ([0, 0, 0], [3], [2, 1, 1])
    assert worker.truncate([1]) == [None, None]
    assert worker.located([0]) == ([0], [1], [1])
    assert worker.truncate([1]) == []
    assert worker.truncate([0]) == [None]
    assert "x" not in worker.train.cells.fields
    assert worker.truncate([0], names=["x", "y"]) == []
    assert worker.train.cells.used_bytes == 0


def test_fields_that_grow_together_share_their_runs():
    worker = Worker()
    for at in (0, 1, 2):
        worker.append([1, 1], [at, at], columns=[jagged("x", [1, 1]), jagged("y", [1, 1], dtype="float32")])
    (runs,) = worker.train.cells.locate(["x", "y"], np.array([0, 1]))
    assert runs.field_names == ("x", "y")
    worker.append([1, 0], [3, 3], columns=[jagged("y", [1, 0], dtype="float32")])
    assert [runs.field_names for runs in worker.train.cells.locate(["x", "y"], np.array([0, 1]))] == [("x",), ("y",)]


def test_a_part_of_a_clear_counts_extents():
    worker = Worker(3)
    for at in range(4):
        worker.append([1, 1, 1], [at] * 3)
    assert worker.train.cells.count_of_runs(np.array([0, 1, 2]), 100) == 3
    assert worker.train.cells.count_of_runs(np.array([0, 1, 2]), 4) == 2
    assert worker.train.cells.count_of_runs(np.array([0, 1, 2]), 3) == 1
    clear(worker.train, np.array([0, 1, 2]))
    assert worker.train.cells.puts.all() == []


def test_the_lengths_of_other_cells_stay_where_a_dense_field_begins_to_grow():
    worker = Worker()
    update(worker.train, [0], [dense("x", 5, dtype="int64")])
    assert worker.train.cells.fields["x"].spec.layout is Layout.DENSE
    worker.append([1], [0], rows=[1])
    assert worker.train.cells.lengths("x", np.array([0, 1])).tolist() == [5, 1]
    worker.append([1], [5], rows=[0])
    assert worker.located([0]) == ([0, 0], [2], [5, 1])


def test_only_fields_that_are_ragged_in_their_first_dimension_grow():
    worker = Worker(fields=(FieldSpec("fixed", layout=Layout.DENSE), FieldSpec("o", layout=Layout.OBJECT)))
    for name in ("fixed", "o"):
        with pytest.raises(FieldMismatchError):
            worker.append([1, 1], [0, 0], name=name)
    update(worker.train, [0], [dense("image", 3, 4), dense("n")])
    for column in (dense("image", 3, 4), dense("n"), dense("new", 2)):
        with pytest.raises(FieldMismatchError, match="differ only in the first dimension"):
            worker.append([1, 1], [3, 0], columns=[column])
    for name in ("image", "n"):
        with pytest.raises(FieldMismatchError, match="Put the entire field instead"):
            worker.truncate([0, 0], names=[name])


def test_what_is_refused_changes_nothing():
    worker = Worker()
    worker.append([1, 2], [0, 0])
    for change in (lambda: worker.append([1, 1], [1, 1]), lambda: worker.truncate([1, 3])):
        with pytest.raises(PreconditionError) as raised:
            change()
        assert (raised.value.reason, raised.value.metadata["got"]) == ("LENGTH_MISMATCH", "2")
    for lengths, names in (([0], ["x"]), ([0, -1], ["x"]), ([0, 0], [])):
        with pytest.raises(InvalidArgumentError):
            worker.truncate(lengths, rows=[0, 1], names=names)
    with pytest.raises(InvalidArgumentError, match="append_at"):
        worker.append([1, 1], [1])
    update(worker.train, [1], state="live")
    with pytest.raises(PreconditionError, match="is live"):
        worker.append([1, 1], [1, 2])
    ack(worker.train, worker.task, worker.request_id, np.array([0]))
    for change in (lambda: worker.append([1], [1], rows=[0]), lambda: worker.truncate([0], rows=[0])):
        with pytest.raises(LeaseExpiredError):
            change()
    assert worker.train.cells.lengths("x", np.array([0, 1])).tolist() == [1, 2]
