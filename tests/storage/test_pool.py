import pytest

from tq_service.storage.blobs.pool import RegionPool, size_class


@pytest.mark.parametrize(
    "size", [65536, 65537, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_333_333, (5 << 30) + 7]
)
def test_size_classes_hold_with_little_slack(size):
    assert size <= size_class(size) <= size * 1.125
    assert size_class(size_class(size)) == size_class(size)


def test_returned_regions_are_reused():
    pool = RegionPool()
    region = pool.take(1 << 20)
    region.view()[:5] = b"first"
    pool.release(region)
    assert pool.pooled_bytes == 1 << 20
    again = pool.take((1 << 20) - 100)
    assert bytes(again.view()[:5]) == b"first"
    assert (pool.pooled_bytes, pool.mapped_bytes) == (0, 1 << 20)


def test_used_and_kept_never_exceed_the_high_water_mark():
    pool = RegionPool()
    for size in (1 << 20, 2 << 20, 3 << 20, 1 << 20, 4 << 20, 1 << 17):
        pool.release(pool.take(size))
        assert pool.mapped_bytes == 0
        assert pool.pooled_bytes <= 4 << 20
    held = [pool.take(1 << 20) for _ in range(4)]
    assert pool.pooled_bytes == 0
    for region in held:
        pool.release(region)
    assert pool.pooled_bytes == 4 << 20


def test_pinned_regions_return_after_their_last_reader():
    returned = []
    pool = RegionPool(on_return=returned.append)
    region = pool.take(100_000)
    pool.pin(region)
    pool.pin(region)
    pool.release(region)
    pool.release(region)
    pool.unpin(region)
    assert returned == []
    pool.unpin(region)
    assert returned == [100_000]


def test_small_regions_are_not_kept():
    pool = RegionPool()
    for size in (0, 1, 1000):
        region = pool.take(size)
        assert len(region.view()) == len(region.array()) == size
        pool.release(region)
    assert pool.pooled_bytes == pool.mapped_bytes == 0


def test_trim_gives_memory_back_by_and_by():
    pool = RegionPool()
    held = [pool.take(1 << 20) for _ in range(8)]
    for region in held:
        pool.release(region)
    pool.trim(60.0)
    assert pool.pooled_bytes == 4 << 20
    pool.trim(3600.0)
    assert pool.pooled_bytes == 0


def test_a_size_class_that_was_used_up_does_not_hinder_the_others() -> None:
    pool = RegionPool()
    large, small = pool.take(1 << 20), pool.take(100_000)
    pool.release(large)
    pool.release(small)
    pool.take(1 << 20)  # the last kept one of its class
    region = pool.take(300_000)  # makes the pool give memory back, from the classes that have some
    assert len(region.view()) == 300_000
    assert pool.pooled_bytes <= 100_000 * 9 // 8
