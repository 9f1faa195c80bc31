"""Regions: used again where nobody can see it, dropped in time, and never used again under a reader or a writer."""

import asyncio
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from open_files import open_files

from tq_service.errors import QuotaExceededError
from tq_service.storage.blobs import shared
from tq_service.storage.blobs.memory import BACKGROUND
from tq_service.storage.blobs.shared import RegionBlobs
from tq_service.wire import shared_memory
from tq_service.wire.mapping import Mapping

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

MIB = 1 << 20


@pytest.fixture
async def store():
    store = RegionBlobs(64 * MIB)
    yield store
    store.trim(1e9)
    await background()
    await store.close()


async def background():
    """Wait for what regions were dropped so far."""
    await asyncio.to_thread(BACKGROUND.submit(int).result)


class Session:
    """What has mapped regions."""

    def __init__(self):
        self.dropped = []

    def note_dropped(self, region):
        self.dropped.append(region)


async def test_a_region_is_used_again_and_keeps_its_number_and_pages(store):
    blob = await store.allocate(3 * MIB)
    region = blob.shared
    blob.view()[:5] = b"first"
    blob.release()
    assert (store.used_bytes, store.pooled_bytes, store.blob_count) == (0, 3 * MIB, 0)
    again = await store.allocate(3 * MIB - 100)
    assert again.shared is region
    assert again.view()[:5] == b"first"
    other = await store.allocate(3 * MIB)
    assert other.shared.number == region.number + 1
    assert (store.used_bytes, store.pooled_bytes, store.fd_count) == (6 * MIB, 0, 2)


@pytest.mark.parametrize(("size", "is_used"), [(MIB, True), (MIB * 0.85, True), (MIB * 0.75, False), (MIB + 1, False)])
async def test_a_region_serves_what_is_not_much_smaller(store, size, is_used):
    first = await store.allocate(MIB)
    region = first.shared
    first.release()
    blob = await store.allocate(int(size))
    assert (blob.shared is region) == is_used
    assert store.used_bytes == blob.shared.capacity
    blob.release()
    assert store.used_bytes == 0


async def test_a_leased_region_counts_as_used_and_is_not_used_again(store):
    freed = []
    store.on_freed = freed.append
    blob = await store.allocate(MIB)
    region = blob.shared
    region.lease(Session())
    region.lease(Session())
    blob.release()
    assert freed == [MIB]  # the quota has it back: readers starve no puts
    assert (store.used_bytes, store.pooled_bytes) == (MIB, 0)
    assert (await store.allocate(MIB)).shared is not region
    region.end_lease(is_released=True)
    assert store.pooled_bytes == 0
    region.end_lease(is_released=True)
    assert (store.used_bytes, store.pooled_bytes) == (MIB, MIB)
    assert (await store.allocate(MIB)).shared is region


async def test_pages_of_regions_may_be_huge(store):
    blob = await store.allocate(4 * MIB)
    smaps = (await asyncio.to_thread(Path("/proc/self/smaps").read_text)).split("memfd:tq_service")
    assert any(" hg" in part.split("VmFlags:")[1].splitlines()[0] for part in smaps[1:])
    blob.release()


async def test_a_lease_that_ends_before_the_blob_is_freed_changes_nothing(store):
    blob = await store.allocate(MIB)
    region = blob.shared
    region.lease(Session())
    region.end_lease(is_released=True)
    assert (store.used_bytes, store.pooled_bytes) == (MIB, 0)
    blob.release()
    assert (await store.allocate(MIB)).shared is region


@pytest.mark.parametrize("freed_first", [True, False])
async def test_a_region_of_a_session_that_ended_is_dropped_and_its_bytes_stay_for_who_maps_it(store, freed_first):
    blob = await store.allocate(MIB)
    region, session = blob.shared, Session()
    region.lease(session)
    reader = Mapping(region.fd, is_shared=False)
    blob.view()[:5] = b"bytes"
    if freed_first:
        blob.release()
        region.end_lease(is_released=False)
    else:
        region.end_lease(is_released=False)
        assert blob.view()[:5] == b"bytes"
        blob.release()
    assert (store.used_bytes, store.pooled_bytes) == (0, 0)
    assert session.dropped == [region.number]
    await background()
    assert bytes(reader.array(0, 5)) == b"bytes"
    assert (await store.allocate(MIB)).shared is not region


async def test_what_readers_keep_is_abandoned_where_memory_is_needed_the_oldest_first(store):
    blobs = [await store.allocate(16 * MIB) for _ in range(3)]
    regions = [blob.shared for blob in blobs]
    session = Session()
    for number, blob in enumerate(blobs):
        regions[number].lease(session)
        blob.view()[:1] = bytes([number])
        blob.release()
    kept = [Mapping(region.fd, is_shared=False).array(0, 1) for region in regions]
    assert store.used_bytes == 48 * MIB
    blobs = [await store.allocate(16 * MIB) for _ in range(2)]
    assert store.used_bytes == 64 * MIB
    assert session.dropped == []  # an abandoned one is still leased
    assert [int(each[0]) for each in kept] == [0, 1, 2]
    for region in regions:
        region.end_lease(is_released=True)
    assert (store.used_bytes, store.pooled_bytes) == (32 * MIB, 32 * MIB)
    assert session.dropped == [regions[0].number]
    await background()
    assert int(kept[0][0]) == 0  # its pages are back with the system, whoever maps them
    assert [int(each[0]) for each in kept[1:]] == [1, 2]
    assert {blob.shared for blob in blobs}.isdisjoint(regions)


async def test_regions_that_no_put_needs_are_dropped_after_minutes_and_their_pages_freed(store):
    before = open_files()
    blobs = [await store.allocate(MIB) for _ in range(4)]
    mapping = Mapping(blobs[0].shared.fd, is_shared=False)
    blobs[0].view()[:5] = b"bytes"
    sessions = [Session() for _ in blobs]
    for blob, session in zip(blobs, sessions, strict=True):
        blob.shared.lease(session)
        blob.shared.end_lease(is_released=True)
        blob.release()
    store.trim(shared._KEPT_SECONDS - 1)
    assert store.pooled_bytes == 4 * MIB
    busy = await store.allocate(MIB)  # the one freed last
    store.trim(1)
    assert store.pooled_bytes == 0
    assert [len(session.dropped) for session in sessions] == [1, 1, 1, 0]
    await background()
    assert bytes(mapping.array(0, 5)) == bytes(5)
    busy.release()
    assert store.pooled_bytes == MIB
    del busy, blobs, blob
    store.trim(1e9)
    await background()
    assert open_files() <= before


async def test_what_is_held_for_reuse_is_bounded_by_what_was_used(store):
    for size in (1, 2, 3, 5, 7, 11, 13):
        (await store.allocate(size * MIB)).release()
        assert store.pooled_bytes <= 2 * 13 * MIB
    assert store.pooled_bytes >= 13 * MIB


async def test_where_the_system_has_no_memory_what_is_held_for_reuse_goes_first(store, monkeypatch):
    new_region = shared_memory.new_region
    (await store.allocate(8 * MIB)).release()

    def limited(size):
        if store.pooled_bytes or size > 20 * MIB:
            raise OSError(12, "no memory")
        return new_region(size)

    monkeypatch.setattr(shared_memory, "new_region", limited)
    blob = await store.allocate(MIB)
    assert (blob.size, store.pooled_bytes) == (MIB, 0)
    with pytest.raises(QuotaExceededError, match="not enough memory for 31457280 bytes"):
        await store.allocate(30 * MIB)
    assert store.used_bytes == MIB


async def test_a_store_that_goes_leaves_no_file_descriptor():
    before = open_files()
    store = RegionBlobs()
    blobs = [await store.allocate(MIB) for _ in range(3)]
    blobs[0].release()
    await store.close()  # ends threads, of which one may still be leaving the call that made a region
    del store, blobs
    await asyncio.sleep(0)
    gc.collect()
    assert open_files() <= before


async def test_a_region_may_not_be_cut_by_those_who_have_its_file_descriptor(store):
    blob = await store.allocate(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(blob.shared.fd, 0)
    target = np.empty(100, np.uint8)
    blob.read_into(target.data, MIB - 100)
