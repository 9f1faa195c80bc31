"""Serves the steps of a recording in read-only mode. Each rank receives the same batches as during the recording.

    GetMeta of (partition, task, batch_index, dp_rank) -> recorded plan -> the rank's part of the batch
    Get of cells -> put, read from the recording and verified on first use

Clients and loaders need no changes. Calls that change state or request unrecorded data are rejected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NoReturn

from grpc_health.v1 import health_pb2_grpc

from tq_service.config import ServeSettings, join_address
from tq_service.errors import (
    BatchForgottenError,
    InvalidArgumentError,
    PartitionNotFoundError,
    PolicyNotFoundError,
    PreconditionError,
    RankDisagreementError,
    SampleNotFoundError,
    StaleIncarnationError,
    TaskNotFoundError,
    nearest,
)
from tq_service.recording.layout import RecordedStep
from tq_service.recording.reading import (
    RecordedPuts,
    Recording,
    only_fields,
    positions_of_rank,
    samples_of,
    summary_of,
)
from tq_service.schema import EndCounts, check_name, check_passed_on, check_range
from tq_service.server.app import CONTROLLER_SERVICE, make_server
from tq_service.server.converters import add_plan, rank_of
from tq_service.server.health import Health
from tq_service.server.listener import Listener
from tq_service.server.rpc.batches import Batches
from tq_service.server.rpc.calls import ObservedCalls, RunningCalls, Services
from tq_service.server.rpc.methods import Behavior, Caller, Context, Method, Middleware
from tq_service.server.storage_servicer import SERVICE as STORAGE_SERVICE
from tq_service.server.storage_servicer import StorageServicer, endpoint_of
from tq_service.state.plan import Rank
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import controller_service_pb2_grpc, metadata_pb2
from tq_service.v1.storage_service_pb2_grpc import add_StorageServiceServicer_to_server
from tq_service.version import BUILD
from tq_service.wire.messages import to_duration, to_message
from tq_service.wire.metadata import decode_integers, read_indexes

REPLAYED: Final = frozenset(
    {"GetMeta", "CallMany", "Locate", "ListPartitions", "GetVersion", "GetStatus", "Get", "GetInline", "Stat"}
)
"""Methods available in a replay, in addition to those of the health service."""


class ReadOnly(Middleware):
    """Rejects calls to methods that are not available in a replay."""

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return the handler if the method is available. Otherwise, return a handler that rejects all calls."""
        if method.is_open or method.short_name in REPLAYED:
            return behavior

        async def refuse(_request: Any, _context: Context) -> NoReturn:
            raise PreconditionError(
                f"{method.short_name} is not available, because this service only replays recorded batches. Claim "
                "batches by batch_index and dp_rank, then get their data. For all other calls, use tq-service serve",
                reason="READ_ONLY",
                metadata={"method": method.short_name},
            )

        return refuse


class ReplayServicer(controller_service_pb2_grpc.ControllerServiceServicer):
    """Serves recorded steps to ranks.

    Args:
        steps: steps to serve, as returned by `Recording.select`.
        endpoint: endpoint of the storage service that serves the steps' bytes.

    Attributes:
        batches: handler of CallMany streams, set by the code that adds this servicer to a server.
    """

    batches: Batches

    def __init__(self, steps: Sequence[RecordedStep], endpoint: metadata_pb2.StorageEndpoint) -> None:
        self._tasks: dict[str, dict[str, dict[int, RecordedStep]]] = {}  # steps by partition, task and batch_index
        for step in steps:
            tasks = self._tasks.setdefault(step.partition_id, {})
            tasks.setdefault(step.task_name, {})[step.batch_index] = step
        self._summary = summary_of(steps)
        self._policies = dict(steps[-1].policies)
        self._endpoint = endpoint
        self._metas: dict[int, metadata_pb2.BatchMeta] = {}
        self._instance_id = os.urandom(16)
        self._started_at = time.monotonic()

    async def GetMeta(self, request: pb.GetMetaRequest, context: Context) -> pb.GetMetaResponse:
        check_name("task_name", request.task_name)
        tasks = self._partition(request.partition_id)
        if request.task_name not in tasks:
            raise TaskNotFoundError(
                f"this replay has no batches of task {request.task_name!r} in partition {request.partition_id!r}; it "
                f"contains {self._summary}",
                metadata={"partition_id": request.partition_id, "task_name": request.task_name},
            )
        steps = tasks[request.task_name]
        _check_incarnation(next(iter(steps.values())), request.incarnation)
        rank = rank_of(request)
        if rank is None:
            raise InvalidArgumentError(
                "this replay contains only batches for ranks, but the request comes from a queue worker. Set "
                "batch_index, dp_rank and dp_size",
                field="batch_index",
            )
        check_range("batch_count", request.batch_count, 0)
        first, *more = range(rank.batch_index, rank.batch_index + (request.batch_count or 1))
        answer = pb.GetMetaResponse(meta=self._part(steps, first, rank, request.data_fields))
        for batch_index in more:
            if batch_index not in steps:
                break
            answer.more.append(self._part(steps, batch_index, rank, request.data_fields))
        return answer

    def _partition(self, partition_id: str) -> Mapping[str, dict[int, RecordedStep]]:
        check_name("partition_id", partition_id)
        tasks = self._tasks.get(partition_id)
        if tasks is None:
            raise PartitionNotFoundError(
                f"this replay has no partition {partition_id!r}; it contains {self._summary}",
                metadata={"partition_id": partition_id},
            )
        return tasks

    def _part(
        self, steps: Mapping[int, RecordedStep], batch_index: int, rank: Rank, data_fields: Sequence[str]
    ) -> metadata_pb2.BatchMeta:
        """Return a rank's part of a batch, or the task's end marker if the index is beyond the last batch.

        Raises:
            BatchForgottenError: the recording does not contain the batch.
            RankDisagreementError: the batch was planned for a different number of ranks.
        """
        step = steps.get(batch_index)
        if step is None:
            if batch_index > max(steps):
                return _end(steps)
            raise BatchForgottenError(
                f"this replay has no batch {batch_index}; it contains {summary_of(list(steps.values()))}. Request one "
                f"of these batches, and start loaders at batch {min(steps)}",
                metadata={"task_name": next(iter(steps.values())).task_name, "next_batch_index": str(min(steps))},
            )
        if rank.dp_size != step.dp_size:
            raise RankDisagreementError(
                f"dp_size is {rank.dp_size}, but batch {batch_index} was planned for {step.dp_size} ranks. Set "
                f"dp_size to {step.dp_size}",
                metadata={"field": "dp_size", "got": str(rank.dp_size), "expected": str(step.dp_size)},
            )
        part = samples_of(self._meta(step), positions_of_rank(step, rank.dp_rank), step.empty_fields)
        only_fields(part, data_fields)
        add_plan(part, step.plan.part(rank.dp_rank))
        return part

    def _meta(self, step: RecordedStep) -> metadata_pb2.BatchMeta:
        """Return the metadata of a step's samples, with all storage locations set to this service."""
        meta = self._metas.get(step.number)
        if meta is None:
            meta = self._metas[step.number] = metadata_pb2.BatchMeta.FromString(step.meta)
            for storage in meta.locations.storages:
                storage.CopyFrom(self._endpoint)
        return meta

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        indexes, keys = decode_integers(request.global_indexes).tolist(), list(request.keys)
        wanted: list[Any] = indexes or keys
        for step in chain.from_iterable(steps.values() for steps in self._partition(request.partition_id).values()):
            _check_incarnation(step, request.incarnation)
            meta = self._meta(step)
            named: list[Any] = read_indexes(meta).tolist() if indexes else list(meta.keys)
            position_of = dict(zip(named, range(len(named)), strict=True))
            if not all(name in position_of for name in wanted):
                continue
            part = samples_of(meta, decode_integers([position_of[name] for name in wanted]))
            located = {name for runs in part.locations.runs for name in runs.field_names}
            known = [spec.name for spec in part.fields if spec.name in located]
            names = list(request.data_fields) or known
            only_fields(part, [name for name in names if name in known] if request.skip_missing_fields else names)
            for name in ("custom_meta", "groups", "rollouts", "epoch"):
                part.ClearField(name)
            return pb.LocateResponse(meta=part)
        raise SampleNotFoundError(
            f"no recorded batch contains all of the {len(wanted)} requested samples (the first is {wanted[:1]}). "
            "Request samples from a single batch",
            metadata={"partition_id": request.partition_id, "global_index": str(next(iter(indexes), ""))},
        )

    async def ListPartitions(self, request: pb.ListPartitionsRequest, context: Context) -> pb.ListPartitionsResponse:
        answer = pb.ListPartitionsResponse(revision=pb.Revision(instance_id=self._instance_id, number=1))
        for partition_id, tasks in self._tasks.items():
            if partition_id.startswith(request.prefix):
                steps = next(iter(tasks.values()))
                answer.partitions.add(
                    partition_id=partition_id, incarnation=next(iter(steps.values())).incarnation, sealed=True
                )
        return answer

    async def GetVersion(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        if request.policy not in self._policies:
            raise PolicyNotFoundError(
                f"policy {request.policy!r} had no version when the last replayed batch was planned; "
                f"{nearest(request.policy, self._policies)}",
                metadata={"policy": request.policy},
            )
        return pb.GetVersionResponse(version=self._policies[request.policy])

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        uptime = to_duration(time.monotonic() - self._started_at)
        info = pb.ServiceInfo(
            version=BUILD, instance_id=self._instance_id, role="replay", uptime=uptime, durability="memory"
        )
        return pb.GetStatusResponse(service=info, revision=pb.Revision(instance_id=self._instance_id, number=1))

    async def CallMany(self, requests: Any, context: Context) -> None:  # type: ignore[override]  # it writes
        await self.batches.run(requests, context)


def _check_incarnation(step: RecordedStep, incarnation: bytes) -> None:
    if incarnation and incarnation != step.incarnation:
        check_passed_on("incarnation", incarnation)
        raise StaleIncarnationError(
            f"this replay contains incarnation {step.incarnation.hex()} of partition {step.partition_id!r}, but the "
            f"call is for {incarnation.hex()}. Select that incarnation with tq-service replay --incarnation",
            metadata={
                "partition_id": step.partition_id,
                "got": incarnation.hex(),
                "expected": step.incarnation.hex(),
            },
        )


def _end(steps: Mapping[int, RecordedStep]) -> metadata_pb2.BatchMeta:
    step = next(iter(steps.values()))
    end = EndCounts(consumed_count=sum(each.plan.rows.size for each in steps.values()))
    return metadata_pb2.BatchMeta(
        status=metadata_pb2.BATCH_STATUS_END,
        partition_id=step.partition_id,
        incarnation=step.incarnation,
        epoch=step.epoch,
        end=to_message(metadata_pb2.EndCounts, end),
    )


@contextlib.asynccontextmanager
async def replaying(recording: Recording, steps: Sequence[RecordedStep], settings: ServeSettings) -> AsyncIterator[int]:
    """Serve the steps of an open recording for the duration of the `async with` block.

    Args:
        recording: open recording that contains the steps and their puts.
        steps: see `ReplayServicer`.
        settings: listening address, TLS and access control of the server.

    Yields:
        The port number.

    Raises:
        OSError: the address is in use, or the process cannot listen on it.
    """
    async with contextlib.AsyncExitStack() as closing:
        listener = Listener(settings)
        closing.callback(listener.close)
        server = make_server(settings)
        closing.push_async_callback(server.stop, 0)
        port = listener.listen(server)
        puts = RecordedPuts(recording)
        engine = StorageEngine(max_bytes=None, storage_id="replay", backing=puts)
        closing.push_async_callback(engine.close)
        puts.add(steps)
        endpoint = endpoint_of(engine, "")
        services: Any = Services(
            server, [ObservedCalls(), RunningCalls(settings.max_calls), listener.access, ReadOnly()]
        )
        storage: Any = StorageServicer(engine, endpoint, stall_seconds=settings.stall_seconds)
        services.add_generic_rpc_handlers((storage.bulk_handler(),))
        add_StorageServiceServicer_to_server(storage, services)
        listener.access.partition_of = engine.partition_of
        make_servicer: Any = ReplayServicer  # abstract to type checkers, because the refused methods are missing
        servicer = make_servicer(steps, endpoint)
        servicer.batches = Batches(services, settings.stall_seconds)
        controller_service_pb2_grpc.add_ControllerServiceServicer_to_server(servicer, services)
        closing.callback(servicer.batches.drain)
        health = Health()
        health.add(("", STORAGE_SERVICE, CONTROLLER_SERVICE))
        health_pb2_grpc.add_HealthServicer_to_server(health, services)
        await server.start()
        health.serve()
        closing.callback(health.drain)
        yield port


async def replay(
    recording: Recording,
    steps: Sequence[RecordedStep],
    settings: ServeSettings,
    announce: Callable[[str], None],
) -> None:
    """Serve the steps of an open recording until SIGTERM or SIGINT. See `replaying`."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with replaying(recording, steps, settings) as port:
        announce(f"listening on {join_address(settings.host, port)} (replay)")
        announce(f"replaying {summary_of(steps)}, read-only")
        await stopping.wait()
