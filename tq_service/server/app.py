"""The service process, which runs a controller, a storage service, or both until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import operator
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tq_service.addresses import hosts_and_ports, redacted, split_addresses
from tq_service.config import ServeSettings, default_shared_memory_dir, format_setting, format_size, join_address
from tq_service.dataplane.bulk.server import BulkServer
from tq_service.dataplane.shared_memory.server import SharedMemoryServer, make_private
from tq_service.durable.state_store import StateStore
from tq_service.errors import (
    InvalidArgumentError,
    JournalUnreachableError,
    ServiceFailedError,
    TqError,
    UnavailableError,
)
from tq_service.internal.v1.storage_control_pb2_grpc import add_StorageControlServiceServicer_to_server
from tq_service.internal.v1.storage_registry_pb2_grpc import add_StorageRegistryServiceServicer_to_server
from tq_service.log_message import LogMessage
from tq_service.machine.state_machine import IdempotencyCache
from tq_service.observe.instruments import Instruments, TimedRunner
from tq_service.samplers import PlanRunner
from tq_service.schema import CONTROLLER_NAME_BYTES
from tq_service.server.controller_servicer import ControllerServicer, answer_bytes, pack_answer, unpack_answer
from tq_service.server.health import Health
from tq_service.server.heartbeat import register_storage
from tq_service.server.listener import Connections, Listener
from tq_service.server.mirroring import Adopted, Mirroring, Registration
from tq_service.server.process import collect_garbage, give_back_freed_memory, tuned_process
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.rpc.batches import Batches
from tq_service.server.rpc.calls import DurableAnswers, ObservedCalls, RunningCalls, Services
from tq_service.server.rpc.inbox import WaitingCalls
from tq_service.server.rpc.methods import Middleware
from tq_service.server.storage_servicer import SERVICE as STORAGE_SERVICE
from tq_service.server.storage_servicer import EngineDriver, StorageServicer, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.server.supervisor import FAILED_EXIT_CODE, Supervisor, failing_with, regularly
from tq_service.serving.catalog import Catalog, Limits
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import EngineStat, StorageEngine
from tq_service.storage.index.put_table import PutJournal
from tq_service.storage.mirror.mirror import Mirror
from tq_service.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server
from tq_service.v1.storage_service_pb2_grpc import add_StorageServiceServicer_to_server
from tq_service.version import BUILD
from tq_service.wire.connection import CONTROLLER_CONNECTION_SECONDS, LISTENING_OPTIONS, Credentials
from tq_service.wire.shared_memory import check_supported

if TYPE_CHECKING:
    from tq_service.observe.endpoint import Endpoint

_log = logging.getLogger(__name__)
CONTROLLER_SERVICE = "tq_service.v1.ControllerService"
HEARTBEAT_SECONDS: Final = 2.0
_HOUSEKEEPING_SECONDS = 5.0
_MOST_PENDING_CALLS = 100_000
_ETCD_RETRY_SECONDS: Final = 1.0
_ABORT_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_PENDING_SHARE: Final = 4
"""The quota divided by this number limits the data waiting to be recorded, so that a slow disk does not delay puts."""


class App:
    """A service process that runs the controller, a storage service, or both.

    Call `start` to create an app that serves calls. Call `stop` to shut down the app and release its resources.

    Attributes:
        settings: configuration of the service.
        supervisor: runs background tasks and stops the service after a fatal failure.
        port: gRPC port number.
        listener: TLS and access control for the gRPC port.
        health: reports whether the process accepts calls.
        calls: counter of running calls.
        waiting: counter of waiting calls.
        cluster: this controller's cluster membership, or None if the controller is not part of a cluster.
        state_store: store that persists the state of the controller and the storage service, or None if the state is
            kept in memory.
        storage: the storage service, or None if this process does not run one.
        controller: the controller, or None if this process does not run one.
        metrics: the Prometheus metrics endpoint, or None if metrics are off.
    """

    def __init__(self, settings: ServeSettings, supervisor: Supervisor, closing: contextlib.AsyncExitStack) -> None:
        self.supervisor = supervisor
        self.settings = settings
        self._closing = closing  # closed by the caller if the constructor raises
        closing.enter_context(tuned_process())
        self.listener = Listener(settings)
        for address in () if settings.controller is None else split_addresses(settings.controller):
            self.listener.credentials.check_target(address)
        self._server = make_server(settings)
        self._stopping: asyncio.Task[None] | None = None
        self._servicer: StorageServicer | None = None
        closing.push_async_callback(self._stop_server, 0)
        self.port = self.listener.listen(self._server)
        self.health = Health()
        self.calls = RunningCalls(settings.max_calls)
        self._connections = Connections(
            self.listener.access.admitted_at, settings.max_connections, settings.first_call_seconds
        )
        self.waiting = WaitingCalls(settings.max_waiting_calls, settings.max_waiting_calls_per_client)
        instruments = None if settings.metrics_port is None else Instruments()
        self.metrics: Endpoint | None = None
        self.cluster: ClusterMember | None = None
        self.state_store: StateStore | None = None
        if settings.journal is not None:
            # Imported lazily because only cluster members need this module.
            from tq_service.server.cluster_member import ClusterMember  # noqa: PLC0415

            address = settings.advertised_address(self.port)
            self.cluster = ClusterMember(settings, address, self.listener.credentials, supervisor)
            closing.push_async_callback(self.cluster.close)
            self.state_store = self.cluster.store
        elif settings.data_dir is not None:
            self.state_store = StateStore.open(
                settings.data_dir, sync=settings.durability == "disk", accept_loss=settings.accept_journal_loss
            )
        if self.state_store is not None:
            self.state_store.fatal = supervisor.fatal
            supervisor.on_fatal(self.state_store.abandon)
            closing.push_async_callback(self.state_store.close)
        self._answers = DurableAnswers(self.state_store, self.cluster)
        self.storage = self.controller = None
        if settings.role != "controller":
            self.storage = StorageProcess(settings, self.port, self.state_store, supervisor, self.listener.tls_context)
            closing.push_async_callback(self.storage.close)
            self.listener.access.partition_of = self.storage.partition_of
        if settings.role != "storage":
            self.controller = self._make_controller(instruments)
            closing.push_async_callback(self.controller.storages.close)
            closing.push_async_callback(self.controller.backlogs.close)
        closing.callback(self.listener.close)
        closing.push_async_callback(supervisor.stop)
        supervisor.on_fatal(lambda _failure: self._fail())
        if self.cluster is None:
            self._begin(self.state_store)
        if instruments is not None:
            self.metrics = self._serve_metrics(instruments)
            closing.push_async_callback(self.metrics.close)
        self._add_services(instruments)

    @classmethod
    async def start(cls, settings: ServeSettings, supervisor: Supervisor) -> App:
        """Create an app and start listening. The app reports that it is healthy once it can serve calls.

        If startup fails, all resources are released.

        Args:
            settings: configuration of the service.
            supervisor: runs all background tasks. When the supervisor reports a fatal failure, the app stops serving
                immediately.

        Raises:
            OSError: the address is in use, or the process cannot listen on it.
            DataDirError: the data directory is in use or unusable.
            JournalDamagedError: the state in the data directory cannot be recovered.
            DiskFullError: the data directory's disk is full.
            InvalidArgumentError: with these settings, the controller cannot be called, or recording cannot start.
        """
        closing = contextlib.AsyncExitStack()
        try:
            app = cls(settings, supervisor, closing)
            if settings.record is not None:
                await app._record(settings.record)
            await app._server.start()
            app._start_tasks()
            if app.cluster is None:
                app.health.serve()
        except BaseException:
            await closing.aclose()
            raise
        return app

    def _make_controller(self, instruments: Instruments | None) -> ControllerServicer:
        """Create the controller's servicer."""
        settings, storage, store, cluster = self.settings, self.storage, self.state_store, self.cluster
        runner = PlanRunner(max_threads=settings.sampler_threads, timeout_seconds=settings.sampler_timeout_seconds)
        catalog = Catalog(
            runner if instruments is None else TimedRunner(runner, instruments.plan_seconds),
            Limits(**{each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)}),
            IdempotencyCache(
                settings.request_record_seconds,
                pack=pack_answer,
                unpack=unpack_answer,
                max_bytes=settings.request_record_bytes,
                weigh=answer_bytes,
            ),
        )
        catalog.machine.fatal = self.supervisor.fatal
        if store is None:
            # The first bytes are derived from the address, so they identify the controller across restarts.
            name = hashlib.sha256(f"{settings.advertise or socket.gethostname()}:{self.port}".encode()).digest()
            controller_id = name[:CONTROLLER_NAME_BYTES] + secrets.token_bytes(16 - CONTROLLER_NAME_BYTES)
        else:
            controller_id = store.data_dir.identity.controller_boot_id
        embedded = None
        if storage is not None:
            driver = EngineDriver(storage.engine)
            embedded = EmbeddedStorage(storage.engine, storage.endpoint, driver)
        storages = StorageRegistry(
            embedded,
            HEARTBEAT_SECONDS,
            self.listener.credentials,
            snapshot_cells=catalog.snapshot_cells,
            controller_id=controller_id,
            epoch=self._answers.epoch,
            after_durable=operator.call if store is None else store.after_durable,
            takes_heartbeats=self._answers.takes_changes,
            supervisor=self.supervisor,
        )
        catalog.on_freed = storages.puts.free
        controller = ControllerServicer(
            settings,
            catalog,
            runner,
            storages,
            self.waiting,
            store=store,
            shared_memory=storage is not None and storage.shared_memory is not None,
            controllers=tuple if cluster is None else cluster.statuses,
        )
        controller.watches.end_connection = partial(self._connections.end, self.port)
        return controller

    async def _record(self, where: str) -> None:
        """Start recording batches. If the destination does not respond, continue without recording.

        Raises:
            DataDirError: the recording directory is unusable.
            InvalidArgumentError: the object store is unusable, or this process does not run both the controller and a
                storage service.
        """
        # Imported lazily because most services do not record.
        from tq_service.recording.places import place_of  # noqa: PLC0415
        from tq_service.recording.recorder import MOST_PENDING_BYTES, Recorder  # noqa: PLC0415
        from tq_service.server.recording import StepRecording  # noqa: PLC0415

        settings, store, controller, storage = self.settings, self.state_store, self.controller, self.storage
        if controller is None or storage is None:
            raise InvalidArgumentError("record requires role all. Unset record, or set role to all", field="record")
        quota = MOST_PENDING_BYTES if settings.max_bytes is None else settings.max_bytes
        recorder = Recorder(
            place_of(where, sync=settings.durability == "disk", segments=storage.segments),
            most_steps=settings.record_steps,
            most_bytes=settings.record_bytes,
            most_pending_bytes=min(MOST_PENDING_BYTES, quota // _PENDING_SHARE),
        )
        after_durable = operator.call if store is None else store.after_durable
        controller.recording = StepRecording(recorder, controller.catalog, storage.engine, after_durable)
        try:
            controller.recording.start(await recorder.open())
        except UnavailableError as error:
            recorder.fail(error)
            return
        self._closing.push_async_callback(recorder.close)
        self.supervisor.start("recording steps", recorder.run())

    def _add_services(self, instruments: Instruments | None) -> None:
        """Add the gRPC services to the server, wrapped in the middleware."""
        settings = self.settings
        middleware: list[Middleware] = [ObservedCalls(instruments)]
        if settings.traces:
            with _needing_extra("traces", "traces"):
                from tq_service.server.rpc.traces import CallSpans  # noqa: PLC0415  (requires an extra)
            middleware.append(CallSpans())
        # `DurableAnswers` is innermost so that refused callers never wait for the disk or learn about its state.
        middleware += [self.calls, self.listener.access, self._answers]
        server: Any = Services(self._server, middleware)  # generated code treats this as the server
        takes_services = self.listener.takes_services
        services = []
        if self.storage is not None:
            self._servicer = self.storage.servicer(settings, self.controller, self.waiting)
            servicer: Any = self._servicer
            server.add_generic_rpc_handlers((servicer.bulk_handler(),))  # takes precedence because it is added first
            add_StorageServiceServicer_to_server(servicer, server)
            if takes_services and self.controller is None:  # a controller in this process calls the engine directly
                add_StorageControlServiceServicer_to_server(servicer, server)
            services.append(STORAGE_SERVICE)
        if self.controller is not None:
            self.controller.batches = Batches(server, settings.stall_seconds)
            add_ControllerServiceServicer_to_server(self.controller, server)
            if takes_services:
                add_StorageRegistryServiceServicer_to_server(self.controller, server)
                if self.cluster is not None:
                    self.cluster.add_services(server)
            services.append(CONTROLLER_SERVICE)
        self.health.add(("", *services))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        if settings.reflection:
            # Imported lazily because reflection is rarely used and its import takes 5 % of the startup time.
            from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc  # noqa: PLC0415

            names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            reflecting = reflection.aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, server)

    def _serve_metrics(self, instruments: Instruments) -> Endpoint:
        """Start the endpoint for Prometheus metrics.

        Raises:
            OSError: the address is in use, or the process cannot listen on it.
            InvalidArgumentError: the `metrics` extra is not installed.
        """
        settings = self.settings
        with _needing_extra("metrics", "metrics_port"):
            from tq_service.observe import endpoint, service  # noqa: PLC0415  (require an extra)
        shown = service.ServiceMetrics(
            instruments,
            facts={"version": BUILD, "role": settings.role},
            running_count=lambda: self.calls.count,
            waiting_count=lambda: self.waiting.count,
        )
        if (cluster := self.cluster) is not None:
            shown.leads = lambda: cluster.may_answer
            shown.parts.append(lambda: service.of_cluster(cluster.name, cluster.lags() if shown.leads() else None))
        if (controller := self.controller) is not None:
            storages = controller.storages
            shown.add_partitions(controller.catalog, controller.backlogs)
            shown.parts.append(
                lambda: () if controller.recording is None else service.of_recording(controller.recording.status())
            )
            shown.parts.append(
                lambda: service.of_storages(storages.counts(), *storages.adoption_counts()) if shown.leads() else ()
            )
        if (storage := self.storage) is not None:
            engine = storage.engine
            shown.parts.append(lambda: service.of_storage(engine.storage_id, engine.stat(), storage.adopted_stats()))
            if (bulk := storage.bulk) is not None:
                shown.parts.append(lambda: service.of_bulk(engine.storage_id, bulk.connection_count, bulk.moved_bytes))
        if (store := self.state_store) is not None:
            shown.parts.append(lambda: service.of_log(store.lag()))
        self.supervisor.start("measuring the event loop", shown.measure_loop())
        loop = asyncio.get_running_loop()
        opened = endpoint.Endpoint(
            settings.metrics_host,
            settings.metrics_port or 0,
            collect=shown.collect,
            loop=loop,
            access=self.listener.scrape_access(loop),
            service_port=self.port,
        )
        _log.info(LogMessage("serving metrics", address=join_address(settings.metrics_host, opened.port)))
        return opened

    def _begin(self, store: StateStore | None) -> None:
        """Recover the state from the data directory and persist all later changes.

        Without a data directory, only start the timers for leases and samples.
        """
        if store is not None:
            self._recover(store)
        elif self.controller is not None:
            self.controller.catalog.start_leases()

    def _recover(self, store: StateStore) -> None:
        catalog = None if self.controller is None else self.controller.catalog
        found = store.recover(catalog=catalog, puts=None if self.storage is None else self.storage.journal)
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
        if self.controller is not None:
            self.controller.take_up()
        if self.storage is not None:
            self.supervisor.start("checking recovered puts", self.storage.engine.scrub(), may_end=True)

    def _start_tasks(self) -> None:
        start = self.supervisor.start
        if self.cluster is not None and self.controller is not None:
            self.health.stand_by()
            name = "following the cluster's log, and leading the cluster"
            start(name, self.cluster.run(self.controller.catalog, self._take_up, self._on_standing), may_end=True)
        # If an iteration of a task below raises an error, the error is logged and the task continues.
        start("watching the certificate and token files", self.listener.watch())
        start("housekeeping", regularly(_HOUSEKEEPING_SECONDS, self._keep_house))
        start("ending slow streams and idle connections", regularly(_LOOK_SECONDS, self._end_idle))
        start("collecting garbage", collect_garbage())
        if self.storage is not None and self.settings.controller is not None:
            self.storage.join(self.settings.controller, self.listener.credentials, self.supervisor)
        if self.controller is not None:
            start("finding successors for lost storage services", self.controller.storages.adoptions.run())
            release_old = partial(self._release_old, self.controller.catalog)
            start("releasing old samples", regularly(_LOOK_SECONDS, release_old))

    def _take_up(self) -> None:
        """Start serving as the cluster's leader after this controller has caught up with the log."""
        if self.controller is not None:
            self.controller.take_up()
        self.health.serve()

    def _on_standing(self, may_answer: bool) -> None:
        """Start accepting calls if this controller leads the cluster.

        Otherwise, end running calls and reject new ones.
        """
        if may_answer:
            self.health.serve()
        else:
            self.health.stand_by()
            self._answers.end_calls()

    async def _end_idle(self) -> None:
        if self._servicer is not None:
            self._servicer.end_slow_streams()
        if self.controller is not None:
            self.controller.batches.end_stalled()
        await self._connections.sweep(self.port)

    async def _release_old(self, catalog: Catalog) -> None:
        for partition_id, count in catalog.expire_samples():
            _log.info(LogMessage("released old samples", partition=partition_id, count=count))
            await asyncio.sleep(0)

    async def _keep_house(self) -> None:
        self.calls.report()
        self._connections.report()
        await asyncio.to_thread(give_back_freed_memory)
        if self.storage is not None:
            self.storage.trim()
        if self.controller is None:
            return
        expired = 0
        for count in self.controller.storages.expire():
            expired += count
            await asyncio.sleep(0)
        if expired:
            _log.warning(LogMessage("uncommitted puts expired; their producers may have died", count=expired))

    def _fail(self) -> None:
        """Report that the service is unhealthy and end all calls. No response may be sent after a fatal failure."""
        self._drain()
        self._stop_server(None)

    def _drain(self) -> None:
        self.health.drain()
        if self.controller is not None:
            self.controller.drain()

    def _stop_server(self, grace_seconds: float | None) -> asyncio.Task[None]:
        """Begin shutting down the server, unless a shutdown is in progress. Return the task that stops the server.

        Only the first shutdown request sets the grace period for running calls. The server is stopped only once,
        because overlapping stops may crash gRPC.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._server.stop(grace_seconds))
        return self._stopping

    async def abort(self) -> None:
        """Stop within two seconds after a failure, without flushing any data, as if the process had been killed."""
        await asyncio.wait((self._stop_server(None),), timeout=_ABORT_SECONDS)
        if self.storage is not None:
            self.storage.end_transfers()
        self.listener.close()

    async def stop(self, grace_seconds: float) -> None:
        """Stop the service gracefully and release all resources.

        The service reports that it is unhealthy, ends waiting calls, and waits for running calls to finish. The rest of
        the grace period is spent copying unmirrored puts to the mirror.
        """
        ends_at = time.monotonic() + grace_seconds
        self._drain()
        if self.storage is not None:
            self.storage.drain()
        await self._stop_server(grace_seconds)
        if self.storage is not None:
            await self.storage.flush(ends_at - time.monotonic())
        await self._closing.aclose()


@contextlib.contextmanager
def _needing_extra(extra: str, setting: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"{setting} is set, but the package {error.name} is missing. Install tq-service[{extra}], or unset "
            f"{setting}",
            field=setting,
        ) from error


def make_server(settings: ServeSettings) -> grpc.aio.Server:
    """Create a gRPC server without starting it."""
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_metadata_size", settings.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
            ("grpc.max_allowed_incoming_connections", settings.max_connections),
            ("grpc.max_connection_idle_ms", round(settings.idle_connection_seconds * 1000)),
            ("grpc.server_handshake_timeout_ms", round(settings.first_call_seconds * 1000)),
            ("grpc.max_concurrent_streams", settings.max_streams),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server on this port must fail to start
            # Thousands of ranks may call at the same time, but by default gRPC drops calls once 1,000 are pending.
            ("grpc.server.max_pending_requests", _MOST_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING_CALLS),
            *LISTENING_OPTIONS,
            *([("grpc.max_connection_age_ms", CONTROLLER_CONNECTION_SECONDS * 1000)] if settings.cluster else []),
        ],
    )


async def serve(settings: ServeSettings, *, announce: Callable[[str], None]) -> int:
    """Run the service until SIGTERM or SIGINT and return the exit code.

    Args:
        settings: configuration of the service.
        announce: function called with each status line that the user should see, such as the listening address.

    Returns:
        The exit code is 0 after SIGTERM or SIGINT, 1 if the service could not start, or `FAILED_EXIT_CODE` after a
        fatal failure. After a fatal failure, the process must exit immediately, without waiting for its remaining
        threads.
    """
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        app = await _started(settings, stopping)
    except (OSError, TqError) as error:
        _log.error(LogMessage("the service could not start", error=error))
        return 1
    if app is None:
        return 0
    announce(f"listening on {join_address(settings.host, app.port)} (role {settings.role})")
    announce(_what_it_is(app))
    try:
        async with failing_with(app.supervisor):
            app.supervisor.raise_failure()
            await stopping.wait()
            announce(f"draining for up to {settings.grace_seconds:g} s")
            await app.stop(settings.grace_seconds)
    except ServiceFailedError:
        await app.abort()
        return FAILED_EXIT_CODE
    return 0


async def _started(settings: ServeSettings, stopping: asyncio.Event) -> App | None:
    """Start an app, waiting for etcd if necessary. Return None if `stopping` is set before the app starts.

    Raises:
        OSError, TqError: the app could not start.
    """
    while not stopping.is_set():
        try:
            return await App.start(settings, Supervisor())
        except JournalUnreachableError as error:
            _log.warning(LogMessage("waiting for etcd to respond before starting the service", error=error))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _ETCD_RETRY_SECONDS)
    return None


def _what_it_is(app: App) -> str:
    """Return a one-line summary of the running service's main settings."""
    settings, storage, mirror = app.settings, app.storage, "none"
    if settings.mirror is not None:
        copies = f"{settings.mirror_required} of {settings.mirror_copies} copies required"
        mirror = f"{redacted(settings.mirror)} ({copies})"
    facts = {
        "version": BUILD,
        "durability": settings.effective_durability,
        "data directory": settings.data_dir or "none",
        "quota": "none" if storage is None else format_size(settings.max_bytes),
        "tls": "mutual" if settings.tls_client_ca else "on" if settings.tls_cert else "off",
        "tokens": "on" if settings.auth_tokens_file else "off",
        "shared memory": "off" if storage is None or storage.shared_memory is None else "on",
        "bulk port": "none" if storage is None or storage.bulk is None else storage.bulk.port,
        "mirror": mirror,
        "recording": "none" if settings.record is None else format_setting("record", settings.record),
        "pid": os.getpid(),
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items())


@contextlib.asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[App]:
    """Run the service inside another program, such as a test, for the duration of an `async with` block.

    Raises:
        ServiceFailedError: the service failed. The body of the block is cancelled at its next `await`.
    """
    supervisor, app = Supervisor(), None
    try:
        async with failing_with(supervisor):
            app = await App.start(settings, supervisor)
            yield app
    finally:
        if app is not None:
            await app.stop(0)
    supervisor.raise_failure()  # in case the service failed while it was stopping


class StorageProcess:
    """The storage service in this process, including its bulk port and the memory shared with local clients.

    Args:
        settings: configuration of the service.
        port: gRPC port number.
        store: store that persists the state, or None if the state is kept in memory.
        supervisor: runs background tasks.
        tls_context: function that returns the current TLS context for the bulk port. None for plaintext.

    Attributes:
        engine: stores the puts.
        endpoint: endpoint at which clients reach the storage service.
        shared_memory: server that shares memory with clients on this host, or None if shared memory is off.
        bulk: the bulk port, or None if the bulk port is off.
        keys: keys with which this storage service seals receipts for controllers.
        mirroring: manages the mirror and the instances adopted from lost storage services. None if there is no mirror.
        mirror: mirror of this service's own puts, or None if no mirror is configured.
        journal: journal of the puts in the data directory, or None without a data directory.
        segments: files that store the puts in the data directory, or None without a data directory.
        registration: tracks how long this service is certain to remain registered with the controller.

    Raises:
        OSError: shared memory is required but unavailable, or the bulk port is in use.
        InvalidArgumentError: the mirror's object store is unusable.
    """

    def __init__(
        self,
        settings: ServeSettings,
        port: int,
        store: StateStore | None,
        supervisor: Supervisor,
        tls_context: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        name, boot_id = settings.storage_name(port), secrets.token_bytes(16)
        self.registration = Registration()
        self.mirror: Mirror | None = None
        self.journal: PutJournal | None = None
        self.segments: SegmentBlobs | None = None
        if store is not None:
            self.segments = SegmentBlobs(store.data_dir.segments_path, sync=settings.durability == "disk")
            self.journal = PutJournal(self.segments)
            name = store.data_dir.storage_id(settings.storage_id, name)
            boot_id = store.data_dir.identity.storage_boot_id
        self.mirroring = _open_mirroring(settings, port, supervisor)
        if self.mirroring is not None:
            self.mirror, _ = self.mirroring.mirror_of(name, boot_id, self.registration)
        self.engine = StorageEngine(
            storage_id=name,
            max_bytes=settings.max_bytes,
            put_ttl_seconds=settings.put_ttl_seconds,
            backing=self.mirror or self.journal,
            boot_id=boot_id,
            memory_bytes=settings.mirror_memory_bytes,
        )
        self.endpoint = endpoint_of(self.engine, settings.advertised_address(port))
        self.bulk: BulkServer | None = None
        if settings.bulk == "on":
            self.bulk = BulkServer(settings.host, settings.bulk_port, self.engine.boot_id, tls_context)
        try:
            self.shared_memory = _open_shared_memory(settings, self.engine)
        except BaseException:
            if self.bulk is not None:
                self.bulk.close()
            raise
        self.keys = ReceiptKeys()

    def servicer(
        self, settings: ServeSettings, controller: ControllerServicer | None, waiting: WaitingCalls
    ) -> StorageServicer:
        """Create the gRPC servicer of the storage service.

        Args:
            settings: configuration of the service.
            controller: the controller in this process, which handles commits included in puts, or None if the
                controller runs in another process.
            waiting: counter of waiting calls.
        """
        return StorageServicer(
            self.engine,
            self.endpoint,
            commits=None if controller is None else controller.commits,
            keys=self.keys,
            controller_id=b"" if controller is None else controller.storages.controller_id,
            shared_memory=self.shared_memory,
            bulk=self.bulk,
            bulk_address="" if self.bulk is None else settings.bulk_address(self.bulk.port),
            stall_seconds=settings.stall_seconds,
            min_stream_rate_bytes=settings.min_stream_rate_bytes,
            waiting=waiting,
            max_puts=settings.max_puts,
            max_uncommitted_puts=settings.max_uncommitted_puts,
            mirroring=self.mirroring,
        )

    def _adopted(self) -> list[StorageEngine]:
        """Return the engines of the storage instances that this service has adopted."""
        return [] if self.mirroring is None else [each.engine for each in self.mirroring.adopted.values()]

    def adopted_stats(self) -> list[EngineStat]:
        """Return the statistics of the adopted instances. Adopted puts count toward this service's quota."""
        return [engine.stat() for engine in self._adopted()]

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of a complete put, or None if the put is unknown. The put may be an adopted one."""
        engines = [self.engine, *self._adopted()]
        found = {partition for engine in engines if (partition := engine.partition_of(put_id)) is not None}
        # If puts in several partitions have this id, return a name that only tokens for all partitions cover.
        return found.pop() if len(found) == 1 else "\0" if found else None

    def join(self, controller: str, credentials: Credentials, supervisor: Supervisor) -> None:
        """Start the tasks that register this service and its adopted instances with a remote controller."""

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
        """End waiting calls, such as puts that wait for capacity."""
        self.engine.drain()
        if self.shared_memory is not None:
            self.shared_memory.drain()

    def trim(self) -> None:
        """Release unused memory. Callers should invoke this method regularly."""
        for engine in (self.engine, *self._adopted()):
            engine.trim()

    async def flush(self, seconds: float) -> None:
        """Wait up to `seconds` for all puts to be mirrored.

        Puts that are still unmirrored after `seconds` are lost when the process exits.
        """
        if self.mirror is not None and (unmirrored_bytes := await self.mirror.flush_all(seconds)):
            _log.warning(LogMessage("stopped before all puts were mirrored", unmirrored_bytes=unmirrored_bytes))

    def end_transfers(self) -> None:
        """Stop sharing memory with clients on this host, and close all bulk connections."""
        if self.shared_memory is not None:
            self.shared_memory.close()
        if self.bulk is not None:
            self.bulk.close()

    async def close(self) -> None:
        """Close the mirror and release all memory and files."""
        self.end_transfers()
        await self.engine.close()
        if self.mirroring is not None:
            await self.mirroring.close()


def _open_mirroring(settings: ServeSettings, port: int, supervisor: Supervisor) -> Mirroring | None:
    """Open the mirror configured in the settings. Return None if no mirror is configured.

    Raises:
        InvalidArgumentError: the object store is unknown, is not installed, cannot store the required number of copies,
            or is not durable enough for `mirror_memory_bytes`.
    """
    if settings.mirror is None:
        return None
    from tq_service.objects.base import make_object_store  # noqa: PLC0415  (needed only for a mirror)

    objects = make_object_store(settings.mirror)
    if settings.mirror_memory_bytes is not None and objects.abilities.survives != "power":
        raise InvalidArgumentError(
            f"mirror_memory_bytes requires an object store whose objects survive a power loss, but objects in "
            f"{redacted(settings.mirror)} are known to survive only the loss of a {objects.abilities.survives}. If the "
            "store keeps them on disk, add survives=power to its URL. Otherwise, unset mirror_memory_bytes.",
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
    """Return the host name at which clients reach this storage service.

    A copy on this host does not count as a mirror copy.
    """
    pairs = hosts_and_ports(settings.advertised_address(port))
    return pairs[0][0] if pairs else settings.host


def _open_shared_memory(settings: ServeSettings, engine: StorageEngine) -> SharedMemoryServer | None:
    if settings.shared_memory == "off":
        return None
    try:
        check_supported()
        if settings.shared_memory_dir == default_shared_memory_dir():
            make_private(settings.shared_memory_dir)
        server = SharedMemoryServer(
            settings.shared_memory_dir, engine.boot_id, engine.run_id, can_allocate=engine.is_volatile
        )
        server.start()
    except OSError as error:
        reason = f"cannot share memory with clients on this host through {settings.shared_memory_dir}: {error}"
        if settings.shared_memory == "on":
            raise OSError(
                f"{reason}; set shared_memory_dir to a directory that this user owns, or set shared_memory to off"
            ) from error
        _log.warning(
            LogMessage(
                "could not share memory with clients on this host; sending all bytes over the network",
                path=settings.shared_memory_dir,
                error=error,
            )
        )
        return None
    return server
