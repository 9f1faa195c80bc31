"""What durability costs: one short run, what is left out, and how rates become a table."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from object_engines import Engine, need

from benchmarks import engines
from benchmarks.durability_cost import Plan, _report, _Rounds
from benchmarks.harness import ROOT
from benchmarks.report import Report
from tq_service.errors import UnavailableError


@pytest.mark.nightly
def test_a_mirror_is_measured_beside_memory() -> None:
    flags = ["--json", "--quick", "--columns", "mirror", "--engines", "file"]
    command = [sys.executable, "-m", "benchmarks.durability_cost", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    report = Report.from_json(done.stdout)
    assert report.columns == ["what", "memory", "mirror: file / memory"]
    assert [str(row[0]).split()[0] for row in report.rows] == ["claims/s"] * 3 + ["puts/s"] + ["put"] * 2
    for _, rate, ratio in report.rows:
        assert isinstance(rate, float)
        assert isinstance(ratio, float)
        assert min(rate, ratio) > 0
    assert report.aims == []


def test_an_engine_that_is_not_installed_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent(Engine):
        def start(self) -> None:
            need("a_package_that_is_nowhere")

    monkeypatch.setitem(engines.ENGINES, "absent", Absent)
    with ExitStack() as stack:
        running, missing = engines.start_engines(stack, tmp_path, ["absent", "file"])
        assert list(running) == ["file"]
        assert running["file"].url.startswith("file://")
    assert missing == {"absent": "the package a_package_that_is_nowhere is not installed"}


def test_a_column_that_fails_is_left_out_and_the_others_go_on() -> None:
    async def works() -> float:
        return 4.0

    async def fails() -> float:
        raise UnavailableError("no engine")

    cases = {"memory": {"puts": works}, "mirror: s3": {"puts": fails}, "control": {"puts": works}}
    plan = Plan(rounds=6, seconds=0.0, quick=True)
    rounds = _Rounds(cases, plan)
    asyncio.run(rounds.run())
    assert rounds.rates == {"puts": {"memory": [4.0] * 6, "control": [4.0] * 6}}
    assert rounds.failed == ["mirror: s3: left out because it failed (puts): no engine"]


def test_ratios_are_taken_round_by_round() -> None:
    rates = {"puts": {"memory": [10.0, 20.0, 40.0] * 2, "process": [9.0, 16.0, 40.0] * 2}}
    report = _report(rates, Plan(rounds=6), ["etcd: left out"])
    assert report.columns == ["what", "memory", "process / memory"]
    assert report.rows == [["puts", 20.0, 0.9]]
    assert report.notes[-2:] == ["etcd: left out", "95 % intervals, puts: process 0.80 to 1.00"]
    assert [(aim.measured, aim.met) for aim in report.aims] == [(0.9, True)]
