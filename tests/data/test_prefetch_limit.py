import pytest

from tq_service.data.source import PrefetchLimit


def begin_all(limit: PrefetchLimit) -> int:
    """Begin as many batches as are admitted."""
    begun = 0
    further_count = limit.further_count()
    while limit.admits():
        limit.begin()
        begun += 1
    assert begun == further_count or (further_count, begun) == (0, 1)
    return begun


def test_one_batch_is_under_way_until_the_first_size_is_known() -> None:
    limit = PrefetchLimit(4, 100)
    assert begin_all(limit) == 1
    limit.arrive(10)
    assert begin_all(limit) == 3


def test_no_more_than_the_number() -> None:
    limit = PrefetchLimit(3, 100)
    begin_all(limit)
    limit.arrive(1)
    assert begin_all(limit) == 2
    assert begin_all(limit) == 0
    limit.consume(1)
    assert begin_all(limit) == 1


@pytest.mark.parametrize(("max_bytes", "count"), [(9, 0), (19, 0), (20, 1), (39, 2), (40, 3), (1_000, 9)])
def test_what_is_under_way_counts_as_much_as_the_largest(max_bytes: int, count: int) -> None:
    limit = PrefetchLimit(10, max_bytes)
    begin_all(limit)
    limit.arrive(10)
    assert begin_all(limit) == count


def test_a_batch_is_always_admitted_when_nothing_is_ahead() -> None:
    limit = PrefetchLimit(10, 1)
    for _ in range(3):
        assert begin_all(limit) == 1
        limit.arrive(1_000)
        assert begin_all(limit) == 0
        limit.consume(1_000)


def test_a_larger_batch_holds_later_ones_back() -> None:
    limit = PrefetchLimit(10, 100)
    begin_all(limit)
    limit.arrive(10)
    limit.consume(10)
    assert begin_all(limit) == 10
    for _ in range(10):
        limit.arrive(10)
    for _ in range(5):
        limit.consume(10)
    limit.begin()
    limit.arrive(40)
    assert begin_all(limit) == 0
    limit.consume(10)
    limit.consume(10)
    limit.consume(10)
    assert begin_all(limit) == 1
