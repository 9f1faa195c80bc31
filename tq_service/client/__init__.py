"""Clients of the service: `AsyncClient`, and `Client` generated from it."""

from __future__ import annotations

from tq_service.client._async.client import AsyncClient
from tq_service.client._sync.client import Client
from tq_service.client.batch_meta import BatchMeta, Pack, Step
from tq_service.results import (
    CheckpointCopy,
    CheckpointSummary,
    ConsumptionStatus,
    FieldStatus,
    PartitionDescription,
    PartitionSummary,
    ProductionStatus,
    RestoredCheckpoint,
    SamplerDescription,
    StorageStat,
    TaskStatus,
)
from tq_service.schema import EndCounts
from tq_service.wire.credentials import Tls

__all__ = [
    "AsyncClient",
    "BatchMeta",
    "CheckpointCopy",
    "CheckpointSummary",
    "Client",
    "ConsumptionStatus",
    "EndCounts",
    "FieldStatus",
    "Pack",
    "PartitionDescription",
    "PartitionSummary",
    "ProductionStatus",
    "RestoredCheckpoint",
    "SamplerDescription",
    "Step",
    "StorageStat",
    "TaskStatus",
    "Tls",
]
