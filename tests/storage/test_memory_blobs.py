import mmap
import threading

import pytest

from tq_service.storage.blobs import memory, shared
from tq_service.storage.blobs.memory import MemoryBlobs, size_class, unmap


@pytest.mark.parametrize(
    "size", [65536, 65537, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_333_333, (5 << 30) + 7]
)
def test_size_classes_hold_with_little_slack(size):
    assert size <= size_class(size) <= size * 1.125
    assert size_class(size_class(size)) == size_class(size)


def test_returned_memory_is_reused():
    store = MemoryBlobs()
    blob = store.allocate_now(1 << 20)
    blob.view()[:5] = b"first"
    blob.release()
    assert store.pooled_bytes == 1 << 20
    again = store.allocate_now((1 << 20) - 100)
    assert bytes(again.view()[:5]) == b"first"
    assert (store.pooled_bytes, store.used_bytes) == (0, 1 << 20)


def test_used_and_pooled_never_exceed_the_high_water_mark():
    store = MemoryBlobs()
    for size in (1 << 20, 2 << 20, 3 << 20, 1 << 20, 4 << 20, 1 << 17):
        store.allocate_now(size).release()
        assert store.used_bytes == 0
        assert store.pooled_bytes <= 4 << 20
    held = [store.allocate_now(1 << 20) for _ in range(4)]
    assert store.pooled_bytes == 0
    for blob in held:
        blob.release()
    assert store.pooled_bytes == 4 << 20


def test_pinned_blobs_are_freed_after_their_last_reader():
    freed = []
    store = MemoryBlobs()
    store.on_freed = freed.append
    blob = store.allocate_now(100_000)
    blob.pin()
    blob.pin()
    blob.release()
    blob.release()
    blob.unpin()
    assert freed == []
    blob.unpin()
    assert freed == [100_000]


def test_small_blobs_are_not_pooled():
    store = MemoryBlobs()
    for size in (0, 1, 1000):
        blob = store.allocate_now(size)
        assert len(blob.view()) == size
        blob.release()
    assert store.pooled_bytes == store.used_bytes == 0


def test_trim_gives_memory_back_by_and_by():
    store = MemoryBlobs()
    held = [store.allocate_now(1 << 20) for _ in range(8)]
    for blob in held:
        blob.release()
    store.trim(2.5)
    assert store.pooled_bytes == 4 << 20
    store.trim(3600.0)
    assert store.pooled_bytes == 0


def test_a_size_class_that_was_used_up_does_not_hinder_the_others() -> None:
    store = MemoryBlobs()
    large, small = store.allocate_now(1 << 20), store.allocate_now(100_000)
    large.release()
    small.release()
    store.allocate_now(1 << 20)  # the last pooled one of its class
    blob = store.allocate_now(300_000)  # makes the store give memory back, from the classes that have some
    assert len(blob.view()) == 300_000
    assert store.pooled_bytes <= 100_000 * 9 // 8


async def test_a_thread_unmaps_what_is_large(monkeypatch):
    threads, sizes = set(), []

    def noting(memory):
        threads.add(threading.get_ident())
        sizes.append(len(memory))
        unmap(memory)

    monkeypatch.setattr(memory, "unmap", noting)
    pooled, sealed = MemoryBlobs(), shared.MemfdBlobs()
    for size in (1 << 20, 32 << 20):
        pooled.allocate_now(size).release()
        blob = await sealed.allocate(size)
        if size > 1 << 20:
            blob.release()
    pooled.trim(1e9)
    assert pooled.pooled_bytes == 0
    memory.BACKGROUND.submit(int).result()
    assert sizes == [32 << 20] * 2
    assert threading.get_ident() not in threads


def test_what_is_unmapped_stays_for_those_who_read_it():
    left = mmap.mmap(-1, 16 << 20)
    view = memoryview(left)
    unmap(left)
    view[5] = 7
    assert view[5] == 7
    view.release()
    unmap(left)
    assert left.closed
