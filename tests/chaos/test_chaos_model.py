"""The model of `make chaos` finds what it is there to find: each kind of broken promise, told in logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_service as tq
from chaos.actors import LEASE_SECONDS
from chaos.content import FIELDS, REWARD, TAGS, columns_of, key_of, rewards_of, wrong_fields
from chaos.events import EventLog, read_events
from chaos.leases import grade_violations, worker_violations
from chaos.model import Samples, claims_of, rank_violations


def recorded(directory: Path, actor: str, *events: dict[str, Any]) -> None:
    log = EventLog(directory / f"{actor}.jsonl")
    for event in events:
        log.write(**event)


PUT = {"what": "put", "keys": ["a", "b"], "is_held": False, "tag": 1}
DONE = {"what": "put_done", "keys": ["a", "b"], "indexes": [0, 1]}
CLEAR = {"what": "clear", "keys": ["b"]}
CLEARED = {"what": "clear_done", "keys": ["b"]}


def sample_violations(directory: Path, present: dict[str, int]) -> list[str]:
    samples = Samples.recorded(directory)
    return list(samples.violations(present, samples))


@pytest.mark.parametrize(
    ("events", "present", "found"),
    [
        ([PUT, DONE], {"a": 0, "b": 1}, []),
        ([PUT], {}, []),
        ([PUT], {"a": 0, "b": 1}, []),
        ([PUT, DONE], {"a": 0}, ["acknowledged sample b is lost"]),
        ([PUT, DONE], {"a": 0, "b": 2}, ["sample b had index 1 and has 2"]),
        ([PUT, DONE], {"a": 0, "b": 1, "c": 2}, ["sample c was never put"]),
        ([PUT, DONE], {"a": 0, "b": 0}, ["sample b had index 1 and has 0", "index 0 has two keys"]),
        ([PUT, DONE, CLEAR], {"a": 0}, []),
        ([PUT, DONE, CLEAR], {"a": 0, "b": 1}, []),
        ([PUT, DONE, CLEAR, CLEARED], {"a": 0}, []),
        ([PUT, DONE, CLEAR, CLEARED], {"a": 0, "b": 1}, ["cleared sample b is back"]),
    ],
)
def test_samples(tmp_path: Path, events: list[dict[str, Any]], present: dict[str, int], found: list[str]) -> None:
    recorded(tmp_path, "producer-0", *events)
    assert sample_violations(tmp_path, present) == found


def test_what_happens_while_it_is_looked_up_is_no_violation(tmp_path: Path) -> None:
    recorded(tmp_path, "producer-0", PUT, DONE)
    before = Samples.recorded(tmp_path)
    recorded(tmp_path, "producer-0", CLEAR, CLEARED, PUT | {"keys": ["c"]})
    assert list(before.violations({"a": 0, "c": 2}, Samples.recorded(tmp_path))) == []


TAG = {"what": "tag", "keys": ["a"], "tag": 3}
TAGGED = {"what": "tag_done", "keys": ["a"]}


@pytest.mark.parametrize(
    ("events", "tag", "is_found"),
    [
        ([], 1, False),
        ([], 3, True),
        ([], None, True),
        ([TAG], 1, False),
        ([TAG], 3, False),
        ([TAG], 6, True),
        ([TAG, TAGGED], 3, False),
        ([TAG, TAGGED], 1, True),
        ([TAG, TAGGED, TAG | {"tag": 6}], None, False),
        ([TAG, TAGGED, TAG | {"tag": 6}, TAGGED], 3, True),
    ],
)
def test_tags(tmp_path: Path, events: list[dict[str, Any]], tag: int | None, is_found: bool) -> None:
    """The tag is the one that was written last and acknowledged, or one that was asked for since; or there is none."""
    recorded(tmp_path, "producer-0", PUT, DONE, *events)
    samples = Samples.recorded(tmp_path)
    as_read = {} if tag in (None, 6) else {"tag": None if TAGS[tag] is tq.JSON_NULL else TAGS[tag]}
    found = list(samples.tag_violations({"a": as_read}, samples))
    assert [text[:20] for text in found] == ["sample a has the tag"] * is_found


def test_tags_that_come_and_go_while_they_are_looked_up_are_no_violation(tmp_path: Path) -> None:
    recorded(tmp_path, "producer-0", PUT, DONE)
    before = Samples.recorded(tmp_path)
    recorded(tmp_path, "producer-0", TAG, TAGGED, TAG | {"tag": 0}, TAGGED)
    later = Samples.recorded(tmp_path)
    for tag in (1, 3, 0):
        assert not list(before.tag_violations({"a": {"tag": None if tag == 3 else TAGS[tag]}}, later))
    assert list(before.tag_violations({"a": {"tag": TAGS[2]}}, later))
    assert list(later.tag_violations({"a": {"tag": TAGS[1]}}, later))


def claim(batch_index: int, *indexes: int, status: str = "batch", version: int = 0) -> dict[str, Any]:
    answer = {
        "indexes": indexes,
        "status": status,
        "keys": [key_of(0, 0, index) for index in indexes],
        "versions": [version] * len(indexes),
    }
    return {"what": "claim", "batch_index": batch_index, "claim": answer}


def test_held_samples_are_handed_to_nobody(tmp_path: Path) -> None:
    recorded(tmp_path, "producer-0", PUT | {"is_held": True}, DONE)
    recorded(tmp_path, "producer-1", PUT | {"keys": ["c"]}, DONE | {"keys": ["c"], "indexes": [2]})
    recorded(tmp_path, "rank-0", claim(0, 2), claim(1, status="end"))
    assert list(Samples.recorded(tmp_path).held_violations(tmp_path)) == []
    recorded(tmp_path, "rank-1", claim(0, 1))
    recorded(tmp_path, "worker-0", {"what": "leased", "indexes": [0, 2]})
    assert list(Samples.recorded(tmp_path).held_violations(tmp_path)) == [
        "held sample b was handed to rank-1",
        "held sample a was handed to worker-0",
    ]


def test_ranks(tmp_path: Path) -> None:
    recorded(tmp_path, "rank-0", claim(0, 1, 2), claim(1, status="end"))
    recorded(tmp_path, "rank-1", claim(0, 3), claim(1, status="end"))
    assert [(one.rank, one.batch_index) for one in claims_of(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(rank_violations(tmp_path, {1, 2, 3})) == []
    assert list(rank_violations(tmp_path, {1, 2, 3, 4})) == ["sample 4 was handed to no rank"]
    assert list(rank_violations(tmp_path, {1, 2})) == ["sample 3 was delivered but does not exist"]
    recorded(tmp_path, "rank-1", claim(2, 2), {"what": "read", "batch_index": 2, "wrong": ["k: blob"]})
    assert list(rank_violations(tmp_path, None)) == [
        "sample 2 was handed to 2 batches",
        "rank-1 read wrong bytes: k: blob",
    ]
    recorded(tmp_path, "rank-1", {"what": "changed", "batch_index": 0, "before": 1, "after": 2}, claim(3, status="end"))
    assert list(rank_violations(tmp_path, {1, 2, 3}))[2:] == [
        "rank-1: batch 0 changed from 1 to 2",
        "the ranks saw the end at batches {1: 2, 3: 1}",
    ]


def test_callers_by_name_get_each_sample_twice(tmp_path: Path) -> None:
    def found(live: set[int] | None) -> list[str]:
        return list(rank_violations(tmp_path, live, kind="named", uses=2))

    recorded(tmp_path, "named-0", claim(0, 1, 2), claim(1, 1), claim(2, status="end"))
    recorded(tmp_path, "named-1", claim(0, 2), claim(1, status="end"))
    assert found({1, 2}) == []
    assert found({1, 2, 3}) == ["sample 3 was handed to no named"]
    recorded(tmp_path, "named-2", claim(0, 2), claim(1, 3))
    assert found(None) == ["sample 2 was handed to 3 batches"]
    assert found({1, 2, 3})[1:] == ["sample 3 was handed to 1 batches only"]


def test_custom_meta_of_a_claim_is_what_was_put(tmp_path: Path) -> None:
    recorded(tmp_path, "rank-3", claim(0, 1, version=7))
    assert list(rank_violations(tmp_path, None)) == ["sample p0-0-1 was handed to rank 3 with version 7"]


ASK, END = {"what": "ask"}, {"what": "end"}
LEASED, RELEASE, ACK, ACK_DONE, ACK_LATE = (
    {"what": what, "indexes": [5], "grade": None} for what in ("leased", "release", "ack", "ack_done", "ack_late")
)


def told_at(directory: Path, actor: str, *events: tuple[float, dict[str, Any]]) -> None:
    """What an actor was told, at these seconds."""
    recorded(directory, actor, *(event | {"at": at} for at, event in events))


NEXT = LEASE_SECONDS + 2


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([(0, ASK), (1, LEASED), (2, ACK), (2, ACK_DONE), (3, END)], [], []),
        ([(0, ASK), (1, LEASED), (2, ACK)], [], []),
        ([(0, ASK), (1, LEASED)], [], ["sample 5 was acknowledged by no worker"]),
        ([(0, ASK), (1, LEASED), (2, ACK), (2, ACK_LATE)], [], ["sample 5 was acknowledged by no worker"]),
        ([(0, ASK), (1, LEASED)], [(2, ASK), (NEXT, LEASED), (NEXT, ACK), (NEXT, ACK_DONE)], []),
        ([(0, ASK), (1, LEASED), (1, RELEASE)], [(0, ASK), (2, LEASED), (2, ACK), (2, ACK_DONE)], []),
        (
            [(0, ASK), (1, LEASED)],
            [(0, ASK), (2, LEASED), (2, ACK), (2, ACK_DONE)],
            ["sample 5 was leased to worker-1 within the lease of worker-0"],
        ),
        (
            [(0, ASK), (1, LEASED), (1, ACK), (1, ACK_DONE)],
            [(2, ASK), (NEXT, LEASED)],
            ["sample 5 was leased to worker-1 after worker-0, which acknowledged it"],
        ),
        (
            [(0, ASK), (1, LEASED), (1, ACK), (1, ACK_DONE)],
            [(0, ASK), (NEXT, LEASED), (NEXT, ACK), (NEXT, ACK_DONE)],
            ["sample 5 was acknowledged by worker-0 and by worker-1"],
        ),
        (
            [(0, ASK), (1, LEASED), (2, ACK), (2, ACK_DONE)],
            [(0, ASK), (1, END)],
            ["worker-1 got the end before sample 5 was acknowledged"],
        ),
    ],
)
def test_workers(
    tmp_path: Path, one: list[tuple[float, Any]], other: list[tuple[float, Any]], found: list[str]
) -> None:
    told_at(tmp_path, "worker-0", *one)
    told_at(tmp_path, "worker-1", *other)
    assert list(worker_violations(tmp_path, {5})) == found


GRADED = ACK | {"grade": 7}


@pytest.mark.parametrize(
    ("one", "other", "possible"),
    [
        ([(1, LEASED), (2, GRADED), (2, ACK_DONE)], [], {7}),
        ([(1, LEASED), (2, GRADED)], [], {7, None}),
        ([(1, LEASED), (2, GRADED), (2, ACK_LATE)], [], {None}),
        ([(1, LEASED), (2, ACK), (2, ACK_DONE)], [], {None}),
        ([(1, LEASED), (2, GRADED), (NEXT, ACK_LATE)], [(NEXT, LEASED), (NEXT, ACK), (NEXT, ACK_DONE)], {None}),
        ([(1, LEASED), (2, GRADED)], [(NEXT, LEASED), (NEXT, GRADED | {"grade": 8}), (NEXT, ACK_DONE)], {8}),
        ([], [], {None}),
    ],
)
def test_grades_are_of_the_worker_whose_acknowledgement_counts(
    tmp_path: Path, one: list[tuple[float, Any]], other: list[tuple[float, Any]], possible: set[int | None]
) -> None:
    told_at(tmp_path, "worker-0", *one)
    told_at(tmp_path, "worker-1", *other)
    for grade in (7, 8, None):
        found = [] if grade in possible else [f"sample 5 has the grade {grade}, expected one of {possible}"]
        assert list(grade_violations(tmp_path, {5: grade})) == found


def test_what_workers_never_saw_and_what_they_read_wrongly(tmp_path: Path) -> None:
    recorded(tmp_path, "worker-0", {"what": "read", "wrong": ["k: text"]})
    assert list(worker_violations(tmp_path, {6})) == [
        "worker-0 read wrong bytes: k: text",
        "sample 6 was acknowledged by no worker",
    ]


def test_content_is_told_from_other_content() -> None:
    keys = [f"p0-{serial}-0" for serial in range(40)]
    good = columns_of(keys) | {REWARD: rewards_of(keys)}
    assert wrong_fields(keys, good) == []
    assert wrong_fields(keys[1:], {REWARD: good[REWARD]})
    for name in FIELDS:
        other = [*good[name][:7], good[name][8], *good[name][8:]]
        assert wrong_fields(keys, {name: other}) == [f"p0-7-0: {name}"]
    flipped = np.array(good["ids"][3])
    flipped[0] ^= 1
    assert wrong_fields(keys, {"ids": [*good["ids"][:3], flipped, *good["ids"][4:]]}) == ["p0-3-0: ids"]
    assert max(len(blob) for blob in good["blob"]) > 64 << 10


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, "producer-0", PUT)
    with (tmp_path / "producer-0.jsonl").open("a") as file:
        file.write('{"what": "pu')
    assert [event["what"] for event in read_events(tmp_path / "producer-0.jsonl")] == ["put"]
