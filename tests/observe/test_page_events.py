"""What is noted of partitions and services, from updates of a watch and from one status to the next."""

from itertools import pairwise

from page_statuses import partition, service, status, storage, update

from tq_service.client import WatchUpdate
from tq_service.observe.page.trends import EventLog

MADE, OTHER = partition("train@0", 4), partition("train@0", 6, incarnation=b"o" * 16)
SEALED = partition("train@0", 8, sealed=True)


def noted(*updates: WatchUpdate) -> list[tuple[str, str]]:
    """Return kind and text of what updates are noted as, after an empty state in the beginning."""
    log = EventLog()
    for moment, each in enumerate((update(is_reset=True), *updates)):
        log.follow(each, float(moment))
    events = log.shown(100.0)
    assert {event["name"] for event in events} <= {"train@0"}
    return [(event["kind"], event["text"]) for event in events]


def test_a_partition_is_made_sealed_and_cleared_once_however_often_it_is_said() -> None:
    assert noted(update(MADE), update(MADE), update(SEALED), update(SEALED), update(SEALED, cleared=True)) == [
        ("made", "made"), ("sealed", "sealed (8 samples)"), ("cleared", "cleared (8 samples)"),
    ]  # fmt: skip


def test_a_partition_that_was_sealed_or_made_again_between_two_updates() -> None:
    assert [kind for kind, _ in noted(update(SEALED))] == ["made", "sealed"]
    assert [kind for kind, _ in noted(update(MADE), update(OTHER))] == ["made", "cleared", "made"]
    assert [kind for kind, _ in noted(update(OTHER), update(MADE, cleared=True))] == ["made"]


def test_what_is_there_in_the_beginning_has_not_happened() -> None:
    log = EventLog()
    log.follow(update(MADE, is_reset=True, is_whole=False), 0.0)
    log.follow(update(partition("train@1", incarnation=b"2" * 16)), 0.0)
    assert log.shown(0.0) == []
    log.follow(update(partition("train@1", sealed=True, incarnation=b"2" * 16)), 1.0)
    assert [(event["kind"], event["name"]) for event in log.shown(1.0)] == [("sealed", "train@1")]


def test_a_whole_state_after_a_restart_says_what_is_gone_and_what_is_new() -> None:
    kinds = [kind for kind, _ in noted(update(MADE), update(is_reset=True))]
    assert kinds == ["made", "cleared"]
    assert noted(update(MADE), update(MADE, is_reset=True)) == [("made", "made")]
    assert [kind for kind, _ in noted(update(SEALED, is_reset=True))] == ["made", "sealed"]


def test_a_whole_state_that_breaks_off_is_compared_with_the_one_before_it() -> None:
    broken = update(is_reset=True, is_whole=False)
    assert [kind for kind, _ in noted(update(MADE), broken, update(MADE, is_reset=True))] == ["made"]
    assert [kind for kind, _ in noted(update(MADE), broken, update(is_reset=True))] == ["made", "cleared"]


def test_restarts_and_silent_storage_services_are_noted() -> None:
    silent, heard = (storage(), storage("s1", is_silent=True)), (storage(), storage("s1"))
    states = [status(storages=each) for each in (heard, silent, silent, heard)]
    states.append(status(partition(), storages=heard, service=service(b"b" * 16)))
    log = EventLog()
    for moment, (before, after) in enumerate(pairwise(states)):
        log.compare(before, after, float(moment))
    events = log.shown(10.0)
    assert [(event["kind"], event["name"], event["seconds"]) for event in events] == [
        ("silent", "s1", 10.0), ("heard", "s1", 8.0), ("restarted", "", 7.0),
    ]  # fmt: skip
    assert events[-1]["text"].endswith("it has 1 partition")


def test_what_was_taken_over_is_no_storage_service_of_its_name() -> None:
    there, adopted = storage("s0"), storage("s0", is_adopted=True, is_silent=True)
    log = EventLog()
    for moment in (0.0, 1.0):  # it would be silent and heard in turns
        log.compare(status(storages=(there, adopted)), status(storages=(there, adopted)), moment)
    log.compare(status(storages=(there,)), status(storages=(there, adopted)), 2.0)
    assert log.shown(3.0) == []


def test_partitions_that_come_and_go_do_not_push_out_what_happened_to_the_service() -> None:
    log = EventLog()
    log.note(0.0, "away", "the service is away")
    log.follow(update(is_reset=True), 0.0)
    for number in range(300):
        log.follow(update(partition(f"train@{number}", incarnation=number.to_bytes(16, "big"))), 1.0)
    events = log.shown(2.0)
    assert len(events) == 101
    assert [events[0]["kind"], events[-1]["name"]] == ["away", "train@299"]
    assert [event["number"] for event in events] == sorted(event["number"] for event in events)
