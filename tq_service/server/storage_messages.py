"""Messages of the storage service as what the engine knows, and the other way round."""

from __future__ import annotations

from typing import Final

from tq_service.errors import InvalidArgumentError
from tq_service.server import from_proto
from tq_service.storage.cells import PutCells, ReadRuns
from tq_service.storage.index.reading import Reading
from tq_service.storage.index.sharing import Shared
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.wire.columns import encode_header

MOST_VERIFIED_PUTS: Final = 4096
"""Most puts that a storage service asks about in one call: some milliseconds' work."""


def read_runs(run: metadata_pb2.CellRuns) -> ReadRuns:
    """Return cells that are to be read."""
    return ReadRuns(
        field_names=tuple(run.field_names),
        put_indexes=from_proto.indexes(run.put_indexes),
        first_rows=from_proto.indexes(run.first_rows),
        row_counts=from_proto.indexes(run.row_counts),
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
        first_rows=from_proto.indexes(cells.first_rows) if has_rows else None,
        row_counts=from_proto.indexes(cells.row_counts) if has_rows else None,
    )
