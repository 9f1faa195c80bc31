"""Storage services that are lost, and which others take their puts over from the mirror that both have.

    known -> silent for three heartbeats, or back without its puts -> an heir is asked -> the heir registers under the
    old name and boot, at its own address

Nothing of it is written down: an heir says at each heartbeat what it has taken over, and a controller that has started
again takes for lost what has cells and does not register.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tq_service.errors import DataLossError, DeadlineError, NotFoundError, PreconditionError, TqError
from tq_service.log_message import LogMessage
from tq_service.server.remote_storage import RemoteStorage
from tq_service.server.supervisor import Supervisor

_log = logging.getLogger(__name__)
_LOOKS_A_HEARTBEAT: Final = 4
_MOST_LATE_ANSWERS: Final = 20
Instance: TypeAlias = tuple[str, bytes]
"""Name and boot of a storage service."""


@dataclass(slots=True, eq=False)
class _Lost:
    """A storage service that is lost.

    Attributes:
        url: of its mirror; empty: not known.
        since: when it was seen to be lost.
        search_id: 16 random bytes, shown by heirs that have looked into the mirror since then.
        heir: name of the storage service that was asked last; empty: none was.
        agreed_at: when that one said that it has the puts, and is about to register; None: it has not.
        late_count: how often that one was asked and did not answer in time.
        refused: names of heirs that could not.
        asking: the call to the heir.
    """

    url: str
    since: float
    search_id: bytes = field(default_factory=lambda: os.urandom(16))
    heir: str = ""
    agreed_at: float | None = None
    late_count: int = 0
    refused: set[str] = field(default_factory=set)
    asking: asyncio.Task[None] | None = None


class Adoptions:
    """Has the puts of lost storage services taken over. Confined to the event loop.

    A storage service that was silent may come back until an heir has registered: that one lets go then, and has
    removed nothing. One whose silence is that of this controller, which could not take heartbeats, is not lost.

    Args:
        storages: those that are registered, by name.
        heartbeat_seconds: how often they register.
        supervisor: runs the calls to heirs.
        takes_heartbeats: whether this controller can take heartbeats now.
        clock: monotonic seconds.

    Attributes:
        lost: instances that are lost and not taken over yet.
        expected: those that have cells, and were not heard of since this controller started.
        taken: what others have taken over: the heir, as it registers under the old name.
        lost_count: how often an instance was lost since this controller started.
        taken_over_count: how often the puts of one that was lost were taken over.
    """

    def __init__(
        self,
        storages: Mapping[str, object],
        heartbeat_seconds: float,
        supervisor: Supervisor,
        takes_heartbeats: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.taken: dict[Instance, RemoteStorage] = {}
        self.lost_count = self.taken_over_count = 0
        self._storages = storages
        self._heartbeat_seconds = heartbeat_seconds
        self._supervisor = supervisor
        self._takes_heartbeats = takes_heartbeats
        self._clock = clock
        self._looked_at: float | None = None
        self._silence_counts_from = -math.inf  # three heartbeats after this controller could take none
        self.lost: dict[Instance, _Lost] = {}
        self._left_nothing: set[Instance] = set()
        self._present: set[Instance] = set()  # that registered here themselves, and were not taken over since
        self.expected: set[Instance] = set()
        self._expected_until = 0.0

    def expect(self, instances: Iterable[Instance]) -> None:
        """Take those for lost that have cells, and do not register within three heartbeats from now."""
        self.expected = set(instances)
        self._expected_until = self._clock() + 3 * self._heartbeat_seconds

    def lose_held_at(self, address: str) -> None:
        """Take note that a storage service has started again: what it had taken over is lost with its memory."""
        for instance, heir in self.taken.items():
            if heir.endpoint.address == address:
                self.lose(instance, "" if heir.heard.mirror is None else heir.heard.mirror.url)

    def lose(self, instance: Instance, url: str) -> None:
        """Take note that an instance is lost, with its mirror."""
        if instance not in self.lost and instance not in self._left_nothing:
            _log.warning(LogMessage("a storage service is lost", storage=instance[0], boot=instance[1].hex()))
            self.lost[instance] = _Lost(url, self._clock())
            self.lost_count += 1

    def check_not_taken(self, instance: Instance) -> None:
        """Refuse a storage service whose puts were, or are being, taken over.

        Raises:
            PreconditionError: they are.
        """
        if instance in self.taken:
            raise PreconditionError(
                f"storage service {instance[0]!r} was silent for too long under boot {instance[1].hex()}, and another "
                "one has taken its puts over; start it again, so that it comes back empty"
            )

    def check_heir(self, instance: Instance, address: str, search_id: bytes) -> None:
        """Refuse an heir that looked into the mirror before the lost one was here last: it may lack puts.

        Of several that were asked since, the first one to register has the puts.

        Args:
            instance: what it has taken over.
            address: of the heir.
            search_id: with which it was asked.

        Raises:
            PreconditionError: it did, or may have.
        """
        lost = self.lost.get(instance)
        if lost is not None and lost.heir:
            if search_id != lost.search_id:
                raise PreconditionError(
                    f"the puts of storage service {instance[0]!r} under boot {instance[1].hex()} are being taken over "
                    f"by {lost.heir!r}; let go of them"
                )
        elif instance in self._present:
            raise PreconditionError(
                f"storage service {instance[0]!r} was here under boot {instance[1].hex()} after its puts were taken "
                f"over by the one at {address}; let go of them"
            )

    def on_registered(self, instance: Instance) -> None:
        """Take note that an instance is there itself."""
        self._present.add(instance)
        self._found(instance)

    def take(self, instance: Instance, heir: RemoteStorage) -> None:
        """Take note that an instance was taken over, or that its heir is still there."""
        # An heir that registers again, as with a controller that has started again, has taken nothing over now.
        self.taken_over_count += instance in self.lost
        self._present.discard(instance)
        self._found(instance)
        self.taken[instance] = heir

    def _found(self, instance: Instance) -> None:
        self.expected.discard(instance)
        self.lost.pop(instance, None)

    async def run(self) -> None:
        """Look for lost storage services until it is cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds / _LOOKS_A_HEARTBEAT)
            self.look()

    def look(self) -> None:
        """Find what is lost by now, and ask heirs."""
        now = self._clock()
        is_late = self._looked_at is not None and now - self._looked_at > self._heartbeat_seconds
        self._looked_at = now
        takes_heartbeats = self._takes_heartbeats()
        if is_late or not takes_heartbeats:  # late, as after the process was paused, it may have missed some
            self._silence_counts_from = now + 3 * self._heartbeat_seconds
        if not takes_heartbeats:
            return
        remote = [each for each in self._storages.values() if isinstance(each, RemoteStorage)]
        if now >= self._silence_counts_from:
            self._lose_silent(remote, now)
        for instance, lost in self.lost.items():
            self._have_adopted(instance, lost, remote)

    def _lose_silent(self, remote: Iterable[RemoteStorage], now: float) -> None:
        silent: set[str] = set()  # addresses
        for each in remote:
            if each.heard.mirror is not None and each.is_silent:
                silent.add(each.endpoint.address)
                self.lose((each.storage_id, each.boot_id), each.heard.mirror.url)
        for instance, heir in list(self.taken.items()):
            # What a lost one had taken over is lost with it, though it was heard of up to a heartbeat later.
            if heir.is_silent or heir.endpoint.address in silent:
                if heir.heard.put_count:
                    self.lose(instance, "" if heir.heard.mirror is None else heir.heard.mirror.url)
                else:  # nothing of it is left
                    del self.taken[instance]
                    self._supervisor.start(f"leaving storage {instance[0]}", heir.close(), may_end=True)
        if self.expected and now > self._expected_until:
            if any(each.heard.mirror is not None for each in remote):
                for instance in self.expected:
                    self.lose(instance, "")
            self.expected = set()

    def _have_adopted(self, instance: Instance, lost: _Lost, remote: Iterable[RemoteStorage]) -> None:
        """Ask an heir with the same mirror: the one asked before, unless it refused, or that with most free bytes."""
        if lost.asking is not None and not lost.asking.done():
            return
        if lost.agreed_at is not None and self._clock() - lost.agreed_at < 2 * self._heartbeat_seconds:
            return  # it is about to register
        heirs = [
            (each.free_bytes(), each)
            for each in remote
            if each.heard.mirror is not None
            and lost.url in {"", each.heard.mirror.url}
            and each.storage_id not in lost.refused
            and not each.is_silent
        ]
        if not heirs:
            lost.refused.clear()
            return
        heir = max(heirs, key=lambda each: (each[1].storage_id == lost.heir, each[0]))[1]
        if heir.storage_id != lost.heir:
            lost.late_count = 0
        lost.heir, lost.agreed_at = heir.storage_id, None
        what = f"having storage {instance[0]} taken over by {heir.storage_id}"
        lost.asking = self._supervisor.start(what, self._ask(instance, lost, heir), may_end=True)

    async def _ask(self, instance: Instance, lost: _Lost, heir: RemoteStorage) -> None:
        try:
            count = await heir.take_over(instance, lost.search_id)
        except (NotFoundError, DataLossError) as error:
            _log.error(LogMessage("a lost storage service has left nothing", storage=instance[0], error=error))
            if self.lost.get(instance) is lost:
                self._left_nothing.add(instance)
                del self.lost[instance]
        except DeadlineError:
            # It goes on, and is asked again: others would be as slow, and begin from the beginning.
            lost.late_count += 1
            if lost.late_count >= _MOST_LATE_ANSWERS:
                lost.refused.add(heir.storage_id)
            _log.warning(
                LogMessage(
                    "still looking for the puts of a lost storage service", storage=instance[0], heir=heir.storage_id
                )
            )
        except TqError as error:
            _log.warning(
                LogMessage("puts cannot be taken over", storage=instance[0], heir=heir.storage_id, error=error.message)
            )
            lost.refused.add(heir.storage_id)
        else:
            lost.refused.clear()
            lost.agreed_at = self._clock()
            seconds = round(self._clock() - lost.since, 2)
            _log.warning(
                LogMessage(
                    "the puts of a lost storage service were taken over",
                    storage=instance[0],
                    heir=heir.storage_id,
                    count=count,
                    seconds=seconds,
                )
            )
