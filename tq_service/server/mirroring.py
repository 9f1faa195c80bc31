"""The mirror of a storage service, and the adoption of puts from lost storage services."""

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

    If three heartbeats fail, the controller may consider the service lost, and another service may adopt its puts. From
    then on, the lost service must not remove objects from the mirror.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def renew(self, sent_at: float, heartbeat_seconds: float) -> None:
        """Record that the heartbeat sent at the monotonic time `sent_at` was accepted."""
        self._until = sent_at + 3 * heartbeat_seconds - _MARGIN_SECONDS

    def holds(self) -> bool:
        """Return whether the service is certain to be registered. If so, no other service can have adopted its puts."""
        return time.monotonic() < self._until


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adopted:
    """An instance of a lost storage service whose puts this service has adopted.

    Attributes:
        engine: engine that stores the adopted puts.
        keys: receipt keys from the registrations made under the lost service's name. No receipts are issued for adopted
            puts.
        registration: tracks the registration under the lost service's name.
        tasks: background tasks of the instance.
    """

    engine: StorageEngine
    keys: ReceiptKeys
    registration: Registration
    tasks: list[asyncio.Task[None]]


class Mirroring:
    """Manages the mirror and the adopted instances of a storage service. Use this class from a single event loop.

    Args:
        objects: object store, closed by `close`.
        url: URL of the object store, without secrets.
        node: name of this service's machine.
        copies: desired number of copies of each put.
        required: minimum number of copies of each put.
        offered_bytes: amount of memory that other nodes may use for their objects, in bytes.
        supervisor: runs background tasks.

    Attributes:
        adopted: adopted instances by instance id.

    Raises:
        InvalidArgumentError: the object store cannot store the required number of copies.
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
                f"mirror_required is {required}, but {url} stores only {fixed} copies of each object. Lower "
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
        """Create the mirror for an instance's puts, and the writer for the mirror's objects."""
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
        """Open the object store, retrying until the store responds. Then mirror this service's puts.

        Args:
            mirror: mirror of this service's puts.
            register: coroutine function that keeps an adopted instance registered with the controller until it is
                cancelled. The function raises PreconditionError if another storage service has adopted the instance.
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
        """Adopt the puts of a lost storage service. The adopted puts count toward the quota of this service's engine.

        Args:
            storage_id: name of the lost service.
            boot_id: instance id of the lost service.
            own: engine of this service.
            search_id: id of the controller's search for a successor. The mirror is read again for each new search,
                because the lost service may have resumed and stored more puts in the meantime.

        Raises:
            NotFoundError: the mirror contains no data of the lost service.
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
            if not task.cancelled():  # the caller was cancelled, not the task
                raise
            raise UnavailableError("the lost storage service returned but was lost again; retry later") from None

    def _end_adopting(self, boot_id: bytes, done: asyncio.Task[Adopted]) -> None:
        if boot_id in self._adopting and self._adopting[boot_id][1] is done:
            del self._adopting[boot_id]
        if not done.cancelled():
            done.exception()  # retrieves the exception, because all callers may have been cancelled

    async def _adopt(
        self,
        earlier: asyncio.Task[Adopted] | None,
        storage_id: str,
        boot_id: bytes,
        own: StorageEngine,
        search_id: bytes,
    ) -> Adopted:
        """Adopt the puts of a lost instance, after ending any adoption for an earlier search and releasing its puts."""
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait((earlier,))
        known = self.adopted.get(boot_id)
        if known is not None:
            if known.engine.run_id == search_id:
                return known
            await self.leave(known)
        if not self._opened.is_set():
            raise UnavailableError(f"the mirror {self._url} has not yet responded; retry later")
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
        engine.run_id = search_id  # tells the controller for which search this service adopted the puts
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
        """Keep an adopted instance registered, but release it if another storage service has adopted it."""
        if self._register is None:
            return
        try:
            await self._register(adopted)
        except PreconditionError as error:
            _log.warning(
                LogMessage(
                    "released puts that had been taken over earlier",
                    storage=adopted.engine.storage_id,
                    error=error.message,
                )
            )
            await self.leave(adopted)

    async def _watch(self, adopted: Adopted) -> None:
        """Release an adopted instance once it has held no puts for `_IDLE_SECONDS`."""
        idle_seconds = 0.0
        while idle_seconds < _IDLE_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            idle_seconds = 0.0 if adopted.engine.stat().put_count else idle_seconds + _LOOK_SECONDS
        await self.leave(adopted)

    async def leave(self, adopted: Adopted) -> None:
        """Stop serving an adopted instance after its puts were freed or another storage service adopted them."""
        self.adopted.pop(adopted.engine.boot_id, None)
        current = asyncio.current_task()
        for task in adopted.tasks:
            if task is not current:
                task.cancel()
        await adopted.engine.close()
        adopted.engine.release_all()

    async def close(self) -> None:
        """Close the object store. The objects are kept, because a successor may need them."""
        for adopted in list(self.adopted.values()):
            await adopted.engine.close()
        await self._objects.aclose()
