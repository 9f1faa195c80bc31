"""What the page shows at one moment, as JSON: all of it each time, so that a browser that comes late misses nothing."""

from __future__ import annotations

import heapq
from dataclasses import asdict
from typing import Any, Final

from tq_service.observe.page.trends import Balance, PartitionTrend, Trends, recent_mean, rounded
from tq_service.results import (
    ClaimLease,
    FieldStatus,
    PartitionDescription,
    PartitionWait,
    RecentBatch,
    ServiceStatus,
    StorageStatus,
    TaskStatus,
)

MOST_PARTITIONS: Final = 200
"""Partitions that are shown, those that have changed last; the others are counted."""

_MOST_WAITS: Final = 200
_MOST_FIELDS: Final = 64
_MOST_TASKS: Final = 64


def status_of(status: ServiceStatus, trends: Trends, now: float) -> dict[str, Any]:
    """Return the state of the service for the page.

    Args:
        status: the last one that was read.
        trends: those that have seen it.
        now: seconds of their clock.
    """
    service = status.service
    by_name = {each.summary.partition_id: each for each in status.partitions}
    shown = heapq.nlargest(
        MOST_PARTITIONS,
        by_name,
        key=lambda name: (trends.partitions[name].changed_at, by_name[name].summary.sealed is False),
    )
    waits = sorted(status.waits, key=trends.waits_since)
    return {
        "service": {
            "version": service.version,
            "instance": service.instance_id.hex()[:8],
            "role": service.role,
            "uptime_seconds": round(service.uptime_seconds, 1),
            "durability": service.durability,
            "tls": service.tls,
            "client_certificates": service.client_certificates,
            "auth": service.auth,
            "shared_memory": service.shared_memory,
        },
        "storages": [_storage(status, storage) for storage in status.storages],
        "totals": _totals(status, trends),
        "partitions": [_partition(by_name[name], trends.partitions[name]) for name in shown],
        "hidden_partition_count": len(by_name) - len(shown),
        "waits": [_wait(wait, now - trends.waits_since(wait)) for wait in waits[:_MOST_WAITS]],
        "hidden_wait_count": max(0, len(waits) - _MOST_WAITS),
        "balances": [
            {"group": group, "task": task, **_balance(balance)}
            for (group, task), balance in sorted(trends.balances.items())
        ],
    }


def _storage(status: ServiceStatus, storage: StorageStatus) -> dict[str, Any]:
    return {
        "id": storage.storage_id,
        "address": storage.address,
        "used_bytes": storage.used_bytes,
        "max_bytes": storage.max_bytes,
        "put_count": storage.put_count,
        "heard_ago_seconds": storage.heard_ago_seconds,
        "is_silent": storage.is_silent,
        "is_adopted": storage.is_adopted,
        "heir": status.heir_of(storage) if storage.is_adopted else None,
        "mirror": None if storage.mirror is None else asdict(storage.mirror),
    }


def _totals(status: ServiceStatus, trends: Trends) -> dict[str, Any]:
    tasks = [task for partition in status.partitions for task in partition.tasks]
    quotas = [storage.max_bytes for storage in status.own_storages]
    return {
        "partition_count": len(status.partitions),
        "open_count": sum(not partition.summary.sealed for partition in status.partitions),
        "inserted_per_second": recent_mean(trends.inserted_per_second),
        "delivered_per_second": recent_mean(trends.delivered_per_second),
        "present_count": sum(partition.summary.present_count for partition in status.partitions),
        "held_count": sum(partition.held_count for partition in status.partitions),
        "failed_count": sum(partition.failed_count for partition in status.partitions),
        "used_bytes": sum(storage.used_bytes for storage in status.own_storages),
        "max_bytes": None if None in quotas else sum(quota or 0 for quota in quotas),
        "waiting_claim_count": sum(wait.reason.waiting_count for wait in status.waits),
        "waiting_put_count": sum(partition.waiting_put_count for partition in status.partitions),
        "leased_count": sum(task.leased_count for task in tasks),
        "redelivered_count": sum(task.redelivered_count for task in tasks),
        "dead_lettered_count": sum(task.dead_lettered_count for task in tasks),
        "curves": {
            "inserted": list(trends.inserted_per_second),
            "delivered": list(trends.delivered_per_second),
            "present": list(trends.present),
            "used": list(trends.used_bytes),
        },
    }


def _partition(partition: PartitionDescription, trend: PartitionTrend) -> dict[str, Any]:
    summary = partition.summary
    return {
        "name": summary.partition_id,
        "incarnation": summary.incarnation.hex()[:8],
        "sealed": summary.sealed,
        "inserted_count": summary.inserted_count,
        "expected_count": partition.expected_samples,
        "samples_per_round": partition.samples_per_round,
        "present_count": summary.present_count,
        "live_count": partition.live_count,
        "held_count": partition.held_count,
        "failed_count": partition.failed_count,
        "group_count": partition.group_count,
        "used_bytes": partition.used_bytes,
        "max_bytes": partition.max_bytes,
        "waiting_put_count": partition.waiting_put_count,
        "limits": [
            {
                "task": limit.task_name,
                "max_samples": limit.max_samples,
                "max_versions": limit.max_versions,
                "version_column": limit.version_column,
            }
            for limit in partition.staleness_limits
        ],
        "inserted_per_second": recent_mean(trend.inserted_per_second),
        "curve": list(trend.present),
        "field_count": len(partition.fields),
        "fields": [_field(each) for each in partition.fields[:_MOST_FIELDS]],
        "columns": [column.name for column in partition.custom_meta_columns[:_MOST_FIELDS]],
        "task_count": len(partition.tasks),
        "tasks": [
            {**_task(each), "curve": list(trend.delivered_per_second[each.task_name])}
            for each in partition.tasks[:_MOST_TASKS]
        ],
    }


def _field(each: FieldStatus) -> dict[str, Any]:
    spec = each.spec
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "layout": str(spec.layout),
        "row_shape": None if spec.row_shape is None else list(spec.row_shape),
        "produced_count": each.produced_count,
    }


def _task(task: TaskStatus) -> dict[str, Any]:
    return {
        "name": task.task_name,
        "epoch": task.epoch,
        "consumed_count": task.consumed_count,
        "pending_count": task.pending_count,
        "skipped_count": task.skipped_count,
        "leased_count": task.leased_count,
        "redelivered_count": task.redelivered_count,
        "dead_lettered_count": task.dead_lettered_count,
        "batch_count": task.planned_batch_count,
        "rank_count": task.dp_size,
        "waiting_count": task.waiting_count,
        "complete": task.complete,
        "delivered_per_second": rounded(task.delivered_per_second),
        "oldest_version": task.oldest_version,
        "staleness_versions": task.staleness_versions,
        "lease_count": task.leasing_claim_count,
        "leases": [_lease(each) for each in task.leases],
    }


def _lease(lease: ClaimLease) -> dict[str, Any]:
    return {
        "name": lease.claim_name or lease.claim_id,
        "count": lease.leased_count,
        "seconds": round(lease.delivered_ago_seconds),
        "left_seconds": round(lease.ends_in_seconds),
    }


def _wait(wait: PartitionWait, seconds: float) -> dict[str, Any]:
    reason = wait.reason
    return {
        "partition": wait.partition_id,
        "task": reason.task_name,
        "fields": list(reason.data_fields),
        "code": str(reason.code),
        "text": reason.text,
        "waiting_count": reason.waiting_count,
        "ready_count": reason.ready_count,
        "needed_count": reason.needed_count,
        "counts_groups": reason.counts_groups,
        "not_ready": [{"kind": each.kind, "name": each.name, "count": each.sample_count} for each in reason.not_ready],
        "put_waits_for": reason.put_waits_for,
        "seconds": round(seconds, 1),
    }


def _balance(balance: Balance) -> dict[str, Any]:
    return {"batches": [_batch(name, batch) for name, batch in balance.batches]}


def _batch(partition_id: str, batch: RecentBatch) -> dict[str, Any]:
    return {
        "partition": partition_id,
        "index": batch.batch_index,
        "tokens": list(batch.tokens_per_rank),
        "imbalance": round(batch.imbalance, 6),
        "padding_share": round(batch.padding_share, 6),
    }
