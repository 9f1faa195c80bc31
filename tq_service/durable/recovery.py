"""Bringing back what a data folder has: the newest snapshot that is whole, then the journal since then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tq_service.domain.catalog import Catalog
from tq_service.domain.partition import Partition
from tq_service.durable.codec import decode_group, is_group
from tq_service.durable.data_dir import DataDir
from tq_service.durable.log.commit_log import CommitLog, ReplayCost
from tq_service.durable.log.segment import segment_numbers
from tq_service.durable.snapshot import read_snapshot
from tq_service.errors import DataDirError, JournalDamagedError, NewerVersionError, SnapshotDamagedError, TqError
from tq_service.v1 import journal_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was found in the data folder."""

    partition_count: int
    sample_count: int
    put_count: int
    record_count: int
    seconds: float


class Recovery:
    """Reads a data folder once, into a service that has nothing yet.

    Args:
        data_dir: the folder.
        journal: that in the folder; it takes records once all is read.
        cost: counts what is made again.
        catalog: takes the partitions, and the answers for retries; None in a service that has no controller.
        recover_puts: takes the records of puts, in order, and returns how many puts they leave; None in a service that
            stores none.
    """

    def __init__(
        self,
        data_dir: DataDir,
        journal: CommitLog,
        cost: ReplayCost,
        *,
        catalog: Catalog | None,
        recover_puts: Callable[[Iterable[bytes]], int] | None,
    ) -> None:
        self._data_dir = data_dir
        self._journal = journal
        self._cost = cost
        self._catalog = catalog
        self._recover_puts = recover_puts
        self._puts: list[bytes] = []

    def run(self) -> Recovered:
        """Bring everything back; see `Keeper.recover`."""
        started_at = time.perf_counter()
        snapshot = self._restore_newest()
        self._cost.add_files(len(segment_numbers(self._data_dir.path)))
        record_count = 0
        for number, data in self._journal.read(snapshot):
            self._replay(number, data)
            record_count += 1
        for damaged in self._data_dir.snapshots():
            if damaged > snapshot:  # else it would count as one to go back to
                self._data_dir.quarantine_snapshot(damaged)
        put_count = self._take_puts()
        return Recovered(
            partition_count=0 if self._catalog is None else len(self._catalog.names()),
            sample_count=0 if self._catalog is None else self._catalog.sample_count(),
            put_count=put_count,
            record_count=record_count,
            seconds=time.perf_counter() - started_at,
        )

    def _restore_newest(self) -> int:
        """Take over the newest snapshot that is whole; return its number.

        One that a newer version wrote is whole: going on with one before it would lose what came since, so that the
        start is refused (NewerVersionError).
        """
        damages: list[SnapshotDamagedError] = []
        for number in reversed(self._data_dir.snapshots()):
            try:
                snapshot = read_snapshot(self._data_dir.snapshot_path(number))
            except SnapshotDamagedError as error:
                _log.error("%s; going on with the one before it", error)
                damages.append(error)
                continue
            if self._catalog is not None:
                self._catalog.adopt(list(map(Partition.restore, snapshot.partitions)))
                self._catalog.answers.restore(snapshot.answers)
            elif snapshot.partitions:
                raise self._of_another_role(f"{len(snapshot.partitions)} partitions of a controller")
            self._puts += snapshot.puts
            return number
        if damages:  # the journal from the first record on is gone
            raise damages[0]
        return 0

    def _replay(self, number: int, data: bytes) -> None:
        if not is_group(data):
            self._puts.append(data)
            self._cost.add_put(len(data))
            return
        self._cost.add_change(len(data))
        if self._catalog is None:
            raise self._of_another_role("the partitions of a controller")
        kind = "which cannot be read"
        try:
            at_seconds, changes = decode_group(data)
            for change in changes:
                kind = type(change).__name__
                self._catalog.machine.replay(change, at_seconds)
        except NewerVersionError:
            raise
        except (TqError, LookupError, ValueError, TypeError) as error:
            raise JournalDamagedError(
                f"record {number} of the journal ({kind}) does not fit the state before it: {error}; restore a "
                f"checkpoint into an empty data folder"
            ) from error

    def _take_puts(self) -> int:
        if self._recover_puts is not None:
            return self._recover_puts(self._puts)
        if left_count := len(left_puts(self._puts)):
            raise self._of_another_role(f"{left_count} puts of a storage service")
        return 0

    def _of_another_role(self, what: str) -> DataDirError:
        return DataDirError(
            f"the data dir {self._data_dir.path} holds {what}, which this service has not; start it with the "
            "role that the folder was written with, or name another folder"
        )


def left_puts(records: Iterable[bytes]) -> Collection[journal_pb2.PutKept]:
    """Return the puts that records leave, in the order in which they were last written down."""
    left: dict[bytes, journal_pb2.PutKept] = {}
    for data in records:
        record = journal_pb2.JournalRecord.FromString(data)
        if record.HasField("put_kept"):
            left.pop(record.put_kept.put_id, None)
            left[record.put_kept.put_id] = record.put_kept
        elif record.HasField("put_dropped"):
            left.pop(record.put_dropped.put_id, None)
    return left.values()
