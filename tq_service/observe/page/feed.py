"""Reads the status of a service every 2 s, and sends it to all browsers as a JSON frame.

Each frame contains the complete state, so browsers can connect at any time. The JSON uses the attribute names from
`tq_service.results`. `trends.py` computes rates, curves and wait durations.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import fields, is_dataclass
from typing import Any, Final

from tq_service.client import AsyncClient
from tq_service.errors import DeadlineError, PermissionDeniedError, TqError, UnauthenticatedError
from tq_service.observe.page.trends import EventLog, PartitionTrend, Trends, recent_mean, rounded
from tq_service.results import PartitionDescription, ServiceStatus

INTERVAL_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 2.0


class Feed:
    """Reads the status of a service periodically, and yields the newest frame to each browser.

    `run` reads the status and creates a frame after each read. For each browser, `frames` returns an iterator that
    always yields the newest frame. Use the feed from a single event loop.

    Args:
        client: client of the service.
        prefix: only partitions whose names begin with this prefix are shown.
        interval_seconds: time between status calls.
    """

    def __init__(self, client: AsyncClient, *, prefix: str = "", interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._client = client
        self._prefix = prefix
        self._interval_seconds = interval_seconds
        self._run_id = secrets.token_hex(4)  # lets browsers detect a new run, which numbers events from 1 again
        self._trends = Trends()
        self._status: ServiceStatus | None = None
        self._seen_at = 0.0
        self._away_since: float | None = None
        self._state, self._problem = "connecting", ""
        self._events = EventLog()
        self._frame = b""
        self._changed = asyncio.Event()  # set when the next frame is published or the feed is closed
        self._closed = False

    async def run(self) -> None:
        """Call `look` periodically until cancelled, and continue even if the service does not respond."""
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.0, began + self._interval_seconds - time.monotonic()))

    async def look(self) -> None:
        """Read the service's status once, and publish a frame with the status or the error."""
        began = time.monotonic()
        try:
            status = await self._client.status(prefix=self._prefix, explain=True, timeout=_ANSWER_SECONDS)
        except TqError as error:
            self._miss(error, began)
        else:
            self._see(status, time.monotonic())
        self._publish()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the newest frame as a line of JSON, and then each new frame. A slow reader skips frames."""
        seen = b""
        while not self._closed:
            if self._frame is seen:
                await self._changed.wait()
            else:
                seen = self._frame
                yield seen

    def close(self) -> None:
        """Stop all iterators returned by `frames`."""
        self._closed = True
        self._changed.set()

    def _see(self, status: ServiceStatus, now: float) -> None:
        before, self._status = self._status, status
        self._trends.see(status, now)
        self._state, self._problem, self._seen_at = "serving", "", now
        away_since, self._away_since = self._away_since, None
        if away_since is not None:
            self._events.note(now, "back", f"the service is back after {_span(now - away_since)}")
        if before is not None:
            self._events.compare(before, status, now)

    def _miss(self, error: TqError, began: float) -> None:
        self._trends.miss()
        is_refused = isinstance(error, UnauthenticatedError | PermissionDeniedError)
        self._state = "refused" if is_refused else "away"
        first = (
            error.__cause__ if isinstance(error.__cause__, TqError) else error
        )  # the cause's message does not mention the number of attempts
        self._problem = f"no reply within {_ANSWER_SECONDS:g} s" if isinstance(error, DeadlineError) else first.message
        if self._away_since is None:
            self._away_since = began
            what = "rejects this page" if is_refused else "is unreachable"
            self._events.note(began, self._state, f"the service {what}: {self._problem}")

    def _publish(self) -> None:
        now = time.monotonic()
        document: dict[str, Any] = {
            "run": self._run_id,
            "address": self._client.address,
            "namespace": self._client.namespace,
            "prefix": self._prefix,
            "interval_seconds": self._interval_seconds,
            "state": self._state,
            "problem": self._problem,
            "away_seconds": None if self._away_since is None else round(now - self._away_since, 1),
            "seen_seconds": None if self._status is None else round(now - self._seen_at, 1),
            "status": None if self._status is None else status_of(self._status, self._trends, self._seen_at),
            "events": self._events.shown(now),
        }
        self._frame = as_json(document)
        self._changed.set()
        self._changed = asyncio.Event()


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


MOST_PARTITIONS: Final = 200
"""Maximum number of partitions in a frame. Beyond this, the least recently changed partitions are only counted."""

_MOST_WAITS: Final = 200
_MOST_FIELDS: Final = 64
_MOST_TASKS: Final = 64
# Task fields that are empty in frames, because "balances" contains the batches and "steps" contains the step times.
_LEFT_OUT: Final = {"recent_batches": (), "dead_lettered_indexes": (), "step_times": None}


def as_json(document: dict[str, Any]) -> bytes:
    """Encode a document as a line of JSON."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False, default=_json_value).encode()


def _json_value(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else _facts(value)


def _facts(result: Any) -> dict[str, Any]:
    if not is_dataclass(result):
        raise TypeError(f"result is {result!r}; expected a result returned by the client")
    return {each.name: getattr(result, each.name) for each in fields(result)}


def status_of(status: ServiceStatus, trends: Trends, now: float) -> dict[str, Any]:
    """Return the service's state as a JSON-serializable document, to be sent in a frame.

    Args:
        status: last status read from the service.
        trends: trends that already include `status`.
        now: current time in seconds, on the clock used for `Trends.see`.
    """
    shown = heapq.nlargest(
        MOST_PARTITIONS,
        status.partitions,
        key=lambda each: (trends.partitions[each.summary.partition_id].changed_at, not each.summary.sealed),
    )
    waits = sorted(status.waits, key=trends.waits_since)
    return {
        "service": {
            **_facts(status.service),
            "data_dir": "",
        },  # do not reveal a path on the server to everyone who can open the page
        "storages": [
            {**_facts(each), "successor": status.successor_of(each) if each.is_adopted else None}
            for each in status.storages
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
        "steps": [
            {
                "group": group,
                "task": task,
                "rank_count": times.rank_count,
                "shares": {stage: rounded(share) for stage, share in times.shares.items()},
                "data_plane_share": rounded(times.data_plane_share),
                "text": str(times),
                "advice": times.advice,
            }
            for (group, task), times in sorted(trends.steps.items())
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
