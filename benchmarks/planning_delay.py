"""Do other requests wait while the controller plans large batches?

One process claims batches of 16,384 samples for 8 ranks one after another, each a new plan; another claims 8 samples at
a time from another partition and measures the latency.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np

import tq_service as tq
from benchmarks.harness import ROOT, Options, interleave_async, main, median, p50_p99, run_async
from benchmarks.lengths import lognormal_lengths
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

_SAMPLES, _RANKS, _CAP = 16_384, 8, 32_768
_CLAIMS_A_REPEAT = 400
_BATCH_SIZE = 8
_MOST_MS = 5.0
_LOAD_FLAG = "--load"

LOADS: Mapping[str, Mapping[str, object] | None] = {
    "nothing": None,
    "sequential": {},
    "seqlen_balanced": {},
    "token_budget": {"tokens_per_rank": 16 * _CAP, "tokens_per_micro_batch": _CAP},
    "packed": {"optimizer_steps": 4, "pack_max_length": _CAP},
}


@contextmanager
def _load(address: str, sampler: str, config: Mapping[str, object] | None) -> Iterator[None]:
    """Keep large batches being planned until the block ends."""
    if config is None:
        yield
        return
    arguments = [address, sampler, json.dumps(config)]
    command = [sys.executable, "-m", "benchmarks.planning_delay", _LOAD_FLAG, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError(f"the load ended with exit code {process.wait()}")
            yield
        finally:
            process.kill()


async def _latencies(client: tq.AsyncClient, address: str, sampler: str) -> list[float]:
    task = secrets.token_hex(8)
    latencies = []
    with _load(address, sampler, LOADS[sampler]):
        for _ in range(_CLAIMS_A_REPEAT):
            started = time.perf_counter()
            await client.get_meta(partition_id="small", task_name=task, data_fields=["x"], batch_size=_BATCH_SIZE)
            latencies.append(time.perf_counter() - started)
    return latencies


async def _measure(options: Options, address: str) -> Report:
    lengths = lognormal_lengths(_SAMPLES)
    async with tq.AsyncClient(address, timeout=60.0) as client:
        for start in range(0, _SAMPLES, 4_096):
            meta = [{"total_lengths": length} for length in lengths[start : start + 4_096].tolist()]
            await client.put("large", {"x": np.arange(len(meta))}, custom_meta=meta)
        await client.put("small", {"x": np.arange(_CLAIMS_A_REPEAT * _BATCH_SIZE)})
        cases = {sampler: partial(_latencies, client, address, sampler) for sampler in LOADS}
        found = await interleave_async(cases, options.repeats)
    rows: list[list[Cell]] = []
    for sampler, repeats in found.items():
        p50, p99 = p50_p99(repeats)
        rows.append([sampler, p50, p99, 1e3 * median([max(repeat) for repeat in repeats])])
    others = float(rows[1][2] or 0)
    return Report(
        name="planning_delay",
        question="Do other requests wait while the controller plans large batches?",
        columns=["planned meanwhile", "p50, ms", "p99, ms", "longest, ms"],
        rows=rows,
        notes=[
            f"latency of claims of {_BATCH_SIZE} samples, {_CLAIMS_A_REPEAT} a repeat, while batches of {_SAMPLES:,} "
            f"samples are planned for {_RANKS} ranks, one after another, each for a new task",
            "sequential plans nothing: its cost is creating tasks, recording batches and answering",
        ],
        aims=[
            Aim(what=f"{row[0]}: p99 above that of sequential, ms", measured=float(row[2] or 0) - others,
                wanted=_MOST_MS, at_least=False)
            for row in rows[2:]
        ],
    )  # fmt: skip


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess("--max-tasks", "65536") as server:  # each batch has a new task
        return run_async(_measure(options, server.address))


def plan_without_end(address: str, sampler: str, config: str) -> None:
    """Claim large batches one after another, each for a new task, until the process is stopped."""
    with tq.Client(address) as client:
        while True:
            meta = client.get_meta(
                partition_id="large",
                task_name=secrets.token_hex(8),
                data_fields=["x"],
                batch_size=_SAMPLES // _RANKS,
                sampler=sampler,
                sampler_config=json.loads(config),
                dp_rank=0,
                dp_size=_RANKS,
                batch_index=0,
            )
            print(meta.size, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_LOAD_FLAG]:
        plan_without_end(*sys.argv[2:])
    sys.exit(main(run))
