"""Whoever keeps the state knows the log by its interface: another one, which has no files, does as well."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
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
from tq_service.durable.log.log import Log, Record, Stream
from tq_service.durable.state_store import StateStore
from tq_service.errors import DiskFullError, PreconditionError, ServiceFailedError, TqError, UnavailableError
from tq_service.samplers import PlanRunner
from tq_service.serving.catalog import Catalog
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import StorageEngine


class Cluster:
    """What is left of a replicated log when one of its members is gone: the records that a majority has."""

    def __init__(self) -> None:
        self.first = 1
        self.records: list[Record] = []
        self.changed = asyncio.Condition()
        self.leader: OtherLog | None = None
        self.is_reachable = True


class OtherLog:
    """The log as one member leads it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._taken: list[Record] = []
        self._callbacks: list[tuple[int, Callable[[], None]]] = []
        self._number = 0
        self._abandoned: TqError | None = None
        self.is_disk_low = False
        cluster.leader = self

    @property
    def has_unflushed(self) -> bool:
        return bool(self._taken) or self._abandoned is not None

    @property
    def unflushed_count(self) -> int:
        return len(self._taken)

    def read(self, number: int) -> Iterator[Record]:
        if number < self._cluster.first and number:
            raise PreconditionError("truncated")
        yield from [record for record in self._cluster.records if record.number >= number]
        self._number = self._cluster.records[-1].number if self._cluster.records else max(number, self._cluster.first)

    async def follow(self, stream: Stream, number: int) -> AsyncIterator[Record]:
        while True:
            found = [record for record in self._cluster.records if record.number >= number]
            for record in found:
                number = record.number + 1
                if record.stream is stream:
                    yield record
            if not found:
                async with self._cluster.changed:
                    await self._cluster.changed.wait()

    def append(self, stream: Stream, *parts: bytes | bytearray) -> int:
        if self._abandoned is not None:
            raise self._abandoned
        self._number += 1
        self._taken.append(Record(self._number, stream, b"".join(parts)))
        return self._number

    async def wait_durable(self, number: int | None = None) -> None:
        if self._abandoned is not None:
            raise self._abandoned
        await asyncio.sleep(0)
        if not self._cluster.is_reachable:
            raise DiskFullError("no majority answers")
        if self._cluster.leader is not self and self._taken:
            raise UnavailableError("another one leads by now")
        self._cluster.records += self._taken
        self._taken = []
        callbacks, self._callbacks = self._callbacks, []
        for _, callback in callbacks:
            callback()
        async with self._cluster.changed:
            self._cluster.changed.notify_all()

    def after_durable(self, callback: Callable[[], None]) -> None:
        if self._abandoned is None and not self._taken:
            callback()
        elif self._abandoned is None:
            self._callbacks.append((self._number, callback))

    def rotate(self) -> int:
        self._number += 1
        return self._number

    def sync_rotated(self, number: int) -> None:
        pass

    def truncate_before(self, number: int) -> None:
        self._cluster.first = number
        self._cluster.records = [record for record in self._cluster.records if record.number >= number]

    def abandon(self, error: TqError) -> None:
        self._abandoned = error

    def close(self) -> None:
        pass


class Member:
    """A controller with a storage engine, over a log that others have too."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        log: Log = OtherLog(cluster)  # that it is one is checked by mypy
        self.store = StateStore(DataDir.open(directory), log)
        self.catalog = Catalog(PlanRunner())
        blobs = SegmentBlobs(self.store.data_dir.segments_path)
        self.engine = StorageEngine(max_bytes=None, boot_id=bytes(16), blobs=blobs)
        self.recovered = self.store.recover(catalog=self.catalog, engine=self.engine)

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
    OtherLog(cluster)
    member.catalog.write("train", b"", new_write(1))
    with pytest.raises(UnavailableError, match="another one leads"):
        await member.store.wait_durable()
    with pytest.raises(ServiceFailedError):
        member.catalog.write("train", b"", new_write(1))
    assert len(cluster.records) == 6
    await member.store.close()


async def test_a_standby_follows_the_changes_alone(tmp_path: Path) -> None:
    cluster = Cluster()
    member = Member(cluster, tmp_path)
    await member.live()
    following = OtherLog(cluster).follow(Stream.CHANGES, 1)
    assert [(await anext(following)).stream for _ in range(3)] == [Stream.CHANGES] * 3
    await member.store.close()
