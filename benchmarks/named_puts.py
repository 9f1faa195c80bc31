"""How much more does a put of 16,384 samples cost with keys, groups and custom_meta, as columns and as dicts?

One client process and one service; each case puts one field of all samples into a separate partition. The ratio
depends on the payload, so it is measured with three: one int64 per sample, which is smaller than its key; 16; and 128,
the tokens of a short response.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, interleave_async, main, median, median_ratio, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

_SAMPLE_COUNT: Final = 16_384
_GROUP_SIZE: Final = 8
_REPEATS_OF_ONE: Final = 4  # a put takes a few milliseconds
_BARE = "bare"
_COLUMNS = "keys, groups and two columns of numbers"
_WIDTHS: Final = {"16 numbers a sample": 16, "128 tokens a sample": 128}
_WANTED: Final = 2.0


def _cases() -> dict[str, dict[str, Any]]:
    """Return the names and metadata that are put with the samples, by case."""
    numbers = range(_SAMPLE_COUNT)
    keys = [f"prompt-{number // _GROUP_SIZE:05d}/{number % _GROUP_SIZE}" for number in numbers]
    groups = [f"prompt-{number // _GROUP_SIZE:05d}" for number in numbers]
    columns = {"total_lengths": np.arange(_SAMPLE_COUNT), "reward": np.linspace(0, 1, _SAMPLE_COUNT)}
    lists: dict[str, list[Any]] = {name: values.tolist() for name, values in columns.items()}
    rows = [dict(zip(lists, each, strict=True)) for each in zip(*lists.values(), strict=True)]
    named: dict[str, Any] = {"keys": keys, "groups": groups, "group_size": _GROUP_SIZE}
    return {
        _BARE: {},
        "keys": {"keys": keys},
        "groups": {"groups": groups, "group_size": _GROUP_SIZE},
        "two columns of numbers": {"custom_meta": columns},
        _COLUMNS: {**named, "custom_meta": columns},
        "a column of text": {"custom_meta": {"prompt": groups}},
        "keys, groups and a dict per sample": {**named, "custom_meta": rows},
    }


async def _seconds(client: tq.AsyncClient, data: Mapping[str, Any], named: Mapping[str, Any]) -> float:
    """Return the seconds of a put into a separate partition."""
    partition_id = secrets.token_hex(8)
    await client.create_partition(partition_id)
    started = time.perf_counter()
    await client.put(partition_id, data, **named)
    seconds = time.perf_counter() - started
    await client.clear_partition(partition_id)
    return seconds


async def _measure(options: Options, address: str) -> dict[str, list[float]]:
    one = {"x": np.arange(_SAMPLE_COUNT)}
    wide = {payload: {"x": np.ones((_SAMPLE_COUNT, width), np.int64)} for payload, width in _WIDTHS.items()}
    async with tq.AsyncClient(address) as client:
        named_cases = _cases()
        cases = {name: partial(_seconds, client, one, named) for name, named in named_cases.items()}
        for payload, data in wide.items():
            for name in (_BARE, _COLUMNS):
                cases[f"{payload}, {name}"] = partial(_seconds, client, data, named_cases[name])
        return await interleave_async(cases, options.repeats if options.quick else _REPEATS_OF_ONE * options.repeats)


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess() as server:
        seconds = run_async(_measure(options, server.address))
    bare = {
        name: next((f"{payload}, {_BARE}" for payload in _WIDTHS if name.startswith(payload)), _BARE)
        for name in seconds
    }
    ratios = {name: median_ratio(each, seconds[bare[name]]) for name, each in seconds.items()}
    rows: list[list[Cell]] = [[name, 1e3 * median(each), ratios[name]] for name, each in seconds.items()]
    return Report(
        name="named_puts",
        question="How much more does a put of 16,384 samples cost with keys, groups and custom_meta?",
        columns=["with", "ms", "of a bare put"],
        rows=rows,
        notes=[
            f"one int64 per sample if not stated, {_SAMPLE_COUNT // _GROUP_SIZE:,} groups of {_GROUP_SIZE}; each "
            "put into a separate partition, compared with a bare put of the same payload"
        ],
        aims=[
            Aim(
                what=f"{payload}, {_COLUMNS}, of a bare put",
                measured=ratios[f"{payload}, {_COLUMNS}"],
                wanted=_WANTED,
                at_least=False,
            )
            for payload in _WIDTHS
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
