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
from tq_service.serving.history import KEPT_ROWS, MOST_ROWS, MOST_UNREAD, MOST_UNREAD_ROWS, Reader, Selection
from tq_service.state.partition import Partition, PartitionSettings

ALL = Selection(prefix="", is_shown=lambda _name: True)
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
    """What a watcher knows, and the reader of the history that it is."""

    def __init__(self, catalog: Catalog, selection: Selection = ALL) -> None:
        self.catalog = catalog
        self.selection = selection
        self.reader = Reader(0)
        self.reset_count = 0
        self.partitions: dict[str, tuple[bytes, bool, dict[int, Any], dict[str, Any]]] = {}
        catalog.history.readers.add(self.reader)

    def update(self) -> None:
        history = self.catalog.history
        try:
            changes = history.since(self.reader.revision, self.selection)
        except CompactedError:
            self.reset_count += 1
            self.partitions.clear()
            changes = history.since(0, self.selection)
        for name, incarnation in changes.cleared:
            if name in self.partitions and self.partitions[name][0] == incarnation:
                del self.partitions[name]
        for changed in changes.partitions:
            partition = changed.partition
            name = partition.partition_id
            _, _, rows, tasks = self.partitions.get(name, (b"", False, {}, {}))
            assert name not in self.partitions or self.partitions[name][0] == partition.incarnation
            for indexes, _ in changed.removed:
                for index in indexes:
                    rows.pop(int(index), None)
            for some in changed.written_in_parts():
                rows.update(rows_of(partition, some))
            for task_name in changed.task_names:
                tasks[task_name] = (partition.tasks[task_name].consumed_count, partition.tasks[task_name].epoch)
            self.partitions[name] = (partition.incarnation, partition.sealed, rows, tasks)
        self.reader.revision = changes.revision

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


@pytest.mark.parametrize(("kept", "most"), [(KEPT_ROWS, MOST_ROWS), (64, 256)])
def test_in_the_end_each_watcher_has_what_is_there(kept: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "KEPT_ROWS", kept)
    monkeypatch.setattr(history_module, "MOST_ROWS", most)

    @examples(12)
    @given(st.data())
    def follow(data: Any) -> None:
        catalog = Catalog(PlanRunner())
        catalog.write("val", b"", new_write(3, ("x",)))
        views = [View(catalog), View(catalog), View(catalog, Selection(prefix="train", is_shown="train".__eq__))]
        views.append(View(catalog, Selection(prefix="", is_shown=lambda _name: True, has_samples=False)))
        for _ in range(data.draw(st.integers(1, 40))):
            change(catalog, data.draw)
            if data.draw(st.booleans()):
                data.draw(st.sampled_from(views)).update()
        for view in views:
            view.update()
            view.check()
            assert not catalog.history.has_changed(view.reader.revision, view.selection)
            assert most < KEPT_ROWS or not view.reset_count

    follow()


def test_the_history_of_a_service_that_was_there_before_begins_with_what_it_has(catalog: Catalog) -> None:
    catalog.adopt([Partition("train", PartitionSettings())])
    view = View(catalog)
    view.update()
    view.check()
    revision = catalog.history.revision()
    put(catalog, 2)
    (changed,) = catalog.history.since(catalog.history.number_of(revision), ALL).partitions
    assert changed.written == [range(2)]


def test_samples_that_follow_each_other_are_one_range_until_a_watcher_has_seen_some(catalog: Catalog) -> None:
    put(catalog, 1)
    start = catalog.history.mark()
    for _ in range(2 * MOST_UNREAD):
        put(catalog, 3)
    (changed,) = catalog.history.since(start, ALL).partitions
    assert changed.written == [range(1, 1 + 6 * MOST_UNREAD)]
    put(catalog, 1)
    put(catalog, 1)
    (changed,) = catalog.history.since(catalog.history.mark() - 2, ALL).partitions
    assert len(changed.written) == 1 and len(changed.written[0]) == 2


def test_a_row_that_was_written_often_comes_once_and_one_that_is_gone_not_at_all(catalog: Catalog) -> None:
    put(catalog, 3)
    start = catalog.history.mark()
    for _ in range(5):
        columns = new_write(2, meta=[{"s": 1}] * 2).meta
        catalog.commit(MetaSet(partition_id="train", global_indexes=np.array([2, 0]), columns=columns))
    put_and_clear(catalog, 2)
    (changed,) = catalog.history.since(start, ALL).partitions
    (rows,) = changed.written_in_parts()
    assert rows[catalog.get("train").table.find(rows) >= 0].tolist() == [0, 2]


def test_changes_without_a_watcher_are_put_aside_and_hold_no_partition_for_long(catalog: Catalog) -> None:
    history = catalog.history
    put(catalog, 1)
    put(catalog, 1)
    assert len(history.unread) == 2
    catalog.remove("train", b"")
    assert history.unread == []
    for _ in range(2 * MOST_UNREAD):
        put(catalog, 1)
        assert len(history.unread) <= MOST_UNREAD


def test_of_a_cleared_partition_is_kept_that_it_is_gone(catalog: Catalog) -> None:
    history, indexes = catalog.history, np.arange(200)
    for number in range(50):
        name = f"train@{number}"
        catalog.write(name, b"", new_write(200, ("x",), keys=[f"{number}-{row}" for row in indexes]))
        catalog.write(name, b"", new_write(200, ("y",), indexes=np.roll(indexes, 1)))
        history.mark()  # what is written from now on is another change
        catalog.write(name, b"", new_write(200, ("z",), indexes=np.roll(indexes, 2)))
        catalog.commit(SamplesCleared(partition_id=name, global_indexes=indexes[:100]))
        assert len(history._order) == 4
        catalog.remove(name, b"")
        assert (len(history._order), len(history._pasts), len(history._cleared)) == (0, 0, number + 1)


def test_many_rows_that_were_written_are_not_put_aside(catalog: Catalog) -> None:
    history, count = catalog.history, MOST_UNREAD_ROWS + 1
    put(catalog, count)
    for _ in range(MOST_UNREAD - 2):
        catalog.write("train", b"", new_write(count, ("y",), indexes=np.roll(np.arange(count), 1)))
        assert sum(len(rows) for _, written, _ in history.unread for _, rows in written) <= count
    assert history._weight <= KEPT_ROWS + 2 * count


def test_what_is_kept_is_bounded_and_more_is_kept_while_a_watcher_needs_it(catalog: Catalog) -> None:
    history = catalog.history
    put(catalog, 1)
    start = history.mark()
    size = KEPT_ROWS // 4
    for _ in range(8):
        put_and_clear(catalog, size)
    with pytest.raises(CompactedError, match=f"revision {start} is too old"):
        history.since(start, ALL)
    assert history._weight <= KEPT_ROWS + size + 100
    reader = Reader(history.mark())
    history.readers.add(reader)
    for _ in range(8):
        put_and_clear(catalog, size)
    (changed,) = history.since(reader.revision, ALL).partitions
    assert sum(len(rows) for rows, _ in changed.removed) == 8 * size
    history.readers.discard(reader)
    put(catalog, 1)
    for _ in range(2):
        put_and_clear(catalog, size)
    assert history._weight <= KEPT_ROWS + size + 100


def test_partitions_that_are_gone_are_forgotten_too(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "KEPT_ROWS", 1000)
    catalog.history._trimmed_from = 0
    start = catalog.history.mark()
    for number in range(100):
        catalog.create(f"p{number}", PartitionSettings())
        catalog.remove(f"p{number}", b"")
    assert len(catalog.history._cleared) < 40
    with pytest.raises(CompactedError):
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
