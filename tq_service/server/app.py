"""One process of the service: starts it from its settings, runs it, and drains it on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tq_service.addresses import split_addresses
from tq_service.config import ServeSettings, format_size, join_address
from tq_service.errors import JournalUnreachableError, ServiceFailedError, TqError
from tq_service.internal.v1.storage_control_pb2_grpc import add_StorageControlServiceServicer_to_server
from tq_service.internal.v1.storage_registry_pb2_grpc import add_StorageRegistryServiceServicer_to_server
from tq_service.log_message import LogMessage
from tq_service.observe.instruments import Instruments
from tq_service.server.composition import (
    Controller,
    Metrics,
    Storage,
    call_spans,
    open_cluster,
    open_state_store,
    recover,
)
from tq_service.server.connections import Connections
from tq_service.server.health import Health
from tq_service.server.listener import Listener
from tq_service.server.process import collect_garbage, give_back_freed_memory, tuned_process
from tq_service.server.rpc.access_log import AccessLog
from tq_service.server.rpc.adapter import Services
from tq_service.server.rpc.durability import DurableAnswers
from tq_service.server.rpc.errors import ErrorStatuses
from tq_service.server.rpc.limits import AdmittedPeers, RunningCalls, WaitingCalls
from tq_service.server.rpc.metrics import CallMetrics
from tq_service.server.rpc.middleware import Middleware
from tq_service.server.storage_servicer import SERVICE as STORAGE_SERVICE
from tq_service.server.supervisor import FAILED_EXIT_CODE, FailingWith, Supervisor, regularly
from tq_service.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server
from tq_service.v1.storage_service_pb2_grpc import add_StorageServiceServicer_to_server
from tq_service.version import BUILD
from tq_service.wire.connection import CONTROLLER_CONNECTION_SECONDS, LISTENING_OPTIONS

if TYPE_CHECKING:
    from tq_service.server.cluster_member import ClusterMember
    from tq_service.server.rpc.leading import OnlyLeader

_log = logging.getLogger(__name__)
CONTROLLER_SERVICE = "tq_service.v1.ControllerService"
_HOUSEKEEPING_SECONDS = 5.0
_MOST_PENDING_CALLS = 100_000
_ETCD_RETRY_SECONDS: Final = 1.0
_ABORT_SECONDS = 2.0
_LOOK_SECONDS = 1.0


class App:
    """One process of the service: the controller, a storage service, or both. `start` returns one that listens.

    Attributes:
        supervisor: runs the background tasks, and knows whether the service can go on.
        port: where it listens.
        listener: the port, and what secures it.
        health: says whether it takes calls.
        calls: counts the calls that are answered.
        waiting: counts those that wait.
        cluster: the cluster of controllers that this one is of, None where it is alone.
        state_store: keeps the state of controller and storage service, None where nothing does.
        storage: the storage service, None where there is only a controller.
        controller: the controller, None where there is only a storage service.
        metrics: what is shown to Prometheus, None where that is off.
    """

    def __init__(self, settings: ServeSettings, supervisor: Supervisor, closing: contextlib.AsyncExitStack) -> None:
        self.supervisor = supervisor
        self._closing = closing  # what was opened, in order; the caller closes it where this cannot be made
        closing.enter_context(tuned_process())
        self.listener = Listener(settings)
        if settings.controller is not None:
            for address in split_addresses(settings.controller):
                self.listener.credentials.check_target(address)
        self._server = _make_server(settings)
        self._stopping: asyncio.Task[None] | None = None
        self._only_leader: OnlyLeader | None = None
        self._end_slow_streams: Callable[[], None] | None = None
        closing.push_async_callback(self._stop_server, 0)
        self.port = self.listener.listen(self._server)
        self.health = Health()
        self.calls = RunningCalls(settings.max_calls)
        self._peers = AdmittedPeers(has_tokens=settings.auth_tokens_file is not None)
        self._connections = Connections(self._peers, settings.max_connections, settings.first_call_seconds)
        self.waiting = WaitingCalls(settings.max_waiting_calls, settings.max_waiting_calls_per_client)
        instruments = None if settings.metrics_port is None else Instruments()
        self.metrics: Metrics | None = None
        if instruments is not None:
            self.metrics = Metrics(
                settings, instruments, self.listener, self.port, calls=self.calls, waiting=self.waiting
            )
            closing.push_async_callback(self.metrics.close)
        self.cluster = open_cluster(settings, self.port, self.listener.credentials, supervisor)
        self.state_store = open_state_store(settings, supervisor)
        if self.cluster is not None:
            closing.push_async_callback(self.cluster.close)
            self.state_store = self.cluster.store
        if self.state_store is not None:
            closing.push_async_callback(self.state_store.close)
        self.storage = self.controller = None
        if settings.role != "controller":
            self.storage = Storage(settings, self.port, self.state_store, supervisor)
            if self.storage.mirroring is not None:
                closing.push_async_callback(self.storage.mirroring.close)
            closing.push_async_callback(self.storage.engine.close)
            closing.callback(self.storage.close)
        if settings.role != "storage":
            self.controller = Controller(
                settings,
                self.port,
                storage=self.storage,
                store=self.state_store,
                credentials=self.listener.credentials,
                waiting=self.waiting,
                supervisor=supervisor,
                instruments=instruments,
                cluster=self.cluster,
            )
            closing.push_async_callback(self.controller.storages.close)
            closing.push_async_callback(self.controller.backlogs.close)
        closing.callback(self.listener.close)
        closing.push_async_callback(supervisor.stop)
        supervisor.on_fatal(self._fail)
        if self.state_store is not None and self.cluster is None:
            recover(self.state_store, self.controller, self.storage, supervisor)
        if self.metrics is not None:
            self.metrics.add(self.controller, self.storage, self.state_store, self.cluster)
        self._add_services(settings, instruments)

    @classmethod
    async def start(cls, settings: ServeSettings, supervisor: Supervisor) -> App:
        """Listen, and be healthy once everything answers; leave nothing behind where that fails.

        Args:
            settings: how it runs.
            supervisor: gets all background tasks; where the service fails, it stops answering in the same step.

        Raises:
            OSError: the address is taken or cannot be listened on.
            DataDirError: the data directory is in use or cannot be used.
            JournalDamagedError: its state cannot be recovered.
            DiskFullError: there is no space in it.
            InvalidArgumentError: the controller cannot be reached with these settings.
        """
        closing = contextlib.AsyncExitStack()
        try:
            app = cls(settings, supervisor, closing)
            await app._server.start()
            app._start_tasks(settings)
            if app.cluster is None:
                app.health.serve()
        except BaseException:
            await closing.aclose()
            raise
        return app

    def _add_services(self, settings: ServeSettings, instruments: Instruments | None) -> None:
        """Add the services to the server, each behind what guards it."""
        partition_of = None if self.storage is None else self.storage.partition_of
        middleware: list[Middleware] = [AccessLog()]
        if instruments is not None:
            middleware.append(CallMetrics(instruments))
        if settings.traces:
            middleware.append(call_spans())
        middleware += [
            ErrorStatuses(),
            self.calls,
            self.listener.access_control(partition_of),
            self._peers,
        ]
        if self.cluster is not None:
            from tq_service.server.rpc.leading import OnlyLeader  # noqa: PLC0415  (a controller alone does without)

            self._only_leader = OnlyLeader(self.cluster)
            middleware.append(self._only_leader)
        if self.state_store is not None:
            # The last, so that a rejected caller neither waits for a disk nor learns how it is.
            middleware.append(DurableAnswers(self.state_store))
        server: Any = Services(self._server, middleware)  # what generated code takes for one
        takes_services = self.listener.takes_services
        services = []
        if self.storage is not None:
            servicer: Any = self.storage.servicer(settings, self.controller, self.waiting)
            self._end_slow_streams = servicer.end_slow_streams
            server.add_generic_rpc_handlers((servicer.bulk_handler(),))  # the first that has a method serves it
            add_StorageServiceServicer_to_server(servicer, server)
            if takes_services and self.controller is None:  # one in the same process uses its storage without calls
                add_StorageControlServiceServicer_to_server(servicer, server)
            services.append(STORAGE_SERVICE)
        if self.controller is not None:
            add_ControllerServiceServicer_to_server(self.controller.servicer, server)
            if takes_services:
                add_StorageRegistryServiceServicer_to_server(self.controller.servicer, server)
                if self.cluster is not None:
                    _add_cluster_service(self.cluster, server)
            services.append(CONTROLLER_SERVICE)
        self.health.add(("", *services))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        if settings.reflection:
            # These take a twentieth of the start and are rarely used.
            from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc  # noqa: PLC0415

            names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            reflecting = reflection.aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, server)

    def _start_tasks(self, settings: ServeSettings) -> None:
        if self.cluster is not None and self.controller is not None:
            self.health.stand_by()
            name = "following the log of the cluster, and leading it"
            self.supervisor.start(
                name, self.cluster.run(self.controller.catalog, self._take_up, self._on_standing), may_end=True
            )
        # One bad round of either is logged, and the next one comes: rounds do not depend on each other.
        self.supervisor.start("following the files of certificate and tokens", self.listener.watch())
        self.supervisor.start("housekeeping", regularly(_HOUSEKEEPING_SECONDS, self._keep_house))
        self.supervisor.start("ending slow streams and idle connections", regularly(_LOOK_SECONDS, self._end_idle))
        self.supervisor.start("collecting garbage", collect_garbage())
        if self.metrics is not None:
            self.supervisor.start("measuring the event loop", self.metrics.shown.measure_loop())
        if self.storage is not None:
            for name, work in self.storage.tasks(settings, self.listener.credentials):
                self.supervisor.start(name, work)
        if self.controller is not None:
            self.supervisor.start("having lost puts taken over", self.controller.storages.adoptions.run())

    def _take_up(self) -> None:
        """Serve as the leader of the cluster, now that all of its state is here."""
        if self.controller is not None:
            self.controller.take_up()
        self.health.serve()

    def _on_standing(self, may_answer: bool) -> None:
        """Take calls as the leader of the cluster, or none: another controller may lead."""
        if may_answer:
            self.health.serve()
        else:
            self.health.stand_by()
            if self._only_leader is not None:
                self._only_leader.end_calls()

    async def _end_idle(self) -> None:
        if self._end_slow_streams is not None:
            self._end_slow_streams()
        await self._connections.sweep(self.port)

    async def _keep_house(self) -> None:
        self.calls.report()
        self._connections.report()
        await asyncio.to_thread(give_back_freed_memory)
        if self.storage is None:
            return
        self.storage.trim()
        if self.controller is None:
            return
        expired = 0
        for count in self.storage.engine.expire():
            expired += count
            await asyncio.sleep(0)
        if expired:
            _log.warning(LogMessage("puts expired without a commit; their producers probably died", count=expired))

    def _fail(self, _failure: ServiceFailedError) -> None:
        """Say so to health checks, and end all calls: none is answered from what is in memory."""
        self._drain()
        self._stop_server(None)

    def _drain(self) -> None:
        self.health.drain()
        if self.controller is not None:
            self.controller.drain()

    def _stop_server(self, grace_seconds: float | None) -> asyncio.Task[None]:
        """Return what stops the server; the first call says how long running calls may take to finish.

        There is one stop only: gRPC may crash where one is under way while another one ends.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._server.stop(grace_seconds))
        return self._stopping

    async def abort(self) -> None:
        """End after a failure, in two seconds at most: nothing is flushed, as if the process had been killed."""
        await asyncio.wait((self._stop_server(None),), timeout=_ABORT_SECONDS)
        if self.storage is not None:
            self.storage.close()
        self.listener.close()

    async def stop(self, grace_seconds: float) -> None:
        """Drain: say so to health checks, end the waits, let running calls finish, then stop.

        What is left of the time is for puts that the mirror does not have yet.
        """
        ends_at = time.monotonic() + grace_seconds
        self._drain()
        if self.storage is not None:
            self.storage.drain()
        await self._stop_server(grace_seconds)
        if self.storage is not None:
            await self.storage.settle(ends_at - time.monotonic())
        await self._closing.aclose()


def _add_cluster_service(cluster: ClusterMember, server: Any) -> None:
    # Imported where there is a cluster: a controller alone does without.
    from tq_service.internal.v1.cluster_pb2_grpc import add_ClusterServiceServicer_to_server  # noqa: PLC0415
    from tq_service.server.snapshot_transfer import SnapshotServicer  # noqa: PLC0415

    add_ClusterServiceServicer_to_server(SnapshotServicer(cluster.store), server)


def _cluster_options(settings: ServeSettings) -> tuple[tuple[str, int], ...]:
    if settings.cluster is None:
        return ()
    return (("grpc.max_connection_age_ms", CONTROLLER_CONNECTION_SECONDS * 1000),)


def _make_server(settings: ServeSettings) -> grpc.aio.Server:
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
            ("grpc.so_reuseport", 0),  # a second server on the port is a mistake, not a second worker
            # Thousands of ranks may ask in one moment; gRPC drops calls beyond 1,000 that wait to be accepted.
            ("grpc.server.max_pending_requests", _MOST_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING_CALLS),
            *LISTENING_OPTIONS,
            *_cluster_options(settings),
        ],
    )


async def serve(settings: ServeSettings, *, announce: Callable[[str], None]) -> int:
    """Run the service until SIGTERM or SIGINT and return the exit code.

    Args:
        settings: how it runs.
        announce: gets lines for the person or program that started it, such as where it listens.

    Returns:
        0 after SIGTERM or SIGINT; 1 where it could not start; `FAILED_EXIT_CODE` where it could not go on. The process
        must end at once then: what threads still do is of no use.
    """
    stopping, failed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        app = await _started(settings, failed, stopping)
    except (OSError, TqError) as error:
        _log.error(LogMessage("the service cannot start", error=error))
        return 1
    if app is None:
        return 0
    announce(f"listening on {join_address(settings.host, app.port)} (role {settings.role})")
    announce(_what_it_is(app, settings))
    if await _comes_before(stopping.wait(), failed):
        announce(f"draining for up to {settings.grace_seconds:g} s")
        if await _comes_before(app.stop(settings.grace_seconds), failed):
            return 0
    await app.abort()
    return FAILED_EXIT_CODE


async def _started(settings: ServeSettings, failed: asyncio.Event, stopping: asyncio.Event) -> App | None:
    """Return the process once it listens, None where it is to stop before; waits for etcd, which may start later.

    Raises:
        OSError, TqError: it cannot start.
    """
    while not stopping.is_set():
        supervisor = Supervisor()
        supervisor.on_fatal(lambda _failure: failed.set())
        try:
            return await App.start(settings, supervisor)
        except JournalUnreachableError as error:
            _log.warning(LogMessage("the service waits for etcd, and starts once that answers", error=error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ETCD_RETRY_SECONDS):
                await stopping.wait()
    return None


def _what_it_is(app: App, settings: ServeSettings) -> str:
    """Return in a line what was started."""
    quota = format_size(settings.max_bytes)
    has_shared_memory = app.storage is not None and app.storage.shared_memory is not None
    facts = {
        "version": BUILD,
        "durability": settings.effective_durability,
        "data directory": settings.data_dir or "none",
        "quota": "none" if app.storage is None else quota,
        "tls": "mutual" if settings.tls_client_ca else "on" if settings.tls_cert else "off",
        "tokens": "on" if settings.auth_tokens_file else "off",
        "shared memory": "on" if has_shared_memory else "off",
        "mirror": "none" if app.storage is None else app.storage.mirror_in_words(settings),
        "pid": os.getpid(),
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items())


async def _comes_before(work: Coroutine[Any, Any, object], failed: asyncio.Event) -> bool:
    """Wait for some work; return whether it was done before the service failed, in which case it is cancelled."""
    doing, failing = asyncio.ensure_future(work), asyncio.ensure_future(failed.wait())
    await asyncio.wait((doing, failing), return_when=asyncio.FIRST_COMPLETED)
    failing.cancel()
    if failed.is_set():
        doing.cancel()
        return False
    doing.result()
    return True


@contextlib.asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[App]:
    """Run the service inside a program, such as a test, for the time of a `with` block.

    Raises:
        ServiceFailedError: the service cannot go on; the body is cancelled where it waits, and this comes out of it.
    """
    supervisor, app = Supervisor(), None
    try:
        async with FailingWith(supervisor):
            app = await App.start(settings, supervisor)
            yield app
    finally:
        if app is not None:
            await app.stop(0)
    supervisor.raise_failure()  # of the time while it stopped
