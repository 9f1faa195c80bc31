"""Where the cells of a batch are: puts in storage services, as runs of neighbouring rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import decode_integers, expand_runs

Indexes = NDArray[np.int64]


class StorageRef(NamedTuple):
    """One instance of a storage service.

    Attributes:
        storage_id: its name.
        boot_id: names the instance.
        kind: which driver reaches it.
        address: where it is, for kinds that have one.
        parameters: what else its driver needs, in the order of their names.
        is_away: whether the controller does not know where it is.
    """

    storage_id: str
    boot_id: bytes
    kind: str
    address: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    is_away: bool = False

    @property
    def params(self) -> Mapping[str, str]:
        """What else its driver needs, by name."""
        return dict(self.parameters)


class PutRef(NamedTuple):
    """A put in a storage service."""

    storage: StorageRef
    put_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldRuns:
    """The cells of fields that were put together: for each run its put, first row in the put, and number of rows.

    Attributes:
        field_names: the fields that share the runs.
        put_indexes: `(runs,)`, into `CellLocations.puts`.
        first_rows: `(runs,)`.
        row_counts: `(runs,)`.
    """

    field_names: tuple[str, ...]
    put_indexes: Indexes
    first_rows: Indexes
    row_counts: Indexes

    @classmethod
    def of_rows(cls, field_names: tuple[str, ...], puts: Indexes, rows: Indexes) -> FieldRuns:
        """Return the runs of cells given one by one: the put `(n,)` and the row in it `(n,)`."""
        breaks = np.flatnonzero((np.diff(puts) != 0) | (np.diff(rows) != 1)) + 1
        starts = np.concatenate([np.zeros(min(1, rows.size), np.int64), breaks])
        counts = np.diff(np.append(starts, rows.size))
        return cls(field_names=field_names, put_indexes=puts[starts], first_rows=rows[starts], row_counts=counts)

    @property
    def row_count(self) -> int:
        """Number of cells of each field."""
        return int(self.row_counts.sum())

    def expand(self) -> tuple[Indexes, Indexes]:
        """Return the cells one by one: the put `(n,)` and the row in it `(n,)`."""
        return np.repeat(self.put_indexes, self.row_counts), expand_runs(self.first_rows, self.row_counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellLocations:
    """Where the cells of a batch are: for every located field one cell for each sample, in the order of the batch."""

    puts: tuple[PutRef, ...]
    runs: tuple[FieldRuns, ...]

    @classmethod
    def from_proto(cls, message: pb.Locations) -> CellLocations:
        """Return the locations of a message."""
        storages = [
            StorageRef(
                one.storage_id, one.boot_id, one.kind, one.address, tuple(sorted(one.params.items())), one.is_away
            )
            for one in message.storages
        ]
        return cls(
            puts=tuple(PutRef(storages[put.storage_index], put.put_id) for put in message.puts),
            runs=tuple(
                FieldRuns(
                    field_names=tuple(runs.field_names),
                    put_indexes=decode_integers(runs.put_indexes),
                    first_rows=decode_integers(runs.first_rows),
                    row_counts=decode_integers(runs.row_counts),
                )
                for runs in message.runs
            ),
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
        selected = [FieldRuns.of_rows(names, puts[positions], rows[positions]) for names, puts, rows in cells]
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
        runs_by_cells: dict[tuple[bytes, bytes], FieldRuns] = {}
        for name in common:
            all_puts, all_rows = (np.concatenate([cells[name][side] for cells in per_part]) for side in (0, 1))
            key = (all_puts.tobytes(), all_rows.tobytes())
            same = runs_by_cells.get(key)
            runs_by_cells[key] = (
                FieldRuns.of_rows((name,), all_puts, all_rows)
                if same is None
                else replace(same, field_names=(*same.field_names, name))
            )
        return CellLocations(puts=tuple(puts), runs=tuple(runs_by_cells.values()))
