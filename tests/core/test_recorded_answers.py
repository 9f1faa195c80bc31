"""What is remembered of requests: the newest answer of an id, forgotten oldest first, snapshot without a copy."""

import random
import sys

from tq_service.machine.state_machine import IdempotencyCache

KEPT = 1e6  # seconds


def cache(**arguments):
    return IdempotencyCache(KEPT, **arguments)


def name(number):
    return number.to_bytes(16)


def entries(snapshot):
    return [(entry.key, entry.seconds, entry.value) for entry in snapshot]


def forget_before(answers, seconds):
    answers._forget_old(seconds + KEPT)


def get(answers, number):
    return answers.recorded(name(number), object, 0.0)


def filled(count):
    answers = cache()
    for number in range(count):
        answers.add(name(number), number, float(number))
    return answers


def test_the_newest_entry_of_an_id_counts_and_outlives_the_older_one():
    answers = cache(weigh=len)
    answers.add(name(1), "old", 1.0)
    answers.add(name(2), "b", 2.0)
    answers.add(name(1), "newer", 3.0)
    assert (get(answers, 1), get(answers, 3), len(answers)) == ("newer", None, 2)
    forget_before(answers, 2.5)
    assert (get(answers, 1), get(answers, 2), len(answers)) == ("newer", None, 1)
    forget_before(answers, 3.0)
    assert get(answers, 1) == "newer"
    forget_before(answers, 3.1)
    assert (get(answers, 1), len(answers), answers.used_bytes, list(answers.snapshot())) == (None, 0, 0, [])


def test_a_snapshot_stays_as_it_was():
    answers = filled(5000)
    forget_before(answers, 1500.0)
    snapshot = answers.snapshot()
    answers.add(name(5000), "late", 5000.0)
    forget_before(answers, 4000.0)
    assert entries(snapshot) == [(name(number), float(number), number) for number in range(1500, 5000)]
    assert [key for key, _, _ in entries(answers.snapshot())] == [name(number) for number in range(4000, 5001)]
    assert entries(cache().snapshot()) == []


def test_snapshots_copy_nothing():
    answers = filled(5000)
    forget_before(answers, 100.0)
    before = [sys.getrefcount(request_id) for request_id in answers._ids]
    snapshots = [answers.snapshot() for _ in range(3)]
    assert [sys.getrefcount(request_id) for request_id in answers._ids] == before
    answers.add(name(5000), "late", 5000.0)
    assert [len(entries(snapshot)) for snapshot in snapshots] == [4900] * 3


def test_what_is_forgotten_is_let_go_of():
    answers, kept = cache(), []
    for number in range(20_000):
        answers.add(name(number), object(), number)
        forget_before(answers, number - 4000.0)
        kept.append(len(answers._ids))
    assert len(answers) == 4001
    assert max(kept) < 4001 * 5 // 4 + 1024


def test_restored_answers_go_on_as_if_they_had_been_recorded_here():
    answers, again = filled(3000), cache()
    forget_before(answers, 700.0)
    again.add(name(9000), "own", 1500.5)
    again.restore(answers.snapshot())
    assert (get(again, 9000), get(again, 2999), get(again, 699)) == ("own", 2999, None)
    again.add(name(9001), "late", 3000.0)
    forget_before(again, 1500.5)
    kept = [name(9000), *map(name, range(1501, 3000)), name(9001)]
    assert [key for key, _, _ in entries(again.snapshot())] == kept
    assert len(again) == len(kept)
    forget_before(again, 3000.5)
    assert (len(again), again.used_bytes) == (0, 0)


def test_an_id_that_is_restored_beside_a_newer_answer_has_the_newer_one():
    first, again = cache(), cache()
    first.add(name(1), "old", 1.0)
    again.add(name(1), "new", 2.0)
    again.restore(first.snapshot())
    assert (get(again, 1), len(again)) == ("new", 1)
    forget_before(again, 2.5)
    assert (get(again, 1), again.used_bytes) == (None, 0)


def test_any_order_of_changes_gives_what_a_plain_list_gives():
    rng = random.Random(5)
    answers, plain, snapshots = cache(), [], []
    for seconds in range(6000):
        if plain and rng.random() < 0.45:
            forget_before(answers, plain.pop(0)[1] + 0.5)
        else:
            number = rng.randrange(400)
            answers.add(name(number), seconds, seconds)
            plain.append((name(number), seconds, seconds))
        if rng.random() < 0.01:
            snapshots.append((answers.snapshot(), list(plain)))
        newest = {key: value for key, _, value in plain}
        some = rng.randrange(400)
        assert len(answers) == len(newest)
        assert get(answers, some) == newest.get(name(some))
    assert all(entries(blocks) == expected for blocks, expected in snapshots)
