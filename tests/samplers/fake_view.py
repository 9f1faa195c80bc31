"""A partition in plain lists, as a sampler sees it."""

from dataclasses import dataclass, field

import numpy as np

from tq_service.samplers import Groups


@dataclass
class Row:
    index: int
    group: str | None = None
    length: int = -1
    ready: bool = True
    state: str = "live"
    meta: dict = field(default_factory=dict)


class FakeView:
    """Implements `View` over rows; `group_sizes` declares sizes of groups, `closed` ones are complete as they are."""

    def __init__(self, rows, *, group_sizes=None, closed=()):
        self.all_rows = {row.index: row for row in rows}
        self.group_sizes = dict(group_sizes or {})
        self.closed = set(closed)

    def ready(self, limit=None):
        rows = [row.index for row in self.all_rows.values() if row.ready and row.state == "live"]
        return np.array(rows[:limit], dtype=np.int64)

    def left(self, limit=None):
        return self.rows()[:limit]

    def ready_groups(self, limit=None, *, unit="sample", block_size=None, take_incomplete=False, blocks="aligned"):
        taken, used = [], 0
        explicit = any(row.group is not None for row in self.all_rows.values())
        in_runs = blocks == "anywhere" and block_size and not explicit
        for members in self._runs(block_size) if in_runs else self._whole_groups(block_size, take_incomplete):
            used += 1 if unit == "group" else len(members)
            if limit is not None and used > limit:
                break
            taken.append(members)
        rows = [row for members in taken for row in members]
        return Groups(rows=np.array(rows, dtype=np.int64), sizes=np.array([len(m) for m in taken], dtype=np.int64))

    def _runs(self, size):
        ready = self.ready().tolist()
        while len(ready) >= size:
            if ready[size - 1] - ready[0] == size - 1:
                yield ready[:size]
                ready = ready[size:]
            else:
                ready = ready[1:]

    def _whole_groups(self, block_size, take_incomplete):
        explicit = any(row.group is not None for row in self.all_rows.values())
        by_group = {}
        for row in self.all_rows.values():
            name = row.group if explicit else (row.index // block_size if block_size else row.index)
            by_group.setdefault(name, []).append(row)
        default_size = block_size if explicit or block_size else 1
        for name, rows in by_group.items():
            size = len(rows) if name in self.closed else self.group_sizes.get(name, default_size)
            members = [row for row in rows if row.state != "failed"]
            if len(rows) < (size or 1) or not members or (len(members) < len(rows) and not take_incomplete):
                continue
            if all(row.ready and row.state == "live" for row in members):
                yield [row.index for row in members]

    def lengths(self, rows):
        return np.array([self.all_rows[row].length for row in rows.tolist()], dtype=np.int64)

    def field_lengths(self, field, rows):
        return self.lengths(rows)

    def values(self, column, rows):
        values = [self.all_rows[row].meta.get(column) for row in rows.tolist()]
        present = np.array([value is not None for value in values])
        return np.array([value or 0 for value in values]), present

    def group_names(self, rows):
        return [self.all_rows[row].group for row in rows.tolist()]

    def rollout_names(self, rows):
        return [None] * len(rows)

    def states(self, rows):
        return [self.all_rows[row].state for row in rows.tolist()]

    def rows(self):
        return np.array(list(self.all_rows), dtype=np.int64)


def view_of_groups(sizes, *, lengths=None):
    """Return a view of closed groups g0, g1, ... of these sizes, all ready."""
    rows, lengths = [], iter(lengths or [])
    for number, size in enumerate(sizes):
        rows += [Row(len(rows) + i, group=f"g{number}", length=next(lengths, 1)) for i in range(size)]
    return FakeView(rows, closed={f"g{number}" for number in range(len(sizes))})


def view_of_samples(count, *, lengths=None):
    """Return a view of ready samples without explicit groups."""
    return FakeView([Row(i, length=lengths[i] if lengths else 1) for i in range(count)])


def parts(plan):
    """Return the rows of each rank as lists."""
    return [rank.rows.tolist() for rank in plan.ranks]


def assert_alike(plan, other):
    """Two plans give each rank the same rows, in as many steps, and drop the same ones."""
    described = [
        [(rank.rows.tolist(), rank.dropped.tolist(), len(rank.steps)) for rank in each.ranks] for each in (plan, other)
    ]
    assert described[0] == described[1]
