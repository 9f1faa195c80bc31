"""Columns that are put and fetched again, in benchmarks of bytes.

Only the public client is used: `compare.py` runs this on older trees too.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import tq_service as tq

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
JAGGED_BYTES, JAGGED_ROW_COUNT = 16 * MIB, 4_096
PARTITION = "bulk"

PutAndGet = tuple[float, float]
"""The seconds of both; NaN if not measured."""


def dense(size: int, row_bytes: int) -> torch.Tensor:
    """Return a tensor of `size` bytes, in rows of at most `row_bytes`."""
    row_bytes = min(size, row_bytes)
    return torch.rand(size // row_bytes, row_bytes // 4)


def jagged_rows() -> list[torch.Tensor]:
    """Return 16 MiB as rows of 2 to 6 KiB."""
    mean = JAGGED_BYTES // 4 // JAGGED_ROW_COUNT
    lengths = np.random.default_rng(0).integers(mean // 2, mean + mean // 2, JAGGED_ROW_COUNT)
    return [torch.rand(int(length)) for length in lengths]


def jagged() -> torch.Tensor:
    """Return the same as a nested tensor."""
    return torch.nested.nested_tensor(jagged_rows(), layout=torch.jagged)


def check_last_row(back: Any, data: Any) -> None:
    """Raise unless the last row came back; comparing all of them would disturb the next measurement."""
    if not isinstance(data, torch.Tensor):
        return
    if data.is_nested:  # taking a row of a nested tensor makes all of them
        back, data = back.values(), data.values()
    if not torch.equal(back[-1], data[-1]):
        raise RuntimeError("the get returned other values than the put sent")


class RoundTrips:
    """Puts of one column, followed by its gets.

    Args:
        client: makes them.
        column: the data.
        count: number of puts and of gets; the seconds are per call.
    """

    def __init__(self, client: tq.Client, column: Any, count: int = 1) -> None:
        self._client = client
        self._column = column
        self._count = count

    def __call__(self) -> PutAndGet:
        """Make them."""
        times = [time.perf_counter()]
        metas = [self._client.put(PARTITION, {"x": self._column}) for _ in range(self._count)]
        times.append(time.perf_counter())
        for meta in metas:
            back = self._client.get_data(meta)
        times.append(time.perf_counter())
        check_last_row(back["x"], self._column)
        self._client.clear_partition(PARTITION)
        return (times[1] - times[0]) / self._count, (times[2] - times[1]) / self._count
