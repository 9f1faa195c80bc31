"""The storage engine in a controller's own process, as the controller uses it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence

from tq_service.server.bulk_calls import TakesCells
from tq_service.server.remote_storage import Room, report_kept
from tq_service.storage.cells import PutCells, ReadRuns
from tq_service.storage.engine import StorageEngine
from tq_service.wire.columns import ColumnShape

_ROOM_SECONDS = 5.0


class EmbeddedStorage:
    """The engine in the controller's own process."""

    address = ""

    def __init__(self, engine: StorageEngine, address: str = "") -> None:
        self.storage_id = engine.storage_id
        self.boot_id = engine.boot_id
        self.address = address
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

    async def read(self, put_ids: Sequence[bytes], runs: ReadRuns, into: TakesCells) -> None:
        """Read cells of its puts."""
        await self._engine.check(put_ids)
        with self._engine.open_read([runs], put_ids) as cells:
            await into.begin(cells.headers)
            await into.add(cells.chunks())

    async def put(
        self, put_id: bytes, partition_id: str, columns: Sequence[ColumnShape], values: AsyncIterator[bytes]
    ) -> None:
        """Store a put and make it stay."""
        pending = await self._engine.reserve(
            put_id,
            columns,
            columns[0].row_count,
            partition_id=partition_id,
            for_existing_rows=False,
            deadline=time.monotonic() + _ROOM_SECONDS,
        )
        try:
            async for data in values:
                pending.write(data)
            await self._engine.flush(pending)
            pending.finish()
        except BaseException:
            pending.abort()
            raise
        self._engine.confirm(put_id, partition_id)

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back."""
        self._engine.free(cells)

    def keep(self, cells: Iterable[PutCells]) -> None:
        """Say which cells samples have, before anybody is served."""
        kept = self._engine.keep(cells)
        report_kept(self.storage_id, kept.missing_put_ids, kept.missing_count, kept.dropped_count)

    async def close(self) -> None:
        """Do nothing: the engine's owner closes it."""
