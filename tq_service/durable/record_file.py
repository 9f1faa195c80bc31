"""Files of records: each with a checksum, and the file under its name only once it is whole and on the disk.

"tqrecs01", then for each record its size (uint32), its checksum (XXH3, uint64), both little-endian, and its bytes
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, TypeVar

import xxhash

from tq_service.durable.files import PARTIAL_SUFFIX, sync_path
from tq_service.durable.log.segment_log import RESERVE_BYTES
from tq_service.durable.pace import Pace
from tq_service.errors import SnapshotDamagedError

_MAGIC: Final = b"tqrecs01"
_FRAME: Final = struct.Struct("<IQ")
_BUFFER_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 2 * RESERVE_BYTES
"""What is left free of the disk, so that changes can be written down beside it, and room be set aside for them."""
Each = TypeVar("Each")


class RecordWriter:
    """Writes records one after the other, then commits them, or leaves no trace; in a `with`, by how it ends.

    It is made for a thread beside an event loop, and gives way to it.

    Raises:
        OSError: the file cannot be written, or would leave hardly any room on the disk.
    """

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._file: BinaryIO | None = None
        self._pace = Pace()
        self._unchecked_bytes = 0  # written since the room on the disk was looked at

    def open(self) -> None:
        """Begin the file."""
        self._file = self._partial.open("wb", buffering=_BUFFER_BYTES)
        self._file.write(_MAGIC)

    def write(self, *parts: bytes | memoryview) -> None:
        """Append a record, whose bytes may come in parts."""
        if self._file is None:
            raise ValueError("records are written after `open`, and before `commit` or `abort`")
        checksum = xxhash.xxh3_64()
        for part in parts:
            checksum.update(part)
        size = sum(len(part) for part in parts)
        self._file.write(_FRAME.pack(size, checksum.intdigest()))
        for part in parts:
            self._file.write(part)
        self.count += 1
        self._check_room(size)
        self._pace.step()

    def _check_room(self, size: int) -> None:
        self._unchecked_bytes += size
        if self._unchecked_bytes < _BUFFER_BYTES:
            return
        self._unchecked_bytes = 0
        disk = os.statvfs(self._partial.parent)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"the disk has {free_bytes} bytes free, of which {_SPARE_BYTES} stay so")

    def commit(self) -> None:
        """Give the file its name, once all of it is on the disk."""
        file, self._file = self._file, None
        if file is None:
            raise ValueError("only an open file can be committed")
        try:
            with file:
                file.flush()
                os.fsync(file.fileno())
            self._partial.rename(self._path)
            sync_path(self._path.parent)
        except BaseException:
            self._remove()
            raise

    def abort(self) -> None:
        """Leave no trace; nothing where it is committed, or was never open."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what is still in the buffer has no room on the disk
                file.close()
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> RecordWriter:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def read_records(path: Path, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield for each record of a file where it begins, and its bytes.

    Args:
        path: the file.
        at: where to begin, at a record or at 0.

    Raises:
        SnapshotDamagedError: the file does not hold what was written.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise damaged(path, 0, "it does not begin like a file of records")
        at = at or len(_MAGIC)
        file.seek(at)
        while at < size:
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                raise damaged(path, at, "it ends within a record")
            length, checksum = _FRAME.unpack(frame)
            if length > size - at - _FRAME.size:
                raise damaged(path, at, "it ends within a record")
            record = file.read(length)
            if len(record) < length or xxhash.xxh3_64_intdigest(record) != checksum:
                raise damaged(path, at, "a record does not fit its checksum")
            yield at, record
            at += _FRAME.size + length


def gathered(values: Iterable[Each], size_of: Callable[[Each], int], least: int) -> Iterator[list[Each]]:
    """Yield values in lists, each of at least so much together, as one record has them; the last one has the rest."""
    some: list[Each] = []
    size = 0
    for value in values:
        some.append(value)
        size += size_of(value)
        if size >= least:
            yield some
            some, size = [], 0
    if some:
        yield some


def damaged(path: Path, at: int, what: str) -> SnapshotDamagedError:
    """Return the error for a file that does not hold what was written, and where."""
    return SnapshotDamagedError(
        f"{path} is damaged at byte {at}: {what}; go on with an older one, or restore a checkpoint",
        metadata={"path": str(path), "byte": str(at)},
    )
