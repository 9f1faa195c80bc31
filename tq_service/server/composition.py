"""What the controller and the storage service of a process are made of, built from its settings."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

from tq_service.config import ServeSettings, default_shared_memory_dir
from tq_service.dataplane.shared_memory.server import SharedMemoryServer, make_private
from tq_service.domain.admission.limits import Limits
from tq_service.domain.catalog import Catalog
from tq_service.domain.idempotency import IdempotencyCache
from tq_service.durable.state_store import StateStore
from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.samplers import PlanRunner, SamplerRegistry
from tq_service.server import converters
from tq_service.server.checkpoints import Checkpoints
from tq_service.server.commits import Commits
from tq_service.server.controller_servicer import ControllerServicer
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.rpc.limits import WaitingCalls
from tq_service.server.storage_servicer import EngineDriver, StorageServicer, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.server.supervisor import Supervisor
from tq_service.storage.blobs.base import BlobStore, DurableBlobStore
from tq_service.storage.blobs.memory import MemoryBlobs
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import StorageEngine
from tq_service.wire.credentials import Credentials
from tq_service.wire.shared_memory import check_supported

_log = logging.getLogger(__name__)
HEARTBEAT_SECONDS: Final = 2.0


class Storage:
    """The storage service of a process; it listens for clients of this host that share memory.

    Args:
        settings: how it runs.
        port: the one that the process listens on.
        store: keeps its state; None: it is gone with the process.

    Attributes:
        engine: holds the puts.
        endpoint: how clients reach it.
        shared_memory: where clients of this host share memory with it, None where they cannot.
        receipt_keys: those of its controllers.

    Raises:
        OSError: shared memory was asked for and cannot be had.
    """

    def __init__(self, settings: ServeSettings, port: int, store: StateStore | None) -> None:
        name, boot_id = settings.storage_name(port), None
        if store is not None:
            name = store.data_dir.storage_id(settings.storage_id, name)
            boot_id = store.data_dir.identity.storage_boot_id
        self.engine = StorageEngine(
            storage_id=name,
            max_bytes=settings.max_bytes,
            put_ttl_seconds=settings.put_ttl_seconds,
            blobs=_open_blobs(settings, store),
            boot_id=boot_id,
        )
        self.endpoint = endpoint_of(self.engine, settings.advertised_address(port))
        self.shared_memory = _open_shared_memory(settings, self.engine.boot_id)
        self.receipt_keys = ReceiptKeys()

    def servicer(
        self, settings: ServeSettings, controller: Controller | None, waiting: WaitingCalls
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
            keys=self.receipt_keys,
            controller_id=b"" if controller is None else controller.storages.controller_id,
            shared_memory=self.shared_memory,
            stall_seconds=settings.stall_seconds,
            waiting=waiting,
            max_puts=settings.max_puts,
            max_uncommitted_puts=settings.max_uncommitted_puts,
        )

    def drain(self) -> None:
        """End the calls that wait."""
        self.engine.drain()
        if self.shared_memory is not None:
            self.shared_memory.drain()

    def close(self) -> None:
        """Share no more memory."""
        if self.shared_memory is not None:
            self.shared_memory.close()


class Controller:
    """The controller of a process.

    Args:
        settings: how it runs.
        port: the one that the process listens on.
        storage: the storage service in its process.
        store: keeps its state; None: it is gone with the process.
        credentials: what it shows to storage services.
        waiting: counts the calls that wait.
        supervisor: runs its background tasks, and learns of what it cannot go on from.

    Attributes:
        catalog: all partitions.
        storages: the storage services, the one in its process among them.
        commits: what commits puts.
        servicer: answers the calls.
    """

    def __init__(
        self,
        settings: ServeSettings,
        port: int,
        *,
        storage: Storage | None,
        store: StateStore | None,
        credentials: Credentials,
        waiting: WaitingCalls,
        supervisor: Supervisor,
    ) -> None:
        runner = PlanRunner(max_threads=settings.sampler_threads, timeout_seconds=settings.sampler_timeout_seconds)
        limits = Limits(**{each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)})
        records = IdempotencyCache(
            settings.request_record_seconds,
            pack=converters.pack,
            unpack=converters.unpack,
            max_bytes=settings.request_record_bytes,
            weigh=converters.weigh,
        )
        self.catalog = Catalog(runner, limits, records)
        self.catalog.machine.fatal = supervisor.fatal
        # One that keeps no state is the same after a restart: what its storage services hold of before goes at once.
        controller_id = hashlib.sha256(f"{settings.advertise or socket.gethostname()}:{port}".encode()).digest()[:16]
        if store is not None:
            controller_id = store.data_dir.identity.controller_boot_id
        embedded = None
        if storage is not None:
            driver = EngineDriver(storage.engine)
            embedded = EmbeddedStorage(storage.engine, storage.endpoint, driver, controller_id)
        self.storages = StorageRegistry(
            embedded,
            HEARTBEAT_SECONDS,
            credentials,
            snapshot_cells=self.catalog.snapshot_cells,
            controller_id=controller_id,
            after_durable=_at_once if store is None else store.after_durable,
            supervisor=supervisor,
        )
        self.catalog.on_freed = self.storages.free
        self.commits = Commits(catalog=self.catalog, storages=self.storages, waiting=waiting)
        self.servicer = ControllerServicer(
            catalog=self.catalog,
            commits=self.commits,
            registry=SamplerRegistry(allow_import=settings.allow_sampler_import),
            runner=runner,
            storages=self.storages,
            max_wait_cap_seconds=settings.max_wait_cap_seconds,
            waiting=waiting,
            checkpoints=Checkpoints(
                catalog=self.catalog,
                storages=self.storages,
                store=store,
                checkpoint_dir=settings.checkpoint_directory(),
            ),
        )


def open_state_store(settings: ServeSettings, supervisor: Supervisor) -> StateStore | None:
    """Open the data directory; None where the settings have none.

    Raises:
        DataDirError: it is in use or cannot be used.
        JournalDamagedError: its state cannot be recovered.
        DiskFullError: there is no space in it.
    """
    if settings.data_dir is None:
        return None
    store = StateStore.open(
        settings.data_dir, sync=settings.durability == "disk", accept_loss=settings.accept_journal_loss
    )
    store.fatal = supervisor.fatal
    supervisor.on_fatal(store.abandon)
    return store


def _open_blobs(settings: ServeSettings, store: StateStore | None) -> BlobStore:
    """Open the store of blobs that the settings name.

    Raises:
        InvalidArgumentError: there is none of that name, or it does not go with the durability.
    """
    name = settings.blob_store if settings.blob_store != "auto" else ("memory" if store is None else "segments")
    if name not in BLOB_STORES:
        raise InvalidArgumentError(
            f"blob_store is {name!r}; expected one of auto, {', '.join(BLOB_STORES)}", field="blob_store"
        )
    blobs = BLOB_STORES[name](settings, store)
    if isinstance(blobs, DurableBlobStore) != (store is not None):
        raise InvalidArgumentError(
            f"blob_store {name} goes {'without' if store is not None else 'with'} data_dir only; leave blob_store "
            "auto, so that it follows from data_dir",
            field="blob_store",
        )
    return blobs


def _open_segments(settings: ServeSettings, store: StateStore | None) -> SegmentBlobs:
    if store is None:
        raise InvalidArgumentError("blob_store segments needs the setting data_dir", field="blob_store")
    return SegmentBlobs(store.data_dir.segments_path, sync=settings.durability == "disk")


BLOB_STORES: Final[Mapping[str, Callable[[ServeSettings, StateStore | None], BlobStore]]] = {
    "memory": lambda settings, store: MemoryBlobs(),
    "segments": _open_segments,
}
"""Where the bytes of puts can be, by name. A new place is a file in `tq_service.storage.blobs`, and a line here."""


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


def _at_once(callback: Callable[[], None]) -> None:
    callback()


def recover(store: StateStore, controller: Controller | None, storage: Storage | None, supervisor: Supervisor) -> None:
    """Bring back what the data directory has, and write down every change from now on."""
    found = store.recover(
        catalog=None if controller is None else controller.catalog, engine=None if storage is None else storage.engine
    )
    _log.info(
        LogMessage(
            "recovered the state",
            partitions=found.partition_count,
            samples=found.sample_count,
            puts=found.put_count,
            replayed_records=found.record_count,
            seconds=round(found.seconds, 2),
        )
    )
    if controller is not None:
        controller.catalog.start_leases()
        controller.storages.recover()
    if storage is not None:
        supervisor.start("the check of recovered puts", storage.engine.scrub(), may_end=True)
