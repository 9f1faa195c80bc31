"""How fast do tensors go from a GPU into the service and back, and does a trainer on the GPU wait for its batches?

Puts and gets are compared with a copy of the same size between the device and pinned memory, which is the limit. A
trainer's step is matrix products of 5 or 20 ms; the same steps are also made with the batches already on the device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks.harness import Options, command_line, given_options, interleave, median, median_ratio, show
from benchmarks.lengths import lognormal_lengths
from benchmarks.report import Aim, Cell, Report
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import ServiceProcess

BY = ("put", "get", "loader")
_SIZES = (64 << 20, 256 << 20)
_ROW_ITEMS = 1 << 16
_WANTED = {"put": 0.8, "get": 0.85}
_MOST_WAITING = {0.005: 0.03, 0.020: 0.01}
_WORKERS = (0, 2)
_BATCH_BYTES = 8 << 20
_BATCH_COUNT, _BATCH_COUNT_QUICK = 40, 8
_WARM_UP_COUNT = 4  # a trainer always waits until the workers have started
_FIELDS = {"input_ids": torch.int64, "logprobs": torch.float32, "advantages": torch.float32}
_PRODUCT_SIZE = 2048
_QUESTIONS = {
    "put": "How fast do tensors of a GPU go into the service, compared with a copy to pinned memory?",
    "get": "How fast do tensors come from the service to a GPU, compared with a copy from pinned memory?",
    "loader": "How much of its time does a trainer on a GPU wait for data?",
}


def _seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of some work, including its work on the current stream."""
    torch.cuda.current_stream().synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.current_stream().synchronize()
    seconds = time.perf_counter() - began
    del result
    return seconds


class _Trip:
    """Puts and gets of one size, and the copies to compare them with."""

    def __init__(self, client: tq.Client, size: int) -> None:
        self._client = client
        self._partition = f"gpu-{size}"
        self._there = torch.rand(size // (4 * _ROW_ITEMS), _ROW_ITEMS, device="cuda")
        self._pinned = torch.empty(self._there.shape, pin_memory=True)
        self._meta = self.put()

    def put(self) -> tq.BatchMeta:
        """Replace the data of the last put, as in the long run."""
        self._client.clear_partition(self._partition, missing_ok=True)
        self._meta = self._client.put(self._partition, {"x": self._there})
        return self._meta

    def get(self) -> Any:
        return self._client.get_data(self._meta, device="cuda")

    def copy_down(self) -> Any:
        return self._pinned.copy_(self._there, non_blocking=True)

    def copy_up(self) -> Any:
        return self._there.copy_(self._pinned, non_blocking=True)

    def check(self) -> None:
        """Raise if a get returns other values than the put sent."""
        self.put()
        if not torch.equal(self.get()["x"], self._there):
            raise RuntimeError("the get returned other values than the put sent")


def _by_transfer(by: str, options: Options, address: str) -> tuple[list[list[Cell]], list[Aim]]:
    rows: list[list[Cell]] = []
    aims = []
    with tq.Client(address) as client:
        for size in _SIZES[:1] if options.quick else _SIZES:
            trip = _Trip(client, size)
            trip.check()
            ours, beside = (trip.put, trip.copy_down) if by == "put" else (trip.get, trip.copy_up)
            times = interleave({"ours": partial(_seconds, ours), "beside": partial(_seconds, beside)}, options.repeats)
            ratio = median_ratio(times["beside"], times["ours"])
            rates = [size / 1e9 / median(times[name]) for name in ("ours", "beside")]
            rows.append([f"{size >> 20} MiB", *rates, ratio])
            aims.append(Aim(what=f"{by} of {size >> 20} MiB / pinned copy", measured=ratio, wanted=_WANTED[by]))
    return rows, aims


def _fill(client: tq.Client, batch_count: int) -> int:
    """Put jagged batches of 8 MiB, and return the number of samples in each."""
    lengths = lognormal_lengths(1 << 14)
    token_bytes = sum(dtype.itemsize for dtype in _FIELDS.values())
    rows = int(np.searchsorted(np.cumsum(lengths), _BATCH_BYTES // token_bytes))
    part = lengths[:rows]
    offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(part)]))
    columns = {
        name: torch.nested.nested_tensor_from_jagged(torch.ones(int(part.sum()), dtype=dtype), offsets)
        for name, dtype in _FIELDS.items()
    }
    for _ in range(batch_count):
        client.put("train", columns)
    client.seal_partition("train")
    return rows


class _Step:
    """Matrix products that take a given time, after reading from the batch."""

    def __init__(self, seconds: float) -> None:
        self._factor = torch.rand(_PRODUCT_SIZE, _PRODUCT_SIZE, device="cuda")
        once = min(_seconds(lambda: self._products(20)) for _ in range(5)) / 20
        self._count = max(1, round(seconds / once))

    def _products(self, number: int) -> None:
        for _ in range(number):
            torch.mm(self._factor, self._factor)

    def __call__(self, batch: Any) -> None:
        batch["input_ids"].values().sum()
        self._products(self._count)
        torch.cuda.current_stream().synchronize()  # like a trainer that reads its loss


def _train(batches: Iterable[Any], step: _Step) -> float:
    """Return the seconds per step after the warm-up."""
    began, steps = 0.0, 0
    for number, (batch, _) in zip(count(1), batches, strict=False):
        step(batch)
        if number == _WARM_UP_COUNT:
            began = time.perf_counter()
        steps = number - _WARM_UP_COUNT
        del batch
    return (time.perf_counter() - began) / steps


def _by_loader(options: Options, address: str) -> tuple[list[list[Cell]], list[Aim]]:
    batch_count = (_BATCH_COUNT_QUICK if options.quick else _BATCH_COUNT) + _WARM_UP_COUNT
    with tq.Client(address) as client:
        rows_of_batch = _fill(client, batch_count)

    def loader(workers: int) -> StreamingDataLoader:
        dataset = StreamingDataset(
            address,
            batch_size=rows_of_batch,
            data_fields=list(_FIELDS),
            partition_id="train",
            task_name=f"update_actor_{workers}",
        )
        return StreamingDataLoader(dataset, workers, device="cuda")

    loaders = {f"num_workers={workers}": loader(workers) for workers in _WORKERS}
    there = list(loaders["num_workers=0"])

    def again(loader: StreamingDataLoader) -> Iterator[Any]:
        loader.reset()
        return iter(loader)

    rows: list[list[Cell]] = []
    aims = []
    for seconds, most in _MOST_WAITING.items():
        step = _Step(seconds)
        cases = {"on the device": lambda step=step: _train(there, step)} | {
            name: lambda each=each, step=step: _train(again(each), step) for name, each in loaders.items()
        }
        times = interleave(cases, options.repeats)
        for name in loaders:
            waiting = 1 - median_ratio(times["on the device"], times[name])
            rows.append([f"{seconds * 1e3:.0f} ms, {name}", 1e3 * median(times[name]), waiting])
            what = f"share of waiting with steps of {seconds * 1e3:.0f} ms, {name}"
            aims.append(Aim(what=what, measured=waiting, wanted=most, at_least=False))
    for each in loaders.values():
        each.close()
    return rows, aims


def measure(options: Options, by: str) -> Report:
    """Measure one of `BY`; without a GPU nothing is measured, as the report then notes."""
    columns = ["what", "ours, GB/s", "pinned copy, GB/s", "ours / pinned copy"]
    if by == "loader":
        columns = ["step", "ms a step", "share of waiting"]
    notes = ["GB are 10^9 bytes", "shared memory on, one process puts and gets"]
    rows: list[list[Cell]] = []
    wanted = _WANTED.get(by, _MOST_WAITING[0.020])
    aims = [Aim(what=f"{by}, which needs a GPU", measured=None, wanted=wanted, at_least=by in _WANTED)]
    if not torch.cuda.is_available():
        notes = ["nothing was measured: torch sees no CUDA device on this machine"]
    else:
        notes.append(torch.cuda.get_device_name())
        with ServiceProcess() as service:
            if by == "loader":
                rows, aims = _by_loader(options, service.address)
            else:
                rows, aims = _by_transfer(by, options, service.address)
    return Report(
        name=f"gpu_by_{by}", question=_QUESTIONS[by], columns=columns, rows=rows, notes=notes, aims=aims, plots=[]
    )


def run(options: Options) -> Report:
    """Measure puts."""
    return measure(options, BY[0])


def main() -> int:
    """Measure the variable that `--by` chooses."""
    parser = command_line(run)
    parser.add_argument("--by", choices=BY, default=BY[0], help="what to measure")
    given = parser.parse_args()
    show(measure(given_options(given), given.by), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
