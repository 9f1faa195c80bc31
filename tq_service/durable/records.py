"""Groups of changes as records of the journal, and back.

A zero byte, which no message of protobuf begins with, tells them from the records of puts; then the time of the group
(double, little-endian), and each change as its name and its fields (see `codec`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from tq_service.domain.changes.state_machine import Change
from tq_service.durable import codec
from tq_service.errors import NewerVersionError

_HEADER: Final = struct.Struct("<Bd")
_GROUP: Final = 0


def encode_change(change: Change) -> bytes:
    """Return the bytes of a change."""
    return codec.encode((type(change).__name__, change))


def encode_group(at_seconds: float, changes: Sequence[bytes]) -> bytes:
    """Return the record of a group of changes."""
    return b"".join((_HEADER.pack(_GROUP, at_seconds), *changes))


def is_group(record: bytes) -> bool:
    """Whether a record is of a group of changes."""
    return record[:1] == b"\0"


def decode_group(record: bytes) -> tuple[float, list[Change]]:
    """Return the time and the changes of a group.

    Raises:
        NewerVersionError: one of them is not known here.
        ValueError, TypeError, KeyError, struct.error: the bytes are not those of a group.
    """
    _, at_seconds = _HEADER.unpack_from(record)
    unpacker = msgpack.Unpacker(ext_hook=codec.array, strict_map_key=False, max_buffer_size=0)
    unpacker.feed(memoryview(record)[_HEADER.size :])
    return at_seconds, [_change(name, fields) for name, fields in unpacker]


def _change(name: str, fields: object) -> Change:
    kind: Any = Change.kinds.get(name)
    if kind is None:
        raise NewerVersionError(
            f"the journal has a change {name!r}, which this version does not know; it was written by a newer version: "
            f"install that one"
        )
    change: Change = codec.decoder(kind)(fields)
    return change
