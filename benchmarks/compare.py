"""Is this tree slower than the one before? Many short runs of both in turn, and of the one before against itself.

    python -m benchmarks.compare HEAD~3          # this tree, with uncommitted changes, against that commit

Three trees are compared: the commit, the same commit as control, and this tree. Each round restarts all of them, with
client and services in separate processes, and lets each make every load for about a second. The order of loads and, for
each load, of trees is random. So a disturbance of the machine, or of one process by chance, affects all alike.

For each figure the ratio of new to base is taken round by round (of speeds: above 1 is faster), then its median and
the 95 % interval of the median, and the same for control to base, which should be 1. The interval uses order
statistics, so it does not depend on the distribution of the ratios: Le Boudec, Performance Evaluation of Computer and
Communication Systems (2010), theorem 2.1. The outcome is

    worse        the interval of new / base lies below 0.97, and that of control / base does not
    no worse     the interval of new / base begins at 0.97 or above, and that of control / base is not entirely
                 outside 0.97 to 1 / 0.97, which would mean a faulty measurement
    unresolved   otherwise: more pairs, or a quieter machine, may resolve it

The exit code is 1 if a figure is worse.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import ROOT, median
from benchmarks.machine import describe_machine
from benchmarks.peer import program
from benchmarks.report import Report, format_cell

BASE, CONTROL, NEW = TREES = ("base", "control", "new")
LEAST_RATIO = 0.97
_UNCERTAINTY = 0.05
_PAIRS, _SECONDS = 21, 1.2

Outcome = Literal["worse", "no worse", "unresolved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A compared figure.

    Attributes:
        name: its name for `--figures`.
        what: description with its unit, for the table.
        load: the method of `compare_program` that measures it, perhaps with others.
        more_is_better: False: less is better.
    """

    name: str
    what: str
    load: str
    more_is_better: bool = True


FIGURES = (
    Figure(name="claims_ranks", what="claims/s of 8 ranks", load="claims"),
    Figure(name="claims_queue", what="claims/s of 8 queue workers", load="claims"),
    Figure(name="wake_up", what="put → 1 waiting rank served, ms", load="wake_up", more_is_better=False),
    Figure(name="insert", what="samples/s with keys and custom_meta", load="insert"),
    Figure(name="put_small", what="puts/s of 4 KiB", load="small"),
    Figure(name="get_small", what="gets/s of 4 KiB", load="small"),
    Figure(name="put_remote", what="puts/s of 4 KiB to another storage service", load="remote"),
    Figure(name="put_remote_by_8", what="the same by 8 producers", load="remote"),
    Figure(name="put_large", what="put of 64 MiB, GB/s", load="large"),
    Figure(name="get_large", what="get of 64 MiB, GB/s", load="large"),
    Figure(name="put_jagged", what="put of 16 MiB, jagged, GB/s", load="jagged"),
    Figure(name="get_jagged", what="get of 16 MiB, jagged, GB/s", load="jagged"),
    Figure(name="put_same_host", what="put of 64 MiB on one host, GB/s", load="same_host"),
    Figure(name="get_same_host", what="get and read of 64 MiB on one host, GB/s", load="same_host"),
    Figure(name="claims_durable", what="claims/s of 8 queue workers, durable", load="durable_claims"),
    Figure(name="put_small_durable", what="puts/s of one sample by 8 producers, durable", load="durable_puts"),
    Figure(name="put_large_durable", what="put of 16 MiB, durable, GB/s", load="durable_puts"),
)

Round = Mapping[str, Mapping[str, float]]
"""For each tree, each figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianRatio:
    """The median of ratios of speeds, and its 95 % interval, which is 0 to infinity with too few ratios."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of one figure.

    Attributes:
        figure: the figure.
        values: its values by tree, for each round.
        new: this tree's speed relative to the base.
        control: the control's speed relative to the base.
    """

    figure: Figure
    values: Mapping[str, Sequence[float]]
    new: MedianRatio
    control: MedianRatio

    @property
    def outcome(self) -> Outcome:
        """Whether this tree is slower."""
        if self.new.high < LEAST_RATIO and not self.control.high < LEAST_RATIO:
            return "worse"
        control_is_off = self.control.high < LEAST_RATIO or self.control.low > 1 / LEAST_RATIO
        return "no worse" if self.new.low >= LEAST_RATIO and not control_is_off else "unresolved"


def median_with_interval(ratios: Sequence[float]) -> MedianRatio:
    """Return the median and its interval: the k-th smallest and the k-th largest value.

    The number of n values below the median is distributed like heads in n coin throws. k is the largest number with a
    probability of at most 5 % for fewer than k heads, or fewer than k tails. It exists only for 6 or more values.
    """
    ordered, count, k, tail = sorted(ratios), len(ratios), 0, 0.0
    while 2 * (tail := tail + math.comb(count, k) / 2**count) <= _UNCERTAINTY:
        k += 1
    low, high = (ordered[k - 1], ordered[count - k]) if k else (0.0, math.inf)
    return MedianRatio(median=median(ordered), low=low, high=high)


def compare(figure: Figure, rounds: Iterable[Round]) -> Comparison:
    """Return the comparison of a figure over all rounds."""
    values = {tree: [one[tree][figure.name] for one in rounds] for tree in TREES}

    def ratio(tree: str) -> MedianRatio:
        pairs = zip(values[tree], values[BASE], strict=True)
        return median_with_interval([one / base if figure.more_is_better else base / one for one, base in pairs])

    return Comparison(figure=figure, values=values, new=ratio(NEW), control=ratio(CONTROL))


def lay_out(base: str, directory: Path) -> dict[str, Path]:
    """Write the trees below a directory, each with its own package and its own loads: the API may differ.

    So a change of a load, such as of its sizes, shows as a change of speed: make it in a commit without other changes.

    Raises:
        RuntimeError: git does not know the commit, or the commit lacks the package.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=zip", base, "tq_service", "benchmarks", ":!benchmarks/results"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        raise RuntimeError(f"git could not find the package at {base!r}: {archive.stderr.decode().strip()}")
    trees = {tree: directory / tree for tree in TREES}
    unwanted = shutil.ignore_patterns("__pycache__", "results")
    for tree, path in trees.items():
        if tree == NEW:
            for name in ("tq_service", "benchmarks"):
                shutil.copytree(ROOT / name, path / name, ignore=unwanted)
        else:
            zipfile.ZipFile(io.BytesIO(archive.stdout)).extractall(path)
    return trees


def measure_round(trees: Mapping[str, Path], loads: Sequence[str], seconds: float, rng: random.Random) -> Round:
    """Start every tree, let each make every load once, and stop them."""
    found: dict[str, dict[str, float]] = {tree: {} for tree in trees}
    with ExitStack() as stack:
        programs = {
            tree: stack.enter_context(program("benchmarks.compare_program", directory=path))
            for tree, path in trees.items()
        }
        with ThreadPoolExecutor(len(programs)) as pool:
            packages = pool.map(lambda running: running.ask("prepare", loads=loads), programs.values())
            for package, path in zip(packages, trees.values(), strict=True):
                if Path(package) != path.resolve() / "tq_service":
                    raise RuntimeError(f"measured {package}, expected {path / 'tq_service'}")
        for load in rng.sample(loads, len(loads)):
            for tree in rng.sample(list(programs), len(programs)):
                found[tree] |= programs[tree].ask("measure", load=load, seconds=seconds)
    return found


def measure(base: str, figures: Sequence[Figure], pairs: int, seconds: float, seed: int) -> list[Comparison]:
    """Compare this tree with a commit."""
    rng, loads, rounds = random.Random(seed), list(dict.fromkeys(figure.load for figure in figures)), []
    with tempfile.TemporaryDirectory(prefix="tq-compare-") as directory:
        trees = lay_out(base, Path(directory))
        started = time.monotonic()
        for number in range(pairs):
            rounds.append(measure_round(trees, loads, seconds, rng))
            left = (time.monotonic() - started) / (number + 1) * (pairs - number - 1)
            print(f"round {number + 1} of {pairs}; {left / 60:.0f} minutes left", file=sys.stderr, flush=True)
    return [compare(figure, rounds) for figure in figures]


def to_text(comparisons: Sequence[Comparison], base: str, pairs: int, seconds: float) -> str:
    """Return the table."""

    def ratio_text(ratio: MedianRatio) -> str:
        return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"

    return Report(
        name="compare",
        question=f"Is this tree slower than {base}?",
        columns=["figure", "name", "base", "new", "new / base (95 %)", "control / base (95 %)", "outcome"],
        rows=[
            [
                one.figure.what,
                one.figure.name,
                *(format_cell(median(one.values[tree])) for tree in (BASE, NEW)),
                ratio_text(one.new),
                ratio_text(one.control),
                one.outcome,
            ]
            for one in comparisons
        ],
        notes=[
            f"{pairs} pairs of runs of {seconds:g} s; ratios of speeds: above 1 is faster",
            f"worse: the interval lies below {LEAST_RATIO}, and the control's does not; "
            f"no worse: it begins at {LEAST_RATIO} or above; otherwise unresolved",
        ],
    ).to_text()


def to_json(comparisons: Sequence[Comparison], base: str, pairs: int, seconds: float) -> str:
    """Return all measurements as a JSON object."""

    def bounds(ratio: MedianRatio) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in asdict(ratio).items()}

    figures: list[dict[str, Any]] = [
        {
            **asdict(one.figure),
            "outcome": one.outcome,
            "new_to_base": bounds(one.new),
            "control_to_base": bounds(one.control),
            "values": one.values,
        }
        for one in comparisons
    ]
    return json.dumps(
        {"base": base, "pairs": pairs, "seconds": seconds, "machine": describe_machine(), "figures": figures}, indent=1
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return 1 if a figure is worse."""
    names = [figure.name for figure in FIGURES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("base", metavar="COMMIT", help="commit to compare this tree with")
    parser.add_argument("--figures", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--pairs", type=int, default=_PAIRS, help=f"rounds; fewer than {_PAIRS} show little")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="seconds of each load of each tree in each round"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    parser.add_argument("--json", action="store_true", help="print JSON with all values instead of a table")
    given = parser.parse_args(arguments)
    if given.pairs < 1:
        parser.error(f"--pairs: got {given.pairs}, expected at least 1")
    figures = [figure for figure in FIGURES if figure.name in given.figures]
    try:
        found = measure(given.base, figures, given.pairs, given.seconds, given.seed)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((to_json if given.json else to_text)(found, given.base, given.pairs, given.seconds))
    return int(any(one.outcome == "worse" for one in found))


if __name__ == "__main__":
    sys.exit(main())
