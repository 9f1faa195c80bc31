"""Storage services that are lost, and which others take their puts over from the mirror that both have.

    known -> silent for three heartbeats, or back without its puts -> an heir is asked -> the heir registers under the
    old name and boot, at its own address

Nothing of it is written down: an heir says at each heartbeat what it has taken over, and a controller that has started
again takes for lost what has cells and does not register.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tq_service.errors import DataLossError, NotFoundError, PreconditionError, TqError
from tq_service.log_message import LogMessage
from tq_service.server.remote_storage import RemoteStorage
from tq_service.server.supervisor import Supervisor

_log = logging.getLogger(__name__)
_LOOKS_A_HEARTBEAT: Final = 4
Instance: TypeAlias = tuple[str, bytes]
"""Name and boot of a storage service."""


@dataclass(slots=True, eq=False)
class _Lost:
    """A storage service that is lost.

    Attributes:
        url: of its mirror; empty: not known.
        since: when it was seen to be lost.
        asked_at: when an heir was asked last; None: none was.
        refused: names of heirs that could not.
        asking: the call to the heir.
        address: of the heir that was asked last.
    """

    url: str
    since: float
    asked_at: float | None = None
    refused: set[str] = field(default_factory=set)
    asking: asyncio.Task[None] | None = None
    address: str = ""


class Adoptions:
    """Has the puts of lost storage services taken over. Confined to the event loop.

    Args:
        storages: those that are registered, by name.
        heartbeat_seconds: how often they register.
        supervisor: runs the calls to heirs.
        clock: monotonic seconds.

    Attributes:
        taken: what others have taken over: the heir, as it registers under the old name.
        lost_count: how often an instance was lost since this controller started.
        taken_over_count: how often the puts of one that was lost were taken over.
    """

    def __init__(
        self,
        storages: Mapping[str, object],
        heartbeat_seconds: float,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.taken: dict[Instance, RemoteStorage] = {}
        self.lost_count = self.taken_over_count = 0
        self._storages = storages
        self._heartbeat_seconds = heartbeat_seconds
        self._supervisor = supervisor
        self._clock = clock
        self._lost: dict[Instance, _Lost] = {}
        self._left_nothing: set[Instance] = set()
        self._present: set[Instance] = set()  # that registered here themselves, and were not taken over since
        self._run_id = os.urandom(16)
        self._expected: set[Instance] = set()
        self._expected_until = 0.0

    def expect(self, instances: Iterable[Instance]) -> None:
        """Take those for lost that have cells, and do not register within three heartbeats from now."""
        self._expected = set(instances)
        self._expected_until = self._clock() + 3 * self._heartbeat_seconds

    def lose(self, instance: Instance, url: str) -> None:
        """Take note that an instance is lost, with its mirror."""
        if instance not in self._lost and instance not in self._left_nothing:
            _log.warning(LogMessage("a storage service is lost", storage=instance[0], boot=instance[1].hex()))
            self._lost[instance] = _Lost(url, self._clock())
            self.lost_count += 1

    @property
    def waiting_count(self) -> int:
        """How many are lost and not taken over yet."""
        return len(self._lost)

    def is_lost(self, instance: Instance) -> bool:
        """Whether an instance is lost, and may be taken over yet."""
        return instance in self._lost

    def takes_no_puts(self, instance: Instance) -> bool:
        """Whether puts that an instance takes now may be lost: its heir may have looked into the mirror before."""
        return instance in self._lost or instance in self.taken

    def check_not_taken(self, instance: Instance) -> None:
        """Refuse a storage service whose puts were, or are being, taken over.

        Raises:
            PreconditionError: they are.
        """
        lost = self._lost.get(instance)
        if instance in self.taken or (lost is not None and lost.asked_at is not None):
            raise PreconditionError(
                f"storage service {instance[0]!r} was silent for too long under boot {instance[1].hex()}, and another "
                "one has taken its puts over; start it again, so that it comes back empty"
            )

    def check_heir(self, instance: Instance, address: str) -> None:
        """Refuse an heir that was silent itself, so that another one was asked, or one of before the lost one was here.

        Raises:
            PreconditionError: it was.
        """
        lost = self._lost.get(instance)
        if instance in self._present and (lost is None or not lost.address):
            # It may lack puts: it has looked into the mirror for a controller before this one.
            raise PreconditionError(
                f"storage service {instance[0]!r} was here under boot {instance[1].hex()} after its puts were taken "
                f"over by the one at {address}; let go of them"
            )
        if lost is not None and lost.address not in {"", address}:
            raise PreconditionError(
                f"the puts of storage service {instance[0]!r} under boot {instance[1].hex()} are being taken over by "
                f"the one at {lost.address}; let go of them"
            )

    def on_registered(self, instance: Instance) -> None:
        """Take note that an instance is there itself."""
        self._present.add(instance)
        self._found(instance)

    def take(self, instance: Instance, heir: RemoteStorage) -> None:
        """Take note that an instance was taken over, or that its heir is still there."""
        # An heir that registers again, as with a controller that has started again, has taken nothing over now.
        self.taken_over_count += instance in self._lost
        self._present.discard(instance)
        self._found(instance)
        self.taken[instance] = heir

    def _found(self, instance: Instance) -> None:
        self._expected.discard(instance)
        self._lost.pop(instance, None)

    async def run(self) -> None:
        """Look for lost storage services until it is cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds / _LOOKS_A_HEARTBEAT)
            self.look()

    def look(self) -> None:
        """Find what is lost by now, and ask heirs."""
        remote = [each for each in self._storages.values() if isinstance(each, RemoteStorage)]
        silent: set[str] = set()  # addresses
        for each in remote:
            if each.mirror is not None and each.capacity() is None:
                silent.add(each.endpoint.address)
                self.lose((each.storage_id, each.boot_id), each.mirror.url)
        for instance, heir in list(self.taken.items()):
            # What a lost one had taken over is lost with it, though it was heard of up to a heartbeat later.
            if heir.capacity() is None or heir.endpoint.address in silent:
                if heir.put_count:
                    self.lose(instance, "" if heir.mirror is None else heir.mirror.url)
                else:  # nothing of it is left
                    del self.taken[instance]
                    self._supervisor.start(f"leaving storage {instance[0]}", heir.close(), may_end=True)
        if self._expected and self._clock() > self._expected_until:
            if any(each.mirror is not None for each in remote):
                for instance in self._expected:
                    self.lose(instance, "")
            self._expected = set()
        for instance, lost in self._lost.items():
            self._have_adopted(instance, lost, remote)

    def _have_adopted(self, instance: Instance, lost: _Lost, remote: Iterable[RemoteStorage]) -> None:
        """Ask an heir with the same mirror, that with the most free bytes; again where it does not register."""
        if lost.asking is not None and not lost.asking.done():
            return
        now = self._clock()
        if lost.asked_at is not None and not lost.refused and now - lost.asked_at < 2 * self._heartbeat_seconds:
            return  # it has answered, and is about to register
        heirs = [
            (capacity.free_bytes, each)
            for each in remote
            if each.mirror is not None
            and lost.url in {"", each.mirror.url}
            and each.storage_id not in lost.refused
            and (capacity := each.capacity()) is not None
        ]
        if not heirs:
            lost.refused.clear()
            return
        heir = max(heirs, key=lambda each: each[0])[1]
        lost.asked_at, lost.address = now, heir.endpoint.address
        what = f"having storage {instance[0]} taken over by {heir.storage_id}"
        lost.asking = self._supervisor.start(what, self._ask(instance, lost, heir), may_end=True)

    async def _ask(self, instance: Instance, lost: _Lost, heir: RemoteStorage) -> None:
        try:
            count = await heir.adopt(instance, self._run_id)
        except (NotFoundError, DataLossError) as error:
            _log.error(LogMessage("a lost storage service has left nothing", storage=instance[0], error=error))
            self._left_nothing.add(instance)
            self._lost.pop(instance, None)
        except TqError as error:
            _log.warning(
                LogMessage("puts cannot be taken over", storage=instance[0], heir=heir.storage_id, error=error.message)
            )
            lost.refused.add(heir.storage_id)
        else:
            lost.refused.clear()
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
