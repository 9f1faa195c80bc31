"""Ranks of torch.distributed, and replicas of a rank of which one asks for all, in four processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from service_rows import fill

PROGRAM = Path(__file__).parent / "replicas_program.py"
COUNT = 42


@pytest.fixture(scope="module")
def answers(address: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("replicas") / "store"
    programs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), address, "replicas", str(rank), str(store)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)},
            text=True,
        )
        for rank in range(4)
    ]
    fill(address, "replicas", COUNT)
    try:
        texts = [program.communicate(timeout=100)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert [program.returncode for program in programs] == [0] * 4
    return [json.loads(text) for text in texts]


def test_replicas_of_a_rank_get_the_same_and_ranks_share_all(answers: list[dict[str, Any]]) -> None:
    given = [answer["given"] for answer in answers]
    assert given[0] == given[1]
    assert given[2] == given[3]
    assert sorted(index for rank in (0, 2) for part in given[rank] for index in part) == list(range(COUNT))
    assert len(given[0]) == len(given[2]) > 2


def test_only_the_first_replica_asks(answers: list[dict[str, Any]]) -> None:
    assert [answer["claimed"] > 0 for answer in answers] == [True, False, True, False]


def test_a_reset_and_a_saved_state_give_the_same_to_all_replicas(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["again"] == answer["given"]
        assert answer["resumed"] == answer["given"]
        assert answer["state"]["micro_batch_index"] == 2
    assert all(answer["state"] == answers[0]["state"] for answer in answers)


def test_replicas_that_ask_themselves_get_the_same_too(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["alone"] == answer["given"]


def test_replicas_are_sent_batches_from_device_to_device(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["on_device"] == answer["given"]
        assert answer["uploads"] == 0  # the first one gets its batches there


def test_an_error_of_the_first_replica_is_raised_by_all(answers: list[dict[str, Any]]) -> None:
    assert [answer["failed"] for answer in answers] == [
        f"the service is away for good; noted {notes}" for notes in (0, 1, 0, 1)
    ]


def test_the_ranks_of_a_mesh_of_two_dimensions_are_counted_row_by_row(answers: list[dict[str, Any]]) -> None:
    assert [answer["flattened"] for answer in answers] == [[rank, 4] for rank in range(4)]


def test_what_is_no_rank_or_replica_group_is_refused(answers: list[dict[str, Any]]) -> None:
    both, flat = answers[0]["refused"]
    assert both == "dp_group: got a group as well as dp_rank or dp_size; expected only one of the two"
    assert flat.startswith("replica_group has 2 dimensions, ('dp', 'tp'); pass a one-dimensional mesh, or a process")


def test_all_processes_are_ranks_unless_something_else_is_said(answers: list[dict[str, Any]]) -> None:
    assert [answer["by_default"] for answer in answers] == [[[rank, 4], [0, 2]] for rank in range(4)]
    for message in answers[0]["unclear"]:
        assert message.startswith("dp_group: got none, but a replica or context-parallel group; expected the group")
