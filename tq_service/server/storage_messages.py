"""Messages of the storage service as what the engine knows, and the other way round."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

from tq_service.dataplane.parties import CONTROLLER_KIND, GRPC_KIND
from tq_service.errors import DataLossError, InvalidArgumentError
from tq_service.storage.cells import PutCells, ReadRuns
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put import PendingPut
from tq_service.storage.index.reading import Reading, Shared
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.wire.columns import ColumnShape, encode_header
from tq_service.wire.metadata import decode_integers

MOST_OVERDUE_PUTS: Final = 4096
"""Most puts that a storage service asks about in one call: some milliseconds' work."""


def endpoint_of(engine: StorageEngine, address: str) -> metadata_pb2.StorageEndpoint:
    """Return how clients reach an engine; an empty address is that of the controller, whose process it is in."""
    kind = GRPC_KIND if address else CONTROLLER_KIND
    return metadata_pb2.StorageEndpoint(
        storage_id=engine.storage_id, boot_id=engine.boot_id, kind=kind, address=address
    )


class EngineCalls:
    """The storage engine, asked by messages: for the servicer, and for a driver in the same process."""

    def __init__(self, engine: StorageEngine) -> None:
        self._engine = engine

    @contextlib.asynccontextmanager
    async def storing(
        self,
        header: pb.PutHeader,
        columns: Sequence[ColumnShape],
        *,
        until: float | None,
        for_existing_rows: bool = False,
        shared: bool = False,
        waiting: contextlib.AbstractContextManager[None] | None = None,
    ) -> AsyncIterator[PendingPut]:
        """Reserve capacity for a put, whose bytes are written within the `with`; after an error nothing of it is left.

        Args:
            header: of the put.
            columns: as it describes them.
            until: when to stop waiting, by the engine's clock; None: never.
            for_existing_rows: whether it may use the reserve.
            shared: whether the bytes come as shared memory.
            waiting: held while there is no capacity.
        """
        with waiting or contextlib.nullcontext():
            pending = await self._engine.reserve(
                header.put_id,
                columns,
                header.row_count,
                partition_id=header.partition_id,
                for_existing_rows=for_existing_rows,
                deadline=until,
                owner=header.controller_id,
                shared=shared,
            )
        try:
            yield pending
            if not pending.already_complete:
                await self._engine.flush(pending)
                pending.finish()
        except BaseException:
            pending.abort()  # and no more: a retry may have completed the put meanwhile
            raise

    async def open(self, request: pb.GetRequest) -> Reading:
        """Find cells and keep them as they are until the result is closed; use it in a `with`."""
        self.check_boot(request.boot_id)
        await self._engine.check(request.put_ids)
        return self._engine.open_read(list(map(_read_runs, request.runs)), list(request.put_ids))

    def check_boot(self, boot_id: bytes) -> None:
        """Check that cells were put into this engine, and not into one that came back empty.

        Raises:
            DataLossError: they were not.
        """
        if boot_id != self._engine.boot_id:
            raise DataLossError(
                f"storage service {self._engine.storage_id!r} has restarted since these cells were put, and came back "
                f"empty; put them again, or clear them",
                metadata={"storage_id": self._engine.storage_id},
            )


def _read_runs(run: metadata_pb2.CellRuns) -> ReadRuns:
    return ReadRuns(
        field_names=tuple(run.field_names),
        put_indexes=decode_integers(run.put_indexes),
        first_rows=decode_integers(run.first_rows),
        row_counts=decode_integers(run.row_counts),
    )


def get_header(reading: Reading) -> pb.GetHeader:
    """Say what a reading has."""
    return pb.GetHeader(row_count=reading.row_count, columns=map(encode_header, reading.headers))


def shared_columns(shared: Shared, offer_id: bytes) -> pb.SharedColumns:
    """Say where the columns of a reading are in the memory that is offered."""
    return pb.SharedColumns(
        offer_id=offer_id,
        memory_count=len(shared.fds),
        columns=[
            pb.SharedColumn(
                column_index=column.column_index,
                memory_indexes=column.memory_indexes.tolist(),
                starts=column.starts.tolist(),
                sizes=column.sizes.tolist(),
            )
            for column in shared.columns
        ],
    )


def put_cells(cells: pb.PutCells) -> PutCells:
    """Return cells of a put.

    Raises:
        InvalidArgumentError: first rows and counts do not belong together.
    """
    if len(cells.first_rows) != len(cells.row_counts):
        raise InvalidArgumentError(
            f"the cells of a put have {len(cells.first_rows)} first rows and {len(cells.row_counts)} counts; give "
            f"one of each for each run, or neither for all rows",
            field="cells",
        )
    has_rows = len(cells.first_rows) > 0
    return PutCells(
        put_id=cells.put_id,
        field_names=tuple(cells.field_names),
        first_rows=decode_integers(cells.first_rows) if has_rows else None,
        row_counts=decode_integers(cells.row_counts) if has_rows else None,
    )
