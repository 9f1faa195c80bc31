"""README.md: its programs run against a service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tq_service.testing import ServiceProcess

README = (Path(__file__).parents[1] / "README.md").read_text()
DEFAULT_ADDRESS = "localhost:50051"


def test_the_programs_run() -> None:
    """Blocks marked `python` are programs; those marked `py` are parts of one."""
    programs = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert programs
    with ServiceProcess() as server:
        for program in programs:
            run = subprocess.run(
                [sys.executable, "-c", program.replace(DEFAULT_ADDRESS, server.address)],
                env={**os.environ, "TQ_ADDRESS": server.address},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            assert run.returncode == 0, run.stderr
