"""What is remembered for a while: the newest entry of an id, forgotten oldest first, snapshot without a copy."""

import itertools
import random

from tq_service.domain.idempotency import TtlLog


def entries(snapshot):
    return [(entry.key, entry.seconds, entry.value) for entry in itertools.chain.from_iterable(snapshot)]


def drop_before(log, seconds):
    while log.oldest is not None and log.oldest.seconds < seconds:
        log.drop_oldest()


def log_of(count):
    log = TtlLog()
    for number in range(count):
        log.add(number.to_bytes(4), float(number), number)
    return log


def test_the_newest_entry_of_an_id_counts_and_outlives_the_older_one():
    log = TtlLog()
    log.add(b"a", 1.0, "old")
    log.add(b"b", 2.0, "b")
    log.add(b"a", 3.0, "new")
    assert (log.get(b"a").value, log.get(b"c"), len(log)) == ("new", None, 2)
    drop_before(log, 2.5)
    assert (log.get(b"a") is not None, log.get(b"b") is not None, len(log)) == (True, False, 1)
    drop_before(log, 3.0)
    assert log.get(b"a").value == "new"
    drop_before(log, 3.1)
    assert (log.get(b"a"), len(log), log.oldest) == (None, 0, None)


def test_a_snapshot_stays_as_it_was():
    log = log_of(5000)
    for _ in range(1500):
        log.drop_oldest()
    snapshot = log.snapshot()
    log.add(b"late", 5000.0, "late")
    drop_before(log, 4000.0)
    assert entries(snapshot) == [(number.to_bytes(4), float(number), number) for number in range(1500, 5000)]
    assert [key for key, _, _ in entries(log.snapshot())] == [*(n.to_bytes(4) for n in range(4000, 5000)), b"late"]
    assert entries(TtlLog().snapshot()) == []


def test_any_order_of_changes_gives_what_a_plain_list_gives():
    rng = random.Random(5)
    log, plain, snapshot = TtlLog(), [], []
    for seconds in range(6000):
        if plain and rng.random() < 0.45:
            log.drop_oldest()
            plain.pop(0)
        else:
            key = rng.randrange(400).to_bytes(2)
            log.add(key, seconds, seconds)
            plain.append((key, seconds, seconds))
        if rng.random() < 0.01:
            snapshot.append((log.snapshot(), list(plain)))
        newest = {key: value for key, _, value in plain}
        some = rng.randrange(400).to_bytes(2)
        assert len(log) == len(newest)
        assert (None if (entry := log.get(some)) is None else entry.value) == newest.get(some)
    assert all(entries(blocks) == expected for blocks, expected in snapshot)
