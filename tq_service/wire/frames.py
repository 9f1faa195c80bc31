"""The messages of the bulk streams, with their frames encoded and decoded by hand.

protobuf for Python copies a field twice. A message whose only part is one field is a tag, the length as a varint and
the bytes: written here with one copy, and a frame is read without any. What is in headers, and messages of unusual
form, go through the protobuf library, so both ways give the same.

gRPC turns an exception of a deserializer into INTERNAL without a word; so decoders return `Garbled` instead of raising.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from tq_service.errors import InvalidArgumentError
from tq_service.v1.storage_service_pb2 import GetHeader, GetResponse, PutHeader, PutRequest
from tq_service.wire.columns import ColumnShape
from tq_service.wire.dtypes import Bytes

DEFAULT_FRAME_BYTES: Final = 2 << 20

MOST_FRAME_PARTS: Final = 4096
"""Chunks of which a frame is made up at most: to join them takes some milliseconds, whatever their size."""

SEND_AS_KEY: Final = "tq-send-as"
"""Key of the initial metadata by which a storage service says that it has capacity for a put, whose bytes may come."""

SEND_AS_FRAMES: Final = "frames"
"""Value of that key: in frames."""

SEND_AS_FDS: Final = "fds"
"""Value of that key: as shared memory, in the session that the header names."""

INLINE_BYTES: Final = 256 << 10
"""Puts and gets up to this size, shared memory apart, go in one message (PutInline, GetInline).

No quota counts the bytes of such a put while it waits for capacity; `WAITING_BYTES` bounds those of all.
"""

WAITING_BYTES: Final = "waiting_bytes"
"""`limit_name` of the error of a call that may wait, while others do whose requests take too much memory."""

# Just under glibc's largest dynamic mmap threshold (32 MiB).
_LARGEST_THRESHOLD_BYTES: Final = (32 << 20) - (64 << 10)
_HEADER_TAG: Final = 0x0A  # field 1, length-delimited
_FRAME_TAG: Final = 0x12  # field 2, length-delimited
_MAX_VARINT_BYTES: Final = 5  # of a size; the library refuses longer ones

FrameParts: TypeAlias = Sequence[memoryview | bytes | bytearray]


@dataclass(frozen=True, slots=True)
class Garbled:
    """A message that could not be read, and why."""

    reason: str


def encode_frame(parts: FrameParts) -> bytes:
    """Return the message whose frame is `parts` joined: one copy."""
    return _message_of(_FRAME_TAG, parts)


def encode_part(part: PutHeader | GetHeader | FrameParts | bytes) -> bytes:
    """Serialize a message of a put or get stream: its header, or the parts of a frame; bytes are a message already."""
    if isinstance(part, bytes):
        return part
    if isinstance(part, PutHeader | GetHeader):
        return _message_of(_HEADER_TAG, (part.SerializeToString(),))
    return encode_frame(part)


def _message_of(tag: int, parts: FrameParts) -> bytes:
    """Return the message whose only field is `parts` joined."""
    return b"".join((bytes((tag,)), encode_varint(sum(map(len, parts))), *parts))


def decode_put_request(data: bytes) -> PutHeader | memoryview | Garbled:
    """Deserialize a message of a put stream: its header, a view on its frame, or why it is neither."""
    part: PutHeader | memoryview | Garbled = _decode(data, PutRequest)
    return part


def decode_get_response(data: bytes) -> GetHeader | memoryview | Garbled:
    """Deserialize a message of a get stream: its header, a view on its frame, or why it is neither."""
    part: GetHeader | memoryview | Garbled = _decode(data, GetResponse)
    return part


def _decode(data: bytes, kind: type[PutRequest] | type[GetResponse]) -> Any:
    frame = _plain_frame(data)
    if frame is not None:
        return frame
    name = kind.DESCRIPTOR.name
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        return Garbled(f"a message of {len(data)} bytes is no {name}: {error}")
    match message.WhichOneof("part"):
        case None:
            return Garbled(f"a {name} is empty; it must have one of its parts")
        case "frame":
            return memoryview(message.frame)
        case part:
            return getattr(message, part)


def iter_frames(
    chunks: Iterable[memoryview], frame_bytes: int = DEFAULT_FRAME_BYTES, most_parts: int | None = MOST_FRAME_PARTS
) -> Iterator[list[memoryview]]:
    """Cut chunks into frames of `frame_bytes`, the last one shorter: large chunks are cut, small ones put together.

    Args:
        chunks: the bytes.
        frame_bytes: size of a frame.
        most_parts: chunks of which a frame is made up at most, which makes it shorter; None: any number.

    Yields:
        The parts of one frame, for `encode_frame`; never an empty frame.
    """
    if frame_bytes <= 0:
        raise InvalidArgumentError(f"frame_bytes is {frame_bytes}; expected at least 1", field="frame_bytes")
    parts: list[memoryview] = []
    capacity = frame_bytes
    for chunk in chunks:
        start, end = 0, len(chunk)
        while end - start >= capacity:
            parts.append(chunk[start : start + capacity])
            start += capacity
            yield parts
            parts, capacity = [], frame_bytes
        if start < end:
            parts.append(chunk[start:] if start else chunk)
            capacity -= end - start
            if len(parts) == most_parts:
                yield parts
                parts, capacity = [], frame_bytes
    if parts:
        yield parts


def _fresh(size: int) -> Bytes:
    return np.empty(size, np.uint8)


class ColumnReceiver:
    """Takes the frames of a get and puts their bytes into one buffer for each column.

    Every column has a buffer of its own, so that each is aligned and lives as long as its own tensor.

    Args:
        columns: what comes in the frames.
        allocate: returns memory of so many bytes, to be written and then shared by tensors.
    """

    def __init__(self, columns: Sequence[ColumnShape], allocate: Callable[[int], Bytes] = _fresh) -> None:
        self.buffers: list[Bytes] = [allocate(column.value_bytes) for column in columns]
        self._views = [buffer.data for buffer in self.buffers if buffer.size]
        self._current = 0
        self._filled = 0

    def write(self, frame: memoryview) -> None:
        """Take the next frame.

        Raises:
            InvalidArgumentError: there are more bytes than the header declared.
        """
        start = 0
        while start < len(frame):
            if self._current == len(self._views):
                raise InvalidArgumentError("the stream has more bytes than its header declared", field="frame")
            target = self._views[self._current]
            size = min(len(frame) - start, len(target) - self._filled)
            target[self._filled : self._filled + size] = frame[start : start + size]
            start += size
            self._filled += size
            if self._filled == len(target):
                self._current, self._filled = self._current + 1, 0

    def write_all(self, frames: Iterable[memoryview]) -> None:
        """Take the next frames."""
        for frame in frames:
            self.write(frame)

    def finish(self) -> list[Bytes]:
        """Return the buffers of all columns, in order.

        Raises:
            InvalidArgumentError: bytes are missing.
        """
        if self._current < len(self._views):
            missing = sum(map(len, self._views[self._current :])) - self._filled
            raise InvalidArgumentError(
                f"the stream ended {missing} bytes before what its header declared", field="frame"
            )
        return self.buffers


def encode_varint(value: int) -> bytes:
    """Return a number of 0 or more as protobuf writes tags and lengths."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _plain_frame(data: bytes) -> memoryview | None:
    """Return the frame of a message that is one frame and nothing else; None sends it to the protobuf library."""
    if not data or data[0] != _FRAME_TAG:
        return None
    length = 0
    for position, byte in enumerate(data[1 : 1 + _MAX_VARINT_BYTES]):
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            start = position + 2
            return memoryview(data)[start:] if len(data) - start == length else None
    return None


@cache
def keep_frame_buffers() -> None:
    """Raise glibc's thresholds for this process, once; elsewhere it does nothing.

    Fresh pages cost more than the copy into them. glibc maps blocks above a threshold again each time, and raises the
    threshold to the size of the largest such block that was freed (`M_MMAP_THRESHOLD` in mallopt(3)), so freeing one
    untouched block of 32 MiB is enough. Gets were seen to go from 0.7 to 1.3 GB/s, puts of asyncio clients that never
    get to take half of the CPU time.
    """
    block = bytes(_LARGEST_THRESHOLD_BYTES)
    del block
