"""How much padding do packs leave, and how much waiting for the heaviest rank, compared with simpler ways to pack?

On a recorded trace with 8 ranks, 4 optimizer steps and packs of 16,384 tokens; all of the trace, and batches of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Options, main, median
from benchmarks.lengths import lognormal_lengths, trace_lengths
from benchmarks.report import Cell, Plot, Report
from tq_service.balancing import karmarkar_karp, plan_packs

Int64s = NDArray[np.int64]
Packs = list[list[list[list[int]]]]

RANKS, STEPS, CAP = 8, 4, 16_384
_BATCHES = (512, 1_024, 4_096)


def next_fit(lengths: Int64s) -> Packs:
    """Fill packs one after another in sample order, then deal them to ranks and steps in turn."""
    packs: list[list[int]] = []
    remaining = 0
    for sample, length in enumerate(lengths.tolist()):
        if length > remaining:
            packs.append([])
            remaining = CAP
        packs[-1].append(sample)
        remaining -= length
    return _alike([[packs[rank + RANKS * step :: RANKS * STEPS] for step in range(STEPS)] for rank in range(RANKS)])


def karmarkar_karp_packs(lengths: Int64s) -> Packs:
    """Split by Karmarkar-Karp over ranks (equal sizes), steps and packs; add packs while any is over the cap."""
    usable = lengths.size // RANKS * RANKS
    ranks = [np.array(part) for part in karmarkar_karp(lengths[:usable], RANKS, True)]
    for rank, sample in enumerate(range(usable, lengths.size)):
        ranks[rank] = np.append(ranks[rank], sample)
    return _alike([[_split(part, lengths) for part in _parts(rank, lengths, STEPS)] for rank in ranks])


def _parts(samples: Int64s, lengths: Int64s, count: int) -> list[Int64s]:
    return [samples[part] for part in karmarkar_karp(lengths[samples], count, False)]


def _split(samples: Int64s, lengths: Int64s) -> list[list[int]]:
    count = -(-int(lengths[samples].sum()) // CAP)
    while True:
        packs = _parts(samples, lengths, count)
        if max(lengths[pack].sum() for pack in packs) <= CAP:
            return [pack.tolist() for pack in packs]
        count += 1


def _alike(packs: Packs) -> Packs:
    """Add empty packs until all ranks have the same number in each step."""
    counts = [max(1, *(len(steps[step]) for steps in packs)) for step in range(STEPS)]
    return [[step + [[]] * (count - len(step)) for step, count in zip(steps, counts, strict=True)] for steps in packs]


def _ours(even_steps: bool) -> Callable[[Int64s], Packs]:
    def plan(lengths: Int64s) -> Packs:
        return plan_packs(
            lengths, dp_size=RANKS, optimizer_steps=STEPS, pack_max_length=CAP, even_steps=even_steps
        ).packs

    return plan


METHODS: dict[str, Callable[[Int64s], Packs]] = {
    "plan_packs": _ours(True),
    "plan_packs, uneven steps": _ours(False),
    "next fit": next_fit,
    "Karmarkar-Karp": karmarkar_karp_packs,
}


def _cells(lengths: Int64s, method: Callable[[Int64s], Packs], repeats: int) -> list[Cell]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        packs = method(lengths)
        seconds.append(time.perf_counter() - started)
    tokens = np.array([[sum(int(lengths[pack].sum()) for pack in step) for step in steps] for steps in packs])
    count = RANKS * sum(len(step) for step in packs[0])
    ranks = tokens.sum(axis=1)
    waiting = tokens.max(axis=0).sum() / ranks.mean() - 1
    return [
        count,
        100 * (1 - lengths.sum() / (count * CAP)),
        100 * (ranks.max() / ranks.mean() - 1),
        100 * float(waiting),
        100 * float(tokens.sum(axis=0).max() / tokens.sum(axis=0).mean() - 1),
        1e3 * median(seconds),
    ]


def run(options: Options) -> Report:
    """Measure."""
    trace = trace_lengths()
    name, lengths = ("trace", trace) if trace is not None else ("lognormal", lognormal_lengths(16_384))
    lengths = np.minimum(lengths, CAP)
    batches = {f"{name}, {count:,} samples": lengths[:count] for count in (*_BATCHES, lengths.size)}
    rows: list[list[Cell]] = [
        [f"{batch}: {label}", *_cells(part, method, 1 if options.quick else options.repeats)]
        for batch, part in batches.items()
        for label, method in METHODS.items()
    ]
    return Report(
        name="packing",
        question="How much padding and how much waiting for the heaviest rank do packs leave?",
        columns=["batch: method", "packs", "padding, %", "heaviest rank, %", "waiting, %", "heaviest step, %", "ms"],
        rows=rows,
        notes=[
            f"{RANKS} ranks, {STEPS} optimizer steps, packs of {CAP:,} tokens; packs of padding only are counted",
            "heaviest rank, heaviest step: their tokens above the mean; waiting: the heaviest ranks of all steps "
            "together, above the mean",
            "next fit fills packs in the order of the samples and deals them in turn; Karmarkar-Karp splits over "
            "ranks, steps and packs, adding packs while any is over the cap",
        ],
        plots=[
            Plot(
                name="packing",
                title="Padding of the packs",
                x_label="",
                y_label="%",
                bars=True,
                series={
                    label: [(batch, float(row[2] or 0)) for batch in batches for row in rows
                            if row[0] == f"{batch}: {label}"]
                    for label in METHODS
                },
            )
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(run))
