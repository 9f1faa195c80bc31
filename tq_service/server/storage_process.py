"""The storage service of a process: its engine, the memory it shares, its mirror, and how it joins a controller."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Coroutine
from typing import Any

from tq_service.addresses import hosts_and_ports, redacted
from tq_service.config import ServeSettings, default_shared_memory_dir
from tq_service.dataplane.shared_memory.server import SharedMemoryServer, make_private
from tq_service.durable.state_store import StateStore
from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.server.controller_servicer import ControllerServicer
from tq_service.server.heartbeat import register_storage
from tq_service.server.mirroring import Adopted, Mirroring, Registration
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.rpc.inbox import WaitingCalls
from tq_service.server.storage_servicer import StorageServicer, endpoint_of
from tq_service.server.supervisor import Supervisor
from tq_service.storage.blobs.memory import BlobStore, MemoryBlobs
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import EngineStat, StorageEngine
from tq_service.wire.connection import Credentials
from tq_service.wire.shared_memory import check_supported

_log = logging.getLogger(__name__)


class StorageProcess:
    """The storage service of a process; it listens for clients of this host that share memory.

    Args:
        settings: how it runs.
        port: the one that the process listens on.
        store: keeps its state; None: it is gone with the process.

    Attributes:
        engine: holds the puts.
        endpoint: how clients reach it.
        shared_memory: where clients of this host share memory with it, None where they cannot.
        keys: those of its controllers, for receipts.
        mirroring: its mirror, and what it has taken over from others with the same; None: it has none.
        mirror: of its own puts.
        registration: for how long the controller surely knows it.

    Raises:
        OSError: shared memory was asked for and cannot be had.
        InvalidArgumentError: the engine of the mirror cannot be made.
    """

    def __init__(self, settings: ServeSettings, port: int, store: StateStore | None, supervisor: Supervisor) -> None:
        name, boot_id = settings.storage_name(port), secrets.token_bytes(16)
        blobs: BlobStore = MemoryBlobs()
        if store is not None:
            blobs = SegmentBlobs(store.data_dir.segments_path, sync=settings.durability == "disk")
            name = store.data_dir.storage_id(settings.storage_id, name)
            boot_id = store.data_dir.identity.storage_boot_id
        self.registration, self.mirror = Registration(), None
        self.mirroring = _open_mirroring(settings, port, supervisor)
        if self.mirroring is not None:
            self.mirror, _ = self.mirroring.mirror_of(name, boot_id, self.registration)
        self.engine = StorageEngine(
            storage_id=name,
            max_bytes=settings.max_bytes,
            put_ttl_seconds=settings.put_ttl_seconds,
            blobs=blobs,
            boot_id=boot_id,
            mirror=self.mirror,
            memory_bytes=settings.mirror_memory_bytes,
        )
        self.endpoint = endpoint_of(self.engine, settings.advertised_address(port))
        self.shared_memory = _open_shared_memory(settings, self.engine.boot_id)
        self.keys = ReceiptKeys()

    def servicer(
        self, settings: ServeSettings, controller: ControllerServicer | None, waiting: WaitingCalls
    ) -> StorageServicer:
        """Return what answers the calls.

        Args:
            settings: how it runs.
            controller: the one in its process, which commits what is put with its commit.
            waiting: counts the calls that wait.
        """
        return StorageServicer(
            self.engine,
            self.endpoint,
            commits=None if controller is None else controller.commits,
            keys=self.keys,
            controller_id=b"" if controller is None else controller.storages.controller_id,
            shared_memory=self.shared_memory,
            stall_seconds=settings.stall_seconds,
            min_stream_rate_bytes=settings.min_stream_rate_bytes,
            waiting=waiting,
            max_puts=settings.max_puts,
            max_uncommitted_puts=settings.max_uncommitted_puts,
            mirroring=self.mirroring,
        )

    def _adopted(self) -> list[StorageEngine]:
        """Return the engines that have what was taken over."""
        return [] if self.mirroring is None else [each.engine for each in self.mirroring.adopted.values()]

    def adopted_stats(self) -> list[EngineStat]:
        """Return sizes and counts of what was taken over from others; the quota is that of its own engine."""
        return [engine.stat() for engine in self._adopted()]

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of a complete put, also of one that was taken over; None for one that is not here."""
        engines = [self.engine, *self._adopted()]
        found = {partition for engine in engines if (partition := engine.partition_of(put_id)) is not None}
        # Two puts under one id: such a name is in no token but those for all partitions.
        return found.pop() if len(found) == 1 else "\0" if found else None

    def join(self, controller: str, credentials: Credentials, supervisor: Supervisor) -> None:
        """Register with a controller elsewhere from now on, under its own name and those of what it takes over."""

        def register(of: StorageProcess | Adopted) -> Coroutine[Any, Any, None]:
            return register_storage(
                of.engine,
                of.keys,
                endpoint_of(of.engine, self.endpoint.address),
                controller,
                credentials,
                registration=of.registration,
                is_adopted=of is not self,
            )

        supervisor.start("registering this storage service with its controller", register(self))
        if self.mirroring is not None and self.mirror is not None:
            supervisor.start("mirroring puts", self.mirroring.run(self.mirror, register))

    def drain(self) -> None:
        """End the calls that wait."""
        self.engine.drain()
        if self.shared_memory is not None:
            self.shared_memory.drain()

    def trim(self) -> None:
        """Give back memory that is not needed; to be called regularly."""
        for engine in (self.engine, *self._adopted()):
            engine.trim()

    async def flush(self, seconds: float) -> None:
        """Let the mirror have what it has not yet, for so long at most: no process has it after this one."""
        if self.mirror is not None and (unmirrored_bytes := await self.mirror.flush_all(seconds)):
            _log.warning(LogMessage("stops although the mirror has not all puts", unmirrored_bytes=unmirrored_bytes))

    def share_no_memory(self) -> None:
        """Share no more memory with clients of this host."""
        if self.shared_memory is not None:
            self.shared_memory.close()

    async def close(self) -> None:
        """Give up all that it has: memory, files, its mirror."""
        self.share_no_memory()
        await self.engine.close()
        if self.mirroring is not None:
            await self.mirroring.close()


def _open_mirroring(settings: ServeSettings, port: int, supervisor: Supervisor) -> Mirroring | None:
    """Make the mirror that the settings name, None where they name none.

    Raises:
        InvalidArgumentError: its engine is not known or not installed, makes fewer copies than are required, or keeps
            them too briefly for puts that leave memory.
    """
    if settings.mirror is None:
        return None
    from tq_service.objects.registry import make_object_store  # noqa: PLC0415  (as above)

    objects = make_object_store(settings.mirror)
    if settings.mirror_memory_bytes is not None and objects.abilities.survives != "power":
        raise InvalidArgumentError(
            f"mirror_memory_bytes goes with an engine whose objects survive the loss of power, and those of "
            f"{redacted(settings.mirror)} are known to survive that of a {objects.abilities.survives}; where it keeps "
            "them on disks, add survives=power to its URL; else leave mirror_memory_bytes out",
            field="mirror_memory_bytes",
        )
    return Mirroring(
        objects,
        url=redacted(settings.mirror),
        node=_node_of(settings, port),
        copies=settings.mirror_copies,
        required=settings.mirror_required,
        offered_bytes=settings.mirror_offered_bytes,
        supervisor=supervisor,
    )


def _node_of(settings: ServeSettings, port: int) -> str:
    """Return the host at which clients reach this storage service: an engine does not count copies on it."""
    pairs = hosts_and_ports(settings.advertised_address(port))
    return pairs[0][0] if pairs else settings.host


def _open_shared_memory(settings: ServeSettings, boot_id: bytes) -> SharedMemoryServer | None:
    if settings.shared_memory == "off":
        return None
    try:
        check_supported()
        if settings.shared_memory_dir == default_shared_memory_dir():
            make_private(settings.shared_memory_dir)
        server = SharedMemoryServer(settings.shared_memory_dir, boot_id)
        server.start()
    except OSError as error:
        reason = f"no shared memory with clients of this host through {settings.shared_memory_dir}: {error}"
        if settings.shared_memory == "on":
            raise OSError(
                f"{reason}; set shared_memory_dir to a directory of this user, or shared_memory off"
            ) from error
        _log.warning(
            LogMessage(
                "no shared memory with clients of this host: all bytes go over the network",
                path=settings.shared_memory_dir,
                error=error,
            )
        )
        return None
    return server
