"""Detects lost storage services, and finds successors that adopt the services' puts from a shared mirror.

    registered -> silent for three heartbeats, or restarted without its puts -> the controller calls a successor -> the
    successor registers under the old name and instance id, at its own address

Adoption state is not persisted. Instead, successors report their adopted puts in each heartbeat. After a restart, the
controller considers an instance lost if it stores cells of samples but does not register.
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
"""Name and instance id of a storage service."""


@dataclass(slots=True, eq=False)
class _Lost:
    """A lost storage service.

    Attributes:
        url: URL of the service's mirror, or "" if unknown.
        since: time at which the loss was detected.
        search_id: 16 random bytes that identify the search for a successor. A successor that sends this id back must
            have read the mirror after the loss was detected.
        successor: name of the most recently called successor, or "" if no successor has been called.
        agreed_at: time at which the successor confirmed that it had adopted the puts and would register. None until
            then.
        late_count: number of calls to the successor that timed out.
        refused: names of storage services that could not adopt the puts.
        asking: task that calls the successor.
    """

    url: str
    since: float
    search_id: bytes = field(default_factory=lambda: os.urandom(16))
    successor: str = ""
    agreed_at: float | None = None
    late_count: int = 0
    refused: set[str] = field(default_factory=set)
    asking: asyncio.Task[None] | None = None


class Adoptions:
    """Finds successors that adopt the puts of lost storage services. Use this class only on the event loop.

    A silent storage service may resume its heartbeats before a successor has registered. In that case, the successor
    releases the puts without removing them from the mirror. A storage service does not count as silent during periods
    in which this controller could not receive heartbeats.

    Args:
        storages: registered storage services by name.
        heartbeat_seconds: interval at which storage services send heartbeats.
        supervisor: runs the calls to successors.
        takes_heartbeats: function that returns whether this controller can currently receive heartbeats.
        clock: monotonic clock that returns seconds.

    Attributes:
        lost: lost instances whose puts have not been adopted yet.
        expected: instances that store cells but have not registered since this controller started.
        taken: successor of each adopted instance. The successor is registered under the instance's name.
        lost_count: number of times that the loss of an instance was detected since this controller started.
        taken_over_count: number of lost instances adopted by successors since this controller started.
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
        self._silence_counts_from = -math.inf  # silence before this time is ignored
        self.lost: dict[Instance, _Lost] = {}
        self._left_nothing: set[Instance] = set()
        self._present: set[Instance] = set()  # instances that have registered and have not been adopted since
        self.expected: set[Instance] = set()
        self._expected_until = 0.0

    def expect(self, instances: Iterable[Instance]) -> None:
        """Start waiting for the given instances, which store cells, to register.

        An instance that does not register before the deadline counts as lost.
        """
        self.expected = set(instances)
        self._expected_until = self._clock() + 3 * self._heartbeat_seconds

    def lose_held_at(self, address: str) -> None:
        """Record that all instances adopted by a storage service are lost because the service restarted."""
        for instance, successor in self.taken.items():
            if successor.endpoint.address == address:
                self.lose(instance, "" if successor.heard.mirror is None else successor.heard.mirror.url)

    def lose(self, instance: Instance, url: str) -> None:
        """Record the loss of an instance. `url` is the URL of the instance's mirror."""
        if instance not in self.lost and instance not in self._left_nothing:
            _log.warning(LogMessage("lost a storage service", storage=instance[0], boot=instance[1].hex()))
            self.lost[instance] = _Lost(url, self._clock())
            self.lost_count += 1

    def check_not_taken(self, instance: Instance) -> None:
        """Reject a storage service whose puts have been adopted by another service.

        Raises:
            PreconditionError: another service has adopted the storage service's puts.
        """
        if instance in self.taken:
            raise PreconditionError(
                f"storage service {instance[0]!r} (instance {instance[1].hex()}) did not send a heartbeat "
                "in time, so another service has taken over its puts. Restart this service to continue as a new, empty "
                "instance"
            )

    def check_successor(self, instance: Instance, address: str, search_id: bytes) -> None:
        """Reject a successor that read the mirror before the lost instance was last seen and may therefore lack puts.

        If several successors were asked to take over after the loss, the first one to register receives the puts.

        Args:
            instance: adopted instance.
            address: address of the successor.
            search_id: search id that the successor sent.

        Raises:
            PreconditionError: the successor may have read the mirror too early, or another successor is adopting the
                puts.
        """
        lost = self.lost.get(instance)
        if lost is not None and lost.successor:
            if search_id != lost.search_id:
                raise PreconditionError(
                    f"the puts of storage service {instance[0]!r} under instance id {instance[1].hex()} are being "
                    f"taken over by {lost.successor!r}; release these puts"
                )
        elif instance in self._present:
            raise PreconditionError(
                f"the service at {address} took over the puts of storage service {instance[0]!r}, which has since "
                f"registered under instance id {instance[1].hex()}; release these puts"
            )

    def on_registered(self, instance: Instance) -> None:
        """Record that an instance has registered under its own name."""
        self._present.add(instance)
        self._found(instance)

    def take(self, instance: Instance, successor: RemoteStorage) -> None:
        """Record that a successor has adopted an instance's puts and registered the instance."""
        # Do not count repeated registrations of a successor, for example with a restarted controller.
        self.taken_over_count += instance in self.lost
        self._present.discard(instance)
        self._found(instance)
        self.taken[instance] = successor

    def _found(self, instance: Instance) -> None:
        self.expected.discard(instance)
        self.lost.pop(instance, None)

    async def run(self) -> None:
        """Until cancelled, keep looking for lost storage services and calling their successors."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds / _LOOKS_A_HEARTBEAT)
            self.look()

    def look(self) -> None:
        """Look for lost instances once, and call a successor for each of them."""
        now = self._clock()
        is_late = self._looked_at is not None and now - self._looked_at > self._heartbeat_seconds
        self._looked_at = now
        takes_heartbeats = self._takes_heartbeats()
        if is_late or not takes_heartbeats:  # a process that was paused may have missed heartbeats
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
        for instance, successor in list(self.taken.items()):
            # If a service is lost, its adopted instances are also lost, even if their last heartbeat is slightly newer.
            if successor.is_silent or successor.endpoint.address in silent:
                if successor.heard.put_count:
                    self.lose(instance, "" if successor.heard.mirror is None else successor.heard.mirror.url)
                else:  # all its puts have been freed
                    del self.taken[instance]
                    self._supervisor.start(f"leaving storage {instance[0]}", successor.close(), may_end=True)
        if self.expected and now > self._expected_until:
            if any(each.heard.mirror is not None for each in remote):
                for instance in self.expected:
                    self.lose(instance, "")
            self.expected = set()

    def _have_adopted(self, instance: Instance, lost: _Lost, remote: Iterable[RemoteStorage]) -> None:
        """Call a successor for a lost instance.

        If the last successor did not refuse, it is called again. Otherwise, the call goes to the service with the most
        free bytes among those that use the lost instance's mirror.
        """
        if lost.asking is not None and not lost.asking.done():
            return
        if lost.agreed_at is not None and self._clock() - lost.agreed_at < 2 * self._heartbeat_seconds:
            return  # the successor is about to register
        successors = [
            (each.free_bytes(), each)
            for each in remote
            if each.heard.mirror is not None
            and lost.url in {"", each.heard.mirror.url}
            and each.storage_id not in lost.refused
            and not each.is_silent
        ]
        if not successors:
            lost.refused.clear()
            return
        successor = max(successors, key=lambda each: (each[1].storage_id == lost.successor, each[0]))[1]
        if successor.storage_id != lost.successor:
            lost.late_count = 0
        lost.successor, lost.agreed_at = successor.storage_id, None
        what = f"calling {successor.storage_id} to take over the puts of storage {instance[0]}"
        lost.asking = self._supervisor.start(what, self._ask(instance, lost, successor), may_end=True)

    async def _ask(self, instance: Instance, lost: _Lost, successor: RemoteStorage) -> None:
        try:
            count = await successor.take_over(instance, lost.search_id)
        except (NotFoundError, DataLossError) as error:
            _log.error(
                LogMessage("could not recover the puts of a lost storage service", storage=instance[0], error=error)
            )
            if self.lost.get(instance) is lost:
                self._left_nothing.add(instance)
                del self.lost[instance]
        except DeadlineError:
            # Call this successor again later, because it continues to read. Another service would be just as slow.
            lost.late_count += 1
            if lost.late_count >= _MOST_LATE_ANSWERS:
                lost.refused.add(successor.storage_id)
            _log.warning(
                LogMessage(
                    "still looking for the puts of a lost storage service",
                    storage=instance[0],
                    successor=successor.storage_id,
                )
            )
        except TqError as error:
            _log.warning(
                LogMessage(
                    "a successor could not take over the puts of a lost storage service",
                    storage=instance[0],
                    successor=successor.storage_id,
                    error=error.message,
                )
            )
            lost.refused.add(successor.storage_id)
        else:
            lost.refused.clear()
            lost.agreed_at = self._clock()
            seconds = round(self._clock() - lost.since, 2)
            _log.warning(
                LogMessage(
                    "the puts of a lost storage service were taken over",
                    storage=instance[0],
                    successor=successor.storage_id,
                    count=count,
                    seconds=seconds,
                )
            )
