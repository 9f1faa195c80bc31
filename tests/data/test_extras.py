"""Without torch or tensordict, importing the loader is an error that names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["torch", "tensordict"])
def test_the_loader_names_the_extra_that_it_needs(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import tq_service.data"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: tq_service.data needs {missing}, which is not installed")
    assert "tq-service[data]" in last
