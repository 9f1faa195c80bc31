"""Shared by all benchmarks: processes, repeats, interleaving, medians, and the command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.peer_environment import PEER_NAMES
from benchmarks.report import Report
from tq_service.testing import ListeningProcess

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
_LEAST_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Amount of measuring.

    Attributes:
        repeats: how often each case is measured; the table has medians.
        quick: whether to measure only enough to show that the benchmark works.
        without: peers to leave out.
    """

    repeats: int = _LEAST_REPEATS
    quick: bool = False
    without: frozenset[str] = frozenset()


def running(module: str) -> ListeningProcess:
    """Return `python -m module`, which a `with` block runs; it must print a line with "listening on host:port"."""
    return ListeningProcess([sys.executable, "-m", module], cwd=ROOT)


def interleave(cases: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure all cases in turn, `repeats` times after one round that does not count.

    Every other round runs in reverse order: no case always follows the same one. A disturbance of the machine then
    affects all cases alike.

    Returns:
        For each case its results.
    """
    results: dict[str, list[T]] = {name: [] for name in cases}
    for round_number in range(repeats + 1):
        for name in _order(cases, round_number):
            result = cases[name]()
            if round_number:
                results[name].append(result)
    return results


async def interleave_async(cases: Mapping[str, Callable[[], Awaitable[T]]], repeats: int) -> dict[str, list[T]]:
    """Measure all cases in turn; see `interleave`."""
    results: dict[str, list[T]] = {name: [] for name in cases}
    for round_number in range(repeats + 1):
        for name in _order(cases, round_number):
            result = await cases[name]()
            if round_number:
                results[name].append(result)
    return results


def _order(cases: Mapping[str, object], round_number: int) -> list[str]:
    names = list(cases)
    return names[::-1] if round_number % 2 else names


def new_runner() -> asyncio.Runner:
    """Return a runner of coroutines, with uvloop if it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed."""
    with new_runner() as runner:
        return runner.run(main)


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(np.asarray(values)))


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the repeats of the ratio of two figures from the same repeat."""
    return median([one / other for one, other in zip(ones, others, strict=True)])


def p50_p99(seconds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds of latencies in seconds, each the median over the repeats."""
    quantiles = np.array([np.percentile(np.asarray(repeat), [50, 99]) for repeat in seconds]) * 1e3
    p50, p99 = np.median(quantiles, axis=0)
    return float(p50), float(p99)


def command_line(run: Callable[[Options], Report]) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks share, for a benchmark that adds its own."""
    parser = argparse.ArgumentParser(description=(sys.modules[run.__module__].__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=_LEAST_REPEATS, help="how often each case is measured")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to check that it works")
    parser.add_argument("--without", action="append", default=[], choices=PEER_NAMES, help="peer to leave out")
    return parser


def given_options(given: argparse.Namespace) -> Options:
    """Return the options from the shared flags."""
    repeats = 2 if given.quick else given.repeats
    return Options(repeats=repeats, quick=given.quick, without=frozenset(given.without))


def show(report: Report, given: argparse.Namespace) -> None:
    """Print a report as its flags request."""
    print(report.to_json() if given.json else report.to_text())


def main(run: Callable[[Options], Report]) -> int:
    """Run a benchmark as a program: print its table, or its JSON."""
    given = command_line(run).parse_args()
    show(run(given_options(given)), given)
    return 0
