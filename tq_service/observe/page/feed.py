"""Reads the service for all browsers: one status every 2 s, however many look, and one frame for each."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from tq_service.client import AsyncClient
from tq_service.errors import DeadlineError, PermissionDeniedError, TqError, UnauthenticatedError
from tq_service.observe.page.events import EventLog
from tq_service.observe.page.frame import as_json, status_of
from tq_service.observe.page.trends import Trends
from tq_service.results import ServiceStatus

INTERVAL_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 2.0


class Feed:
    """Follows a service for as long as `run` runs, and gives each browser its newest state.

        run: status, frame, status, frame, ...      frames: one iterator a browser, each with the newest frame only

    For one event loop.

    Args:
        client: of the service.
        prefix: how the names of the partitions begin that are shown.
        interval_seconds: time from one status to the next.
    """

    def __init__(self, client: AsyncClient, *, prefix: str = "", interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._client = client
        self._prefix = prefix
        self._interval_seconds = interval_seconds
        self._run_id = secrets.token_hex(4)  # for browsers to see that events are counted from 1 again
        self._trends = Trends()
        self._status: ServiceStatus | None = None
        self._seen_at = 0.0
        self._away_since: float | None = None
        self._state, self._problem = "connecting", ""
        self._events = EventLog()
        self._frame = b""
        self._changed = asyncio.Event()  # of the next frame, or the end
        self._closed = False

    async def run(self) -> None:
        """Read and watch the service until cancelled, whether it answers or not."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            while True:
                began = time.monotonic()
                await self.look()
                await asyncio.sleep(max(0.0, began + self._interval_seconds - time.monotonic()))

    async def look(self) -> None:
        """Read the service once, and make a frame of it."""
        began = time.monotonic()
        try:
            status = await self._client.status(prefix=self._prefix, explain=True, timeout=_ANSWER_SECONDS)
        except TqError as error:
            self._miss(error, began)
        else:
            self._see(status, time.monotonic())
        self._publish()

    async def _follow(self) -> None:
        """Note what happens to partitions between two statuses, too."""
        while True:
            with contextlib.suppress(TqError):  # the status says what is wrong
                async with self._client.watch(self._prefix, samples=False, tasks=False) as updates:
                    async for update in updates:
                        self._events.follow(update, time.monotonic())
            await asyncio.sleep(self._interval_seconds)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the newest frame, JSON of one line, and each one after it; a slow reader gets fewer."""
        seen = b""
        while not self._closed:
            if self._frame is seen:
                await self._changed.wait()
            else:
                seen = self._frame
                yield seen

    def close(self) -> None:
        """End all iterators of frames."""
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
        first = error.__cause__ if isinstance(error.__cause__, TqError) else error  # without how often it was tried
        self._problem = f"no answer within {_ANSWER_SECONDS:g} s" if isinstance(error, DeadlineError) else first.message
        if self._away_since is None:
            self._away_since = began
            what = "refuses this page" if is_refused else "is away"
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
