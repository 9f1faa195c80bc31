"""The soak in short: the load does what it says in each mode, and thirds are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.report import Report
from benchmarks.soak_load import SAMPLES_OF_A_STEP


def course(*resident_mb: float) -> soak.Course:
    samples = [
        soak.Sample(seconds=float(number), resident_mb=value, open_files=7, threads=3, disk_mb=0)
        for number, value in enumerate(resident_mb)
    ]
    return soak.Course(mode="memory", samples=samples, step_count=1, sample_count=1)


@pytest.mark.parametrize(("values", "is_flat"), [((1, 1, 5, 5, 5.2, 5.2), True), ((1, 1, 5, 5, 6, 6), False)])
def test_the_last_third_is_compared_with_the_middle_one(values: tuple[float, ...], is_flat: bool) -> None:
    found = soak.report([course(*values)], 300)
    assert [aim.met for aim in found.aims] == [is_flat, True, True]
    assert [row[1] for row in found.rows] == ["resident memory, MB", "open files", "threads"]


@pytest.mark.parametrize("mode", ["memory", pytest.param("process", marks=pytest.mark.nightly)])
def test_the_load_is_done_and_drawn(mode: str, tmp_path: Path) -> None:
    done = soak.soak(mode, 2.0)
    assert len(done.samples) == soak.SAMPLING_COUNT
    assert done.step_count >= 1
    assert done.sample_count > done.step_count * SAMPLES_OF_A_STEP
    found = soak.report([done], 2.0)
    assert Report.from_json(found.to_json()).to_json() == found.to_json()
    assert bool(max(sample.disk_mb for sample in done.samples)) is (mode == "process")
    text = soak.write(found, tmp_path, "2026-01-31").read_text()
    for plot in found.plots:
        assert (tmp_path / "2026-01-31-soak" / f"{plot.name}.png").is_file()
        assert f"(2026-01-31-soak/{plot.name}.png)" in text
