"""Places that store recordings: a directory, which may share files with a data directory, or an object store.

Either kind of place stores named objects. An object is written once and atomically. An object's header contains the
object's size and checksum, which are used to detect damage. A file shared with a data directory has no such header, so
its bytes are verified against the checksum of the put.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tq_service.addresses import redacted
from tq_service.errors import (
    DataDirError,
    DiskFullError,
    InvalidArgumentError,
    TqError,
    UnavailableError,
)
from tq_service.objects.base import (
    HEADER_BYTES,
    Buffer,
    ObjectMissingError,
    ObjectStore,
    check,
    make_object_store,
    seal,
)
from tq_service.storage.blobs.segments import SegmentBlobs

LEAST_FREE_BYTES: Final = 1 << 30
"""Disk space that a recording must leave free for puts, in bytes."""

LINKED_SUFFIX: Final = ".seg"
_LOCK: Final = "lock"
_PART_SUFFIX: Final = ".part"
_MOST_BUFFERS: Final = 512  # maximum number of buffers per writev call; the system limit is 1,024
_SLACK_SHARE: Final = 16
"""Because truncation is slow, a linked file is truncated only if its unused part exceeds 1/16 of its used part."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EACCES, errno.ENOSYS})


class Place(ABC):
    """Storage for the named objects of one recording.

    A place must be used from a single event loop. Its methods do not block this loop.

    Attributes:
        name: path or URL as shown to users, with passwords removed.
    """

    name: str

    @abstractmethod
    async def open(self, *, for_writing: bool) -> None:
        """Open the place for reading. With `for_writing`, also open it for writing.

        Raises:
            DataDirError: the directory is not a recording or cannot be used, or another service is writing to it.
            InvalidArgumentError, UnavailableError: the object store cannot be used.
        """

    @abstractmethod
    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object under a name that has never been used before.

        Raises:
            TqError: the object could not be written.
        """

    async def link(self, files: Sequence[tuple[str, Path, int]]) -> bool:
        """Link existing files into this place. Files with much unused space at the end are truncated.

        Args:
            files: tuples of a file's name in this place, its path, and the number of bytes used. These files must no
                longer be written to.

        Returns:
            True if the files were linked, or False if this place cannot contain links to them.

        Raises:
            TqError: the files could not be linked, but a later attempt may succeed.
        """
        return False

    @abstractmethod
    async def read(self, name: str) -> memoryview:
        """Read an entire object and verify its checksum.

        Raises:
            DataLossError: the object is missing or damaged.
        """

    @abstractmethod
    async def read_part(self, name: str, start: int, size: int) -> memoryview:
        """Read `size` bytes of an object from offset `start`. The bytes may be damaged, so the caller must verify them.

        Raises:
            DataLossError: the object is missing or shorter than the requested range.
        """

    @abstractmethod
    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects, ignoring names that do not exist."""

    @abstractmethod
    async def names(self, prefix: str) -> list[str]:
        """Return, in sorted order, all object names that begin with `prefix`, which must end with a slash."""

    @abstractmethod
    async def close(self) -> None:
        """Close the place. Closing it again has no effect."""


class Directory(Place):
    """A recording in a directory.

    Args:
        path: path of the directory, which is created when the place is opened for writing.
        sync: whether to sync each written object to disk, instead of letting the operating system write it later.
        least_free_bytes: disk space that the recording must leave free, in bytes.
        segments: store that takes back data-directory files for reuse once the recording no longer contains them. If
            None, these files are deleted.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync: bool = False,
        least_free_bytes: int = LEAST_FREE_BYTES,
        segments: SegmentBlobs | None = None,
    ) -> None:
        self.name = str(path)
        self._path = path
        self._sync = sync
        self._least_free_bytes = least_free_bytes
        self._segments = segments
        self._lock_fd: int | None = None

    async def open(self, *, for_writing: bool) -> None:
        await asyncio.to_thread(self._open, for_writing)

    def _open(self, for_writing: bool) -> None:
        try:
            if not for_writing:
                if not (self._path / "steps").is_dir():
                    raise DataDirError(
                        f"{self._path} is not a recording: its directory 'steps' is missing. Pass the directory that "
                        "was passed to serve --record, or a copy of that directory.",
                        metadata={"path": self.name},
                    )
                return
            for name in ("steps", "puts"):
                (self._path / name).mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirError(
                f"could not create a recording at {self._path} ({error}); use a directory that this user may write to",
                metadata={"path": self.name},
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise DataDirError(
                f"another service is already recording to {self._path}; use a separate directory for each service",
                metadata={"path": self.name},
            ) from error
        self._lock_fd = fd
        for part in self._path.glob(f"*/*{_PART_SUFFIX}"):
            part.unlink()

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        await asyncio.to_thread(self._write, name, parts)

    def _write(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._path / name
        part = path.with_name(path.name + _PART_SUFFIX)
        views = [view for view in seal(name, parts) if len(view)]
        size = sum(map(len, views))
        try:
            self._check_free(size)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, views)
                if self._sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            part.rename(path)
            self._sync_parent(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise self._refusal(error) from error

    def _check_free(self, size: int) -> None:
        free_bytes = shutil.disk_usage(self._path).free
        if free_bytes - size < self._least_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the disk has only {free_bytes} bytes free, but a recording must leave at least "
                f"{self._least_free_bytes} bytes free",
            )

    def _sync_parent(self, path: Path) -> None:
        if self._sync:
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _refusal(self, error: OSError) -> TqError:
        if error.errno in _FULL:
            return DiskFullError(
                f"the recording at {self._path} is out of space ({error}); free disk space, or limit the recording "
                "with record_steps or record_bytes",
                metadata={"path": self.name},
            )
        return UnavailableError(f"could not write to the recording at {self._path} ({error})", reason="DISK_FAILED")

    async def link(self, files: Sequence[tuple[str, Path, int]]) -> bool:
        return await asyncio.to_thread(self._link, files)

    def _link(self, files: Sequence[tuple[str, Path, int]]) -> bool:
        try:
            self._check_free(0)
            for name, file, size in files:
                path = self._path / name
                os.link(file, path)
                if path.stat().st_size > size + size // _SLACK_SHARE:
                    os.truncate(path, size)
            self._sync_parent(path)
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return False
            raise self._refusal(error) from error
        return True

    async def read(self, name: str) -> memoryview:
        return await asyncio.to_thread(self._read, name)

    def _read(self, name: str) -> memoryview:
        data = memoryview(self._bytes_of(name, 0, None))
        header, content = data[:HEADER_BYTES], data[HEADER_BYTES:]
        check(name, header, content)
        return content

    async def read_part(self, name: str, start: int, size: int) -> memoryview:
        offset = 0 if name.endswith(LINKED_SUFFIX) else HEADER_BYTES
        return memoryview(await asyncio.to_thread(self._bytes_of, name, offset + start, size))

    def _bytes_of(self, name: str, start: int, size: int | None) -> bytearray:
        try:
            with (self._path / name).open("rb", buffering=0) as file:
                found = os.fstat(file.fileno()).st_size
                buffer = bytearray(max(0, found - start) if size is None else size)
                file.seek(start)
                view = memoryview(buffer)
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except FileNotFoundError as error:
            raise ObjectMissingError(f"the recording at {self._path} has no file {name}") from error
        except OSError as error:
            raise UnavailableError(
                f"could not read the file {name} of the recording at {self._path} ({error})"
            ) from error
        if view:
            raise ObjectMissingError(
                f"the file {name} of the recording at {self._path} has {found} bytes; expected at least "
                f"{start + len(buffer)}. The file was truncated"
            )
        return buffer

    async def remove(self, names: Sequence[str]) -> None:
        linked = [self._path / name for name in names if name.endswith(LINKED_SUFFIX)]
        if self._segments is not None and linked:
            await self._segments.take_files(linked)
        await asyncio.to_thread(self._remove, names)

    def _remove(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._refusal(error) from error

    async def names(self, prefix: str) -> list[str]:
        return await asyncio.to_thread(self._names, prefix)

    def _names(self, prefix: str) -> list[str]:
        found = (path.name for path in (self._path / prefix).iterdir())
        return sorted(prefix + name for name in found if not name.endswith(_PART_SUFFIX))

    async def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _write_all(fd: int, views: Sequence[memoryview]) -> None:
    for at in range(0, len(views), _MOST_BUFFERS):
        some = list(views[at : at + _MOST_BUFFERS])
        while some:
            written = os.writev(fd, some)
            while some and written >= len(some[0]):
                written -= len(some.pop(0))
            if written:
                some[0] = some[0][written:]


class Objects(Place):
    """A recording in an object store. Only one service at a time may write to a given URL.

    Args:
        url: URL of the object store.
    """

    def __init__(self, url: str) -> None:
        self.name = redacted(url)
        self._objects: ObjectStore = make_object_store(url)
        if not self._objects.abilities.lists_names:
            raise InvalidArgumentError(
                f"{self.name}: this object store cannot list names, which is necessary to find the steps of a "
                "recording; use a directory, or an object store such as s3, gs, az or file",
                field="record",
            )

    async def open(self, *, for_writing: bool) -> None:
        await self._objects.open("", 0)

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._objects.put(name, parts, copies=1)

    async def read(self, name: str) -> memoryview:
        return await self._read(name, await self._objects.size(name))

    async def read_part(self, name: str, start: int, size: int) -> memoryview:
        return (await self._read(name, start + size))[start:]

    async def _read(self, name: str, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        await self._objects.read(name, data)
        return data

    async def remove(self, names: Sequence[str]) -> None:
        await self._objects.remove(names)  # the recorder removes any remaining objects when it next opens the place

    async def names(self, prefix: str) -> list[str]:
        return sorted([name async for name in self._objects.list_names(prefix)])

    async def close(self) -> None:
        await self._objects.aclose()


def place_of(where: str, *, sync: bool = False, segments: SegmentBlobs | None = None) -> Place:
    """Create a `Place` for a path or an object store URL. `sync` and `segments` apply only to directories.

    Raises:
        InvalidArgumentError: the URL does not match any object store, or the object store cannot store a recording.
    """
    return Objects(where) if "://" in where else Directory(Path(where), sync=sync, segments=segments)
