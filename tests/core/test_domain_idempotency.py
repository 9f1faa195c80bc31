"""Recorded answers of mutating requests."""

import pytest
from domain_support import new_id

from tq_service.errors import InvalidArgumentError
from tq_service.machine import state_machine
from tq_service.machine.state_machine import IdempotencyCache, RequestAnswered, State, StateMachine
from tq_service.serving.catalog import Catalog


class Clock:
    def __init__(self):
        self.now = 100.0

    def time(self):
        return 1e9

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(state_machine, "time", clock)
    return clock


def log_of(keep_seconds, **arguments):
    return Catalog(None, answers=IdempotencyCache(keep_seconds, **arguments))


def cache_of(log):
    return log.machine.state.answers


def test_a_repeat_has_one_effect_and_gets_the_recorded_answer(clock):
    log, made = log_of(60), []
    first, second = new_id(), new_id()
    assert [log.run_once(first, lambda: made.append(1) or len(made)) for _ in range(3)] == [1, 1, 1]
    assert log.run_once(second, lambda: made.append(2) or len(made)) == 2
    assert made == [1, 2]
    assert (log.recorded(first), log.recorded(new_id())) == (1, None)


def test_answers_are_kept_packed(clock):
    kept = []
    log, request_id = log_of(60, pack=lambda answer: kept.append(answer) or str(answer), unpack=int), new_id()
    assert log.recorded(request_id) is None
    assert [log.run_once(request_id, lambda: 7) for _ in range(2)] == [7, 7]
    assert (log.recorded(request_id), kept) == (7, [7])


def test_a_refused_request_may_be_right_the_next_time(clock):
    log, request_id = log_of(60), new_id()

    def refuse():
        raise KeyError("no")

    with pytest.raises(KeyError):
        log.run_once(request_id, refuse)
    assert log.run_once(request_id, lambda: "yes") == "yes"


def test_answers_are_forgotten_when_nobody_can_be_retrying(clock):
    log, old = log_of(60), new_id()
    log.run_once(old, lambda: "old")
    clock.now += 59
    log.run_once(new_id(), lambda: "young")
    assert log.run_once(old, lambda: "again") == "old"
    clock.now += 2
    assert log.run_once(old, lambda: "again") == "again"
    assert len(cache_of(log)) == 2


@pytest.mark.parametrize("size", [0, 15, 17])
def test_ids_are_16_bytes(size):
    with pytest.raises(InvalidArgumentError, match=f"{size} bytes"):
        log_of(60).run_once(bytes(size), lambda: None)


def test_the_oldest_answers_go_first_where_there_are_too_many_bytes(clock):
    log = log_of(60, pack=lambda answer: b"x" * answer, max_bytes=3_000, weigh=len)
    ids = [new_id() for _ in range(4)]
    for request_id in ids:
        log.run_once(request_id, lambda: 1_000)
        clock.now += 1
    log.run_once(new_id(), lambda: 0)
    assert [log.recorded(request_id) is not None for request_id in ids] == [False, False, True, True]
    assert cache_of(log).used_bytes <= 3_000
    clock.now += 100
    log.run_once(new_id(), lambda: 0)
    assert (len(cache_of(log)), cache_of(log).used_bytes < 1_000) == (1, True)


def test_what_answers_take_is_the_same_after_they_were_frozen(clock):
    log = log_of(60, weigh=len)
    for size in (10, 20):
        log.run_once(new_id(), lambda size=size: b"x" * size)
    again = log_of(60, weigh=len)
    cache_of(again).restore(cache_of(log).snapshot())
    assert cache_of(again).used_bytes == cache_of(log).used_bytes > 30


def test_an_id_is_for_one_kind_of_answer():
    log, request_id = log_of(60), new_id()
    assert log.run_once(request_id, lambda: 7, int) == 7
    with pytest.raises(InvalidArgumentError, match="whose result was of type int"):
        log.run_once(request_id, lambda: "no", str)
    assert log.run_once(request_id, lambda: 8, int) == 7


def test_time_goes_on_from_the_log_where_the_clock_was_set_back(clock):
    machine = StateMachine(State())
    assert machine.now_seconds() == 1e9
    clock.now += 5
    assert machine.now_seconds() == 1e9 + 5
    machine.replay(RequestAnswered(request_id=new_id(), packed="answer"), 1e9 + 3600)
    assert machine.now_seconds() == 1e9 + 3600
    clock.now += 5
    assert machine.now_seconds() == 1e9 + 3605
