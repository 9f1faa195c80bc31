"""A partition and its tasks in plain lists and dicts: what the service should hold and answer."""

from collections import Counter
from dataclasses import dataclass, field
from math import gcd


class RefusedError(Exception):
    """The model refuses what the service must refuse."""


class BlocksError(RefusedError):
    """Samples were not put in multiples of the blocks that a sampler takes."""


@dataclass
class Row:
    index: int
    state: str
    key: str | None = None
    group: str | None = None
    rollout: str | None = None
    cells: dict = field(default_factory=dict)  # the shape of each by its field
    meta: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)  # the cells of its group, which are those of all its samples

    @property
    def fields(self):
        return self.cells.keys() | self.shared.keys()


@dataclass(frozen=True)
class Rows:
    """Rows of one field that are put together: their dtype and shapes.

    `jagged`: they come so also where they are alike, and may differ in the last dimension.
    """

    dtype: str
    shapes: list
    jagged: bool = False


@dataclass
class Field:
    """What all cells of a field have in common, until the last one is gone."""

    dtype: str
    shape: tuple
    jagged: bool = False

    def takes(self, rows):
        return self.dtype == rows.dtype and len(self.shape) == len(rows.shapes[0])

    def widen(self, rows):
        for shape in rows.shapes:
            self.shape = tuple(a if a == b else -1 for a, b in zip(self.shape, shape, strict=True))
        if rows.jagged and -1 not in self.shape:
            self.shape = (*self.shape[:-1], -1)
        self.jagged |= -1 in self.shape

    def length_of(self, shape):
        ragged = [dim for dim, size in enumerate(self.shape) if size < 0]
        return shape[ragged[0] if ragged else 0]


@dataclass
class Group:
    """`members` has every row that ever joined, as long as one of them is still there; `size` counts rollouts once."""

    declared: int = 0
    closed: bool = False
    members: list = field(default_factory=list)
    size: int = 0
    cells: dict = field(default_factory=dict)  # the shape of each by its field


@dataclass
class Rollout:
    """Likewise; `group` is the one in which it lies."""

    group: str | None
    closed: bool = False
    members: list = field(default_factory=list)


@dataclass(frozen=True)
class Asking:
    """How a task asks: what a batch spec fixes, in plain words.

    `grouped` tells samplers that keep groups whole; `block_size` is their `n_samples_per_prompt`.
    """

    sampler: str
    fields: tuple
    batch_size: int
    min_size: int
    dp_size: int = 0  # 0: a queue worker
    unit: str = "sample"
    grouped: bool = False
    block_size: int | None = None
    anywhere: bool = False  # blocks begin at any index
    take: bool = False
    needs_length: bool = False
    least_version: int | None = None
    newest_first: bool = False
    drop_last: bool = False
    finite: bool = False
    micro_batch_size: int | None = None
    slow: bool = False
    lease: float | None = None
    max_deliveries: int | None = None
    max_uses: int = 1
    unmatched: str = "wait"
    least_members: int = 0

    @property
    def total(self):
        return self.batch_size * (self.dp_size or 1)

    @property
    def least(self):
        return self.total if self.dp_size else self.min_size


@dataclass
class End:
    """The names and counts of `tq_service.schema.EndCounts`."""

    counts: dict


@dataclass
class Claim:
    """What a queue worker got: `held` has the rows not given back, `left` those of them that are leased."""

    rows: list
    asking: Asking
    held: set
    left: set = field(default_factory=set)
    deadline: float = 0.0
    runs: dict | None = None  # of each row, where they make up its groups
    consumed: set | None = None  # what it consumes, where that is not what it delivers
    returned: set = field(default_factory=set)  # acknowledged, and ready for their next use


@dataclass
class TaskModel:
    epoch: int = 0
    dp_size: int | None = None
    consumed: set = field(default_factory=set)  # rows that are there and consumed
    consumed_count: int = 0
    batches: list = field(default_factory=list)  # of each batch_index: the rows of each rank
    end: End | None = None
    claims: dict = field(default_factory=dict)  # request_id -> Claim
    rows_of_claims: dict = field(default_factory=dict)  # also of those that are gone
    released: set = field(default_factory=set)
    expired: set = field(default_factory=set)
    deliveries: dict = field(default_factory=dict)
    acked: set = field(default_factory=set)
    uses: Counter = field(default_factory=Counter)
    reused_batches: set = field(default_factory=set)
    reusing: list = field(default_factory=list)  # batch indexes and request ids, as many as are kept
    forgotten: int = -1  # the last batch_index that was
    names: dict = field(default_factory=dict)  # claim_name -> request_id
    past_names: dict = field(default_factory=dict)  # claim_name -> End, or what became of samples of its claim
    dead_lettered: set = field(default_factory=set)
    dead_lettered_count: int = 0
    kept_count: int = 0  # of consumed_count, in earlier epochs

    @property
    def leased(self):
        return set().union(*(claim.left for claim in self.claims.values()))


class Model:
    """One life of a partition."""

    def __init__(self, expected=None, samples_per_round=None, write_once=(), shared=()):
        self.rows = {}
        self.shared = frozenset(shared)
        self.write_once = frozenset(write_once)
        self.samples_per_round = samples_per_round
        self.inserted = 0
        self.insert_size_gcd = 0
        self.expected = expected
        self.sealed = expected == 0
        self.fields = {}
        self.groups = {}
        self.rollouts = {}
        self.had_groups = False  # or rollouts
        self.tasks = {}
        self.most_reusing = 1 << 10

    def task(self, name):
        return self.tasks.setdefault(name, TaskModel())

    # Writing

    def insert(
        self,
        count,
        *,
        state="live",
        keys=None,
        groups=None,
        group_size=0,
        rollouts=None,
        ends_rollouts=False,
        columns=None,
        meta=None,
    ):
        groups, rollouts = groups or [None] * count, rollouts or [None] * count
        if self.sealed and count:
            raise RefusedError("sealed")
        groups_of = self._check_rollouts(groups, rollouts, ends_rollouts=ends_rollouts)
        self._check_groups(groups, groups_of, rollouts, group_size)
        self._check_columns([], columns or {})
        added = []
        for i in range(count):
            row = Row(self.inserted, state, keys[i] if keys else None, groups_of[i], rollouts[i])
            self.inserted += 1
            self.rows[row.index] = row
            added.append(row)
            self._join(row)
        for name in filter(None, groups):
            self.groups[name].declared = group_size or self.groups[name].declared
        if count:
            self.insert_size_gcd = gcd(self.insert_size_gcd, count)
        self._fill(added, columns or {}, meta, state)
        if ends_rollouts or state == "failed":
            self._close_rollouts_of(added)
        if self.expected is not None and self.inserted >= self.expected:
            self.seal()
        return [row.index for row in added]

    def _join(self, row):
        begins = row.rollout not in self.rollouts
        self.had_groups |= bool(row.group or row.rollout)
        if row.group:
            group = self.groups.setdefault(row.group, Group())
            group.members.append(row)
            group.size += begins
            row.shared = group.cells
        if row.rollout:
            self.rollouts.setdefault(row.rollout, Rollout(row.group)).members.append(row)

    def _check_rollouts(self, groups, rollouts, *, ends_rollouts):
        """Return the group of each row: that of its rollout, which the first row of it says."""
        if ends_rollouts and not any(rollouts):
            raise RefusedError("no rollout to close")
        group_of = {name: rollout.group for name, rollout in self.rollouts.items()}
        for group, rollout in zip(groups, rollouts, strict=True):
            if rollout in self.rollouts and self.rollouts[rollout].closed:
                raise RefusedError("the rollout is closed")
            if rollout and group not in (None, group_of.setdefault(rollout, group)):
                raise RefusedError("the rollout is in another group")
        return [group_of[rollout] if rollout else group for group, rollout in zip(groups, rollouts, strict=True)]

    def put_groups(self, names, columns, *, must_exist):
        """Give groups values that their samples share; return the names of the errors, None without one."""
        known = [self.groups.get(name) for name in names]
        if must_exist and not all(group and group.members for group in known):
            return "NotFoundError"
        if self.sealed and None in known:
            return "PartitionSealedError"
        if any(group and group.cells.keys() & columns.keys() & self.write_once for group in known):
            return "AlreadyExistsError"
        others = [group for name, group in self.groups.items() if name not in names]
        replaced = {name for name in columns if not any(name in group.cells for group in others)}
        for name, column in columns.items():
            if name in self.fields and name not in replaced and not self.fields[name].takes(column):
                return "FieldMismatchError"
        for name, column in columns.items():
            if name not in self.fields or name in replaced:
                self.fields[name] = Field(column.dtype, column.shapes[0])
            self.fields[name].widen(column)
            for group, shape in zip(names, column.shapes, strict=True):
                self.groups.setdefault(group, Group()).cells[name] = shape
        self.had_groups = True
        return None

    def remove_groups(self, names):
        """Remove those groups that have had no samples; return how many."""
        gone = [name for name in names if name in self.groups and not self.groups[name].members]
        for name in gone:
            del self.groups[name]
        self._forget_fields()
        return len(gone)

    def _check_groups(self, given, groups_of, rollouts, group_size):
        begun = {rollout: group for group, rollout in zip(groups_of, rollouts, strict=True) if rollout}
        units = [group for rollout, group in begun.items() if rollout not in self.rollouts]
        units += [group for group, rollout in zip(groups_of, rollouts, strict=True) if not rollout]
        for name in {name for name in given if name}:
            group, count = self.groups.get(name, Group()), units.count(name)
            limit = group.declared or group_size
            if (group.closed and count) or (group.declared and group_size and group.declared != group_size):
                raise RefusedError("group")
            if limit and group.size + count > limit:
                raise RefusedError("group is full")

    def update(self, indexes, *, state=None, columns=None, meta=None):
        self.check_update(indexes, state=state, columns=columns)
        rows = [self.rows[index] for index in indexes]
        for row in rows:
            row.state = state or row.state
        if state == "failed":
            self._close_rollouts_of(rows)
            self._end_leases_of(set(indexes))
        self._fill(rows, columns or {}, meta, state)

    def check_update(self, indexes, *, state=None, columns=None):
        rows = [self.rows[index] for index in indexes]
        if state not in (None, "failed") and any(row.state == "failed" for row in rows):
            raise RefusedError("failed is final")
        if any(row.fields & columns.keys() & self.write_once for row in rows if columns):
            raise RefusedError("a second value")
        self._check_columns(rows, columns or {})

    def clear_fields(self, indexes, groups, names):
        """Clear cells of samples, and those that groups share; return how many there were."""
        owners = [self.rows[index] for index in indexes] + [self.groups[name] for name in groups if name in self.groups]
        count = sum(owner.cells.pop(name, None) is not None for owner in owners for name in names)
        self._forget_fields()
        return count

    def put_leased(self, task, request_id, rows, *, acks, state=None, columns=None):
        """Write to samples of a claim, and acknowledge them; return the name of the error, None without one."""
        error = self.ack_error(task, request_id, rows) if acks else self.lease_error(task, request_id, rows)
        if error:
            return error
        self.check_update(rows, state=state, columns=columns)
        if acks:
            self.ack(task, request_id, rows)
        held = [index for index in rows if self.rows[index].state == "held"]
        self.update(rows, state=state, columns=columns)
        if acks and state is None:
            self.update(held, state="live")
        return None

    def growth_error(self, task, request_id, rows):
        """Return the name of the error of a worker that adds to these rows of its claim, None without one."""
        if error := self.lease_error(task, request_id, rows):
            return error
        if any(self.rows[index].state != "held" for index in rows):
            return "PreconditionError"
        claim = task.claims.get(request_id)
        return None if claim is not None and set(rows) <= claim.left else "LeaseExpiredError"

    def append(self, task, request_id, rows, columns, at):
        """Add rows to the cells of samples of a claim; return the names of the errors, None without one."""
        if error := self.growth_error(task, request_id, rows):
            return error
        errors = set()
        for name, column in columns.items():
            known, rest = self.fields.get(name), column.shapes[0][1:]
            if known is not None and (not known.takes(column) or known.shape[1:] != rest):
                errors.add("FieldMismatchError")
            elif [self.rows[index].cells.get(name, (0,))[0] for index in rows] != at:
                errors.add("PreconditionError")
        if errors:
            return " ".join(errors)
        for name, column in columns.items():
            self.fields[name] = Field(column.dtype, (-1, *column.shapes[0][1:]), jagged=True)
            for index, length, (added, *rest) in zip(rows, at, column.shapes, strict=True):
                self.rows[index].cells[name] = (length + added, *rest)
        return None

    def truncate(self, task, request_id, rows, names, lengths):
        """Cut the cells of samples of a claim; return the names of the errors, None without one."""
        if error := self.growth_error(task, request_id, rows):
            return error
        errors = set()
        for name in names:
            if name in self.fields and self.fields[name].shape[:1] != (-1,):
                errors.add("FieldMismatchError")
            if any(self.rows[row].cells.get(name, (0,))[0] < to for row, to in zip(rows, lengths, strict=True)):
                errors.add("PreconditionError")
        if errors:
            return " ".join(errors)
        for name in names:
            for index, to in zip(rows, lengths, strict=True):
                _, *rest = self.rows[index].cells.pop(name, (0,))
                if to:
                    self.rows[index].cells[name] = (to, *rest)
        self._forget_fields()
        return None

    def is_replaced(self, rows, name):
        """Whether a write to some rows leaves no cell of a field."""
        kept = {row.index for row in self.rows.values()} - {row.index for row in rows}
        return not any(name in self.rows[index].cells for index in kept)

    def _check_columns(self, rows, columns):
        for name, column in columns.items():
            if name in self.fields and not self.is_replaced(rows, name) and not self.fields[name].takes(column):
                raise RefusedError("another dtype, or number of dimensions")

    def _fill(self, rows, columns, meta, state):
        for name, column in columns.items() if state != "failed" else ():
            if name not in self.fields or self.is_replaced(rows, name):
                self.fields[name] = Field(column.dtype, column.shapes[0])
            self.fields[name].widen(column)
        for position, row in enumerate(rows):
            row.cells |= {name: column.shapes[position] for name, column in columns.items()}
            if row.state == "failed":
                row.cells.clear()
            if meta:
                for name, value in meta[position].items():
                    row.meta.pop(name, None)
                    if type(value) is int:  # others claims do not see
                        row.meta[name] = value
        self._forget_fields()

    def _forget_fields(self):
        there = {name for each in (*self.rows.values(), *self.groups.values()) for name in each.cells}
        self.fields = {name: known for name, known in self.fields.items() if name in there}

    def _end_leases_of(self, indexes):
        """What failed or was cleared while it was leased counts as done."""
        for task in self.tasks.values():
            for request_id, claim in list(task.claims.items()):
                was_leased = bool(claim.left)
                claim.left -= indexes
                if was_leased:
                    self._keep_if_reusing(task, request_id)

    def seal(self):
        self.sealed = True
        self.remove_groups(list(self.groups))

    def close_group(self, name):
        self.groups[name].closed = True

    def close_rollout(self, name):
        self.rollouts[name].closed = True

    def _close_rollouts_of(self, rows):
        for row in rows:
            if row.rollout:
                self.close_rollout(row.rollout)

    def clear(self, indexes):
        gone = [self.rows.pop(index) for index in indexes if index in self.rows]
        for row in gone:
            row.state = "cleared"
            for task in self.tasks.values():
                task.consumed.discard(row.index)
                task.uses.pop(row.index, None)
                task.dead_lettered.discard(row.index)
        self._end_leases_of({row.index for row in gone})
        for task in self.tasks.values():
            self._drop_empty_claims(task)
        for sets, names in ((self.groups, {row.group for row in gone}), (self.rollouts, {row.rollout for row in gone})):
            for name in names - {None}:
                if all(row.state == "cleared" for row in sets[name].members):
                    del sets[name]
        self._forget_fields()
        return len(gone)

    def reset(self, name, *, keep_consumed):
        task = self.task(name)
        leased = task.leased
        task.consumed -= leased
        task.consumed_count -= len(leased)
        if not keep_consumed:
            task.consumed, task.consumed_count, task.acked = set(), 0, set()
            task.uses.clear()
        task.deliveries, task.dead_lettered, task.dead_lettered_count = {}, set(), 0
        task.kept_count = task.consumed_count
        task.epoch += 1
        task.dp_size, task.batches, task.end, task.claims = None, [], None, {}
        task.names, task.past_names = {}, {}
        task.reusing, task.reused_batches, task.forgotten = [], set(), -1

    def restart_ranks(self, name, dp_size, trained):
        """Only for tasks that consume what they are given, once. Batches that were cleared whole stay consumed."""
        task = self.task(name)
        known = [
            parts
            for parts in task.batches[trained + 1 :]
            if any(not part or any(row in self.rows for row in part) for part in parts)
        ]
        dropped = [row for parts in known for part in parts for row in part]
        task.consumed -= set(dropped)
        task.consumed_count -= len(dropped)
        del task.batches[trained + 1 :]
        task.epoch += 1
        task.dp_size, task.end, task.forgotten = dp_size, None, min(task.forgotten, trained)

    # What is ready

    def is_open(self, task, row):
        return row.state in ("live", "held") and row.index not in task.consumed | task.dead_lettered

    def is_left(self, task, index):
        return index in self.rows and self.is_open(task, self.rows[index])

    def is_ready(self, task, asking, row):
        return (
            row.state == "live"
            and row.index not in task.consumed | task.dead_lettered
            and row.fields >= set(asking.fields)
            and self.passes(asking, row)
            and (not asking.needs_length or "total_lengths" in row.meta)
        )

    def passes(self, asking, row):
        return asking.least_version is None or row.meta.get("version", -1) >= asking.least_version

    def is_excluded(self, asking, row):
        """By its value, or for want of one although all data is there."""
        if asking.least_version is None:
            return False
        if "version" in row.meta:
            return not self.passes(asking, row)
        return row.fields >= set(asking.fields)

    def in_order(self, asking, rows):
        rows = sorted(rows, key=lambda row: row.index)
        if asking.newest_first:
            rows.sort(key=lambda row: (0, -row.meta["version"]) if "version" in row.meta else (1, 0))
        return rows

    def ready_units(self, task, asking, *, no_more):
        """Return what may be handed out: lists of rows that stay together, in order of their first member."""
        ready = self.in_order(asking, [row for row in self.rows.values() if self.is_ready(task, asking, row)])
        together, unit_of = {}, self.units_among(asking, ready)
        for row in ready:
            together.setdefault(unit_of[row.index], []).append(row)
        return [rows for unit, rows in together.items() if self.is_whole(task, asking, unit, rows, no_more=no_more)]

    def takes_runs(self, asking):
        if asking.block_size is None or asking.unit == "rollout":
            return False
        return asking.grouped and asking.anywhere and not self.had_groups

    def units_among(self, asking, rows):
        """Return the unit of each of some rows, by index: those of runs depend on which rows there are."""
        indexes = sorted(row.index for row in rows)
        if not self.takes_runs(asking):
            return {row.index: self.unit_of(asking, row) for row in rows}
        unit_of = {index: ("loose", index) for index in indexes}
        size, at = asking.block_size, 0
        while at <= len(indexes) - size:
            some = indexes[at : at + size]
            if some != list(range(some[0], some[0] + size)):
                at += 1
                continue
            unit_of |= dict.fromkeys(some, ("run", some[0]))
            at += size
        return unit_of

    def unit_of(self, asking, row):
        if not asking.grouped:
            return "row", row.index
        if row.group and asking.unit != "rollout":
            return "group", row.group
        if row.rollout:
            return "rollout", row.rollout
        if self.had_groups or not asking.block_size or asking.unit == "rollout":
            return "row", row.index
        return "block", row.index // asking.block_size

    def members(self, asking, unit):
        """Return all members a unit ever had, None for rows of a block that are gone."""
        kind, name = unit
        if kind == "group":
            return self.groups[name].members
        if kind == "rollout":
            return self.rollouts[name].members
        if kind == "block":
            return [self.rows.get(name * asking.block_size + i) for i in range(asking.block_size)]
        return [self.rows[name]]

    def is_lost(self, task, member):
        """Whether a member of a unit failed, for all or, having been dead-lettered, for the task."""
        return member is None or member.state in ("failed", "cleared") or member.index in task.dead_lettered

    def is_whole(self, task, asking, unit, ready_rows, *, no_more):
        if unit[0] in ("run", "loose"):
            return unit[0] == "run"
        members = self.members(asking, unit)
        left = [row for row in members if not self.is_lost(task, row)]
        if not self.is_complete(asking, unit, no_more=no_more):
            return False
        if len(left) < len(members) and not asking.take:
            return False
        return len(left) == len(ready_rows)

    def is_complete(self, asking, unit, *, no_more):
        """Whether a unit gets no further members."""
        kind, name = unit
        if kind == "block":
            return no_more or (name + 1) * asking.block_size <= self.inserted
        if kind == "rollout":
            return no_more or self.rollouts[name].closed
        if kind == "row":
            return True
        group = self.groups[name]
        size = group.declared or asking.block_size or 0
        is_full = group.closed or 0 < size <= group.size or (group.declared == 0 and no_more)
        return is_full and (no_more or all(each.closed for each in self.rollouts.values() if each.group == name))

    def is_dead(self, task, asking, row):
        """Whether the row's group can no longer be whole, given that no new rows come."""
        if self.takes_runs(asking):
            size = asking.block_size
            windows = [range(first, first + size) for first in range(row.index - size + 1, row.index + 1)]
            return not any(all(self.is_left(task, index) for index in window) for window in windows)
        unit = self.unit_of(asking, row)
        members = self.members(asking, unit)
        broken = any(self.is_lost(task, member) for member in members)
        short = not self.is_complete(asking, unit, no_more=True)
        return short or (broken and not asking.take)

    # What a task gives up

    def evictable(self, task, asking):
        """Return the indexes of the rows that a claim evicts."""
        if asking.unmatched == "wait":
            return set()
        leased = set().union(*(each.leased for each in self.tasks.values()))
        if not asking.grouped or self.takes_runs(asking):
            return {row.index for row in self.rows.values() if self.may_evict(task, asking, row)} - leased
        evicted = set()
        for unit in {self.unit_of(asking, row) for row in self.rows.values()}:
            evicted |= self._evicted_of(task, asking, unit, leased)
        return evicted

    def may_evict(self, task, asking, row):
        return row.state == "live" and self.is_open(task, row) and self.is_excluded(asking, row)

    def _evicted_of(self, task, asking, unit, leased):
        kind = unit[0]
        members = self.members(asking, unit)
        there = [row for row in members if row is not None and row.state != "cleared"]
        open_rows = [row for row in there if row.state != "failed"]
        if not self.is_complete(asking, unit, no_more=self.sealed):
            return set()
        if any(row.state == "held" or row.index in task.consumed | leased for row in open_rows):
            return set()
        excluded = {row.index for row in there if self.may_evict(task, asking, row)}
        left = [row for row in members if not self.is_lost(task, row)]
        if asking.take:
            left = [row for row in left if row.index not in excluded]
        left_count = self.count_units(task, asking, left)
        least = 0 if kind == "row" else asking.least_members
        if not excluded and not least:
            return set()
        goes_whole = left_count < max(least, bool(excluded)) if asking.take else excluded or left_count < least
        if not goes_whole:
            return excluded if asking.take else set()
        return {row.index for row in (there if asking.unmatched == "clear" else open_rows)} if open_rows else set()

    def count_units(self, task, asking, rows):
        """Return of how many units within their group some rows are, those that a rollout has lost with it left out."""
        if asking.unit == "rollout":
            return len(rows)
        lost = {
            name
            for name, rollout in self.rollouts.items()
            if not asking.take and any(self.is_lost(task, row) for row in rollout.members)
        }
        return len({row.rollout or row.index for row in rows if row.rollout not in lost})

    # What a task is to get

    def is_closed(self, asking):
        return self.sealed or (
            asking.finite and self.inserted > 0 and self.inserted % (self.samples_per_round or 1) == 0
        )

    def pending(self, task, asking):
        """Return the rows that may still become ready, given that no new rows come."""
        return [
            row
            for row in self.rows.values()
            if self.is_open(task, row)
            and not self.is_ready(task, asking, row)
            and not self.is_dead(task, asking, row)
            and not self.is_excluded(asking, row)
        ]

    def answer(self, task, asking):
        """Return the units of the next batch, an End, or None for not yet."""
        taken = self.take(task, asking, asking.least, no_more=self.sealed)
        if taken is None and self.is_closed(asking) and not self.pending(task, asking) and not task.leased:
            least = asking.total if asking.drop_last else 1
            taken = self.take(task, asking, least, no_more=True)
            return taken or self.end(task, asking)
        return taken

    def end(self, task, asking):
        """Return what became of each sample, of which none can be given any more."""
        whole = {row.index for unit in self.ready_units(task, asking, no_more=True) for row in unit}
        counts = Counter(consumed_count=task.consumed_count, dead_lettered_count=task.dead_lettered_count)
        for row in self.rows.values():
            if row.index in task.consumed | task.dead_lettered:
                continue
            if row.state == "failed":
                counts["failed_count"] += 1
            elif self.is_excluded(asking, row):
                counts["excluded_count"] += 1
            else:
                counts["left_over_count" if row.index in whole else "in_incomplete_groups_count"] += 1
        counts["cleared_count"] = self.inserted - counts.total()
        return End(dict(+counts))

    def take(self, task, asking, least, *, no_more):
        self.check_blocks(asking)
        units = self.ready_units(task, asking, no_more=no_more)
        taken, size = [], 0
        for unit in units:
            cost = len(unit) if asking.unit == "sample" else 1
            if size + cost > asking.total:
                if not taken:
                    raise RefusedError("the group is larger than the batch")
                return taken
            taken.append(unit)
            size += cost
        return taken if size >= max(least, 1) else None

    def check_blocks(self, asking):
        if not asking.grouped or not asking.block_size or asking.anywhere or self.had_groups:
            return
        if asking.unit == "rollout":
            return
        if self.insert_size_gcd % asking.block_size:
            raise BlocksError

    # Claims

    def consume(self, task, indexes):
        assert len(set(indexes)) == len(indexes)
        assert not task.consumed & set(indexes)
        task.consumed |= set(indexes)
        task.consumed_count += len(indexes)

    def consumed_by(self, task, asking, rows, wanted):
        """Return what a plan consumes: None where that is what it delivers, and nothing twice."""
        counts = Counter(rows)
        spent = {row for row in counts if asking.max_uses > 1 and task.uses[row] + counts[row] >= asking.max_uses}
        if wanted is None:
            wanted = set(rows) if asking.max_uses == 1 else set()
        consumed = wanted | spent
        return None if consumed == set(rows) and len(rows) == len(consumed) else consumed

    def batch(self, task, parts, consumed):
        """Hand out a batch to ranks."""
        rows = [row for part in parts for row in part]
        task.batches.append(parts)
        self.consume(task, rows if consumed is None else consumed)
        if consumed is not None:
            task.uses.update(rows)
            task.reused_batches.add(len(task.batches) - 1)
            self._keep_reusing(task, len(task.batches) - 1)

    def _keep_reusing(self, task, record):
        task.reusing.append(record)
        while len(task.reusing) > self.most_reusing:
            oldest = task.reusing.pop(0)
            if isinstance(oldest, int):
                task.forgotten = oldest
            else:
                self._lose_name(task, oldest, "forgotten")
                del task.claims[oldest]

    def _keep_if_reusing(self, task, request_id):
        """A claim whose rows others may have is kept as long as there are few, once it leases none."""
        claim = task.claims.get(request_id)
        if claim and claim.consumed is not None and not claim.left and request_id not in task.reusing:
            self._keep_reusing(task, request_id)

    def claim(self, task, asking, request_id, rows, now, *, name="", consumed=None):
        """Hand out rows to a queue worker."""
        if name:
            assert name not in task.names | task.past_names, "a name stands for two answers"
            task.names[name] = request_id
        taken = set(rows) if consumed is None or asking.lease else set()
        self.consume(task, taken | (consumed or set()))
        claim = task.claims[request_id] = Claim(rows, asking, taken | (consumed or set()), consumed=consumed)
        if consumed is not None and not asking.lease:
            task.uses.update(rows)
            self._keep_reusing(task, request_id)
        if self.takes_runs(asking):
            claim.runs = self.units_among(asking, [self.rows[row] for row in rows])
        task.rows_of_claims[request_id] = rows
        if asking.lease:
            assert not set(rows) & (task.acked | task.dead_lettered), (
                "handed out although it was done, or dead-lettered"
            )
            claim.left, claim.deadline = set(rows), now + asking.lease
            for row in set(rows):
                task.deliveries[row] = task.deliveries.get(row, 0) + 1

    def release(self, task, request_id, rows=None):
        claim = task.claims[request_id]
        self._lose_name(task, request_id, "released")
        if not claim.asking.lease:
            self._drop(task, request_id)
            taken = set(claim.rows) if claim.consumed is None else claim.consumed
            task.consumed -= taken
            task.consumed_count -= len(taken)
            if claim.consumed is not None:
                task.uses.subtract([row for row in claim.rows if row in self.rows])
            return
        back = claim.left if rows is None else claim.left & set(rows)
        for row in back:
            task.deliveries[row] -= 1
        self._lose(task, claim, back)

    def _lose(self, task, claim, back):
        task.consumed -= back
        task.consumed_count -= len(back)
        claim.held -= back
        claim.left = claim.left - back
        self._drop_empty_claims(task)
        for request_id in [key for key, known in task.claims.items() if known is claim]:
            self._keep_if_reusing(task, request_id)

    def _drop_empty_claims(self, task):
        """A record goes with the last of its rows, unless others may have them too."""
        for request_id, claim in list(task.claims.items()):
            goes_with_rows = claim.consumed is None or claim.asking.lease
            if goes_with_rows and not claim.returned and not claim.held & self.rows.keys():
                self._lose_name(task, request_id, "cleared")
                self._drop(task, request_id)

    def _drop(self, task, request_id):
        del task.claims[request_id]
        if request_id in task.reusing:
            task.reusing.remove(request_id)

    def _lose_name(self, task, request_id, loss):
        for name in [name for name, known in task.names.items() if known == request_id]:
            del task.names[name]
            task.past_names[name] = loss

    def expire(self, task, request_id):
        claim = task.claims[request_id]
        self._lose_name(task, request_id, "expired")
        left, most = set(claim.left), claim.asking.max_deliveries
        self._lose(task, claim, left)
        aside = {row for row in left if most is not None and task.deliveries[row] >= most}
        task.dead_lettered |= aside
        task.dead_lettered_count += len(aside)
        task.expired.add(request_id)

    def parts_a_group(self, claim, rows):
        """Whether some rows of what is left of a claim are a part of a group only."""
        rest = claim.left - rows
        if claim.runs:
            return bool({claim.runs[row] for row in rows} & {claim.runs[row] for row in rest})
        units = [{self.unit_of(claim.asking, self.rows[row]) for row in some} for some in (rows, rest)]
        return bool(units[0] & units[1])

    def lease_error(self, task, request_id, rows):
        """Return the name of the error of a worker that names these rows of its claim, None without one."""
        claim = task.claims.get(request_id)
        there = set(rows) & self.rows.keys()
        if claim is None:
            return "LeaseExpiredError" if there or request_id in task.expired else None
        if not claim.asking.lease:
            return "PreconditionError"
        return "LeaseExpiredError" if there - claim.held - claim.returned else None

    def ack_error(self, task, request_id, rows):
        """Return the name of the error of a worker that acknowledges these rows, None without one."""
        error, claim = self.lease_error(task, request_id, rows), task.claims.get(request_id)
        if error is None and claim is not None and self.parts_a_group(claim, set(rows) & claim.left):
            return "InvalidArgumentError"
        return error

    def ack(self, task, request_id, rows):
        """Return how many are acknowledged, or the name of the error."""
        if error := self.ack_error(task, request_id, rows):
            return error
        claim = task.claims.get(request_id)
        if claim is None:
            return 0
        chosen = set(rows) & self.rows.keys() & claim.left
        returned = chosen - claim.consumed if claim.consumed is not None else set()
        task.acked |= chosen - returned
        claim.returned |= returned
        if claim.consumed is not None:
            task.uses.update(row for row in claim.rows if row in chosen)
        for row in returned:
            task.deliveries[row] = 0
        claim.left = claim.left - chosen
        if returned:
            self._lose(task, claim, returned)
        elif chosen:
            self._keep_if_reusing(task, request_id)
        return len(chosen)
