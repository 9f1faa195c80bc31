"""The file of a checkpoint: what a service knew at one moment, and the bytes of all its samples.

A folder has one, `checkpoint.tqc`. It is written under another name and takes the place of the one before it in a
single step, once it is whole and on the disk: whatever happens, the folder has the old one or the new one. What is left
of one that was not finished is overwritten by the next.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tq_service.durable.checkpoint_plan import Block
from tq_service.durable.file_names import make_folder
from tq_service.durable.record_file import RecordWriter
from tq_service.durable.snapshot import FrozenService, write_header, write_state
from tq_service.errors import DiskFullError, InternalError, InvalidArgumentError
from tq_service.v1 import snapshot_pb2 as pb
from tq_service.wire.columns import ColumnShape, encode_header

FILE_NAME: Final = "checkpoint.tqc"
_RECORD_BYTES: Final = 1 << 20
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BAD_FOLDER: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
     errno.ENAMETOOLONG, errno.EINVAL}
)  # fmt: skip


def checkpoint_path(directory: str) -> Path:
    """Return the path of the checkpoint of a folder.

    Raises:
        InvalidArgumentError: the folder is not named from the root, and would be one of the service's own.
    """
    path = Path(directory)
    if not path.is_absolute() or "\0" in directory:
        raise InvalidArgumentError(
            f"directory is {directory!r}; give the whole path of a folder on the host of the controller, such as "
            "/var/backups/tq",
            field="directory",
        )
    return path / FILE_NAME


class CheckpointWriter:
    """Writes a checkpoint: its blocks one after the other, then the state.

    Its methods are for threads, one call at a time; who opened it finishes it, or aborts it.

    Raises:
        DiskFullError: the disk has no room.
        InvalidArgumentError: the folder cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = RecordWriter(path)

    def open(self) -> None:
        """Begin the file; the folder is made where it is not there."""
        with self._explained():
            make_folder(self._path.parent)
            self._writer.open()
            write_header(self._writer, is_checkpoint=True)

    def begin_block(self, block: Block, columns: Sequence[ColumnShape]) -> None:
        """Begin a block, whose bytes are to come."""
        message = pb.SnapshotBlock(
            partition_id=block.partition_id,
            row_count=block.global_indexes.size,
            columns=map(encode_header, columns),
            size_bytes=sum(column.value_bytes for column in columns),
        )
        with self._explained():
            self._writer.write(pb.SnapshotRecord(block=message).SerializeToString())

    def add(self, chunks: Iterable[memoryview]) -> None:
        """Append bytes of the block."""
        with self._explained():
            for some in _gathered(chunks):
                self._writer.write(*some)

    def finish(self, frozen: FrozenService) -> None:
        """Write the state, and put the file into its place."""
        with self._explained():
            write_state(self._writer, frozen)
            self._writer.commit()

    def abort(self) -> None:
        """Leave no trace; nothing after `finish`."""
        self._writer.abort()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self._path.parent
            if error.errno in _NO_ROOM:
                raise DiskFullError(
                    f"the disk of {folder} has no room for the checkpoint ({error}); free space or name another folder"
                ) from error
            if error.errno in _BAD_FOLDER:
                raise InvalidArgumentError(
                    f"no checkpoint can be written to {folder} ({error}); name a folder that the user of the service "
                    "may write to",
                    field="directory",
                ) from error
            raise InternalError(f"the disk of {folder} failed ({error}); name a folder on another one") from error


def _gathered(chunks: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield chunks in lists of about a record's bytes; large ones are cut."""
    some: list[memoryview] = []
    size = 0
    for chunk in chunks:
        for start in range(0, len(chunk), _RECORD_BYTES):
            part = chunk[start : start + _RECORD_BYTES]
            some.append(part)
            size += len(part)
            if size >= _RECORD_BYTES:
                yield some
                some, size = [], 0
    if some:
        yield some
