"""The lowest version among the samples that a task has left to consume, found without looking at all of them."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes
from tq_service.domain.states import UNCLAIMED, is_open
from tq_service.domain.tables.table import count_values

_BLOCK_ROWS = 1024
_LEAST_HEAP = 64
NO_VERSIONS = (math.inf, -math.inf)  # so that nothing is ahead of them, and they of nothing


class LowestVersion:
    """Knows for each block of neighbouring rows a version below which none of its rows that are left lies.

    Rows that leave keep that true, so only those that come, come back or change are noted. A search looks at the block
    with the lowest bound, and at the next one only where the bound turned out to be too low: once for each version that
    a block runs out of, however many rows there are.
    """

    def __init__(self, partition: Partition, task_name: str, column: str) -> None:
        self._partition = partition
        self._task_name = task_name
        self._column = column
        self._bounds: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # every bound with its block, among others that no longer hold
        self._touched: set[int] = set()  # blocks to be looked at
        self._forget(task_name)
        partition.on_rows.append(self._note)
        partition.on_reset.append(self._forget)

    def _note(self, indexes: Indexes | range) -> None:
        if isinstance(indexes, range):
            self._touched.update(range(indexes.start // _BLOCK_ROWS, -(-indexes.stop // _BLOCK_ROWS)))
        else:
            self._touched.update(count_values(indexes // _BLOCK_ROWS)[0].tolist())

    def _forget(self, task_name: str) -> None:
        """Have all blocks looked at: any rows may be left again."""
        if task_name == self._task_name:
            table = self._partition.table
            self._note(table.index.data[table.present_positions()])

    def find(self) -> float:
        """Return the lowest version, infinity where no row that is left has one."""
        for block in self._touched:
            self._set(block, self._lowest_of(block))
        self._touched.clear()
        while self._heap:
            bound, block = self._heap[0]
            if self._bounds.get(block) == bound:
                lowest = self._lowest_of(block)
                if lowest == bound:
                    return bound
                self._set(block, lowest)
            heapq.heappop(self._heap)
        return math.inf

    def _set(self, block: int, lowest: float) -> None:
        if lowest == math.inf:
            self._bounds.pop(block, None)
        elif self._bounds.get(block) != lowest:
            self._bounds[block] = lowest
            heapq.heappush(self._heap, (lowest, block))
            if len(self._heap) > 2 * len(self._bounds) + _LEAST_HEAP:
                self._heap = [(bound, each) for each, bound in self._bounds.items()]
                heapq.heapify(self._heap)

    def _lowest_of(self, block: int) -> float:
        partition = self._partition
        arrays = partition.meta.arrays(self._column)
        if arrays is None or arrays[0].dtype.kind not in "if":
            return math.inf
        table = partition.table
        rows = slice(table.position_from(block * _BLOCK_ROWS), table.position_from((block + 1) * _BLOCK_ROWS))
        state = partition.state.data[rows]
        left = is_open(state) & arrays[1][rows]
        task = partition.tasks.get(self._task_name)
        if task is not None:
            left &= task.claim.data[rows] == UNCLAIMED
        return version_range(arrays[0][rows][left])[0]


def version_range(versions: NDArray[Any]) -> tuple[float, float]:
    """Return the lowest and the highest version of some samples."""
    versions = versions[~np.isnan(versions)]  # not a number: no version
    return (versions.min().item(), versions.max().item()) if versions.size else NO_VERSIONS
