"""A service of its own for commands that were given no address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tq_service.config import ENV_PREFIX

_DOOR_VARIABLES = [
    f"{ENV_PREFIX}{name.upper()}"
    for name in ("tls_ca", "tls_cert", "tls_key", "tls_client_ca", "token", "token_file", "tokens_file", "insecure")
]


@contextmanager
def door_set_aside() -> Iterator[None]:
    """Leave out what the environment says about TLS and tokens, which is for other services than one's own."""
    elsewhere = {name: os.environ.pop(name) for name in _DOOR_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(elsewhere)
