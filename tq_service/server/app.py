"""Wiring: builds the service from its settings, runs it, and drains it on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tq_service.config import ServeSettings, default_shared_memory_dir, join_address
from tq_service.domain.admission.limits import Limits
from tq_service.domain.catalog import Catalog
from tq_service.domain.idempotency import IdempotencyCache
from tq_service.durable.state_store import StateStore
from tq_service.errors import ServiceFailedError, TqError
from tq_service.samplers import PlanRunner, SamplerRegistry
from tq_service.server import answers
from tq_service.server.background import regularly
from tq_service.server.checkpoints import Checkpoints
from tq_service.server.commits import Commits
from tq_service.server.controller_servicer import ControllerServicer
from tq_service.server.embedded_storage import EmbeddedStorage
from tq_service.server.handover import HandoverServer, make_private
from tq_service.server.health import Health
from tq_service.server.heartbeat import announce_storage
from tq_service.server.listener import Listener
from tq_service.server.rpc.adapter import Services
from tq_service.server.rpc.durability import DurableAnswers
from tq_service.server.rpc.errors import ErrorStatuses
from tq_service.server.rpc.limits import RunningCalls, WaitingCalls
from tq_service.server.rpc.method_table import unserved_methods
from tq_service.server.rpc.middleware import Middleware
from tq_service.server.storage_servicer import SERVICE as STORAGE_SERVICE
from tq_service.server.storage_servicer import StorageServicer
from tq_service.server.storages import StorageDirectory
from tq_service.server.supervisor import FAILED_EXIT_CODE, FailingWith, Supervisor
from tq_service.storage.engine import StorageEngine
from tq_service.storage.segments import SegmentFiles
from tq_service.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server
from tq_service.wire.connection import LISTENING_OPTIONS
from tq_service.wire.shared_memory import check_supported

_log = logging.getLogger(__name__)
CONTROLLER_SERVICE = "tq_service.v1.ControllerService"
HEARTBEAT_SECONDS = 2.0
_HOUSEKEEPING_SECONDS = 5.0
_MOST_PENDING_CALLS = 100_000
_ABORT_SECONDS = 2.0


class App:
    """One process of the service: the controller, a storage service, or both.

    Attributes:
        supervisor: runs the background tasks, and knows whether the service can go on.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._listener = Listener(settings)
        self._health = Health()
        self._waiting = WaitingCalls(settings.max_waiting_calls, settings.max_waiting_calls_per_client)
        self.supervisor = Supervisor()
        self.supervisor.on_fatal(self._fail)
        self._stopping: asyncio.Task[None] | None = None
        self._catalog: Catalog | None = None
        self._storages: StorageDirectory | None = None
        self._engine: StorageEngine | None = None
        self._handover: HandoverServer | None = None
        self._commits: Commits | None = None
        self._state_store: StateStore | None = None
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_metadata_size", settings.max_metadata_bytes),
                ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.max_concurrent_streams", settings.max_streams),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server on the port is a mistake, not a second worker
                # Thousands of ranks may ask in one moment; gRPC drops calls beyond 1,000 that wait to be accepted.
                ("grpc.server.max_pending_requests", _MOST_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING_CALLS),
                *LISTENING_OPTIONS,
            ],
        )
        self._calls = RunningCalls(settings.max_calls)
        self._middleware: list[Middleware] = [
            ErrorStatuses(),
            self._calls,
            self._listener.access_control(self._partition_of),
        ]
        self.port = 0

    async def start(self) -> None:
        """Listen, and be healthy once everything answers.

        Raises:
            OSError: the address is taken or cannot be listened on.
            DataDirError: the data folder is in use or cannot be used.
            JournalDamagedError: what was kept in it cannot be brought back.
            DiskFullError: there is no room in it.
            InvalidArgumentError: the controller cannot be reached with these settings.
        """
        settings = self._settings
        if settings.controller is not None:
            self._listener.credentials.check_target(settings.controller)
        self.port = self._listener.listen(self._server)
        if settings.data_dir is not None:
            self._state_store = StateStore.open(
                settings.data_dir,
                sync=settings.durability == "disk",
                accept_loss=settings.accept_journal_loss,
            )
            self._state_store.fatal = self.supervisor.fatal
            # The last, so that who is not let in neither waits for a disk nor learns how it is.
            self._middleware.append(DurableAnswers(self._state_store))
        unserved = unserved_methods(role=settings.role, takes_services=self._listener.takes_services)
        server: Any = Services(self._server, self._middleware, unserved=unserved)  # what generated code takes for one
        services = self._add_services(server)
        if self._state_store is not None:
            self._recover(self._state_store)
        self._health.add(("", *services))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if settings.reflection:
            # These take a twentieth of the start and are rarely used.
            from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc  # noqa: PLC0415

            names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            servicer = reflection.aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
        await self._server.start()
        # One bad round of either is logged, and the next one comes: rounds do not depend on each other.
        self.supervisor.start("following the files of certificate and tokens", self._listener.watch())
        self.supervisor.start("housekeeping", regularly(_HOUSEKEEPING_SECONDS, self._keep_house))
        self._health.serve()

    def _add_services(self, server: Any) -> list[str]:
        settings = self._settings
        services = []
        address = settings.advertised_address(self.port)
        if settings.role != "controller":
            self._engine = self._storage_engine()
            self._handover = self._open_handover(self._engine.boot_id)
            services.append(STORAGE_SERVICE)
        controller = None
        if settings.role != "storage":
            controller = self._controller(address)
            add_ControllerServiceServicer_to_server(controller, server)
            services.append(CONTROLLER_SERVICE)
        if self._engine is not None:
            storage = StorageServicer(
                self._engine,
                address=address,
                commits=self._commits,
                handover=self._handover,
                stall_seconds=settings.stall_seconds,
                waiting=self._waiting,
                max_puts=settings.max_puts,
                max_uncommitted_puts=settings.max_uncommitted_puts,
            )
            server.add_generic_rpc_handlers((storage.handler(),))
            if settings.controller is not None:
                announcing = announce_storage(self._engine, address, settings.controller, self._listener.credentials)
                self.supervisor.start("announcing this storage service to its controller", announcing)
        return services

    def _storage_engine(self) -> StorageEngine:
        settings, store, name = self._settings, self._state_store, self._settings.storage_name(self.port)
        if store is None:
            return StorageEngine(
                storage_id=name, max_bytes=settings.max_bytes, put_ttl_seconds=settings.put_ttl_seconds
            )
        return StorageEngine(
            storage_id=store.data_dir.storage_id(settings.storage_id, name),
            max_bytes=settings.max_bytes,
            put_ttl_seconds=settings.put_ttl_seconds,
            boot_id=store.data_dir.identity.storage_boot_id,
            files=SegmentFiles(store.data_dir.segments_path),
            sync=settings.durability == "disk",
        )

    def _recover(self, store: StateStore) -> None:
        """Bring back what the data folder has, and write down every change from now on."""
        found = store.recover(catalog=self._catalog, engine=self._engine)
        _log.info(
            "recovered %d partitions with %d samples and %d puts in %.2f s; %d records of the journal were made again",
            found.partition_count,
            found.sample_count,
            found.put_count,
            found.seconds,
            found.record_count,
        )
        if self._catalog is not None:
            self._catalog.start_leases()
        if self._storages is not None:
            self._storages.recover()
        if self._engine is not None:
            self.supervisor.start("the check of recovered puts", self._engine.scrub(), may_end=True)

    def _partition_of(self, put_id: bytes) -> str | None:
        return None if self._engine is None else self._engine.partition_of(put_id)

    def _open_handover(self, boot_id: bytes) -> HandoverServer | None:
        """Listen for clients of this host that share memory.

        Raises:
            OSError: it was asked for and cannot be had.
        """
        settings = self._settings
        if settings.shared_memory == "off":
            return None
        try:
            check_supported()
            if settings.shared_memory_dir == default_shared_memory_dir():
                make_private(settings.shared_memory_dir)
            handover = HandoverServer(settings.shared_memory_dir, boot_id)
            handover.start()
        except OSError as error:
            reason = f"no shared memory with clients of this host through {settings.shared_memory_dir}: {error}"
            if settings.shared_memory == "on":
                raise OSError(
                    f"{reason}; set shared_memory_dir to a folder of this user, or shared_memory off"
                ) from error
            _log.warning("%s; all bytes go over the wire", reason)
            return None
        return handover

    def _controller(self, address: str) -> ControllerServicer:
        settings = self._settings
        embedded = None if self._engine is None else EmbeddedStorage(self._engine, address)
        runner = PlanRunner(max_threads=settings.sampler_threads, timeout_seconds=settings.sampler_timeout_seconds)
        limits = Limits(**{each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)})
        cache = IdempotencyCache(
            settings.request_record_seconds,
            pack=answers.pack,
            unpack=answers.unpack,
            max_bytes=settings.request_record_bytes,
            weigh=answers.weigh,
        )
        self._catalog = Catalog(runner, limits, cache)
        self._catalog.machine.fatal = self.supervisor.fatal
        self._storages = StorageDirectory(
            embedded,
            HEARTBEAT_SECONDS,
            self._listener.credentials,
            snapshot_cells=self._catalog.snapshot_cells,
            boot_id=None if self._state_store is None else self._state_store.data_dir.identity.controller_boot_id,
            after_durable=_at_once if self._state_store is None else self._state_store.after_durable,
            start_task=self.supervisor.start,
        )
        self._catalog.on_freed = self._storages.free
        self._commits = Commits(catalog=self._catalog, storages=self._storages, waiting=self._waiting)
        return ControllerServicer(
            catalog=self._catalog,
            commits=self._commits,
            registry=SamplerRegistry(allow_import=settings.allow_sampler_import),
            runner=runner,
            storages=self._storages,
            max_wait_cap_seconds=settings.max_wait_cap_seconds,
            waiting=self._waiting,
            checkpoints=Checkpoints(
                catalog=self._catalog,
                storages=self._storages,
                store=self._state_store,
                checkpoint_dir=settings.checkpoint_directory(),
            ),
        )

    def _keep_house(self) -> None:
        self._calls.report()
        expired = 0 if self._engine is None else self._engine.expire()
        if expired:
            _log.warning("%d puts expired without a commit; their producers have probably died", expired)

    def _fail(self, failure: ServiceFailedError) -> None:
        """Write nothing more, say so to health checks, and end all calls: none is answered from what is in memory."""
        if self._state_store is not None:
            self._state_store.abandon(failure)
        self._health.drain()
        if self._catalog is not None:
            self._catalog.drain()
        self._stop_server(None)

    def _stop_server(self, grace_seconds: float | None) -> asyncio.Task[None]:
        """Stop the server once: gRPC may crash where one stop is under way while another one ends."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._server.stop(grace_seconds))
        return self._stopping

    async def abort(self) -> None:
        """End after a failure, in two seconds at most: nothing is flushed, as if the process had been killed."""
        await asyncio.wait((self._stop_server(None),), timeout=_ABORT_SECONDS)
        if self._handover is not None:
            self._handover.close()
        self._listener.close()

    async def stop(self, grace_seconds: float) -> None:
        """Drain: say so to health checks, end the waits, let running calls finish, then stop."""
        self._health.drain()
        if self._catalog is not None:
            self._catalog.drain()
        if self._engine is not None:
            self._engine.drain()
        if self._handover is not None:
            self._handover.drain()
        await self._stop_server(grace_seconds)
        if self._handover is not None:
            self._handover.close()
        await self.supervisor.stop()
        self._listener.close()
        if self._storages is not None:
            await self._storages.close()
        if self._state_store is not None:
            await self._state_store.close()


def _at_once(callback: Callable[[], None]) -> None:
    callback()


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
    app = App(settings)
    app.supervisor.on_fatal(lambda _failure: failed.set())
    try:
        await app.start()
    except (OSError, TqError) as error:
        _log.error("%s", error)
        await app.stop(0)
        return 1
    announce(f"listening on {join_address(settings.host, app.port)} (role {settings.role})")
    if await _comes_before(stopping.wait(), failed):
        announce(f"draining for up to {settings.grace_seconds:g} s")
        if await _comes_before(app.stop(settings.grace_seconds), failed):
            return 0
    await app.abort()
    return FAILED_EXIT_CODE


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
    app = App(settings)
    try:
        async with FailingWith(app.supervisor):
            await app.start()
            yield app
    finally:
        await app.stop(0)
    if app.supervisor.failure is not None:  # while it stopped
        raise ServiceFailedError(app.supervisor.failure.message) from app.supervisor.failure.__cause__
