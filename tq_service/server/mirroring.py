"""A storage service's mirror, and the puts that the service has taken over from lost storage services."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tq_service.errors import InvalidArgumentError, PreconditionError, UnavailableError
from tq_service.log_message import LogMessage
from tq_service.objects.base import ObjectStore
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.supervisor import Supervisor
from tq_service.storage.engine import StorageEngine
from tq_service.storage.mirror.adoption import find_left
from tq_service.storage.mirror.layout import Names
from tq_service.storage.mirror.mirror import Mirror
from tq_service.storage.mirror.writer import ObjectWriter

_log = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 1.0
_MARGIN_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 5.0


class Registration:
    """Tracks whether this storage service is certain to be registered with its controller.

    If three heartbeats fail, the service may be considered lost, and another service may take over its puts. The lost
    service must then remove no more objects from the mirror.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def renew(self, sent_at: float, heartbeat_seconds: float) -> None:
        """Record that a heartbeat was accepted. The time `sent_at` is on the monotonic clock."""
        self._until = sent_at + 3 * heartbeat_seconds - _MARGIN_SECONDS

    def holds(self) -> bool:
        """Return whether the service is certain to be registered, so no other service can have taken over its puts."""
        return time.monotonic() < self._until


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adopted:
    """The puts of a lost storage service that this service has adopted.

    Attributes:
        engine: stores the puts.
        keys: receipt keys for the registrations under the old name. No receipts are issued for adopted puts.
        registration: tracks the registration under the old name.
        tasks: the background tasks for these puts.
    """

    engine: StorageEngine
    keys: ReceiptKeys
    registration: Registration
    tasks: list[asyncio.Task[None]]


class Mirroring:
    """A storage service's mirror, and the instances that the service has taken over. Confined to one event loop.

    Args:
        objects: the object store; `close` closes it.
        url: URL of the object store, without secrets.
        node: name of this service's machine.
        copies: desired number of copies of each put.
        required: minimum number of copies of each put.
        offered_bytes: bytes of memory offered for other nodes' objects.
        supervisor: runs background tasks.

    Attributes:
        adopted: the instances that were taken over, by instance id.

    Raises:
        InvalidArgumentError: more copies are required than the object store makes.
    """

    def __init__(
        self,
        objects: ObjectStore,
        *,
        url: str,
        node: str,
        copies: int,
        required: int,
        offered_bytes: int,
        supervisor: Supervisor,
    ) -> None:
        fixed = objects.abilities.fixed_copies
        if fixed is not None and required > fixed:
            raise InvalidArgumentError(
                f"mirror_required is {required}, but {url} stores {fixed} copies of each object; lower "
                "mirror_required, or use an object store that stores more copies",
                field="mirror_required",
            )
        self._objects = objects
        self._url = url
        self._node = node
        self._copies = copies if fixed is None else min(copies, fixed)
        self._required = required
        self._offered_bytes = offered_bytes
        self._opened = asyncio.Event()
        self.adopted: dict[bytes, Adopted] = {}
        self._adopting: dict[bytes, tuple[bytes, asyncio.Task[Adopted]]] = {}
        self._supervisor = supervisor
        self._register: Callable[[Adopted], Coroutine[Any, Any, None]] | None = None

    def mirror_of(
        self, storage_id: str, boot_id: bytes, registration: Registration, generation: int = 0
    ) -> tuple[Mirror, ObjectWriter]:
        """Create the mirror for a storage service instance's puts, and the writer of the mirror's objects."""
        writer = ObjectWriter(
            self._objects,
            Names(storage_id=storage_id, boot_id=boot_id),
            copies=self._copies,
            required=self._required,
            generation=generation,
            may_remove=registration.holds,
        )
        return Mirror(writer, required=self._required, url=self._url), writer

    async def run(self, mirror: Mirror, register: Callable[[Adopted], Coroutine[Any, Any, None]]) -> None:
        """Open the object store, retrying until it responds, and then run the mirror of this service's puts.

        Args:
            mirror: the mirror of this service's puts.
            register: keeps adopted puts registered with the controller until cancelled. Raises PreconditionError if
                another storage service has taken over these puts.
        """
        self._register = register
        while True:
            try:
                await self._objects.open(self._node, self._offered_bytes)
                break
            except UnavailableError as error:
                mirror.on_unreachable(error)
                await asyncio.sleep(_RETRY_SECONDS)
        self._opened.set()
        await mirror.run()

    async def take_over(self, storage_id: str, boot_id: bytes, own: StorageEngine, search_id: bytes) -> Adopted:
        """Take over a lost storage service's puts, which then use the quota of this service's engine.

        Args:
            storage_id: name of the lost service.
            boot_id: instance id of the lost service.
            own: this service's engine.
            search_id: id of the controller's search for a successor. The mirror is read again for each new search,
                since the lost service may have returned and stored more puts after the previous search.

        Raises:
            NotFoundError: the mirror contains nothing from the lost service.
            UnavailableError: the mirror does not respond.
            DataLossError: the index of the lost service's puts is damaged.
        """
        asked_id, task = self._adopting.get(boot_id, (search_id, None))
        if task is None or asked_id != search_id:
            task = asyncio.get_running_loop().create_task(self._adopt(task, storage_id, boot_id, own, search_id))
            self._adopting[boot_id] = search_id, task
            task.add_done_callback(partial(self._end_adopting, boot_id))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # otherwise the caller was cancelled
                raise
            raise UnavailableError("the lost storage service returned and was lost again; retry later") from None

    def _end_adopting(self, boot_id: bytes, done: asyncio.Task[Adopted]) -> None:
        if boot_id in self._adopting and self._adopting[boot_id][1] is done:
            del self._adopting[boot_id]
        if not done.cancelled():
            done.exception()  # retrieves the exception, since all callers may have been cancelled

    async def _adopt(
        self,
        earlier: asyncio.Task[Adopted] | None,
        storage_id: str,
        boot_id: bytes,
        own: StorageEngine,
        search_id: bytes,
    ) -> Adopted:
        """End an earlier search and release the puts that it found, then take over the puts."""
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait((earlier,))
        known = self.adopted.get(boot_id)
        if known is not None:
            if known.engine.run_id == search_id:
                return known
            await self.leave(known)
        if not self._opened.is_set():
            raise UnavailableError(f"the mirror {self._url} has not responded yet; retry later")
        names = Names(storage_id=storage_id, boot_id=boot_id)
        left = await find_left(self._objects, names, copies=self._copies)
        registration = Registration()
        mirror, writer = self.mirror_of(storage_id, boot_id, registration, left.next_generation)
        await writer.begin_generation()
        engine = StorageEngine(
            storage_id=storage_id,
            boot_id=boot_id,
            max_bytes=None,
            put_ttl_seconds=own.put_ttl_seconds,
            backing=mirror,
            quota_of=own,
            clock=time.monotonic,
        )
        engine.run_id = search_id  # shows the controller which search this successor answered
        count = mirror.take_over(left.objects)
        adopted = Adopted(engine=engine, keys=ReceiptKeys(), registration=registration, tasks=[])
        self.adopted[boot_id] = adopted
        _log.warning(
            LogMessage("took over the puts of a lost storage service", storage=storage_id, boot=boot_id, count=count)
        )
        self._start(adopted, "mirroring", mirror.run())
        self._start(adopted, "registering", self._stay_registered(adopted))
        self._start(adopted, "fetching", engine.scrub())
        self._start(adopted, "watching", self._watch(adopted))
        return adopted

    def _start(self, adopted: Adopted, what: str, work: Coroutine[Any, Any, None]) -> None:
        name = f"{what} the puts of storage {adopted.engine.storage_id}, instance {adopted.engine.boot_id.hex()}"
        adopted.tasks.append(self._supervisor.start(name, work, may_end=True))

    async def _stay_registered(self, adopted: Adopted) -> None:
        """Keep adopted puts registered until another storage service has taken them over, then release them."""
        if self._register is None:
            return
        try:
            await self._register(adopted)
        except PreconditionError as error:
            _log.warning(
                LogMessage("released puts taken over earlier", storage=adopted.engine.storage_id, error=error.message)
            )
            await self.leave(adopted)

    async def _watch(self, adopted: Adopted) -> None:
        """Release an adopted instance some time after all its puts have been freed."""
        idle_seconds = 0.0
        while idle_seconds < _IDLE_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            idle_seconds = 0.0 if adopted.engine.stat().put_count else idle_seconds + _LOOK_SECONDS
        await self.leave(adopted)

    async def leave(self, adopted: Adopted) -> None:
        """Stop serving an adopted instance, after its puts were freed or taken over by another storage service."""
        self.adopted.pop(adopted.engine.boot_id, None)
        current = asyncio.current_task()
        for task in adopted.tasks:
            if task is not current:
                task.cancel()
        await adopted.engine.close()
        adopted.engine.release_all()

    async def close(self) -> None:
        """Close the object store. Objects are not removed, since a successor may need them."""
        for adopted in list(self.adopted.values()):
            await adopted.engine.close()
        await self._objects.aclose()
