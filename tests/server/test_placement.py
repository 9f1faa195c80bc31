"""How puts are shared among storage services: at once, by free bytes, whatever was heard last."""

import contextlib
import os
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tq_service.internal.v1.storage_registry_pb2 import RegisterStorageRequest
from tq_service.server import remote_storage
from tq_service.server.storage_servicer import EngineDriver, endpoint_of
from tq_service.server.storages import EmbeddedStorage, StorageRegistry
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put import PutCells
from tq_service.v1 import metadata_pb2
from tq_service.wire.connection import Credentials

MIB, GIB = 1 << 20, 1 << 30


class Placer:
    """A registry with storage services of some quotas, on a clock of the test.

    Attributes:
        used: what the next heartbeat of each says that it has stored and reserved.
    """

    def __init__(self, registry, monkeypatch, max_bytes):
        self.registry, self.max_bytes = registry, max_bytes
        self.used = Counter()
        self.now = 1000.0
        monkeypatch.setattr(remote_storage, "time", SimpleNamespace(monotonic=lambda: self.now))
        for name in max_bytes:
            self.beat(name)

    def beat(self, *names):
        for name in names or self.max_bytes:
            endpoint = metadata_pb2.StorageEndpoint(storage_id=name, boot_id=b"b" * 16, address=f"{name}:1")
            request = RegisterStorageRequest(
                storage=endpoint, run_id=b"r" * 16, max_bytes=self.max_bytes[name], used_bytes=self.used[name]
            )
            self.registry.on_heartbeat(request)

    def place(self, size_bytes, put_id=b""):
        return self.registry.place(size_bytes, put_id).storages[0].storage_id

    def shares(self, size_bytes, count):
        """Return how many of some puts go where."""
        return Counter(self.place(size_bytes) for _ in range(count))

    def free_bytes(self, name):
        return self.registry._storages[name].free_bytes()


@contextlib.asynccontextmanager
async def placer(monkeypatch, embedded=None, **max_bytes):
    registry = StorageRegistry(embedded, 2.0, Credentials(None, None, None))
    try:
        yield Placer(registry, monkeypatch, max_bytes)
    finally:
        await registry.close()


@pytest.mark.parametrize("names", ["ab", "abcd"])
@pytest.mark.parametrize("ahead_bytes", [0, GIB])
async def test_puts_in_a_row_take_turns_whatever_is_used(monkeypatch, names, ahead_bytes):
    """One holds a GiB more, or did so at its last heartbeat: all 16 puts went to the others."""
    async with placer(monkeypatch, **dict.fromkeys(names, 64 * GIB)) as puts:
        puts.used["a"] = ahead_bytes
        puts.beat()
        shares = puts.shares(64 * MIB, 16)
        assert max(shares.values()) - min(shares[name] for name in names) <= 1


async def test_a_heartbeat_does_not_draw_the_puts_that_follow_it(monkeypatch):
    async with placer(monkeypatch, a=8 * GIB, b=8 * GIB) as puts:
        shares = Counter()
        for count in range(32):
            shares[puts.place(64 * MIB)] += 1
            puts.now += 0.01
            if count % 4 == 0:
                puts.beat("a")  # which has none of them yet
        assert shares == {"a": 16, "b": 16}


async def test_a_large_put_does_not_send_the_small_ones_elsewhere(monkeypatch):
    async with placer(monkeypatch, a=64 * GIB, b=64 * GIB) as puts:
        holds_large = puts.place(4 * GIB)
        shares = puts.shares(64 * MIB, 16)
        assert shares == {"a": 8, "b": 8}
        assert puts.place(4 * GIB) != holds_large


async def test_sizes_that_repeat_are_spread_each(monkeypatch):
    async with placer(monkeypatch, a=64 * GIB, b=64 * GIB) as puts:
        placed = Counter()
        for _ in range(16):
            for size_bytes in (64 * MIB, 1000, 1000, 200_000):
                placed[puts.place(size_bytes), size_bytes] += 1
        assert set(placed.values()) == {8, 16}


@pytest.mark.parametrize("beat_every", [1, 7, 1000])
async def test_storage_services_get_shares_by_free_bytes(monkeypatch, beat_every):
    async with placer(monkeypatch, small=16 * GIB, large=48 * GIB) as puts:
        shares = Counter()
        for count in range(400):
            name = puts.place(16 * MIB)
            shares[name] += 1
            puts.used[name] += 16 * MIB
            if count % beat_every == 0:
                puts.now += 1.5
                puts.beat()
        assert 96 <= shares["small"] <= 104
        assert puts.free_bytes("large") / 48 == pytest.approx(puts.free_bytes("small") / 16, rel=0.01)


async def test_a_full_storage_service_gets_no_puts_while_others_have_capacity(monkeypatch):
    """New rows may not use the last tenth: there they would wait."""
    async with placer(monkeypatch, full=10 * GIB, other=10 * GIB) as puts:
        puts.used["full"] = 9 * GIB - MIB
        puts.beat()
        assert puts.shares(2 * MIB, 16) == {"other": 16}
        puts.used["full"] = 0  # was cleared: it shares again at once, and does not catch up
        puts.beat()
        shares = puts.shares(2 * MIB, 16)
        assert abs(shares["full"] - shares["other"]) <= 2


async def test_where_none_has_capacity_the_put_waits_where_most_is_free(monkeypatch):
    async with placer(monkeypatch, a=GIB, b=2 * GIB) as puts:
        puts.used.update(a=GIB - MIB, b=2 * GIB - 2 * MIB)
        puts.beat()
        assert [puts.place(MIB) for _ in range(3)] == ["b", "a", "b"]


async def test_a_storage_service_that_joins_does_not_catch_up(monkeypatch):
    async with placer(monkeypatch, a=64 * GIB) as puts:
        puts.shares(64 * MIB, 100)
        puts.max_bytes["b"] = 64 * GIB
        puts.beat("b")
        shares = puts.shares(64 * MIB, 16)
        assert abs(shares["a"] - shares["b"]) <= 2


async def test_bytes_in_flight_count_until_a_heartbeat_counts_them(monkeypatch):
    async with placer(monkeypatch, a=GIB) as puts:
        puts.place(MIB)
        puts.now += 0.5
        puts.beat()  # sent before the put came, perhaps
        assert puts.free_bytes("a") == GIB - MIB
        puts.now += 0.5
        puts.used["a"] = MIB
        puts.beat()
        assert puts.free_bytes("a") == GIB - MIB
        puts.now += 2.0
        puts.used["a"] = 0
        puts.beat()
        assert puts.free_bytes("a") == GIB


async def test_a_put_that_is_placed_again_goes_elsewhere_and_counts_once(monkeypatch):
    """Such as one whose storage service drains: it would be sent there again until that is silent."""
    async with placer(monkeypatch, a=GIB, b=GIB, c=2 * GIB) as puts:
        for _ in range(6):
            put_id = os.urandom(16)
            tried = [puts.place(MIB, put_id) for _ in range(4)]
            assert all(one != other for one, other in pairwise(tried))
        assert sum(puts.free_bytes(name) for name in "abc") == 4 * GIB - 6 * MIB


async def test_a_put_that_is_placed_again_stays_if_no_other_has_capacity(monkeypatch):
    async with placer(monkeypatch, a=GIB, b=GIB) as puts:
        puts.used["b"] = GIB
        puts.beat()
        put_id = os.urandom(16)
        assert [puts.place(MIB, put_id) for _ in range(3)] == ["a", "a", "a"]
        assert puts.free_bytes("a") == GIB - MIB


async def test_a_put_that_is_freed_is_in_flight_no_more(monkeypatch):
    async with placer(monkeypatch, a=GIB) as puts:
        puts.place(MIB, b"p" * 16)
        puts.registry._storages["a"].free([PutCells(put_id=b"p" * 16)])
        assert puts.free_bytes("a") == GIB


async def test_a_grant_lists_storage_services_in_shares_by_free_bytes(monkeypatch):
    async with placer(monkeypatch, a=10 * GIB, b=10 * GIB, large=20 * GIB, full=10 * GIB) as puts:
        puts.used["full"] = 10 * GIB
        puts.beat()
        grants = [puts.registry.place(100) for _ in range(8)]
        for grant in grants:
            listed = Counter(each.storage_id for each in grant.storages)
            assert listed == {"a": 1, "b": 1, "large": 2}
            assert grant.grant_bytes == pytest.approx(9 * GIB // 64, rel=0.01)
        assert Counter(grant.storages[0].storage_id for grant in grants) == {"a": 2, "b": 2, "large": 4}


async def test_the_grant_of_the_embedded_storage_ends_beside_others(monkeypatch):
    engine = StorageEngine(max_bytes=GIB, storage_id="mine")
    embedded = EmbeddedStorage(engine, endpoint_of(engine, ""), EngineDriver(engine))
    async with placer(monkeypatch, embedded, other=GIB) as puts:
        grants = [puts.registry.place(100) for _ in range(4)]
        assert sorted(grant.embedded for grant in grants) == [False, False, True, True]
        assert all(len(grant.storages) == 1 and grant.grant_bytes <= GIB // 64 for grant in grants)
