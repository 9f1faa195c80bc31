"""Objects as engines store them: a header with size and checksum, and the bytes.

Engines store a sealed object as it is. So a reader sees from the first bytes what the complete object must be, whatever
an engine has mixed, cut or lost.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from tq_service.errors import DataLossError, InvalidArgumentError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, Buffer, ObjectMissingError

_HEADER: Final = struct.Struct("<8sQQ8x")
_MAGIC: Final = b"tqobj\x00\x00\x01"
HEADER_BYTES: Final = _HEADER.size


def seal(name: str, parts: Sequence[Buffer]) -> list[memoryview]:
    """Return the header of an object and its parts, all as flat bytes.

    Raises:
        InvalidArgumentError: it has more than `LARGEST_OBJECT_BYTES`.
    """
    views = [memoryview(part).cast("B") for part in parts]
    size = sum(map(len, views))
    if size > LARGEST_OBJECT_BYTES:
        raise InvalidArgumentError(
            f"object {name}: got {size} bytes, expected at most {LARGEST_OBJECT_BYTES}; cut it into pieces",
            field="parts",
        )
    return [memoryview(_HEADER.pack(_MAGIC, size, _checksum(views))), *views]


def joined(sealed: Sequence[memoryview]) -> memoryview:
    """Return a sealed object in one piece, copied without holding Python's lock."""
    whole = memoryview(bytearray(sum(map(len, sealed))))
    fill(whole, sealed)
    return whole


def fill(into: memoryview, views: Sequence[memoryview]) -> None:
    """Copy bytes to the beginning of `into` without holding Python's lock, which `bytes.join` would hold."""
    start = 0
    for view in filter(len, views):
        end = start + len(view)
        np.copyto(np.frombuffer(into[start:end], np.uint8), np.frombuffer(view, np.uint8))
        start = end


def size_of(name: str, header: Buffer) -> int:
    """Return the size of the object behind a header, without the header.

    Raises:
        ObjectMissingError: it is shorter than a header: half written.
        DataLossError: it is not a header.
    """
    return _parse(name, header)[0]


def check(name: str, header: Buffer, data: memoryview) -> None:
    """Check the first bytes of an object, which were read after its header.

    Raises:
        ObjectMissingError: the header is incomplete.
        DataLossError: the object is shorter, or `data` is all of it and does not match its checksum.
    """
    size, checksum = _parse(name, header)
    if len(data) > size:
        raise DataLossError(f"object {name} has {size} bytes, expected at least {len(data)}; it is another put's")
    if len(data) == size and _checksum([data]) != checksum:
        raise DataLossError(f"object {name}: {size} bytes do not match their checksum; the copy is damaged or was cut")


def _parse(name: str, header: Buffer) -> tuple[int, int]:
    if len(header) < HEADER_BYTES:
        raise ObjectMissingError(f"object {name} has {len(header)} bytes, fewer than its header; it is half written")
    magic, size, checksum = _HEADER.unpack(bytes(header[:HEADER_BYTES]))
    if magic != _MAGIC:
        raise DataLossError(f"object {name} begins with {magic!r}, expected {_MAGIC!r}; another program wrote it")
    return size, checksum


def _checksum(views: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()
