"""A service as a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COMMAND = [sys.executable, "-m", "tq_service.cli"]


@contextmanager
def running_service(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of `tq-service serve` on a free port, and its address."""
    with subprocess.Popen([*COMMAND, "serve", "--port", "0", *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.match(r"listening on (\S+:\d+) \(role (\w+)\)", line)
            assert match, f"got {line!r}"
            yield process, match[1]
        finally:
            process.kill()
