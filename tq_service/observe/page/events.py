"""What has happened to partitions and services since the page was started."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from tq_service.client import PartitionUpdate, WatchUpdate
from tq_service.results import PartitionSummary, ServiceStatus

_EVENT_COUNT: Final = 100  # of partitions, and as many of services


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        number: counts events, from 1 on.
        at: when, in seconds of the clock that the log is given.
        kind: "made", "sealed" or "cleared" of a partition; "away", "refused", "back", "restarted" of the service;
            "silent", "heard" of a storage service.
        name: of the partition or storage service; empty: the service.
        text: what happened, after the name.
    """

    number: int
    at: float
    kind: str
    name: str
    text: str


class EventLog:
    """The last events, in the order in which they were noted."""

    def __init__(self) -> None:
        # Apart, so that partitions that come and go do not push out what happened to the service.
        self._of_services: deque[Event] = deque(maxlen=_EVENT_COUNT)
        self._of_partitions: deque[Event] = deque(maxlen=_EVENT_COUNT)
        self._count = 0
        self._partitions: dict[str, PartitionSummary] = {}
        self._before_reset: dict[str, PartitionSummary] | None = None  # None but while the whole state comes in
        self._is_first_state = True

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return the events for the page, with how long ago each was."""
        return [
            {
                "number": event.number,
                "seconds": round(now - event.at, 1),
                "kind": event.kind,
                "name": event.name,
                "text": event.text,
            }
            for event in sorted([*self._of_services, *self._of_partitions], key=lambda event: event.number)
        ]

    def note(self, at: float, kind: str, text: str, *, name: str = "") -> None:
        """Note an event of the service, or of the storage service that is named."""
        self._of_services.append(self._numbered(at, kind, name, text))

    def compare(self, before: ServiceStatus, status: ServiceStatus, now: float) -> None:
        """Note what happened to services between two states of the service."""
        if before.service.instance_id != status.service.instance_id:
            count = len(status.partitions)
            what = "1 partition" if count == 1 else f"{count:,} partitions"
            self.note(now, "restarted", f"the service was restarted; it has {what}")
        # What was taken over is silent with its heir, and may have the name of a storage service that is there.
        silent = {storage.storage_id: storage.is_silent for storage in before.own_storages}
        for storage in status.own_storages:
            if storage.is_silent and not silent.get(storage.storage_id):
                self.note(now, "silent", "does not answer its controller", name=storage.storage_id)
            elif not storage.is_silent and silent.get(storage.storage_id):
                self.note(now, "heard", "answers again", name=storage.storage_id)

    def follow(self, update: WatchUpdate, now: float) -> None:
        """Note what an update of a watch says of partitions.

        The whole state, which a watch begins with, is compared with what is known: after a restart it says what is
        gone, and in the beginning nothing has happened.
        """
        if update.is_reset:
            if self._before_reset is None:  # else a watch broke before it had said all
                self._before_reset = self._partitions
            self._partitions = {}
        for each in update.partitions:
            self._apply(each, now)
        if self._before_reset is None or update.revision is None:
            return
        before, self._before_reset = self._before_reset, None
        if self._is_first_state:
            self._is_first_state = False
            return
        for name, summary in before.items():
            self._note_change(name, summary, self._partitions.get(name), now)
        for name in self._partitions.keys() - before.keys():
            self._note_change(name, None, self._partitions[name], now)

    def _apply(self, update: PartitionUpdate, now: float) -> None:
        name, summary = update.partition_id, update.summary
        known = self._partitions.get(name)
        if update.cleared:
            if known is None or known.incarnation != update.incarnation:
                return
            del self._partitions[name]
        elif summary is not None:
            self._partitions[name] = summary
        else:
            return
        if self._before_reset is None:
            self._note_change(name, known, summary, now)

    def _note_change(
        self, name: str, before: PartitionSummary | None, after: PartitionSummary | None, now: float
    ) -> None:
        if before is not None and (after is None or after.incarnation != before.incarnation):
            self._note_partition(now, "cleared", name, f"cleared ({_samples(before)})")
            before = None
        if after is None:
            return
        if before is None:
            self._note_partition(now, "made", name, "made")
        if after.sealed and not (before is not None and before.sealed):
            self._note_partition(now, "sealed", name, f"sealed ({_samples(after)})")

    def _note_partition(self, at: float, kind: str, name: str, text: str) -> None:
        self._of_partitions.append(self._numbered(at, kind, name, text))

    def _numbered(self, at: float, kind: str, name: str, text: str) -> Event:
        self._count += 1
        return Event(number=self._count, at=at, kind=kind, name=name, text=text)


def _samples(summary: PartitionSummary) -> str:
    count = summary.inserted_count
    return "1 sample" if count == 1 else f"{count:,} samples"
