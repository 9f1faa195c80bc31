"""Slots: samples that are leased to rollout workers before generation.

Slots are created either separately or when prompts are claimed. Slots for prompts are created in the step that claims
the prompts. A waiting call reserves neither prompts nor slots. The call first waits for prompts. If the slots for these
prompts do not fit, the call waits in the admission queue of the slots' partition. Once the call has capacity, it
searches for prompts again. If no prompts are left, the call releases the capacity.
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
    """Return the policy version to record as the `start_version` of new slots, or None to record no version.

    Raises:
        PolicyNotFoundError: no version of the policy has been published.
        InvalidArgumentError: the partition's staleness limit applies to a different policy.
    """
    bounded = partition.settings.bounded_admission
    if bounded is not None and policy not in {"", bounded.policy}:
        raise InvalidArgumentError(
            f"policy is {policy!r}; expected {bounded.policy!r}, because max_staleness of task {bounded.task_name!r} "
            f"in partition {partition.partition_id!r} counts versions of that policy. Omit policy.",
            field="policy",
        )
    named = policy if bounded is None else bounded.policy
    return catalog.policy(named).version if named else None


def make_slots(
    catalog: Catalog, partition: Partition, write: SampleWrite, *, task_name: str, request_id: bytes, lease: LeaseTerms
) -> Claim:
    """Add slots to a partition and lease them to a worker, as part of the caller's group of changes.

    Raises:
        TqError: the partition rejected the slots and is unchanged, except that the task may have been added.
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
    """Serves prompt claims that also create slots for the claimed prompts; see `Admit`.

    Args:
        catalog: the controller's partitions.
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
        """Claim prompts once there is capacity for the requested slots; see `Catalog.claim`.

        Raises:
            PartitionNotFoundError, PolicyNotFoundError: the slots' partition or policy does not exist.
            AdmissionLimitError, QuotaExceededError: the slots would exceed the bounds even in an empty partition.
            AlreadyExistsError: samples or a group already have the name of one of the prompts.
            InvalidArgumentError: a prompt has no key, or the prompts and slots would be in the same partition.
        """
        admit, lease = request.spec.admit, request.lease
        if admit is None or lease is None:
            return await self._catalog.claim(partition_id, incarnation, request, max_wait_seconds, while_waiting)
        if admit.partition_id == partition_id:
            raise InvalidArgumentError(
                f"admit.partition_id is {partition_id!r}, the prompts' partition; expected a different partition",
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
                if error.retry_after_seconds is None or (queue := prompts.queue) is None:  # the slots can never fit
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
        """Return the answer that ends the task once no more slots can be created for its prompts."""
        partition = self._catalog.get(partition_id)
        task = self._catalog.task(partition, task_name)
        return Claimed(partition, EndCounts(consumed_count=task.consumed_count, kept_count=task.kept_count))

    @contextlib.contextmanager
    def _waiting(self, partition_id: str, request: ClaimRequest) -> Iterator[None]:
        """Include a claim in the list of waiting calls while it waits for capacity."""
        waits = self._catalog.capacity_waits
        waits[request.request_id] = partition_id, request
        try:
            yield
        finally:
            if waits.get(request.request_id, ("", None))[1] is request:
                del waits[request.request_id]


class _Prompts:
    """Creates slots for the prompts claimed by one call.

    Args:
        catalog: the controller's partitions.
        partition_id: name of the prompts' partition.
        request: claim for prompts.
        admit: specification of the slots to create.
        lease: terms of the lease on the prompts.
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
        """The admission queue of the slots' partition, or None if the partition is unbounded."""
        return self._catalog.admission_queue(self._slots.partition_id)

    def demand(self, prompt_count: int) -> Callable[[], Demand]:
        """Return a function that computes the demand for the slots of `prompt_count` prompts."""
        return partial(demand_of_slots, self._slots, prompt_count, self._admit.slot_count)

    def make(self, rows: Indexes, capacity: WaitingWrite | None = None) -> None:
        """Create slots for the given prompts, using any capacity that is already reserved for them."""
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
        """Return a write that creates the slots for the given prompts."""
        prompts, count = self._catalog.get(self._partition_id), self._admit.slot_count
        keys = prompts.key[prompts.positions_of(rows)].tolist()
        if None in keys:
            raise InvalidArgumentError(
                f"sample {int(rows[keys.index(None)])} of partition {self._partition_id!r} has no key; a prompt "
                f"needs a key, after which its slots are named. Pass keys when putting prompts.",
                field="admit",
            )
        known = slots.groups.find(keys) if count > 1 else np.zeros(0, np.int64)
        if (known >= 0).any():
            name = keys[int(np.argmax(known >= 0))]
            raise AlreadyExistsError(
                f"partition {slots.partition_id!r} already has a group named {name!r}, which is the key of a prompt "
                f"that needs slots. Clear the samples of this group first.",
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
    """Return the partition that contains a claim's slots, and the claim under which the slots are leased.

    Raises:
        SamplesClearedError: some of the claim's slots have been cleared.
    """
    name = "" if claim.lease is None else claim.lease.shared_with
    slots = catalog.find(name, missing_ok=True)
    task = None if slots is None else slots.tasks.get(task_name)
    made = None if task is None else task.claims.get(claim.request_id)
    if slots is None or task is None or made is None:
        raise SamplesClearedError(
            f"the slots created by this claim for task {task_name!r} have been cleared. Release the prompts, and "
            f"claim again with a new request_id.",
            metadata={
                "task_name": task_name,
                "next_batch_index": str(partition.tasks[task_name].next_batch_index),
            },
        )
    task.check_present(made.rows)
    return slots, made
