"""What has happened to partitions and services since the page was started."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from tq_service.client import WatchUpdate
from tq_service.results import PartitionSummary, ServiceStatus

_EVENT_COUNT: Final = 100  # of partitions, and as many of services


class EventLog:
    """The last events, in the order in which they were noted.

    Each has a number that counts from 1 on; a kind: "made", "sealed" or "cleared" of a partition, "away", "refused",
    "back", "restarted" of the service, "silent", "heard" of a storage service; the name of the partition or storage
    service, empty for the service; and a text, what happened, after the name.
    """

    def __init__(self) -> None:
        # Apart, so that partitions that come and go do not push out what happened to the service.
        self._of_services: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_EVENT_COUNT)
        self._of_partitions: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_EVENT_COUNT)
        self._count = 0
        self._partitions: dict[str, PartitionSummary] = {}
        self._new_state: dict[str, PartitionSummary] | None = None  # None but while the whole state comes in
        self._is_first_state = True

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return the events for the page, with how long ago each was."""
        events = sorted([*self._of_services, *self._of_partitions], key=lambda noted: noted[1]["number"])
        return [{**event, "seconds": round(now - at, 1)} for at, event in events]

    def note(self, at: float, kind: str, text: str, *, name: str = "") -> None:
        """Note an event."""
        log = self._of_partitions if kind in {"made", "sealed", "cleared"} else self._of_services
        self._count += 1
        log.append((at, {"number": self._count, "kind": kind, "name": name, "text": text}))

    def compare(self, before: ServiceStatus, status: ServiceStatus, now: float) -> None:
        """Note what happened to services between two states of the service."""
        if before.service.instance_id != status.service.instance_id:
            what = _counted(len(status.partitions), "partition")
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

        The whole state, which a watch begins with, is compared with the known one when it is complete: after a restart
        it shows which partitions are gone. The first one is no event.
        """
        if update.is_reset:
            self._new_state = {}
        state = self._partitions if self._new_state is None else self._new_state
        for each in update.partitions:
            name = each.partition_id
            known = state.get(name)
            if each.cleared and known is not None and known.incarnation == each.incarnation:
                del state[name]
            elif each.summary is not None and not each.cleared:
                state[name] = each.summary
            else:
                continue
            if state is self._partitions:
                self._note_change(name, known, state.get(name), now)
        if self._new_state is None or update.revision is None:
            return
        before, self._partitions, self._new_state = self._partitions, state, None
        if not self._is_first_state:
            for name in before | state:
                self._note_change(name, before.get(name), state.get(name), now)
        self._is_first_state = False

    def _note_change(
        self, name: str, before: PartitionSummary | None, after: PartitionSummary | None, now: float
    ) -> None:
        if before is not None and (after is None or after.incarnation != before.incarnation):
            self.note(now, "cleared", f"cleared ({_counted(before.inserted_count, 'sample')})", name=name)
            before = None
        if after is None:
            return
        if before is None:
            self.note(now, "made", "made", name=name)
        if after.sealed and not (before is not None and before.sealed):
            self.note(now, "sealed", f"sealed ({_counted(after.inserted_count, 'sample')})", name=name)


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
