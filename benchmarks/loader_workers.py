"""Do worker processes bring batches faster than threads to a training step that holds the interpreter lock?

One rank trains on micro-batches of text, or of large tensors, and each takes a step of pure Python: a fixed number of
turns of a loop, which never gives up the interpreter lock by itself. The same steps are made with micro-batches in
memory, with the loader's thread, with two threads that have a client each, and with worker processes: on the host of
the service, with which memory is shared, and over the wire, as a trainer on another host gets them.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks.harness import Options, interleave, main, median, median_ratio
from benchmarks.report import Aim, Report
from tq_service.data import StreamingDataLoader, StreamingDataset, split_micro_batches
from tq_service.testing import ServiceProcess

STEP_SECONDS = 0.020
BATCH_COUNT, BATCH_COUNT_QUICK = 8, 2
LEAST_OF_WORKERS = 0.97
_TEXT_WORDS = 1_500
_TENSOR_VALUES = 1 << 20  # float32: 4 MiB
_WARM_UP_BATCHES = 1  # until the workers have started and the first batches are there
_FIELDS = ["column", "uid"]

MicroBatches = Iterable[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What micro-batches hold; samples of a batch and of a micro-batch."""

    name: str
    is_text: bool
    batch_size: int
    micro_batch_size: int

    def claim(self) -> dict[str, Any]:
        """Return what a rank asks for."""
        return {
            "partition_id": self.name,
            "task_name": "update_actor",
            "data_fields": _FIELDS,
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "dp_rank": 0,
            "dp_size": 1,
        }

    def column(self) -> Any:
        """Return a batch of samples."""
        if self.is_text:
            words = np.array(["one", "token", "after", "the", "öther"])
            picks = np.random.default_rng(0).integers(0, words.size, (self.batch_size, _TEXT_WORDS))
            return [" ".join(row) for row in words[picks]]
        return torch.ones(self.batch_size, _TENSOR_VALUES)


TRANSPORTS = {"one host": (), "wire": ("--shared-memory", "off")}  # flags of the service
CONTENTS = (
    Content(name="8 texts of 7 kB", is_text=True, batch_size=64, micro_batch_size=8),
    Content(name="64 texts of 7 kB", is_text=True, batch_size=256, micro_batch_size=64),
    Content(name="1 tensor of 4 MiB", is_text=False, batch_size=8, micro_batch_size=1),
    Content(name="4 tensors of 4 MiB", is_text=False, batch_size=16, micro_batch_size=4),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the partition: micro-batches a second, and the share of the time that it waited for them."""

    rate: float
    waiting: float


def _turns(seconds: float) -> int:
    """Return how many turns of the loop take so long."""
    turns = 100_000
    return round(turns * seconds / min(_timed(turns) for _ in range(20)))


def _timed(turns: int) -> float:
    started = time.perf_counter()
    _hold_lock(turns)
    return time.perf_counter() - started


def _hold_lock(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn
    return total


def _train(micro_batches: Callable[[], MicroBatches], content: Content, turns: int) -> Run:
    """Make a step with each micro-batch, and count from the warm-up on."""
    started = waited = 0.0
    iterator = iter(micro_batches())
    for number in count(-_WARM_UP_BATCHES * content.batch_size // content.micro_batch_size):
        asked = time.perf_counter()
        if number == 0:
            started, waited = asked, 0.0
        if next(iterator, None) is None:
            seconds = time.perf_counter() - started
            return Run(number / seconds, waited / seconds)
        waited += time.perf_counter() - asked
        _hold_lock(turns)
    raise AssertionError


def _fetch(client: tq.Client, content: Content, batch_index: int) -> list[Any]:
    """Return the micro-batches of a batch, none after the last one."""
    meta = client.get_meta(**content.claim(), batch_index=batch_index)
    return [] if meta.status == "end" else list(split_micro_batches(client.get_data(meta), meta))


class _Threads:
    """Threads with a client each that fetch as far ahead as the loader does."""

    def __init__(self, address: str, content: Content, thread_count: int) -> None:
        self._content = content
        self._clients = [tq.Client(address) for _ in range(thread_count)]
        self._free = deque(self._clients)
        self._threads = ThreadPoolExecutor(thread_count)

    def __iter__(self) -> Iterator[Any]:
        ahead: deque[Future[list[Any]]] = deque()
        for batch_index in count():
            while len(ahead) < 2 * len(self._clients):
                ahead.append(self._threads.submit(self._fetch, batch_index + len(ahead)))
            micro_batches = ahead.popleft().result()
            if not micro_batches:
                for future in ahead:
                    future.cancel()
                return
            yield from micro_batches

    def _fetch(self, batch_index: int) -> list[Any]:
        client = self._free.popleft()
        try:
            return _fetch(client, self._content, batch_index)
        finally:
            self._free.append(client)

    def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients:
            client.close()


class _Loader:
    """A loader that goes through the partition again and again; workers stay alive as they do in training."""

    def __init__(self, address: str, content: Content, num_workers: int) -> None:
        self._loader = StreamingDataLoader(StreamingDataset(address, **content.claim()), num_workers)

    def __iter__(self) -> Iterator[Any]:
        self._loader.reset()
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()


def _measure(address: str, content: Content, batch_count: int, turns: int, repeats: int) -> dict[str, list[Run]]:
    with tq.Client(address) as client, ExitStack() as stack:
        for _ in range(batch_count + _WARM_UP_BATCHES):
            uid = torch.arange(content.batch_size)
            client.put({"column": content.column(), "uid": uid}, partition_id=content.name)
        client.seal_partition(content.name)
        in_memory = [part for batch in range(batch_count + 1) for part in _fetch(client, content, batch)]
        ways: dict[str, MicroBatches] = {"all in memory": in_memory}
        fetching: dict[str, _Loader | _Threads] = {
            "one thread (num_workers=0)": _Loader(address, content, 0),
            "two threads": _Threads(address, content, 2),
            "one worker process": _Loader(address, content, 1),
            "two worker processes": _Loader(address, content, 2),
        }
        for name, way in fetching.items():
            stack.callback(way.close)
            ways[name] = way
        cases = {name: partial(_train, partial(iter, way), content, turns) for name, way in ways.items()}
        runs = interleave(cases, repeats)
        client.clear_partition(content.name)
        return runs


def _report(found: dict[str, dict[str, list[Run]]]) -> Report:
    rows: list[list[str | float | None]] = []
    aims = []
    for name, runs in found.items():
        for way, repeats in runs.items():
            rates = [run.rate for run in repeats]
            limit = [run.rate for run in runs["all in memory"]]
            waiting = 100 * median([run.waiting for run in repeats])
            rows.append([f"{name}: {way}", median(rates), median_ratio(rates, limit), waiting])
        threads = _best(runs, "thread")
        workers = _best(runs, "worker")
        aims.append(
            Aim(
                what=f"{name}: threads / worker processes, the better of each in its repeat",
                measured=median_ratio(threads, workers),
                wanted=LEAST_OF_WORKERS,
            )
        )
    return Report(
        name="loader_workers",
        question="Do worker processes bring batches faster than threads to a step that holds the interpreter lock?",
        columns=["micro-batches of: how", "micro-batches/s", "of all in memory", "waiting, %"],
        rows=rows,
        notes=[
            f"a step is a loop in Python that takes {1e3 * STEP_SECONDS:.0f} ms alone; from the second batch on",
            "the service runs on the same cores",
        ],
        aims=aims,
    )


def _best(runs: dict[str, list[Run]], kind: str) -> list[float]:
    of_kind = [[run.rate for run in repeats] for way, repeats in runs.items() if kind in way]
    return [max(rates) for rates in zip(*of_kind, strict=True)]


def run(options: Options) -> Report:
    """Measure."""
    batch_count, turns = BATCH_COUNT_QUICK if options.quick else BATCH_COUNT, _turns(STEP_SECONDS)
    found: dict[str, dict[str, list[Run]]] = {}
    for transport, flags in TRANSPORTS.items():
        with ServiceProcess(*flags) as server:
            for content in CONTENTS:
                runs = _measure(server.address, content, batch_count, turns, options.repeats)
                found[f"{content.name}, {transport}"] = runs
    return _report(found)


if __name__ == "__main__":
    sys.exit(main(run))
