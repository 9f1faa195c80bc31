"""Runs in Ray's environment: arrays go from this process through Ray's object store to an actor, which reads them.

Settings that give the peer its best performance: numpy arrays, which Ray maps for readers without a copy (it copies
tensors of torch); an object store with capacity for all of them, so no put waits for a release; one long-lived reader,
so memory that it has mapped once stays mapped.
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

_OBJECT_STORE_BYTES = 2560 << 20
# Ray frees unreferenced objects once per second.
_FREED_SECONDS = 1.5


@ray.remote(num_cpus=1)
class _Reader:
    def read(self, references: list[Any]) -> tuple[float, float, float]:
        """Return the seconds of a get, the seconds until every byte was read, and the sum."""
        times = [time.perf_counter()]
        array = ray.get(references[0])
        times.append(time.perf_counter())
        total = float(array.sum())
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[0], total


class _Load:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._array = np.zeros((0, 0), np.float32)
        self._kept: list[Any] = []
        self._replaced: list[Any] = []

    def load(self, row_count: int, row_length: int) -> None:
        """Create the array for `round_trip`."""
        self._array = np.random.default_rng(0).random((row_count, row_length), np.float32)

    def round_trip(self, reuse: bool) -> tuple[float, float, float]:
        """Return the seconds of a put, of a get by the other process, and of a get that reads every byte.

        With `reuse` the put replaces the last such one. Without it nothing is freed, so the put takes memory that the
        store has not used before.
        """
        if reuse:
            self._replaced.clear()
            time.sleep(_FREED_SECONDS)
        started = time.perf_counter()
        reference = ray.put(self._array)
        put_seconds = time.perf_counter() - started
        (self._replaced if reuse else self._kept).append(reference)
        get_seconds, read_seconds, total = ray.get(self._reader.read.remote([reference]))
        if total != float(self._array.sum()):
            raise RuntimeError("the get returned other values than the put sent")
        return put_seconds, get_seconds, read_seconds


@contextmanager
def _started() -> Iterator[Commands]:
    with ray_cluster(cpu_count=1, object_store_bytes=_OBJECT_STORE_BYTES):
        load = _Load(_Reader.remote())
        yield {
            "versions": lambda: {package: version(package) for package in ("ray", "numpy")},
            "load": load.load,
            "round_trip": load.round_trip,
        }


if __name__ == "__main__":
    serve(_started())
