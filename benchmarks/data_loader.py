"""How much of its time does a trainer rank wait for data when producers are fast enough?

One rank trains on batches of RL samples with jagged token columns, dense columns and text. Each micro-batch takes a
step of a fixed time with the CPU free, as while a GPU computes. The same steps are made with the micro-batches of the
same partition in memory, which is the limit. They are also made with a plain loop of `get_meta`, `get_data` and
`split_micro_batches`, which a trainer would have to write without the loader.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks.harness import Options, interleave, main, median
from benchmarks.lengths import lognormal_lengths
from benchmarks.report import Aim, Plot, Report
from tq_service.data import StreamingDataLoader, StreamingDataset, split_micro_batches
from tq_service.testing import ServiceProcess

BATCH_SIZE = 64
MICRO_BATCH_SIZE = 8
BATCH_COUNT, BATCH_COUNT_QUICK = 4, 2
STEP_SECONDS = (0.020, 0.005, 0.0)
MOST_WAITING = 0.03
_PARTITION = "train"
_FIELDS = {
    "input_ids": torch.int64,
    "response_mask": torch.bool,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "advantages": torch.float32,
}
_DATA_FIELDS = [*_FIELDS, "reward", "uid"]
# A trainer always waits until the workers have started and the first batches have come.
_WARM_UP_BATCHES = 1

MicroBatches = Iterable[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the partition: total seconds, seconds waited for micro-batches, and number of micro-batches."""

    seconds: float
    waited: float
    steps: int

    @property
    def waiting(self) -> float:
        """Share of the time that the trainer waited."""
        return self.waited / self.seconds

    @property
    def rate(self) -> float:
        """Micro-batches per second."""
        return self.steps / self.seconds


def _columns(lengths: Any, first: int) -> dict[str, Any]:
    offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
    token_count = int(lengths.sum())
    columns: dict[str, Any] = {
        name: torch.nested.nested_tensor_from_jagged(torch.ones(token_count, dtype=dtype), offsets)
        for name, dtype in _FIELDS.items()
    }
    columns["reward"] = torch.rand(lengths.size)
    columns["uid"] = [f"sample-{first + at}" for at in range(lengths.size)]
    return columns


def _fill(client: tq.Client, batch_count: int) -> int:
    """Put the samples, and return the bytes of a batch."""
    lengths = lognormal_lengths(BATCH_SIZE * batch_count)
    for first in range(0, lengths.size, BATCH_SIZE):
        part = lengths[first : first + BATCH_SIZE]
        client.put(
            _PARTITION,
            _columns(part, first),
            groups=[f"prompt-{(first + at) // 8}" for at in range(part.size)],
            custom_meta=[{"total_lengths": int(length)} for length in part],
        )
    client.seal_partition(_PARTITION)
    return int(lengths.sum()) * sum(dtype.itemsize for dtype in _FIELDS.values()) // batch_count


def _claim(batch_size: int = BATCH_SIZE) -> dict[str, Any]:
    return {
        "partition_id": _PARTITION,
        "task_name": "update_actor",
        "data_fields": _DATA_FIELDS,
        "batch_size": batch_size,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "dp_rank": 0,
        "dp_size": 1,
        "sampler": "seqlen_balanced",
        "sampler_config": {"n_samples_per_prompt": 8},
    }


def _train(micro_batches: MicroBatches, step_seconds: float) -> Run:
    """Make a step with each micro-batch, and count after the warm-up."""
    per_batch = BATCH_SIZE // MICRO_BATCH_SIZE
    started = waited = 0.0
    steps = 0
    iterator = iter(micro_batches)
    for number in count(1 - _WARM_UP_BATCHES * per_batch):
        asked = time.perf_counter()
        if number == 1:
            started = asked
        if next(iterator, None) is None:
            break
        if number > 0:
            waited += time.perf_counter() - asked
            steps += 1
        if step_seconds:
            time.sleep(step_seconds)
    return Run(time.perf_counter() - started, waited, steps)


def _plain_loop(client: tq.Client) -> Iterator[Any]:
    """Claim, fetch and split one batch after another."""
    for batch_index in count():
        meta = client.get_meta(**_claim(), batch_index=batch_index)
        if meta.status == "end":
            return
        yield from split_micro_batches(client.get_data(meta), meta)


class _Loader:
    """A loader that reads the partition repeatedly; its workers stay alive as in training."""

    def __init__(self, address: str, num_workers: int, prefetch_factor: int) -> None:
        self._loader = StreamingDataLoader(StreamingDataset(address, **_claim()), num_workers, prefetch_factor)

    def __iter__(self) -> Iterator[Any]:
        self._loader.reset()
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()


@contextmanager
def _ways(address: str, client: tq.Client) -> Iterator[dict[str, Callable[[], MicroBatches]]]:
    """Yield the ways to get micro-batches, each as a function that starts at the first one."""
    in_memory = list(_plain_loop(client))
    loaders = {
        "loader, nothing ahead": _Loader(address, 0, 0),
        "loader, num_workers=0": _Loader(address, 0, 2),
        "loader, num_workers=1": _Loader(address, 1, 2),
        "loader, num_workers=2": _Loader(address, 2, 2),
    }
    ways: dict[str, Callable[[], MicroBatches]] = {
        "all in memory": lambda: in_memory,
        "get_meta + get_data": partial(_plain_loop, client),
    }
    try:
        yield ways | {name: partial(iter, loader) for name, loader in loaders.items()}
    finally:
        for loader in loaders.values():
            loader.close()


def _measure(options: Options, address: str) -> Report:
    batch_count = (BATCH_COUNT_QUICK if options.quick else BATCH_COUNT) + _WARM_UP_BATCHES
    rows: list[list[str | float | None]] = []
    waiting: dict[tuple[str, float], float] = {}
    with tq.Client(address) as client:
        batch_bytes = _fill(client, batch_count)
        with _ways(address, client) as ways:
            for step_seconds in STEP_SECONDS:
                cases = {name: partial(_once, way, step_seconds) for name, way in ways.items()}
                if not step_seconds:
                    del cases["all in memory"]
                runs = interleave(cases, options.repeats)
                for name, repeats in runs.items():
                    waiting[name, step_seconds] = median([run.waiting for run in repeats])
                    rows.append(_row(name, step_seconds, repeats, runs.get("all in memory", repeats)))
    return _report(rows, waiting, batch_bytes)


def _row(name: str, step_seconds: float, repeats: list[Run], limits: list[Run]) -> list[str | float | None]:
    of_limit = median([run.rate / limit.rate for run, limit in zip(repeats, limits, strict=True)])
    return [
        f"{1e3 * step_seconds:.0f} ms: {name}",
        median([run.rate for run in repeats]),
        of_limit if step_seconds else None,
        100 * median([run.waiting for run in repeats]) if step_seconds else None,
        1e3 * median([run.waited / run.steps for run in repeats]),
    ]


def _once(way: Callable[[], MicroBatches], step_seconds: float) -> Run:
    return _train(way(), step_seconds)


def _report(rows: list[list[str | float | None]], waiting: dict[tuple[str, float], float], batch_bytes: int) -> Report:
    names = list(dict.fromkeys(name for name, _ in waiting))
    return Report(
        name="data_loader",
        question="How much of its time does a trainer rank wait for data when producers are fast enough?",
        columns=["step: how", "micro-batches/s", "of all in memory", "waiting, %", "wait for one, ms"],
        rows=rows,
        notes=[
            f"batches of {BATCH_SIZE} samples, {batch_bytes / 1e6:.1f} MB in {len(_FIELDS)} jagged columns, one dense "
            f"and one of text; micro-batches of {MICRO_BATCH_SIZE}, balanced by their tokens",
            "a step is a sleep; from the second batch on",
            "0 ms: the maximum rate",
        ],
        aims=[
            Aim(
                what=f"waiting with steps of {1e3 * step:.0f} ms, {name}",
                measured=waiting[name, step],
                wanted=MOST_WAITING,
                at_least=False,
            )
            for step in STEP_SECONDS[:1]
            for name in names
            if "num_workers" in name
        ],
        plots=[
            Plot(
                name="data_loader",
                title="Share of a trainer's time spent waiting",
                x_label="",
                y_label="%",
                bars=True,
                series={
                    f"steps of {1e3 * step:.0f} ms": [(name, 100 * waiting[name, step]) for name in names]
                    for step in STEP_SECONDS
                    if step
                },
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess() as server:
        return _measure(options, server.address)


if __name__ == "__main__":
    sys.exit(main(run))
