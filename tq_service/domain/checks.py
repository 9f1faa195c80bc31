"""What must hold of a request whatever the state of the service."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from tq_service.errors import InvalidArgumentError

MOST_SAMPLES: Final = 2**24
"""Most samples that one request writes or claims."""
_LARGEST: Final = sys.float_info.max


def check_range(name: str, value: float, least: int, most: float = _LARGEST, hint: str = "") -> None:
    """Refuse a number that is too small or too large; `hint` ends the message."""
    if not least <= value <= most:  # which neither NaN nor infinity are
        expected = f"{least} or more" if most == _LARGEST else f"{least} to {most}"
        raise InvalidArgumentError(f"{name} is {value}; give {expected}{hint}", field=name)


def check_unique(name: str, names: Sequence[str]) -> None:
    """Refuse names of which one comes twice."""
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{name} has one twice: {list(names)}; name each once", field=name)


def check_name(what: str, name: str) -> None:
    """Refuse names that nobody could type or print."""
    if not name or len(name) > 512 or not name.isprintable():
        raise InvalidArgumentError(f"{what} is {name[:64]!r}; give 1 to 512 printable characters", field=what)


def check_id(name: str, value: bytes) -> None:
    """Refuse ids that are not 16 bytes."""
    if len(value) != 16:
        raise InvalidArgumentError(
            f"{name} has {len(value)} bytes; send 16 random bytes, the same over retries", field=name
        )
