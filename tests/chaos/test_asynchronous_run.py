"""Runs of `python -m chaos.asynchronous`: workers, trainer and service are killed, and staleness stays bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import run_whole

SEED = "36"  # one run of agents, one ordered run, and one that is both


@pytest.mark.timeout(300)
def test_runs(tmp_path: Path) -> None:
    run = run_whole(["-m", "chaos.asynchronous", "--runs", "3", "--seed", SEED, "--output", str(tmp_path)])
    assert run.returncode == 0, run.stdout
    assert "3 runs (2 of agents, 2 ordered)" in run.stdout
    assert "0 violations" in run.stdout
