"""A run of `python -m chaos.asynchronous`: workers, trainer and service are killed, and staleness stays bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_a_run(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "chaos.asynchronous", "--runs", "1", "--output", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 runs" in run.stdout
    assert "0 violations" in run.stdout
