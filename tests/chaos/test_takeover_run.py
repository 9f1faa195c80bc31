"""Two rounds of `python -m chaos.takeover`: a leader is cut off, a storage service is lost for good, and all holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chaos.hosts import why_not

ROOT = Path(__file__).parents[2]
WHY_NOT = why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["cut leader from etcd", "lose storage"])
def test_a_round(tmp_path: Path, target: str) -> None:
    flags = ["--rounds", "1", "--seconds", "0.3", "--cut-seconds", "7", "--lease-seconds", "3", "--targets", target]
    run = subprocess.run(
        [sys.executable, "-m", "chaos.takeover", *flags, "--output", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 violations" in run.stdout
    assert f"{target} (" in run.stdout
