"""The code of each tutorial runs, as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PRINTED = {
    "rollout_to_step.md": r"mean reward (0\.[01]\d), (0\.[5-9]\d|1\.00) after 20 steps\n",
    "staleness.md": r"80 samples, at most [01] versions late\n",
    "resume.md": r"2 batches are trained again, from batch 2\n",
}


def test_every_tutorial_is_tested() -> None:
    assert {path.name for path in TUTORIALS.glob("*.md")} == set(PRINTED)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != "rollout_to_step.md")) for name in PRINTED],
)
def test_the_program_of_the_tutorial_runs(name: str) -> None:
    page = (TUTORIALS / name).read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(PRINTED[name], run.stdout), run.stdout
