"""How evenly, how fast and into how few packs are samples spread over ranks, and how does the peer compare?

TransferQueue's Karmarkar-Karp runs in a separate environment, in turn with ours, on the same lengths.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Options, interleave, main, median, median_ratio
from benchmarks.lengths import lognormal_lengths, trace_lengths
from benchmarks.peer import Peer, peer
from benchmarks.peer_environment import TRANSFER_QUEUE
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.balancing import get_seqlen_balanced_partitions

Int64s = NDArray[np.int64]
Balance = Callable[[Int64s, int, bool], tuple[float, list[list[int]]]]

# Items, ranks, and whether sizes are equal. The last two take the peer several seconds and are measured once.
CASES = ((4_096, 64, True), (16_384, 512, True), (4_096, 64, False), (4_096, 512, False), (16_384, 512, False))
_SLOW_CASES = CASES[3:]
_MOST_ABOVE_PERCENT = 0.1
_LEAST_SPEEDUP = 20.0


def _ours(lengths: Int64s, k_partitions: int, equal_size: bool) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    partitions = get_seqlen_balanced_partitions(lengths, k_partitions, equal_size)
    return time.perf_counter() - started, partitions


def _theirs(
    transfer_queue: Peer, lengths: Int64s, k_partitions: int, equal_size: bool
) -> tuple[float, list[list[int]]]:
    asked = {"lengths": lengths.tolist(), "k_partitions": k_partitions, "equal_size": equal_size}
    seconds, partitions = transfer_queue.ask("balance", **asked)
    return seconds, partitions


def _above_bound(lengths: Int64s, partitions: list[list[int]]) -> float:
    """Return how far the heaviest rank is above max(mean, longest item), in percent."""
    bound = max(float(lengths.mean()) * lengths.size / len(partitions), float(lengths.max()))
    return 100 * (max(int(lengths[part].sum()) for part in partitions) / bound - 1)


def _measure(lengths: Int64s, case: tuple[int, int, bool], transfer_queue: Peer, repeats: int) -> list[Cell]:
    """Return the cells of one row: heaviest rank of both, milliseconds of both, and their ratio."""
    _, k_partitions, equal_size = case
    methods: dict[str, Balance] = {"ours": _ours}
    if transfer_queue.is_there:
        methods["peer"] = partial(_theirs, transfer_queue)
    sides = {name: partial(balance, lengths, k_partitions, equal_size) for name, balance in methods.items()}
    results = {name: [side()] for name, side in sides.items()} if case in _SLOW_CASES else interleave(sides, repeats)
    above = {name: _above_bound(lengths, runs[0][1]) for name, runs in results.items()}
    ours = [seconds for seconds, _ in results["ours"]]
    if not transfer_queue.is_there:
        return [above["ours"], None, 1e3 * median(ours), None, None]
    theirs = [seconds for seconds, _ in results["peer"]]
    return [above["ours"], above["peer"], 1e3 * median(ours), 1e3 * median(theirs), median_ratio(theirs, ours)]


def _label(name: str, case: tuple[int, int, bool]) -> str:
    return f"{name}, {case[0]:,} / {case[1]}, {'equal' if case[2] else 'free'} size"


def run(options: Options) -> Report:
    """Measure."""
    sources = {"lognormal": lognormal_lengths(16_384)}
    trace = trace_lengths()
    if trace is not None:
        sources["trace"] = trace
    cases = CASES[:3] if options.quick else CASES
    rows: list[list[Cell]] = []
    aims: list[Aim] = []
    with peer(TRANSFER_QUEUE, "benchmarks.balancing_peer", options) as transfer_queue:
        for name, lengths in sources.items():
            for case in cases:
                cells = _measure(lengths[: case[0]], case, transfer_queue, options.repeats)
                label = _label(name, case)
                rows.append([label, *cells])
                above, ratio = float(cells[0] or 0), None if cells[4] is None else float(cells[4])
                if case[:2] != (4_096, 512):
                    aims.append(Aim(what=f"{label}: above the bound, %", measured=above,
                                    wanted=_MOST_ABOVE_PERCENT, at_least=False))  # fmt: skip
                if not case[2]:
                    aims.append(Aim(what=f"{label}: times faster", measured=ratio, wanted=_LEAST_SPEEDUP))
    return _report(rows, aims, transfer_queue)


def _report(rows: list[list[Cell]], aims: list[Aim], transfer_queue: Peer) -> Report:
    return Report(
        name="balancing",
        question="How evenly and how fast are samples spread over ranks, compared with TransferQueue's Karmarkar-Karp?",
        columns=["lengths, items / ranks", "above the bound, %", "peer: above, %", "ms", "peer: ms", "peer / ours"],
        rows=rows,
        notes=[
            "the bound is max(mean of the ranks, longest item); equal size: every rank the same number of items",
            "lognormal(7.5, 1.0) capped at 32,768; the trace is from the Azure Public Dataset 2023 (conversations)",
            "512 ranks of free size take the peer 5 to 30 s and are measured once",
            *transfer_queue.notes,
        ],
        aims=aims,
        without=transfer_queue.absent,
        plots=[
            Plot(
                name="balancing",
                title="Heaviest rank above the bound",
                x_label="",
                y_label="%",
                bars=True,
                series={
                    "tq_service": [(str(row[0]), float(row[1] or 0)) for row in rows],
                    "TransferQueue": [(str(row[0]), float(row[2] or 0)) for row in rows],
                },
            )
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
