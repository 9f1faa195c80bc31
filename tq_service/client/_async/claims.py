"""Consumer calls: claim batches, manage the claims of queue workers, and query consumption and production."""

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

# After one of these errors, the server may have recorded a claim although the client received no response.
_UNKNOWN_OUTCOMES: Final = (CallCancelledError, DeadlineError, InternalError, UnavailableError)


class AsyncClaimCalls(AsyncBase):
    """The client's consumer calls. See `AsyncClient`."""

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
        """Claim a batch as a trainer rank (with `dp_rank`, `dp_size` and `batch_index`) or as a queue worker.

        If a rank repeats the call, the rank receives the same batch again. If a queue worker's call is cancelled or
        times out, the claim is released unless it has a `claim_name`.

        Args:
            partition_id: the partition. If the partition does not exist yet, the call waits until it is created.
            task_name: the task that consumes the samples.
            data_fields: fields that a sample must have before it can be claimed.
            batch_size: number of samples, rollouts or groups per rank.
            min_batch_size: minimum batch size, for queue workers. Defaults to `batch_size`.
            batch_unit: the unit of `batch_size` and `min_batch_size`: "sample", "rollout" or "group".
            micro_batch_size: number of samples per micro-batch. By default, each batch is one micro-batch.
            sampler: the sampler, as a name or as an object with options, such as
                `tq.samplers.SeqlenBalancedSampler(n_samples_per_prompt=8)`. Defaults to "sequential".
            sampler_config: options of the sampler, if `sampler` is a name.
            dp_rank: the data-parallel rank of the caller.
            dp_size: number of data-parallel ranks.
            batch_index: index of the batch, starting at 0 in each epoch.
            batch_count: for ranks, the maximum number of batches to claim, from 1 to 64. The call claims the batch at
                `batch_index` and any subsequent batches that are ready. If None, the call claims and returns a single
                batch. A batch claimed early cannot include samples that arrive later, so claim only batches that will
                be used soon.
            drop_last: whether to drop the last batch if it is incomplete.
            where: conditions `(column, operator, value)` on custom_meta. Only samples that satisfy all conditions are
                claimed. The operators are ==, !=, <, <=, >, >= and "in" (with a list of values). With <, <=, > and >=,
                the value can also be a `Published` object.
            order_by: custom_meta columns used to sort the ready samples. "-column" sorts in descending order.
            finite: whether to return the status "end" when all samples inserted so far are consumed, even if the
                partition is not sealed.
            incarnation: expected incarnation of the partition. An empty value accepts any incarnation.
            epoch: expected epoch of the task. Each reset starts a new epoch. If None, any epoch is accepted.
            lease: for queue workers, the lease duration in seconds, up to one day. When the lease expires, other
                workers can claim the samples that have not been acknowledged. See `ack`. If None, samples are consumed
                when they are delivered.
            max_deliveries: with `lease`, the number of deliveries after which an unacknowledged sample is
                dead-lettered. A dead-lettered sample is not delivered again in this epoch, and counts as skipped.
                Unlimited by default.
            claim_name: for queue workers, a name for the claim, such as "rank0/batch3". The first call with a name
                claims the next samples. Until the task's epoch ends, further calls with this name from any process
                return the same samples. All calls with the same name must pass the same arguments.
            max_uses: number of deliveries to the task after which a sample is consumed. Until then, later batches may
                include the sample again. With a lease, only acknowledged deliveries count. Defaults to the sampler's
                setting, or to 1.
            unmatched: how to handle samples that do not satisfy `where`. "wait" leaves these samples in the partition.
                "fail" and "clear" evict them: the samples are marked as failed or cleared for all tasks, even if no
                batch is returned. Samplers that keep groups together evict entire groups. Samples that are held, leased
                or delivered, and groups that contain one of them, are never evicted.
            least_members: minimum number of members that a complete group must still have after others have failed or
                been cleared. Groups with fewer members are also evicted. Requires `unmatched="fail"` or `"clear"`. By
                default, there is no minimum.
            refill: `(partition_id, task_name)` of the task that regenerates evicted units, for example a prompt
                partition and its rollout task. Each eviction makes one sample claimable again for this task. This
                sample's key is the name of the evicted group, or the key of the evicted sample. `take_evicted` returns
                the outcome of each refill.
            max_refills: maximum number of times that each sample can become claimable again in one epoch of the
                regenerating task.
            totals: for ranks, up to 4 numeric custom_meta columns to sum over the batches of all ranks. Every sample in
                the batch must have a value in each of these columns. See `BatchMeta.totals`.
            held: for rollout workers that pass `lease`, whether to claim held samples (slots lost by other workers)
                instead of live samples. With `held`, `data_fields` may be empty.
            admit: the slots to create in another partition, atomically with the claim. Intended for rollout workers
                that pass `lease`. The slots are returned in `BatchMeta.admitted`. The call waits until prompts with
                keys are ready and there is capacity for the slots of `min_batch_size` prompts. Prompts and slots share
                one lease, so extending the lease of one also extends that of the other. A prompt is acknowledged
                together with its last slot. Releasing a prompt removes its slots.
            not_before_version: version of `policy` that must be published before the batch is planned. The call waits
                for this version in the same way as it waits for samples. If None, the call does not wait for a version.
            policy: name of the policy to which `not_before_version` refers, within the client's namespace.
            max_wait: maximum time to wait for a batch, in seconds. After this time, the status is "not_yet".
            explain: whether to include the reason for waiting (`BatchMeta.reason` and `waiting_for`) in a result with
                the status "not_yet". To determine the reason, the service scans all samples of the partition. If None,
                the reason is included only after a wait of 10 s or more.
            on_wait: function to call with the reason for the wait, first after 10 s and then every minute. The function
                is not called if `explain` is False. An exception raised by the function ends the call. By default, a
                warning is logged.
            timeout: seconds until the call fails, in addition to `max_wait`. Defaults to the client's `timeout`.

        Returns:
            The batch. Before using the batch, check its `status`, which is "batch", "not_yet" or "end". With
            `batch_count`, the result is a list of one or more batches in order. If the task reaches its end within
            these batches, the last batch has the status "end". If no batch is ready, the list contains a single batch
            with the status "not_yet".

        Raises:
            InvalidArgumentError, MissingLengthError: an argument is invalid, or a sample does not have the length that
                the sampler needs.
            PreconditionError: the arguments differ between ranks, or between calls with the same `claim_name`. Also
                raised if the partition was cleared, or if the incarnation or epoch is stale.
            LeaseExpiredError: the call is a retry or repeats a `claim_name`, and the lease granted to the first call
                has expired.
            ClaimReleasedError, SamplesClearedError: the call is a retry or repeats a `claim_name`, and the samples
                claimed by the first call were released or cleared.
            PartitionNotFoundError, PolicyNotFoundError, AdmissionLimitError, AlreadyExistsError: raised with `admit`,
                for the same reasons as in `acquire`. AlreadyExistsError is also raised if a group with the name of a
                prompt already exists. After any of these errors, no prompt is claimed.
            BatchForgottenError: the batch is too old. If batches do not consume their samples, the service stores only
                the latest batches.
            TaskNotFoundError: the partition was created with a list of tasks that omits this task.
            SamplerError: the sampler failed.
            SamplerTimeoutError: the sampler did not return in time.
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
            import_tensordict()  # otherwise the first `get_data` would spend lease time on the import
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
    """Alias of `claim`, with the name that TransferQueue uses."""

    async def _poll(
        self,
        request: pb.GetMetaRequest,
        wait_seconds: float,
        deadline: Deadline,
        explain: bool | None,
        on_wait: Callable[[WaitReason], object] | None,
    ) -> pb.GetMetaResponse:
        """Repeat the call until a batch is available or `max_wait` has passed, and return the response.

        The server may limit how long each call waits, so several calls may be needed.
        """
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
            # After the wait, the response itself contains the reason, so the reason is not reported here.
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
        """Return the reasons why claims on a partition are waiting. Calls with equal arguments share one reason.

        Args:
            partition_id: the partition, which need not exist yet.
            task_name: the task whose claims to explain. Defaults to all tasks.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.
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
        """Create slots for samples to be generated. A slot is a held sample without data that is leased to this worker.

        Slots count toward the admission limits of their partition. Requests for slots wait for capacity in order of
        arrival, together with puts of new samples. To fill the slots, call `put(slots, data, ack=True)`, which makes
        them live. If generation takes longer than the lease, extend the lease before it expires. Releasing a slot
        without data removes the slot. A call that fails or is cancelled may have created slots. These slots are lost
        when their lease expires.

        Args:
            partition_id: the partition, which must exist.
            task_name: the task that the rollout workers run.
            count: number of slots. Defaults to the length of `keys`, `rollouts` or `custom_meta`, to the number of
                `groups` times `group_size`, or to 1.
            keys: unique keys, one per slot.
            groups: names of new groups. `group_size` slots are created per group.
            group_size: number of members per group.
            rollouts: the rollout of each slot (see `put`), in the same order as the members of `groups`. Without
                `groups`, a slot of an existing rollout joins that rollout's group.
            custom_meta: custom_meta values of each slot, in the same form as for `put`.
            lease: lease duration in seconds, up to one day. Slots still held when the lease expires are lost.
            on_lost: how to handle lost slots. "requeue" lets other workers claim the slots with `claim(held=True)` and
                continue from the slots' data. "fail" marks the slots as failed. "remove" removes the slots.
            policy: the policy whose published version is stored as `start_version` in the custom_meta of the slots.
                Defaults to the policy of the partition's `Admission` that sets `max_staleness`. If no `Admission` sets
                `max_staleness`, `start_version` is not set.
            holding: samples from one of this worker's leased claims, for example the prompt of the slots or the rollout
                turn that the slots continue. If the worker has lost its lease on these samples, no slots are created.
            ack: whether to acknowledge the samples of `holding` atomically with the creation of the slots. Use this
                option if, for example, a prompt is finished once its slots exist.
            max_wait: maximum time to wait for capacity, in seconds. After this time, the status is "not_yet".
            timeout: seconds until the call fails, in addition to `max_wait`. Defaults to the client's `timeout`.

        Returns:
            A leased batch that contains the slots. Before using the batch, check its `status`, which is "batch",
            "not_yet", or "end" if the partition is sealed.

        Raises:
            PartitionNotFoundError: the partition does not exist.
            TaskNotFoundError: the partition was created with a list of tasks that omits this task.
            PolicyNotFoundError: the policy has no published version.
            AlreadyExistsError: a key already exists.
            LeaseExpiredError, SampleNotFoundError: the lease on the samples in `holding` was lost, or the samples were
                cleared.
            AdmissionLimitError: the number of slots exceeds the limit on outstanding slots.
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
            return  # the service notices that this client has disconnected
        request = request_of(
            pb.ReleaseClaimRequest,
            partition_id=claim.partition_id,
            task_name=claim.task_name,
            claim_request_id=claim.request_id,
        )
        deadline = Deadline.after(RELEASE_SECONDS)
        await self._calls.unary_once(pb.ReleaseClaimResponse, request, deadline, is_retried=False)

    async def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> int:
        """Acknowledge leased samples. The samples are then consumed, and are not redelivered when the lease expires.

        Put the results first, or use `put(..., ack=True)` to do both atomically. Samples that have already been
        acknowledged, marked as failed or cleared are ignored.

        Args:
            metadata: the batch returned by `claim(lease=...)`, or part of that batch (`select_samples`, `chunk`). If
                the batch consists of complete groups, a part must not split a group.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples acknowledged by this call.

        Raises:
            LeaseExpiredError: some samples are no longer leased to this worker, so other workers may also process them.
                The error message names these samples. No sample is acknowledged.
            InvalidArgumentError: `metadata` does not belong to a single leased claim, or splits a group.
            PartitionNotFoundError: the partition was cleared.
            StaleIncarnationError: the partition was cleared and created again.
        """
        check_leased(metadata)
        return await self._ack(metadata, timeout)

    async def extend(self, metadata: BatchMeta, lease: float, *, timeout: float | None = None) -> int:
        """Extend the lease of a claim. Acknowledged and released samples are not affected.

        Args:
            metadata: the batch returned by `claim(lease=...)`, or part of that batch. In either case, the lease of the
                entire claim is extended.
            lease: new lease duration, in seconds from now. The new lease may end earlier than the current lease.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples that are still leased.

        Raises:
            LeaseExpiredError: the lease has already expired.
            PreconditionError: all samples of the claim were acknowledged, released or cleared.
            InvalidArgumentError: `metadata` does not belong to a single leased claim, or `lease` is not a positive
                number of seconds.
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
        """Release samples that a queue worker will not process. The released samples can be claimed again immediately.

        A released delivery does not count toward `max_deliveries`. Samples that have already been acknowledged,
        released, cleared or reset are ignored.

        Args:
            metadata: the batch returned by `claim`, or part of that batch if it is leased. If the batch consists of
                complete groups, a part must not split a group.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples that can be claimed again, or 0 if `metadata` does not come from a queue worker's
            claim.

        Raises:
            LeaseExpiredError: the lease of some samples has expired. No sample is released.
            InvalidArgumentError: `metadata` is only part of a claim without a lease, or splits a group.
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
        """Return how many samples a task has consumed, and whether any samples remain for the task.

        Args:
            partition_id: the partition.
            task_name: the task that consumes the samples.
            missing_ok: whether to treat a missing partition as empty, and to assume that a task without claims has
                consumed no samples.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            PartitionNotFoundError: the partition does not exist and `missing_ok` is False.
            TaskNotFoundError: the task has not claimed any samples yet and `missing_ok` is False, or the partition was
                created with a list of tasks that omits this task.
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
        """Return how many samples of a partition have all of the fields in `data_fields`.

        Args:
            partition_id: the partition.
            data_fields: names of the fields. At least one field is required.
            missing_ok: whether to treat a missing partition as empty and a nonexistent field as absent from all
                samples.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            PartitionNotFoundError: the partition does not exist and `missing_ok` is False.
            FieldNotFoundError: the field does not exist and `missing_ok` is False.
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
        """Start the next epoch of a task. All samples can be claimed again, and batch indexes restart at 0.

        Args:
            partition_id: the partition.
            task_name: the task to reset.
            epoch: the epoch to end. If several ranks pass the same epoch, the task is reset only once. If None, every
                call ends the current epoch, so calls from several ranks end several epochs.
            keep_consumed: whether consumed samples remain consumed, so that only the batch indexes restart.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The new epoch.

        Raises:
            StaleEpochError: the task's current epoch is not `epoch`.
            PartitionNotFoundError: the partition does not exist.
            TaskNotFoundError: the task has not claimed any samples yet.
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
        """Return units evicted by a task's claims or admission, so that the caller can replace them.

        See `unmatched` of `claim`, and `overflow` of `Admission`. The service remembers the 65,536 most recently
        evicted units. To read all units, repeat the call with `after` set to the last unit's serial until the result is
        empty.

        Args:
            partition_id: the partition.
            task_name: the task whose claims or admission evicted the units.
            after: serial of the last unit already received. Pass 0 to start with the first unit.
            limit: maximum number of units to return, from 1 to 1,024. If names are very long, fewer units may be
                returned.
            incarnation: expected incarnation of the partition. An empty value accepts any incarnation. Each incarnation
                numbers its units separately.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            InvalidArgumentError: `after` or `limit` is out of range.
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
        """Make a task's dead-lettered samples claimable again, and reset their delivery counts.

        Args:
            partition_id: the partition.
            task_name: the task that dead-lettered the samples.
            global_indexes: indexes of samples. Samples that are not dead-lettered are ignored. Defaults to all
                dead-lettered samples.
            incarnation: expected incarnation of the partition. An empty value accepts any incarnation.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Returns:
            The number of samples that can be claimed again.

        Raises:
            PreconditionError: the task's ranks have already received the status "end". To redeliver dead-lettered
                samples, call `reset_consumption(keep_consumed=True)`.
            PartitionNotFoundError: the partition does not exist.
            TaskNotFoundError: the task has not claimed any samples yet.
            StaleIncarnationError: the partition was cleared and created again.
        """
        named = None if global_indexes is None else listed("global_indexes", global_indexes)
        if named is not None and not named:  # an empty list in the request would select all samples
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
