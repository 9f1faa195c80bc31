"""The controller's gRPC methods, which convert requests, call the core, and convert results to responses."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tq_service.config import ServeSettings
from tq_service.durable.state_store import StateStore
from tq_service.errors import DeadlineError, InvalidArgumentError
from tq_service.internal.v1 import storage_registry_pb2, storage_registry_pb2_grpc
from tq_service.log_message import LogMessage
from tq_service.machine.claims import (
    ClaimAcked,
    ClaimExtended,
    ClaimReleased,
    ConsumptionReset,
    DeadLettersRequeued,
    RanksRestarted,
    TaskAdvanced,
)
from tq_service.machine.policies import PolicyRemoved, VersionPublished
from tq_service.machine.samples import GroupsClosed, MetaSet, PartitionSealed, SamplesTruncated
from tq_service.results import ControllerStatus, PartitionWait, PolicyStatus
from tq_service.samplers import PlanRunner, SamplerRegistry
from tq_service.schema import check_id, check_name, check_range
from tq_service.server import converters
from tq_service.server.checkpoints import Checkpoints
from tq_service.server.heartbeat import MOST_OVERDUE_PUTS
from tq_service.server.puts import Commits
from tq_service.server.recording import StepRecording
from tq_service.server.rpc.batches import Batches
from tq_service.server.rpc.inbox import WaitingCalls
from tq_service.server.rpc.methods import Context, shown_partitions
from tq_service.server.slots import Slots
from tq_service.server.storages import StorageRegistry
from tq_service.server.watches import Watches
from tq_service.serving.backlogs import Backlogs, tasks_with_versions
from tq_service.serving.catalog import Catalog
from tq_service.serving.explain import Explainer
from tq_service.serving.lookup import (
    Clearing,
    ClearingFields,
    Failing,
    find_names,
    find_page,
    locate,
    name_token,
    wait_for_samples,
)
from tq_service.serving.planner import NotYet
from tq_service.serving.slots import PromptClaims, admitted_slots
from tq_service.serving.status import consumption_of, description_of, evicted_by, production_of, summary_of
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Indexes
from tq_service.state.policies import Policy
from tq_service.v1 import commit_pb2, controller_service_pb2_grpc
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.version import BUILD
from tq_service.wait_clock import WaitClock, wait_clock
from tq_service.wire.messages import read_message, read_seconds, to_duration, to_message
from tq_service.wire.metadata import check_json, decode_integers, decode_meta_columns

_log = logging.getLogger(__name__)

_MOST_STATUS_BYTES: Final = 1 << 20  # per page, excluding the last partition on the page
_MOST_WAITS: Final = 32  # per partition
_TASKS_A_TURN: Final = 4  # number of tasks described per event-loop iteration, which takes at most a millisecond
Request = TypeVar("Request", bound=Any)  # a message with a request_id
Answer = TypeVar("Answer")
PackedAnswer: TypeAlias = tuple[str, bytes]


def _once(
    change: Callable[[ControllerServicer, Request], Answer],
) -> Callable[[ControllerServicer, Request, Context], Awaitable[Answer]]:
    """Decorate a mutating method so that it runs only once per `request_id`. Retries receive the recorded response."""
    answer: type = get_type_hints(change)["return"]

    async def method(self: ControllerServicer, request: Request, context: Context) -> Answer:
        return self.catalog.run_once(request.request_id, lambda: change(self, request), answer)

    return method


class ControllerServicer(
    controller_service_pb2_grpc.ControllerServiceServicer, storage_registry_pb2_grpc.StorageRegistryServiceServicer
):
    """Implements `ControllerService` and `StorageRegistryService`. Each method is documented in the protos.

    Args:
        settings: configuration of the service.
        catalog: the controller's partitions.
        runner: runs samplers.
        storages: registry of storage services.
        waiting: counter of waiting calls.
        store: store that persists the state, or None if the state is kept in memory.
        shared_memory: whether this process shares memory with clients on this host.
        controllers: function that returns the status of each controller in the cluster, or an empty sequence if there
            is no cluster.

    Attributes:
        batches: handler of CallMany streams. The code that adds this servicer to a server sets this attribute.
        recording: recorder of batches, or None if recording is off.
    """

    batches: Batches
    recording: StepRecording | None = None

    def __init__(
        self,
        settings: ServeSettings,
        catalog: Catalog,
        runner: PlanRunner,
        storages: StorageRegistry,
        waiting: WaitingCalls,
        *,
        store: StateStore | None = None,
        shared_memory: bool = False,
        controllers: Callable[[], Sequence[ControllerStatus]] = tuple,
    ) -> None:
        self.catalog = catalog
        self.storages = storages
        self._settings = settings
        self._shared_memory = shared_memory
        self._controllers = controllers
        self._started_at = time.monotonic()
        self._waiting = waiting
        self._runner = runner
        self._registry = SamplerRegistry(allow_import=settings.allow_sampler_import)
        self.commits = Commits(catalog=catalog, puts=storages.puts, endpoint_of=storages.endpoint_of, waiting=waiting)
        self._prompts = PromptClaims(self.catalog)
        self._slots = Slots(
            catalog=catalog,
            endpoint_of=storages.endpoint_of,
            waiting=waiting,
            max_wait_cap_seconds=settings.max_wait_cap_seconds,
        )
        self._checkpoints = Checkpoints(
            catalog=catalog, storages=storages, store=store, checkpoint_dir=settings.checkpoint_directory()
        )
        self.watches = Watches(catalog, most=settings.max_watchers, stall_seconds=settings.stall_seconds)
        self.backlogs = Backlogs(catalog, runner)
        self._explainer = Explainer(catalog, runner)

    def take_up(self) -> None:
        """Start leases and reconcile puts after the state has been recovered."""
        self.catalog.start_leases()
        self.storages.recover()

    def drain(self) -> None:
        """End CallMany streams, watches, and calls that wait for samples."""
        self.catalog.drain()
        self.watches.drain()
        self.batches.drain()

    # Partitions

    @_once
    def CreatePartition(self, request: pb.CreatePartitionRequest) -> pb.CreatePartitionResponse:
        partition = self.catalog.create(request.partition_id, read_message(PartitionSettings, request))
        return pb.CreatePartitionResponse(incarnation=partition.incarnation)

    @_once
    def SealPartition(self, request: pb.SealPartitionRequest) -> pb.SealPartitionResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        self.catalog.commit(PartitionSealed(partition_id=partition.partition_id))
        return pb.SealPartitionResponse(inserted_count=partition.inserted_count)

    @_once
    def ClearPartition(self, request: pb.ClearPartitionRequest) -> pb.ClearPartitionResponse:
        count = self.catalog.remove(request.partition_id, request.incarnation, missing_ok=request.missing_ok)
        return pb.ClearPartitionResponse(cleared_count=count)

    async def ListPartitions(self, request: pb.ListPartitionsRequest, context: Context) -> pb.ListPartitionsResponse:
        is_shown = shown_partitions.get()
        names = (name for name in self.catalog.names() if name.startswith(request.prefix) and is_shown(name))
        page, next_token = find_names(
            names, of=f"partitions/{request.prefix}", size=request.page_size, token=request.page_token
        )
        return pb.ListPartitionsResponse(
            partitions=[to_message(pb.PartitionSummary, summary_of(self.catalog.get(name))) for name in page],
            next_page_token=next_token,
            revision=to_message(pb.Revision, self.catalog.history.revision()),
        )

    async def DescribePartition(
        self, request: pb.DescribePartitionRequest, context: Context
    ) -> pb.DescribePartitionResponse:
        partition = self.catalog.get(request.partition_id)
        await self.backlogs.refresh(tasks_with_versions(partition))
        return await self._described(partition)

    async def _described(self, partition: Partition) -> pb.DescribePartitionResponse:
        """Describe a partition, yielding to the event loop after every few tasks."""
        description = description_of(self.catalog, self.backlogs, partition)
        await asyncio.sleep(0)
        tasks = []
        for task in description.tasks:
            tasks.append(to_message(pb.TaskStatus, task))
            if len(tasks) % _TASKS_A_TURN == 0:
                await asyncio.sleep(0)
        return to_message(pb.DescribePartitionResponse, description, tasks=tasks)

    # Status

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        answer, list_name, is_shown = pb.GetStatusResponse(), f"status/{request.prefix}", shown_partitions.get()
        all_names = chain(self.catalog.names(), self.catalog.awaited_names())
        names = {name for name in all_names if name.startswith(request.prefix) and is_shown(name)}
        page, answer.next_page_token = find_names(names, of=list_name, size=request.page_size, token=request.page_token)
        if not request.page_token:
            revision = self.catalog.history.revision()
            answer.revision.CopyFrom(to_message(pb.Revision, revision))
            answer.service.CopyFrom(self._info(revision.instance_id, for_all_partitions=is_shown("")))
            answer.controllers.extend(to_message(pb.ControllerStatus, each) for each in self._controllers())
            answer.storages.extend(to_message(pb.StorageStatus, each) for each in self.storages.statuses())
            names_shown = [name for name in self.catalog.policies if name.startswith(request.prefix) and is_shown(name)]
            for name in sorted(names_shown):
                policy = self._policy_status(self.catalog.policies[name])
                answer.policies.append(to_message(pb.PolicyStatus, policy))
        known = self._shown_names() if request.explain else None
        there = (each for name in page if (each := self.catalog.find(name, missing_ok=True)) is not None)
        await self.backlogs.refresh(task for partition in there for task in tasks_with_versions(partition))
        size_bytes = 0
        for name in page:
            if size_bytes > _MOST_STATUS_BYTES:
                answer.next_page_token = name_token(list_name, name)
                break
            partition = self.catalog.find(name, missing_ok=True)
            if partition is not None:
                answer.partitions.append(await self._described(partition))
                size_bytes += answer.partitions[-1].ByteSize()
            for reason in await self._explainer.waiting(name, names=known, most=_MOST_WAITS):
                answer.waits.append(to_message(pb.PartitionWait, PartitionWait(partition_id=name, reason=reason)))
                size_bytes += answer.waits[-1].ByteSize()
            await asyncio.sleep(0)
        return answer

    def _info(self, instance_id: bytes, *, for_all_partitions: bool) -> pb.ServiceInfo:
        """Return information about this process.

        Paths and recording errors are included only if the caller may see all partitions.
        """
        settings = self._settings
        info = pb.ServiceInfo(
            version=BUILD,
            instance_id=instance_id,
            role=settings.role,
            uptime=to_duration(time.monotonic() - self._started_at),
            durability=settings.effective_durability,
            data_dir=str(settings.data_dir) if settings.data_dir is not None and for_all_partitions else "",
            tls=settings.tls_cert is not None,
            client_certificates=settings.tls_client_ca is not None,
            auth=settings.auth_tokens_file is not None,
            shared_memory=self._shared_memory,
        )
        if self.recording is not None:
            status = self.recording.status()
            hidden = {} if for_all_partitions else {"place": "", "error": ""}
            info.recording.CopyFrom(to_message(pb.RecordingStatus, status, **hidden))
        return info

    # Samples

    async def Insert(self, request: pb.InsertRequest, context: Context) -> pb.InsertResponse:
        return await self.commits.insert(request, context)

    async def Commit(self, request: commit_pb2.CommitRequest, context: Context) -> commit_pb2.CommitResponse:
        return await self.commits.commit(request, context)

    @_once
    def SetCustomMeta(self, request: pb.SetCustomMetaRequest) -> pb.SetCustomMetaResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        indexes = decode_integers(request.global_indexes)
        columns = check_json(decode_meta_columns(request.custom_meta, indexes.size))
        self.catalog.limits.check_meta(partition, columns)
        claim = converters.leased_claim(request)
        change = MetaSet(partition_id=partition.partition_id, global_indexes=indexes, columns=columns, claim=claim)
        self.catalog.commit(change)
        return pb.SetCustomMetaResponse()

    @_once
    def TruncateSamples(self, request: pb.TruncateSamplesRequest) -> pb.TruncateSamplesResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        claim = converters.leased_claim(request)
        if claim is None:
            raise InvalidArgumentError(
                "claim is not set; send the leased claim that contains the samples to truncate", field="claim"
            )
        change = SamplesTruncated(
            partition_id=partition.partition_id,
            global_indexes=decode_integers(request.global_indexes),
            lengths=decode_integers(request.lengths),
            field_names=list(request.data_fields),
            claim=claim,
        )
        self.catalog.commit(change)
        return pb.TruncateSamplesResponse()

    @_once
    def CloseGroups(self, request: pb.CloseGroupsRequest) -> pb.CloseGroupsResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        names, rollouts = list(request.groups), list(request.rollouts)
        self.catalog.commit(GroupsClosed(partition_id=partition.partition_id, names=names, rollouts=rollouts))
        return pb.CloseGroupsResponse()

    async def ClearSamples(self, request: pb.ClearSamplesRequest, context: Context) -> pb.ClearSamplesResponse:
        clearing = Clearing(
            self.catalog,
            request.partition_id,
            request.incarnation,
            converters.changed_selection(request, request.skipped_by),
            claim=converters.leased_claim(request),
            missing_ok=request.missing_ok,
        )
        if self.catalog.recorded(request.request_id, pb.ClearSamplesResponse) is None:
            await clearing.begin()
        return self.catalog.run_once(
            request.request_id,
            lambda: pb.ClearSamplesResponse(cleared_count=clearing.finish()),
            pb.ClearSamplesResponse,
        )

    async def ClearFields(self, request: pb.ClearFieldsRequest, context: Context) -> pb.ClearFieldsResponse:
        clearing = ClearingFields(
            self.catalog,
            request.partition_id,
            request.incarnation,
            converters.changed_selection(request, request.skipped_by),
            claim=converters.leased_claim(request),
            missing_ok=request.missing_ok,
            field_names=list(dict.fromkeys(request.data_fields)),
        )
        if self.catalog.recorded(request.request_id, pb.ClearFieldsResponse) is None:
            await clearing.begin()
        return self.catalog.run_once(
            request.request_id,
            lambda: pb.ClearFieldsResponse(cleared_count=clearing.finish()),
            pb.ClearFieldsResponse,
        )

    async def FailSamples(self, request: pb.FailSamplesRequest, context: Context) -> pb.FailSamplesResponse:
        failing = Failing(
            self.catalog,
            request.partition_id,
            request.incarnation,
            converters.changed_selection(request),
            claim=converters.leased_claim(request),
        )
        if self.catalog.recorded(request.request_id, pb.FailSamplesResponse) is None:
            await failing.begin()
        return self.catalog.run_once(
            request.request_id,
            lambda: pb.FailSamplesResponse(failed_count=failing.finish()),
            pb.FailSamplesResponse,
        )

    # Finding samples and cells

    async def LookupSamples(self, request: pb.LookupSamplesRequest, context: Context) -> pb.LookupSamplesResponse:
        selection = converters.selection(request)
        max_wait = read_seconds("max_wait", request.max_wait)
        check_range("max_wait", max_wait, 0)
        check_range("min_count", request.min_count, 0, hint="; 0 means 1")
        not_yet, missing_ok = False, request.missing_ok
        if max_wait and not request.page_token:
            cap = self._settings.max_wait_cap_seconds
            with self._waiting.one(context):
                not_yet = await wait_for_samples(
                    self.catalog, request.partition_id, selection, request.min_count or 1, min(max_wait, cap)
                )
            missing_ok |= not_yet and max_wait > cap  # the partition may still appear while the caller waits
        if request.HasField("task_name"):
            check_name("task_name", request.task_name)
        page = find_page(
            self.catalog,
            request.partition_id,
            selection,
            size=request.page_size,
            token=converters.page_token(request),
            missing_ok=missing_ok,
        )
        if page is None:
            answer = converters.nothing_found(request, not_yet=not_yet)
        else:
            answer = converters.found_page(page, request, self.storages.endpoint_of, not_yet=not_yet)
        answer.revision.CopyFrom(to_message(pb.Revision, self.catalog.history.revision()))
        return answer

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        positions, names = locate(
            partition,
            list(request.data_fields) or list(partition.cells.fields),
            indexes=decode_integers(request.global_indexes),
            keys=request.keys,
            skip_missing=request.skip_missing,
            skip_missing_fields=request.skip_missing_fields,
        )
        return pb.LocateResponse(meta=converters.located_meta(partition, positions, names, self.storages.endpoint_of))

    # Tasks

    async def GetMeta(self, request: pb.GetMetaRequest, context: Context) -> pb.GetMetaResponse:
        max_wait = read_seconds("max_wait", request.max_wait)
        check_range("max_wait", max_wait, 0)
        spec = converters.claim_spec(request)
        sampler = await self._registry.resolve_json(spec.batch_spec.sampler, spec.batch_spec.sampler_config)
        claim = converters.claim_request(request, spec, sampler)
        self._runner.check(sampler, spec.plan_request)
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:  # the client would never receive the samples
            raise DeadlineError("the call arrived after its deadline")
        steps = converters.read_step_times(request) if request.HasField("step_times") else None
        clock = wait_clock.get()
        if clock is None:
            clock = WaitClock()
            wait_clock.set(clock)  # affects only this call, because gRPC runs each call in a separate task
        serve = self.catalog.claim if spec.admit is None else self._prompts.claim
        claimed = await serve(
            request.partition_id,
            request.incarnation,
            claim,
            min(max_wait, self._settings.max_wait_cap_seconds),
            partial(self._waiting.one, context) if max_wait else nullcontext,
        )
        answer = converters.claim_answer(
            request.partition_id, claimed, claim.task_name, spec.data_fields, self.storages.endpoint_of,
            now=asyncio.get_running_loop().time(),
        )  # fmt: skip
        if clock.seconds and not isinstance(claimed.answer, NotYet):
            answer.waited.CopyFrom(to_duration(clock.seconds))
        if steps is not None and claimed.partition is not None and claim.rank is not None:
            planner = self.catalog.known_planner(claimed.partition, claim.task_name)
            if planner is not None:
                planner.step_times[request.dp_rank] = steps
        if claimed.partition is not None and isinstance(claimed.answer, Claim):
            self._retract_if_unsent(context, claimed.partition, claim.task_name, claim.request_id)
            if spec.admit is not None:
                slots, made = admitted_slots(self.catalog, claimed.partition, claim.task_name, claimed.answer)
                admitted = converters.slots_answer(
                    slots, made, claim.task_name, self.storages.endpoint_of, now=asyncio.get_running_loop().time()
                )
                answer.admitted.CopyFrom(admitted.meta)
        if request.explain and isinstance(claimed.answer, NotYet):
            reason = await self._explainer.explain(request.partition_id, claim, self._shown_names())
            answer.reason.CopyFrom(to_message(pb.WaitReason, reason))
        return answer

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        return await self._slots.acquire(request, context)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        check_name("partition_id", request.partition_id)
        reasons = await self._explainer.waiting(request.partition_id, request.task_name, names=self._shown_names())
        return pb.ExplainResponse(reasons=[to_message(pb.WaitReason, reason) for reason in reasons])

    def _shown_names(self) -> Collection[str]:
        """Return the names of the partitions that the caller may see."""
        return list(filter(shown_partitions.get(), self.catalog.names()))

    def _retract_if_unsent(self, context: Context, partition: Partition, task_name: str, request_id: bytes) -> None:
        """Undo a queue claim if its call is cancelled before the response is sent."""
        asked = weakref.ref(partition)  # gRPC may keep the callback in a reference cycle for a long time

        def when_done(done: Context) -> None:
            partition = asked()
            if done.cancelled() and partition is not None:
                self.catalog.retract(partition, task_name, request_id)

        context.add_done_callback(when_done)  # type: ignore[arg-type]  # typed as a class, called as a function

    @_once
    def ReleaseClaim(self, request: pb.ReleaseClaimRequest) -> pb.ReleaseClaimResponse:
        check_id("claim_request_id", request.claim_request_id)
        check_name("task_name", request.task_name)
        if request.partition_id not in self.catalog.names():  # the claim was deleted with its partition
            return pb.ReleaseClaimResponse()
        partition = self.catalog.get(request.partition_id)
        self.catalog.task(partition, request.task_name)
        change = ClaimReleased(
            partition_id=request.partition_id,
            task_name=request.task_name,
            request_id=request.claim_request_id,
            global_indexes=_named_indexes(request),
        )
        return pb.ReleaseClaimResponse(released_count=self.catalog.commit(change) or 0)

    @_once
    def AckClaim(self, request: pb.AckClaimRequest) -> pb.AckClaimResponse:
        check_id("claim_request_id", request.claim_request_id)
        self.catalog.get(request.partition_id, request.incarnation)
        change = ClaimAcked(
            partition_id=request.partition_id,
            task_name=request.task_name,
            request_id=request.claim_request_id,
            global_indexes=_named_indexes(request),
        )
        return pb.AckClaimResponse(acked_count=self.catalog.commit(change) or 0)

    @_once
    def ExtendClaim(self, request: pb.ExtendClaimRequest) -> pb.ExtendClaimResponse:
        check_id("claim_request_id", request.claim_request_id)
        self.catalog.get(request.partition_id, request.incarnation)
        change = ClaimExtended(
            partition_id=request.partition_id,
            task_name=request.task_name,
            request_id=request.claim_request_id,
            lease_seconds=read_seconds("lease", request.lease),
        )
        return pb.ExtendClaimResponse(leased_count=self.catalog.commit(change))

    async def CheckConsumption(
        self, request: pb.CheckConsumptionRequest, context: Context
    ) -> pb.CheckConsumptionResponse:
        check_name("task_name", request.task_name)
        partition = self.catalog.find(request.partition_id, missing_ok=request.missing_ok)
        status = consumption_of(partition, request.task_name, missing_ok=request.missing_ok)
        return to_message(pb.CheckConsumptionResponse, status)

    async def CheckProduction(self, request: pb.CheckProductionRequest, context: Context) -> pb.CheckProductionResponse:
        partition = self.catalog.find(request.partition_id, missing_ok=request.missing_ok)
        status = production_of(partition, request.data_fields, missing_ok=request.missing_ok)
        return to_message(pb.CheckProductionResponse, status)

    @_once
    def ResetConsumption(self, request: pb.ResetConsumptionRequest) -> pb.ResetConsumptionResponse:
        return pb.ResetConsumptionResponse(epoch=self.catalog.commit(read_message(ConsumptionReset, request)))

    # Policies and their trainers' progress

    @_once
    def Advance(self, request: pb.AdvanceRequest) -> pb.AdvanceResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        task = partition.known_task(request.task_name)
        if request.HasField("epoch"):
            task.check_epoch(request.epoch)
        if not (request.HasField("trained") or request.HasField("saved")):
            raise InvalidArgumentError("neither trained nor saved is set; set at least one of them", field="trained")
        self.catalog.commit(read_message(TaskAdvanced, request))
        return pb.AdvanceResponse(
            trained_batch_count=task.trained + 1,
            saved_batch_count=task.saved + 1,
            planned_batch_count=task.next_batch_index,
        )

    @_once
    def RestartRanks(self, request: pb.RestartRanksRequest) -> pb.RestartRanksResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        task = partition.known_task(request.task_name)
        trained = request.trained if request.HasField("trained") else task.trained
        repeated = self.catalog.commit(read_message(RanksRestarted, request, trained=trained))
        batch_count, sample_count = repeated or (0, 0)
        if batch_count:
            _log.warning(
                LogMessage(
                    "ranks restarted from a checkpoint; some samples will be trained on again",
                    partition=request.partition_id,
                    task=request.task_name,
                    first_batch=trained + 1,
                    batches=batch_count,
                    samples=sample_count,
                )
            )
        return pb.RestartRanksResponse(
            epoch=task.epoch,
            batch_index=trained + 1,
            repeated_batch_count=batch_count,
            repeated_sample_count=sample_count,
        )

    @_once
    def PublishVersion(self, request: pb.PublishVersionRequest) -> pb.PublishVersionResponse:
        trained = [(each.partition_id, each.task_name, each.batch_index) for each in request.trained]
        self.catalog.publish(read_message(VersionPublished, request), trained)
        return pb.PublishVersionResponse(version=request.version)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        check_name("policy", request.policy)
        check_range("at_least", request.at_least, 0)
        max_wait = read_seconds("max_wait", request.max_wait)
        check_range("max_wait", max_wait, 0)
        deadline = asyncio.get_running_loop().time() + min(max_wait, self._settings.max_wait_cap_seconds)
        waiting = partial(self._waiting.one, context)
        policy = await self.catalog.versions.until(request.policy, request.at_least, deadline, waiting)
        if policy is None:
            policy = self.catalog.policy(request.policy)  # raises
        return to_message(pb.GetVersionResponse, self._policy_status(policy))

    @_once
    def RemovePolicy(self, request: pb.RemovePolicyRequest) -> pb.RemovePolicyResponse:
        if not request.missing_ok:
            self.catalog.policy(request.policy)
        removed = request.policy in self.catalog.policies
        self.catalog.commit(PolicyRemoved(policy=request.policy))
        return pb.RemovePolicyResponse(removed=removed)

    def _policy_status(self, policy: Policy) -> PolicyStatus:
        ago = self.catalog.machine.now_seconds() - policy.published_at
        return PolicyStatus(policy=policy.name, version=policy.version, published_ago_seconds=max(0.0, ago))

    @_once
    def RequeueDeadLettered(self, request: pb.RequeueDeadLetteredRequest) -> pb.RequeueDeadLetteredResponse:
        self.catalog.get(request.partition_id, request.incarnation)
        change = DeadLettersRequeued(
            partition_id=request.partition_id,
            task_name=request.task_name,
            global_indexes=_named_indexes(request),
        )
        return pb.RequeueDeadLetteredResponse(requeued_count=self.catalog.commit(change) or 0)

    async def TakeEvicted(self, request: pb.TakeEvictedRequest, context: Context) -> pb.TakeEvictedResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        task = partition.known_task(request.task_name)
        return to_message(pb.TakeEvictedResponse, evicted_by(task, request.after, request.limit))

    async def ListSamplers(self, request: pb.ListSamplersRequest, context: Context) -> pb.ListSamplersResponse:
        known = {info.name: info for info in self._registry.describe()}
        page, next_token = find_names(known, of="samplers", size=request.page_size, token=request.page_token)
        return pb.ListSamplersResponse(
            samplers=[to_message(pb.SamplerDescription, known[name]) for name in page], next_page_token=next_token
        )

    async def CallMany(self, requests: Any, context: Context) -> None:  # type: ignore[override]  # it writes
        await self.batches.run(requests, context)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        await self.watches.serve(request, context)

    # Checkpoints

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointResponse:
        return await self._checkpoints.write(request.name, request.metadata, request.prefix)

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        return await self._checkpoints.restore(
            request.request_id, request.name, replace=request.replace, prefix=request.prefix
        )

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        return await self._checkpoints.page(prefix=request.prefix, size=request.page_size, token=request.page_token)

    # Storage services

    async def PlacePut(self, request: pb.PlacePutRequest, context: Context) -> pb.PlacePutResponse:
        check_name("partition_id", request.partition_id)
        check_range("size_bytes", request.size_bytes, 0)
        if request.put_id:
            check_id("put_id", request.put_id)
        return self.storages.place(request.size_bytes, request.put_id)

    async def RegisterStorage(
        self, request: storage_registry_pb2.RegisterStorageRequest, context: Context
    ) -> storage_registry_pb2.RegisterStorageResponse:
        storage = request.storage
        if not storage.storage_id or not storage.address or len(storage.boot_id) != 16:
            raise InvalidArgumentError(
                "storage is incomplete; expected a storage_id, an address and a 16-byte boot_id",
                field="storage",
            )
        check_name("storage_id", storage.storage_id)
        check_name("address", storage.address)
        if (count := len(request.overdue_put_ids)) > MOST_OVERDUE_PUTS:
            raise InvalidArgumentError(
                f"overdue_put_ids lists {count} puts; expected at most {MOST_OVERDUE_PUTS}. Send the rest "
                "in the next call",
                field="overdue_put_ids",
            )
        return self.storages.on_heartbeat(request)


def _named_indexes(
    request: pb.ReleaseClaimRequest | pb.AckClaimRequest | pb.RequeueDeadLetteredRequest,
) -> Indexes | None:
    """Return the sample indexes listed in a request, or None (meaning all samples) if the list is empty."""
    return decode_integers(request.global_indexes) if request.global_indexes else None


# Recorded responses


def pack_answer(answer: Message) -> PackedAnswer:
    """Convert a response to its `tq_service.v1` type name and serialized bytes for recording.

    A message object uses 2 KB of memory, but its serialized form uses only a few hundred bytes.
    """
    return type(answer).__name__, answer.SerializeToString()  # `__name__` is a shared string


def answer_bytes(packed: PackedAnswer) -> int:
    """Return the size, in bytes, of a packed response."""
    return len(packed[1])


def unpack_answer(packed: PackedAnswer) -> Message:
    """Convert a packed response back to a message."""
    name, data = packed
    kind = GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(f"tq_service.v1.{name}"))
    return kind.FromString(data)
