"""An unplugged cable between client and service, where the system lets a user make network namespaces."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("namespaces_program.py")


def why_not() -> str:
    """Return why there can be no namespaces with a cable between them; empty where there can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-Urn", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"the system makes no network namespaces for users: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_an_unplugged_cable() -> None:
    run = subprocess.run(
        ["unshare", "-Urn", sys.executable, str(PROGRAM)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1:] == ["done"], run.stdout + run.stderr
