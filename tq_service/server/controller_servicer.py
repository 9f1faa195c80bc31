"""The controller's methods: each converts, calls the domain, converts."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

import grpc
import numpy as np

from tq_service.dataplane._async.kinds import DRIVERS
from tq_service.domain.catalog import Catalog, check_name
from tq_service.domain.changes.claims import ClaimAcked, ClaimExtended, ClaimReleased, ConsumptionReset
from tq_service.domain.changes.partitions import PartitionSealed
from tq_service.domain.changes.samples import GroupsClosed, MetaSet, SamplesCleared
from tq_service.domain.claims.ledger import QueueClaim
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes
from tq_service.errors import (
    CellNotFoundError,
    DeadlineError,
    FieldNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    nearest,
)
from tq_service.samplers import PlanRunner, SamplerRegistry
from tq_service.server import from_proto, pages, to_proto
from tq_service.server.checkpoints import Checkpoints
from tq_service.server.commits import Commits
from tq_service.server.remote_storage import Capacity, Registration
from tq_service.server.rpc.limits import WaitingCalls
from tq_service.server.storage_messages import MOST_OVERDUE_PUTS
from tq_service.server.storages import StorageRegistry
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import controller_service_pb2_grpc
from tq_service.wire.metadata import decode_integers, decode_meta_columns

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Request = TypeVar("Request", bound=Any)  # a message with a request_id
Answer = TypeVar("Answer")
_CLEARED_AT_ONCE: Final = 1 << 15  # samples, between which others have their turn


def _once(
    change: Callable[[ControllerServicer, Request], Answer],
) -> Callable[[ControllerServicer, Request, Context], Awaitable[Answer]]:
    """Return a method that makes the changes of a request once for each `request_id`; repeats get the same answer."""
    answer: type = get_type_hints(change)["return"]

    async def method(self: ControllerServicer, request: Request, context: Context) -> Answer:
        return self.catalog.run_once(request.request_id, lambda: change(self, request), answer)

    return method


@dataclass(eq=False, kw_only=True)
class ControllerServicer(controller_service_pb2_grpc.ControllerServiceServicer):
    """Implements `ControllerService`; what each method changes and answers stands in its proto."""

    catalog: Catalog
    commits: Commits
    registry: SamplerRegistry
    runner: PlanRunner
    storages: StorageRegistry
    max_wait_cap_seconds: float
    waiting: WaitingCalls
    checkpoints: Checkpoints

    # Partitions

    @_once
    def CreatePartition(self, request: pb.CreatePartitionRequest) -> pb.CreatePartitionResponse:
        partition = self.catalog.create(request.partition_id, from_proto.partition_settings(request))
        return pb.CreatePartitionResponse(incarnation=partition.incarnation)

    @_once
    def SealPartition(self, request: pb.SealPartitionRequest) -> pb.SealPartitionResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        self.catalog.commit(PartitionSealed(partition_id=partition.partition_id))
        return pb.SealPartitionResponse(inserted_count=partition.inserted_count)

    @_once
    def ClearPartition(self, request: pb.ClearPartitionRequest) -> pb.ClearPartitionResponse:
        count = self.catalog.remove(request.partition_id, request.incarnation)
        return pb.ClearPartitionResponse(cleared_count=count)

    async def ListPartitions(self, request: pb.ListPartitionsRequest, context: Context) -> pb.ListPartitionsResponse:
        names = sorted(name for name in self.catalog.names() if name.startswith(request.prefix))
        return pb.ListPartitionsResponse(partitions=[to_proto.summary(self.catalog.get(name)) for name in names])

    async def DescribePartition(
        self, request: pb.DescribePartitionRequest, context: Context
    ) -> pb.DescribePartitionResponse:
        return to_proto.description(self.catalog, self.catalog.get(request.partition_id))

    # Samples

    async def Insert(self, request: pb.InsertRequest, context: Context) -> pb.InsertResponse:
        return await self.commits.insert(request, context)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        return await self.commits.commit(request, context)

    @_once
    def SetCustomMeta(self, request: pb.SetCustomMetaRequest) -> pb.SetCustomMetaResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        indexes = decode_integers(request.global_indexes)
        columns = decode_meta_columns(request.custom_meta, indexes.size)
        self.catalog.limits.check_meta(partition, columns)
        change = MetaSet(partition_id=partition.partition_id, global_indexes=indexes, columns=columns)
        self.catalog.commit(change)
        return pb.SetCustomMetaResponse()

    @_once
    def CloseGroups(self, request: pb.CloseGroupsRequest) -> pb.CloseGroupsResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        self.catalog.commit(GroupsClosed(partition_id=partition.partition_id, names=list(request.groups)))
        return pb.CloseGroupsResponse()

    async def ClearSamples(self, request: pb.ClearSamplesRequest, context: Context) -> pb.ClearSamplesResponse:
        def clear(partition: Partition, start: int) -> int:
            indexes = _indexes_to_clear(partition, listed, request.keys, start)
            change = SamplesCleared(partition_id=partition.partition_id, global_indexes=indexes)
            return self.catalog.commit(change) or 0

        def change() -> pb.ClearSamplesResponse:
            partition = self.catalog.get(request.partition_id, request.incarnation)
            return pb.ClearSamplesResponse(cleared_count=cleared_count + clear(partition, last))

        listed = decode_integers(request.global_indexes)
        cleared_count, last = 0, _last_part(listed.size + len(request.keys))
        if last and self.catalog.recorded(request.request_id, pb.ClearSamplesResponse) is None:
            from_proto.check_request_id(request.request_id, "request_id")
            partition = self.catalog.get(request.partition_id, request.incarnation)
            request.incarnation = partition.incarnation  # what comes under the name meanwhile is another
            for start in range(0, last, _CLEARED_AT_ONCE):
                partition = self.catalog.get(request.partition_id, request.incarnation)
                cleared_count += clear(partition, start)
                await asyncio.sleep(0)
        return self.catalog.run_once(request.request_id, change, pb.ClearSamplesResponse)

    # Finding samples and cells

    async def LookupSamples(self, request: pb.LookupSamplesRequest, context: Context) -> pb.LookupSamplesResponse:
        partition, page = pages.find_page(self.catalog, request)
        fields = list(partition.cells.fields)
        return pb.LookupSamplesResponse(
            meta=to_proto.samples_meta(partition, page.rows, fields, self.storages.endpoints),
            missing_keys=page.missing_keys,
            next_page_token=pages.token_of(partition, page),
        )

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        partition = self.catalog.get(request.partition_id, request.incarnation)
        names = list(request.data_fields) or list(partition.cells.fields)
        _check_fields(partition, names)
        rows = _rows_to_locate(partition, request)
        positions = partition.table.find(rows)
        found = positions >= 0
        found[found] = partition.cells.produced(names, positions[found])
        if not found.all() and not request.skip_missing:
            raise _missing_cell(partition, names, rows[~found])
        meta = to_proto.located_meta(partition, positions[found], names, self.storages.endpoints)
        return pb.LocateResponse(meta=meta)

    # Tasks

    async def GetMeta(self, request: pb.GetMetaRequest, context: Context) -> pb.GetMetaResponse:
        if request.max_wait_seconds <= 0:
            return await self._claim(request, context)
        with self.waiting.one(context):  # before all that costs, so that one too many costs little
            return await self._claim(request, context)

    async def _claim(self, request: pb.GetMetaRequest, context: Context) -> pb.GetMetaResponse:
        spec = from_proto.claim_spec(request)
        sampler = await self.registry.resolve_json(spec.batch_spec.sampler, spec.batch_spec.sampler_config)
        claim = from_proto.claim_request(request, spec, sampler)
        self.runner.check(sampler, spec.plan_request)
        seconds = from_proto.max_wait(request, self.max_wait_cap_seconds)
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:  # no client would get what is delivered now
            raise DeadlineError("the call's deadline had passed when it arrived")
        claimed = await self.catalog.claim(request.partition_id, request.incarnation, claim, seconds)
        meta = to_proto.claim_meta(
            request.partition_id, claimed, claim.task_name, spec.data_fields, self.storages.endpoints,
            now=asyncio.get_running_loop().time(),
        )  # fmt: skip
        if claimed.partition is not None and isinstance(claimed.answer, QueueClaim):
            self._retract_if_unsent(context, claimed.partition, claim.task_name, claim.request_id)
        return pb.GetMetaResponse(meta=meta)

    def _retract_if_unsent(self, context: Context, partition: Partition, task_name: str, request_id: bytes) -> None:
        """Undo a queue claim when the call turns out to have ended before its answer was sent."""
        asked = weakref.ref(partition)  # gRPC holds the callback in a cycle, which may be collected much later

        def when_done(done: Context) -> None:
            partition = asked()
            if done.cancelled() and partition is not None:
                self.catalog.retract(partition, task_name, request_id)

        context.add_done_callback(when_done)  # type: ignore[arg-type]  # typed as a class, called as a function

    @_once
    def ReleaseClaim(self, request: pb.ReleaseClaimRequest) -> pb.ReleaseClaimResponse:
        from_proto.check_request_id(request.claim_request_id, "claim_request_id")
        check_name("task_name", request.task_name)
        if request.partition_id not in self.catalog.names():  # the claim went with its partition
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
        from_proto.check_request_id(request.claim_request_id, "claim_request_id")
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
        from_proto.check_request_id(request.claim_request_id, "claim_request_id")
        seconds = from_proto.lease_seconds(request.lease_seconds)
        self.catalog.get(request.partition_id, request.incarnation)
        change = ClaimExtended(
            partition_id=request.partition_id,
            task_name=request.task_name,
            request_id=request.claim_request_id,
            lease_seconds=seconds,
        )
        return pb.ExtendClaimResponse(leased_count=self.catalog.commit(change))

    async def CheckConsumption(
        self, request: pb.CheckConsumptionRequest, context: Context
    ) -> pb.CheckConsumptionResponse:
        partition = self.catalog.get(request.partition_id)
        return to_proto.consumption(partition, partition.known_task(request.task_name))

    async def CheckProduction(self, request: pb.CheckProductionRequest, context: Context) -> pb.CheckProductionResponse:
        partition = self.catalog.get(request.partition_id)
        if not request.data_fields:
            raise InvalidArgumentError("data_fields is empty; name at least one field", field="data_fields")
        _check_fields(partition, list(request.data_fields))
        return to_proto.production(partition, list(request.data_fields))

    @_once
    def ResetConsumption(self, request: pb.ResetConsumptionRequest) -> pb.ResetConsumptionResponse:
        change = ConsumptionReset(
            partition_id=request.partition_id,
            task_name=request.task_name,
            keep_consumed=request.keep_consumed,
            epoch=request.epoch,
        )
        return pb.ResetConsumptionResponse(epoch=self.catalog.commit(change))

    async def ListSamplers(self, request: pb.ListSamplersRequest, context: Context) -> pb.ListSamplersResponse:
        return pb.ListSamplersResponse(
            samplers=[
                pb.SamplerDescription(name=info.name, summary=info.summary, options=info.options)
                for info in self.registry.describe()
            ]
        )

    # Checkpoints

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.CheckpointResponse:
        return await self.checkpoints.write(request.name)

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        from_proto.check_request_id(request.request_id, "request_id")
        return await self.checkpoints.restore(request.request_id, request.name)

    # Storage services

    async def PlacePut(self, request: pb.PlacePutRequest, context: Context) -> pb.PlacePutResponse:
        from_proto.check_range("size_bytes", request.size_bytes, 0)
        grant = self.storages.place(request.size_bytes)
        return pb.PlacePutResponse(
            storages=[each.endpoint for each in grant.storages],
            embedded=grant.storages[0] is self.storages.embedded,
            controller_id=self.storages.controller_id,
            grant_seconds=grant.seconds,
            grant_bytes=grant.max_bytes,
            max_granted_put_bytes=grant.max_put_bytes,
        )

    async def RegisterStorage(self, request: pb.RegisterStorageRequest, context: Context) -> pb.RegisterStorageResponse:
        storage = request.storage
        if not storage.storage_id or not storage.address or len(storage.boot_id) != 16:
            raise InvalidArgumentError(
                "a storage service registers with a storage_id, an address and a boot_id of 16 bytes",
                field="storage",
            )
        check_name("storage_id", storage.storage_id)
        check_name("address", storage.address)
        if storage.kind not in DRIVERS:
            raise InvalidArgumentError(
                f"a storage service of kind {storage.kind!r} registers; expected one of {', '.join(DRIVERS)}",
                field="storage",
            )
        if (count := len(request.overdue_put_ids)) > MOST_OVERDUE_PUTS:
            raise InvalidArgumentError(
                f"overdue_put_ids has {count} puts, expected at most {MOST_OVERDUE_PUTS}; name the others "
                "in the next call",
                field="overdue_put_ids",
            )
        is_known = request.controller_id == self.storages.controller_id  # else it speaks of another one's puts
        registration = Registration(
            endpoint=storage,
            run_id=request.run_id,
            capacity=Capacity(max_bytes=request.max_bytes or None, used_bytes=request.used_bytes),
            receipts_from=request.receipts_from if is_known else 0,
        )
        answer = self.storages.on_heartbeat(registration, request.overdue_put_ids if is_known else ())
        return pb.RegisterStorageResponse(
            heartbeat_seconds=self.storages.heartbeat_seconds,
            controller_id=self.storages.controller_id,
            receipt_key=answer.receipt_key,
            unknown_put_ids=answer.unknown,
            undecided_put_ids=answer.undecided,
        )


def _named_indexes(request: pb.ReleaseClaimRequest | pb.AckClaimRequest) -> Indexes | None:
    """Return the samples of a claim that are named, None for all that are left of it."""
    return decode_integers(request.global_indexes) if request.global_indexes else None


def _check_fields(partition: Partition, names: list[str]) -> None:
    for name in names:
        if name not in partition.cells.fields:
            known = nearest(name, partition.cells.fields)
            raise FieldNotFoundError(f"partition {partition.partition_id!r} has no field {name!r}; {known}")


def _last_part(count: int) -> int:
    """Return where the last part of so many samples begins that are to be cleared."""
    return max(0, count - 1) // _CLEARED_AT_ONCE * _CLEARED_AT_ONCE


def _indexes_to_clear(partition: Partition, listed: Indexes, keys: Sequence[str], start: int) -> Indexes:
    """Return a part of the samples that are to be cleared, -1 for a key that none has."""
    end = start + _CLEARED_AT_ONCE
    some = keys[max(0, start - listed.size) : max(0, end - listed.size)]
    if not some:
        return listed[start:end]
    positions = partition.key_index.positions_of(some)
    rows = np.where(positions < 0, -1, partition.table.index.data[positions])
    return np.concatenate([listed[start:end], rows])


def _rows_to_locate(partition: Partition, request: pb.LocateRequest) -> Indexes:
    pages.check_named("keys", len(request.keys))
    pages.check_named("global_indexes", len(request.global_indexes))
    if request.keys and request.global_indexes:
        raise InvalidArgumentError("samples are named by index or by key, not by both", field="keys")
    if not request.keys:
        rows = decode_integers(request.global_indexes)
        if not request.skip_missing:
            partition.positions_of(rows)
        return rows
    positions = partition.key_index.positions_of(list(request.keys))
    if not request.skip_missing and bool((positions < 0).any()):
        key = request.keys[int(np.argmax(positions < 0))]
        raise KeyNotFoundError(
            f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, partition.key_index)}; "
            f"pass missing='skip' to leave it out"
        )
    named: Indexes = partition.table.index.data[positions[positions >= 0]]
    return named


def _missing_cell(partition: Partition, names: list[str], rows: Indexes) -> CellNotFoundError:
    positions = partition.table.find(rows[:1])
    lacking = [name for name in names if not partition.cells.produced([name], positions)[0]]
    key = partition.key.data[positions[0]]
    return CellNotFoundError(
        f"sample {int(rows[0])}{'' if key is None else f' (key {key!r})'} of partition {partition.partition_id!r} has "
        f"no {', '.join(map(repr, lacking))} yet ({rows.size} samples lack a field); wait with get_meta, or pass "
        f"missing='skip'"
    )
