"""The data directory of a service, including its lock and its persistent identity."""

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
    """Names and ids that persist across process restarts.

    Attributes:
        controller_boot_id: 16-byte instance id of the controller that stores its state in the directory.
        storage_boot_id: 16-byte instance id of the storage service that stores its puts in the directory.
        storage_id: name of the storage service, which is part of each cell's location. The string is empty until a name
            is set.
    """

    controller_boot_id: bytes
    storage_boot_id: bytes
    storage_id: str = ""


def new_identity() -> Identity:
    """Return an identity with new random ids."""
    return Identity(
        controller_boot_id=secrets.token_bytes(_BOOT_ID_BYTES), storage_boot_id=secrets.token_bytes(_BOOT_ID_BYTES)
    )


def write_identity(path: Path, identity: Identity) -> None:
    """Write an identity to a file, atomically and durably.

    Raises:
        OSError: the file could not be written.
    """
    values = {"format_version": FORMAT_VERSION, **asdict(identity)}
    text = json.dumps({**values, "checksum": _checksum(values)}, indent=2, default=bytes.hex)
    with FileWriter(path) as writer:
        writer.file.write(text.encode() + b"\n")


def read_identity(path: Path) -> Identity | None:
    """Return the identity stored in a file, or None if the file does not exist.

    Raises:
        DataDirError: the file is damaged or has a different format.
        OSError: the file could not be read.
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
                f"the data directory {path.parent} has format {version}, "
                + (
                    f"but this version of the service supports formats up to {FORMAT_VERSION}. Install the version "
                    f"that wrote the directory, or a later version."
                    if version > FORMAT_VERSION
                    else "which this version of the service no longer supports. Start the version that wrote the "
                    "directory, or use an empty directory."
                ),
                metadata={"path": str(path.parent)},
            )
        # If a single letter of a name changed, samples could not find their bytes, although all bytes are stored here.
        if values.pop("checksum") != _checksum(values):
            raise ValueError("the checksum does not match the file's contents")
        identity = Identity(
            controller_boot_id=bytes.fromhex(values["controller_boot_id"]),
            storage_boot_id=bytes.fromhex(values["storage_boot_id"]),
            storage_id=str(values["storage_id"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataDirError(
            f"could not read {path}: {error!r}. Restore a checkpoint into an empty directory.",
            metadata={"path": str(path)},
        ) from None
    return identity


def _checksum(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, default=bytes.hex).encode())


def _locked(path: Path) -> int:
    """Lock a directory. Return a file descriptor that holds the lock until it is closed or the process exits.

    Args:
        path: path of a file that is used only for the lock and is never removed.

    Raises:
        DataDirError: another process holds the lock.
        OSError: the file could not be written.
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
            f"the data directory {path.parent} is in use by {holder}. Stop that process first, or use a different "
            f"directory for this service.",
            metadata={"path": str(path.parent)},
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class DataDir:
    """An open data directory, locked against use by other processes.

    ```
    DIR/lock                        locked while a service runs
    DIR/identity.json               instance ids and format
    DIR/journal-000000000012.tqj    changes from number 12 on
    DIR/snapshot-000000000012.tqs   the state before change 12
    DIR/reserve                     reserves disk space, see `EmergencyDiskReserve`
    DIR/segments/                   bytes of large puts
    ```

    Attributes:
        path: path of the directory.
        identity: ids and name stored in `identity.json`.
        segments_path: path of the subdirectory that contains the bytes of large puts.
    """

    def __init__(self, path: Path, identity: Identity, lock: contextlib.ExitStack) -> None:
        """Take ownership of the lock. Call `open` instead of this constructor."""
        self.path = path
        self.identity = identity
        self.segments_path = path / _SEGMENTS
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> DataDir:
        """Open a data directory, creating it if necessary.

        Raises:
            DataDirError: the directory is in use by another process, has an unsupported format, or is not writable.
        """
        path = path.absolute()
        try:
            # Other users must not read the contents. The owner of an existing directory decides on its mode.
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
        """Assign the directory to a controller in a cluster. All controllers in a cluster share a single id.

        Raises:
            DataDirError: the directory is not writable, or contains the state of a controller outside the cluster.
        """
        if self.identity.controller_boot_id == controller_id and not segment_numbers(self.path):
            return
        if segment_numbers(self.path) or snapshot_numbers(self.path):
            raise DataDirError(
                f"the data directory {self.path} contains the state of a controller outside cluster {cluster!r}. Use "
                f"an empty directory; this controller will copy the cluster's state into it.",
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
        """Return the name of the storage service that stores its puts in this directory.

        Once set, the name cannot be changed.

        Args:
            given: name of the storage service from the settings, or None.
            default: name to use if the directory has no recorded name and `given` is None.

        Raises:
            DataDirError: the given name differs from the recorded name, or the directory is not writable.
        """
        known = self.identity.storage_id
        if known and given not in (None, known):
            raise DataDirError(
                f"storage_id is {given!r}; expected {known!r}, because the data directory {self.path} contains the "
                f"puts of that storage service. Omit storage_id, or use a different directory.",
                metadata={"path": str(self.path)},
            )
        if not known:
            self._set_identity(replace(self.identity, storage_id=given or default))
        return self.identity.storage_id

    def remove_unneeded(self, backend: LogBackend, number: int) -> None:
        """Remove all files that are no longer needed for recovery. This call blocks.

        `number` identifies a snapshot that contains all earlier changes. The previous snapshot and the log that follows
        it are kept in case the new snapshot turns out to be damaged.
        """
        *older, kept = [0, *(each for each in snapshot_numbers(self.path) if each < number)]
        for each in filter(None, older):
            snapshot_path(self.path, each).unlink()
        backend.truncate_before(kept)

    def close(self) -> None:
        """Release the lock. Call this method only after closing the log."""
        self._lock.close()


def _identity(path: Path) -> Identity:
    file = path / _IDENTITY
    identity = read_identity(file)
    if identity is None:
        if segment_numbers(path) or snapshot_numbers(path):
            raise DataDirError(
                f"the data directory {path} contains a journal or snapshots, but not {file.name}. Without this file, "
                f"their puts cannot be located. Restore the file, or restore a checkpoint into an empty directory.",
                metadata={"path": str(path)},
            )
        identity = new_identity()
        write_identity(file, identity)
    return identity


def _unusable(path: Path, error: OSError) -> DataDirError:
    return DataDirError(
        f"could not use the data directory {path}: {error.strerror or error}. Use a directory that this user can "
        f"write to.",
        metadata={"path": str(path)},
    )
