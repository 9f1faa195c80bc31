"""The folder that a service keeps its state in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import journal_numbers, make_folder, snapshot_numbers, snapshot_path
from tq_service.durable.identity import Identity, new_identity, read_identity, write_identity
from tq_service.durable.journal import Journal
from tq_service.durable.lock import DirectoryLock
from tq_service.errors import DataDirError

_IDENTITY: Final = "identity.json"


class DataDir:
    """An open data folder, which no other process has open.

    ```
    DIR/lock                        taken while a service runs
    DIR/identity.json               boot ids and format
    DIR/journal-00000012.sqlite3    what was done, and *-wal beside it
    DIR/snapshot-00000012.tqs       all that is in no journal file from 12 on
    DIR/segments/                   bytes of large puts
    ```

    Attributes:
        path: of the folder.
        identity: what it is.
        segments_path: folder of the segments.
    """

    def __init__(self, path: Path, identity: Identity, lock: DirectoryLock) -> None:
        """Take over what `open` made."""
        self.path = path
        self.identity = identity
        self.segments_path = path / "segments"
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> DataDir:
        """Open a data folder, and make it where it is missing.

        Raises:
            DataDirError: another process has it, it is of a later format, or it cannot be written to.
        """
        path = path.absolute()
        try:
            # Nobody else may read what it holds; the rights of a folder that is there are its owner's business.
            make_folder(path, mode=0o700)
            lock = DirectoryLock(path / "lock")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            opened = cls(path, _identity(path), lock)
            opened.segments_path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            lock.release()
            raise _unusable(path, error) from error
        except BaseException:
            lock.release()
            raise
        return opened

    def journal(self, *, sync: bool, accept_loss: bool = False) -> Journal:
        """Open the journal; see `Journal.open`."""
        return Journal.open(self.path, sync=sync, accept_loss=accept_loss)

    def storage_id(self, given: str | None, default: str) -> str:
        """Return the name of the storage service that keeps its puts here, which stays what it was at first.

        Args:
            given: the name it is told to have, None where it is told none.
            default: the name it gets then, if it has none yet.

        Raises:
            DataDirError: it has another name than the one given, or the folder cannot be written to.
        """
        known = self.identity.storage_id
        if known and given not in (None, known):
            raise DataDirError(
                f"the data dir {self.path} keeps the puts of storage service {known!r}, got storage_id {given!r}; "
                f"leave storage_id out, or use another folder"
            )
        if not known:
            identity = replace(self.identity, storage_id=given or default)
            try:
                write_identity(self.path / _IDENTITY, identity)
            except OSError as error:
                raise _unusable(self.path, error) from error
            self.identity = identity
        return self.identity.storage_id

    def snapshot_path(self, generation: int) -> Path:
        """Return where the snapshot of a generation is, or is to be put once it is whole."""
        return snapshot_path(self.path, generation)

    def close(self) -> None:
        """Let others open it; close the journal first."""
        self._lock.release()


def _identity(path: Path) -> Identity:
    file = path / _IDENTITY
    identity = read_identity(file)
    if identity is None:
        if journal_numbers(path) or snapshot_numbers(path):
            raise DataDirError(
                f"the data dir {path} has a journal or snapshots, but no {file.name}, without which no put in them can "
                "be found; put the file back, or restore a checkpoint into an empty folder"
            )
        identity = new_identity()
        write_identity(file, identity)
    return identity


def _unusable(path: Path, error: OSError) -> DataDirError:
    return DataDirError(
        f"the data dir {path} cannot be used: {error.strerror or error}; name a folder that this user may write to"
    )
