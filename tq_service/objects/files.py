"""Objects as files of a directory that nodes share: NFS, Lustre, GPFS or a local disk.

`file:///mnt/shared/tq?survives=power`. An object is written as `<name>.part` and linked to its name when all of it is
there; a link fails where the name is taken, on network file systems too, so nothing is replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, cast

from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    QuotaExceededError,
    TqError,
    UnavailableError,
)
from tq_service.objects.base import Abilities, Capacity, ObjectMissingError
from tq_service.objects.names import ObjectName
from tq_service.objects.options import EngineUrl
from tq_service.objects.sealed import HEADER_BYTES, check, size_of
from tq_service.objects.threaded import RETRY_AFTER_SECONDS, ThreadedObjects
from tq_service.objects.threads import Landing

_PART: Final = ".part"
_CHUNK_BYTES: Final = 1 << 20
_NO_SPACE: Final = frozenset({28, 122})  # ENOSPC, EDQUOT
_MOST_PARTS: Final = 512


class FileObjects(ThreadedObjects):
    """Objects in a directory; all processes that use it see the same ones.

    Of the URL `file:///DIRECTORY?survives=process&capacity_bytes=0&threads=4&timeout_seconds=30`. What objects outlive
    depends on the file system, so that the operator says it; unless that is `process`, each is synced before it counts.
    """

    engine = "file system"

    def __init__(
        self,
        directory: Path,
        *,
        survives: Literal["process", "node", "power"] = "process",
        capacity_bytes: int = 0,
        threads: int = 4,
        timeout_seconds: float = 30.0,
    ) -> None:
        """Make an engine; `open` makes the directory.

        Args:
            directory: where objects are.
            survives: see `Abilities`.
            capacity_bytes: bytes that all objects may have together; 0: what the file system has.
            threads: how many calls run at a time.
            timeout_seconds: how long one may take; a network file system whose server is gone hangs.
        """
        super().__init__(str(directory), threads=threads, timeout_seconds=timeout_seconds)
        self._directory = directory
        self._survives = survives
        self._capacity_bytes = capacity_bytes

    @classmethod
    def from_url(cls, url: str) -> FileObjects:
        """Make the engine that a URL describes."""
        parsed = EngineUrl(url)
        if parsed.host or not parsed.path:
            raise InvalidArgumentError(f"got {parsed.redacted}, expected file:///DIRECTORY, with three slashes")
        survives = parsed.choice("survives", "process", ("process", "node", "power"))
        made = cls(
            Path("/") / parsed.path,
            survives=cast("Literal['process', 'node', 'power']", survives),
            capacity_bytes=parsed.count("capacity_bytes", 0, least=0),
            threads=parsed.count("threads", 4),
            timeout_seconds=parsed.seconds("timeout_seconds", 30.0),
        )
        parsed.check_all_used()
        return made

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives=self._survives, fixed_copies=1, lists_by_prefix=True)

    async def remove_below(self, prefix: str) -> bool:
        await self._run(lambda: self._remove_files(list(self._below(prefix))))
        return True

    def _connect(self, node: str, offered_bytes: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def _close(self) -> None:
        """There is nothing to leave."""

    def _error(self, error: Exception) -> TqError:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return self._full(str(error))
        return super()._error(error)

    def _copies(self, names: Sequence[str]) -> list[int]:
        return [int(self._path(name).is_file()) for name in names]

    def _remove(self, names: Sequence[str]) -> list[str]:
        self._remove_files([self._path(name) for name in names])
        return []

    def _list(self, prefix: str) -> list[str]:
        return [self._name(path) for path in self._below(prefix) if path.suffix != _PART]

    def _put(self, name: str, header: bytes, views: Sequence[memoryview], copies: int) -> int:
        if self._capacity_bytes:
            used = self._capacity().used_bytes or 0
            if used + sum(map(len, views)) > self._capacity_bytes:
                raise self._full(f"{used} of {self._capacity_bytes} bytes are used")
        path = self._path(name)
        part = path.with_name(path.name + _PART)
        if path.exists():
            raise AlreadyExistsError(f"object {name} is there; take another attempt's name")
        fd = self._create(part, name)
        try:
            try:
                _write(fd, [memoryview(header), *views])
                if self._survives != "process":
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.link(part, path)
        except FileExistsError:
            raise AlreadyExistsError(f"object {name} is there; take another attempt's name") from None
        finally:
            part.unlink(missing_ok=True)
        if self._survives != "process":
            _sync_directories(path.parent, self._directory)
        return 1

    def _create(self, part: Path, name: str) -> int:
        for _ in range(8):
            part.parent.mkdir(parents=True, exist_ok=True)
            # A remover may take the empty directory away before there is a file in it.
            with contextlib.suppress(FileNotFoundError):
                try:
                    return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                except FileExistsError:
                    message = f"object {name} is half written; take another attempt's name"
                    raise AlreadyExistsError(message) from None
        raise UnavailableError(f"{part.parent} is removed again and again; ask again")

    def _read(self, name: str, landing: Landing, start: int) -> None:
        header = bytearray(HEADER_BYTES)
        chunk = memoryview(bytearray(min(len(landing.view), _CHUNK_BYTES)))
        with self._opened(name) as fd:
            found = _read_at(fd, memoryview(header), 0)
            for first in range(0, len(landing.view), _CHUNK_BYTES):
                wanted = chunk[: len(landing.view) - first]
                landing.write(first, wanted[: _read_at(fd, wanted, HEADER_BYTES + start + first)])
        check(name, header[:found], start, landing.view)

    def _size(self, name: str) -> int:
        header = bytearray(HEADER_BYTES)
        with self._opened(name) as fd:
            found = _read_at(fd, memoryview(header), 0)
        return size_of(name, header[:found])

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ObjectMissingError(f"object {name} is not in {self._directory}; it was removed") from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _remove_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            path.with_name(path.name + _PART).unlink(missing_ok=True)
            for parent in path.parents[:4]:
                if parent == self._directory:
                    break
                try:
                    parent.rmdir()
                except OSError:  # it has other files, or is gone
                    break

    def _capacity(self) -> Capacity:
        if not self._capacity_bytes:
            disk = shutil.disk_usage(self._directory)
            return Capacity(total_bytes=disk.total, used_bytes=disk.total - disk.free)
        return Capacity(total_bytes=self._capacity_bytes, used_bytes=sum(_size_on_disk(p) for p in self._below("")))

    def _below(self, prefix: str) -> Iterator[Path]:
        """Yield the files whose names begin with a prefix, half-written ones too."""
        first = self._directory / prefix.rpartition("/")[0]
        for directory, _, files in os.walk(first):
            for file in files:
                path = Path(directory, file)
                if self._name(path).startswith(prefix):
                    yield path

    def _path(self, name: str) -> Path:
        ObjectName.parse(name)  # nothing else becomes a path
        return self._directory / name

    def _name(self, path: Path) -> str:
        return path.relative_to(self._directory).as_posix()

    def _full(self, detail: str) -> QuotaExceededError:
        message = f"{self._directory} is full: {detail}; remove objects or make the file system larger"
        return QuotaExceededError(message, retry_after_seconds=RETRY_AFTER_SECONDS)


def _write(fd: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(fd, views[:_MOST_PARTS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def _read_at(fd: int, into: memoryview, start: int) -> int:
    """Fill `into` from `start` on, or up to the end of the file; return the bytes that were read."""
    done = 0
    while done < len(into) and (count := os.preadv(fd, [into[done:]], start + done)):
        done += count
    return done


def _sync_directories(directory: Path, root: Path) -> None:
    """Make the entries of new files and directories outlive a crash, up to the root."""
    while True:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if directory == root:
            return
        directory = directory.parent


def _size_on_disk(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
