"""Sweeps: each row that stays is asked about once by each question, whatever becomes of others between the slices."""

from __future__ import annotations

import numpy as np
import pytest
from domain_support import new_write

from tq_service.machine.samples import SamplesCleared
from tq_service.samplers import PlanRunner
from tq_service.serving import sweep as sweep_module
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices, sweep
from tq_service.state.partition import Partition
from tq_service.state.table import CLEARED


class Seen:
    """Notes which rows it was asked about."""

    def __init__(self, partition: Partition, cost: int = 1) -> None:
        self.cost = cost
        self.indexes: list[int] = []
        self.slice_count = 0
        self._table = partition.table

    def look(self, rows: slice) -> None:
        is_there = self._table.state.data[rows] != CLEARED
        self.indexes += self._table.index.data[rows][is_there].tolist()
        self.slice_count += 1


class Changing(Slices):
    """Clears and adds samples at each turn."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self.catalog = catalog
        self.cleared: set[int] = set()

    async def turn(self) -> None:
        table = self.catalog.get("train").table
        gone = table.index.data[table.present_positions()][::3]
        self.cleared.update(gone.tolist())
        self.catalog.commit(SamplesCleared(partition_id="train", global_indexes=gone))
        self.catalog.write("train", b"", new_write(5, ("x",)))


@pytest.fixture
async def catalog() -> Catalog:
    return Catalog(PlanRunner())


async def test_what_is_asked_together_is_asked_of_the_same_slices(catalog: Catalog) -> None:
    partition = catalog.write("train", b"", new_write(40_000, ("x",))).partition
    questions = [Seen(partition), Seen(partition, cost=3)]
    assert await sweep(partition.table, questions, Slices()) > 0
    for question in questions:
        assert question.indexes == list(range(40_000))
        assert question.slice_count == -(-40_000 // (sweep_module._SLICE_ROWS // 4))
    assert await sweep(partition.table, [], Slices()) == 0


async def test_rows_that_stay_are_met_once_while_others_come_go_and_move(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "_LEAST_ROWS", 64)
    monkeypatch.setattr(sweep_module, "_SLICE_ROWS", 64)
    partition = catalog.write("train", b"", new_write(5_000, ("x",))).partition
    count, seen, changing = partition.table.count, Seen(partition), Changing(catalog)
    await sweep(partition.table, [seen], changing)
    assert partition.table.count < count, "gaps were to be closed meanwhile"
    assert len(seen.indexes) == len(set(seen.indexes))
    stayed = set(range(5_000)) - changing.cleared
    assert stayed <= set(seen.indexes) <= set(range(5_000))
    assert np.all(np.diff(seen.indexes) > 0)
