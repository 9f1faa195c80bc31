"""Whatever workers add, cut, replace and clear: cells are what was added, in order, and no byte of others is kept."""

import dataclasses

import numpy as np
from digest import digest
from domain_support import claim_rows, clear, clear_fields, commit, insert, jagged, new_write, partition, task_of
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.durable.checkpoint import PartitionPlan, relocate
from tq_service.errors import PreconditionError
from tq_service.machine.samples import SamplesTruncated, SamplesWritten
from tq_service.schema import WHOLE_EXTENT
from tq_service.state.cells import Put, freed_cells, live_cells
from tq_service.state.partition import Partition
from tq_service.state.plan import LeasedClaim, LeaseTerms
from tq_service.wire.metadata import expand_runs

FIELDS = ("x", "y")
ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
NAMES = st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2, unique=True)
COUNTS = st.lists(st.integers(0, 3), min_size=3, max_size=3)
SHARES = st.lists(st.integers(0, 100), min_size=3, max_size=3)
KINDS = st.sampled_from(["append"] * 8 + ["truncate"] * 3 + ["put", "fail", "clear", "clear_fields"])
STEPS = st.lists(st.tuples(KINDS, ROWS, NAMES, COUNTS, SHARES), min_size=6, max_size=40)


class Store:
    """Has the values of puts by field, as lists of numbers that are all different, and forgets what is freed."""

    def __init__(self):
        self.rows = {}  # (put, field, row) -> its values
        self._next = 0

    def take(self, put, name, lengths):
        """Store rows of these lengths; return their values."""
        rows = []
        for row, length in enumerate(lengths):
            self.rows[put, name, row] = values = list(range(self._next, self._next + length))
            self._next += length
            rows.append(values)
        return rows

    def free(self, freed):
        """Forget what no sample has any more."""
        for each in freed:
            named = [
                key
                for key in self.rows
                if key[0] == each.put and (each.rows is None or (key[1] in each.field_names and key[2] in each.rows))
            ]
            assert named
            for key in named:
                del self.rows[key]

    def read(self, train, name, positions):
        """Return the values of cells as a reader joins them."""
        found = []
        for runs in train.cells.locate([name], positions) if positions.size else ():
            puts = [runs.puts[number] for number in np.repeat(runs.put_indexes, runs.row_counts)]
            rows = expand_runs(np.asarray(runs.first_rows), np.asarray(runs.row_counts)).tolist()
            parts = [self.rows[put, name, row] for put, row in zip(puts, rows, strict=True)]
            lengths = runs.extent_lengths or [WHOLE_EXTENT] * len(parts)
            parts = iter([part[:length] for part, length in zip(parts, lengths, strict=True)])
            counts = runs.extent_counts or [1] * positions.size
            found += [[value for _ in range(count) for value in next(parts)] for count in counts]
        return found


class Growing:
    """A partition with held samples that a worker leases, and what their cells should be."""

    def __init__(self):
        self.train, self.store = partition(), Store()
        self.rows = {index: {} for index in insert(self.train, 3, (), state="held")}
        claim = claim_rows(self.train, task_of(self.train, "t"), list(self.rows), lease=LeaseTerms(seconds=60.0))
        self.claim = LeasedClaim(task_name="t", request_id=claim.request_id)

    def step(self, kind, rows, names=(), counts=(), shares=()):
        """Take one step with those of some samples that are left."""
        left = [row for row in rows if row in self.rows]
        given = {"fail": (), "clear": (), "truncate": (names, shares), "clear_fields": (names,)}
        given = given.get(kind, (names, counts))
        if left:
            getattr(self, kind)(left, *given)

    def _write(self, rows, names, added, **arguments):
        lengths = added[: len(rows)]
        write = new_write(len(rows), [jagged(name, lengths) for name in names], indexes=rows, **arguments)
        columns = [dataclasses.replace(column, value_bytes=8 * sum(lengths)) for column in write.columns]
        write = dataclasses.replace(write, columns=columns)
        change = SamplesWritten(partition_id="train", write=write)
        values = {name: self.store.take(write.put, name, lengths) for name in names}
        return values, lambda: commit(self.train, change)[1]

    def append(self, rows, names, added):
        """Add to cells, which is refused if they differ in length from the first field."""
        at = [len(self.rows[row].get(names[0], [])) for row in rows]
        fits = all(len(self.rows[row].get(name, [])) == length for name in names for row, length in zip(rows, at))  # noqa: B905
        before = dict(self.store.rows)
        values, change = self._write(rows, names, added, claim=self.claim, append_at=np.array(at, np.int64))
        if not fits:
            known = digest(self.train)
            try:
                change()
            except PreconditionError as error:
                assert error.reason == "LENGTH_MISMATCH"
            else:
                raise AssertionError("an append at another length")
            assert digest(self.train) == known
            self.store.rows = before
            return
        self.store.free(change())
        for name in names:
            for row, some in zip(rows, values[name], strict=True):
                self.rows[row][name] = self.rows[row].get(name, []) + some

    def truncate(self, rows, names, shares):
        """Cut cells to a share of the length of the shortest one of each sample."""
        most = [min(len(self.rows[row].get(name, [])) for name in names) for row in rows]
        lengths = [share * length // 100 for share, length in zip(shares, most, strict=False)]
        change = SamplesTruncated(
            partition_id="train",
            global_indexes=np.array(rows, np.int64),
            lengths=np.array(lengths, np.int64),
            field_names=names,
            claim=self.claim,
        )
        self.store.free(commit(self.train, change)[1])
        for name in names:
            for row, length in zip(rows, lengths, strict=True):
                values = self.rows[row].pop(name, [])[:length]
                if values:
                    self.rows[row][name] = values

    def put(self, rows, names, added):
        """Replace cells whole."""
        values, change = self._write(rows, names, added)
        self.store.free(change())
        for name in names:
            for row, some in zip(rows, values[name], strict=True):
                self.rows[row][name] = some

    def fail(self, rows):
        """Have samples fail, which frees their cells."""
        write = new_write(len(rows), indexes=rows, state="failed")
        self.store.free(commit(self.train, SamplesWritten(partition_id="train", write=write))[1])
        for row in rows:
            del self.rows[row]

    def clear(self, rows):
        """Remove samples."""
        self.store.free(clear(self.train, np.array(rows, np.int64))[1])
        for row in rows:
            del self.rows[row]

    def clear_fields(self, rows, names):
        """Clear cells whole."""
        count, freed = clear_fields(self.train, names, rows)
        self.store.free(freed)
        assert count == sum(self.rows[row].pop(name, None) is not None for row in rows for name in names)

    def check(self, train, store):
        """Compare a partition and what is stored with what the cells should be."""
        for name in FIELDS:
            there = [row for row, cells in self.rows.items() if name in cells]
            positions = train.table.find(np.array(there, np.int64))
            assert store.read(train, name, positions) == [self.rows[row][name] for row in there]
            assert train.cells.lengths(name, positions).tolist() == [len(self.rows[row][name]) for row in there]
            known = train.cells.fields.get(name)
            assert (0 if known is None else known.produced_count) == len(there)
        named = live_rows(train)
        assert len(named) == len(set(named))
        assert set(named) == {key for key in store.rows if key[0] in {put for put, _, _ in named}}
        assert sorted(key[1:] for key in store.rows) == sorted(key[1:] for key in named)


def live_rows(train):
    """Return the rows of puts that cells are in, by field: of a whole put those of all fields that it is known by."""
    widths = {}
    for field in train.cells.fields.values():
        cells = field.cell.data[train.table.present_positions()]
        extents = train.cells.extents.chains.resolve(cells[cells >= 0])
        for slot, row in zip(extents.cells >> 32, extents.cells & 0xFFFFFFFF, strict=True):
            widths.setdefault(train.cells.puts.get(int(slot)), []).append((field.spec.name, int(row)))
    found = []
    for cells in map(freed_cells, live_cells(train.cells.snapshot())):
        if cells.rows is None:
            found += [(cells.put, name, row) for name, row in widths.pop(cells.put)]
        else:
            found += [(cells.put, name, row) for name in cells.field_names for row in cells.rows.tolist()]
    return found


@examples(300)
@given(STEPS)
def test_cells_are_what_was_added_in_order_and_the_rest_is_freed(steps):
    growing = Growing()
    for step in steps:
        growing.step(*step)
    growing.check(growing.train, growing.store)
    snapshot = Partition.restore(growing.train.snapshot())
    assert digest(snapshot) == digest(growing.train)
    growing.check(snapshot, growing.store)
    growing.check(*checkpointed(growing))
    growing.step("clear", list(growing.rows))
    assert not growing.store.rows
    assert growing.train.cells.used_bytes == 0
    assert growing.train.cells.extents.is_empty


def checkpointed(growing):
    """Return the partition that a checkpoint brings back, and what is stored of it."""
    plan, store = PartitionPlan(growing.train.snapshot()), Store()
    puts = [Put("elsewhere", b"c" * 16, number.to_bytes(16, "big")) for number, _ in enumerate(plan.blocks)]
    for put, block in zip(puts, plan.blocks, strict=True):
        owners = [block.puts[number] for number in np.repeat(block.runs.put_indexes, block.runs.row_counts)]
        rows = expand_runs(block.runs.first_rows, block.runs.row_counts).tolist()
        for name in block.runs.field_names:
            for at, (owner, row) in enumerate(zip(owners, rows, strict=True)):
                store.rows[put, name, at] = growing.store.rows[owner, name, row]
    restored = Partition.restore(plan.partition())
    relocate([restored], puts)
    return restored, store
