"""Frames, and segments of the log: files of frames, each of which holds the records of one group.

    segment: "tqlog004", opening frame, frame ..., closing frame
    frame:   header, body
    header:  size of the body (uint32), number of the frame (uint64), XXH3 of the body, seeded with that number
             (uint64), XXH32 of the header so far (uint32); all numbers are little-endian

Snapshots and checkpoints consist of frames too (`record_file`). A reader knows the next number, and finds a frame that
is missing, repeated or misplaced.

Records are numbered across all segments, and a frame has the number of its first record. The boundary between two
segments has a number too: that of the opening frame, which describes how the segment is written, of the empty closing
frame, which announces another segment, and of the file's name.

A killed process leaves complete frames and a part of one. Only a loss of power leaves more than that.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from tq_service.journal.files import numbers_in
from tq_service.journal.log import NewRecord, Record, packed, unpacked

_MAGIC: Final = b"tqlog004"
_HEADER: Final = struct.Struct("<IQQI")
_CHECKED: Final = struct.Struct("<IQQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size
_NUMBER_OFFSET: Final = 4
_LEAST_RECORD_BYTES: Final = 5
_NAME: Final = re.compile(r"journal-(\d{12,})\.tqj")


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of the segment that begins with a number."""
    return directory / f"journal-{number:012d}.tqj"


def segment_numbers(directory: Path) -> list[int]:
    """Return the first numbers of all segments in a directory, ascending."""
    return numbers_in(directory, _NAME)


@cache
def machine_boot_id() -> str:
    """Return the id of this run of the machine: unsynced bytes can only get lost between two runs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Break(Exception):  # noqa: N818  (a finding, which the reader turns into an error or a line of the log)
    """The expected frame is missing or not intact.

    Attributes:
        is_torn: whether the file ends here as it does after a kill during a write.
    """

    def __init__(self, problem: str, *, is_torn: bool = False) -> None:
        super().__init__(problem)
        self.is_torn = is_torn


def frame(number: int, parts: Iterable[bytes | bytearray | memoryview]) -> tuple[bytes, bytes]:
    """Return header and body of a frame; its bytes are copied once, here."""
    body = b"".join(parts)
    checked = _CHECKED.pack(len(body), number, xxhash.xxh3_64_intdigest(body, number))
    return checked + _CHECKSUM.pack(xxhash.xxh32_intdigest(checked)), body


def read_frame(file: BinaryIO, number: int) -> bytes:
    """Return the body of the next frame in a file; raises Break unless it is intact and has this number."""
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


class SegmentWriter:
    """An open segment, for one thread at a time. Methods raise OSError.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, descriptor: int, end: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = end

    @classmethod
    def create(cls, directory: Path, number: int, *, is_synced: bool) -> SegmentWriter:
        """Make a segment, which survives a loss of power only after `sync` and a sync of the directory.

        Args:
            directory: of the log.
            number: of its opening; no such segment exists.
            is_synced: whether callers wait for `sync` before they rely on a frame.
        """
        path = segment_path(directory, number)
        segment = cls(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), 0)
        try:
            head, body = frame(number, (bytes([is_synced]), machine_boot_id().encode()))
            segment._write(_MAGIC + head, body)
        except BaseException:
            path.unlink(missing_ok=True)
            segment.close(sync=False)
            raise
        return segment

    @classmethod
    def reopen(cls, path: Path, end: int) -> SegmentWriter:
        """Open a segment to continue after its first `end` bytes; later bytes are cut off."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(descriptor, end)
        return cls(path, descriptor, end)

    def append(self, number: int, records: Sequence[NewRecord]) -> None:
        """Pass a frame to the kernel in one call, or cut it off again; without records it is the closing."""
        self._write(*frame(number, packed(records)))

    def sync(self) -> None:
        """Return once all bytes are on the disk."""
        os.fsync(self._descriptor)

    def close(self, *, sync: bool) -> None:
        """Close the file, after a sync if asked for."""
        try:
            if sync:
                self.sync()
        finally:
            os.close(self._descriptor)

    def _write(self, head: bytes, body: bytes) -> None:
        size = len(head) + len(body)
        try:
            written = os.pwritev(self._descriptor, [head, body], self._end)
            if written < size:  # the disk is full, or one call takes no more; the next call tells which
                rest = memoryview(head + body)
                while written < size:
                    written += os.pwrite(self._descriptor, rest[written:], self._end + written)
        except BaseException:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += size


class FoundSegment:
    """A segment of an earlier process.

    Attributes:
        number: the one in its name.
        path: of the file.
        size: of the file, in bytes.
        end: number of intact bytes, as far as it was read, without the closing.
        last_number: of the last record before `end`.
        is_closed: whether the closing follows there.
        flaw: the problem at `end`, or None.
        is_synced: whether its writer waited for a sync before it relied on a frame.
        machine_boot_id: of the machine, when the segment was begun.
    """

    def __init__(self, directory: Path, number: int) -> None:
        """Read the opening; raises OSError if that cannot be read."""
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
                opening = read_frame(file, number)
                self.is_synced, self.machine_boot_id, self.end = bool(opening[0]), opening[1:].decode(), file.tell()
        except Break as flaw:
            self.flaw = flaw

    @property
    def is_begun(self) -> bool:
        """Whether its opening is intact."""
        return self.end > 0

    @property
    def may_lose_tail(self) -> bool:
        """Whether a loss of power may have taken the last bytes, in any order."""
        return self.is_begun and not self.is_synced and self.machine_boot_id != machine_boot_id()

    def records(self) -> Iterator[Record]:
        """Yield the records up to the closing, a flaw or the end; raises OSError if the file cannot be read."""
        try:
            with self._opened(self.end) as file:
                while file.peek(1):
                    body = read_frame(file, self.last_number + 1)
                    if not body:
                        self.is_closed = True
                        if file.peek(1):
                            raise Break("continues after its closing")
                        return
                    self.end += HEADER_BYTES + len(body)
                    for record in unpacked(body, self.last_number + 1):
                        self.last_number = record.number
                        yield record
        except Break as flaw:
            self.flaw = flaw

    def has_frame_after_flaw(self) -> bool:
        """Whether an intact later frame follows the flaw: when it was written, all before it had been synced."""
        data = self.path.read_bytes()[self.end + 1 :]
        file = io.BytesIO(data)
        # The number of a frame that would begin at each byte; such a view needs some bytes after the last one.
        numbers = np.ndarray(len(data), "<u8", data + bytes(HEADER_BYTES), _NUMBER_OFFSET, (1,))
        most = self.last_number + 2 + len(data) // _LEAST_RECORD_BYTES
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
