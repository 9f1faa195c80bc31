"""Frames: what the files of a data dir, and checkpoints, are made of, so that damage anywhere in them is found.

    frame:  header, body
    header: size of the body (uint32), number of the frame (uint64), XXH3 of the body, seeded with that number (uint64),
            XXH32 of the header so far (uint32); all numbers are little-endian

A reader knows which number comes next, so that a frame which is missing, repeated or elsewhere is found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import BinaryIO, Final

import xxhash

_HEADER: Final = struct.Struct("<IQQI")
_CHECKED: Final = struct.Struct("<IQQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size
NUMBER_OFFSET: Final = 4
"""Where the number is in a header."""


class Break(Exception):  # noqa: N818  (a finding, which the reader turns into an error or a line of the log)
    """No whole frame is where one should be.

    Attributes:
        is_torn: whether the file ends there as it does when a process is killed while it writes.
    """

    def __init__(self, what: str, *, is_torn: bool = False) -> None:
        super().__init__(what)
        self.is_torn = is_torn


def frame(number: int, parts: Iterable[bytes | bytearray | memoryview]) -> tuple[bytes, bytes]:
    """Return header and body of a frame; its bytes are copied once, here."""
    body = b"".join(parts)
    checked = _CHECKED.pack(len(body), number, xxhash.xxh3_64_intdigest(body, number))
    return checked + _CHECKSUM.pack(xxhash.xxh32_intdigest(checked)), body


def read_frame(file: BinaryIO) -> tuple[int, bytes]:
    """Return number and body of the frame that a file is at; raises Break where there is none."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise Break("ends within a frame", is_torn=True)
    size, number, checksum, header_checksum = _HEADER.unpack(header)
    if xxhash.xxh32_intdigest(header[: _CHECKED.size]) != header_checksum:
        raise Break("has a frame whose header does not fit its checksum")
    body = file.read(size)
    if len(body) < size:
        raise Break("ends within a frame", is_torn=True)
    if xxhash.xxh3_64_intdigest(body, number) != checksum:
        raise Break("has a frame that does not fit its checksum")
    return number, body
