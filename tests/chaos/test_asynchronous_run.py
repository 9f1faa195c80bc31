"""Runs of `python -m chaos.asynchronous`: workers, trainer and service are killed, and staleness stays bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import run_whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("runs", "seed", "kinds"),
    [
        pytest.param("1", "60", "1 of agents, 1 ordered", marks=pytest.mark.nightly),
        pytest.param("3", "36", "2 of agents, 2 ordered", marks=pytest.mark.nightly, id="one of each kind, and both"),
    ],
)
def test_runs(runs: str, seed: str, kinds: str, tmp_path: Path) -> None:
    run = run_whole(["-m", "chaos.asynchronous", "--runs", runs, "--seed", seed, "--output", str(tmp_path)])
    assert run.returncode == 0, run.stdout
    assert f"{runs} runs ({kinds})" in run.stdout
    assert "0 violations" in run.stdout
