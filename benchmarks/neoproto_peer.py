"""Runs in Ray's environment: values go through Ray's object store as in verl's Ray engine.

That engine copies a tensor into an array before the put, and an array at the get, since arrays of the object store are
shared and read-only. It puts values one by one and gets them together; for some rows it gets the entire column.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import ray

from benchmarks.peer_program import Commands, serve
from benchmarks.ray_cluster import ray_cluster

_OBJECT_STORE_BYTES = 1 << 30
# Ray frees unreferenced objects once per second.
_FREED_SECONDS = 1.5


@ray.remote(num_cpus=1)
class _Rank:
    def column(self, references: list[Any], row_count: int) -> tuple[float, float]:
        """Return the seconds of a get of a column, and of a get of some rows."""
        started = time.perf_counter()
        float(ray.get(references[0]).copy().sum())
        whole_seconds = time.perf_counter() - started
        started = time.perf_counter()
        column = ray.get(references[0]).copy()
        float(np.take(column, np.arange(row_count), axis=0).sum())
        return whole_seconds, time.perf_counter() - started

    def values(self, references: list[Any]) -> float:
        """Return the seconds of a get of values."""
        started = time.perf_counter()
        float(np.stack([each.copy() for each in ray.get(references)]).sum())
        return time.perf_counter() - started


class _Load:
    def __init__(self, rank: Any) -> None:
        self._rank = rank
        self._column = np.zeros((0, 0), np.float32)
        self._values: list[Any] = []

    def load(self, row_count: int, row_length: int, value_count: int, value_length: int) -> None:
        """Create the column and the values for `round_trip`."""
        rng = np.random.default_rng(0)
        self._column = rng.random((row_count, row_length), np.float32)
        self._values = list(rng.random((value_count, value_length), np.float32))

    def round_trip(self, rank_count: int) -> list[float]:
        """Return the seconds of the operations that `neoproto` measures, in its order."""
        time.sleep(_FREED_SECONDS)
        started = time.perf_counter()
        column = ray.put(self._column.copy())
        column_seconds = time.perf_counter() - started
        started = time.perf_counter()
        values = [ray.put(value.copy()) for value in self._values]
        value_seconds = time.perf_counter() - started
        whole, rows = ray.get(self._rank.column.remote([column], len(self._column) // rank_count))
        got = ray.get(self._rank.values.remote(values))
        return [column_seconds, whole, rows, value_seconds, got]


@contextmanager
def _started() -> Iterator[Commands]:
    with ray_cluster(cpu_count=1, object_store_bytes=_OBJECT_STORE_BYTES):
        load = _Load(_Rank.remote())
        yield {
            "versions": lambda: {package: version(package) for package in ("ray", "numpy")},
            "load": load.load,
            "round_trip": load.round_trip,
        }


if __name__ == "__main__":
    serve(_started())
