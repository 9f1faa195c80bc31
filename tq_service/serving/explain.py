"""Why claims wait: what is ready of a partition, and what the other samples lack.

It takes a pass over all rows, and is made only where somebody asks. Other work of the event loop has its turn between
two slices of rows; the counts are those of the moments at which their slices were looked at.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import nearest
from tq_service.planning.grouping import Grouping, grouping_of
from tq_service.planning.view import Readiness
from tq_service.results import NotReady, WaitCode, WaitReason
from tq_service.schema import Blocks
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import RunsPlans
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, Indexes, LengthSource
from tq_service.state.table import HELD, LIVE

_SLICE_ROWS: Final = 65_536
_SLICE_CLAIMS: Final = 8_192
_FRESH_SECONDS: Final = 1.0
_MOST_NAMED_GROUPS: Final = 3


class Explainer:
    """Explains waits. Calls that ask alike within a second share one pass over the rows, where these are many.

    Args:
        catalog: has the partitions and the claims that wait.
        runner: knows what a sampler needs of each sample.
    """

    def __init__(self, catalog: Catalog, runner: RunsPlans) -> None:
        self._catalog = catalog
        self._runner = runner
        self._recent: dict[object, asyncio.Task[WaitReason]] = {}

    async def explain(self, partition_id: str, request: ClaimRequest, names: Collection[str]) -> WaitReason:
        """Return why a claim has nothing yet.

        Args:
            partition_id: the partition, which need not be there.
            request: the claim.
            names: partitions that the caller may know of.
        """
        partition = self._catalog.find(partition_id, missing_ok=True)
        if partition is None:
            reason = _of_no_partition(partition_id, names)
            return replace(reason, task_name=request.task_name, data_fields=request.spec.data_fields)
        if partition.table.count <= _SLICE_ROWS:
            return await self._look(partition, request)
        rank = request.rank
        # Not of the partition itself, which would stay in memory after it was cleared.
        key = partition.incarnation, request.task_name, request.spec, None if rank is None else rank.batch_index
        look = self._recent.get(key)
        if look is None:
            look = self._recent[key] = asyncio.ensure_future(self._look(partition, request))
            asyncio.get_running_loop().call_later(_FRESH_SECONDS, self._recent.pop, key)
        return await asyncio.shield(look)

    async def _look(self, partition: Partition, request: ClaimRequest) -> WaitReason:
        queue = self._catalog.admission_queue(partition.partition_id)
        task = self._catalog.task(partition, request.task_name)
        explanation = Explanation(partition, task, request, self._runner.length(request.sampler))
        return await explanation.reason(
            waiting_put_count=0 if queue is None else queue.waiting_count,
            put_waits_for="" if queue is None else queue.first_waits_for(request),
        )

    async def explain_waiting(
        self, partition_id: str, task_name: str, names: Collection[str], *, most: int | None = None
    ) -> list[WaitReason]:
        """Return why the claims of a partition wait, those that ask alike together.

        Args:
            partition_id: the partition, which need not be there.
            task_name: claims of this task; empty: of all.
            names: partitions that the caller may know of.
            most: reasons that are returned, those of the claims that came first; None: all.
        """
        partition = self._catalog.find(partition_id, missing_ok=True)
        if partition is None:
            waits = await self._arrivals(partition_id, task_name)
            reason = _of_no_partition(partition_id, names) if waits else None
            return [replace(wait, code=reason.code, text=reason.text) for wait in waits[:most] if reason is not None]
        return [
            replace(await self.explain(partition_id, request, names), waiting_count=waiting_count)
            for request, waiting_count in self._catalog.waiting_claims(partition, task_name)[:most]
        ]

    async def waiting(self, partition_id: str, *, most: int | None = None) -> list[WaitReason]:
        """Return what the claims of a partition ask for, without the reasons why they wait; see `explain_waiting`."""
        partition = self._catalog.find(partition_id, missing_ok=True)
        if partition is None:
            return (await self._arrivals(partition_id))[:most]
        return [
            _unexplained(request.task_name, request.spec.data_fields, waiting_count)
            for request, waiting_count in self._catalog.waiting_claims(partition, "")[:most]
        ]

    async def _arrivals(self, partition_id: str, task_name: str = "") -> list[WaitReason]:
        """Return what calls ask for that wait for a partition which is not there, those that ask alike together."""
        calls = self._catalog.awaiting(partition_id)
        alike: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for start in range(0, len(calls), _SLICE_CLAIMS):
            alike.update(
                ("", ()) if each is None else (each.task_name, each.spec.data_fields)
                for each in calls[start : start + _SLICE_CLAIMS]
            )
            await asyncio.sleep(0)
        return [_unexplained(*asked, count) for asked, count in alike.items() if task_name in {"", asked[0]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """What is ready in whole groups, or one by one where a sampler takes no groups.

    Attributes:
        ready_count: samples or, where the claim counts these, groups.
        split_count: samples that are ready in groups that are not ready as a whole.
        example: one of these groups, in words.
    """

    ready_count: int
    split_count: int = 0
    example: str = ""


class Explanation:
    """The counts of one kind of claim, which grow slice by slice.

    Args:
        partition: the partition.
        task: the task that claims.
        request: one of the claims.
        length: what its sampler needs of each sample.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, request: ClaimRequest, length: LengthSource | None
    ) -> None:
        self._partition = partition
        self._task = task
        self._request = request
        self._length = length
        self._fields = request.batch_spec.data_fields
        self._left_count = 0
        self._lacking: Counter[tuple[str, str]] = Counter()  # by kind and name, as in `NotReady`
        self._ready: list[Indexes] = []  # global indexes, since positions may change between the slices

    async def reason(self, *, waiting_put_count: int, put_waits_for: str) -> WaitReason:
        """Return why the claim waits, as far as the partition knows."""
        table, task = self._partition.table, self._task
        size = min(_SLICE_ROWS, Readiness(self._partition, task, self._request.batch_spec, None).at_once)
        for rows in table.slices(size):
            self._look(rows)
            await asyncio.sleep(0)
        ready = table.find(np.concatenate([np.zeros(0, np.int64), *self._ready]))
        # In a thread, since it sorts all rows that are ready. Rows may change meanwhile: the counts of groups are as
        # little of one moment as those of the slices.
        with table.pinned():
            groups = await asyncio.to_thread(self._groups, ready[ready >= 0])
        lacks = [
            NotReady(kind=kind, name=name, sample_count=count) for (kind, name), count in self._lacking.items() if count
        ]
        if task.leased_count:
            lacks.append(
                NotReady(kind="leased", sample_count=task.leased_count, ends_in_seconds=await self._lease_seconds())
            )
        if groups.split_count:
            lacks.append(NotReady(kind="group", sample_count=groups.split_count, example=groups.example))
        reason = WaitReason(
            code=self._code(groups.ready_count, has_split_groups=groups.split_count > 0),
            text="",
            task_name=task.name,
            data_fields=self._request.spec.data_fields,
            ready_count=groups.ready_count,
            needed_count=self._needed_count,
            counts_groups=self._counts_groups,
            not_ready=tuple(lacks),
            left_count=self._left_count,
            sealed=self._partition.sealed,
            waiting_put_count=waiting_put_count,
            put_waits_for=put_waits_for,
        )
        text = self._sentence(reason)
        if waiting_put_count:
            text += f"; {waiting_put_count} puts wait for capacity: {put_waits_for}"
        return replace(reason, text=text)

    def _look(self, rows: slice) -> None:
        """Count the rows of a slice."""
        partition, batch_spec = self._partition, self._request.batch_spec
        readiness = Readiness(partition, self._task, batch_spec, self._length)
        states, lost = partition.state.data[rows], self._task.skipped.data[rows]
        left = self._task.is_pending(rows)
        live = left & (states == LIVE)
        self._left_count += int(np.count_nonzero(left))
        self._count("lost", "", lost)
        self._count("held", "", left & (states == HELD))
        for name in self._fields:
            self._count("field", name, live & ~partition.cells.produced((name,), rows))
        for condition in batch_spec.where:
            self._count("where", condition.column, live & ~partition.meta.holds(condition, rows)[0])
        if self._length is not None:
            self._count("length", self._length.key, live & ~readiness.has_length(rows))
        self._ready.append(partition.table.index.data[rows][readiness.ready(rows) & ~lost])

    def _count(self, kind: str, name: str, mask: NDArray[np.bool_]) -> None:
        self._lacking[kind, name] += int(np.count_nonzero(mask))

    def _code(self, ready_count: int, *, has_split_groups: bool) -> WaitCode:
        """Return the reason in a word."""
        if not self._partition.inserted_count:
            return WaitCode.NO_SAMPLES
        if not self._left_count:
            return WaitCode.ALL_CONSUMED
        if self._never_put:
            return WaitCode.FIELD_NEVER_PUT
        if ready_count >= self._needed_count:
            return WaitCode.SAMPLER_WAITS
        return WaitCode.GROUPS_INCOMPLETE if has_split_groups else WaitCode.TOO_FEW_READY

    @property
    def _never_put(self) -> list[str]:
        """Return the fields of the claim that no sample has."""
        fields = self._partition.cells.fields
        return [name for name in self._fields if name not in fields or not fields[name].produced_count]

    @property
    def _counts_groups(self) -> bool:
        return self._request.batch_spec.batch_unit == "group"

    @property
    def _needed_count(self) -> int:
        """What all batches up to the one that is asked for take."""
        rank = self._request.rank
        batches = 1 if rank is None else max(1, rank.batch_index - self._task.next_batch_index + 1)
        return batches * self._request.plan_request.min_size

    def _grouping(self) -> Grouping | None:
        """Return the groups that are delivered whole, None where samples come one by one."""
        sampler = self._request.sampler
        size = getattr(sampler, "n_samples_per_prompt", None)
        keeps_named = hasattr(sampler, "n_samples_per_prompt") and self._partition.groups.in_use
        if size is None and not self._counts_groups and not keeps_named:
            return None
        is_taking = getattr(sampler, "incomplete_groups", "skip") == "take"
        blocks: Blocks = getattr(sampler, "blocks", "aligned")
        return grouping_of(self._partition, self._task, size, blocks, take_incomplete=is_taking)

    def _groups(self, ready: Indexes) -> _Groups:
        """Return what the groups of the rows that are ready amount to."""
        grouping = self._grouping()
        if grouping is None:
            return _Groups(ready_count=ready.size)
        whole, sizes = grouping.whole(ready, no_more=self._partition.sealed)
        ready_count = sizes.size if self._counts_groups else whole.size
        split = ready[~np.isin(ready, whole)]
        if not split.size:
            return _Groups(ready_count=ready_count)
        if unsized := self._unsized(split, grouping.block_size):
            return _Groups(ready_count=ready_count, split_count=split.size, example=unsized)
        ids = grouping.ids(ready)
        ready_of_first = int(np.count_nonzero(ids == ids[ready == split[0]][0]))
        example = self._example(split[:1], ready_of_first, grouping.block_size)
        return _Groups(ready_count=ready_count, split_count=split.size, example=example)

    def _unsized(self, split: Indexes, block_size: int | None) -> str:
        """Return what to do where groups of rows that are ready wait for a size, "" if the first one has one."""
        groups = self._partition.groups
        if block_size is not None or self._partition.sealed or not groups.in_use:
            return ""
        slots = groups.of_rows[split]
        slots = slots[slots >= 0]
        slots = slots[(groups.declared[slots] == 0) & ~groups.closed[slots]]
        if not slots.size or slots[0] != groups.of_rows[split[0]]:
            return ""
        firsts = slots[np.sort(np.unique(slots, return_index=True)[1])]
        rows = np.array([split[groups.of_rows[split] == slot][0] for slot in firsts[:_MOST_NAMED_GROUPS]])
        names = ", ".join(map(repr, groups.names_of(rows)))
        others = f" and {firsts.size - rows.size} others" if firsts.size > rows.size else ""
        return (
            f"groups {names}{others} declared no size, so more members may come: put them with a group_size, close "
            f"the groups, or seal the partition"
        )

    def _example(self, row: Indexes, ready_count: int, block_size: int | None) -> str:
        """Return what is ready of the group of a row `(1,)`."""
        groups = self._partition.groups
        (name,) = groups.names_of(row)
        if name is None:
            return f"of the group of index {int(self._partition.table.index.data[row[0]])} {ready_count} are ready"
        slot = int(groups.of_rows[row[0]])
        size = int(groups.declared[slot]) or block_size
        expected = f"{size} expected" if size else "and its size is not known before the partition is sealed"
        return f"group {name!r} has {int(groups.members[slot])} members, {ready_count} of them ready, {expected}"

    async def _lease_seconds(self) -> float:
        """Return for how long nothing that is leased comes back."""
        claims = list(self._task.leases.values())  # they come and go between the slices
        first = math.inf
        for start in range(0, len(claims), _SLICE_CLAIMS):
            held = (each.deadline for each in claims[start : start + _SLICE_CLAIMS])
            first = min(first, min(held, default=math.inf))
            await asyncio.sleep(0)
        return 0.0 if first == math.inf else max(0.0, first - asyncio.get_running_loop().time())

    def _sentence(self, reason: WaitReason) -> str:
        task, partition_id = reason.task_name, self._partition.partition_id
        known = self._partition.cells.fields
        match reason.code:
            case WaitCode.NO_SAMPLES:
                return f"partition {partition_id!r} has no samples"
            case WaitCode.FIELD_NEVER_PUT:
                missing = self._never_put
                put = {name for name, field in known.items() if field.produced_count}
                return (
                    f"no sample of partition {partition_id!r} has field {missing[0]!r}; {nearest(missing[0], put)}"
                    + (f" (nor {', '.join(map(repr, missing[1:]))})" if missing[1:] else "")
                )
            case WaitCode.ALL_CONSUMED:
                leased = f", {self._task.leased_count} of them under a lease" if self._task.leased_count else ""
                consumed = (
                    f"task {task!r} has consumed all {self._task.consumed_count} samples of partition "
                    f"{partition_id!r}{leased}"
                )
                if lost := self._lacking["lost", ""]:
                    are_lost = _shown(NotReady(kind="lost", sample_count=lost))
                    return (
                        f"nothing is left for task {task!r} of partition {partition_id!r}: it has consumed "
                        f"{self._task.consumed_count} samples{leased}, and {are_lost}; put more, seal it, or clear "
                        f"those that task {task!r} skips"
                    )
                if self._partition.sealed:
                    return f"{consumed}; they come back when it runs out, or the end comes once they are acknowledged"
                return f"{consumed}, and the partition is open; put more, or seal it when there are no more"
        unit = "groups" if reason.counts_groups else "samples"
        what = f"{reason.ready_count} {unit} are ready for task {task!r} of partition {partition_id!r}"
        if reason.code == WaitCode.SAMPLER_WAITS:
            what += f", and sampler {self._request.batch_spec.sampler!r} makes no batch of them yet"
        else:
            what += f", {reason.needed_count} are needed"
        return "; ".join([what, *map(_shown, reason.not_ready)])


def _shown(lack: NotReady) -> str:
    count = lack.sample_count
    match lack.kind:
        case "field":
            return f"{count} lack field {lack.name!r}"
        case "where":
            return f"for {count} the condition on {lack.name!r} does not hold"
        case "length":
            return f"{count} have no length for the sampler in the custom_meta column {lack.name!r}"
        case "leased":
            return f"{count} are leased, the first for {lack.ends_in_seconds or 0:.0f} s more"
        case "lost":
            return f"{count} are lost, since their groups lost a member that failed, was cleared or was dead-lettered"
        case "group":
            return f"{count} are ready in groups that are not ready as a whole ({lack.example})"
    return f"{count} are {lack.kind}"


def _unexplained(task_name: str, data_fields: tuple[str, ...], waiting_count: int) -> WaitReason:
    return WaitReason(code="", text="", task_name=task_name, data_fields=data_fields, waiting_count=waiting_count)


def _of_no_partition(partition_id: str, names: Collection[str]) -> WaitReason:
    return WaitReason(
        code=WaitCode.PARTITION_NOT_FOUND,
        text=f"there is no partition {partition_id!r}; {nearest(partition_id, names)}",
    )
