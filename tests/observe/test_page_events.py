"""What is noted of partitions and services from one status to the next."""

from itertools import pairwise

from page_statuses import partition, service, status, storage

from tq_service.observe.page.trends import EventLog
from tq_service.results import PartitionDescription

MADE, OTHER = partition("train@0", 4), partition("train@0", 6, incarnation=b"o" * 16)
SEALED = partition("train@0", 8, sealed=True)


def noted(*states: PartitionDescription | None) -> list[tuple[str, str]]:
    """Return kind and text of what states of a partition are noted as, None where there is none."""
    log = EventLog()
    statuses = [status(*filter(None, [state])) for state in states]
    for moment, (before, after) in enumerate(pairwise(statuses)):
        log.compare(before, after, float(moment))
    events = log.shown(100.0)
    assert {event["name"] for event in events} <= {"train@0"}
    return [(event["kind"], event["text"]) for event in events]


def test_a_partition_is_made_sealed_and_cleared_once_however_often_it_is_seen() -> None:
    assert noted(None, MADE, MADE, SEALED, SEALED, None, None) == [
        ("made", "created"), ("sealed", "sealed (8 samples)"), ("cleared", "cleared (8 samples)"),
    ]  # fmt: skip


def test_a_partition_that_was_sealed_or_made_again_between_two_states() -> None:
    assert [kind for kind, _ in noted(None, SEALED)] == ["made", "sealed"]
    assert [kind for kind, _ in noted(None, MADE, OTHER)] == ["made", "cleared", "made"]


def test_what_is_there_in_the_beginning_has_not_happened() -> None:
    assert noted(MADE) == noted(SEALED, SEALED) == []


def test_restarts_and_silent_storage_services_are_noted() -> None:
    silent, heard = (storage(), storage("s1", is_silent=True)), (storage(), storage("s1"))
    states = [status(storages=each) for each in (heard, silent, silent, heard)]
    states.append(status(partition(), storages=heard, service=service(b"b" * 16)))
    log = EventLog()
    for moment, (before, after) in enumerate(pairwise(states)):
        log.compare(before, after, float(moment))
    events = log.shown(10.0)
    assert [(event["kind"], event["name"], event["seconds"]) for event in events] == [
        ("silent", "s1", 10.0), ("heard", "s1", 8.0), ("restarted", "", 7.0), ("made", "train@0", 7.0),
    ]  # fmt: skip
    assert events[-2]["text"].endswith("with 1 partition")


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
    made = [partition(f"train@{number}", incarnation=number.to_bytes(16, "big")) for number in range(300)]
    log.compare(status(), status(*made), 1.0)
    events = log.shown(2.0)
    assert len(events) == 101
    assert [events[0]["kind"], events[-1]["name"]] == ["away", "train@299"]
    assert [event["number"] for event in events] == sorted(event["number"] for event in events)
