import pytest

from tq_service.data.ahead import AheadBound


def begin_all(bound: AheadBound) -> int:
    """Begin as many batches as are admitted."""
    begun = 0
    while bound.admits():
        bound.begin()
        begun += 1
    return begun


def test_one_batch_is_under_way_until_the_first_size_is_known() -> None:
    bound = AheadBound(4, 100)
    assert begin_all(bound) == 1
    bound.arrive(10)
    assert begin_all(bound) == 3


def test_no_more_than_the_number() -> None:
    bound = AheadBound(3, 100)
    begin_all(bound)
    bound.arrive(1)
    assert begin_all(bound) == 2
    assert begin_all(bound) == 0
    bound.take(1)
    assert begin_all(bound) == 1


@pytest.mark.parametrize(("max_bytes", "count"), [(9, 0), (19, 0), (20, 1), (39, 2), (40, 3), (1_000, 9)])
def test_what_is_under_way_counts_as_much_as_the_largest(max_bytes: int, count: int) -> None:
    bound = AheadBound(10, max_bytes)
    begin_all(bound)
    bound.arrive(10)
    assert begin_all(bound) == count


def test_a_batch_is_always_admitted_when_nothing_is_ahead() -> None:
    bound = AheadBound(10, 1)
    for _ in range(3):
        assert begin_all(bound) == 1
        bound.arrive(1_000)
        assert begin_all(bound) == 0
        bound.take(1_000)


def test_a_larger_batch_holds_later_ones_back() -> None:
    bound = AheadBound(10, 100)
    begin_all(bound)
    bound.arrive(10)
    bound.take(10)
    assert begin_all(bound) == 10
    for _ in range(10):
        bound.arrive(10)
    for _ in range(5):
        bound.take(10)
    bound.begin()
    bound.arrive(40)
    assert begin_all(bound) == 0
    bound.take(10)
    bound.take(10)
    bound.take(10)
    assert begin_all(bound) == 1
