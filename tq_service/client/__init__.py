"""Clients of the service: `AsyncClient`, and `Client` generated from it."""

from __future__ import annotations

from tq_service.client._async.client import AsyncClient
from tq_service.client._async.watching import AsyncWatch
from tq_service.client._sync.client import Client
from tq_service.client._sync.watching import Watch
from tq_service.client.batch_meta import BatchMeta, Pack, Step
from tq_service.client.updates import PartitionUpdate, WatchUpdate
from tq_service.results import (
    CheckpointCopy,
    CheckpointSummary,
    ClaimLease,
    ConsumptionStatus,
    ControllerStatus,
    EvictedUnit,
    EvictedUnits,
    FieldStatus,
    PartitionDescription,
    PartitionList,
    PartitionSummary,
    PartitionWait,
    ProductionStatus,
    RecentBatch,
    RestoredCheckpoint,
    Revision,
    SamplerDescription,
    SamplerOption,
    ServiceInfo,
    ServiceStatus,
    StorageStat,
    StorageStatus,
    TaskStatus,
    WaitReason,
)
from tq_service.schema import EndCounts
from tq_service.wire.connection import Tls

__all__ = [
    "AsyncClient",
    "AsyncWatch",
    "BatchMeta",
    "CheckpointCopy",
    "CheckpointSummary",
    "ClaimLease",
    "Client",
    "ConsumptionStatus",
    "ControllerStatus",
    "EndCounts",
    "EvictedUnit",
    "EvictedUnits",
    "FieldStatus",
    "Pack",
    "PartitionDescription",
    "PartitionList",
    "PartitionSummary",
    "PartitionUpdate",
    "PartitionWait",
    "ProductionStatus",
    "RecentBatch",
    "RestoredCheckpoint",
    "Revision",
    "SamplerDescription",
    "SamplerOption",
    "ServiceInfo",
    "ServiceStatus",
    "Step",
    "StorageStat",
    "StorageStatus",
    "TaskStatus",
    "Tls",
    "WaitReason",
    "Watch",
    "WatchUpdate",
]
