"""The folder that a service keeps its state in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from tq_service.durable.files import PARTIAL_SUFFIX, make_folder, quarantine, snapshot_numbers, snapshot_path
from tq_service.durable.identity import Identity, new_identity, read_identity, write_identity
from tq_service.durable.lock import DirectoryLock
from tq_service.durable.log.commit_log import CommitLog
from tq_service.durable.log.segment import segment_numbers
from tq_service.errors import DataDirError

_IDENTITY: Final = "identity.json"


class DataDir:
    """An open data folder, which no other process has open.

    ```
    DIR/lock                        taken while a service runs
    DIR/identity.json               boot ids and format
    DIR/journal-000000000012.tqj    what was done, from number 12 on
    DIR/snapshot-000000000012.tqs   all that was done before that
    DIR/reserve                     takes up space, see `EmergencyDiskReserve`
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
            for unfinished in path.glob(f"snapshot-*{PARTIAL_SUFFIX}"):
                unfinished.unlink()
        except OSError as error:
            lock.release()
            raise _unusable(path, error) from error
        except BaseException:
            lock.release()
            raise
        return opened

    def journal(self, *, sync: bool, accept_loss: bool = False) -> CommitLog:
        """Open the journal; see `CommitLog`."""
        return CommitLog(self.path, sync=sync, accept_loss=accept_loss)

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

    def snapshots(self) -> list[int]:
        """Return the numbers of the journal at which there are snapshots, ascending."""
        return snapshot_numbers(self.path)

    def snapshot_path(self, number: int) -> Path:
        """Return where the snapshot of all before a number is, or is to be put once it is whole."""
        return snapshot_path(self.path, number)

    def quarantine_snapshot(self, number: int) -> None:
        """Rename a snapshot that turned out to be damaged, so that no start goes on from it."""
        quarantine(self.snapshot_path(number), ".damaged")

    def remove_unneeded(self, journal: CommitLog, number: int) -> None:
        """Remove what no start needs, now that there is a snapshot of all before a number; blocks.

        The snapshot before it stays, with the journal since then: should the new one turn out to be damaged.
        """
        *older, kept = [0, *(each for each in self.snapshots() if each < number)]
        for each in filter(None, older):
            self.snapshot_path(each).unlink()
        journal.truncate_before(kept)

    def close(self) -> None:
        """Let others open it; close the journal first."""
        self._lock.release()


def _identity(path: Path) -> Identity:
    file = path / _IDENTITY
    identity = read_identity(file)
    if identity is None:
        if segment_numbers(path) or snapshot_numbers(path):
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
