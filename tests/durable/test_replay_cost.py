"""When a snapshot is due: before a start would take too long, and not before it is worth while."""

import pytest

from tq_service.durable import state_store
from tq_service.durable.log.log import Stream
from tq_service.durable.state_store import ReplayCost


def seconds_when_too_long(sample_count: int, snapshot_seconds: float = 0.0) -> float:
    cost = ReplayCost()
    cost.note_snapshot(snapshot_seconds)
    while not cost.is_too_long(lambda: sample_count):
        cost.add(Stream.CHANGES, 1000)
    return cost.seconds


def test_the_larger_the_state_the_shorter_the_journal_but_no_shorter_than_it_is_worth_while() -> None:
    small, larger, largest = map(seconds_when_too_long, (1, 400_000, 2_000_000))
    assert small > larger > largest
    assert largest == pytest.approx(state_store._WORTH_SECONDS, abs=0.02)


def test_a_snapshot_that_takes_long_is_taken_less_often() -> None:
    assert seconds_when_too_long(2_000_000, snapshot_seconds=0.7) == pytest.approx(0.7, abs=0.02)


def test_samples_are_counted_now_and_then_only() -> None:
    cost, counts = ReplayCost(), []

    def sample_count() -> int:
        counts.append(cost.seconds)
        return 0

    while not cost.is_too_long(sample_count):
        cost.add(Stream.PUTS, 100)
    assert 1 < len(counts) < 200
    cost.reset()
    assert cost.seconds == 0.0
    assert not cost.is_too_long(sample_count)
