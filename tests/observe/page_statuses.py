"""States of a service, as its clients read them, for tests of the live page."""

from __future__ import annotations

from typing import Any

from tq_service.results import (
    FieldStatus,
    MirrorStatus,
    PartitionDescription,
    PartitionSummary,
    PartitionWait,
    RecentBatch,
    ServiceInfo,
    ServiceStatus,
    StorageStatus,
    TaskStatus,
    WaitReason,
)
from tq_service.schema import FieldSpec
from tq_service.types import Revision


def service(instance: bytes = b"a" * 16, **values: Any) -> ServiceInfo:
    given = {
        "version": "0.1.0", "role": "all", "uptime_seconds": 61.0, "durability": "process", "data_dir": "",
        "tls": False, "client_certificates": False, "auth": False, "shared_memory": True, **values,
    }  # fmt: skip
    return ServiceInfo(instance_id=instance, **given)


def storage(storage_id: str = "s0", **values: Any) -> StorageStatus:
    given = {
        "address": "", "used_bytes": 100, "max_bytes": 1000, "put_count": 3, "version": "0.1.0",
        "heard_ago_seconds": None, "is_silent": False, **values,
    }  # fmt: skip
    return StorageStatus(storage_id=storage_id, **given)


def mirror(*, is_reachable: bool | None = True, **values: Any) -> MirrorStatus:
    given = {"url": "s3://bucket/prefix", "unmirrored_bytes": 0, "short_put_count": 0, **values}
    return MirrorStatus(is_reachable=is_reachable, **given)


def mirrored() -> tuple[StorageStatus, ...]:
    """Return storage services with mirrors: s1 has taken over what s0 had, and s0 is there again."""
    return (
        storage(
            "s0",
            address="10.0.0.1:1",
            heard_ago_seconds=1.0,
            mirror=mirror(is_reachable=False, unmirrored_bytes=3_400_000),
        ),
        storage(
            "s0",
            address="10.0.0.2:1",
            heard_ago_seconds=1.0,
            mirror=mirror(is_reachable=None, unfetched_put_count=2),
            is_adopted=True,
            max_bytes=None,
            used_bytes=100,
            put_count=7,
        ),
        storage("s1", address="10.0.0.2:1", heard_ago_seconds=1.0, mirror=mirror(short_put_count=1_234)),
        storage("s2", address="10.0.0.3:1", heard_ago_seconds=1.0),
    )


def task(name: str = "update", **values: Any) -> TaskStatus:
    given = {
        "epoch": 0, "consumed_count": 0, "skipped_count": 0, "planned_batch_count": 0, "dp_size": 0, "waiting_count": 0,
        "complete": False, **values,
    }  # fmt: skip
    return TaskStatus(task_name=name, **given)


def partition(
    name: str = "train@0",
    inserted: int = 8,
    *,
    present: int | None = None,
    incarnation: bytes = b"i" * 16,
    sealed: bool = False,
    **values: Any,
) -> PartitionDescription:
    present = inserted if present is None else present
    summary = PartitionSummary(
        partition_id=name, incarnation=incarnation, inserted_count=inserted, present_count=present, sealed=sealed
    )
    given = {
        "expected_samples": None, "live_count": present, "held_count": 0, "failed_count": 0, "group_count": 0,
        "rollout_count": 0,
        "fields": (FieldStatus(spec=FieldSpec("x", dtype="int64", layout="jagged"), produced_count=present),),
        "tasks": (), "custom_meta_columns": (), "used_bytes": 64, "max_bytes": None, "admissions": (),
        "waiting_put_count": 0, "declared_tasks": (), "samples_per_round": None, **values,
    }  # fmt: skip
    return PartitionDescription(summary=summary, **given)


def wait(partition_id: str = "train@0", task_name: str = "update", **values: Any) -> PartitionWait:
    given = {"code": "TOO_FEW_READY", "text": "0 samples are ready", "waiting_count": 1, **values}
    return PartitionWait(partition_id=partition_id, reason=WaitReason(task_name=task_name, **given))


def batch(index: int, *tokens: int, imbalance: float = 0.0) -> RecentBatch:
    return RecentBatch(batch_index=index, tokens_per_rank=tokens, imbalance=imbalance)


def status(*partitions: PartitionDescription, **values: Any) -> ServiceStatus:
    revision = Revision(instance_id=b"r" * 16, number=1)
    given = {"service": service(), "storages": (storage(),), "waits": (), "revision": revision, **values}
    return ServiceStatus(partitions=partitions, **given)
