"""What is declared once is restored, compacted and compared; what a snapshot misses, or has too much, is told."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
from digest import digest
from domain_support import clear, insert, new_write, partition, task_of

from tq_service.durable import snapshot as snapshot_module
from tq_service.durable import state_store
from tq_service.durable.snapshot import ColumnPart, ServiceSnapshot, read_snapshot, write_snapshot
from tq_service.durable.state_store import StateStore
from tq_service.errors import NewerVersionError, SnapshotDamagedError
from tq_service.journal import codec
from tq_service.machine import samples
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import Partition, PartitionFacts, PartitionSettings
from tq_service.state.table import Column, RowTable


class Prioritized(Partition):
    """A partition of a version that has one more attribute of samples, and one more of puts: two declarations."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.priority = self.table.column("priority", np.int32, 5)
        self.shelf = self.cells.puts.column("shelf", np.object_, None)


def of_version(monkeypatch, kind):
    """Make partitions of a kind wherever they are made."""
    for module in (state_store, samples):
        monkeypatch.setattr(module, "Partition", kind)


def prioritized(count, fields=("x",)):
    """Return a partition of samples with the priorities 0, 1, 2, ..."""
    made = Prioritized("train", PartitionSettings(), b"i" * 16)
    for row in range(count):
        insert(made, 1, fields, keys=[f"k{row}"])
    made.priority.write(slice(0, count), np.arange(count))
    made.shelf.write(slice(0, count), [f"shelf {row}" for row in range(count)])
    return made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "snapshot.tqs"


def written(made, path):
    write_snapshot(path, ServiceSnapshot(partitions=[made.snapshot()]))
    return path


def restored(path, kind=Partition):
    (snapshot,) = read_snapshot(path).partitions
    return kind.restore(snapshot)


# Declared once


def test_a_declared_column_is_restored_and_compared(path):
    made = prioritized(20)
    again = restored(written(made, path), Prioritized)
    assert again.priority[:20].tolist() == list(range(20))
    assert again.shelf[:20].tolist() == [f"shelf {row}" for row in range(20)]
    assert again.priority[20] == 5
    assert digest(again) == digest(made)


@pytest.mark.parametrize(
    "change",
    [lambda made: made.priority.write(3, 77), lambda made: made.shelf.write(3, "elsewhere")],
    ids=["of samples", "of puts"],
)
def test_a_digest_differs_where_a_declared_column_does(path, change):
    made = prioritized(20)
    again = restored(written(made, path), Prioritized)
    change(again)
    assert digest(again) != digest(made)


def test_a_declared_column_is_compacted_and_grows():
    made = prioritized(0, ())
    insert(made, 3000, ())
    made.priority.write(slice(0, 3000), np.arange(3000))
    clear(made, np.arange(2500))
    assert made.table.count == 500
    assert made.priority[:500].tolist() == list(range(2500, 3000))
    insert(made, 3000, ())
    assert made.priority[500:3500].tolist() == [5] * 3000
    clear(made, np.array([2999]))
    assert made.priority[499] == 5


def test_names_of_users_never_name_another_column(path):
    """Each of these is, or was, a name of a column, or of the column of another field, task or custom_meta column."""
    names = ["index", "present", "state", "since", "key", "group", "rollout", "cell/x", "x", "x/y", "/x", "meta/x"]
    names += ["claim/t", "t", "", "/"]
    made = partition()
    insert(made, 2, tuple(filter(None, names)), meta=[dict.fromkeys(names, row) for row in range(2)])
    for name in names:
        task_of(made, name)
    again = restored(written(made, path))
    assert digest(again, with_gaps=True) == digest(made, with_gaps=True)
    assert again.meta.names() == names
    assert list(again.tasks) == names
    assert len(made.table.columns) == 6 + 15 + 2 * len(names) + 5 * len(names)  # and of fields, custom_meta, tasks


def test_floats_come_back_bit_for_bit(path):
    values = [-0.0, 0.0, float("nan"), float("inf"), 5e-324]
    made = partition()
    insert(made, 5, (), meta=[{"v": value} for value in values])
    again = restored(written(made, path))
    assert again.meta.read("v", np.arange(5)).values.tobytes() == np.array(values).tobytes()


def test_a_column_of_nothing_but_its_fill_is_restored_blank():
    column, again = (Column(np.int64, -1, 64) for _ in range(2))
    column.write(slice(0, 64), -1)
    again.restore(column.snapshot(64))
    assert again.is_blank
    assert again.data.tolist() == [-1] * 64


# Missing


def test_a_column_that_a_snapshot_does_not_have_takes_its_fill(path, caplog):
    made = partition()
    insert(made, 4, ("x",))
    again = restored(written(made, path), Prioritized)
    assert again.priority[:4].tolist() == [5] * 4
    assert again.shelf[:4].tolist() == [None] * 4
    assert [record.getMessage() for record in caplog.records] == [
        f"a column is missing from the snapshot; using its default value partition=train {column}"
        for column in ("table=rows column=priority default=5", "table=puts column=shelf default=None")
    ]


def test_a_snapshot_of_this_version_misses_nothing(path, caplog):
    for made in (prioritized(0), prioritized(3)):
        restored(written(made, path), Prioritized)
    assert not caplog.records


# Unknown


def test_an_unknown_column_was_written_by_a_newer_version(path):
    written(prioritized(4), path)
    with pytest.raises(
        NewerVersionError, match=r"'train' was written by a newer version: .*'rows'.*'priority'.*Install"
    ):
        restored(path)


def test_so_was_a_column_of_another_type():
    one, other = RowTable(), RowTable()
    one.column("v", np.int32, 0)
    other.column("v", np.int64, 0)
    one.append(1)
    with pytest.raises(NewerVersionError, match="'v' is int32 in the snapshot, but this version expects int64"):
        other.restore(one.snapshot())


def test_so_was_an_unknown_table(path):
    class Shelved(Partition):
        @property
        def tables(self):
            return {**super().tables, "shelves": RowTable()}

    written(Shelved("train", PartitionSettings()), path)
    with pytest.raises(NewerVersionError, match=r"unknown table 'shelves'"):
        restored(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColoredFacts(PartitionFacts):
    color: str = "red"
    shades: tuple[int, ...] = field(default=(7,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColoredHeader(snapshot_module.PartitionHeader):
    facts: ColoredFacts


ColoredHeader.__name__ = "PartitionHeader"


class Colored(Partition):
    """A partition of a version that has two more facts: their declaration, and where they come from."""

    color = "blue"

    @property
    def facts(self):
        known = Partition.facts.__get__(self)
        return ColoredFacts(**{each.name: getattr(known, each.name) for each in fields(known)}, color=self.color)


@pytest.fixture
def colors_are_known(monkeypatch):
    @contextlib.contextmanager
    def known():
        with monkeypatch.context() as patched:
            kinds = [kind for kind in snapshot_module._KINDS if kind is not snapshot_module.PartitionHeader]
            patched.setattr(snapshot_module, "_KINDS", [*kinds, ColoredHeader])
            yield

    return known


def test_a_fact_that_was_added_comes_back(path, colors_are_known):
    written(Colored("train", PartitionSettings()), path)
    with colors_are_known():
        (snapshot,) = read_snapshot(path).partitions
    assert (snapshot.facts.color, snapshot.facts.shades) == ("blue", (7,))


def test_a_fact_that_was_added_has_its_default_in_what_was_written_before(path, colors_are_known):
    written(partition(), path)
    with colors_are_known():
        (snapshot,) = read_snapshot(path).partitions
    assert (snapshot.facts.color, snapshot.facts.partition_id) == ("red", "train")


def test_an_unknown_fact_was_written_by_a_newer_version(path):
    written(Colored("train", PartitionSettings()), path)
    with pytest.raises(
        NewerVersionError, match=rf"{path} at byte \d+: PartitionFacts has the unknown field 'color'.*newer version"
    ):
        restored(path)


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        ("Colors", {}, "unknown kind 'Colors'"),
        ("Header", {"format_version": snapshot_module.FORMAT_VERSION + 1}, "the format version is"),
        ("Header", {"format_version": snapshot_module.FORMAT_VERSION, "is_blue": True}, "'is_blue'"),
    ],
)
def test_so_was_an_unknown_record(path, kind, value, error):
    with snapshot_module.RecordWriter(path) as writer:
        writer.write(codec.encode((kind, value)))
    with pytest.raises(NewerVersionError, match=error):
        read_snapshot(path)


def test_a_service_does_not_start_on_what_a_newer_version_wrote_nor_go_back_before_it(tmp_path, monkeypatch):
    """Going on with the snapshot before it would lose what came since, without a word."""

    async def live(kind, story):
        of_version(monkeypatch, kind)
        store = StateStore.open(tmp_path, sync=False)
        try:
            catalog = Catalog(PlanRunner())
            store.recover(catalog=catalog)
            await story(store, catalog)
            await store.wait_durable()
        finally:
            await store.close()

    async def write(store, catalog):
        catalog.write("train", b"", new_write(3, ("x",)))

    async def write_and_snapshot(store, catalog):
        await write(store, catalog)
        await store.take_snapshot()

    async def look(store, catalog):
        assert catalog.get("train").table.present_count == 6

    asyncio.run(live(Partition, write_and_snapshot))
    older = {path.name: path.read_bytes() for path in tmp_path.glob("snapshot-*.tqs")}
    asyncio.run(live(Prioritized, write_and_snapshot))
    for name, data in older.items():
        (tmp_path / name).write_bytes(data)  # as where the older one could not be removed
    assert len(list(tmp_path.glob("snapshot-*.tqs"))) == 2
    files = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    with pytest.raises(NewerVersionError, match=r"'train' was written by a newer version.*'priority'"):
        asyncio.run(live(Partition, look))
    assert sorted(path.name for path in tmp_path.glob("snapshot-*")) == files
    asyncio.run(live(Prioritized, look))


# Damage stays damage


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda part: replace(part, table="attic"), "attic"),
        (lambda part: replace(part, column="attic"), "attic"),
        (lambda part: replace(part, values=np.zeros(3)), "its table has"),
        (lambda part: None, "its table has"),
    ],
    ids=["table", "column", "a value is missing", "a part is missing"],
)
def test_parts_that_do_not_fit_are_damage(path, monkeypatch, change, error):
    write = snapshot_module.write_record

    def changed(writer, value):
        if isinstance(value, ColumnPart):
            value = change(value)
        if value is not None:
            write(writer, value)

    monkeypatch.setattr(snapshot_module, "write_record", changed)
    made = partition()
    insert(made, 4, ("x",))
    with pytest.raises(SnapshotDamagedError, match=error):
        restored(written(made, path))


def test_a_table_that_a_snapshot_does_not_have_is_empty(path, caplog):
    class Shelved(Partition):
        @property
        def tables(self):
            self.shelves = RowTable()
            return {**super().tables, "shelves": self.shelves}

    made = partition()
    insert(made, 4, ("x",))
    again = restored(written(made, path), Shelved)
    assert again.shelves.count == 0
    assert again.table.present_count == 4
    assert any("table=shelves column=state" in record.getMessage() for record in caplog.records)
