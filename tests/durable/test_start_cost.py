"""When a snapshot is due: before a start would take too long, and not before it is worth while."""

import pytest

from tq_service.durable import state_store
from tq_service.durable.state_store import StartCost, Stream


def seconds_when_too_high(sample_count: int, snapshot_seconds: float = 0.0) -> float:
    restore_seconds = sample_count * state_store._SAMPLE_SECONDS
    cost = StartCost(restore_seconds=restore_seconds, snapshot_seconds=snapshot_seconds)
    while not cost.is_too_high:
        cost.add(Stream.CHANGES, 1000)
    return cost.log_seconds


def test_the_larger_the_state_the_shorter_the_log_but_no_shorter_than_it_is_worth_while() -> None:
    small, larger, largest = map(seconds_when_too_high, (1, 400_000, 2_000_000))
    assert small > larger > largest
    assert largest == pytest.approx(state_store._WORTH_SECONDS, abs=0.02)


def test_a_snapshot_that_takes_long_is_taken_less_often() -> None:
    assert seconds_when_too_high(2_000_000, snapshot_seconds=2.0) == pytest.approx(2.0, abs=0.02)


def test_puts_cost_less_than_changes() -> None:
    changes, puts = StartCost(), StartCost()
    changes.add(Stream.CHANGES, 1000)
    puts.add(Stream.PUTS, 1000)
    assert 0 < puts.log_seconds < changes.log_seconds
