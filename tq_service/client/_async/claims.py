"""Calls of consumers: batches, what becomes of those that a queue worker holds, and what was consumed and produced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, get_args, overload

from tq_service.client._async.calls import AsyncBase
from tq_service.client.batch_meta import BatchMeta
from tq_service.client.requests import (
    MetaGiven,
    NameColumn,
    check_leased,
    check_word,
    get_meta_request,
    lease_duration,
    listed,
    not_zero,
    request_of,
    seconds,
    write_message,
    write_of,
)
from tq_service.client.transport import Deadline, WaitReports, import_tensordict, warn_of_wait
from tq_service.client_probes import probes
from tq_service.errors import CallCancelledError, DeadlineError, InternalError, TqError, UnavailableError
from tq_service.results import ConsumptionStatus, EvictedUnits, ProductionStatus, WaitReason
from tq_service.schema import DEFAULT_POLICY, Admit, BatchUnit, OnLost, Unmatched, check_range
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import BATCH_STATUS_NOT_YET
from tq_service.wire.messages import read_message, to_duration

DEFAULT_MAX_WAIT_SECONDS: Final = 30.0
RELEASE_SECONDS: Final = 5.0

# After these the server may have made a claim that never arrived.
_UNKNOWN_OUTCOMES: Final = (CallCancelledError, DeadlineError, InternalError, UnavailableError)


class AsyncClaimCalls(AsyncBase):
    """The part of the client for consumers. See `AsyncClient`."""

    @overload
    async def get_meta(
        self,
        *,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        batch_size: int,
        min_batch_size: int | None = None,
        batch_unit: BatchUnit = "sample",
        micro_batch_size: int | None = None,
        sampler: str | None = None,
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
    async def get_meta(
        self,
        *,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        batch_size: int,
        batch_unit: BatchUnit = "sample",
        micro_batch_size: int | None = None,
        sampler: str | None = None,
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
        not_before_version: int | None = None,
        policy: str = DEFAULT_POLICY,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        explain: bool | None = None,
        on_wait: Callable[[WaitReason], object] | None = None,
        timeout: float | None = None,
    ) -> list[BatchMeta]: ...

    async def get_meta(
        self,
        *,
        partition_id: str,
        task_name: str,
        data_fields: Sequence[str],
        batch_size: int,
        min_batch_size: int | None = None,
        batch_unit: BatchUnit = "sample",
        micro_batch_size: int | None = None,
        sampler: str | None = None,
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
        held: bool = False,
        admit: Admit | None = None,
        not_before_version: int | None = None,
        policy: str = DEFAULT_POLICY,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        explain: bool | None = None,
        on_wait: Callable[[WaitReason], object] | None = None,
        timeout: float | None = None,
    ) -> BatchMeta | list[BatchMeta]:
        """Ask for a batch: with `dp_rank`, `dp_size` and `batch_index` as a trainer rank, without as a queue worker.

        A rank that asks again gets the same answer. A queue worker's claim is released when its call is cancelled or
        runs out of time, unless it has a name.

        Args:
            partition_id: the partition; one that is not there yet is waited for.
            task_name: the consumer.
            data_fields: fields that make a sample ready.
            batch_size: samples or groups, for each rank.
            min_batch_size: queue workers: the least to be delivered; None: `batch_size`.
            batch_unit: "sample" or "group": what the two count.
            micro_batch_size: samples a micro-batch; None: the batch is one.
            sampler: its name; None: "sequential".
            sampler_config: its options.
            dp_rank: the rank that asks.
            dp_size: number of ranks.
            batch_index: which batch, counted from 0 in the epoch.
            batch_count: ranks: ask for up to so many batches, at most 64, from `batch_index` on: for the first, and for
                those behind it that are ready at that moment. None: for one batch. What is claimed early has no samples
                that come later, so ask for no more than will be used soon.
            drop_last: whether the last batch, if short, is left out.
            where: conditions `(column, operator, value)` on custom_meta, all of which must hold; operators are
                ==, !=, <, <=, >, >= and "in" with a list of values. <, <=, > and >= take a `Published` too.
            order_by: custom_meta columns by which ready samples are ordered, "-column" for largest first.
            finite: also end when every sample inserted so far is consumed, without waiting for the seal.
            incarnation: that of the partition; empty: whichever.
            epoch: that of the task, which counts its resets; None: whichever.
            lease: queue workers: seconds within which the samples are to be acknowledged (`ack`), at most a day; what
                is not can be claimed by others. None: they are done once they are delivered.
            max_deliveries: with a lease: a sample that was delivered so often and never acknowledged in time is dead-
                lettered: not delivered again in this epoch, and counted as skipped. None: no bound.
            claim_name: queue workers: a name for the claim, such as "rank0/batch3". The first call under it takes what
                is next; all calls under it get the same answer, from whichever process, until the epoch of the task
                ends. They have to ask alike.
            max_uses: how often a sample is delivered to the task before it counts as consumed; until then it stays
                ready for later batches. With a lease a delivery counts once it is acknowledged. None: once, or as the
                sampler says.
            unmatched: what becomes of samples that `where` excludes: they "wait"; or they are evicted, with a batch or
                without one: they "fail", or are cleared ("clear"), for all tasks. Samplers that keep groups whole evict
                whole groups. Samples that are held, leased or delivered stay, and so do groups with such a member.
            least_members: a complete group with fewer members left, since the others failed or were cleared, is evicted
                too; needs `unmatched` "fail" or "clear". None: no group is too small.
            refill: `(partition_id, task_name)` where evicted units are made again, such as the prompts and the rollout
                task: the sample there whose key is the name of an evicted group, or the key of a sample evicted by
                itself, becomes claimable for the task again, in the same change. `take_evicted` has what came of it.
            max_refills: how often, at most, for each sample in an epoch of that task.
            held: rollout workers, with a `lease`: whether held samples are claimed, and no live ones: slots that other
                workers have lost. `data_fields` may be empty then.
            admit: rollout workers, with a `lease`: the slots that are made in another partition with the claim, in one
                change; `BatchMeta.admitted` has them. The call waits until there are prompts, which need keys, and
                capacity for the slots of `min_batch_size` of them. Prompts and slots share the lease: `extend` of
                either extends both. A prompt is acknowledged with the last of its slots; `release` of a prompt removes
                its slots.
            not_before_version: a version of `policy` that must be published before the batch is planned; until then
                the call waits as for samples. None: none.
            policy: that of `not_before_version`, in the client's namespace.
            max_wait: seconds to wait for a batch; then the answer is "not_yet".
            explain: whether "not_yet" comes with its reason, `BatchMeta.reason` and `waiting_for`, for which the
                service looks at all samples of the partition; None: after a wait of 10 s or more.
            on_wait: called with the reason while the call goes on waiting, after 10 s and then each minute, unless
                `explain` is False; what it raises ends the call. None: a warning is logged.
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Returns:
            The batch; look at its `status` first: "batch", "not_yet" or "end". With `batch_count` a list of at least
            one: batches in order, of which the last may be the "end"; or "not_yet" alone.

        Raises:
            InvalidArgumentError: an argument is wrong; also MissingLengthError.
            PreconditionError: the ranks, or calls under one `claim_name`, disagree; the partition was cleared, or the
                incarnation or epoch is stale.
            LeaseExpiredError: a retry, or a call under the same `claim_name`, came after the lease of the first answer
                had run out; ClaimReleasedError, SamplesClearedError: after its samples were released or cleared.
            PartitionNotFoundError, PolicyNotFoundError, AdmissionLimitError, AlreadyExistsError: with `admit`, see
                `acquire`; the last one also where a group has the name of a prompt. No prompt is claimed.
            BatchForgottenError: of batches that do not consume their samples only the last are kept on record.
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
            held=held,
            admit=admit,
            batch_count=batch_count,
            not_before_version=not_before_version,
            policy=policy,
            namespace=self._namespace,
        )
        if lease is not None:
            import_tensordict()  # lest the lease pay for it, with the first `get_data` of the process
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

    async def _poll(
        self,
        request: pb.GetMetaRequest,
        wait_seconds: float,
        deadline: Deadline,
        explain: bool | None,
        on_wait: Callable[[WaitReason], object] | None,
    ) -> pb.GetMetaResponse:
        """Ask until there is an answer or the wait is spent: the server may cap how long one call waits."""
        wait, reports = Deadline.after(wait_seconds), WaitReports()
        tell = on_wait or warn_of_wait

        async def attempt(max_wait: float) -> pb.GetMetaResponse:
            if explain is not False:
                max_wait = min(max_wait, reports.seconds_left())
            request.max_wait.CopyFrom(to_duration(max_wait))
            request.explain = reports.lasts_after(max_wait) if explain is None else explain
            answer = await self._calls.unary_once(pb.GetMetaResponse, request, deadline)
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
        """Return why claims of a partition wait: one reason for all calls that ask alike.

        Args:
            partition_id: the partition; one that is not there may be waited for, too.
            task_name: claims of this task alone; None: of all.
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
        custom_meta: MetaGiven | None = None,
        lease: float,
        on_lost: OnLost = "requeue",
        policy: str | None = None,
        max_wait: float = DEFAULT_MAX_WAIT_SECONDS,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Make slots before samples are generated: held samples without data, leased to this worker.

        Slots count for the admissions of their partition, and wait for capacity in order of arrival, as puts of new
        samples do. Put the data with `put(data, metadata=slots, ack=True)`, which makes them live. Extend the lease of
        long work. Slots that are released without data are removed. A call that is given up may have made slots: they
        are lost with their lease.

        Args:
            partition_id: the partition, which must exist.
            task_name: the task of the rollout workers.
            count: number of slots; None: as many as `keys`, `groups` or `custom_meta` say, else 1.
            keys: their unique names, one for each slot.
            groups: names of new groups, of each of which all `group_size` members are made.
            group_size: members of each group.
            custom_meta: of each slot, see `put`.
            lease: seconds until what is still held is lost, at most a day.
            on_lost: what becomes of it then: "requeue": workers claim it with `get_meta(held=True)` and go on with what
                it holds; "fail", or "remove".
            policy: the published version of this policy becomes `start_version` in the custom_meta of the slots. None:
                that of the admission with a `max_staleness`; without one there is no `start_version`.
            max_wait: seconds to wait for capacity; then the answer is "not_yet".
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Returns:
            The slots as a leased batch; look at its `status` first: "batch", "not_yet", or "end" where the partition is
            sealed.

        Raises:
            PartitionNotFoundError, TaskNotFoundError: there is no such partition, or it was created for other tasks.
            PolicyNotFoundError: the policy has no published version.
            AlreadyExistsError: a key is known.
            AdmissionLimitError: more slots than may ever be outstanding.
            InvalidArgumentError: an argument is wrong.
        """
        check_word("on_lost", on_lost, get_args(OnLost))
        names = None if groups is None else listed("groups", groups)
        if names is not None:
            check_range("group_size", group_size, 1)
            names = [name for name in names for _ in range(group_size)]
        if count is None and keys is None and names is None and custom_meta is None:
            count = 1
        write = write_of(
            self._namespace,
            partition_id=partition_id,
            row_count=len(names) if count is None and names is not None else count,
            keys=keys,
            groups=names,
            group_size=None if names is None else group_size,
            custom_meta=custom_meta,
        )
        request = request_of(
            pb.AcquireRequest,
            write=write_message([write]),
            task_name=task_name,
            lease=lease_duration(lease),
            on_lost=on_lost,
            policy="" if policy is None else self._namespace.full_name(policy),
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
        """Say that the work on leased samples is done: they are not delivered again, whatever becomes of the lease.

        Put the results first; `put(..., ack=True)` does both in one change. Acknowledging samples once more is fine, as
        is naming ones that have failed or were cleared meanwhile.

        Args:
            metadata: the batch, as `get_meta(lease=...)` answered it, or a part of it (`select_samples`, `chunk`); of a
                batch of whole groups whole groups.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples acknowledged by this call.

        Raises:
            LeaseExpiredError: some of the samples (the message names them) are no longer leased to this worker, and
                others may do the same work; none is acknowledged.
            InvalidArgumentError: `metadata` is not of one leased claim, or has a part of a group.
            PartitionNotFoundError: the partition was cleared. StaleIncarnationError: and created again.
        """
        check_leased(metadata)
        return await self._ack(metadata, timeout)

    async def extend(self, metadata: BatchMeta, lease: float, *, timeout: float | None = None) -> int:
        """Give a leased claim more time. What was acknowledged or released of it stays so.

        Args:
            metadata: the batch, as `get_meta(lease=...)` answered it, or a part of it: all of the claim is extended.
            lease: seconds from now on; also less than was left.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that are leased.

        Raises:
            LeaseExpiredError: the lease ran out before.
            PreconditionError: nothing is left of the claim.
            InvalidArgumentError: `metadata` is not of one leased claim, or `lease` is no positive number of seconds.
            PartitionNotFoundError: the partition was cleared. StaleIncarnationError: and created again.
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
        """Release samples that a queue worker got and will not process: they are claimable again at once.

        A released delivery does not count for `max_deliveries`. Samples that were acknowledged, released, cleared or
        reset before are ignored.

        Args:
            metadata: the batch, as `get_meta` answered it; of a leased one also a part of it, of whole groups whole
                groups.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that are claimable again; 0 where `metadata` is no claim of a queue worker.

        Raises:
            LeaseExpiredError: the lease of some of the samples ran out; none is released.
            InvalidArgumentError: `metadata` has a part of a claim without a lease, or of a group.
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
        """Return how many samples a task has consumed, and whether anything is left for it.

        Args:
            partition_id: the partition.
            task_name: the consumer.
            missing_ok: whether a partition that is not there counts as one without samples, and a task that has not
                asked yet as one that has consumed nothing.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PartitionNotFoundError: there is no such partition, unless `missing_ok`.
            TaskNotFoundError: the task has not asked for anything yet, unless `missing_ok`; or the partition was
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
            missing_ok: whether a partition that is not there counts as one without samples, and a field that it does
                not have as one that no sample has.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PartitionNotFoundError: there is no such partition, unless `missing_ok`.
            FieldNotFoundError: there is no such field, unless `missing_ok`.
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
        """Start the next epoch of a task: its samples are claimable again, batches count from 0.

        Args:
            partition_id: the partition.
            task_name: the consumer.
            epoch: the epoch that ends: of many ranks that reset it, one does. None: whichever it is; each call ends
                one, also where it is tried again.
            keep_consumed: keep what is consumed, and only count batches from 0 again.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The new epoch.

        Raises:
            StaleEpochError: the task is at another epoch.
            PartitionNotFoundError: there is no such partition.
            TaskNotFoundError: the task has not asked for anything yet.
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
        """Return units that claims of a task have evicted (`get_meta(unmatched=)`), to make others in their place.

        The newest 65,536 are kept. Ask again with the serial of the last unit until none comes.

        Args:
            partition_id: the partition.
            task_name: the task.
            after: the serial of the last unit that is known; 0: begin with the first.
            limit: most units of the answer, 1 to 1,024; very long names may make them fewer.
            incarnation: that of the partition; empty: whichever. Serials begin again with each.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            InvalidArgumentError: a number is out of its range.
            PartitionNotFoundError, TaskNotFoundError: it does not exist.
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
        """Have dead-lettered samples of a task delivered again, as if they never had been.

        Args:
            partition_id: the partition.
            task_name: the consumer that they were delivered to too often.
            global_indexes: samples, of which those that are not dead-lettered are ignored; None: all that are.
            incarnation: that of the partition; empty: whichever.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that can be claimed again.

        Raises:
            PreconditionError: the ranks of the task have come to their end; `reset_consumption(keep_consumed=True)`
                delivers its dead-lettered samples again.
            PartitionNotFoundError: there is no such partition.
            TaskNotFoundError: the task has not asked for anything yet.
            StaleIncarnationError: the partition was created again.
        """
        named = None if global_indexes is None else listed("global_indexes", global_indexes)
        if named is not None and not named:  # which would stand for all
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
