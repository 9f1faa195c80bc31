"""Drives a real partition and its model side by side, and compares them after every step."""

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import ClassVar

import numpy as np
from digest import digest, keys_of
from domain_support import (
    BOOT,
    DrawingSampler,
    SlowSampler,
    asks,
    dense,
    is_at_rest,
    meta,
    new_id,
    new_write,
    set_meta,
    task_of,
    turns,
    write_to,
)
from model import BlocksError, Model, RefusedError, Rows
from model import End as ModelEnd

from tq_service.errors import (
    BatchForgottenError,
    ClaimReleasedError,
    InvalidArgumentError,
    LeaseExpiredError,
    PartitionClearedError,
    RankDisagreementError,
    SamplesClearedError,
    StaleEpochError,
    TqError,
)
from tq_service.machine.evictions import UnitsEvicted
from tq_service.machine.group_cells import GroupsRemoved, GroupsWritten
from tq_service.machine.samples import SamplesTruncated
from tq_service.samplers import (
    GRPOGroupNSampler,
    PlanRunner,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from tq_service.schema import WHOLE_EXTENT, EndCounts, FieldSpec, Layout
from tq_service.serving import planner
from tq_service.serving.catalog import Catalog
from tq_service.serving.status import consumption_of
from tq_service.state import ledger
from tq_service.state.cells import ColumnWrite, Put
from tq_service.state.ledger import Claim
from tq_service.state.partition import PartitionSettings
from tq_service.state.plan import Condition, LeasedClaim, LeaseTerms, Order, RankPlan
from tq_service.state.table import DEAD_LETTERED, STATE_NAMES, UNCLAIMED

NAME = "train"
FOREVER = 1e6
SIZES = [0, 2, 2, 3, 5]
MOMENT = 5.0  # seconds; those of the model are multiples of 10, and a run is shorter than this


def sampler_of(asking):
    options = {
        "n_samples_per_prompt": asking.block_size,
        "incomplete_groups": "take" if asking.take else "skip",
        "blocks": "anywhere" if asking.anywhere else "aligned",
    }
    match asking.sampler:
        case "sequential":
            sampler = SequentialSampler()
        case "drawing":
            sampler = DrawingSampler()
        case "rank_aware":
            sampler = RankAwareSampler(**options)
        case "grpo_group_n":
            sampler = GRPOGroupNSampler(**options)
        case _:
            sampler = SeqlenBalancedSampler(**options, length_key="total_lengths")
    return SlowSampler(sampler, turns=4, turns_before=4) if asking.slow else sampler


def column_of(name, rows):
    """Return rows of a field as a column of a put."""
    shapes = np.array(rows.shapes, np.int64)
    differs = (shapes != shapes[0]).any(axis=0)
    if not differs.any():
        if not rows.jagged:
            return dense(name, *rows.shapes[0], dtype=rows.dtype)
        differs[-1] = True
    shape = tuple(np.where(differs, -1, shapes[0]).tolist())
    spec = FieldSpec(name, dtype=rows.dtype, layout=Layout.JAGGED, row_shape=shape)
    return ColumnWrite(spec=spec, extents=shapes[:, differs])


def jagged_column(name, rows):
    """Return rows of a field as a column of an append."""
    spec = FieldSpec(name, dtype=rows.dtype, layout=Layout.JAGGED, row_shape=(-1, *rows.shapes[0][1:]))
    return ColumnWrite(spec=spec, extents=np.array(rows.shapes, np.int64)[:, :1])


class Call:
    """One GetMeta call and what became of it."""

    def __init__(self, driver, task, asking, *, rank, request_id, epoch, max_wait, name=""):
        self.driver, self.task, self.asking, self.rank, self.request_id = driver, task, asking, rank, request_id
        self.epoch, self.name = epoch, name
        self.life = driver.life
        self.may_disagree = False
        self.answer_epoch = None
        self.answer = None
        self.error = None
        self.fault = None  # in what it was told when there was nothing for it
        self.is_judged = False
        where = () if asking.least_version is None else (Condition("version", ">=", (asking.least_version,)),)
        self.request = asks(
            rank,
            task=task,
            sampler=driver.sampler(asking),
            sampler_config=repr((asking.sampler, asking.block_size, asking.take, asking.anywhere, asking.slow)),
            least=asking.min_size if rank is None else None,
            request_id=request_id,
            epoch=epoch,
            name=name,
            batch_size=asking.batch_size,
            batch_unit=asking.unit,
            micro_batch_size=asking.micro_batch_size,
            where=where,
            order_by=(Order("version", descending=True),) if asking.newest_first else (),
            data_fields=asking.fields,
            drop_last=asking.drop_last,
            max_uses=asking.max_uses,
            unmatched=asking.unmatched,
            least_members=asking.least_members,
            finite=asking.finite,
            lease=None
            if asking.lease is None
            else LeaseTerms(seconds=asking.lease, max_deliveries=asking.max_deliveries),
        )
        JudgedWaiter.calls.setdefault(request_id, []).append(self)
        self.future = asyncio.ensure_future(self._run(max_wait))

    async def _run(self, max_wait):
        driver, asked_epoch = self.driver, self.driver.model.task(self.task).epoch
        try:
            claimed = await driver.catalog.claim(NAME, b"", self.request, max_wait)
        except TqError as error:
            self.error = error
            self.error_epoch = driver.model.task(self.task).epoch
            self.loss = driver.model.task(self.task).past_names.get(self.name)
            return
        self.answer = claimed.answer
        self.answer_epoch = driver.model.task(self.task).epoch
        if isinstance(self.answer, Claim):
            driver.receivers[driver.life, self.task, self.request_id] += 1
        elif isinstance(self.answer, RankPlan):
            assert self.rank is not None
        elif isinstance(self.answer, EndCounts):
            if self.name:
                assert self.answer in driver.named_answers[self.life, self.task, self.name]
            elif self.rank is None:
                self.judge(self.answer)
            else:  # a reset may have come between the end and its arrival here
                ends = driver.ends[self.life, self.task].items()
                assert self.answer in [end for epoch, end in ends if epoch >= asked_epoch]
        elif claimed.partition is not None:
            self.judge(self.answer)
        if self.fault is not None:
            raise self.fault

    def judge(self, answer):
        """Compare an end, or nothing yet, with the model, in the moment in which it is found."""
        if self.is_judged:
            return
        self.is_judged = True
        try:
            if isinstance(answer, EndCounts):
                self.driver.check_end(self.task, self.asking, answer)
            elif not self.asking.slow:
                self.driver.check_nothing_to_give(self.task, self.asking)
        except AssertionError as wrong:
            self.fault = wrong


class JudgedWaiter(planner.Waiter):
    """Has a call judge an end, or nothing yet, when that is found: its caller goes on after the driver's next change.

    The fixture `judged_waiters` puts it in the place of its base.
    """

    __slots__ = ()
    calls: ClassVar = {}  # request_id -> the calls

    def end(self, result):
        for call in self.calls.get(self.request.request_id, ()) if self.is_waiting else ():
            is_own_end = isinstance(result, EndCounts) and call.rank is None and not call.name
            if is_own_end or isinstance(result, planner.NotYet):
                call.judge(result)
        super().end(result)


class Driver:
    """Owns the catalog, the model, and the calls under way."""

    def __init__(self, tasks, expected, *, is_declared=False, samples_per_round=None, write_once=(), shared=()):
        self.tasks = tasks  # name -> the ways in which it asks
        self.expected = expected
        self.is_declared = is_declared
        self.samples_per_round = samples_per_round
        self.write_once = write_once  # fields
        self.shared = shared  # fields of groups
        self.catalog = Catalog(PlanRunner(timeout_seconds=FOREVER))
        self.rng = random.Random(0)
        self.samplers = {}
        self.calls = []
        self.receivers = Counter()
        self.ends = defaultdict(dict)  # (life, task) -> epoch -> end
        self.named_answers = defaultdict(list)  # (life, task, claim_name) -> rows or ends, one in each epoch
        self.asked_by = {}
        self.life = 0
        JudgedWaiter.calls.clear()
        self.model = self.partition = None
        self.skipped_seconds = 0.0
        self._commit = self.catalog.machine.commit
        self.catalog.machine.commit = self._watched_commit
        self._real_time = asyncio.get_running_loop().time
        asyncio.get_running_loop().time = self.now
        self.open_life()

    def now(self):
        """Return the time of the event loop: real time goes on, and `pass_time` skips some."""
        return self._real_time() + self.skipped_seconds

    async def pass_time(self, seconds):
        """Let much time pass, and what is due happen."""
        self.skipped_seconds += seconds
        await turns(3)

    def open_life(self):
        self.life += 1
        self.model = Model(self.expected, self.samples_per_round, self.write_once, self.shared)
        self.model.most_reusing = ledger._MOST_REUSING
        settings = PartitionSettings(
            expected_samples=self.expected,
            tasks=tuple(self.tasks) if self.is_declared else (),
            samples_per_round=self.samples_per_round,
            fields=tuple(map(self._declared, {*self.write_once, *self.shared})),
        )
        self.partition = self.catalog.create(NAME, settings)
        partition, open_task = self.partition, self.partition.open_task

        def open_watched(name):
            """Watch a task from its beginning, also one that was forgotten and asks again."""
            self._watch(opened := open_task(name), name, partition)
            return opened

        for name, task in partition.tasks.items():  # those that were declared
            self._watch(task, name, partition)
        partition.open_task = open_watched
        for name in self.tasks:
            self.model.task(name)
            task_of(self.catalog, name)

    def _declared(self, name):
        return FieldSpec(name, write_once=name in self.write_once, scope="group" if name in self.shared else "row")

    def _watch(self, task, name, partition):
        """Have the model look at every record in the moment it is made."""
        deliver, reach_end, reach_named_end = task.deliver, task.reach_end, task.reach_named_end
        nack, expire = task.nack, task.expire

        def end(dp_size, end):
            if partition is self.partition:
                self.model.task(name).end = end
                self.model.task(name).dp_size = dp_size
                self.ends[self.life, name][self.model.task(name).epoch] = end
                self.check_end(name, self.tasks[name][0], end)
            reach_end(dp_size, end)

        def named_end(claim_name, end):
            if partition is self.partition:
                self.on_named_end(name, claim_name, end)
            reach_named_end(claim_name, end)

        def delivered(plan, positions, *, request_id=b"", batch_spec=None, **terms):
            if partition is self.partition and not request_id:
                self.on_batch(name, batch_spec, plan)
            claim = deliver(plan, positions, request_id=request_id, batch_spec=batch_spec, **terms)
            if partition is self.partition and request_id:
                self.on_queue_claim(name, claim)
            return claim

        def released(claim, positions):
            if partition is self.partition and claim.request_id:
                rows = partition.table.index[positions].tolist()
                self.model.release(self.model.task(name), claim.request_id, None if claim.lease is None else rows)
            nack(claim, positions)

        def expired(claim, positions, at_seconds):
            if partition is self.partition:
                model = self.model.task(name)
                assert self.now() > model.claims[claim.request_id].deadline - MOMENT, "before its time"
                assert set(partition.table.index[positions].tolist()) == model.claims[claim.request_id].left
                self.model.expire(model, claim.request_id)
            return expire(claim, positions, at_seconds)

        task.deliver, task.reach_end, task.reach_named_end = delivered, end, named_end
        task.nack, task.expire = released, expired

    def sampler(self, asking):
        return self.samplers.setdefault(asking, sampler_of(asking))

    # Writing to both

    def columns(self, fields, count, *, conforming):
        """Return rows of some fields for a write: mostly such as the field takes, and always where asked for."""
        return {name: self._rows(self.model.fields.get(name), count, conforming=conforming) for name in fields}

    def _rows(self, known, count, *, conforming):
        rng = self.rng
        if known is not None and (conforming or rng.random() < 0.9):
            dtype, fixed, dim_count = known.dtype, known.shape, len(known.shape)
        else:
            dtype, dim_count = rng.choice(["float32", "int64"]), rng.choice([1, 1, 2])
            fixed = tuple(rng.choice(SIZES) for _ in range(dim_count))
        if rng.random() < 0.6:  # as the rows before
            shapes = [tuple(size if size >= 0 else rng.choice(SIZES) for size in fixed) for _ in range(count)]
        else:
            first, *others = (rng.choice(SIZES) for _ in range(dim_count))
            shapes = [(first, *others)] * count
            if rng.random() < 0.5:
                shapes = [(*shape[:-1], rng.choice(SIZES)) for shape in shapes]
        return Rows(dtype, shapes, rng.random() < 0.1)

    def write(self, count, *, columns, meta_entries=None, **arguments):
        """Write to the partition; return whether it was accepted."""
        fields = [column_of(name, rows) for name, rows in columns.items()]
        samples = new_write(count, fields, meta=meta_entries, **arguments)
        try:
            write_to(self.catalog, samples)
        except TqError:
            return False
        return True

    def insert(self, count, *, fields=(), **arguments):
        arguments["columns"] = self.columns(fields, count, conforming=False)
        model_arguments = dict(arguments)
        model_arguments["meta"] = model_arguments.pop("meta_entries", None)
        try:
            self.model.insert(count, **model_arguments)
            accepted = True
        except RefusedError:
            accepted = False
        for name in ("groups", "rollouts"):
            names = arguments.get(name)
            arguments[name] = [each or "" for each in names] if names else None
        assert self.write(count, **arguments) == accepted

    def update(self, indexes, *, by_key=False, fields=(), conforming=False, **arguments):
        keys = [self.model.rows[index].key for index in indexes]
        columns = self.columns(fields, len(indexes), conforming=conforming)
        try:
            self.model.update(
                indexes, state=arguments.get("state"), columns=columns, meta=arguments.get("meta_entries")
            )
            accepted = True
        except RefusedError:
            accepted = False
        named = {"keys": keys, "key_mode": "existing"} if by_key and all(keys) else {"indexes": indexes}
        assert self.write(len(indexes), columns=columns, **named, **arguments) == accepted

    def put_groups(self, names, fields, *, must_exist, conforming=False):
        """Put what samples of groups share, maybe of groups that are still to come, or of a sealed partition."""
        columns, before = self.columns(fields, len(names), conforming=conforming), digest(self.partition)
        expected = self.model.put_groups(names, columns, must_exist=must_exist)
        change = GroupsWritten(
            partition_id=NAME,
            names=names,
            put=Put("s0", BOOT, new_id()),
            columns=[column_of(name, rows) for name, rows in columns.items()],
            must_exist=must_exist,
        )
        self._expect(expected, before, lambda: self.catalog.commit(change))

    def remove_groups(self, names):
        """Remove groups that have no samples yet."""
        removed = self.catalog.commit(GroupsRemoved(partition_id=NAME, names=names))
        assert (removed or 0) == self.model.remove_groups(names)

    def put_leased(self, name, request_id, rows, *, acks, fields=(), state=None):
        """Write to samples of a claim, maybe acknowledge them in the same change, maybe too late."""
        columns, before = self.columns(fields, len(rows), conforming=False), digest(self.partition)
        claim = {"acks" if acks else "claim": LeasedClaim(task_name=name, request_id=request_id)}
        specs = [column_of(field, given) for field, given in columns.items()]
        try:
            expected = self.model.put_leased(
                self.model.task(name), request_id, rows, acks=acks, state=state, columns=columns
            )
        except RefusedError:
            expected = "FieldMismatchError AlreadyExistsError PreconditionError"
        try:
            write_to(self.catalog, new_write(len(rows), specs, indexes=rows, state=state, **claim))
        except TqError as error:
            assert type(error).__name__ in (expected or "").split()
            assert digest(self.partition) == before
        else:
            assert expected is None

    def append(self, name, request_id, rows, fields):
        """Add to the cells of samples of a claim, maybe where they do not end, or too late."""
        rng, model = self.rng, self.model
        columns = {field: self._added(model.fields.get(field), len(rows)) for field in fields}
        at = [model.rows[row].cells.get(fields[0], (0,))[0] + (rng.random() < 0.05) for row in rows]
        before = digest(self.partition)
        expected = model.append(model.task(name), request_id, rows, columns, at)
        specs = [jagged_column(field, given) for field, given in columns.items()]
        claim = LeasedClaim(task_name=name, request_id=request_id)
        write = new_write(len(rows), specs, indexes=rows, claim=claim, append_at=np.array(at, np.int64))
        self._expect(expected, before, lambda: write_to(self.catalog, write))

    def _added(self, known, count):
        rng = self.rng
        is_known = known is not None and rng.random() < 0.9
        rest = [max(0, size) for size in known.shape[1:]] if is_known else [2] * rng.choice([0, 0, 1])
        dtype = known.dtype if is_known else rng.choice(["float32", "int64"])
        return Rows(dtype, [(rng.choice(SIZES), *rest) for _ in range(count)], jagged=True)

    def truncate(self, name, request_id, rows, fields):
        """Cut the cells of samples of a claim, maybe to more than they have, or too late."""
        rng, model = self.rng, self.model
        most = [model.rows[row].cells.get(fields[0], (0,))[0] for row in rows]
        lengths = [rng.choice([0, size, size // 2, max(0, size - 1), size + (rng.random() < 0.1)]) for size in most]
        before = digest(self.partition)
        expected = model.truncate(model.task(name), request_id, rows, fields, lengths)
        change = SamplesTruncated(
            partition_id=NAME,
            global_indexes=np.array(rows, np.int64),
            lengths=np.array(lengths, np.int64),
            field_names=list(fields),
            claim=LeasedClaim(task_name=name, request_id=request_id),
        )
        self._expect(expected, before, lambda: self.catalog.commit(change))

    def _expect(self, errors, before, change):
        try:
            change()
        except TqError as error:
            assert type(error).__name__ in (errors or "").split(), (error, errors)
            assert digest(self.partition) == before
        else:
            assert errors is None

    def set_meta(self, indexes, entries):
        self.model.update(indexes, meta=entries)
        set_meta(self.catalog, np.array(indexes, np.int64), meta(entries))

    # Records, as they are made

    def _watched_commit(self, change, prepared=None):
        if isinstance(change, UnitsEvicted):
            self.on_evicted(change)
        return self._commit(change, prepared)

    def on_evicted(self, change):
        """Compare what a claim evicts with the model: all that it is to evict, of a slow one what it has seen."""
        model, rows = self.model, change.evicted.rows.tolist()
        task = model.task(change.task_name)
        ways = [asking for asking in self.tasks[change.task_name] if asking.unmatched == change.action]
        expected = [model.evictable(task, asking) for asking in ways]
        assert rows
        assert any(
            set(rows) == each or (way.slow and set(rows) <= each) for way, each in zip(ways, expected, strict=True)
        )
        if change.action == "clear":
            model.clear(rows)
        else:
            model.update(rows, state="failed")

    def on_batch(self, name, batch_spec, plan):
        task, asking = self.model.task(name), self.tasks[name][0]
        assert len(plan.sizes) == asking.dp_size
        assert task.end is None
        given = [plan.part(dp_rank) for dp_rank in range(asking.dp_size)]
        parts = [part.rows.tolist() for part in given]
        assert plan.rows.tolist() == [row for part in parts for row in part]
        self._check_packs(asking, given)
        rows = [row for part in parts for row in part]
        self._check_taken(task, asking, rows)
        self._check_shares(asking, parts)
        self.model.batch(task, parts, self._consumed_by(task, asking, plan))
        task.dp_size = asking.dp_size

    def _consumed_by(self, task, asking, plan):
        """Return what a plan consumes, None where that is what it delivers; a sampler that draws decides itself."""
        recorded = None if plan.consumed is None else set(plan.consumed.tolist())
        wanted = None
        if asking.sampler == "drawing":
            wanted = set(plan.rows.tolist()) if recorded is None else recorded
        consumed = self.model.consumed_by(task, asking, plan.rows.tolist(), wanted)
        assert recorded == consumed
        assert all(row in self.model.rows and row not in task.consumed for row in consumed or ())
        return consumed

    def on_queue_claim(self, name, claim):
        task, request_id, lease = self.model.task(name), claim.request_id, claim.lease
        rows = claim.rows.tolist()
        self._check_packs(self.asked_by[request_id], [claim.plan.part()])
        assert request_id not in task.claims
        assert request_id not in task.released | task.expired
        asking = self.asked_by[request_id]
        if len(self.tasks[name]) == 1:
            self._check_taken(task, asking, rows)
        consumed = self._consumed_by(task, asking, claim.plan)
        self.model.claim(task, asking, request_id, rows, self.now(), name=claim.name, consumed=consumed)
        if claim.name:
            self.named_answers[self.life, name, claim.name].append(rows)
        assert (lease is not None) == (asking.lease is not None)
        if lease is not None:
            assert claim.delivery_counts.tolist() == [task.deliveries[row] for row in rows]
            kept = ledger.KEPT_ROLLOUTS if asking.unit == "rollout" else asking.block_size or 0
            assert lease.group_block_size == (kept if asking.grouped else None)
            assert (lease.blocks == "anywhere") == self.model.takes_runs(asking)

    def on_named_end(self, name, claim_name, end):
        task = self.model.task(name)
        assert claim_name not in task.names | task.past_names
        if len(self.tasks[name]) == 1:
            self.check_end(name, self.tasks[name][0], end)
        task.past_names[claim_name] = end
        self.named_answers[self.life, name, claim_name].append(end)

    def _check_packs(self, asking, parts):
        shapes = {tuple(len(step) for step in part.steps) for part in parts}
        assert len(shapes) == 1
        assert len(next(iter(shapes))) == 1
        for part in parts:
            positions = [int(position) for step in part.steps for pack in step for position in pack.positions]
            assert positions == list(range(part.rows.size))
            size = asking.micro_batch_size or max(1, part.rows.size)
            assert all(pack.positions.size <= size for step in part.steps for pack in step)

    def _check_taken(self, task, asking, taken):
        rows = [self.model.rows[index] for index in taken]
        if asking.sampler == "drawing" and not asking.slow:
            assert all(self.model.is_ready(task, asking, row) for row in rows)
            assert len(rows) == asking.total
            assert not isinstance(self.model.answer(task, asking), ModelEnd | None)
            return
        if asking.slow:
            # Planned a while ago: still to be had, and whole by what is known now.
            assert all(row.state == "live" and row.fields >= set(asking.fields) for row in rows)
            assert not task.consumed & set(taken)
            self._check_units_are_whole(asking, rows)
            return
        expected = self.model.answer(task, asking)
        assert not isinstance(expected, ModelEnd)
        assert expected is not None
        assert sorted(taken) == sorted(row.index for unit in expected for row in unit)

    def _check_units_are_whole(self, asking, rows):
        if not asking.grouped:
            return
        units = Counter(self.model.units_among(asking, rows).values())
        for unit, count in units.items():
            if self.model.takes_runs(asking):
                assert (unit[0], count) == ("run", asking.block_size)
                continue
            if unit[0] == "group" and not self.model.groups[unit[1]].declared:
                continue  # may have got members since
            members = self.model.members(asking, unit)
            left = [row for row in members if row is not None and row.state not in ("failed", "cleared")]
            assert asking.take or len(left) == len(members)
            assert {row.index for row in left} <= {row.index for row in rows}

    def _check_shares(self, asking, parts):
        if not asking.grouped:
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            assert asking.slow or max(sizes) <= asking.batch_size
            return
        unit_of = self.model.units_among(asking, [self.model.rows[index] for part in parts for index in part])
        units = [{unit_of[index] for index in part} for part in parts]
        for number, unit in enumerate(units):
            for other in units[number + 1 :]:
                assert not unit & other  # a group is with one rank
        if asking.sampler == "seqlen_balanced" or asking.unit != "sample":
            counts = [len(unit) for unit in units]
            assert max(counts) - min(counts) <= 1

    def check_end(self, name, asking, end):
        """Check an end in the moment it is recorded, or given to a queue worker."""
        task = self.model.task(name)
        try:
            answer, is_only_way = self.model.answer(task, asking), len(self.tasks[name]) == 1
        except BlocksError:  # would be refused if its sampler looked again, which it need not at an end
            return
        if is_only_way or not task.leased:  # else the other way may have leased since what is nothing for this one
            assert isinstance(answer, ModelEnd)
        if is_only_way:  # else the other way may have consumed since
            counts = asdict(end)
            assert counts.pop("kept_count") == task.kept_count
            assert answer.counts == {name: count for name, count in counts.items() if count}

    def check_nothing_to_give(self, name, asking):
        task = self.model.task(name)
        with suppress(BlocksError):
            assert self.model.answer(task, asking) is None

    # Calls

    def ask(self, name, asking, rank=None, *, request_id=None, epoch=None, max_wait=FOREVER, claim_name=""):
        request_id = request_id or new_id()
        self.asked_by.setdefault(request_id, asking)
        call = Call(
            self, name, asking, rank=rank, request_id=request_id, epoch=epoch, max_wait=max_wait, name=claim_name
        )
        self.calls.append(call)
        return call

    async def settle(self):
        """Let the loop turn until no planner works and every answer has arrived."""
        quiet = 0
        for _ in range(5000):
            await asyncio.sleep(0)
            serving = self.catalog._serving.get(self.partition)
            planners = () if serving is None else serving.planners.values()
            quiet = quiet + 1 if all(map(is_at_rest, planners)) else 0
            if quiet > 6:
                return
        raise AssertionError("the planners do not come to rest")

    async def check(self):
        """Compare everything, with the loop at rest."""
        await self.settle()
        waiting = []
        for call in self.calls:
            if not call.future.done():
                self._check_waits_rightly(call)
                waiting.append(call)
            elif not call.future.cancelled():
                call.future.result()
                self._check_error(call)
                self._check_replay(call)
        self.calls = waiting
        self._check_rows()
        for name in self.tasks:
            self._check_task(name)

    def _check_waits_rightly(self, call):
        task = self.model.task(call.task)
        if call.rank is not None:
            assert task.end is None
            assert call.rank[2] >= len(task.batches)
            assert call.rank[1] == task.dp_size or task.dp_size is None
        assert call.epoch in (None, task.epoch)
        assert call.name not in task.names | task.past_names
        with suppress(BlocksError):  # is refused when its sampler looks again, which need not be yet
            assert self.model.answer(task, call.asking) is None
            assert not self.model.evictable(task, call.asking)

    def _check_replay(self, call):
        """A rank is told what is recorded; a record may have changed its epoch since. As is a call for a name."""
        if call.name and isinstance(call.answer, Claim):
            assert call.answer.rows.tolist() in self.named_answers[call.life, call.task, call.name]
            task = self.model.task(call.task)
            if call.life == self.life and call.name in task.names and call.answer_epoch == task.epoch:
                assert call.answer.request_id == task.names[call.name]
        if call.rank is None or not isinstance(call.answer, RankPlan):
            return
        task = self.model.task(call.task)
        dp_rank, _, batch_index = call.rank
        if call.life == self.life and call.answer_epoch == task.epoch:
            assert call.answer.rows.tolist() == task.batches[batch_index][dp_rank]

    def _check_error(self, call):
        error = call.error
        if error is None:
            assert call.answer is not None
            return
        task = self.model.task(call.task)
        if call.life != self.life:
            assert isinstance(error, PartitionClearedError | InvalidArgumentError | RankDisagreementError)
        elif isinstance(error, StaleEpochError):
            assert call.epoch is not None
            assert call.epoch != task.epoch
        elif isinstance(error, RankDisagreementError):
            assert call.may_disagree
        elif isinstance(error, BatchForgottenError):
            assert call.loss == "forgotten" or call.rank[2] <= task.forgotten or call.error_epoch != task.epoch
        elif isinstance(error, ClaimReleasedError):
            assert call.request_id in task.released or call.loss == "released"
        elif isinstance(error, LeaseExpiredError):
            is_gone = call.request_id not in task.claims  # after a reset, before the answer was sent
            assert call.request_id in task.expired or call.loss == "expired" or is_gone
        elif isinstance(error, SamplesClearedError) and call.name:
            known = self.named_answers[call.life, call.task, call.name]
            assert any(row not in self.model.rows for rows in known if isinstance(rows, list) for row in rows)
        elif isinstance(error, SamplesClearedError) and call.error_epoch == task.epoch:
            parts = task.batches[call.rank[2]] if call.rank else [task.rows_of_claims.get(call.request_id, [-1])]
            rows = [row for part in parts for row in part]
            assert any(row not in self.model.rows for row in rows)
        elif not isinstance(error, SamplesClearedError):
            assert isinstance(error, InvalidArgumentError), error
            assert call.asking.grouped
            assert any(reason in str(error) for reason in ("groups are not split", "samples were put in multiples")), (
                error
            )

    def _check_rows(self):
        model, partition = self.model, self.partition
        table = partition.table
        assert table.present_count == len(model.rows)
        assert partition.inserted_count == model.inserted
        assert partition.insert_size_gcd == model.insert_size_gcd
        assert partition.sealed == model.sealed
        assert keys_of(partition) == {row.key: row.index for row in model.rows.values() if row.key}
        indexes = np.array(sorted(model.rows), np.int64)
        positions = table.find(indexes)
        rows = [model.rows[index] for index in indexes.tolist()]
        assert [STATE_NAMES[code] for code in partition.state.data[positions]] == [row.state for row in rows]
        assert partition.groups.names_of(positions) == [row.group for row in rows]
        assert partition.groups.rollout_names_of(positions) == [row.rollout for row in rows]
        states = Counter(row.state for row in rows)
        assert partition.state_counts == [states[name] for name in STATE_NAMES]
        assert partition.cells.fields.keys() == model.fields.keys() | model.write_once | model.shared
        for name, field in partition.cells.fields.items():
            assert field.spec.write_once == (name in model.write_once)
            if name not in model.fields:
                assert (field.spec, field.produced_count) == (self._declared(name), 0)
                continue
            produced = [name in row.fields for row in rows]
            assert (field.cells_of(positions) >= 0).tolist() == produced
            is_counted = [name in row.cells or (name in row.shared and row.state != "failed") for row in rows]
            assert field.row_count == sum(is_counted)
            known, spec = model.fields[name], field.spec
            layout = Layout.JAGGED if known.jagged else Layout.DENSE
            assert (spec.dtype, spec.layout, spec.row_shape) == (known.dtype, layout, known.shape)
            cells = [row.shared if name in model.shared else row.cells for row in rows]
            lengths = [known.length_of(each[name]) if name in each else -1 for each in cells]
            assert field.lengths(positions).tolist() == lengths
            self._check_extents(name, positions[produced], [length for length in lengths if length >= 0])
        self._check_shared()
        chains = [field.cells_of(positions) for field in partition.cells.fields.values()]
        chains = [partition.cells.extents.chains.resolve(cells).slots for cells in chains]
        assert partition.cells.extents.count - len(partition.cells.extents._free) == sum(
            np.count_nonzero(slots >= 0) for slots in chains
        )
        self._check_groups()

    def _check_shared(self):
        """Compare which groups have cells, and that the puts have no others than those of rows and groups."""
        groups, cells = self.partition.groups, self.partition.cells
        counted = sum(field.produced_count for field in cells.fields.values())
        if not cells.extents.count:
            assert cells.puts._cells.data.sum() == counted
        for name in self.shared:
            expected = {group for group, known in self.model.groups.items() if name in known.cells}
            slots = np.flatnonzero(cells.fields[name].cell[: groups.slots.count] >= 0)
            assert {groups.slots.occupants[slot] for slot in slots.tolist()} == expected
            assert cells.fields[name].produced_count == len(expected)

    def _check_extents(self, name, positions, lengths):
        """Compare where cells are with their lengths, and with what is not freed."""
        locate, cells_of = self.partition.cells.locate, self.partition.cells.fields[name].cells_of
        for runs in locate([name], positions) if positions.size else ():
            if runs.sample_counts:
                assert name in self.shared
                samples = np.cumsum([0, *runs.sample_counts])
                assert (samples[-1], samples.size - 1) == (positions.size, sum(runs.row_counts))
                cells = cells_of(positions)
                assert all(np.unique(cells[start:end]).size == 1 for start, end in pairwise(samples.tolist()))
                positions, lengths = positions[samples[:-1]], [lengths[start] for start in samples[:-1].tolist()]
            counts = runs.extent_counts or [1] * len(lengths)
            parts = runs.extent_lengths or [WHOLE_EXTENT] * len(lengths)
            assert (sum(counts), len(counts)) == (sum(runs.row_counts), len(lengths))
            bounds = np.cumsum([0, *counts]).tolist()
            for length, start, end in zip(lengths, bounds, bounds[1:], strict=False):
                assert parts[start:end] == [WHOLE_EXTENT] or sum(parts[start:end]) == length

    def _check_groups(self):
        groups = self.partition.groups
        assert set(groups.slot_of) == set(self.model.groups)
        for name, group in self.model.groups.items():
            (slot,) = groups.slots_of([name])
            states = Counter(row.state for row in group.members)
            counted = (groups.members[slot], groups.failed[slot], groups.cleared[slot])
            assert counted == (len(group.members), states["failed"], states["cleared"])
            assert (groups.declared[slot], groups.closed[slot]) == (group.declared, group.closed)
            assert groups.members[slot] - groups.continuing[slot] == group.size
            inside = [rollout for rollout in self.model.rollouts.values() if rollout.group == name]
            assert groups.open_rollouts[slot] == sum(not rollout.closed for rollout in inside)
        assert set(groups.rollout_slot_of) == set(self.model.rollouts)
        for name, rollout in self.model.rollouts.items():
            (slot,) = groups.slots_of([], [name])
            states = Counter(row.state for row in rollout.members)
            counted = (groups.members[slot], groups.failed[slot], groups.cleared[slot])
            assert counted == (len(rollout.members), states["failed"], states["cleared"])
            assert groups.closed[slot] == rollout.closed

    def _check_task(self, name):
        task = self.model.task(name)
        if name not in self.partition.tasks:  # forgotten after a refused call, as it had nothing on record
            assert not (task.batches or task.leased or task.consumed_count or task.epoch or task.end)
            return
        real = self.partition.tasks[name]
        size, inserted = self.samples_per_round, self.model.inserted
        is_whole = self.model.sealed or bool(size and inserted and inserted % size == 0)
        is_left = task.leased or real.backlog
        if task.end is None:
            is_complete = is_whole and not is_left
        else:  # of the rounds that had begun when it was reached
            is_complete = size is None or task.end.consumed_count + task.end.skipped_count == inserted
        assert consumption_of(self.partition, name).complete == is_complete
        assert real.epoch == task.epoch
        assert real.consumed_count == task.consumed_count
        open_count = sum(self.model.is_open(task, row) for row in self.model.rows.values())
        assert real.backlog + real.skipped_count == open_count
        is_pending = real.is_pending(slice(0, self.partition.table.count))
        assert (real.backlog, real.skipped_count) == (is_pending.sum(), real.skipped[: is_pending.size].sum())
        assert real.next_batch_index == len(task.batches)
        assert real.dp_size == task.dp_size
        assert real.end == task.end
        table = self.partition.table
        indexes, claims = table.index.data[: table.count], real.claim.data[: table.count]
        assert set(indexes[(claims != UNCLAIMED) & (claims != DEAD_LETTERED)].tolist()) == task.consumed
        assert set(indexes[claims == DEAD_LETTERED].tolist()) == task.dead_lettered
        assert set(indexes[claims < DEAD_LETTERED].tolist()) == task.leased
        assert real.leased_count == len(task.leased)
        assert real.dead_lettered_count == task.dead_lettered_count
        leased = {request_id: claim for request_id, claim in task.claims.items() if claim.left}
        assert {claim.request_id: claim.leased_count for claim in real.claims.values() if claim.leased_count} == {
            request_id: len(claim.left) for request_id, claim in leased.items()
        }
        assert all(claim.deadline > self.now() - MOMENT for claim in leased.values()), "a lease that does not run out"
        kept = {
            index: parts
            for index, parts in enumerate(task.batches)
            if index not in task.reused_batches
            if any(not part or any(row in self.model.rows for row in part) for part in parts)
        }
        with_rows = [parts for parts in kept.values() if any(row in self.model.rows for part in parts for row in part)]
        assert set(real.batches) == set(kept) | {index for index in task.reusing if isinstance(index, int)}
        assert list(real._reusing) == [
            (real.batches if isinstance(each, int) else real.claims)[each].serial for each in task.reusing
        ]
        assert real.last_forgotten == task.forgotten
        uses = real.uses.data[: table.count]
        assert dict(zip(indexes[uses != 0].tolist(), uses[uses != 0].tolist(), strict=True)) == dict(+task.uses)
        assert {key: claim.rows.tolist() for key, claim in real.claims.items()} == {
            key: claim.rows for key, claim in task.claims.items()
        }
        going = [batch for batch in real.batches.values() if not batch.plan.is_reusing]
        assert sum(batch.remaining > 0 for batch in going) == len(with_rows)
        assert real.names == task.names
        assert {key: past.end or past.loss for key, past in real.past_names.items()} == task.past_names
        for request_id in [key for key, claim in real.claims.items() if not claim.name]:
            assert self.receivers[self.life, name, request_id], "nobody has this claim"
