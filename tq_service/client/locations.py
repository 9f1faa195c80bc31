"""Where the cells of a batch are: puts in storage services, as runs of neighbouring rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import CellRuns, Indexes


class StorageRef(NamedTuple):
    """One instance of a storage service.

    Attributes:
        storage_id: its name.
        boot_id: names the instance.
        address: where it is; empty: where the client found the controller.
        is_away: whether the controller does not know where it is.
    """

    storage_id: str
    boot_id: bytes
    address: str = ""
    is_away: bool = False


class PutRef(NamedTuple):
    """A put in a storage service."""

    storage: StorageRef
    put_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellLocations:
    """Where the cells of a batch are: for every located field one cell for each sample, in the order of the batch."""

    puts: tuple[PutRef, ...]
    runs: tuple[CellRuns, ...]

    @classmethod
    def from_proto(cls, message: pb.Locations) -> CellLocations:
        """Return the locations of a message."""
        storages = [StorageRef(one.storage_id, one.boot_id, one.address, one.is_away) for one in message.storages]
        return cls(
            puts=tuple(PutRef(storages[put.storage_index], put.put_id) for put in message.puts),
            runs=tuple(map(CellRuns.from_proto, message.runs)),
        )

    @property
    def field_names(self) -> set[str]:
        """Names of the fields that are located."""
        return {name for runs in self.runs for name in runs.field_names}

    def covers(self, field_names: Iterable[str]) -> bool:
        """Whether all these fields are located."""
        return self.field_names.issuperset(field_names)

    def select(self, positions: Indexes) -> CellLocations:
        """Return the locations of the samples at `positions`, in this order."""
        cells = [(runs.field_names, *runs.expand()) for runs in self.runs]
        selected = [CellRuns.of_rows(names, puts[positions], rows[positions]) for names, puts, rows in cells]
        return CellLocations(puts=self.puts, runs=tuple(selected))

    def select_fields(self, field_names: Sequence[str]) -> CellLocations:
        """Return the locations of these fields only."""
        selected = [
            replace(runs, field_names=names)
            for runs in self.runs
            if (names := tuple(name for name in runs.field_names if name in field_names))
        ]
        return CellLocations(puts=self.puts, runs=tuple(selected))

    @staticmethod
    def concat(parts: Sequence[CellLocations]) -> CellLocations:
        """Return the locations of several batches one after the other, of the fields that all of them locate."""
        puts: dict[PutRef, int] = {}
        per_part: list[dict[str, tuple[Indexes, Indexes]]] = []
        for part in parts:
            numbers = np.array([puts.setdefault(put, len(puts)) for put in part.puts], np.int64)
            cells: dict[str, tuple[Indexes, Indexes]] = {}
            for runs in part.runs:
                own, rows = runs.expand()
                cells.update(dict.fromkeys(runs.field_names, (numbers[own], rows)))
            per_part.append(cells)
        common = [name for name in per_part[0] if all(name in cells for cells in per_part)]
        alike: dict[tuple[bytes, bytes], tuple[list[str], Indexes, Indexes]] = {}
        for name in common:
            at, rows = (np.concatenate([cells[name][side] for cells in per_part]) for side in (0, 1))
            alike.setdefault((at.tobytes(), rows.tobytes()), ([], at, rows))[0].append(name)
        joined = [CellRuns.of_rows(tuple(names), at, rows) for names, at, rows in alike.values()]
        return CellLocations(puts=tuple(puts), runs=tuple(joined))
