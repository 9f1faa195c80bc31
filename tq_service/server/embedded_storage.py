"""The storage engine in a controller's own process, as the controller uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tq_service.dataplane.local import LocalDriver
from tq_service.server.remote_storage import Capacity, report_reconciled
from tq_service.server.storage_messages import EngineCalls, endpoint_of
from tq_service.storage.cells import PutCells
from tq_service.storage.engine import StorageEngine
from tq_service.v1.storage_service_pb2 import PutReceipt


class EmbeddedStorage:
    """The engine in the controller's own process."""

    def __init__(self, engine: StorageEngine, address: str = "", controller_id: bytes = b"") -> None:
        self.storage_id = engine.storage_id
        self.boot_id = engine.boot_id
        self.endpoint = endpoint_of(engine, address)
        self.driver = LocalDriver(EngineCalls(engine))
        self._engine = engine
        self._controller_id = controller_id

    def capacity(self) -> Capacity:
        """Return its bytes."""
        stat = self._engine.stat()
        return Capacity(max_bytes=stat.max_bytes, used_bytes=stat.used_bytes)

    def note_placement(self, size_bytes: int) -> None:
        """Do nothing: the capacity is always that of the moment."""

    def open_receipt(self, put_id: bytes, partition_id: str, receipt: bytes) -> PutReceipt:
        """Return what a receipt would say: the put itself is here to be looked at."""
        self._engine.check_complete(put_id, partition_id)
        return PutReceipt(for_existing_rows=self._engine.is_for_existing_rows(put_id))

    def check_held(self, put_id: bytes, partition_id: str) -> None:
        """Check that a put is still here."""
        self._engine.check_complete(put_id, partition_id)

    def spend(self, receipt: PutReceipt) -> None:
        """Do nothing: a put that is freed is gone at once."""

    def confirm(self, put_id: bytes) -> None:
        """Make a put stay; one is not here if all its samples have failed, and its commit freed it."""
        self._engine.confirm(put_id)

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back."""
        self._engine.free(cells)

    def reconcile(self, cells: Iterable[PutCells]) -> None:
        """Say which cells samples have, before anybody is served."""
        outcome = self._engine.reconcile_at_once(cells, owner=self._controller_id)
        report_reconciled(self.storage_id, outcome.missing_put_ids, outcome.missing_count, outcome.dropped_count)

    async def close(self) -> None:
        """Do nothing: the engine's owner closes it."""
