"""What every store of blobs promises the index, with what each of them can do beyond; a new one is added to STORES."""

import asyncio
import os
import threading

import numpy as np
import pytest

from tq_service.storage.blobs.memory import MemoryBlobs
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.blobs.shared import MemfdBlobs, RegionBlobs
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns

STORES = {
    "memory": lambda path: MemoryBlobs(),
    "segments": lambda path: SegmentBlobs(path / "segments", min_free_bytes=0),
    "synced segments": lambda path: SegmentBlobs(path / "segments", sync=True, min_free_bytes=0),
    "regions": lambda path: RegionBlobs(),
    "sealed": lambda path: MemfdBlobs(),
}
DURABLE_STORES = ["segments", "synced segments"]
SIZES = [0, 1, 5000, (64 << 10) - 1, 64 << 10, 300_000]


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    if request.param in ("regions", "sealed") and not shared_memory.is_supported():
        pytest.skip("sealed memfds are there on Linux only")
    store = STORES[request.param](tmp_path)
    store.freed = []
    store.on_freed = store.freed.append
    return store


def content(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


async def allocated(store, size):
    """Return a blob with its content, written in pieces, or adopted."""
    blob = await store.allocate(size)
    data = content(size)
    if isinstance(store, MemfdBlobs):
        if size:
            blob.map_fd(shared_memory.write_sealed(encode_columns({"x": np.frombuffer(data, np.uint8)})))
        return blob
    for start in range(0, max(size, 1), 70_000):
        await store.write(blob, start, memoryview(data)[start : start + 70_000])
    return blob


async def read(store, blob, *spans):
    targets = [(start, bytearray(size)) for start, size in spans]
    await asyncio.to_thread(blob.read_slices, [(start, memoryview(target)) for start, target in targets])
    return b"".join(target for _, target in targets)


async def test_the_durable_stores_are_known(store, request):
    assert isinstance(store, SegmentBlobs) == (request.node.callspec.params["store"] in DURABLE_STORES)


@pytest.mark.parametrize("size", SIZES)
async def test_what_was_written_is_read(store, size):
    if store.is_shared and size % 64:
        size = -(-size // 64) * 64  # clients send columns at multiples of 64 bytes
    blob = await allocated(store, size)
    assert blob.size == blob.charge == size
    assert await read(store, blob, (0, size)) == content(size)


async def test_spans_are_read_in_the_order_asked_for(store):
    blob = await allocated(store, 128_000)
    data = content(128_000)
    spans = [(100_000, 28_000), (0, 1), (64_000, 0), (5, 70_000), (5, 3)]
    assert await read(store, blob, *spans) == b"".join(data[start : start + size] for start, size in spans)
    assert await read(store, blob) == b""


async def test_a_part_and_a_view_have_the_same_bytes(store):
    blob = await allocated(store, 128_000)
    if blob.is_local:
        assert blob.view() == content(128_000)
    else:
        with pytest.raises(TypeError, match="cannot be viewed in memory"):
            blob.view()
    part = bytearray(1000)
    blob.read_into(memoryview(part), 100_500)
    assert part == content(128_000)[100_500:101_500]


async def test_blobs_do_not_touch_each_other(store):
    blobs = [await allocated(store, size) for size in (64, 6400, 128_000, 128_064)]
    blobs[1].release()
    again = await allocated(store, 64_000)
    for blob in (blobs[0], *blobs[2:], again):
        assert await read(store, blob, (0, blob.size)) == content(blob.size)


async def test_a_release_frees_the_charge_once(store):
    blob = await allocated(store, 128_000)
    blob.charge = 128_777
    assert store.freed == []
    blob.release()
    blob.release()
    assert store.freed == [128_777]


async def test_a_blob_stays_while_it_is_pinned(store):
    blob = await allocated(store, 128_000)
    blob.pin()
    blob.pin()
    blob.release()
    others = [await allocated(store, 128_000 - 64) for _ in range(2)]
    blob.unpin()
    assert store.freed == []
    assert await read(store, blob, (0, 128_000)) == content(128_000)
    blob.unpin()
    assert store.freed == [128_000]
    for other in others:
        other.release()
    assert len(store.freed) == 3


async def test_a_blob_that_is_only_pinned_for_a_while_is_not_freed(store):
    blob = await allocated(store, 6400)
    blob.pin()
    blob.unpin()
    assert store.freed == []
    assert await read(store, blob, (0, 6400)) == content(6400)


async def test_an_allocation_that_is_cancelled_leaves_nothing(store):
    task = asyncio.ensure_future(store.allocate(300_032))
    await asyncio.sleep(0)
    task.cancel()
    blob = (await asyncio.gather(task, return_exceptions=True))[0]
    if not isinstance(blob, asyncio.CancelledError):  # it was there before
        blob.release()
    blob = await allocated(store, 300_032)
    assert await read(store, blob, (0, 300_032)) == content(300_032)
    blob.release()
    assert set(store.freed) == {300_032}


async def test_small_blobs_are_there_at_once(store):
    if store.is_shared:
        pytest.skip("clients make its blobs")
    for size in SIZES:
        blob = store.allocate_now(size)
        await store.write(blob, 0, content(size))
        assert await read(store, blob, (0, size)) == content(size)
        blob.release()
    assert store.freed == SIZES


async def test_what_is_held_for_reuse_is_given_up_in_time(store):
    blobs = [await allocated(store, 256_000) for _ in range(4)]
    for blob in blobs:
        blob.release()
    held = store.pooled_bytes
    store.trim(3600.0)
    assert store.pooled_bytes <= held / 1000
    blob = await allocated(store, 256_000)
    assert await read(store, blob, (0, 256_000)) == content(256_000)


async def test_memory_of_another_size_is_not_adopted_and_closed(store):
    if not isinstance(store, MemfdBlobs):
        pytest.skip("clients send it no memory")
    blob = await store.allocate(128_000)
    fd = shared_memory.write_sealed(encode_columns({"x": np.zeros(64_000, np.uint8)}))
    with pytest.raises(ValueError, match="expected 128000"):
        blob.map_fd(fd)
    assert (store.blob_count, store.fd_count) == (1, 1)
    blob.release()
    assert store.blob_count == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("store", DURABLE_STORES, indirect=True)
async def test_a_durable_blob_is_there_after_a_restart(store, tmp_path):
    small, large, other, gone = [await allocated(store, size) for size in (6400, 128_000, 128_064, 128_128)]
    for blob in (small, large, other):
        await store.flush(blob)
    assert small.number == 0
    assert bytes(small.view()) == content(6400)
    numbers = [blob.number for blob in (large, other)]
    assert len({0, *numbers}) == 3
    checksum = await store.checksum(large, 0)
    assert checksum == large.checksum
    after = SegmentBlobs(tmp_path / "segments", min_free_bytes=0)
    found = after.recover([(numbers[1], 128_064), (numbers[0], 128_000), (999, 64_000), (numbers[0], 1)])
    assert found[2:] == [None, None]
    assert await read(after, found[0], (0, 128_064)) == content(128_064)
    assert await read(after, found[1], (0, 128_000)) == content(128_000)
    assert found[1].tables is None  # until it has been read
    assert await after.checksum(found[1], 500) == checksum
    assert found[1].tables == content(128_000)[:500]
    assert after.pooled_bytes >= gone.size
    assert (await allocated(after, 1 << 20)).number > 999


@pytest.mark.parametrize("store", DURABLE_STORES, indirect=True)
async def test_a_copy_has_a_beginning_and_spans(store):
    source = await allocated(MemoryBlobs(), 3 << 20)
    data = content(3 << 20)
    for spans in ([(5, 100), (1 << 20, 2000)], [(64, 2 << 20), (0, 1)]):
        expected = b"beginning" + b"".join(data[start : start + size] for start, size in spans)
        copy = await store.allocate(len(expected))
        await store.copy(copy, memoryview(b"beginning"), source, spans)
        await store.flush(copy)
        assert await read(store, copy, (0, len(expected))) == expected
        if copy.number:
            assert await store.checksum(copy, 0) == copy.checksum


async def test_a_closed_store_has_no_threads_and_takes_back_its_blobs(store):
    before = {*threading.enumerate()}
    blob = await allocated(store, 128_000)
    if isinstance(store, SegmentBlobs):
        await store.checksum(blob, 0)
    await store.close()
    await store.close()
    assert [each for each in {*threading.enumerate()} - before if each.name.startswith("tq-segment_")] == []
    blob.release()
    assert store.freed == [128_000]
