"""Registers a controller's storage services, places puts, and finds the storage service that holds a put."""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from tq_service.dataplane.driver import AsyncDriver
from tq_service.errors import (
    AlreadyExistsError,
    DataLossError,
    InvalidArgumentError,
    LimitExceededError,
    PreconditionError,
    QuotaExceededError,
    UnavailableError,
)
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.internal.v1.storage_registry_pb2 import RegisterStorageRequest, RegisterStorageResponse
from tq_service.log_message import LogMessage
from tq_service.results import StorageStatus
from tq_service.server.adoption import Adoptions
from tq_service.server.puts import Puts
from tq_service.server.remote_storage import UNBOUNDED_BYTES, RemoteStorage, report_reconciled
from tq_service.server.supervisor import Supervisor
from tq_service.state.cells import CellsSnapshot, Put
from tq_service.storage.engine import StorageEngine
from tq_service.v1.controller_service_pb2 import PlacePutResponse
from tq_service.v1.metadata_pb2 import StorageEndpoint
from tq_service.version import BUILD
from tq_service.wire.columns import columns_digest
from tq_service.wire.connection import Credentials
from tq_service.wire.messages import to_duration

_log = logging.getLogger(__name__)
_MOST_STORAGES = 1024
_GRANT_SECONDS: Final = 5.0
_MOST_GRANTED: Final = 16  # storage services per grant
_GRANTED_SHARE: Final = 64  # a grant covers 1/64 of the free bytes, so services fill evenly
_RESERVED_SHARE: Final = 10  # new rows must leave 1/10 of the quota free
_GRANTED_PUT_BYTES: Final = 1 << 20
_EXPIRED_PER_TURN: Final = 512


class EmbeddedStorage:
    """The storage service in the controller's process.

    Args:
        engine: storage engine, closed by its owner.
        endpoint: endpoint at which clients reach the engine.
        driver: driver that writes puts to the engine and reads their bytes.

    Attributes:
        turns: for each size class, the virtual start time and the size in bytes of the last put placed here. See
            `StorageRegistry.place`.
    """

    is_silent = False

    def __init__(self, engine: StorageEngine, endpoint: StorageEndpoint, driver: AsyncDriver) -> None:
        self.storage_id = engine.storage_id
        self.boot_id = engine.boot_id
        self.max_bytes = engine.stat().max_bytes
        self.endpoint = endpoint
        self.driver = driver
        self.engine = engine
        self.confirm, self.free = engine.confirm, engine.free
        self.turns: dict[int, tuple[float, int]] = {}

    def free_bytes(self) -> int:
        """Return the number of free bytes."""
        return (UNBOUNDED_BYTES if self.max_bytes is None else self.max_bytes) - self.engine.stat().used_bytes

    def expect(self, put_id: bytes, size_bytes: int) -> None:
        """Do nothing, because `free_bytes` is always up to date."""

    def withdraw(self, put_id: bytes) -> bool:
        """Return False, because placed puts are not tracked."""
        return False

    def status(self) -> StorageStatus:
        """Return the status of the storage service."""
        stat = self.engine.stat()
        return StorageStatus(
            storage_id=self.storage_id,
            address=self.endpoint.address,
            used_bytes=stat.used_bytes,
            max_bytes=stat.max_bytes,
            put_count=stat.put_count,
            version=BUILD,
            heard_ago_seconds=None,
            is_silent=False,
        )

    def open_receipt(self, put_id: bytes, partition_id: str, receipt: bytes) -> PutReceipt:
        """Return the contents that a receipt for the put would have. They are read from the put itself.

        Raises:
            InvalidArgumentError: the receipt is not empty, although this storage service does not issue receipts.
            PutNotFoundError: the put does not exist.
        """
        if receipt:
            raise InvalidArgumentError(
                f"got a receipt for put {put_id.hex()}, but this storage service issues no receipts; send the receipt "
                "exactly as Put returned it",
                field="receipt",
            )
        put = self.engine.complete_put(put_id, partition_id)
        return PutReceipt(for_existing_rows=put.for_existing_rows, columns_digest=columns_digest(put.shapes()))

    async def close(self) -> None:
        """Do nothing, because the engine is closed by its owner."""


Storage: TypeAlias = EmbeddedStorage | RemoteStorage
"""A storage service as seen by the controller. `EmbeddedStorage` and `RemoteStorage` have the same methods."""


class StorageRegistry:
    """Registry of a controller's storage services, by name.

    Args:
        embedded: storage service in this process, or None.
        heartbeat_seconds: interval at which storage services in other processes send heartbeats.
        credentials: credentials of this controller.
        snapshot_cells: function that returns, for each partition, the cells that samples currently use.
        controller_id: id under which this controller owns puts, unchanged by restarts, or None for a random id.
        epoch: function that returns this controller's epoch in its cluster, or 0 without a cluster.
        after_durable: function that calls its argument once all changes made so far are durable.
        takes_heartbeats: function that returns whether heartbeats reach the registry. While middleware rejects
            heartbeats, the function returns False.
        supervisor: runs the background tasks, or None to create a supervisor.

    Attributes:
        puts: record of all puts in the storage services.
    """

    def __init__(
        self,
        embedded: EmbeddedStorage | None,
        heartbeat_seconds: float,
        credentials: Credentials,
        *,
        snapshot_cells: Callable[[], Sequence[CellsSnapshot]] = tuple,
        controller_id: bytes | None = None,
        epoch: Callable[[], int] = lambda: 0,
        after_durable: Callable[[Callable[[], None]], None] = lambda callback: callback(),
        takes_heartbeats: Callable[[], bool] = lambda: True,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.controller_id = os.urandom(16) if controller_id is None else controller_id
        self._epoch = epoch
        self.embedded = embedded
        self.heartbeat_seconds = heartbeat_seconds
        self._credentials = credentials
        self._storages: dict[str, Storage] = {} if embedded is None else {embedded.storage_id: embedded}
        self._turns: dict[int, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._supervisor = supervisor or Supervisor()
        self.adoptions = Adoptions(self._storages, heartbeat_seconds, self._supervisor, takes_heartbeats)
        self.puts = Puts(
            None if embedded is None else embedded.storage_id,
            self._find,
            self.require,
            snapshot_cells,
            after_durable=after_durable,
            supervisor=self._supervisor,
        )

    @property
    def count(self) -> int:
        """Number of registered storage services, including silent ones."""
        return len(self._storages)

    def statuses(self) -> list[StorageStatus]:
        """Return the status of each storage service, ordered by name."""
        storages = [*self._storages.values(), *self.adoptions.taken.values()]
        return [storage.status() for storage in sorted(storages, key=lambda each: each.storage_id)]

    def counts(self) -> dict[str, int]:
        """Return how many storage services are available, silent and lost.

        A service is silent if it has stopped sending heartbeats. A service counts as lost until another service has
        adopted its puts. A service may be both silent and lost.
        """
        there = sum(not storage.is_silent for storage in self._storages.values())
        return {"available": there, "silent": len(self._storages) - there, "lost": len(self.adoptions.lost)}

    def adoption_counts(self) -> tuple[int, int]:
        """Return how many storage services with a mirror have been lost so far, and how many of them were adopted."""
        return self.adoptions.lost_count, self.adoptions.taken_over_count

    def endpoint_of(self, storage_id: str, boot_id: bytes) -> StorageEndpoint | None:
        """Return the endpoint at which clients reach an instance, or None if the endpoint is currently unknown.

        If the instance is permanently lost, return the endpoint of the restarted service, which responds with
        DATA_LOSS.
        """
        if self._is_awaited(storage_id, boot_id):
            return None
        storage = self._find(storage_id, boot_id) or self._storages.get(storage_id)
        return None if storage is None else storage.endpoint

    def _is_awaited(self, storage_id: str, boot_id: bytes) -> bool:
        """Return whether an instance is still expected to register, because it is lost or has not registered yet."""
        instance = storage_id, boot_id
        return instance in self.adoptions.lost or instance in self.adoptions.expected

    def _find(self, storage_id: str, boot_id: bytes) -> Storage | None:
        """Return an instance's storage service or its successor, or None if neither is known."""
        storage = self._storages.get(storage_id)
        if storage is None or storage.boot_id != boot_id:
            return self.adoptions.taken.get((storage_id, boot_id))
        return storage

    def recover(self) -> None:
        """Collect the committed puts of the recovered samples and reconcile the embedded storage with these puts."""
        self.puts.recover()
        embedded = self.embedded
        elsewhere = {each for each in self.puts.instances() if embedded is None or each[0] != embedded.storage_id}
        self.puts.has_some_elsewhere = bool(elsewhere)
        self.adoptions.expect(elsewhere)
        if embedded is not None:
            engine = embedded.engine
            state, known = (
                engine.begin_reconciliation(self.controller_id),
                self.puts.known(engine.storage_id, engine.boot_id),
            )
            engine.reconcile(state, staying=known.staying(), cells=known.parts())
            for _ in engine.finish_reconciliation(state):
                pass
            report_reconciled(engine.storage_id, state.missing_put_ids, state.missing_count, state.dropped_count)

    def on_heartbeat(self, request: RegisterStorageRequest) -> RegisterStorageResponse:
        """Record a heartbeat and register the storage service that sent it.

        If the service has restarted, its new registration replaces the old one. The response lists the overdue puts
        that are unknown to this controller. Such puts can never be committed, because their receipts are void. Overdue
        puts of other controllers are ignored.

        Raises:
            AlreadyExistsError: the name is in use by the embedded storage or by a live service that registered later.
            LimitExceededError: too many storage services are registered.
            PreconditionError: another service has adopted this service's puts.
        """
        if request.controller_id != self.controller_id:
            request.ClearField("overdue_put_ids")
        endpoint = request.storage
        instance = endpoint.storage_id, endpoint.boot_id
        if request.is_adopted:
            storage: Storage | None = self.adoptions.taken.get(instance)
        else:
            self.adoptions.check_not_taken(instance)
            storage = self._storages.get(endpoint.storage_id)
        if isinstance(storage, RemoteStorage) and (storage.endpoint, storage.run_id) == (endpoint, request.run_id):
            storage.on_heartbeat(request)
        elif request.is_adopted:
            self.adoptions.check_successor(instance, endpoint.address, request.run_id)
            storage = self._register_successor(request)
        else:
            storage = self._register(request)
        if request.is_adopted:
            self.adoptions.take(instance, storage)
        else:
            self.adoptions.on_registered(instance)
        self.puts.has_some_elsewhere = True
        return RegisterStorageResponse(
            heartbeat_interval=to_duration(self.heartbeat_seconds),
            controller_id=self.controller_id,
            receipt_key=storage.receipt_key,
            epoch=self._epoch(),
            unknown_put_ids=self.puts.unknown(*instance, request.overdue_put_ids),
        )

    def _register_successor(self, request: RegisterStorageRequest) -> RemoteStorage:
        """Register a storage service as the successor to an instance whose puts the service has adopted."""
        instance = request.storage.storage_id, request.storage.boot_id
        replaced = self._find(*instance)
        if replaced is not None and not replaced.is_silent and instance not in self.adoptions.lost:
            raise PreconditionError(
                f"storage service {instance[0]!r} is still running as instance {instance[1].hex()} at "
                f"{replaced.endpoint.address}. Release the puts taken over from it"
            )
        if replaced is not None:
            self._close(replaced)
            if self._storages.get(instance[0]) is replaced:
                del self._storages[instance[0]]
        return self._make(request, replaced if isinstance(replaced, RemoteStorage) else None)

    def _make(self, request: RegisterStorageRequest, replaces: RemoteStorage | None) -> RemoteStorage:
        return RemoteStorage(
            request,
            partial(self.puts.known, request.storage.storage_id, request.storage.boot_id),
            3 * self.heartbeat_seconds,
            self._credentials,
            controller_id=self.controller_id,
            epoch=self._epoch(),
            supervisor=self._supervisor,
            replaces=replaces,
        )

    def _register(self, request: RegisterStorageRequest) -> RemoteStorage:
        endpoint = request.storage
        known = self._storages.get(endpoint.storage_id)
        if known is not None and known is self.embedded:
            raise AlreadyExistsError(
                f"the storage service in the controller's process is already named {endpoint.storage_id!r}. Set a "
                "different storage_id for each service",
                metadata={"resource_type": "storage", "resource_name": endpoint.storage_id},
            )
        replaced = known if isinstance(known, RemoteStorage) else None
        if (
            replaced is not None
            and not replaced.is_silent
            and request.run_id != replaced.run_id
            and request.run_id in replaced.earlier_run_ids
        ):
            raise AlreadyExistsError(
                f"the storage service at {replaced.endpoint.address} has the same name, {endpoint.storage_id!r}, and "
                f"registered after this one at {endpoint.address}. Set a different storage_id for each service",
                metadata={"resource_type": "storage", "resource_name": endpoint.storage_id},
            )
        if known is None and len(self._storages) >= _MOST_STORAGES:
            self._forget_lost()
        storage = self._make(request, replaced)
        if replaced is not None:
            self._close(replaced)
            if replaced.run_id != request.run_id:
                self.adoptions.lose_held_at(replaced.endpoint.address)
            if replaced.boot_id != storage.boot_id and replaced.heard.mirror is not None:
                self.adoptions.lose((replaced.storage_id, replaced.boot_id), replaced.heard.mirror.url)
        if storage.heard.mirror is None:
            # The service has restarted without data or a mirror, so its expected instances are lost permanently.
            self.adoptions.expected -= {each for each in self.adoptions.expected if each[0] == storage.storage_id}
        _log.info(LogMessage("registered a storage service", storage=endpoint.storage_id, address=endpoint.address))
        self._storages[endpoint.storage_id] = storage
        return storage

    def _forget_lost(self) -> None:
        """Forget silent storage services that contain no samples, such as those in deleted pods."""
        holders = {storage_id for storage_id, _ in self.puts.instances()}
        lost = [each for each in self._storages.values() if each.is_silent and each.storage_id not in holders]
        if not lost:
            raise LimitExceededError(
                f"the number of storage services would be {len(self._storages) + 1}; expected at most {_MOST_STORAGES}",
                metadata={
                    "limit_name": "storage services",
                    "got": str(len(self._storages) + 1),
                    "limit": str(_MOST_STORAGES),
                },
            )
        for storage in lost:
            del self._storages[storage.storage_id]
            self._close(storage)

    def _close(self, storage: Storage) -> None:  # unsupervised because nothing depends on it
        closing = asyncio.get_running_loop().create_task(storage.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def expire(self) -> Iterator[int]:
        """Drop overdue puts in the embedded storage unless they are being committed.

        Storage services in other processes use their heartbeats to ask the controller about overdue puts.

        Yields:
            The number of puts dropped in each slice.
        """
        if self.embedded is None:
            return
        engine = self.embedded.engine
        while (asked := engine.puts.overdue(self.controller_id, _EXPIRED_PER_TURN)).put_ids:
            unknown = self.puts.unknown(engine.storage_id, engine.boot_id, asked.put_ids)
            yield engine.on_answer(asked, unknown)

    def place(self, size_bytes: int, put_id: bytes = b"") -> PlacePutResponse:
        """Choose a storage service for a put, and grant the client access to storage services for its next puts.

        Puts of similar size are distributed by start-time fair queueing (Goyal, Vin and Cheng 1996). Each storage
        service receives a share proportional to its free bytes, regardless of the age of its last heartbeat. There is a
        separate queue for each power of two of the put size. A service that has received a large put therefore still
        receives its share of small puts. If no service has enough free space for the put, the put waits at the service
        with the most free bytes.

        Args:
            size_bytes: size of the put, in bytes.
            put_id: id of the put, or b"" for a new put. If the put has been placed before, another service is chosen,
                because the earlier attempt failed.

        Raises:
            UnavailableError: no storage service is available.
            QuotaExceededError: the put is larger than the quota of every storage service.
        """
        known = [each for each in self._storages.values() if not each.is_silent]
        if not known:
            raise UnavailableError("no storage service has registered; start one with --role storage")
        failed = [each for each in known if put_id and each.withdraw(put_id)]
        fitting = [each for each in known if each.max_bytes is None or size_bytes <= each.max_bytes]
        if not fitting:
            largest = max(each.max_bytes or 0 for each in known)
            raise QuotaExceededError(
                f"the put has {size_bytes} bytes; expected at most {largest}, the largest quota of any storage "
                f"service. Split the put, or raise max_bytes",
                metadata={"limit_name": "max_bytes", "got": str(size_bytes), "limit": str(largest)},
            )
        least_bytes = max(size_bytes, 1)
        spare = {each: each.free_bytes() - (each.max_bytes or 0) // _RESERVED_SHARE for each in fitting}
        spare = {each: spare_bytes for each, spare_bytes in spare.items() if spare_bytes >= least_bytes}
        spare = {each: spare_bytes for each, spare_bytes in spare.items() if each not in failed} or spare
        if spare:
            first = self._next_in_turn(spare, least_bytes)
        else:
            others = [each for each in fitting if each not in failed] or fitting
            first = max(others, key=lambda each: each.free_bytes())
        first.expect(put_id or os.urandom(16), size_bytes)
        if self.count == 1:
            granted, granted_bytes, largest_put = [first], UNBOUNDED_BYTES, UNBOUNDED_BYTES
        else:
            granted = self._granted(first, spare)
            granted_bytes = min(spare.get(each, 0) for each in granted) // _GRANTED_SHARE
            largest_put = _GRANTED_PUT_BYTES
        return PlacePutResponse(
            storages=[storage.endpoint for storage in granted],
            embedded=first is self.embedded,
            controller_id=self.controller_id,
            grant_duration=to_duration(_GRANT_SECONDS),
            grant_bytes=granted_bytes,
            max_granted_put_bytes=largest_put,
        )

    def _next_in_turn(self, spare: Mapping[Storage, int], size_bytes: int) -> Storage:
        """Return the storage service whose turn is next, and record the turn.

        A service's turn is the virtual end time of its last put in this size class. The end time is the put's start
        time plus the ratio of the put's size to the service's spare bytes. A turn is never earlier than the last
        recorded turn, so a service that was full or silent does not receive extra puts to catch up.
        """
        size_class = size_bytes.bit_length()
        now = self._turns.get(size_class, 0.0)

        def turn(storage: Storage) -> tuple[float, int]:
            began_at, last_bytes = storage.turns.get(size_class, (0.0, 0))
            return max(now, began_at + last_bytes / spare[storage]), -spare[storage]

        first = min(spare, key=turn)
        self._turns[size_class] = began_at = turn(first)[0]
        first.turns[size_class] = began_at, size_bytes
        return first

    def _granted(self, first: Storage, spare: Mapping[Storage, int]) -> list[Storage]:
        """Return the services for a client's later small puts, each repeated in proportion to its spare bytes.

        The embedded storage is never combined with other services, because clients access it differently.
        """
        if first is self.embedded or first not in spare:
            return [first]
        largest = heapq.nlargest(_MOST_GRANTED, spare, key=spare.__getitem__)
        sharing = [first, *(each for each in largest if each is not first and each is not self.embedded)]
        turn_count = round(sum(spare[each] for each in sharing) / min(spare[each] for each in sharing))
        granted, counts = [first], Counter([first])
        while len(granted) < min(turn_count, _MOST_GRANTED):
            following = min(sharing, key=lambda each: (counts[each] + 1) / spare[each])
            granted.append(following)
            counts[following] += 1
        return granted

    def require(self, put: Put) -> Storage:
        """Return the storage service that holds an uncommitted put.

        Uncommitted puts of a lost service are rejected, because the service may still be alive. It may then be
        accepting puts that its successor did not find in the mirror. Puts committed before the loss was detected have
        copies in the mirror.

        Raises:
            UnavailableError: the storage service has not registered.
            DataLossError: the storage service has restarted or is lost.
        """
        storage = self._find(put.storage_id, put.boot_id)
        if storage is None and put.storage_id not in self._storages:
            raise UnavailableError(
                f"storage service {put.storage_id!r} has not yet registered with this controller; retry later"
            )
        if storage is None:
            raise DataLossError(
                f"storage service {put.storage_id!r} has restarted since the put; put the data again",
                metadata={"storage_id": put.storage_id},
            )
        if put[:2] in self.adoptions.lost or put[:2] in self.adoptions.taken:
            raise DataLossError(
                f"storage service {put.storage_id!r} was lost after this put, and another service is taking over its "
                "puts; put the data again",
                metadata={"storage_id": put.storage_id},
            )
        return storage

    def driver(self, storage_id: str, boot_id: bytes) -> AsyncDriver:
        """Return the driver that transfers an instance's bytes. After a put, call `Puts.mark_committed`.

        Raises:
            UnavailableError: another service is adopting this instance's puts.
            DataLossError: this instance no longer exists.
        """
        if self._is_awaited(storage_id, boot_id):
            raise UnavailableError(f"the puts of storage service {storage_id!r} are being taken over; retry later")
        storage = self._find(storage_id, boot_id)
        if storage is None:
            raise DataLossError(f"storage service {storage_id!r} is lost or has restarted without its data")
        return storage.driver

    async def close(self) -> None:
        """Free all pending cells, stop background tasks, and disconnect from storage services."""
        await self.puts.close()
        storages = [*self._storages.values(), *self.adoptions.taken.values()]
        await asyncio.gather(*(storage.close() for storage in storages), *self._closing)
