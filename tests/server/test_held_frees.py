"""When cells are given back: not while a checkpoint may still read them, nor while a crash could bring them back."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "storage"))

from engine_driver import put, put_id

from tq_service.errors import AlreadyExistsError
from tq_service.server.storage_servicer import EngineDriver, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.state.cells import CellSet, Put
from tq_service.storage.engine import StorageEngine
from tq_service.wire.connection import Credentials

MOST_A_TURN = 128


class FakeStorage:
    storage_id, boot_id, address = "s", b"b" * 16, ""

    def __init__(self):
        self.freed, self.confirmed = [], []
        self.engine = self

    def confirm(self, put_id):
        self.confirmed.append(put_id)

    def free(self, cells):
        self.freed += [(each.put_id, None if each.rows is None else each.rows.tolist()) for each in cells]

    async def close(self):
        pass


def registry_of(storage):
    return StorageRegistry(storage, 2.0, Credentials(None, None, None))


def committed(registry):
    put = Put("s", b"b" * 16, os.urandom(16))
    with registry.puts.commit(put):
        pass
    return put


def test_what_is_freed_meanwhile_is_given_back_at_the_end_of_the_last_hold():
    storage = FakeStorage()
    registry = registry_of(storage)
    whole, part = committed(registry), committed(registry)
    with registry.puts.holding_frees():
        with registry.puts.holding_frees():
            registry.puts.free([CellSet(put=whole)])
        registry.puts.free([CellSet(put=part, field_names=("x",), rows=np.array([4, 7]))])
        assert storage.freed == []
        assert registry.puts.is_committed(whole)  # lest it is committed again, and then given back
        assert registry.puts.known("s", b"b" * 16).staying() == {whole.put_id, part.put_id}
    assert storage.freed == [(whole.put_id, None), (part.put_id, [4, 7])]
    assert not registry.puts.is_committed(whole)


def test_a_put_that_was_refused_goes_at_once_since_it_may_be_sent_again():
    storage = FakeStorage()
    registry = registry_of(storage)
    refused = Put("s", b"b" * 16, os.urandom(16))
    with registry.puts.holding_frees():
        registry.puts.free_now([refused])
        assert storage.freed == [(refused.put_id, None)]


class Journal:
    """Something that becomes durable when the test says so."""

    def __init__(self):
        self.waiting = []

    def after_durable(self, callback):
        self.waiting.append(callback)

    def sync(self):
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()


def elsewhere(journal):
    """Return a registry whose only storage service is in another process, and that storage service."""
    storage = FakeStorage()
    registry = StorageRegistry(None, 2.0, Credentials(None, None, None), after_durable=journal.after_durable)
    registry._storages["s"] = storage
    registry.puts.has_some_elsewhere = True
    return registry, storage


def test_cells_elsewhere_stay_until_a_crash_cannot_bring_back_the_samples_that_had_them():
    journal = Journal()
    registry, storage = elsewhere(journal)
    first, second = committed(registry), committed(registry)
    registry.puts.free([CellSet(put=first)])
    registry.puts.free([CellSet(put=second, field_names=("x",), rows=np.array([2]))])
    assert storage.freed == []
    assert registry.puts.is_committed(first)
    assert first.put_id in registry.puts.known("s", b"b" * 16).staying()  # nor may it be taken for unknown
    journal.sync()
    assert storage.freed == [(first.put_id, None), (second.put_id, [2])]
    assert not registry.puts.is_committed(first)
    assert registry.puts.known("s", b"b" * 16).staying() == set()


def test_a_put_elsewhere_is_confirmed_once_its_commit_cannot_be_lost_any_more():
    journal = Journal()
    registry, storage = elsewhere(journal)
    kept, cleared = committed(registry), committed(registry)
    registry.puts.free([CellSet(put=cleared)])
    assert storage.confirmed == []
    journal.sync()
    assert storage.confirmed == [kept.put_id, cleared.put_id]
    assert storage.freed == [(cleared.put_id, None)]


def test_an_uncommitted_put_elsewhere_goes_at_once():
    journal = Journal()
    registry, storage = elsewhere(journal)
    refused = Put("s", b"b" * 16, os.urandom(16))
    registry.puts.free_now([refused])
    assert storage.freed == [(refused.put_id, None)]


class Turns:
    """Counts what was given back in each turn of the loop."""

    def __init__(self, storage):
        self._storage = storage
        self.counts = []

    async def all_of(self, count):
        """Take turns until so many are given back."""
        while (before := len(self._storage.freed)) < count:
            await asyncio.sleep(0)
            self.counts.append(len(self._storage.freed) - before)


async def test_many_cells_are_given_back_in_order_with_turns_for_others_between():
    storage = FakeStorage()
    registry = registry_of(storage)
    puts = [committed(registry) for _ in range(1000)]
    last = committed(registry)
    registry.puts.free(puts)
    registry.puts.free([CellSet(put=last, field_names=("x",), rows=np.array([3]))])  # few, but behind the others
    registry.puts.free([last])
    assert len(storage.freed) == MOST_A_TURN
    waiting = puts[MOST_A_TURN:]
    assert all(map(registry.puts.is_committed, waiting))
    assert registry.puts.known("s", b"b" * 16).staying() == {put.put_id for put in (*waiting, last)}
    with pytest.raises(AlreadyExistsError, match="already committed"):
        registry.puts.check_uncommitted(puts[-1])  # what is given back after a second commit would be the cells of that
    turns = Turns(storage)
    async with asyncio.timeout(60):
        await turns.all_of(1002)
    assert max(turns.counts) == MOST_A_TURN
    assert storage.freed == [*((put.put_id, None) for put in puts), (last.put_id, [3]), (last.put_id, None)]
    assert not any(map(registry.puts.is_committed, [*puts, last]))
    assert registry.puts.known("s", b"b" * 16).staying() == set()
    another = committed(registry)
    registry.puts.free([another])
    assert storage.freed[-1] == (another.put_id, None)


async def test_a_put_that_was_refused_waits_for_no_others():
    storage = FakeStorage()
    registry = registry_of(storage)
    registry.puts.free([committed(registry) for _ in range(1000)])
    refused = Put("s", b"b" * 16, os.urandom(16))
    registry.puts.free_now([refused])
    assert storage.freed[MOST_A_TURN:] == [(refused.put_id, None)]
    await registry.close()


async def test_what_was_freed_before_a_hold_goes_on_and_what_is_freed_meanwhile_waits():
    storage = FakeStorage()
    registry = registry_of(storage)
    puts = [committed(registry) for _ in range(1000)]
    registry.puts.free(puts[:500])
    async with asyncio.timeout(60):
        with registry.puts.holding_frees():
            registry.puts.free(puts[500:])
            await Turns(storage).all_of(500)
            for _ in range(20):
                await asyncio.sleep(0)
            assert storage.freed == [(put.put_id, None) for put in puts[:500]]
            assert all(map(registry.puts.is_committed, puts[500:]))
        await Turns(storage).all_of(1000)
    assert storage.freed == [(put.put_id, None) for put in puts]


async def test_closing_gives_the_rest_back_with_turns_for_others_between():
    storage = FakeStorage()
    registry = registry_of(storage)
    puts = [committed(registry) for _ in range(1000)]
    registry.puts.free(puts)
    closing, turns = asyncio.ensure_future(registry.close()), Turns(storage)
    async with asyncio.timeout(60):
        await turns.all_of(1000)
        await closing
    assert max(turns.counts) == MOST_A_TURN
    assert storage.freed == [(put.put_id, None) for put in puts]


async def test_many_cells_elsewhere_stay_until_a_crash_cannot_bring_back_the_samples_that_had_them():
    journal = Journal()
    registry, storage = elsewhere(journal)
    puts = [committed(registry) for _ in range(1000)]
    journal.sync()
    registry.puts.free(puts)
    for _ in range(20):
        await asyncio.sleep(0)
    assert storage.freed == []
    assert registry.puts.known("s", b"b" * 16).staying() == {put.put_id for put in puts}
    journal.sync()
    async with asyncio.timeout(60):
        turns = Turns(storage)
        await turns.all_of(1000)
    assert max(turns.counts) == MOST_A_TURN
    assert storage.freed == [(put.put_id, None) for put in puts]


async def test_capacity_that_others_wait_for_is_given_back_as_the_puts_go():
    engine = StorageEngine(max_bytes=1000, reserve_share=0, storage_id="s", boot_id=b"b" * 16)
    registry = registry_of(EmbeddedStorage(engine, endpoint_of(engine, ""), EngineDriver(engine)))
    puts = []
    for number in range(1000):
        await put(engine, number, {"x": np.zeros(1, np.uint8)})
        puts.append(Put("s", b"b" * 16, put_id(number)))
        with registry.puts.commit(puts[-1]):
            pass
    waiting = asyncio.ensure_future(put(engine, 2000, {"x": np.zeros(300, np.uint8)}))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    registry.puts.free(puts)
    async with asyncio.timeout(60):
        await waiting
    assert engine.stat().put_count > 1
    await registry.close()
    assert (engine.stat().put_count, engine.stat().used_bytes) == (1, 300)


async def test_puts_expire_in_slices_but_those_that_are_being_committed_or_were_by_then():
    now = [0.0]
    engine = StorageEngine(max_bytes=None, storage_id="s", boot_id=b"b" * 16, put_ttl_seconds=10, clock=lambda: now[0])
    registry = registry_of(EmbeddedStorage(engine, endpoint_of(engine, ""), EngineDriver(engine)))
    for number in range(600):
        await put(engine, number, {"x": np.zeros(1, np.uint8)}, confirm=False, owner=registry.controller_id)
    now[0] += 10
    with registry.puts.committing(Put("s", b"b" * 16, put_id(0))) as check:
        slices = registry.expire()
        assert next(slices) == 511
        assert engine.confirm(put_id(599))
        assert list(slices) == [87]
        assert engine.stat().put_count == 2
        check()
    await registry.close()
