"""The virtual environment of the peer, TransferQueue: made on first use, apart from ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

PEER = "TransferQueue==0.1.11"
_FOLDER = ROOT / ".venv-transferqueue"


def peer_python() -> Path:
    """Return the Python of the peer's environment.

    The package alone is installed, without what it depends on: its balancing needs the standard library only.

    Raises:
        RuntimeError: it cannot be installed.
    """
    python = _FOLDER / "bin" / "python"
    installed = _FOLDER / "installed.txt"
    if installed.exists() and installed.read_text() == PEER:
        return python
    commands = ([sys.executable, "-m", "venv", "--clear", str(_FOLDER)],
                [str(python), "-m", "pip", "install", "--quiet", "--no-deps", PEER])  # fmt: skip
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    installed.write_text(PEER)
    return python
