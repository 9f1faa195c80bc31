"""The history of changes: a watcher has in the end what is there, however seldom it asks and whatever is forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from domain_support import new_id, new_write, plan_of
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import CompactedError, InvalidArgumentError
from tq_service.machine.claims import ConsumptionReset, SamplesClaimed
from tq_service.machine.samples import MetaSet, PartitionSealed, SamplesCleared, SamplesWritten
from tq_service.results import Revision
from tq_service.samplers import PlanRunner
from tq_service.serving import history as history_module
from tq_service.serving.catalog import Catalog
from tq_service.serving.history import MOST_GONE_ROWS, ROWS_OF_A_PART, PartitionChanges, Watched
from tq_service.state.partition import Partition, PartitionSettings

ALL = Watched(prefix="", is_shown=lambda _name: True)
KINDS = ("insert", "insert", "write", "tag", "clear", "seal", "claim", "reset", "remove", "replace")
NAMES = ("train", "val", "train@1")


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(PlanRunner())


def put(catalog: Catalog, count: int) -> None:
    catalog.write("train", b"", new_write(count, ("x",)))


def put_and_clear(catalog: Catalog, count: int) -> None:
    put(catalog, count)
    end = catalog.get("train").inserted_count
    catalog.commit(SamplesCleared(partition_id="train", global_indexes=np.arange(end - count, end)))


def rows_of(partition: Partition, indexes: Any) -> dict[int, Any]:
    """Return what is known of the rows that are there, of some."""
    found = {}
    for index in np.asarray(indexes).tolist():
        position = partition.table.find(np.array([index]))
        if position[0] >= 0:
            tags = {each.name: each.objects()[0] for each in partition.meta.read_all(position)}
            fields = tuple(partition.cells.produced_by(position))
            found[index] = (partition.key.data[position[0]], tags, fields)
    return found


class View:
    """What a watcher knows, and the revision at which it is."""

    def __init__(self, catalog: Catalog, selection: Watched = ALL) -> None:
        self.catalog = catalog
        self.selection = selection
        self.revision = 0
        self.reset_count = 0
        self.anew_count = 0
        self.partitions: dict[str, tuple[bytes, bool, dict[int, Any], dict[str, Any]]] = {}

    def update(self) -> None:
        history = self.catalog.history
        try:
            changes = history.since(self.revision, self.selection)
        except CompactedError:
            self.reset_count += 1
            self.partitions.clear()
            changes = history.since(0, self.selection)
        for changed in changes:
            name, partition = changed.partition_id, changed.partition
            if partition is None:
                if name in self.partitions and self.partitions[name][0] == changed.incarnation:
                    del self.partitions[name]
                    self.anew_count += name in self.catalog.names() and (
                        self.catalog.get(name).incarnation == changed.incarnation
                    )
                continue
            _, _, rows, tasks = self.partitions.get(name, (b"", False, {}, {}))
            assert name not in self.partitions or self.partitions[name][0] == partition.incarnation
            for indexes, _ in changed.removed:
                for index in indexes:
                    rows.pop(int(index), None)
            for some in changed.written():
                rows.update(rows_of(partition, some))
            for task_name in changed.task_names:
                tasks[task_name] = (partition.tasks[task_name].consumed_count, partition.tasks[task_name].epoch)
            self.partitions[name] = (partition.incarnation, partition.sealed, rows, tasks)
        self.revision = history.mark()

    def check(self) -> None:
        there = {
            name: (
                partition.incarnation,
                partition.sealed,
                rows_of(partition, np.arange(partition.inserted_count)) if self.selection.has_samples else {},
                {task.name: (task.consumed_count, task.epoch) for task in partition.tasks.values()},
            )
            for name in self.catalog.names()
            if self.selection.covers(name)
            for partition in [self.catalog.get(name)]
        }
        assert self.partitions == there


def change(catalog: Catalog, draw: Any) -> None:
    """Make a change that is drawn."""
    name = draw(st.sampled_from(NAMES))
    partition = catalog.find(name, missing_ok=True)
    kind = draw(st.sampled_from(KINDS))
    if partition is None or kind == "insert":
        if partition is None or not partition.sealed:
            count = draw(st.integers(1, 4))
            keys = [new_id().hex() for _ in range(count)] if draw(st.booleans()) else None
            write = new_write(count, ("x",), keys=keys, meta=[{"s": number} for number in range(count)])
            catalog.write(name, b"", write)
        return
    there = partition.table.index.data[partition.table.present_positions()].tolist()
    some = draw(st.lists(st.sampled_from(there), unique=True, max_size=5)) if there else []
    if kind == "seal":
        catalog.commit(PartitionSealed(partition_id=name))
    elif kind == "remove":
        catalog.remove(name, b"")
    elif kind == "reset" and partition.tasks:
        catalog.commit(ConsumptionReset(partition_id=name, task_name="t", keep_consumed=False))
    elif kind == "replace":
        prefix = draw(st.sampled_from(["", "train"]))
        restored = [Partition(prefix, PartitionSettings())] if prefix else []
        catalog.prepare_replacement(restored)
        catalog.replace(restored, prefix)
        catalog.end_replacement()
    elif not some:
        return
    elif kind == "write":
        write = new_write(len(some), ("y",), indexes=some)
        catalog.commit(SamplesWritten(partition_id=name, write=write))
    elif kind == "tag":
        columns = new_write(len(some), meta=[{draw(st.sampled_from("su")): index} for index in some]).meta
        catalog.commit(MetaSet(partition_id=name, global_indexes=np.array(some), columns=columns))
    elif kind == "clear":
        catalog.commit(SamplesCleared(partition_id=name, global_indexes=np.array(some)))
    elif kind == "claim":
        task = catalog.task(partition, "t")
        left = [index for index in some if task.claim.data[partition.table.find(np.array([index]))[0]] == 0]
        if left:
            catalog.commit(
                SamplesClaimed(partition_id=name, task_name="t", request_id=new_id(), plan=plan_of(np.array(left)))
            )


@pytest.mark.parametrize("most", [MOST_GONE_ROWS, 40])
def test_in_the_end_each_watcher_has_what_is_there(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_GONE_ROWS", most)
    monkeypatch.setattr(history_module, "_BLOCK_SHIFT", 2)

    @examples(12)
    @given(st.data())
    def follow(data: Any) -> None:
        catalog = Catalog(PlanRunner())
        catalog.write("val", b"", new_write(3, ("x",)))
        views = [View(catalog), View(catalog), View(catalog, Watched(prefix="train", is_shown="train".__eq__))]
        views.append(View(catalog, Watched(prefix="", is_shown=lambda _name: True, has_samples=False)))
        for _ in range(data.draw(st.integers(1, 40))):
            change(catalog, data.draw)
            if data.draw(st.booleans()):
                data.draw(st.sampled_from(views)).update()
        for view in views:
            view.update()
            view.check()
            assert not catalog.history.since(view.revision, view.selection)
            assert most < MOST_GONE_ROWS or not (view.reset_count or view.anew_count)

    follow()


def changed_since(catalog: Catalog, revision: int) -> PartitionChanges:
    (changed,) = catalog.history.since(revision, ALL)
    return changed


def written_since(catalog: Catalog, revision: int) -> list[int]:
    return [index for some in changed_since(catalog, revision).written() for index in some.tolist()]


def test_the_history_of_a_service_that_was_there_before_begins_with_what_it_has(catalog: Catalog) -> None:
    catalog.adopt([Partition("train", PartitionSettings())])
    view = View(catalog)
    view.update()
    view.check()
    revision = catalog.history.revision()
    put(catalog, 2)
    assert written_since(catalog, catalog.history.number_of(revision)) == [0, 1]


def test_nothing_is_kept_before_a_revision_is_given_out(catalog: Catalog) -> None:
    history = catalog.history
    put_and_clear(catalog, 3)
    put(catalog, 3)
    assert (history.number, len(history._pasts), len(history._gone)) == (1, 0, 0)
    assert "revision" not in catalog.get("train").table.columns
    start = history.mark()
    put(catalog, 1)
    assert written_since(catalog, start) == [6]


def test_a_row_that_was_written_often_comes_once_and_one_that_is_gone_not_at_all(catalog: Catalog) -> None:
    put(catalog, 3)
    start = catalog.history.mark()
    for _ in range(5):
        columns = new_write(2, meta=[{"s": 1}] * 2).meta
        catalog.commit(MetaSet(partition_id="train", global_indexes=np.array([2, 0]), columns=columns))
    put_and_clear(catalog, 2)
    assert written_since(catalog, start) == [0, 2]


def test_rows_that_were_written_come_in_parts_also_where_they_were_moved(catalog: Catalog) -> None:
    count = 3 * ROWS_OF_A_PART
    put(catalog, count)
    start = catalog.history.mark()
    catalog.write("train", b"", new_write(count, ("y",), indexes=np.arange(count)[::-1]))
    parts = list(changed_since(catalog, start).written())
    assert [part.size for part in parts] == [ROWS_OF_A_PART] * 3
    assert np.concatenate(parts).tolist() == list(range(count))
    later = catalog.history.mark()
    catalog.write("train", b"", new_write(1, ("z",), indexes=[count - 1]))
    while catalog.get("train").table.count == count:
        left = catalog.get("train").table.present_from(0, count // 4)
        catalog.commit(SamplesCleared(partition_id="train", global_indexes=left))
    assert written_since(catalog, later) == [count - 1]


def test_no_snapshot_has_revisions(catalog: Catalog) -> None:
    catalog.history.mark()
    put(catalog, 3)
    partition = catalog.get("train")
    assert "revision" in partition.table.columns
    assert "revision" not in partition.snapshot().tables["rows"].columns
    restored = Partition.restore(partition.snapshot())
    assert restored.table.present_count == 3


def test_of_a_cleared_partition_is_kept_that_it_is_gone(catalog: Catalog) -> None:
    history = catalog.history
    start = history.mark()
    for number in range(50):
        name = f"train@{number}"
        catalog.write(name, b"", new_write(200, ("x",)))
        catalog.remove(name, b"")
        assert (len(history._pasts), len(history._gone)) == (0, number + 1)
    assert not history.since(start, ALL)


def test_a_watcher_for_which_removed_rows_are_forgotten_gets_their_partition_anew(catalog: Catalog) -> None:
    history, size = catalog.history, MOST_GONE_ROWS // 4
    put(catalog, 5)
    catalog.write("val", b"", new_write(1, ("x",)))
    start = history.mark()
    for _ in range(3):
        put_and_clear(catalog, size)
    assert sum(len(rows) for rows, _ in changed_since(catalog, start).removed) == 3 * size
    for _ in range(3):
        put_and_clear(catalog, size)
    assert history._gone_row_count <= MOST_GONE_ROWS
    gone, anew = history.since(start, ALL)
    assert (gone.partition, gone.incarnation) == (None, anew.incarnation)
    assert not anew.removed
    assert [some.tolist() for some in anew.written()] == [list(range(5))]
    (changed,) = history.since(start, Watched(prefix="", is_shown=lambda _name: True, has_samples=False))
    assert changed.partition is catalog.get("train") and not changed.removed


def test_partitions_that_are_gone_are_forgotten_too(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_GONE_ROWS", 300)
    start = catalog.history.mark()
    for number in range(100):
        catalog.create(f"p{number}", PartitionSettings())
        catalog.remove(f"p{number}", b"")
    assert len(catalog.history._gone) < 40
    with pytest.raises(CompactedError, match=f"revision {start} is too old"):
        catalog.history.since(start, ALL)


def test_a_revision_is_of_one_history(catalog: Catalog) -> None:
    history = catalog.history
    revision = history.revision()
    assert history.number_of(revision) == revision.number
    with pytest.raises(CompactedError, match="another instance"):
        history.number_of(Revision(instance_id=b"i" * 16, number=1))
    for instance_id, number in ((history.instance_id, 0), (history.instance_id, revision.number + 1), (b"short", 1)):
        with pytest.raises(InvalidArgumentError):
            history.number_of(Revision(instance_id=instance_id, number=number))
