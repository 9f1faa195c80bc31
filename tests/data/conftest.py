"""A service as a process of its own, shared by the tests of a session."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "tq_service.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.match(r"listening on (\S+:\d+)", line)
            assert match, f"got {line!r}"
            yield match[1]
        finally:
            process.kill()
