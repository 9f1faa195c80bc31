"""A typed program of a user passes mypy where torch and tensordict are not installed. With them, `make typecheck` runs
mypy over the programs of tests/typed, and over examples/jobs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
INSTALLED = Path(np.__file__).parents[1]
HIDDEN = ("torch", "tensordict", "functorch")


def test_a_program_passes_without_torch(tmp_path: Path) -> None:
    """In an environment with links to all packages of this one, except for those."""
    venv.create(tmp_path / "environment", with_pip=False)
    (packages,) = tmp_path.glob("environment/lib/python*/site-packages")
    for package in INSTALLED.iterdir():
        if package.suffix != ".pth" and not package.name.startswith((*HIDDEN, "tq_service", "__editable__")):
            (packages / package.name).symlink_to(package)
    (packages / "tq_service").symlink_to(ROOT / "tq_service")
    shutil.copy(ROOT / "tests" / "typed" / "program_without_torch.py", tmp_path / "program.py")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache"]
    python = tmp_path / "environment" / "bin" / "python"
    run = subprocess.run(
        [*command, "--python-executable", python, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
