"""Calls of consumers: claim batches, manage the claims of queue workers, query consumption and production."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, get_args, overload

from tq_service.client._async.calls import AsyncBase
from tq_service.client.batch_meta import BatchMeta
from tq_service.client.requests import (
    GroupColumn,
    MetaGiven,
    NameColumn,
    SamplerGiven,
    check_leased,
    check_word,
    get_meta_request,
    held_samples,
    lease_duration,
    listed,
    not_zero,
    request_of,
    seconds,
    write_message,
    write_of,
)
from tq_service.client.transport import Deadline, WaitReports, import_tensordict, warn_of_wait
from tq_service.client_probes import Stage, collected_here, probes, step_report
from tq_service.errors import CallCancelledError, DeadlineError, InternalError, TqError, UnavailableError
from tq_service.results import ConsumptionStatus, EvictedUnits, ProductionStatus, WaitReason
from tq_service.schema import DEFAULT_POLICY, Admit, BatchUnit, OnLost, Unmatched, check_range
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import BATCH_STATUS_NOT_YET
from tq_service.wire.messages import read_message, read_seconds, to_duration, to_message

DEFAULT_MAX_WAIT_SECONDS: Final = 30.0
RELEASE_SECONDS: Final = 5.0

# After these errors, the server may have recorded a claim whose answer was lost.
_UNKNOWN_OUTCOMES: Final = (CallCancelledError, DeadlineError, InternalError, UnavailableError)


class AsyncClaimCalls(AsyncBase):
    """The part of the client for consumers. See `AsyncClient`."""

    @overload
    async def claim(
        self,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        batch_unit: BatchUnit = "sample",
        micro_batch_size: int | None = None,
        sampler: SamplerGiven | None = None,
        sampler_config: Mapping[str, Any] | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        batch_index: int | None = None,
        batch_count: None = None,
        drop_last: bool = False,
        where: Iterable[tuple[str, str, Any]] = (),
        order_by: Iterable[str] = (),
        finite: bool = False,
        incarnation: bytes = b"",
        epoch: int | None = None,
        lease: float | None = None,
        max_deliveries: int | None = None,
        claim_name: str | None = None,
        max_uses: int | None = None,
        unmatched: Unmatched = "wait",
        least_members: int | None = None,
        refill: tuple[str, str] | None = None,
        max_refills: int = 3,
        totals: Sequence[str] = (),
        held: bool = False,
        admit: Admit | None = None,
        not_before_version: int | None = None,
        policy: str = DEFAULT_POLICY,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        explain: bool | None = None,
        on_wait: Callable[[WaitReason], object] | None = None,
        timeout: float | None = None,
    ) -> BatchMeta: ...

    @overload
    async def claim(
        self,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        *,
        batch_size: int,
        batch_unit: BatchUnit = "sample",
        micro_batch_size: int | None = None,
        sampler: SamplerGiven | None = None,
        sampler_config: Mapping[str, Any] | None = None,
        dp_rank: int,
        dp_size: int,
        batch_index: int,
        batch_count: int,
        drop_last: bool = False,
        where: Iterable[tuple[str, str, Any]] = (),
        order_by: Iterable[str] = (),
        finite: bool = False,
        incarnation: bytes = b"",
        epoch: int | None = None,
        max_uses: int | None = None,
        unmatched: Unmatched = "wait",
        least_members: int | None = None,
        refill: tuple[str, str] | None = None,
        max_refills: int = 3,
        totals: Sequence[str] = (),
        not_before_version: int | None = None,
        policy: str = DEFAULT_POLICY,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        explain: bool | None = None,
        on_wait: Callable[[WaitReason], object] | None = None,
        timeout: float | None = None,
    ) -> list[BatchMeta]: ...

    async def claim(
        self,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        batch_unit: BatchUnit = "sample",
        micro_batch_size: int | None = None,
        sampler: SamplerGiven | None = None,
        sampler_config: Mapping[str, Any] | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        batch_index: int | None = None,
        batch_count: int | None = None,
        drop_last: bool = False,
        where: Iterable[tuple[str, str, Any]] = (),
        order_by: Iterable[str] = (),
        finite: bool = False,
        incarnation: bytes = b"",
        epoch: int | None = None,
        lease: float | None = None,
        max_deliveries: int | None = None,
        claim_name: str | None = None,
        max_uses: int | None = None,
        unmatched: Unmatched = "wait",
        least_members: int | None = None,
        refill: tuple[str, str] | None = None,
        max_refills: int = 3,
        totals: Sequence[str] = (),
        held: bool = False,
        admit: Admit | None = None,
        not_before_version: int | None = None,
        policy: str = DEFAULT_POLICY,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        explain: bool | None = None,
        on_wait: Callable[[WaitReason], object] | None = None,
        timeout: float | None = None,
    ) -> BatchMeta | list[BatchMeta]:
        """Claim a batch: as a trainer rank if `dp_rank`, `dp_size` and `batch_index` are given, else as a queue worker.

        A rank that repeats the call gets the same answer. A queue worker's claim is released when its call is cancelled
        or times out, unless the claim is named.

        Args:
            partition_id: the partition; the call waits for it if it does not exist yet.
            task_name: the consumer.
            data_fields: fields that make a sample ready.
            batch_size: number of samples, rollouts or groups per rank.
            min_batch_size: queue workers: minimum batch size; None: `batch_size`.
            batch_unit: the unit of both: "sample", "rollout" or "group".
            micro_batch_size: samples per micro-batch; None: the batch is one micro-batch.
            sampler: the sampler, by name or as an object with its options, such as
                `tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=8)`; None: "sequential".
            sampler_config: options of a sampler that is given by name.
            dp_rank: this rank.
            dp_size: number of ranks.
            batch_index: index of the batch, counted from 0 in the epoch.
            batch_count: ranks: maximum number of batches, 1 to 64: the batch at `batch_index`, and the following ones
                that are ready at that moment. None: one batch. A batch claimed early cannot include later samples, so
                request only batches that will be used soon.
            drop_last: whether to drop a short last batch.
            where: conditions `(column, operator, value)` on custom_meta; a sample must satisfy all of them. Operators
                are ==, !=, <, <=, >, >= and "in" with a list of values. <, <=, > and >= take a `Published` too.
            order_by: custom_meta columns to order ready samples by; "-column" for largest first.
            finite: also end when every sample inserted so far is consumed, without waiting for the seal.
            incarnation: expected incarnation of the partition; empty: any.
            epoch: expected epoch of the task, which counts its resets; None: any.
            lease: queue workers: seconds within which the samples must be acknowledged (`ack`), at most a day; after
                that, other workers can claim unacknowledged samples. None: samples are done once delivered.
            max_deliveries: with a lease: deliveries after which a sample that was never acknowledged in time is
                dead-lettered: not delivered again in this epoch, and counted as skipped. None: unlimited.
            claim_name: queue workers: a name for the claim, such as "rank0/batch3". The first call with this name
                claims the next samples. All calls with it, from any process, get the same answer until the epoch of
                the task ends. Their arguments must be the same.
            max_uses: how often a sample is delivered to the task before it counts as consumed; until then it stays
                ready for later batches. With a lease a delivery counts once it is acknowledged. None: set by the
                sampler, else once.
            unmatched: handling of samples that `where` excludes. "wait": they stay. "fail" or "clear": they are
                evicted, with or without a batch: failed or cleared for all tasks. Samplers that keep groups together
                evict entire groups. Samples that are held, leased or delivered stay, and so do groups with such a
                member.
            least_members: a complete group with fewer members left, because others failed or were cleared, is evicted
                too. Needs `unmatched` "fail" or "clear". None: no group is too small.
            refill: `(partition_id, task_name)` that regenerates evicted units, such as the prompts and the
                rollout task. The sample there whose key is the name of an evicted group, or the key of a sample evicted
                alone, becomes claimable for the task again, in the same change. `take_evicted` returns the outcome.
            max_refills: maximum number of refills of each sample per epoch of that task.
            totals: ranks: numeric custom_meta columns, at most 4, whose sums over all ranks are returned in
                `BatchMeta.totals`; each sample of the batch needs a value.
            held: rollout workers, with a `lease`: whether to claim held samples instead of live ones: slots that other
                workers have lost. `data_fields` may be empty then.
            admit: rollout workers, with a `lease`: slots to create in another partition with the claim, in one change;
                returned in `BatchMeta.admitted`. The call waits until there are prompts, which need keys, and capacity
                for the slots of `min_batch_size` of them. Prompts and slots share the lease: `extend` of either extends
                both. A prompt is acknowledged with the last of its slots; `release` of a prompt removes its slots.
            not_before_version: version of `policy` that must be published before the batch is planned. Until then the
                call waits, as for missing samples. None: any.
            policy: the policy of `not_before_version`, in the client's namespace.
            max_wait: seconds to wait for a batch before the answer is "not_yet".
            explain: whether "not_yet" includes its reason (`BatchMeta.reason` and `waiting_for`); the service scans all
                samples of the partition for it. None: after a wait of 10 s or more.
            on_wait: called with the reason while the call keeps waiting, after 10 s and then every minute, unless
                `explain` is False. An exception from it ends the call. None: a warning is logged.
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Returns:
            The batch; check its `status` first: "batch", "not_yet" or "end". With `batch_count`, a non-empty list:
            batches in order, possibly with the "end" as the last; or only "not_yet".

        Raises:
            InvalidArgumentError: an argument is invalid; also MissingLengthError.
            PreconditionError: the arguments of ranks, or of calls with one `claim_name`, differ; the partition was
                cleared; or the incarnation or epoch is stale.
            LeaseExpiredError: a retry, or a call with the same `claim_name`, came after the lease of the first answer
                expired. ClaimReleasedError, SamplesClearedError: after its samples were released or cleared.
            PartitionNotFoundError, PolicyNotFoundError, AdmissionLimitError, AlreadyExistsError: with `admit`, see
                `acquire`; the last one also if a group already has the name of a prompt. No prompt is claimed.
            BatchForgottenError: only the latest batches that do not consume their samples are kept on record.
            TaskNotFoundError: the partition was created for other tasks.
            SamplerError: the sampler failed; SamplerTimeoutError: it hung.
        """
        request = get_meta_request(
            partition_id=self._namespace.full_name(partition_id),
            task_name=task_name,
            data_fields=data_fields,
            batch_size=batch_size,
            min_batch_size=min_batch_size,
            batch_unit=batch_unit,
            micro_batch_size=micro_batch_size,
            sampler=sampler,
            sampler_config=sampler_config,
            dp_rank=dp_rank,
            dp_size=dp_size,
            batch_index=batch_index,
            drop_last=drop_last,
            where=where,
            order_by=order_by,
            finite=finite,
            incarnation=incarnation,
            epoch=epoch,
            lease=lease,
            max_deliveries=max_deliveries,
            claim_name=claim_name,
            max_uses=max_uses,
            unmatched=unmatched,
            least_members=least_members,
            refill=refill,
            max_refills=max_refills,
            totals=totals,
            held=held,
            admit=admit,
            batch_count=batch_count,
            not_before_version=not_before_version,
            policy=policy,
            namespace=self._namespace,
        )
        take_steps = None if dp_rank is None else step_report.get()
        if take_steps is not None and (steps := take_steps()) is not None:
            request.step_times.CopyFrom(to_message(pb.StepTimes, steps))
        if lease is not None:
            import_tensordict()  # otherwise the first `get_data` of the process would spend lease time on it
        is_queue = dp_rank is None and dp_size is None and batch_index is None
        wait, began_at = seconds("max_wait", max_wait), time.perf_counter()
        try:
            answer = await self._poll(request, wait, self._deadline(timeout, wait), explain, on_wait)
        except BaseException as error:
            if is_queue and not claim_name and (isinstance(error, _UNKNOWN_OUTCOMES) or not isinstance(error, TqError)):
                self._background_calls.run(lambda: self._release(request))
            raise
        claim_id = answer.meta.claim_request_id or (request.request_id if is_queue else b"")
        meta = BatchMeta.from_proto(
            answer.meta,
            self._namespace,
            claim_id=claim_id,
            task_name=request.task_name,
            waiting_for=read_message(WaitReason, answer.reason) if answer.HasField("reason") else None,
            admitted=BatchMeta.from_proto(
                answer.admitted, self._namespace, claim_id=claim_id, task_name=request.task_name
            )
            if answer.HasField("admitted")
            else None,
        )
        for probe in probes:
            probe.claimed(time.perf_counter() - began_at, meta.status)
        if batch_count is None:
            return meta
        more = (BatchMeta.from_proto(each, self._namespace, task_name=request.task_name) for each in answer.more)
        return [meta, *more]

    get_meta = claim
    """The name that TransferQueue has for `claim`."""

    async def _poll(
        self,
        request: pb.GetMetaRequest,
        wait_seconds: float,
        deadline: Deadline,
        explain: bool | None,
        on_wait: Callable[[WaitReason], object] | None,
    ) -> pb.GetMetaResponse:
        """Poll until there is an answer or the wait is spent: the server may cap how long one call waits."""
        wait, reports = Deadline.after(wait_seconds), WaitReports()
        tell = on_wait or warn_of_wait

        async def attempt(max_wait: float) -> pb.GetMetaResponse:
            if explain is not False:
                max_wait = min(max_wait, reports.seconds_left())
            request.max_wait.CopyFrom(to_duration(max_wait))
            request.explain = reports.lasts_after(max_wait) if explain is None else explain
            began_at = time.perf_counter()
            answer = await self._calls.unary_once(pb.GetMetaResponse, request, deadline)
            if (collected := collected_here.get()) is not None:
                is_over, ended_at = answer.meta.status != BATCH_STATUS_NOT_YET, time.perf_counter()
                waited_until = min(began_at + read_seconds("waited", answer.waited), ended_at) if is_over else ended_at
                collected.note(Stage.ROLLOUTS, began_at, waited_until)
                collected.note(Stage.PLAN, waited_until, ended_at, is_call=is_over)
            # When the wait is spent, the caller gets the reason with the answer.
            if explain is not False and answer.HasField("reason") and reports.is_due_after(0) and wait.remaining():
                reports.made()
                tell(read_message(WaitReason, answer.reason))
            return answer

        return await self._calls.polled(
            attempt, lambda answer: answer.meta.status == BATCH_STATUS_NOT_YET, wait, deadline
        )

    async def explain(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> list[WaitReason]:
        """Return why claims of a partition wait: one reason for all calls with the same arguments.

        Args:
            partition_id: the partition; it may be one that does not exist yet and is waited for.
            task_name: claims of this task only; None: of all tasks.
            timeout: seconds until the call fails; None: the client's.
        """
        answer = await self._ask(
            pb.ExplainResponse,
            timeout,
            partition_id=partition_id,
            task_name=task_name or "",
        )
        return [read_message(WaitReason, reason) for reason in answer.reasons]

    async def acquire(
        self,
        partition_id: str,
        task_name: str,
        count: int | None = None,
        *,
        keys: NameColumn | None = None,
        groups: Iterable[str] | None = None,
        group_size: int = 1,
        rollouts: GroupColumn | None = None,
        custom_meta: MetaGiven | None = None,
        lease: float,
        on_lost: OnLost = "requeue",
        policy: str | None = None,
        holding: BatchMeta | None = None,
        ack: bool = False,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Create slots before samples are generated: held samples without data, leased to this worker.

        Slots count towards the admissions of their partition and wait for capacity in order of arrival, as puts of new
        samples do. Put the data with `put(slots, data, ack=True)`, which makes them live. Extend the lease for
        long work. Slots that are released without data are removed. A call that fails or is cancelled may have created
        slots; they are lost when their lease expires.

        Args:
            partition_id: the partition, which must exist.
            task_name: the task of the rollout workers.
            count: number of slots; None: as many as `keys`, `groups`, `rollouts` or `custom_meta` have, else 1.
            keys: unique keys, one per slot.
            groups: names of new groups; all `group_size` members of each are created.
            group_size: members of each group.
            rollouts: the rollout of each slot, see `put`, in the order of the members of `groups`. Without `groups`,
                slots of existing rollouts join the groups of those rollouts.
            custom_meta: custom_meta of each slot, see `put`.
            lease: seconds until slots that are still held are lost, at most a day.
            on_lost: handling of lost slots. "requeue": workers claim them with `get_meta(held=True)` and continue from
                their data; "fail" or "remove".
            policy: the published version of this policy becomes `start_version` in the custom_meta of the slots. None:
                the policy of the admission with a `max_staleness`; without one, no `start_version` is set.
            holding: samples of a leased claim of this worker, such as the current turn of the rollout that the slots
                continue, or their prompt. No slots are created if the worker has lost them.
            ack: whether to acknowledge the samples of `holding` in the same change: a prompt is done once it has
                slots.
            max_wait: seconds to wait for capacity before the answer is "not_yet".
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Returns:
            The slots as a leased batch; check its `status` first: "batch", "not_yet", or "end" if the partition is
            sealed.

        Raises:
            PartitionNotFoundError, TaskNotFoundError: the partition does not exist, or was created for other tasks.
            PolicyNotFoundError: the policy lacks a published version.
            AlreadyExistsError: a key exists already.
            LeaseExpiredError, SampleNotFoundError: the samples of `holding` were lost or cleared.
            AdmissionLimitError: more slots than may ever be outstanding.
            InvalidArgumentError: an argument is invalid.
        """
        check_word("on_lost", on_lost, get_args(OnLost))
        names = None if groups is None else listed("groups", groups)
        if names is not None:
            check_range("group_size", group_size, 1)
            names = [name for name in names for _ in range(group_size)]
        if count is None and keys is None and names is None and rollouts is None and custom_meta is None:
            count = 1
        write = write_of(
            self._namespace,
            target=partition_id,
            row_count=len(names) if count is None and names is not None else count,
            keys=keys,
            groups=names,
            group_size=None if names is None else group_size,
            rollouts=rollouts,
            custom_meta=custom_meta,
        )
        request = request_of(
            pb.AcquireRequest,
            write=write_message([write]),
            task_name=task_name,
            lease=lease_duration(lease),
            on_lost=on_lost,
            policy="" if policy is None else self._namespace.full_name(policy),
            holding=None if holding is None else held_samples(holding),
            ack=ack,
        )
        wait_seconds = seconds("max_wait", max_wait)
        wait, deadline = Deadline.after(wait_seconds), self._deadline(timeout, wait_seconds)

        async def attempt(max_wait: float) -> pb.AcquireResponse:
            request.max_wait.CopyFrom(to_duration(max_wait))
            return await self._calls.unary_once(pb.AcquireResponse, request, deadline)

        answer = await self._calls.polled(
            attempt, lambda answer: answer.meta.status == BATCH_STATUS_NOT_YET, wait, deadline
        )
        return BatchMeta.from_proto(
            answer.meta, self._namespace, claim_id=answer.meta.claim_request_id, task_name=task_name
        )

    async def _release(self, claim: pb.GetMetaRequest) -> None:
        if self._calls.closed:
            return  # the service sees that this client has left
        request = request_of(
            pb.ReleaseClaimRequest,
            partition_id=claim.partition_id,
            task_name=claim.task_name,
            claim_request_id=claim.request_id,
        )
        deadline = Deadline.after(RELEASE_SECONDS)
        await self._calls.unary_once(pb.ReleaseClaimResponse, request, deadline, is_retried=False)

    async def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> int:
        """Acknowledge leased samples: their work is done, and they are not delivered again even if the lease expires.

        Put the results first; `put(..., ack=True)` does both in one change. Samples that were already acknowledged, or
        have since failed or been cleared, are accepted.

        Args:
            metadata: the batch returned by `get_meta(lease=...)`, or a part of it (`select_samples`, `chunk`). If the
                batch has complete groups, the part must too.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples acknowledged by this call.

        Raises:
            LeaseExpiredError: some of the samples (the message names them) are no longer leased to this worker, and
                others may do the same work; none is acknowledged.
            InvalidArgumentError: `metadata` is not one leased claim, or splits a group.
            PartitionNotFoundError: the partition was cleared.
            StaleIncarnationError: the partition was cleared and created again.
        """
        check_leased(metadata)
        return await self._ack(metadata, timeout)

    async def extend(self, metadata: BatchMeta, lease: float, *, timeout: float | None = None) -> int:
        """Extend the lease of a claim. Samples that were acknowledged or released are not affected.

        Args:
            metadata: the batch returned by `get_meta(lease=...)`, or a part of it: the entire claim is extended.
            lease: seconds from now; may be less than the time left.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of leased samples.

        Raises:
            LeaseExpiredError: the lease has already expired.
            PreconditionError: no samples of the claim are left.
            InvalidArgumentError: `metadata` is not one leased claim, or `lease` is not a positive number of seconds.
            PartitionNotFoundError: the partition was cleared.
            StaleIncarnationError: the partition was cleared and created again.
        """
        check_leased(metadata)
        answer = await self._ask(
            pb.ExtendClaimResponse,
            timeout,
            batch=metadata,
            task_name=metadata.task_name,
            claim_request_id=metadata.claim_id,
            incarnation=metadata.incarnation,
            lease=lease_duration(lease),
        )
        return answer.leased_count

    async def release(self, metadata: BatchMeta, *, timeout: float | None = None) -> int:
        """Release samples that a queue worker claimed and will not process: they can be claimed again at once.

        A released delivery does not count towards `max_deliveries`. Samples that were already acknowledged, released,
        cleared or reset are ignored.

        Args:
            metadata: the batch returned by `get_meta`; of a leased batch also a part. If the batch has complete
                groups, the part must too.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that can be claimed again; 0 if `metadata` is not a claim of a queue worker.

        Raises:
            LeaseExpiredError: the lease of some of the samples has expired; none is released.
            InvalidArgumentError: `metadata` is a part of a claim without a lease, or splits a group.
        """
        if not metadata.claim_id or not metadata.size:
            return 0
        answer = await self._ask(
            pb.ReleaseClaimResponse,
            timeout,
            batch=metadata,
            task_name=metadata.task_name,
            claim_request_id=metadata.claim_id,
            global_indexes=metadata.handled_indexes,
        )
        return answer.released_count

    async def check_consumption(
        self, partition_id: str, task_name: str, *, missing_ok: bool = False, timeout: float | None = None
    ) -> ConsumptionStatus:
        """Return how many samples a task has consumed, and whether any are left for it.

        Args:
            partition_id: the partition.
            task_name: the consumer.
            missing_ok: whether to treat a missing partition as empty, and a task that has not claimed yet as having
                consumed nothing.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PartitionNotFoundError: the partition does not exist, unless `missing_ok`.
            TaskNotFoundError: the task has not claimed anything yet, unless `missing_ok`; or the partition was
                created for other tasks.
        """
        answer = await self._ask(
            pb.CheckConsumptionResponse,
            timeout,
            partition_id=partition_id,
            task_name=task_name,
            missing_ok=missing_ok,
        )
        return read_message(ConsumptionStatus, answer)

    async def check_production(
        self,
        partition_id: str,
        data_fields: Sequence[str],
        *,
        missing_ok: bool = False,
        timeout: float | None = None,
    ) -> ProductionStatus:
        """Return how many samples have all of these fields.

        Args:
            partition_id: the partition.
            data_fields: the fields, at least one.
            missing_ok: whether to treat a missing partition as empty, and a missing field as one that no sample has.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PartitionNotFoundError: the partition does not exist, unless `missing_ok`.
            FieldNotFoundError: the field does not exist, unless `missing_ok`.
        """
        answer = await self._ask(
            pb.CheckProductionResponse,
            timeout,
            partition_id=partition_id,
            data_fields=data_fields,
            missing_ok=missing_ok,
        )
        return read_message(ProductionStatus, answer)

    async def reset_consumption(
        self,
        partition_id: str,
        task_name: str,
        epoch: int | None = None,
        *,
        keep_consumed: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Start the next epoch of a task: its samples can be claimed again, and batches are counted from 0.

        Args:
            partition_id: the partition.
            task_name: the consumer.
            epoch: the epoch to end: if many ranks pass it, the task is reset once. None: the current one; every call
                ends an epoch, also when it is retried.
            keep_consumed: keep samples consumed, and only count batches from 0 again.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The new epoch.

        Raises:
            StaleEpochError: the task is at another epoch.
            PartitionNotFoundError: the partition does not exist.
            TaskNotFoundError: the task has not claimed anything yet.
        """
        answer = await self._ask(
            pb.ResetConsumptionResponse,
            timeout,
            partition_id=partition_id,
            task_name=task_name,
            epoch=epoch,
            keep_consumed=keep_consumed,
        )
        return answer.epoch

    async def take_evicted(
        self,
        partition_id: str,
        task_name: str,
        after: int = 0,
        limit: int = 1024,
        *,
        incarnation: bytes = b"",
        timeout: float | None = None,
    ) -> EvictedUnits:
        """Return units that claims of a task have evicted (`get_meta(unmatched=)`), to replace them.

        The newest 65,536 are kept. Call again with the serial of the last unit until the answer is empty.

        Args:
            partition_id: the partition.
            task_name: the task.
            after: serial of the last known unit; 0: start with the first.
            limit: maximum number of units in the answer, 1 to 1,024; very long names may reduce it.
            incarnation: expected incarnation of the partition; empty: any. Serials restart with each incarnation.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            InvalidArgumentError: a number is out of its range.
            PartitionNotFoundError, TaskNotFoundError: the partition or task does not exist.
            StaleIncarnationError: the partition was cleared and created again.
        """
        answer = await self._ask(
            pb.TakeEvictedResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
            task_name=task_name,
            after=after,
            limit=not_zero("limit", limit),
        )
        return read_message(EvictedUnits, answer)

    async def requeue_dead_lettered(
        self,
        partition_id: str,
        task_name: str,
        global_indexes: Iterable[int] | None = None,
        *,
        incarnation: bytes = b"",
        timeout: float | None = None,
    ) -> int:
        """Deliver dead-lettered samples of a task again, with their delivery count reset.

        Args:
            partition_id: the partition.
            task_name: the consumer that dead-lettered them.
            global_indexes: samples, of these only dead-lettered ones; None: all dead-lettered samples.
            incarnation: expected incarnation of the partition; empty: any.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that can be claimed again.

        Raises:
            PreconditionError: the ranks of the task have reached the end; `reset_consumption(keep_consumed=True)`
                delivers its dead-lettered samples again.
            PartitionNotFoundError: the partition does not exist.
            TaskNotFoundError: the task has not claimed anything yet.
            StaleIncarnationError: the partition was cleared and created again.
        """
        named = None if global_indexes is None else listed("global_indexes", global_indexes)
        if named is not None and not named:  # an empty list in the request means all
            return 0
        answer = await self._ask(
            pb.RequeueDeadLetteredResponse,
            timeout,
            partition_id=partition_id,
            incarnation=incarnation,
            task_name=task_name,
            global_indexes=named,
        )
        return answer.requeued_count
