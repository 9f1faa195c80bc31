"""What the page shows at one moment, as JSON: all of it each time, so that a browser that comes late misses nothing.

Results of the client have the names of their attributes in it. Rates, curves and times of waits come from `trends.py`.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import fields, is_dataclass
from typing import Any, Final

from tq_service.observe.page.trends import PartitionTrend, Trends, recent_mean
from tq_service.results import PartitionDescription, ServiceStatus

MOST_PARTITIONS: Final = 200
"""Partitions that are shown, those that have changed last; the others are counted."""

_MOST_WAITS: Final = 200
_MOST_FIELDS: Final = 64
_MOST_TASKS: Final = 64
_LEFT_OUT: Final = {"recent_batches": (), "dead_lettered_indexes": ()}  # of a task: batches are in the balances


def as_json(document: dict[str, Any]) -> bytes:
    """Return a document as JSON of one line."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False, default=_json_value).encode()


def _json_value(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else _facts(value)


def _facts(result: Any) -> dict[str, Any]:
    if not is_dataclass(result):
        raise TypeError(f"got {result!r}, expected a result of the client")
    return {each.name: getattr(result, each.name) for each in fields(result)}


def status_of(status: ServiceStatus, trends: Trends, now: float) -> dict[str, Any]:
    """Return the state of the service for the page, as `as_json` takes it.

    Args:
        status: the last one that was read.
        trends: those that have seen it.
        now: seconds of their clock.
    """
    shown = heapq.nlargest(
        MOST_PARTITIONS,
        status.partitions,
        key=lambda each: (trends.partitions[each.summary.partition_id].changed_at, not each.summary.sealed),
    )
    waits = sorted(status.waits, key=trends.waits_since)
    return {
        "service": {**_facts(status.service), "data_dir": ""},  # not for everybody who may see the page
        "storages": [
            {**_facts(each), "heir": status.heir_of(each) if each.is_adopted else None} for each in status.storages
        ],
        "totals": _totals(status, trends),
        "partitions": [_partition(each, trends.partitions[each.summary.partition_id]) for each in shown],
        "hidden_partition_count": len(status.partitions) - len(shown),
        "waits": [
            {**_facts(wait.reason), "partition_id": wait.partition_id, "seconds": round(now - since, 1)}
            for wait in waits[:_MOST_WAITS]
            for since in (trends.waits_since(wait),)
        ],
        "hidden_wait_count": max(0, len(waits) - _MOST_WAITS),
        "balances": [
            {"group": group, "task": task, "batches": [{**_facts(batch), "partition_id": name} for name, batch in last]}
            for (group, task), last in sorted(trends.balances.items())
        ],
    }


def _totals(status: ServiceStatus, trends: Trends) -> dict[str, Any]:
    partitions, storages = status.partitions, status.own_storages
    tasks = [task for partition in partitions for task in partition.tasks]
    quotas = [storage.max_bytes for storage in storages]
    return {
        "partition_count": len(partitions),
        "open_count": sum(not partition.summary.sealed for partition in partitions),
        "inserted_per_second": recent_mean(trends.curves["inserted"]),
        "delivered_per_second": recent_mean(trends.curves["delivered"]),
        "present_count": sum(partition.summary.present_count for partition in partitions),
        "held_count": sum(partition.held_count for partition in partitions),
        "failed_count": sum(partition.failed_count for partition in partitions),
        "used_bytes": sum(storage.used_bytes for storage in storages),
        "max_bytes": None if None in quotas else sum(quota or 0 for quota in quotas),
        "waiting_claim_count": sum(wait.reason.waiting_count for wait in status.waits),
        "waiting_put_count": sum(partition.waiting_put_count for partition in partitions),
        "leased_count": sum(task.leased_count for task in tasks),
        "redelivered_count": sum(task.redelivered_count for task in tasks),
        "dead_lettered_count": sum(task.dead_lettered_count for task in tasks),
        "curves": {name: list(curve) for name, curve in trends.curves.items()},
    }


def _partition(partition: PartitionDescription, trend: PartitionTrend) -> dict[str, Any]:
    return {
        **_facts(partition),
        "inserted_per_second": recent_mean(trend.inserted_per_second),
        "curve": list(trend.present),
        "field_count": len(partition.fields),
        "fields": partition.fields[:_MOST_FIELDS],
        "custom_meta_columns": partition.custom_meta_columns[:_MOST_FIELDS],
        "tasks": [
            {**_facts(task), **_LEFT_OUT, "curve": list(trend.delivered_per_second[task.task_name])}
            for task in partition.tasks[:_MOST_TASKS]
        ],
    }
