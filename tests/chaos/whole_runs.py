"""Runs a program with all processes that it starts, of which none is left when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_whole(arguments: Sequence[str], *, timeout: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments to its end.

    Raises:
        subprocess.TimeoutExpired: it took more seconds; its services and clients have been killed, too.
    """
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        try:
            output, _ = running.communicate(timeout=timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, running.returncode, output)
