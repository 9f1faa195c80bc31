"""The data directory of a service: its lock, and its identity, which stays as long as the directory does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from tq_service.errors import DataDirError
from tq_service.journal.files import (
    PARTIAL_SUFFIX,
    FileWriter,
    make_directory,
    segment_numbers,
    snapshot_numbers,
    snapshot_path,
)
from tq_service.journal.log import LogBackend

FORMAT_VERSION: Final = 4
_BOOT_ID_BYTES: Final = 16
_IDENTITY: Final = "identity.json"
_SEGMENTS: Final = "segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Names that outlive the process.

    Attributes:
        controller_boot_id: 16 bytes, of the controller that keeps its state in the directory.
        storage_boot_id: 16 bytes, of the storage service that keeps its puts there.
        storage_id: name of that storage service, by which samples say where their cells are; empty until it has one.
    """

    controller_boot_id: bytes
    storage_boot_id: bytes
    storage_id: str = ""


def new_identity() -> Identity:
    """Return an identity that no other directory has."""
    return Identity(
        controller_boot_id=secrets.token_bytes(_BOOT_ID_BYTES), storage_boot_id=secrets.token_bytes(_BOOT_ID_BYTES)
    )


def write_identity(path: Path, identity: Identity) -> None:
    """Write an identity, whole or not at all; it survives a loss of power.

    Raises:
        OSError: it cannot be written.
    """
    values = {"format_version": FORMAT_VERSION, **asdict(identity)}
    text = json.dumps({**values, "checksum": _checksum(values)}, indent=2, default=bytes.hex)
    with FileWriter(path) as writer:
        writer.file.write(text.encode() + b"\n")


def read_identity(path: Path) -> Identity | None:
    """Return the identity in a file, None where there is no file.

    Raises:
        DataDirError: the file is damaged, or of another format.
        OSError: it cannot be read.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        version = int(values["format_version"])
        if version != FORMAT_VERSION:
            raise DataDirError(
                f"the data dir {path.parent} has format {version}, "
                + (
                    f"this version of the service reads formats up to {FORMAT_VERSION}; install the version that wrote "
                    "it, or a later one"
                    if version > FORMAT_VERSION
                    else "which this version of the service reads no more; start it with the version that wrote it, or "
                    "name an empty directory"
                ),
                metadata={"path": str(path.parent)},
            )
        # Under a name with a changed letter no sample would find its bytes any more, though all of them are here.
        if values.pop("checksum") != _checksum(values):
            raise ValueError("its checksum is that of other names")
        identity = Identity(
            controller_boot_id=bytes.fromhex(values["controller_boot_id"]),
            storage_boot_id=bytes.fromhex(values["storage_boot_id"]),
            storage_id=str(values["storage_id"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataDirError(
            f"{path} cannot be read: {error!r}; restore a checkpoint into an empty directory",
            metadata={"path": str(path)},
        ) from None
    return identity


def _checksum(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, default=bytes.hex).encode())


def _locked(path: Path) -> int:
    """Take the lock of a directory; return its descriptor, which has it until it is closed, or the process ends.

    Args:
        path: of a file that is there for the lock alone, and stays.

    Raises:
        DataDirError: another process has it.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "a process that is starting"
        os.close(descriptor)
        raise DataDirError(
            f"the data dir {path.parent} is in use by {holder}; stop it first, or give this service a directory of "
            "its own",
            metadata={"path": str(path.parent)},
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class DataDir:
    """An open data directory, which no other process has open.

    ```
    DIR/lock                        taken while a service runs
    DIR/identity.json               boot ids and format
    DIR/journal-000000000012.tqj    what was done, from number 12 on
    DIR/snapshot-000000000012.tqs   all that was done before that
    DIR/reserve                     takes up space, see `EmergencyDiskReserve`
    DIR/segments/                   bytes of large puts
    ```

    Attributes:
        path: of the directory.
        identity: what it is.
        segments_path: directory of the segments.
    """

    def __init__(self, path: Path, identity: Identity, lock: contextlib.ExitStack) -> None:
        """Take over what `open` made."""
        self.path = path
        self.identity = identity
        self.segments_path = path / _SEGMENTS
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> DataDir:
        """Open a data directory, and make it where it is missing.

        Raises:
            DataDirError: another process has it, it is of a later format, or it cannot be written to.
        """
        path = path.absolute()
        try:
            # No other user may read what it holds; the rights of a directory that is there are its owner's business.
            make_directory(path, mode=0o700)
            with contextlib.ExitStack() as lock:
                lock.callback(os.close, _locked(path / "lock"))
                identity = _identity(path)
                (path / _SEGMENTS).mkdir(exist_ok=True, mode=0o700)
                for unfinished in path.glob(f"*{PARTIAL_SUFFIX}"):
                    unfinished.unlink()
                return cls(path, identity, lock.pop_all())
        except OSError as error:
            raise _unusable(path, error) from error

    def join(self, controller_id: bytes, cluster: str) -> None:
        """Be the directory of a controller of a cluster, whose id is that of all of them.

        Raises:
            DataDirError: it has the state of another controller, or the directory cannot be written to.
        """
        if self.identity.controller_boot_id == controller_id and not segment_numbers(self.path):
            return
        if segment_numbers(self.path) or snapshot_numbers(self.path):
            raise DataDirError(
                f"the data dir {self.path} has the state of another controller than cluster {cluster!r}; name an empty "
                "directory, where this controller gets what the cluster has",
                metadata={"path": str(self.path)},
            )
        self._set_identity(replace(self.identity, controller_boot_id=controller_id))

    def _set_identity(self, identity: Identity) -> None:
        try:
            write_identity(self.path / _IDENTITY, identity)
        except OSError as error:
            raise _unusable(self.path, error) from error
        self.identity = identity

    def storage_id(self, given: str | None, default: str) -> str:
        """Return the name of the storage service that keeps its puts here, which stays what it was at first.

        Args:
            given: the name that the settings give it, None without one.
            default: the name it gets then, if it has none yet.

        Raises:
            DataDirError: it has another name than the one given, or the directory cannot be written to.
        """
        known = self.identity.storage_id
        if known and given not in (None, known):
            raise DataDirError(
                f"the data dir {self.path} keeps the puts of storage service {known!r}, got storage_id {given!r}; "
                f"leave storage_id out, or use another directory",
                metadata={"path": str(self.path)},
            )
        if not known:
            self._set_identity(replace(self.identity, storage_id=given or default))
        return self.identity.storage_id

    def remove_unneeded(self, backend: LogBackend, number: int) -> None:
        """Remove what no start needs, now that there is a snapshot of all before a number; blocks.

        The snapshot before it stays, with the log since then: should the new one turn out to be damaged.
        """
        *older, kept = [0, *(each for each in snapshot_numbers(self.path) if each < number)]
        for each in filter(None, older):
            snapshot_path(self.path, each).unlink()
        backend.truncate_before(kept)

    def close(self) -> None:
        """Let others open it; close the log first."""
        self._lock.close()


def _identity(path: Path) -> Identity:
    file = path / _IDENTITY
    identity = read_identity(file)
    if identity is None:
        if segment_numbers(path) or snapshot_numbers(path):
            raise DataDirError(
                f"the data dir {path} has a journal or snapshots, but no {file.name}, without which no put in them can "
                "be found; put the file back, or restore a checkpoint into an empty directory",
                metadata={"path": str(path)},
            )
        identity = new_identity()
        write_identity(file, identity)
    return identity


def _unusable(path: Path, error: OSError) -> DataDirError:
    return DataDirError(
        f"the data dir {path} cannot be used: {error.strerror or error}; name a directory that this user may write to",
        metadata={"path": str(path)},
    )
