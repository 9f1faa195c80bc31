"""Explains why claims are waiting: how many samples are ready, and which requirements the other samples do not meet.

An explanation scans all rows, so it is computed only on request. Plans and explanations share a single list of
requirements (`Readiness.requirements`). Each member of `Lack` contains the message for one kind of unmet requirement.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tq_service.errors import nearest
from tq_service.planning.grouping import Grouping, grouping_of
from tq_service.planning.ratio import insert_ratio
from tq_service.planning.staleness import StalenessBound
from tq_service.planning.view import Readiness
from tq_service.results import Lack, NotReady, WaitCode, WaitReason
from tq_service.schema import START_VERSION, BatchUnit, Blocks
from tq_service.serving.admission import AdmissionQueue, demand_of_slots
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import RunsPlans
from tq_service.serving.sweep import Slices, sweep
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, Indexes, LengthSource, NotBefore
from tq_service.state.table import HELD, LIVE

_SHARED_ROWS: Final = 65_536  # in larger partitions, equal claims share an explanation
_FRESH_SECONDS: Final = 1.0
_MOST_NAMED_GROUPS: Final = 3


class Explainer:
    """Explains why claims are waiting. In large partitions, requests about equal claims share one scan per second.

    Args:
        catalog: catalog of the controller's partitions and waiting claims.
        runner: provides the length source that a sampler needs.
    """

    def __init__(self, catalog: Catalog, runner: RunsPlans) -> None:
        self._catalog = catalog
        self._runner = runner
        self._recent: dict[object, asyncio.Task[WaitReason]] = {}

    async def explain(self, partition_id: str, request: ClaimRequest, names: Collection[str]) -> WaitReason:
        """Return why a claim is still waiting.

        Args:
            partition_id: name of the partition, which need not exist.
            request: claim to explain.
            names: names of the partitions that the caller may see.
        """
        partition = self._catalog.find(partition_id, missing_ok=True)
        if partition is None:
            reason = _of_no_partition(partition_id, names)
            return replace(reason, task_name=request.task_name, data_fields=request.spec.data_fields)
        return await self._reason(partition, request)

    async def waiting(
        self, partition_id: str, task_name: str = "", *, names: Collection[str] | None, most: int | None = None
    ) -> list[WaitReason]:
        """Return the reasons why claims on a partition are waiting. Equal claims share one reason.

        Args:
            partition_id: name of the partition, which need not exist.
            task_name: name of the task whose claims to explain, or "" to explain the claims of all tasks.
            names: names of the partitions that the caller may see, or None to report only the fields and tasks of
                claims.
            most: maximum number of reasons, or None for no limit. The earliest claims are explained first.
        """
        partition = self._catalog.find(partition_id, missing_ok=True)
        if partition is None:
            waits = (await self._arrivals(partition_id, task_name))[:most]
            if names is None or not waits:
                return waits
            reason = _of_no_partition(partition_id, names)
            return [replace(wait, code=reason.code, text=reason.text) for wait in waits]
        waiting = self._catalog.waiting_claims(partition, task_name)[:most]
        if names is None:
            return [_unexplained(each.task_name, each.spec.data_fields, count) for each, count in waiting]
        return [replace(await self._reason(partition, request), waiting_count=count) for request, count in waiting]

    async def _arrivals(self, partition_id: str, task_name: str) -> list[WaitReason]:
        """Return wait reasons with empty texts for calls that await a missing partition. Equal calls share a reason."""
        alike, slices = Counter[tuple[str, tuple[str, ...]]](), Slices()
        for claim in self._catalog.awaiting(partition_id):
            alike[("", ()) if claim is None else (claim.task_name, claim.spec.data_fields)] += 1
            await slices.turn()
        return [_unexplained(*asked, count) for asked, count in alike.items() if task_name in {"", asked[0]}]

    async def _reason(self, partition: Partition, request: ClaimRequest) -> WaitReason:
        """Return why a claim on an existing partition is waiting for samples."""
        if (text := self._lacking_version(request.not_before)) is not None:
            return WaitReason(
                code=WaitCode.VERSION_NOT_PUBLISHED,
                text=text,
                task_name=request.task_name,
                data_fields=request.spec.data_fields,
                sealed=partition.sealed,
            )
        reason = await self._look_once(partition, request)
        if request.spec.admit is None or reason.ready_count < reason.needed_count:
            return reason
        slots = self._catalog.find(request.spec.admit.partition_id, missing_ok=True)
        queue = None if slots is None else self._catalog.admission_queue(slots.partition_id)
        if slots is None or queue is None or slots.sealed:
            return reason
        demand = demand_of_slots(slots, request.spec.min_batch_size, request.spec.admit.slot_count)
        if not (waits_for := queue.waits_for(demand)):
            return reason
        text = f"{reason.ready_count} prompts are ready, but there is no capacity for their slots: {waits_for}"
        return replace(reason, code=WaitCode.NO_CAPACITY, text=text)

    async def _look_once(self, partition: Partition, request: ClaimRequest) -> WaitReason:
        """Return why a claim is waiting. In a large partition, the reason may be up to a second old."""
        if partition.table.count <= _SHARED_ROWS:
            return await self._look(partition, request)
        # The key does not contain the partition object, because a reference would keep a cleared partition in memory.
        key = partition.incarnation, request.task_name, request.spec, request.rank and request.rank.batch_index
        if key not in self._recent:
            self._recent[key] = asyncio.ensure_future(self._look(partition, request))
            asyncio.get_running_loop().call_later(_FRESH_SECONDS, self._recent.pop, key)
        return await asyncio.shield(self._recent[key])

    def _lacking_version(self, wanted: NotBefore | None) -> str | None:
        """Return a sentence about the version that a claim waits for, or None if no version is awaited."""
        if wanted is None or self._catalog.versions.is_published(wanted.policy, wanted.version):
            return None
        policy = self._catalog.policies.get(wanted.policy)
        if policy is None:
            known = nearest(wanted.policy, self._catalog.policies)
            return (
                f"the claim waits for version {wanted.version} of policy {wanted.policy!r}, but no version is "
                f"published; {known}"
            )
        return (
            f"the claim waits for version {wanted.version} of policy {wanted.policy!r}, but the published version is "
            f"{policy.version}; the trainer must publish the next versions"
        )

    async def _look(self, partition: Partition, request: ClaimRequest) -> WaitReason:
        slices, task = Slices(), self._catalog.task(partition, request.task_name)
        explanation = Explanation(partition, task, request, self._runner.length(request.sampler))
        await sweep(partition.table, [explanation], slices)
        return await explanation.reason(slices, self._catalog.admission_queue(partition.partition_id))


class Explanation:
    """Explains why one kind of claim is waiting, by examining one slice of rows at a time.

    Args:
        partition: partition that contains the task.
        task: ledger of the claiming task.
        request: one of the equal claims to explain.
        length: where the claim's sampler gets lengths from, or None if the sampler needs no lengths.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, request: ClaimRequest, length: LengthSource | None
    ) -> None:
        self.cost = 1 + len(request.batch_spec.where)
        self._partition = partition
        self._task = task
        self._request = request
        self._readiness = Readiness(partition, task, request.batch_spec, length)
        self._unit: BatchUnit = request.batch_spec.batch_unit
        self._left_count = 0
        self._lacking: Counter[tuple[Lack, str]] = Counter()  # counts by kind and name, as in `NotReady`
        self._ungrouped: Counter[str] = Counter()  # number of samples without the field and a group, by field
        self._state = HELD if request.batch_spec.held else LIVE
        self._ready: list[Indexes] = []  # global indexes, because positions may change between slices

    def look(self, rows: slice) -> None:
        """Count the ready rows of a slice and the rows that fail each requirement."""
        partition, task = self._partition, self._task
        states, left = partition.state.data[rows], task.is_pending(rows)
        live = left & (states == self._state)
        ready = live.copy()
        is_held = left & (states == HELD) & (self._state != HELD)
        lacking = [(Lack.LOST, "", task.skipped.data[rows]), (Lack.HELD, "", is_held)]
        for lack, name, is_met in self._readiness.requirements:
            met = is_met(rows)
            ready &= met
            lacking.append((lack, name, live & ~met))
            if lack is Lack.FIELD and name in partition.cells.shared:
                is_ungrouped = live & ~met & (partition.groups.of_rows[rows] < 0)
                self._ungrouped[name] += int(np.count_nonzero(is_ungrouped))
        for lack, name, mask in lacking:
            self._lacking[lack, name] += int(np.count_nonzero(mask))
        self._left_count += int(np.count_nonzero(left))
        self._ready.append(partition.table.index.data[rows][ready])

    async def reason(self, slices: Slices, queue: AdmissionQueue | None) -> WaitReason:
        """Return why the claim is waiting, based on the scan and on the partition's queue of puts."""
        task, request = self._task, self._request
        lacks = [
            NotReady(kind=lack.kind, name=name, sample_count=count, example=self._of_groups(lack, name))
            for (lack, name), count in self._lacking.items()
            if count
        ]
        if task.leased_count:
            first = math.inf
            for claim in list(task.leases.values()):  # copied, because leases may change between turns
                first = min(first, claim.deadline)
                await slices.turn()
            seconds = 0.0 if first == math.inf else max(0.0, first - asyncio.get_running_loop().time())
            lacks.append(NotReady(kind=Lack.LEASED.kind, sample_count=task.leased_count, ends_in_seconds=seconds))
        ready_count, split = await self._groups()
        if split is not None:
            lacks.append(split)
        # A rank is served only after all earlier batches have been planned, so the samples for these batches are also
        # needed.
        batches = 1 if request.rank is None else max(1, request.rank.batch_index - task.next_batch_index + 1)
        needed_count = batches * request.plan_request.min_size
        if (awaited := self._awaited()) is not None:
            lacks.append(awaited)
        code, text = self._cause(ready_count, needed_count, lacks)
        text += _evicted(task)
        waiting_put_count = 0 if queue is None else queue.waiting_count
        put_waits_for = "" if queue is None else queue.first_waits_for(request)
        if waiting_put_count:
            text += f"; {waiting_put_count} puts wait for capacity: {put_waits_for}"
        return WaitReason(
            code=code,
            text=text,
            task_name=task.name,
            data_fields=request.spec.data_fields,
            ready_count=ready_count,
            needed_count=needed_count,
            counts_groups=self._unit != "sample",
            not_ready=tuple(lacks),
            left_count=self._left_count,
            sealed=self._partition.sealed,
            waiting_put_count=waiting_put_count,
            put_waits_for=put_waits_for,
        )

    def _of_groups(self, lack: Lack, name: str) -> str:
        """Return the reason why samples lack a group-scoped field, or "" if the field is not group-scoped."""
        if lack is not Lack.FIELD or name not in self._partition.cells.shared:
            return ""
        count = self._ungrouped[name]
        never = f"; {count} of them are not in a group and will never have a value" if count else ""
        return f"their groups lack a value, which must be put for the groups{never}"

    def _cause(self, ready_count: int, needed_count: int, lacks: Sequence[NotReady]) -> tuple[WaitCode, str]:
        """Return the reason for the wait, as a code and a text."""
        partition_id, fields = self._partition.partition_id, self._partition.cells.fields
        task_of = f"task {self._task.name!r} of partition {partition_id!r}"
        if not self._partition.inserted_count:
            return WaitCode.NO_SAMPLES, f"partition {partition_id!r} has no samples"
        if not self._left_count:
            return WaitCode.ALL_CONSUMED, self._all_consumed(task_of)
        put = [name for name, field in fields.items() if field.produced_count]
        if missing := [name for name in self._request.batch_spec.data_fields if name not in put]:
            text = f"no sample of partition {partition_id!r} has field {missing[0]!r}; {nearest(missing[0], put)}"
            if missing[1:]:
                text += f" (nor {', '.join(map(repr, missing[1:]))})"
            return WaitCode.FIELD_NEVER_PUT, text
        if (ratio := insert_ratio(self._partition, self._task)) and ratio.exceeded_by(
            self._request.plan_request.min_size
        ):
            return WaitCode.RATIO_BOUNDED, ratio.waits_for
        text = f"{ready_count} {self._unit}s are ready for {task_of}"
        if ready_count >= needed_count:
            if any(lack.kind == Lack.OLDER.kind for lack in lacks):
                return WaitCode.STALENESS_BOUNDED, "; ".join([text, *map(_sentence, lacks)])
            code = WaitCode.SAMPLER_WAITS
            text += f", but sampler {self._request.batch_spec.sampler!r} does not form a batch of them yet"
        else:
            has_split_groups = any(lack.kind == Lack.GROUP.kind for lack in lacks)
            code = WaitCode.GROUPS_INCOMPLETE if has_split_groups else WaitCode.TOO_FEW_READY
            text += f", but {needed_count} are needed"
        return code, "; ".join([text, *map(_sentence, lacks)])

    def _awaited(self) -> NotReady | None:
        """Return the unready samples that block plans under the staleness bound, or None if there are none."""
        partition, outstanding = self._partition, self._task.outstanding
        if outstanding is None or outstanding.admission.max_staleness is None:
            return None
        bound = StalenessBound(
            partition,
            self._task,
            outstanding.admission,
            left=lambda: np.flatnonzero(self._task.is_left(slice(0, partition.table.count))),
            is_ready=self._readiness.ready,
            in_order=np.sort,
            no_more=partition.sealed,
        )
        awaited = bound.awaited()
        if not awaited.size:
            return None
        first = awaited[:1]
        group = partition.groups.names_of(first)[0]
        index = int(partition.table.index[first][0])
        version = partition.meta.typed(START_VERSION, first)[0].tolist()[0]
        example = f"sample {index}{f' of group {group!r}' if group else ''}, begun at version {version}"
        return NotReady(kind=Lack.OLDER.kind, sample_count=awaited.size, example=example)

    def _all_consumed(self, task_of: str) -> str:
        task = self._task
        leased = f", {task.leased_count} of them under a lease" if task.leased_count else ""
        if lost := self._lacking[Lack.LOST, ""]:
            are_lost = _sentence(NotReady(kind=Lack.LOST.kind, sample_count=lost))
            return (
                f"no samples remain for {task_of}: it has consumed {task.consumed_count} samples{leased}, and "
                f"{are_lost}; put more, seal the partition, or clear the samples that task {task.name!r} skips"
            )
        text = (
            f"task {task.name!r} has consumed all {task.consumed_count} samples of partition "
            f"{self._partition.partition_id!r}{leased}"
        )
        if self._partition.sealed:
            return f"{text}; expired leases return samples, and the task ends when all samples are acknowledged"
        return f"{text}, and the partition is open; put more, or seal the partition if it is complete"

    # Groups

    def _grouping(self) -> Grouping | None:
        """Return the groups that must be delivered as a whole, or None if samples are delivered individually."""
        sampler = self._request.sampler
        size = getattr(sampler, "n_samples_per_prompt", None)
        keeps_named = hasattr(sampler, "n_samples_per_prompt") and self._partition.groups.in_use
        if size is None and self._unit == "sample" and not keeps_named:
            return None
        is_taking = getattr(sampler, "incomplete_groups", "skip") == "take"
        blocks: Blocks = getattr(sampler, "blocks", "aligned")
        unit: BatchUnit = "rollout" if self._unit == "rollout" else "group"
        return grouping_of(self._partition, self._task, size, blocks, take_incomplete=is_taking, unit=unit)

    async def _groups(self) -> tuple[int, NotReady | None]:
        """Return the number of ready samples or groups, and information about any groups that are only partly ready."""
        ready = np.concatenate([np.zeros(0, np.int64), *self._ready])
        grouping, had_named = self._grouping(), self._partition.groups.in_use
        if grouping is None:
            return ready.size, None
        positions = self._partition.table.find(ready)
        ready, positions = ready[positions >= 0], positions[positions >= 0]
        # Sort all ready samples in a thread, without accessing the partition there.
        ids, first, counts = await asyncio.to_thread(
            np.unique, grouping.ids(positions), return_index=True, return_counts=True
        )
        if self._partition.groups.in_use != had_named:  # start over, because the ids no longer identify groups
            return await self._groups()
        is_whole = counts == grouping.needed(ids, no_more=self._partition.sealed)
        ready_count = int(np.count_nonzero(is_whole) if self._unit != "sample" else counts[is_whole].sum())
        split = np.flatnonzero(~is_whole)
        if not split.size:
            return ready_count, None
        split = split[np.argsort(first[split])]
        first_index, first_count = int(ready[first[split[0]]]), int(counts[split[0]])
        example = self._example(ids[split], first_index, first_count, grouping.block_size)
        return ready_count, NotReady(kind=Lack.GROUP.kind, sample_count=int(counts[split].sum()), example=example)

    def _example(self, ids: Indexes, index: int, ready_count: int, block_size: int | None) -> str:
        """Describe the first group that is only partly ready, or list the groups without a declared size.

        Args:
            ids: ids of the groups that are only partly ready.
            index: global index of a sample in the first group.
            ready_count: number of ready samples in the first group.
            block_size: number of members required in a group without a declared size, or None.
        """
        groups = self._partition.groups
        slot = int(ids[0])
        if not groups.in_use or slot < 0:
            return f"{ready_count} samples are ready in the group that contains index {index}"
        kind, name = "group", groups.slots.occupants[slot]
        if groups.parent[slot] >= 0:
            kind = "rollout"
        size = int(groups.declared[slot]) or (block_size if kind == "group" else None)
        if open_count := int(groups.open_rollouts[slot]):
            inside = groups.slots_of_unit("rollout")
            inside = inside[(groups.parent[inside] == slot) & ~groups.closed[inside]]
            return (
                f"group {name!r} has {open_count} rollouts that are not closed, such as "
                f"{groups.slots.occupants[int(inside[0])]!r}; close or fail them"
            )
        if kind == "rollout" and not groups.closed[slot] and not self._partition.sealed:
            return (
                f"rollout {name!r} is not closed, and {ready_count} of its {int(groups.members[slot])} samples are "
                f"ready; close or fail the rollout"
            )
        if not size and not self._partition.sealed and not groups.closed[slot]:
            named = ids[ids >= 0]
            unsized = named[(groups.declared[named] == 0) & ~groups.closed[named] & (groups.parent[named] < 0)]
            names = ", ".join(repr(groups.slots.occupants[each]) for each in unsized[:_MOST_NAMED_GROUPS].tolist())
            others = f" and {unsized.size - _MOST_NAMED_GROUPS} others" if unsized.size > _MOST_NAMED_GROUPS else ""
            return (
                f"groups {names}{others} lack a declared size, so more members may be put; put them with a "
                f"group_size, close the groups, or seal the partition"
            )
        expected = f"{size} expected" if size else "and its size is unknown until the partition is sealed"
        members = int(groups.members[slot])
        if kind == "rollout":
            return f"rollout {name!r} has {members} samples, {ready_count} of them ready"
        unit = (
            "members"
            if not groups.continuing[slot]
            else f"samples in {members - int(groups.continuing[slot])} rollouts"
        )
        return f"group {name!r} has {members} {unit}, {ready_count} of them ready, {expected}"


def _evicted(task: TaskLedger) -> str:
    """Return a clause about the units that a task has evicted, or "" if there are none."""
    counts = [
        (task.unmatched_count, "excluded by where"),
        (task.too_small_count, "with too few members left"),
        (task.late_count, "that would have become too stale"),
        (task.overflow_count, "of the lowest priority, to admit new ones"),
    ]
    parts = [f"{count} {reason}" for count, reason in counts if count]
    return f"; {task.evicted_count} samples or groups were evicted: {', '.join(parts)}" if parts else ""


def _sentence(lack: NotReady) -> str:
    sentence = Lack[lack.kind.upper()].value.format(lack)
    return f"{sentence} ({lack.example})" if lack.kind == Lack.FIELD.kind and lack.example else sentence


def _unexplained(task_name: str, data_fields: tuple[str, ...], waiting_count: int) -> WaitReason:
    return WaitReason(code="", text="", task_name=task_name, data_fields=data_fields, waiting_count=waiting_count)


def _of_no_partition(partition_id: str, names: Collection[str]) -> WaitReason:
    return WaitReason(
        code=WaitCode.PARTITION_NOT_FOUND,
        text=f"there is no partition {partition_id!r}; {nearest(partition_id, names)}",
    )
