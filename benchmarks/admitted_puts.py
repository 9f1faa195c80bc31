"""How much more does a put cost into a partition that counts outstanding work?

One client process and one service; each case puts groups of 8 samples one after another into a separate partition. An
admission of the partition counts the samples or the groups, and never makes them wait.
"""

from __future__ import annotations

import secrets
import sys
import time
from functools import partial
from typing import Final

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, interleave_async, main, median, median_ratio, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

_GROUP_SIZE: Final = 8
_PUT_COUNT: Final = 50
_REPEATS_OF_ONE: Final = 8  # a put takes about a millisecond
_TASK: Final = "update_actor"
_BARE: Final = "no admission"
_WANTED: Final = 1.15
_CASES: Final = {
    _BARE: (),
    "samples, until delivered": (tq.Admission(_TASK, most=1 << 20),),
    "groups, until delivered": (tq.Admission(_TASK, most=1 << 20, unit="group"),),
    "groups, until published": (tq.Admission(_TASK, most=1 << 20, unit="group", given_back="published"),),
    "groups, some of them held": (tq.Admission(_TASK, most=1 << 20, unit="group", most_running=1 << 20),),
}


async def _seconds(client: tq.AsyncClient, admissions: tuple[tq.Admission, ...]) -> float:
    """Return the mean seconds of many puts into a separate partition."""
    partition_id, data = secrets.token_hex(8), {"x": np.ones((_GROUP_SIZE, 128), np.int64)}
    await client.create_partition(partition_id, admissions=admissions)
    began_at = time.perf_counter()
    for number in range(_PUT_COUNT):
        await client.put(partition_id, data, groups=[str(number)] * _GROUP_SIZE, group_size=_GROUP_SIZE)
    seconds = (time.perf_counter() - began_at) / _PUT_COUNT
    await client.clear_partition(partition_id)
    return seconds


async def _measure(options: Options, address: str) -> dict[str, list[float]]:
    async with tq.AsyncClient(address) as client:
        cases = {name: partial(_seconds, client, admissions) for name, admissions in _CASES.items()}
        return await interleave_async(cases, options.repeats if options.quick else _REPEATS_OF_ONE * options.repeats)


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess() as server:
        seconds = run_async(_measure(options, server.address))
    ratios = {name: median_ratio(each, seconds[_BARE]) for name, each in seconds.items()}
    rows: list[list[Cell]] = [[name, 1e3 * median(each), ratios[name]] for name, each in seconds.items()]
    return Report(
        name="admitted_puts",
        question="How much more does a put cost into a partition that counts outstanding work?",
        columns=["what the admission counts", "ms", "of a bare put"],
        rows=rows,
        notes=[f"the mean of {_PUT_COUNT} puts of a group of {_GROUP_SIZE} samples with 128 numbers each; none waits"],
        aims=[
            Aim(
                what="largest cost of an admitted put, of a bare one",
                measured=max(ratios.values()),
                wanted=_WANTED,
                at_least=False,
            )
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
