"""Files of records, one in each frame.

A file appears under its name once it is complete and on the disk: "tqrecs02", then the records, numbered from 0 on (see
`file_backend`), and a frame without a body.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tq_service.errors import SnapshotDamagedError
from tq_service.journal.file_backend import HEADER_BYTES, RESERVE_BYTES, Break, frame, read_frame
from tq_service.journal.files import FileWriter, free_bytes

_MAGIC: Final = b"tqrecs02"
_BUFFER_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 2 * RESERVE_BYTES
"""Disk space left free for the log, and for its reserve."""
_WORK_SECONDS: Final = 0.0005
_REST_SECONDS: Final = 0.0001
Each = TypeVar("Each")


class Pace:
    """Makes Python code in a thread rest every half a millisecond, so that the event loop runs.

    The interpreter alone switches threads every 5 ms, a delay for each step of the loop.
    """

    def __init__(self) -> None:
        self._resumed_at = time.perf_counter()

    def step(self) -> None:
        """Rest for a moment if it is time."""
        if time.perf_counter() - self._resumed_at > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._resumed_at = time.perf_counter()


class RecordWriter(FileWriter):
    """Writes records in order, in a thread that leaves time to an event loop.

    Raises:
        OSError: the file cannot be written, or would leave hardly any space on the disk.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _BUFFER_BYTES)
        self.file.write(_MAGIC)
        self.count = 0
        self._pace = Pace()
        self._unchecked_bytes = 0  # written since free space was last looked up

    def write(self, *parts: bytes | memoryview) -> None:
        """Append a record, whose bytes may come in parts."""
        head, body = frame(self.count, parts)
        self.file.write(head)
        self.file.write(body)
        self.count += 1
        self._unchecked_bytes += len(body)
        if self._unchecked_bytes >= _BUFFER_BYTES:
            self._unchecked_bytes = 0
            free = free_bytes(self._partial.parent)
            if free < _SPARE_BYTES:
                raise OSError(errno.ENOSPC, f"the disk has {free} bytes free, of which {_SPARE_BYTES} stay so")
        self._pace.step()

    def commit(self) -> None:
        """End the file, and give it its name."""
        self.file.writelines(frame(self.count, ()))
        super().commit()


class Found(NamedTuple):
    """A record, its number, and its position in the file."""

    at: int
    number: int
    data: bytes


def read_records(path: Path, at: int = 0, number: int = 0) -> Iterator[Found]:
    """Yield the records of a file.

    Args:
        path: the file.
        at: position of the first one to read; 0 for the first of all.
        number: of that record.

    Raises:
        SnapshotDamagedError: the file differs from the written one.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        try:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise Break("does not begin like a file of records")
            at = at or len(_MAGIC)
            file.seek(at)
            while body := read_frame(file, number):
                yield Found(at, number, body)
                at += HEADER_BYTES + len(body)
                number += 1
            if file.read(1):
                raise Break("continues after its end")
        except Break as flaw:
            raise damaged(path, at, f"it {flaw}") from None


def gathered(values: Iterable[Each], least: int, size_of: Callable[[Each], int] = lambda _: 1) -> Iterator[list[Each]]:
    """Yield values in lists of at least this size together; the last list may be smaller."""
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


def damaged(path: Path, at: int, problem: str) -> SnapshotDamagedError:
    """Return the error for damage at a position of a file."""
    return SnapshotDamagedError(
        f"{path} is damaged at byte {at}: {problem}; go on with an older one, or restore a checkpoint",
        metadata={"path": str(path), "byte": str(at)},
    )
