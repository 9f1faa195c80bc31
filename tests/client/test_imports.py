"""When a client imports tensordict, which takes seconds: before a lease runs, and not in programs without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A client connects with its first call, so no service is needed.
PROGRAM = """
import sys
{before}
import tq_service as tq

{statement}
print("tensordict" in sys.modules)
"""
CLAIM = """
with tq.Client("localhost:1", timeout=0.1) as client:
    try:
        client.get_meta(partition_id="p", task_name="t", data_fields=["x"], batch_size=1, max_wait=0.0{more})
    except tq.TqError:
        pass
"""


@pytest.mark.parametrize(
    ("before", "statement", "is_imported"),
    [
        ("import torch", "tq.Client('localhost:1')", True),
        ("import torch", "tq.AsyncClient('localhost:1')", True),
        ("", "tq.Client('localhost:1')", False),
        ("", CLAIM.format(more=""), False),
        ("", CLAIM.format(more=", lease=5.0"), True),
    ],
    ids=["torch", "torch-async", "no torch", "claim", "leased claim"],
)
def test_tensordict_is_imported_before_a_lease_runs(
    tmp_path: Path, before: str, statement: str, is_imported: bool
) -> None:
    """Empty modules stand in for torch and tensordict: five programs would import them for half a minute."""
    for name in ("torch", "tensordict"):
        (tmp_path / f"{name}.py").touch()
    program = PROGRAM.format(before=before, statement=statement)
    command, env = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(is_imported)), done.stderr
