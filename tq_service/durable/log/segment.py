"""Segments: the files of a log, each of frames, which hold what was committed together.

    segment: "tqlog003", opening frame, frame ..., closing frame
    frame:   header, then for each record its size (uint32), its stream (uint8) and its bytes
    header:  size of all that follows it (uint32), number of the frame (uint64), XXH3 of what follows, seeded with that
             number (uint64), XXH32 of the header so far (uint32); all numbers are little-endian

Snapshots and checkpoints are of frames too (`record_file`). A reader knows which number comes next, so that a frame
which is missing, repeated or elsewhere is found.

Records are numbered through all segments, and the number of a frame is that of its first one. Where one
segment ends and the next begins has a number too: of the opening frame, whose one record says how the segment is
written, of the closing frame, which is empty and says that another segment follows, and in the name of the file.

What a process that is killed leaves is whole frames and a part of one. Only a loss of power leaves more than that.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import numpy as np
import xxhash

from tq_service.durable.files import numbers_in
from tq_service.durable.log.log import Record, Stream
from tq_service.errors import NewerVersionError

_MAGIC: Final = b"tqlog003"
_HEADER: Final = struct.Struct("<IQQI")
_CHECKED: Final = struct.Struct("<IQQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size
_NUMBER_OFFSET: Final = 4
_RECORD: Final = struct.Struct("<IB")
_NO_STREAM: Final = 0  # of an opening
_STREAMS: Final = {int(stream): stream for stream in Stream}
_NAME: Final = re.compile(r"journal-(\d{12,})\.tqj")
Parts: TypeAlias = tuple[int, Sequence[bytes | bytearray]]
"""A record that is to be written: its stream, and its bytes in parts."""


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of the segment that begins with a number."""
    return directory / f"journal-{number:012d}.tqj"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers that the segments of a directory begin with, ascending."""
    return numbers_in(directory, _NAME)


@cache
def machine_boot_id() -> str:
    """Return what stays the same until the machine is restarted; what was not synced may be lost only then."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


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


def read_frame(file: BinaryIO, number: int) -> bytes:
    """Return the body of the frame that a file is at; raises Break where none with this number is there."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise Break("ends within a frame", is_torn=True)
    size, found, checksum, header_checksum = _HEADER.unpack(header)
    if xxhash.xxh32_intdigest(header[: _CHECKED.size]) != header_checksum:
        raise Break("has a frame whose header does not fit its checksum")
    body = file.read(size)
    if len(body) < size:
        raise Break("ends within a frame", is_torn=True)
    if xxhash.xxh3_64_intdigest(body, found) != checksum:
        raise Break("has a frame that does not fit its checksum")
    if found != number:
        raise Break(f"has record {found} where record {number} should be")
    return body


def _body(records: Iterable[Parts]) -> Iterator[bytes | bytearray]:
    for stream, parts in records:
        yield _RECORD.pack(sum(map(len, parts)), stream)
        yield from parts


class SegmentWriter:
    """A segment that is appended to, by one thread at a time. Methods raise OSError.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, descriptor: int, end: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = end

    @classmethod
    def create(cls, directory: Path, number: int, *, is_synced: bool) -> SegmentWriter:
        """Make a segment, which is not on the disk before `sync` and a sync of the directory.

        Args:
            directory: of the log.
            number: of its opening; there is no such segment.
            is_synced: whether nothing depends on what is written before `sync` returned.
        """
        path = segment_path(directory, number)
        segment = cls(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), 0)
        opening = (_NO_STREAM, (bytes([is_synced]), machine_boot_id().encode()))
        try:
            head, body = frame(number, _body([opening]))
            segment._write(_MAGIC + head, body)
        except BaseException:
            path.unlink(missing_ok=True)
            segment.close(sync=False)
            raise
        return segment

    @classmethod
    def reopen(cls, path: Path, end: int) -> SegmentWriter:
        """Go on in a segment after its first `end` bytes; what follows them is cut off."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(descriptor, end)
        return cls(path, descriptor, end)

    def append(self, number: int, records: Sequence[Parts]) -> None:
        """Hand a frame to the kernel in one call; one that does not fit is cut off again.

        Args:
            number: of the first record.
            records: what to write; none for the closing.
        """
        self._write(*frame(number, _body(records)))

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        os.fsync(self._descriptor)

    def close(self, *, sync: bool) -> None:
        """Let go of the file, which with `sync` is on the disk then."""
        try:
            if sync:
                self.sync()
        finally:
            os.close(self._descriptor)

    def _write(self, head: bytes, body: bytes) -> None:
        size = len(head) + len(body)
        try:
            written = os.pwritev(self._descriptor, [head, body], self._end)
            if written < size:  # the disk is full, or the system takes no more in one call; the next one says which
                rest = memoryview(head + body)
                while written < size:
                    written += os.pwrite(self._descriptor, rest[written:], self._end + written)
        except BaseException:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += size


class FoundSegment:
    """A segment as it was found.

    Attributes:
        number: that its name says.
        path: of the file.
        size: of the file, in bytes.
        end: how many bytes of it are whole, without the closing, as far as it was read.
        last_number: of the last record before that.
        is_closed: whether the closing follows there.
        flaw: what is wrong at `end`; None where nothing is.
        is_synced: whether nothing depended on what was written before it was synced.
        machine_boot_id: of the machine, when it was begun.
    """

    def __init__(self, directory: Path, number: int) -> None:
        """Read the opening; raises OSError where that cannot be read."""
        self.number = self.last_number = number
        self.path = segment_path(directory, number)
        self.size = self.path.stat().st_size
        self.end = 0
        self.flaw: Break | None = None
        self.is_synced = self.is_closed = False
        self.machine_boot_id = ""
        try:
            with self._opened(0) as file:
                magic = file.read(len(_MAGIC))
                if magic != _MAGIC:
                    raise Break("does not begin like a file of the journal", is_torn=_MAGIC.startswith(magic))
                ((_, record),) = _records(read_frame(file, number))
                self.is_synced, self.machine_boot_id, self.end = bool(record[0]), record[1:].decode(), file.tell()
        except Break as flaw:
            self.flaw = flaw

    @property
    def is_begun(self) -> bool:
        """Whether it has a whole opening."""
        return self.end > 0

    @property
    def may_lose_tail(self) -> bool:
        """Whether a loss of power may have taken what was written last, in any order."""
        return self.is_begun and not self.is_synced and self.machine_boot_id != machine_boot_id()

    def records(self, until: float = math.inf) -> Iterator[Record]:
        """Yield the records that were not read yet, up to a number, the closing, a flaw or the end.

        Raises:
            OSError: the segment cannot be read.
        """
        try:
            with self._opened(self.end) as file:
                while self.last_number < until and file.peek(1):
                    body = read_frame(file, self.last_number + 1)
                    if not body:
                        self.is_closed = True
                        if file.peek(1):
                            raise Break("goes on after its closing")
                        return
                    self.end += HEADER_BYTES + len(body)
                    for stream, record in _records(body):
                        self.last_number += 1
                        yield Record(self.last_number, _stream(stream), record)
        except Break as flaw:
            self.flaw = flaw

    def is_whole_after(self) -> bool:
        """Whether a whole frame that comes later follows the flaw: one that was synced when that was written."""
        data = self.path.read_bytes()[self.end + 1 :]
        file = io.BytesIO(data)
        # What would be the number of a frame that begins at each byte; such a view needs some bytes after the last one.
        numbers = np.ndarray(len(data), "<u8", data + bytes(HEADER_BYTES), _NUMBER_OFFSET, (1,))
        most = self.last_number + 2 + len(data) // _RECORD.size
        for at in np.flatnonzero((numbers > self.last_number) & (numbers < most)).tolist():
            file.seek(at)
            with contextlib.suppress(Break):
                read_frame(file, int(numbers[at]))
                return True
        return False

    @contextlib.contextmanager
    def _opened(self, start: int) -> Iterator[io.BufferedReader]:
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                yield file
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Break(f"cannot be read ({error})") from error


def _records(body: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(body):
        size, stream = _RECORD.unpack_from(body, at)
        at += _RECORD.size + size
        yield stream, body[at - size : at]


def _stream(number: int) -> Stream:
    stream = _STREAMS.get(number)
    if stream is None:
        raise NewerVersionError(
            f"the journal has a record of the unknown stream {number}; it was written by a newer version: install that "
            f"one"
        )
    return stream
