"""One object as bytes, where the wire encodes many at once."""

from __future__ import annotations

from typing import Any

from tq_service.wire.objects import encode_objects


def encode_object(value: Any, name: str = "object", position: int = 0) -> bytes:
    """Return an object as bytes, by itself."""
    return encode_objects([value], name, first=position)[0]
