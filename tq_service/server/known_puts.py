"""What a controller knows of the puts of one storage service at one moment, and how it says so in pieces.

Puts come and go meanwhile. What is freed after that moment is listed all the same, and freed by a call of its own. What
is committed after it was confirmed after the storage service had begun to listen, and so stays there; or its commit was
under way at that moment, and it is listed as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Final

import numpy as np

from tq_service.internal.v1 import storage_control_pb2
from tq_service.state.cells import CellSet, CellsSnapshot, Freed, freed_cells, live_cells
from tq_service.storage.index.put import PutCells
from tq_service.wire.metadata import runs_of

_MOST_PUTS: Final = 1024  # a piece is some milliseconds' work for the storage service
_MOST_RUNS: Final = 4096  # of rows in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPuts:
    """The puts of a storage service that are known.

    Attributes:
        storage_id: the storage service.
        boot_id: its boot.
        cells: those that samples have, by partition, of all storage services.
        leaving: those that samples had, and that are not freed yet, of all storage services.
        uncommitted: its puts whose commit is under way.
    """

    storage_id: str
    boot_id: bytes
    cells: Sequence[CellsSnapshot] = ()
    leaving: Sequence[Freed] = ()
    uncommitted: Sequence[bytes] = ()

    def parts(self) -> Iterator[PutCells]:
        """Yield all known cells once, those of one put one after the other; any thread may do so."""
        leaving: dict[bytes, list[CellSet]] = {}
        for cells in map(freed_cells, self.leaving):
            if self._is_own(cells):
                leaving.setdefault(cells.put.put_id, []).append(cells)
        own = filter(self._is_own, chain.from_iterable(map(live_cells, self.cells)))
        for put_id, parts in groupby(own, key=lambda cells: cells.put.put_id):
            yield from map(put_cells, parts)
            yield from map(put_cells, leaving.pop(put_id, ()))
        yield from map(put_cells, chain.from_iterable(leaving.values()))

    def pieces(self) -> Iterator[storage_control_pb2.ReconcilePutsRequest]:
        """Yield the messages that follow the first one, each of about a thousand puts; any thread may."""
        uncommitted = iter(self.uncommitted)
        while some := list(islice(uncommitted, _MOST_PUTS)):
            yield storage_control_pb2.ReconcilePutsRequest(uncommitted_put_ids=some)
        for cells in in_messages(chain.from_iterable(map(encode_cells, self.parts())), _MOST_PUTS):
            yield storage_control_pb2.ReconcilePutsRequest(cells=cells)
        yield storage_control_pb2.ReconcilePutsRequest(is_last=True)

    def _is_own(self, cells: CellSet) -> bool:
        return cells.put[:2] == (self.storage_id, self.boot_id)


def put_cells(cells: CellSet) -> PutCells:
    """Return cells as their storage service names them."""
    if cells.rows is None:
        return PutCells(put_id=cells.put.put_id)
    return PutCells(put_id=cells.put.put_id, field_names=cells.field_names, rows=np.sort(cells.rows))


def encode_cells(cells: PutCells) -> Iterator[storage_control_pb2.PutCells]:
    """Yield cells in parts that each fit into one message."""
    if cells.rows is None:
        yield storage_control_pb2.PutCells(put_id=cells.put_id, field_names=cells.field_names)
        return
    first_rows, row_counts = runs_of(cells.rows)
    for start in range(0, first_rows.size, _MOST_RUNS):
        yield storage_control_pb2.PutCells(
            put_id=cells.put_id,
            field_names=cells.field_names,
            first_rows=first_rows[start : start + _MOST_RUNS].tolist(),
            row_counts=row_counts[start : start + _MOST_RUNS].tolist(),
        )


def in_messages(
    cells: Iterable[storage_control_pb2.PutCells], most: int
) -> Iterator[list[storage_control_pb2.PutCells]]:
    """Yield cells, some for one message at a time: of `most` puts, with some thousand runs."""
    message: list[storage_control_pb2.PutCells] = []
    message_runs = 0
    for each in cells:
        run_count = max(1, len(each.first_rows))
        if message and (message_runs + run_count > _MOST_RUNS or len(message) == most):
            yield message
            message, message_runs = [], 0
        message.append(each)
        message_runs += run_count
    if message:
        yield message
