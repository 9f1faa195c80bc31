"""The storage engine in a controller's own process, as the controller uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tq_service.dataplane.local import LocalDriver
from tq_service.server.remote_storage import Room, report_kept
from tq_service.server.storage_messages import EngineCalls, endpoint_of
from tq_service.storage.cells import PutCells
from tq_service.storage.engine import StorageEngine


class EmbeddedStorage:
    """The engine in the controller's own process."""

    def __init__(self, engine: StorageEngine, address: str = "") -> None:
        self.storage_id = engine.storage_id
        self.boot_id = engine.boot_id
        self.endpoint = endpoint_of(engine, address)
        self.driver = LocalDriver(EngineCalls(engine))
        self._engine = engine

    def room(self) -> Room:
        """Return its bytes."""
        stat = self._engine.stat()
        return Room(max_bytes=stat.max_bytes, used_bytes=stat.used_bytes)

    def expect(self, size_bytes: int) -> None:
        """Do nothing: the room is always that of the moment."""

    async def confirm(self, put_id: bytes, partition_id: str) -> bool:
        """Make an uncommitted put of a partition stay; return whether it is for existing rows only."""
        self._engine.confirm(put_id, partition_id)
        return self._engine.is_for_existing_rows(put_id)

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back."""
        self._engine.free(cells)

    def keep(self, cells: Iterable[PutCells]) -> None:
        """Say which cells samples have, before anybody is served."""
        kept = self._engine.keep(cells)
        report_kept(self.storage_id, kept.missing_put_ids, kept.missing_count, kept.dropped_count)

    async def close(self) -> None:
        """Do nothing: the engine's owner closes it."""
