"""The file of a checkpoint: what a service knew at one moment, and the bytes of all its samples.

A checkpoint is a directory with one file, `checkpoint.tqc`. It is written under another name and takes the place of the
one before it in a single step, once it is whole and on the disk: whatever happens, the directory has the old one or the
new one. What is left of one that was not finished is overwritten by the next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tq_service.durable.checkpoint_plan import Block
from tq_service.durable.files import PARTIAL_SUFFIX, beside, make_folder
from tq_service.durable.record_file import RecordWriter, gathered
from tq_service.durable.snapshot import ServiceSnapshot, StoredBlock, write_header, write_record, write_state
from tq_service.errors import DiskFullError, InternalError, InvalidArgumentError, PreconditionError
from tq_service.wire.columns import ColumnShape

FILE_NAME: Final = "checkpoint.tqc"
_LONGEST_NAME: Final = 200
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=@+-]*")
"""One part of a name: never "", ".", ".." or hidden."""
_RECORD_BYTES: Final = 1 << 20
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BAD_FOLDER: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
     errno.ENAMETOOLONG, errno.EINVAL}
)  # fmt: skip


def checkpoint_path(checkpoint_dir: Path | None, name: str) -> Path:
    """Return the path of the file of a checkpoint, which callers name, below the directory for all of them.

    The directory is its operator's, symlinks on the way to it included; nothing below it leads out of it. Who may write
    to the directory itself could still exchange a part of the path after this check; callers cannot.

    Raises:
        PreconditionError: the service has no directory for checkpoints.
        InvalidArgumentError: the name is none, or a symlink below the directory leads out of it.
    """
    if checkpoint_dir is None:
        raise PreconditionError(
            "this service has no directory for checkpoints; start it with checkpoint_dir (--checkpoint-dir, "
            "TQ_CHECKPOINT_DIR), or with data_dir, below which it is then"
        )
    if len(name) > _LONGEST_NAME or not all(map(_PART.fullmatch, name.split("/"))):
        raise InvalidArgumentError(
            f"name is {name[:_LONGEST_NAME]!r} ({len(name)} characters); expected 1 to {_LONGEST_NAME}, in parts of "
            "letters, digits and '._=@+-' that begin with a letter or digit, with '/' between them, such as "
            "'nightly/2026-11-21': a place below the checkpoint_dir of the service",
            field="name",
        )
    top = os.path.realpath(checkpoint_dir)
    directory = Path(os.path.realpath(Path(top, name)))  # Path.resolve raises where links go in a circle
    file = directory / FILE_NAME
    if not directory.is_relative_to(top):
        raise _symlink(name, "out of the checkpoint_dir of the service")
    for path in (file, beside(file, PARTIAL_SUFFIX)):
        if path.is_symlink():
            raise _symlink(name, f"at its {path.name}")
    return file


def _symlink(name: str, where: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"name is {name!r}, which leads through a symlink {where}; give another name, or have the link removed",
        field="name",
    )


class CheckpointWriter:
    """Writes a checkpoint: its blocks one after the other, then the state.

    Its methods are for threads, one call at a time; who opened it finishes it, or aborts it.

    Raises:
        DiskFullError: the disk has no room.
        InvalidArgumentError: the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = RecordWriter(path)

    def open(self) -> None:
        """Begin the file; its directory is made where it is not there."""
        with self._explained():
            make_folder(self._path.parent)
            self._writer.open()
            write_header(self._writer, is_checkpoint=True)

    def begin_block(self, block: Block, columns: Sequence[ColumnShape]) -> None:
        """Begin a block, whose bytes are to come."""
        stored = StoredBlock(
            partition_id=block.partition_id, row_count=block.global_indexes.size, columns=tuple(columns)
        )
        with self._explained():
            write_record(self._writer, "block", stored)

    def add(self, chunks: Iterable[memoryview]) -> None:
        """Append bytes of the block."""
        with self._explained():
            for some in gathered(_cut(chunks), len, _RECORD_BYTES):
                self._writer.write(*some)

    def finish(self, snapshot: ServiceSnapshot) -> None:
        """Write the state, and put the file into its place."""
        with self._explained():
            write_state(self._writer, snapshot)
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
                    f"the disk of {folder} has no room for the checkpoint ({error}); free space there"
                ) from error
            if error.errno in _BAD_FOLDER:
                raise InvalidArgumentError(
                    f"no checkpoint can be written to {folder} ({error}); give another name, or let the user of the "
                    "service write there",
                    field="name",
                ) from error
            raise InternalError(
                f"the disk of {folder} failed ({error}); start the service with a checkpoint_dir on another one"
            ) from error


def _cut(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield chunks in parts of a record's bytes at most."""
    for chunk in chunks:
        for start in range(0, len(chunk), _RECORD_BYTES):
            yield chunk[start : start + _RECORD_BYTES]
