"""Entry point of each process of the demo: `python -m examples.demo.<role> SETTINGS.json INDEX`.

A process watches its standard input, which the demo keeps open. When this input closes, the demo has ended, for
whatever reason. The process then also ends, instead of waiting for samples forever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from examples.demo.settings import DemoSettings

ORPHANED_EXIT_CODE = 3


def run_role(role: Callable[[DemoSettings, int], None]) -> None:
    """Run a role with the settings and the index of the command line."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m examples.demo.<role> SETTINGS.json INDEX; got {sys.argv[1:]}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the demo, which ends its processes in order
    torch.set_num_threads(1)  # several processes share few cores
    threading.Thread(target=_end_with_parent, daemon=True).start()
    role(DemoSettings.load(Path(sys.argv[1])), int(sys.argv[2]))


def _end_with_parent() -> None:
    # Not sys.stdin: a thread that holds its buffer's lock makes the interpreter abort at exit.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(ORPHANED_EXIT_CODE)
