"""Whoever keeps the state knows the log by its interface: another one, which has no files, does as well."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "core"))
sys.path.append(str(Path(__file__).parent.parent / "storage"))

from digest import digest
from domain_support import claim_rows, clear, new_write, task_of
from durable_driver import put
from engine_driver import read, runs

from tq_service.durable.data_dir import DataDir
from tq_service.durable.state_store import StateStore
from tq_service.errors import DiskFullError, PreconditionError, ServiceFailedError, UnavailableError
from tq_service.journal.log import Log, LogBackend, NewRecord, Record, packed, unpacked
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutJournal


class Cluster:
    """What is left of a replicated log when one of its members is gone: the records that a majority has."""

    def __init__(self) -> None:
        self.first = 1
        self.records: list[Record] = []
        self.last_number = 0
        self.leader: OtherBackend | None = None
        self.is_reachable = True


class OtherBackend:
    """The log as one member leads it."""

    is_blocking = False
    group_bytes = 1 << 20
    segment_bytes = math.inf
    patience_seconds = 0.0
    is_disk_low = False

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.leader = self

    def read(self, number: int) -> Iterator[Record]:
        if number < self._cluster.first and number:
            raise PreconditionError("truncated")
        yield from [record for record in self._cluster.records if record.number >= number]

    @property
    def last_number(self) -> int:
        return self._cluster.last_number

    def write(self, number: int, records: Sequence[NewRecord]) -> None:
        if not self._cluster.is_reachable:
            raise DiskFullError("no majority answers")
        if self._cluster.leader is not self:
            raise UnavailableError("another one leads by now")
        assert number == self._cluster.last_number + 1
        self._cluster.records += unpacked(b"".join(packed(records)), number)
        self._cluster.last_number += len(records) or 1

    def sync_rotated(self, number: int) -> None:
        pass

    def truncate_before(self, number: int) -> None:
        self._cluster.first = number
        self._cluster.records = [record for record in self._cluster.records if record.number >= number]

    def close(self) -> None:
        pass


class Member:
    """A controller with a storage engine, over a log that others have too."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        backend: LogBackend = OtherBackend(cluster)  # that it is one is checked by mypy
        self.store = StateStore(DataDir.open(directory), Log(backend))
        self.catalog = Catalog(PlanRunner())
        journal = PutJournal(SegmentBlobs(self.store.data_dir.segments_path))
        self.engine = StorageEngine(max_bytes=None, boot_id=bytes(16), backing=journal)
        self.recovered = self.store.recover(catalog=self.catalog, puts=journal)

    async def live(self) -> None:
        self.catalog.write("train", b"", new_write(8, keys=[f"k{row}" for row in range(8)]))
        claim_rows(self.catalog, task_of(self.catalog, "reward"), range(3), b"q" * 16)
        clear(self.catalog, np.array([1]))
        await put(self.engine, 1, {"x": np.arange(4)})
        await self.store.wait_durable()


async def test_a_state_store_over_another_log_comes_back_with_and_without_a_snapshot(tmp_path: Path) -> None:
    cluster = Cluster()
    first = Member(cluster, tmp_path)
    await first.live()
    expected = digest(first.catalog.get("train"))
    await first.store.close()
    second = Member(cluster, tmp_path)
    assert digest(second.catalog.get("train")) == expected
    assert second.recovered.record_count == 5
    assert read(second.engine, [1], runs(["x"], (0, 0, 4)))["x"].tolist() == [0, 1, 2, 3]
    await second.store.take_snapshot()
    await second.store.take_snapshot()
    second.catalog.write("later", b"", new_write(1))
    await second.store.wait_durable()
    await second.store.close()
    third = Member(cluster, tmp_path)
    assert third.recovered.record_count == 1
    assert third.recovered.put_count == 1
    assert digest(third.catalog.get("train")) == expected
    await third.store.close()


async def test_one_that_is_not_reachable_holds_answers_back_and_one_that_another_leads_is_fatal(tmp_path: Path) -> None:
    cluster = Cluster()
    member = Member(cluster, tmp_path)
    await member.live()
    cluster.is_reachable = False
    member.catalog.write("train", b"", new_write(1))
    with pytest.raises(DiskFullError):
        await member.store.wait_durable()
    assert member.store.is_failing
    cluster.is_reachable = True
    await member.store.wait_durable()
    assert not member.store.is_failing
    assert len(cluster.records) == 6
    OtherBackend(cluster)
    member.catalog.write("train", b"", new_write(1))
    with pytest.raises(UnavailableError, match="another one leads"):
        await member.store.wait_durable()
    with pytest.raises(ServiceFailedError):
        member.catalog.write("train", b"", new_write(1))
    assert len(cluster.records) == 6
    await member.store.close()
