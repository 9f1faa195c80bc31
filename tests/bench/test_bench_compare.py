"""`make compare`: its statistics, its outcomes, and one pair of runs of one figure."""

from __future__ import annotations

import json
import math
import shutil
import subprocess

import pytest

from benchmarks import compare
from benchmarks.compare import Comparison, Figure, MedianRatio, Round, median_with_interval
from benchmarks.harness import ROOT

RATE = Figure(name="rate", what="calls/s", load="calls")
LATENCY = Figure(name="latency", what="ms", load="calls", more_is_better=False)


def rounds(base: float, control: float, new: float, count: int = 21) -> list[Round]:
    values = {"base": base, "control": control, "new": new}
    return [{tree: {"rate": value, "latency": value} for tree, value in values.items()} for _ in range(count)]


# How many values are left out at each end: table A.1 of Le Boudec's book has 6 and 16 for 21 values.
@pytest.mark.parametrize(("count", "left_out"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (21, 5), (41, 13)])
def test_the_interval_is_of_order_statistics(count: int, left_out: int) -> None:
    values = [1.0 + number / count for number in range(count)]
    found = median_with_interval(values[::-1])
    assert (found.low, found.high) == (values[left_out], values[-1 - left_out])
    assert found.low < found.median < found.high


def test_few_values_bound_nothing() -> None:
    assert median_with_interval([1.0] * 5) == MedianRatio(median=1.0, low=0.0, high=math.inf)


@pytest.mark.parametrize(
    ("new", "control", "outcome"),
    [
        ((0.90, 0.96), (0.98, 1.02), "worse"),
        ((0.90, 0.96), (0.95, 1.02), "worse"),
        ((0.90, 0.96), (0.94, 0.96), "unresolved"),  # one tree against itself looks as bad
        ((0.90, 0.97), (0.98, 1.02), "unresolved"),
        ((0.96, 1.05), (0.98, 1.02), "unresolved"),
        ((0.97, 1.01), (0.98, 1.02), "no worse"),
        ((0.97, 1.01), (0.90, 1.10), "no worse"),
        ((1.10, 1.20), (0.98, 1.02), "no worse"),
        ((1.10, 1.20), (1.04, 1.09), "unresolved"),
        ((0.98, 1.01), (0.90, 0.96), "unresolved"),
        ((0.00, math.inf), (0.00, math.inf), "unresolved"),
    ],
)
def test_the_outcome(new: tuple[float, float], control: tuple[float, float], outcome: str) -> None:
    ratios = [MedianRatio(median=sum(ends) / 2, low=ends[0], high=ends[1]) for ends in (new, control)]
    assert Comparison(figure=RATE, values={}, new=ratios[0], control=ratios[1]).outcome == outcome


def test_ratios_are_of_speeds() -> None:
    assert compare.compare(RATE, rounds(10, 10, 9)).new.median == 0.9
    assert compare.compare(LATENCY, rounds(9, 9, 10)).new.median == 0.9


def test_ratios_are_taken_round_by_round() -> None:
    slow_and_fast = [*rounds(1, 1, 0.5, 10), *rounds(100, 100, 50, 11)]
    assert compare.compare(RATE, slow_and_fast).new == MedianRatio(median=0.5, low=0.5, high=0.5)


@pytest.mark.parametrize(("new", "code"), [(9.0, 1), (10.0, 0)])
def test_the_exit_code_says_whether_a_figure_is_worse(
    new: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [compare.compare(RATE, rounds(10, 10, new))]
    monkeypatch.setattr(compare, "measure", lambda *_: found)
    assert compare.main(["HEAD"]) == code
    assert ("worse" in capsys.readouterr().out.splitlines()[3].replace("no worse", "")) is bool(code)


def test_every_figure_has_a_load() -> None:
    program = (ROOT / "benchmarks" / "compare_program.py").read_text()
    assert [figure for figure in compare.FIGURES if f"    def {figure.load}(self) -> Unit:" not in program] == []


def git_is_there() -> bool:
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    return (
        shutil.which("git") is not None
        and subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.nightly
@pytest.mark.skipif(not git_is_there(), reason="the base is a commit: needs git and a repository")
def test_one_pair_of_one_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["HEAD", "--pairs", "1", "--seconds", "0", "--figures", "claims_queue", "--json"]) == 0
    (figure,) = json.loads(capsys.readouterr().out)["figures"]
    assert (figure["name"], figure["outcome"]) == ("claims_queue", "unresolved")
    assert {tree: len(values) for tree, values in figure["values"].items()} == {"base": 1, "control": 1, "new": 1}
    assert min(value for values in figure["values"].values() for value in values) > 0


def test_a_commit_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["no-such-commit", "--pairs", "1"]) == 2
    assert "git could not find the package at 'no-such-commit'" in capsys.readouterr().err
