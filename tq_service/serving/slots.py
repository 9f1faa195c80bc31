"""Slots: samples that rollout workers are leased before they generate them, alone or with the prompts that they claim.

Slots of prompts are made in the step in which these are claimed. A call that waits holds nothing: it waits for prompts
first, and where there is no capacity for their slots, in the queue of the other partition. Once it has capacity it
looks for prompts again, and gives the capacity up if others were quicker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from tq_service.errors import (
    AdmissionLimitError,
    AlreadyExistsError,
    InvalidArgumentError,
    PartitionSealedError,
    QuotaExceededError,
    SamplesClearedError,
)
from tq_service.machine.claims import SamplesClaimed
from tq_service.machine.samples import SampleWrite
from tq_service.schema import Admit, EndCounts, SampleState
from tq_service.serving.admission import AdmissionQueue, Demand, WaitingWrite, demand_of_slots
from tq_service.serving.catalog import Catalog, Claimed
from tq_service.serving.planner import NotYet
from tq_service.state.ledger import Claim, RecordedPlan
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, Indexes, LeaseTerms, Plan
from tq_service.wait_clock import WhileWaiting


def start_version(catalog: Catalog, partition: Partition, policy: str) -> int | None:
    """Return the version that slots are stamped with, None where they have none.

    Raises:
        PolicyNotFoundError: no version of the policy is published.
        InvalidArgumentError: the staleness of the partition is counted in versions of another policy.
    """
    bounded = partition.settings.bounded_admission
    if bounded is not None and policy not in {"", bounded.policy}:
        raise InvalidArgumentError(
            f"policy is {policy!r}, expected {bounded.policy!r}, whose versions the max_staleness of task "
            f"{bounded.task_name!r} of partition {partition.partition_id!r} counts; leave it out",
            field="policy",
        )
    named = policy if bounded is None else bounded.policy
    return catalog.policy(named).version if named else None


def make_slots(
    catalog: Catalog, partition: Partition, write: SampleWrite, *, task_name: str, request_id: bytes, lease: LeaseTerms
) -> Claim:
    """Add slots and lease them to a worker, within a group of changes.

    Raises:
        TqError: the partition does not take them; it has not changed then, but for a task that it knows now.
    """
    catalog.task(partition, task_name)
    written = catalog.write(partition.partition_id, partition.incarnation, write)
    claim: Claim = catalog.commit(
        SamplesClaimed(
            partition_id=partition.partition_id,
            task_name=task_name,
            plan=RecordedPlan.of(Plan.of([np.asarray(written.global_indexes)])),
            request_id=request_id,
            lease=lease,
        )
    )
    return claim


class PromptClaims:
    """Serves claims of prompts with their slots, see `Admit`.

    Args:
        catalog: has the partitions.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def claim(
        self,
        partition_id: str,
        incarnation: bytes,
        request: ClaimRequest,
        max_wait_seconds: float,
        while_waiting: WhileWaiting = nullcontext,
    ) -> Claimed:
        """Return a claim, of prompts once there is capacity for the slots that it asks for; see `Catalog.claim`.

        Raises:
            PartitionNotFoundError, PolicyNotFoundError: of the slots.
            AdmissionLimitError, QuotaExceededError: more slots than there may ever be.
            AlreadyExistsError: there are samples, or a group, of the name of a prompt.
            InvalidArgumentError: a prompt has no key, or both partitions are the same.
        """
        admit, lease = request.spec.admit, request.lease
        if admit is None or lease is None:
            return await self._catalog.claim(partition_id, incarnation, request, max_wait_seconds, while_waiting)
        if admit.partition_id == partition_id:
            raise InvalidArgumentError(
                f"admit has partition_id {partition_id!r}, expected another partition than that of the prompts",
                field="admit.partition_id",
            )
        prompts = _Prompts(self._catalog, partition_id, request, admit, lease)
        request = replace(request, lease=replace(lease, shared_with=admit.partition_id), make_slots=prompts.make)
        deadline = time.monotonic() + max_wait_seconds
        least = replace(
            request.spec,
            batch_spec=replace(request.batch_spec, batch_size=request.spec.min_batch_size),
        )
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return await self._catalog.claim(partition_id, incarnation, request, left, while_waiting)
            except PartitionSealedError:
                return self._end(partition_id, request.task_name)
            except (AdmissionLimitError, QuotaExceededError) as error:
                if error.retry_after_seconds is None or (queue := prompts.queue) is None:  # they will never fit
                    raise
            try:
                with while_waiting(), self._waiting(partition_id, request):
                    demand = prompts.demand(least.min_batch_size)
                    capacity = await queue.enter_with(request.request_id, demand, deadline)
            except PartitionSealedError:
                return self._end(partition_id, request.task_name)
            except (AdmissionLimitError, QuotaExceededError) as error:
                if error.retry_after_seconds is None:
                    raise
                return Claimed(self._catalog.find(partition_id, missing_ok=True), NotYet())
            with capacity:
                asked = replace(request, spec=least, make_slots=partial(prompts.make, capacity=capacity))
                claimed = await self._catalog.claim(partition_id, incarnation, asked, 0.0, while_waiting)
            if not isinstance(claimed.answer, NotYet):
                return claimed

    def _end(self, partition_id: str, task_name: str) -> Claimed:
        """Answer a call whose prompts get no slots any more."""
        partition = self._catalog.get(partition_id)
        task = self._catalog.task(partition, task_name)
        return Claimed(partition, EndCounts(consumed_count=task.consumed_count, kept_count=task.kept_count))

    @contextlib.contextmanager
    def _waiting(self, partition_id: str, request: ClaimRequest) -> Iterator[None]:
        """Have explanations know of a claim that waits for capacity."""
        waits = self._catalog.capacity_waits
        waits[request.request_id] = partition_id, request
        try:
            yield
        finally:
            if waits.get(request.request_id, ("", None))[1] is request:
                del waits[request.request_id]


class _Prompts:
    """Makes the slots of the prompts of one call.

    Args:
        catalog: has the partitions.
        partition_id: that of the prompts.
        request: the call.
        admit: the slots that it asks for.
        lease: that of the prompts.
    """

    def __init__(
        self, catalog: Catalog, partition_id: str, request: ClaimRequest, admit: Admit, lease: LeaseTerms
    ) -> None:
        self._catalog = catalog
        self._partition_id = partition_id
        self._request = request
        self._admit = admit
        self._lease = LeaseTerms(seconds=lease.seconds, on_lost=admit.on_lost, shared_with=partition_id)
        self._incarnation = catalog.get(admit.partition_id).incarnation
        self._start_version()

    @property
    def _slots(self) -> Partition:
        return self._catalog.get(self._admit.partition_id, self._incarnation)

    def _start_version(self) -> int | None:
        return start_version(self._catalog, self._slots, self._admit.policy or "")

    @property
    def queue(self) -> AdmissionQueue | None:
        """Where calls wait for capacity for slots, None where nothing bounds them."""
        return self._catalog.admission_queue(self._slots.partition_id)

    def demand(self, prompt_count: int) -> Callable[[], Demand]:
        """Return what returns the demand of the slots of so many prompts."""
        return partial(demand_of_slots, self._slots, prompt_count, self._admit.slot_count)

    def make(self, rows: Indexes, capacity: WaitingWrite | None = None) -> None:
        """Make the slots of some prompts; `capacity`: that is held for them."""
        slots, queue = self._slots, self.queue
        write = self._write(slots, rows)
        if queue is not None and (capacity is None or not capacity.has_capacity):
            capacity = queue.enter_now(self._request.request_id, self.demand(rows.size))
        with capacity or nullcontext():
            make_slots(
                self._catalog,
                slots,
                write,
                task_name=self._request.task_name,
                request_id=self._request.request_id,
                lease=self._lease,
            )

    def _write(self, slots: Partition, rows: Indexes) -> SampleWrite:
        """Return the write that makes the slots of some prompts."""
        prompts, count = self._catalog.get(self._partition_id), self._admit.slot_count
        keys = prompts.key[prompts.positions_of(rows)].tolist()
        if None in keys:
            raise InvalidArgumentError(
                f"sample {int(rows[keys.index(None)])} of partition {self._partition_id!r} has no key, by which its "
                f"slots are named; put prompts with keys",
                field="admit",
            )
        known = slots.groups.slot_of.find(keys) if count > 1 else np.zeros(0, np.int64)
        if (known >= 0).any():
            name = keys[int(np.argmax(known >= 0))]
            raise AlreadyExistsError(
                f"partition {slots.partition_id!r} has a group {name!r}, expected none of the name of a prompt that "
                f"gets slots; clear its samples first",
                metadata={"resource_type": "group", "resource_name": name, "partition_id": slots.partition_id},
            )
        return SampleWrite(
            row_count=rows.size * count,
            keys=keys if count == 1 else None,
            key_mode="new",
            groups=None if count == 1 else [key for key in keys for _ in range(count)],
            group_size=0 if count == 1 else count,
            state=SampleState.HELD,
            is_of_slots=True,
            start_version=self._start_version(),
        )


def admitted_slots(catalog: Catalog, partition: Partition, task_name: str, claim: Claim) -> tuple[Partition, Claim]:
    """Return the slots that were made with a claim of prompts, and their partition.

    Raises:
        SamplesClearedError: some of them are gone.
    """
    name = "" if claim.lease is None else claim.lease.shared_with
    slots = catalog.find(name, missing_ok=True)
    task = None if slots is None else slots.tasks.get(task_name)
    made = None if task is None else task.claims.get(claim.request_id)
    if slots is None or task is None or made is None:
        raise SamplesClearedError(
            f"the slots of this claim of task {task_name!r} have been cleared since; release its prompts, and ask "
            f"again under a new request_id",
            metadata={
                "task_name": task_name,
                "next_batch_index": str(partition.tasks[task_name].next_batch_index),
            },
        )
    task.check_present(made.rows)
    return slots, made
