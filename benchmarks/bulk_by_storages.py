"""How fast is a get whose samples lie on 1, 2 or 4 storage services, beside one of a single service?

A controller and storage services, each a process of its own that shares no memory with clients; puts fill the services
evenly, and the batch asks for the samples of all puts in an order that mixes them.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks.harness import Options, interleave, main, median, median_ratio
from benchmarks.report import Cell, Report
from tq_service.testing import ServiceProcess

STORAGE_COUNTS = (1, 2, 4)
STORAGE_COUNTS_QUICK = (1, 2)
_PUT_COUNT = 16
_PUT_BYTES = 4 << 20
_ROWS_A_PUT = 64
_PARTITION = "bulk"


class _Cluster:
    """A controller with storage services, all of them holding a share of one batch."""

    def __init__(self, address: str, storage_count: int) -> None:
        self.client = tq.Client(address, timeout=60.0)
        self._wait_for(storage_count)
        rows = torch.rand(_ROWS_A_PUT, _PUT_BYTES // _ROWS_A_PUT // 4)
        for _ in range(_PUT_COUNT):
            self.client.put({"x": rows}, partition_id=_PARTITION)
        order = np.random.default_rng(0).permutation(_PUT_COUNT * _ROWS_A_PUT).tolist()
        self._batch = self.client.get_meta(
            partition_id=_PARTITION, task_name="read", data_fields=["x"], batch_size=len(order)
        ).select_samples(order)
        if len(_owners(self._batch)) != storage_count:
            raise RuntimeError(
                f"the puts lie on {len(_owners(self._batch))} storage services, expected {storage_count}"
            )
        self._first = rows[order[0] % _ROWS_A_PUT]

    def _wait_for(self, storage_count: int) -> None:
        """Return when puts go to all storage services: they announce themselves soon after their start."""
        owners: set[str] = set()
        probe = torch.zeros(1, _PUT_BYTES // 4)
        for number in itertools.count():
            self.client.put({"x": probe}, partition_id="probe", keys=[str(number)])
            owners |= _owners(self.client.lookup_samples("probe", keys=[str(number)])[0])
            if len(owners) == storage_count:
                break
        self.client.clear_partition("probe")

    def get(self) -> float:
        """Return the seconds of a get."""
        started = time.perf_counter()
        batch = self.client.get_data(self._batch)
        seconds = time.perf_counter() - started
        if not torch.equal(batch["x"][0], self._first):
            raise RuntimeError("what was got is not what was put")
        return seconds


def _owners(batch: tq.BatchMeta) -> set[str]:
    return {put.storage.storage_id for put in batch.locations.puts}


@contextmanager
def _running_cluster(storage_count: int) -> Iterator[_Cluster]:
    with ExitStack() as stack:
        controller = stack.enter_context(ServiceProcess("--role", "controller"))
        flags = ("--role", "storage", "--controller", controller.address, "--shared-memory", "off")
        for number in range(storage_count):
            stack.enter_context(ServiceProcess(*flags, "--storage-id", f"storage-{number}"))
        cluster = _Cluster(controller.address, storage_count)
        stack.enter_context(cluster.client)
        yield cluster


def run(options: Options) -> Report:
    """Measure."""
    counts = STORAGE_COUNTS_QUICK if options.quick else STORAGE_COUNTS
    with ExitStack() as stack:
        clusters = {count: stack.enter_context(_running_cluster(count)) for count in counts}
        cases: dict[str, Callable[[], Any]] = {str(count): partial(cluster.get) for count, cluster in clusters.items()}
        times = interleave(cases, options.repeats * 3)
    size = _PUT_COUNT * _PUT_BYTES
    rows: list[list[Cell]] = [
        [int(count), median(seconds) * 1e3, size / 1e9 / median(seconds), median_ratio(times["1"], seconds)]
        for count, seconds in times.items()
    ]
    return Report(
        name="bulk_by_storages",
        question="How fast is a get whose samples lie on 1, 2 or 4 storage services, beside one of a single service?",
        columns=["storage services", "get, ms", "get, GB/s", "of one service"],
        rows=rows,
        notes=[
            f"GB are 10^9 bytes; a batch of {size >> 20} MiB, {_PUT_COUNT} puts of {_ROWS_A_PUT} rows of "
            f"{_PUT_BYTES // _ROWS_A_PUT >> 10} KiB in random order; tq.Client",
            "services and client share the cores of one machine: more services can only help as far as there are cores",
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
