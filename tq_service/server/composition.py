"""What the controller and the storage service of a process are made of, built from its settings."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from tq_service.addresses import hosts_and_ports, redacted
from tq_service.config import ServeSettings, default_shared_memory_dir, join_address
from tq_service.dataplane.shared_memory.server import SharedMemoryServer, make_private
from tq_service.durable.state_store import StateStore
from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.observe.instruments import Instruments
from tq_service.observe.planning import TimedRunner
from tq_service.samplers import PlanRunner, SamplerRegistry
from tq_service.schema import CONTROLLER_NAME_BYTES
from tq_service.server import converters
from tq_service.server.checkpoints import Checkpoints
from tq_service.server.controller_servicer import ControllerServicer
from tq_service.server.heartbeat import register_storage
from tq_service.server.listener import Listener
from tq_service.server.mirroring import Adopted, Mirroring, Registration
from tq_service.server.puts import Commits
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.rpc.limits import RunningCalls, WaitingCalls
from tq_service.server.rpc.middleware import Middleware
from tq_service.server.status import Identity
from tq_service.server.storage_servicer import EngineDriver, StorageServicer, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.server.supervisor import Supervisor
from tq_service.server.watches import Watches
from tq_service.serving.backlogs import Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.limits import Limits
from tq_service.state.idempotency import IdempotencyCache
from tq_service.storage.blobs.memory import BlobStore, MemoryBlobs
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import EngineStat, StorageEngine
from tq_service.version import BUILD
from tq_service.wire.credentials import Credentials
from tq_service.wire.shared_memory import check_supported

if TYPE_CHECKING:
    from tq_service.server.cluster_member import ClusterMember

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
        mirroring: its mirror, and what it has taken over from others with the same; None: it has none.
        mirror: of its own puts.
        registration: for how long the controller surely knows it.

    Raises:
        OSError: shared memory was asked for and cannot be had.
        InvalidArgumentError: the engine of the mirror cannot be made.
    """

    def __init__(self, settings: ServeSettings, port: int, store: StateStore | None, supervisor: Supervisor) -> None:
        name, boot_id = settings.storage_name(port), secrets.token_bytes(16)
        if store is not None:
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
            blobs=_open_blobs(settings, store),
            boot_id=boot_id,
            mirror=self.mirror,
            memory_bytes=settings.mirror_memory_bytes,
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
            min_stream_rate_bytes=settings.min_stream_rate_bytes,
            waiting=waiting,
            max_puts=settings.max_puts,
            max_uncommitted_puts=settings.max_uncommitted_puts,
            mirroring=self.mirroring,
        )

    def mirror_in_words(self, settings: ServeSettings) -> str:
        """Return where its puts are a second time."""
        status = self.engine.stat().mirror
        if status is None:
            return "none"
        return f"{status.url} ({settings.mirror_required} of {settings.mirror_copies} copies required)"

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

    def tasks(
        self, settings: ServeSettings, credentials: Credentials
    ) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Yield what a storage service with a controller elsewhere does in the background, with its names."""
        controller = settings.controller
        if controller is None:
            return
        yield (
            "registering this storage service with its controller",
            register_storage(
                self.engine,
                self.receipt_keys,
                self.endpoint,
                controller,
                credentials,
                registration=self.registration,
            ),
        )
        if self.mirroring is not None and self.mirror is not None:

            async def register(adopted: Adopted) -> None:
                endpoint = endpoint_of(adopted.engine, self.endpoint.address)
                await register_storage(
                    adopted.engine,
                    adopted.keys,
                    endpoint,
                    controller,
                    credentials,
                    registration=adopted.registration,
                    is_adopted=True,
                )

            yield "mirroring puts", self.mirroring.run(self.mirror, register)

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
        instruments: count what it does; None: nothing is counted.
        cluster: the cluster of controllers that it is of; None: it is alone.

    Attributes:
        runner: runs samplers.
        catalog: all partitions.
        storages: the storage services, the one in its process among them.
        commits: what commits puts.
        watches: the calls that watch partitions.
        backlogs: what tasks have left, for metrics and the status.
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
        instruments: Instruments | None = None,
        cluster: ClusterMember | None = None,
    ) -> None:
        runner = PlanRunner(max_threads=settings.sampler_threads, timeout_seconds=settings.sampler_timeout_seconds)
        self.runner = runner
        limits = Limits(**{each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)})
        records = IdempotencyCache(
            settings.request_record_seconds,
            pack=converters.pack,
            unpack=converters.unpack,
            max_bytes=settings.request_record_bytes,
            weigh=converters.weigh,
        )
        plans = runner if instruments is None else TimedRunner(runner, instruments.plan_seconds)
        self.catalog = Catalog(plans, limits, records)
        self.catalog.machine.fatal = supervisor.fatal
        controller_id = (
            _new_controller_id(settings, port) if store is None else store.data_dir.identity.controller_boot_id
        )
        embedded = None
        if storage is not None:
            driver = EngineDriver(storage.engine)
            embedded = EmbeddedStorage(storage.engine, storage.endpoint, driver)
        self.storages = StorageRegistry(
            embedded,
            HEARTBEAT_SECONDS,
            credentials,
            snapshot_cells=self.catalog.snapshot_cells,
            controller_id=controller_id,
            epoch=lambda: 0 if cluster is None else cluster.epoch,
            after_durable=_at_once if store is None else store.after_durable,
            takes_heartbeats=lambda: (
                (cluster is None or cluster.may_answer) and (store is None or not store.is_failing)
            ),
            supervisor=supervisor,
        )
        self.catalog.on_freed = self.storages.puts.free
        self.commits = Commits(
            catalog=self.catalog, puts=self.storages.puts, endpoint_of=self.storages.endpoint_of, waiting=waiting
        )
        self.watches = Watches(self.catalog, most=settings.max_watchers, stall_seconds=settings.stall_seconds)
        self.backlogs = Backlogs(self.catalog, runner)
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
            watches=self.watches,
            backlogs=self.backlogs,
            identity=Identity(settings, shared_memory=storage is not None and storage.shared_memory is not None),
            controllers=tuple if cluster is None else cluster.statuses,
        )

    def take_up(self) -> None:
        """Do what follows once all of the state is there again: leases begin again, puts are known."""
        self.catalog.start_leases()
        self.storages.recover()

    def drain(self) -> None:
        """End the calls that wait, and those that watch."""
        self.catalog.drain()
        self.watches.drain()


class Metrics:
    """What a process shows to Prometheus, and the port on which it does.

    Args:
        settings: how it runs, with a metrics_port.
        instruments: what is counted.
        listener: secures the port.
        port: that of the service.
        calls: counts the calls that are handled.
        waiting: counts those that wait.

    Attributes:
        shown: what is shown; what the process has is added to it.
        port: where it listens.

    Raises:
        OSError: the address is taken or cannot be listened on.
        InvalidArgumentError: the extra `metrics` is not installed.
    """

    def __init__(
        self,
        settings: ServeSettings,
        instruments: Instruments,
        listener: Listener,
        port: int,
        *,
        calls: RunningCalls,
        waiting: WaitingCalls,
    ) -> None:
        try:
            from tq_service.observe.endpoint import Endpoint  # noqa: PLC0415  (needs an extra)
            from tq_service.observe.service import ServiceMetrics  # noqa: PLC0415  (as above)
        except ModuleNotFoundError as error:
            raise InvalidArgumentError(
                f"metrics_port is set, and the package {error.name} is missing; install tq-service[metrics], or leave "
                "metrics_port out",
                field="metrics_port",
            ) from error
        self.shown = ServiceMetrics(
            instruments,
            facts={"version": BUILD, "role": settings.role},
            running_count=lambda: calls.count,
            waiting_count=lambda: waiting.count,
        )
        loop = asyncio.get_running_loop()
        self._endpoint = Endpoint(
            settings.metrics_host,
            settings.metrics_port or 0,
            collect=self.shown.collect,
            loop=loop,
            access=listener.scrape_access(loop),
            service_port=port,
        )
        self.port = self._endpoint.port
        _log.info(LogMessage("metrics are served", address=join_address(settings.metrics_host, self.port)))

    def add(
        self,
        controller: Controller | None,
        storage: Storage | None,
        store: StateStore | None,
        cluster: ClusterMember | None,
    ) -> None:
        """Show what the process has, once it was recovered."""
        if controller is not None:
            storages = controller.storages
            self.shown.add_controller(
                controller.catalog, controller.backlogs, storages.counts, storages.adoption_counts
            )
        if storage is not None:
            self.shown.add_storage(storage.engine.storage_id, storage.engine.stat, storage.adopted_stats)
        if store is not None:
            self.shown.add_log(store.lag)
        if cluster is not None:
            self.shown.add_cluster(cluster.name, lambda: cluster.may_answer, cluster.lags)

    async def close(self) -> None:
        """Close the port."""
        await self._endpoint.close()


def call_spans() -> Middleware:
    """Return what traces calls.

    Raises:
        InvalidArgumentError: the extra `traces` is not installed.
    """
    try:
        from tq_service.server.rpc.traces import CallSpans  # noqa: PLC0415  (needs an extra)
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"traces is set, and the package {error.name} is missing; install tq-service[traces], or leave traces out",
            field="traces",
        ) from error
    return CallSpans()


def _new_controller_id(settings: ServeSettings, port: int) -> bytes:
    """Return the id of a controller that keeps no state: by its beginning others know whose earlier start they see."""
    name = hashlib.sha256(f"{settings.advertise or socket.gethostname()}:{port}".encode()).digest()
    return name[:CONTROLLER_NAME_BYTES] + secrets.token_bytes(16 - CONTROLLER_NAME_BYTES)


def open_state_store(settings: ServeSettings, supervisor: Supervisor) -> StateStore | None:
    """Open the data directory; None where the settings have none.

    Raises:
        DataDirError: it is in use or cannot be used.
        JournalDamagedError: its state cannot be recovered.
        DiskFullError: there is no space in it.
    """
    if settings.data_dir is None or settings.journal is not None:
        return None
    store = StateStore.open(
        settings.data_dir, sync=settings.durability == "disk", accept_loss=settings.accept_journal_loss
    )
    store.fatal = supervisor.fatal
    supervisor.on_fatal(store.abandon)
    return store


def open_cluster(
    settings: ServeSettings, port: int, credentials: Credentials, supervisor: Supervisor
) -> ClusterMember | None:
    """Open what makes this controller one of several; None where it is alone.

    Raises:
        JournalUnreachableError: etcd does not answer.
        DataDirError: the data directory is in use, cannot be used, or is of another controller.
    """
    if settings.journal is None:
        return None
    from tq_service.server.cluster_member import ClusterMember  # noqa: PLC0415  (a controller alone does without)

    member = ClusterMember(settings, settings.advertised_address(port), credentials, supervisor)
    member.store.fatal = supervisor.fatal
    supervisor.on_fatal(member.store.abandon)
    return member


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
    if isinstance(blobs, SegmentBlobs) != (store is not None):
        raise InvalidArgumentError(
            f"blob_store {name} goes {'without' if store is not None else 'with'} data_dir only; leave blob_store "
            "auto, so that it follows from data_dir",
            field="blob_store",
        )
    return blobs


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
        controller.take_up()
    if storage is not None:
        supervisor.start("the check of recovered puts", storage.engine.scrub(), may_end=True)
