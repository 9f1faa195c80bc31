"""The lowest version among the samples that a task has left to consume, found without looking at all of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.states import is_open

_BLOCK_ROWS = 1024
_TO_BE_LOOKED_AT = -math.inf
NO_VERSIONS = (math.inf, -math.inf)  # so that nothing is ahead of them, and they of nothing


class LowestVersion:
    """Knows for each block of neighbouring rows a version below which none of its rows that are left lies.

    Rows that leave keep that true, so only those that come, come back or change are noted. A search looks at the block
    with the lowest bound, and at the next one only where the bound turned out to be too low: once for each version that
    a block runs out of, however many rows there are.

    Bounds are doubles, by which blocks are compared: integers beyond 2**53 may be taken for their neighbours there.
    """

    def __init__(self, partition: Partition, task_name: str, column: str) -> None:
        self._partition = partition
        self._task_name = task_name
        self._column = column
        self._first_block = 0
        self._bounds = np.zeros(0)  # of blocks from the first on; those of rows that were cleared in front are dropped
        self._extend()
        partition.on_rows.append(self._note)
        partition.on_reset.append(self._forget)

    def _note(self, indexes: Indexes | range) -> None:
        """Have the blocks of rows looked at again."""
        self._extend()
        if isinstance(indexes, range):  # of new rows, which are the last
            self._bounds[indexes.start // _BLOCK_ROWS - self._first_block :] = _TO_BE_LOOKED_AT
        else:
            self._bounds[indexes // _BLOCK_ROWS - self._first_block] = _TO_BE_LOOKED_AT

    def _extend(self) -> None:
        """Have bounds for the blocks of all rows there are."""
        table = self._partition.table
        missing_count = -(-table.next_index // _BLOCK_ROWS) - self._first_block - self._bounds.size
        if missing_count > 0:
            bounds = np.append(self._bounds, np.full(missing_count, _TO_BE_LOOKED_AT))
            position = table.position_from(0)
            first_index = int(table.index[position]) if position < table.count else table.next_index
            first_block = first_index // _BLOCK_ROWS
            self._bounds, self._first_block = bounds[first_block - self._first_block :], first_block

    def _forget(self, task_name: str) -> None:
        """Have all blocks looked at: any rows may be left again."""
        if task_name == self._task_name:
            self._bounds[:] = _TO_BE_LOOKED_AT

    def find(self) -> float:
        """Return the lowest version, infinity where no row that is left has one."""
        while self._bounds.size:
            block = int(self._bounds.argmin())
            bound, lowest = self._bounds[block], self._lowest_of(self._first_block + block)
            self._bounds[block] = lowest
            if self._bounds[block] == bound:
                return lowest
        return math.inf

    def _lowest_of(self, block: int) -> float:
        partition = self._partition
        arrays = partition.meta.arrays(self._column)
        if arrays is None or arrays[0].dtype.kind not in "if":
            return math.inf
        table = partition.table
        rows = slice(table.position_from(block * _BLOCK_ROWS), table.position_from((block + 1) * _BLOCK_ROWS))
        task = partition.tasks.get(self._task_name)
        left = is_open(partition.state.data[rows]) if task is None else task.is_pending(rows)
        left &= arrays[1][rows]
        return version_range(arrays[0][rows][left])[0]


def version_range(versions: NDArray[Any]) -> tuple[float, float]:
    """Return the lowest and the highest version of some samples."""
    versions = versions[~np.isnan(versions)]  # not a number: no version
    return (versions.min().item(), versions.max().item()) if versions.size else NO_VERSIONS
