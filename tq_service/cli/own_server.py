"""A service of its own for commands that were given no address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tq_service.config import ENV_PREFIX
from tq_service.errors import UnavailableError

_LISTENING = re.compile(r"listening on (\S+)")
_STOP_SECONDS = 10.0
_DOOR_VARIABLES = [
    f"{ENV_PREFIX}{name.upper()}"
    for name in ("tls_ca", "tls_cert", "tls_key", "tls_client_ca", "token", "token_file", "tokens_file", "insecure")
]


@contextmanager
def own_server(*flags: str) -> Iterator[str]:
    """Run `tq-service serve` as a process of its own on a free port; yield its address, stop it at the end.

    What the environment says about TLS and tokens is not used meanwhile.
    """
    with door_set_aside(), _running(*flags) as address:
        yield address


@contextmanager
def door_set_aside() -> Iterator[None]:
    """Leave out what the environment says about TLS and tokens, which is for other services than one's own."""
    elsewhere = {name: os.environ.pop(name) for name in _DOOR_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(elsewhere)


@contextmanager
def _running(*flags: str) -> Iterator[str]:
    here = ["--host", "127.0.0.1", "--port", "0"]  # whatever TQ_HOST and TQ_PORT say
    command = [sys.executable, "-m", "tq_service.cli", "serve", *here, "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    for line in process.stdout or ():
        if match := _LISTENING.search(line):
            return match[1]
    raise UnavailableError(f"the service ended with exit code {process.wait()} before it listened; its log is above")
