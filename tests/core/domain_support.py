"""Short ways to write to a partition, or to "train" of a catalog, and to ask for its samples."""

import asyncio
import itertools

import numpy as np

from tq_service.custom_meta import column_of
from tq_service.machine.claims import (
    ClaimAcked,
    ClaimExtended,
    ClaimReleased,
    ConsumptionReset,
    LeaseExpired,
    RanksRestarted,
    SamplesClaimed,
    TaskSeen,
)
from tq_service.machine.samples import (
    CellsCleared,
    GroupsClosed,
    MetaSet,
    PartitionSealed,
    SamplesCleared,
    SamplesWritten,
    SampleWrite,
)
from tq_service.machine.state_machine import State, StateMachine
from tq_service.samplers import Sampler, SequentialSampler
from tq_service.schema import FieldSpec, Layout, SampleState
from tq_service.serving.catalog import Catalog
from tq_service.state.cells import ColumnWrite, Put, freed_cells
from tq_service.state.ledger import RecordedPlan
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import BatchSpec, ClaimRequest, ClaimSpec, Plan, Rank

BOOT = b"b" * 16
_numbers = itertools.count(1)


def new_id():
    """Return 16 bytes that were not returned before."""
    return next(_numbers).to_bytes(16, "big")


def partition(**settings):
    return Partition("train", PartitionSettings(**settings))


def dense(name, *shape, dtype="float32"):
    return ColumnWrite(spec=FieldSpec(name, dtype=dtype, layout=Layout.DENSE, row_shape=shape))


def jagged(name, lengths, *, dtype="int64"):
    spec = FieldSpec(name, dtype=dtype, layout=Layout.JAGGED, row_shape=(-1,))
    return ColumnWrite(spec=spec, extents=np.array(lengths, np.int64)[:, None])


def objects(name):
    return ColumnWrite(spec=FieldSpec(name, layout=Layout.OBJECT, row_shape=()))


def meta(entries):
    """Return custom_meta entries, one dict a sample, as columns; None removes a value."""
    columns = []
    for name in dict.fromkeys(name for entry in entries for name in entry):
        positions = [position for position, entry in enumerate(entries) if name in entry]
        values = [entries[position][name] for position in positions]
        columns.append(column_of(name, len(entries), positions, values))
    return columns


def new_write(count, fields=(), **arguments):
    """Return a write of `count` rows with dense columns `fields`, or any columns."""
    columns = [dense(name) if isinstance(name, str) else name for name in fields]
    entries = arguments.pop("meta", None)
    state = arguments.pop("state", None)
    indexes = arguments.pop("indexes", None)
    return SampleWrite(
        row_count=count,
        global_indexes=None if indexes is None else np.array(indexes, np.int64),
        state=None if state is None else SampleState(state),
        meta=meta(entries) if entries else (),
        put=Put("s0", BOOT, new_id()) if columns else None,
        columns=columns,
        **arguments,
    )


def commit(target, change):
    """Make a change of a partition that may be in no catalog; return what came of it, and what it freed."""
    if isinstance(target, Catalog):
        return target.commit(change), None
    state = State()
    state.partitions[target.partition_id] = target
    machine, steps = StateMachine(state), []

    def follow(step):
        steps.append(step)
        for partition in step.changed:
            partition.on_change()
        for partition in step.consumed:
            partition.on_consumed()

    def fail(reason, error):
        raise AssertionError(reason) from error

    machine.listener, machine.fatal = follow, fail
    result = machine.commit(change)
    return result, [freed_cells(each) for each in steps[0].freed] if steps else []


def _name(target):
    return "train" if isinstance(target, Catalog) else target.partition_id


def write_to(target, samples):
    """Write to a partition; return what came of it."""
    return commit(target, SamplesWritten(partition_id=_name(target), write=samples))[0]


def insert(target, count, fields=("x",), **arguments):
    """Add rows; return their indexes."""
    return [*map(int, write_to(target, new_write(count, fields, **arguments)).global_indexes)]


def update(target, indexes, fields=(), **arguments):
    """Write to rows; return what that freed."""
    change = SamplesWritten(
        partition_id=_name(target), write=new_write(len(indexes), fields, indexes=indexes, **arguments)
    )
    return commit(target, change)[1]


def clear(target, indexes):
    """Remove rows; return how many were there, and what that freed."""
    count, freed = commit(target, SamplesCleared(partition_id=_name(target), global_indexes=indexes))
    return count or 0, freed


def clear_fields(target, names, indexes=(), **arguments):
    """Clear fields of rows, and of groups; return how many cells there were, and what that freed."""
    rows = np.array(indexes, np.int64)
    change = CellsCleared(partition_id=_name(target), field_names=names, global_indexes=rows, **arguments)
    count, freed = commit(target, change)
    return count or 0, freed


def set_meta(target, indexes, columns):
    commit(target, MetaSet(partition_id=_name(target), global_indexes=indexes, columns=columns))


def seal(target):
    commit(target, PartitionSealed(partition_id=_name(target)))


def close_groups(target, names, rollouts=()):
    commit(target, GroupsClosed(partition_id=_name(target), names=names, rollouts=rollouts))


def task_of(target, name):
    """Return the ledger of a task, opened if it is new."""
    opened = commit(target, TaskSeen(partition_id=_name(target), task_name=name))[0]
    return opened or (target.get("train") if isinstance(target, Catalog) else target).tasks[name]


def _of_task(target, task, kind, **facts):
    return commit(target, kind(partition_id=_name(target), task_name=task.name, **facts))[0]


def plan_of(*parts):
    """Return the recorded plan that gives each rank its part, as plain micro-batches."""
    return RecordedPlan.of(Plan.of(parts))


def claim_rows(target, task, indexes, request_id=None, lease=None):
    """Have a queue worker get rows; return the claim."""
    plan = plan_of(indexes)
    return _of_task(target, task, SamplesClaimed, request_id=request_id or new_id(), plan=plan, lease=lease)


def release(target, task, request_id, rows=None):
    """Release a claim; return how many of its samples can be claimed again."""
    return _of_task(target, task, ClaimReleased, request_id=request_id, global_indexes=rows) or 0


def ack(target, task, request_id, rows=None):
    """Acknowledge samples of a claim; return how many were leased."""
    return _of_task(target, task, ClaimAcked, request_id=request_id, global_indexes=rows) or 0


def extend(target, task, request_id, seconds):
    """Give a claim more time; return how many of its samples are leased."""
    return _of_task(target, task, ClaimExtended, request_id=request_id, lease_seconds=seconds)


def expire(target, task, request_id):
    _of_task(target, task, LeaseExpired, request_id=request_id)


def reset(target, task, *, keep_consumed):
    """Start the next epoch of a task and return it."""
    return _of_task(target, task, ConsumptionReset, keep_consumed=keep_consumed)


def restart_ranks(target, task, *, dp_size, trained):
    """Have other ranks of a task go on behind a batch; return how many batches, and samples, are trained again."""
    return _of_task(target, task, RanksRestarted, dp_size=dp_size, trained=trained)


def batch_spec(**arguments):
    defaults = {
        "batch_size": 2,
        "batch_unit": "sample",
        "micro_batch_size": None,
        "sampler": "sequential",
        "sampler_config": "{}",
        "where": (),
        "order_by": (),
        "data_fields": ("x",),
        "drop_last": False,
        "finite": False,
    }
    return BatchSpec(**{**defaults, **arguments})


def asks(rank=None, *, task="t", sampler=None, least=None, request_id=None, epoch=None, lease=None, name="", **bound):
    """Return a claim; `rank` is (dp_rank, dp_size, batch_index), None for a queue worker."""
    sampler = sampler or SequentialSampler()
    fixed = batch_spec(sampler=sampler.name, **bound)
    return ClaimRequest(
        request_id=request_id or new_id(),
        task_name=task,
        spec=ClaimSpec(
            batch_spec=fixed,
            data_fields=fixed.data_fields,
            min_batch_size=least or 0,
            dp_size=None if rank is None else rank[1],
        ),
        sampler=sampler,
        rank=None if rank is None else Rank(dp_rank=rank[0], dp_size=rank[1], batch_index=rank[2]),
        epoch=epoch,
        lease=lease,
        claim_name=name,
    )


class DrawingSampler(Sampler):
    """Draws a whole batch with replacement; consumes one ready row or two, which it may not have drawn."""

    name = "drawing"

    def runs_inline(self, request):
        return True

    def plan(self, view, request):
        ready = view.ready()
        if ready.size < max(1, request.min_size):
            return None
        rng = np.random.default_rng(view.plan_count)
        drawn = rng.choice(ready, request.total_size)
        consumed = rng.choice(ready, min(ready.size, int(rng.integers(1, 3))), replace=False)
        return Plan.of(np.array_split(drawn, request.rank_count), consumed)


class SlowSampler(Sampler):
    """Plans as another sampler does, some turns of the event loop before its answer, or when it is let go."""

    name = "slow"

    def __init__(self, inner, turns=0, turns_before=0):
        self.inner = inner
        self.turns = turns
        self.turns_before = turns_before
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.call_count = 0

    @property
    def length(self):
        return self.inner.length

    async def plan(self, view, request):
        self.call_count += 1
        await turns(self.turns_before)
        plan = self.inner.plan(view, request)
        self.started.set()
        if self.turns:
            await turns(self.turns)
        else:
            await self.go.wait()
        return plan


def is_at_rest(planner):
    """Return whether all who wait in a planner wait for a change."""
    return planner._dispatching is None and not planner._plans and planner._queue.planning is None


async def turns(count=5):
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)
