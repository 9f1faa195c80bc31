"""A store brings back what it was told of: from the journal, from snapshots, and from older ones in their place."""

import asyncio
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from digest import digest
from domain_support import claim_rows, clear, new_write, task_of

from tq_service.durable import data_dir, state_store
from tq_service.durable.state_store import StateStore, Stream
from tq_service.errors import DataDirError, DiskFullError, JournalDamagedError, SnapshotDamagedError
from tq_service.journal import files
from tq_service.machine.state_machine import IdempotencyCache
from tq_service.samplers import PlanRunner
from tq_service.server.controller_servicer import pack_answer, unpack_answer
from tq_service.serving.catalog import Catalog
from tq_service.storage.index.put_table import PutStored, encode_put
from tq_service.v1 import controller_service_pb2 as pb


class Life:
    """One life of a service that keeps its state."""

    def __init__(self, path):
        self.store = StateStore.open(path, sync=False)
        cache = IdempotencyCache(600.0, pack=pack_answer, unpack=unpack_answer)
        self.catalog = Catalog(PlanRunner(), answers=cache)
        self.recovered = self.store.recover(catalog=self.catalog)

    def write(self, count, **arguments):
        return self.catalog.write("train", b"", new_write(count, ("x",), **arguments))

    def state(self):
        return {name: digest(self.catalog.get(name)) for name in self.catalog.names()}


def lives(path, *stories):
    """Run one process after the other in a data directory; return what each returned. Each but the last is killed."""
    told = []

    async def live(story):
        life = Life(path)
        try:
            told.append(await story(life))
            await life.store.wait_durable()
        finally:
            await life.store.close()

    for story in stories:
        asyncio.run(live(story))
    return told


async def fill(life):
    life.write(
        8,
        keys=[f"k{row}" for row in range(8)],
        meta=[{"version": [row, None, row, [row], "a"][row % 5]} for row in range(8)],
    )
    claim_rows(life.catalog, task_of(life.catalog, "reward"), range(3), b"q" * 16)
    life.catalog.run_once(b"r" * 16, lambda: pb.SealPartitionResponse(inserted_count=8))
    return life.state()


async def look(life):
    return life.state(), life.catalog.recorded(b"r" * 16)


def test_what_was_told_is_there_in_the_next_life(tmp_path):
    before, (after, answer) = lives(tmp_path, fill, look)
    assert after == before
    assert answer == pb.SealPartitionResponse(inserted_count=8)


def test_a_snapshot_and_what_came_after_it_are_there_in_the_next_life(tmp_path):
    async def go_on(life):
        await fill(life)
        await life.store.take_snapshot()
        life.write(4, keys=["a", "b", "k0", "c"])
        clear(life.catalog, np.array([1, 2]))
        return life.state()

    async def count(life):
        return life.state(), life.recovered

    before, (after, recovered) = lives(tmp_path, go_on, count)
    assert after == before
    assert recovered.record_count == 2
    assert (recovered.partition_count, recovered.sample_count) == (1, 9)
    assert len(list(tmp_path.glob("snapshot-*.tqs"))) == 1


def test_a_long_journal_is_replaced_by_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(state_store, "_LONGEST_START_SECONDS", 50 * state_store._RECORD_SECONDS[Stream.CHANGES])
    monkeypatch.setattr(state_store, "_WORTH_SECONDS", 50 * state_store._RECORD_SECONDS[Stream.CHANGES])

    async def write_much(life):
        for _ in range(120):
            life.write(1)
        async with asyncio.timeout(30):
            while life.store._snapshot is not None:
                await asyncio.wait([life.store._snapshot])
        life.write(1)
        return life.state()

    async def count(life):
        return life.state(), life.recovered.record_count

    before, (after, record_count) = lives(tmp_path, write_much, count)
    assert after == before
    assert list(tmp_path.glob("snapshot-*.tqs"))
    assert record_count < 122


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_where_the_newest_snapshot_is_damaged_the_one_before_it_serves(tmp_path):
    async def twice(life):
        await fill(life)
        await life.store.take_snapshot()
        life.write(4)
        await life.store.take_snapshot()
        life.write(2)
        return life.state()

    (before,) = lives(tmp_path, twice)
    newest = max(tmp_path.glob("snapshot-*.tqs"))
    damage(newest)
    for _ in range(2):  # nor is it looked at again
        (again,) = lives(tmp_path, look)
        assert again[0] == before
        assert not newest.exists()
    assert newest.with_name(newest.name + ".damaged").exists()


def test_without_a_snapshot_to_go_back_to_nothing_is_made_up(tmp_path):
    async def twice(life):
        await fill(life)
        for _ in range(3):
            life.write(1)
            await life.store.take_snapshot()

    lives(tmp_path, twice)
    for snapshot in tmp_path.glob("snapshot-*.tqs"):
        damage(snapshot)
    with pytest.raises(SnapshotDamagedError, match=r"snapshot-\d+\.tqs"):
        lives(tmp_path, look)


def test_a_record_that_does_not_fit_stops_the_start_and_is_named(tmp_path):
    async def tell_of_what_was_not(life):
        await fill(life)
        other = Catalog(PlanRunner())
        other.write("elsewhere", b"", new_write(1))
        other.machine.log, other.machine.fatal = life.store, life.store.fatal
        other.write("elsewhere", b"", new_write(1))

    lives(tmp_path, tell_of_what_was_not)
    with pytest.raises(JournalDamagedError, match=r"SamplesWritten.*Restore a checkpoint"):
        lives(tmp_path, look)


def test_a_snapshot_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch):
    def full(path, snapshot):
        raise OSError(28, "No space left on device")

    async def try_it(life):
        await fill(life)
        monkeypatch.setattr(state_store, "write_snapshot", full)
        replay_seconds = life.store._cost.log_seconds
        with pytest.raises(OSError, match="No space"):
            await life.store.take_snapshot()
        assert life.store._cost.log_seconds == replay_seconds  # a start has as much to make again as before
        life.write(2)
        return life.state()

    before, (after, _) = lives(tmp_path, try_it, look)
    assert after == before


@pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])
def test_a_change_that_no_call_waits_for_becomes_durable_by_itself(tmp_path, sync):
    async def write_and_wait():
        store, catalog, called = StateStore.open(tmp_path, sync=sync), Catalog(PlanRunner()), asyncio.Event()
        store.recover(catalog=catalog)
        catalog.write("train", b"", new_write(1))
        store.after_durable(called.set)
        assert store.has_unflushed
        assert not called.is_set()
        async with asyncio.timeout(30):
            await called.wait()
        assert not store.has_unflushed
        await store.close()

    asyncio.run(write_and_wait())


def test_a_snapshot_that_fails_by_a_fault_is_not_tried_again_at_once(tmp_path, monkeypatch, caplog):
    tries = []

    def faulty(path, snapshot):
        tries.append(path)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(state_store, "_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(state_store, "_LONGEST_START_SECONDS", 0.0)
    monkeypatch.setattr(state_store, "write_snapshot", faulty)

    async def write_much(life):
        for _ in range(20):
            life.write(1)
            while life.store._snapshot is not None:
                await asyncio.wait([life.store._snapshot])
        return life.state()

    before, (after, _) = lives(tmp_path, write_much, look)
    assert after == before
    assert len(tries) <= 2  # one in each life
    assert "because of a bug" in caplog.text


def test_after_a_snapshot_that_took_long_the_disk_is_left_to_the_log_for_a_while(tmp_path, monkeypatch):
    now, taken_at = [1000.0], []
    write_snapshot = state_store.write_snapshot

    def slowly(path, snapshot):
        taken_at.append(now[0])
        now[0] += 10.0
        write_snapshot(path, snapshot)

    monkeypatch.setattr(state_store, "_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(state_store, "_LONGEST_START_SECONDS", 0.0)
    monkeypatch.setattr(state_store, "write_snapshot", slowly)
    monkeypatch.setattr(
        state_store, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0], "thread_time": lambda: 0.0})
    )

    async def write_now_and_then(life):
        taken_at.clear()
        for _ in range(20):
            life.write(1)
            while life.store._snapshot is not None:
                await asyncio.wait([life.store._snapshot])
            now[0] += 1.0

    lives(tmp_path, write_now_and_then)
    assert len(taken_at) >= 3
    assert np.diff(taken_at).min() >= 15.0


def fail(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("owner", "name", "appears"),
    [(files, "sync_path", False), (data_dir.DataDir, "remove_unneeded", True)],
    ids=["the name of the snapshot may not last", "what is not needed any more cannot be dropped"],
)
def test_what_is_restored_is_there_after_a_failure_or_nothing_of_it(tmp_path, monkeypatch, owner, name, appears):
    async def restore(life):
        other = Catalog(PlanRunner())
        other.write("restored", b"", new_write(3, ("x",)))
        snapshots = other.snapshot()
        seen = []
        with monkeypatch.context() as failing:
            failing.setattr(owner, name, fail)
            try:
                await life.store.snapshot_restored(
                    lambda now: replace(now, partitions=snapshots, answers=()), lambda: seen.append("restored")
                )
            except DiskFullError as error:
                assert "restore again" in str(error)
        return seen

    seen, (after, _) = lives(tmp_path, restore, look)
    assert bool(seen) is bool(after) is appears


class Engine:
    """Stands for a storage engine with one put."""

    def recover(self, records, log):
        self.append = log.append_put
        return len(list(records))

    def records(self):
        return [PUT]


PUT = encode_put(PutStored(put_id=b"1" * 16, partition_id="train", row_count=1, columns=(), row_sets=(), size_bytes=0))


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_directory_is_not_used_by_a_service_that_would_lose_a_part_of_it(tmp_path, with_snapshot):
    async def fill_both():
        store, catalog, engine = StateStore.open(tmp_path, sync=False), Catalog(PlanRunner()), Engine()
        store.recover(catalog=catalog, puts=engine)
        catalog.write("train", b"", new_write(2, ("x",)))
        engine.append(PUT)
        if with_snapshot:
            await store.take_snapshot()
        await store.close()

    async def recover(**parts):
        store = StateStore.open(tmp_path, sync=False)
        try:
            return store.recover(**parts)
        finally:
            await store.close()

    asyncio.run(fill_both())
    with pytest.raises(DataDirError, match=r"1 storage service puts.*Start the service with the role"):
        asyncio.run(recover(catalog=Catalog(PlanRunner())))
    with pytest.raises(DataDirError, match=r"controller partitions.*Start the service with the role"):
        asyncio.run(recover(puts=Engine()))
    recovered = asyncio.run(recover(catalog=Catalog(PlanRunner()), puts=Engine()))
    assert (recovered.sample_count, recovered.put_count) == (2, 1)


def test_a_snapshot_that_waits_for_a_slow_disk_holds_up_nobody(tmp_path, monkeypatch):
    goes_on, fsync = threading.Event(), os.fsync

    def slow(descriptor):
        assert goes_on.wait(60)
        fsync(descriptor)

    async def snapshot(life):
        await fill(life)
        monkeypatch.setattr(os, "fsync", slow)
        taking = asyncio.ensure_future(life.store.take_snapshot())
        for _ in range(200):
            await asyncio.sleep(0)
        life.write(1)
        await life.store.wait_durable()  # others go on
        assert not taking.done()
        goes_on.set()
        async with asyncio.timeout(60):
            await taking
        return life.state()

    before, (after, _) = lives(tmp_path, snapshot, look)
    assert after == before


def test_a_snapshot_is_in_place_only_once_the_segment_after_it_is_on_the_disk(tmp_path, monkeypatch):
    fsync, synced = os.fsync, []

    def noted(descriptor):
        fsync(descriptor)
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, bool(list(tmp_path.glob("*.tqs")))))

    async def snapshot(life):
        await fill(life)
        monkeypatch.setattr(os, "fsync", noted)
        await life.store.take_snapshot()
        monkeypatch.undo()

    lives(tmp_path, snapshot)
    (taken,) = tmp_path.glob("snapshot-*.tqs")
    segment = taken.name.replace("snapshot", "journal").replace(".tqs", ".tqj")
    order = [name for name, is_in_place in synced if not is_in_place]
    assert segment in order
    assert tmp_path.name in order[order.index(segment) :]
