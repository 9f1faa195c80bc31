"""Rollouts and their groups against a model that looks at every sample: what is refused, complete, delivered, left."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from digest import digest
from domain_support import clear, commit, insert, new_write, partition, task_of, update
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import InvalidArgumentError, NotFoundError, PreconditionError, TqError
from tq_service.machine.samples import GroupsClosed
from tq_service.planning.grouping import Grouping
from tq_service.serving.admission import demand_of
from tq_service.state.partition import Partition
from tq_service.state.table import LIVE

GROUPS, ROLLOUTS = ["", "a", "b"], ["", "a", "r", "s"]  # a group and a rollout may have one name
ROWS = st.lists(st.tuples(st.sampled_from(GROUPS), st.sampled_from(ROLLOUTS)), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ROWS, st.sampled_from([0, 0, 2, 3]), st.booleans()),
        st.tuples(st.just("close"), st.sampled_from(["group", "rollout"]), st.sampled_from(["a", "b", "r", "s"])),
        st.tuples(st.sampled_from(["fail", "clear", "clear"]), st.integers(0, 11)),
    ),
    max_size=25,
)


@dataclass
class Set:
    """A group or a rollout, from its first sample until the last one is cleared."""

    group: str = ""  # of a rollout
    size: int = 0
    closed: bool = False
    rows: list[int] = field(default_factory=list)  # all there ever were
    units: set = field(default_factory=set)


class Model:
    """Samples by their index, with group, rollout, and whether they have failed."""

    def __init__(self):
        self.rows: dict[int, tuple[str, str, bool]] = {}
        self.sets: dict[tuple[str, str], Set] = {}
        self.next_index = 0

    def put(self, rows, size, closes):
        """Add samples; return whether that is refused, which changes nothing."""
        known = {name: Set(each.group, each.size, each.closed, [*each.rows], {*each.units})
                 for name, each in self.sets.items()}  # fmt: skip
        added = {}
        for index, (group_given, rollout) in enumerate(rows, self.next_index):
            group = group_given
            if rollout:
                found = known.setdefault(("rollout", rollout), Set(group))
                if found.closed or group not in ("", found.group):
                    return True
                if group:
                    known.setdefault(("group", group), Set())
                found.rows.append(index)
                group = found.group
            if group:
                unit = ("rollout", found.rows[0]) if rollout else index  # a name is used again once all is cleared
                found = known.setdefault(("group", group), Set())
                if found.closed and unit not in found.units:
                    return True
                found.rows.append(index)
                found.units.add(unit)
            added[index] = group, rollout, False
        for name in {group for group, _ in rows if group}:
            found = known["group", name]
            if found.size and size and found.size != size:
                return True
            found.size = found.size or size
            if found.size and len(found.units) > found.size:
                return True
        if closes and not any(rollout for _, rollout in rows):
            return True
        for _, rollout in rows:
            if closes and rollout:
                known["rollout", rollout].closed = True
        self.sets, self.rows = known, self.rows | added
        self.next_index += len(rows)
        return False

    def fail(self, index):
        group, rollout, _ = self.rows[index]
        self.rows[index] = group, rollout, True
        if rollout:
            self.sets["rollout", rollout].closed = True

    def clear(self, index):
        del self.rows[index]
        self.sets = {name: each for name, each in self.sets.items() if any(row in self.rows for row in each.rows)}

    def is_live(self, index):
        return index in self.rows and not self.rows[index][2]

    def units(self, unit):
        """Yield the sets of samples that are units, and whether each gets no further ones."""
        for (kind, name), each in self.sets.items():
            if kind == "rollout" and (unit == "rollout" or not each.group):
                yield each, each.closed
            if kind == "group" and unit == "group":
                is_full = each.closed or (each.size and len(each.units) >= each.size)
                rollouts = [one for (what, _), one in self.sets.items() if what == "rollout" and one.group == name]
                yield each, is_full and all(one.closed for one in rollouts)
        for index, (group, rollout, _) in self.rows.items():
            if not rollout and (unit == "rollout" or not group):
                yield Set(rows=[index]), True

    def delivered(self, unit, *, takes):
        """Return the samples of each unit that can be delivered."""
        found = set()
        for each, is_complete in self.units(unit):
            live = tuple(index for index in each.rows if self.is_live(index))
            if is_complete and live and (takes or len(live) == len(each.rows)):
                found.add(live)
        return found

    def left_units(self, each, unit, *, takes):
        """Return how many rollouts, or samples that are in none, are left of a unit."""
        live = [index for index in each.rows if self.is_live(index)]
        if unit == "rollout":
            return len(live)
        left = {self.rows[index][1] or index for index in live}
        lost = {
            name
            for (kind, name), one in self.sets.items()
            if kind == "rollout" and not all(map(self.is_live, one.rows))
        }
        return len(left if takes else left - lost)


def delivered(train, task, unit, *, takes):
    ready = np.flatnonzero(train.state[: train.table.count] == LIVE)
    grouping = Grouping(train, task, None, take_incomplete=takes, unit=unit)
    rows, sizes = grouping.whole(ready, no_more=False)
    return {
        tuple(sorted(part.tolist())) for part in np.split(train.table.index[rows], np.cumsum(sizes)[:-1]) if part.size
    }


@examples(200)
@given(STEPS)
def test_groups_and_rollouts_are_as_their_samples_say(steps):
    train, model = partition(), Model()
    task = task_of(train, "t")
    for kind, *what in steps:
        if kind == "put":
            rows, size, closes = what
            groups, rollouts = ([row[at] for row in rows] for at in (0, 1))
            before = digest(train)
            arguments = {"groups": groups, "rollouts": rollouts, "group_size": size, "ends_rollouts": closes}
            try:
                demand = demand_of(train, new_write(len(rows), ["x"], **arguments), 4)
                known = dict(model.sets)
                insert(train, len(rows), **arguments)
            except TqError:
                assert digest(train) == before
                assert model.put(rows, size, closes)
                continue
            assert not model.put(rows, size, closes)
            check_demand(demand, model, known, range(model.next_index - len(rows), model.next_index))
        elif kind == "close":
            change = GroupsClosed(partition_id=train.partition_id, names=what[1:], rollouts=())
            if what[0] == "rollout":
                change = GroupsClosed(partition_id=train.partition_id, names=(), rollouts=what[1:])
            if (found := model.sets.get(tuple(what))) is None:
                with pytest.raises(NotFoundError):
                    commit(train, change)
            else:
                commit(train, change)
                found.closed = True
        elif model.rows:
            index = sorted(model.rows)[what[0] % len(model.rows)]
            if kind == "clear":
                clear(train, np.array([index]))
                model.clear(index)
            elif not model.rows[index][2]:
                update(train, [index], state="failed")
                model.fail(index)
        check(train, task, model)
    check(restored := Partition.restore(train.snapshot()), restored.tasks["t"], model)
    assert digest(restored) == digest(train)


def check(train, task, model):
    positions = train.table.present_positions()
    names = zip(train.groups.names_of(positions), train.groups.rollout_names_of(positions), strict=True)
    assert [(group or "", rollout or "") for group, rollout in names] == [row[:2] for row in model.rows.values()]
    assert len(train.groups) + train.groups.rollout_count == len(model.sets)
    for unit in ("group", "rollout"):
        for takes in (False, True):
            assert delivered(train, task, unit, takes=takes) == model.delivered(unit, takes=takes)
        if not train.groups.in_use:
            continue
        for takes, (each, is_complete) in itertools.product((False, True), model.units(unit)):
            grouping = Grouping(train, task, None, take_incomplete=takes, unit=unit)
            rows = np.array([row for row in each.rows if row in model.rows])
            ids = np.unique(grouping.ids(train.table.find(rows)))
            assert train.table.index[grouping.members_of(ids)].tolist() == sorted(rows.tolist())
            assert grouping.is_complete(ids, no_more=False).tolist() == [bool(is_complete)]
            if rows.size == 1 and not model.is_live(rows[0]):
                continue
            assert grouping.left_units(ids).tolist() == [model.left_units(each, unit, takes=takes)]


def check_demand(demand, model, known, added):
    """Look at what a write takes of an admission: of units that had begun nothing."""

    def has_begun(index):
        group, rollout, _ = model.rows[index]
        return bool(group and ("group", group) in known) or bool(rollout and ("rollout", rollout) in known)

    beginning = [index for index in added if not has_begun(index)]
    if not beginning:
        assert demand is None
        return
    rollouts = {model.rows[index][1] or index for index in beginning}
    groups = {("group", model.rows[index][0]) if model.rows[index][0] else model.rows[index][1] or index
              for index in beginning}  # fmt: skip
    assert demand.counts == {"sample": len(beginning), "rollout": len(rollouts), "group": len(groups)}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rollouts": ["r"], "groups": ["b"]}, InvalidArgumentError),
        ({"rollouts": ["closed"]}, PreconditionError),
        ({"rollouts": ["new"], "groups": ["full"]}, PreconditionError),
        ({"rollouts": ["r"], "groups": ["a"], "group_size": 3}, InvalidArgumentError),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error):
    train = partition()
    insert(train, 1, rollouts=["r"], groups=["a"], group_size=2)
    insert(train, 1, rollouts=["closed"], ends_rollouts=True)
    insert(train, 2, rollouts=["x", "x"], groups=["full"] * 2, group_size=1)
    before = digest(train)
    with pytest.raises(error):
        insert(train, 1, **arguments)
    assert digest(train) == before
    insert(train, 1, rollouts=["x"])  # of a group that is full, but of a rollout of it
