from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from compat.outcome import end_of, equal_batch_count, failed_calls, median_seconds, outage, prompts, training
from compat.plain_values import plain
from compat.trainer import faults


class Process:
    """A process that writes its calls, one each second."""

    def __init__(self, directory: Path, role: str, *, pid: int = 1, at: float = 0.0) -> None:
        self._path = directory / f"{role}.{pid}.msgpack"
        self._at = at

    def calls(self, name: str, given: Any = None, answer: Any = None, *, seconds: float = 0.5, error: str = "") -> None:
        self._at += 1
        end = {"error": error} if error else {"answer": plain(answer)}
        entry = {"call": name, "given": plain(given or {}), "at": self._at, "seconds": seconds, **end}
        with self._path.open("ab") as file:
            file.write(msgpack.packb(entry))

    def trains(self, *samples: tuple[str, int, int], token: int = 7, names: tuple[str, ...] = ()) -> None:
        columns = {
            "uid": NonTensorStack(*(uid for uid, _, _ in samples)),
            "index": NonTensorStack(*(number for _, number, _ in samples)),
            "session_id": NonTensorStack(*(session for _, _, session in samples)),
            "input_ids": torch.nested.as_nested_tensor([torch.tensor([token]) for _ in samples], layout=torch.jagged),
        }
        ordered = {name: columns[name] for name in names or columns}
        self.calls("train", answer=TensorDict(ordered, batch_size=[len(samples)]), seconds=0.0)

    def saves(self) -> None:
        self.calls("weights saved", seconds=0.0)

    def submits(self, **prompts: tuple[int, str]) -> None:
        info = NonTensorStack(*({"index": number, "fate": fate} for number, fate in prompts.values()))
        given = {"keys": list(prompts), "partition_id": "train"}
        fields = TensorDict({"extra_info": info}, batch_size=[len(prompts)])
        self.calls("kv_batch_put", {**given, "fields": fields})

    def lists(self, *keys: str) -> None:
        self.calls("kv_list", answer={"train": {key: {} for key in keys}})


def test_what_weights_have_not_seen_at_their_last_saving_is_not_trained(tmp_path: Path) -> None:
    first = Process(tmp_path, "rank-0")
    first.trains(("a", 0, 0), ("padx", 0, 0))
    first.saves()
    first.trains(("b", 1, 0))
    second = Process(tmp_path, "rank-0", pid=2, at=10)
    second.trains(("c", 1, 0))
    second.saves()

    found = training(tmp_path)

    assert (found.batch_count, found.lost_batch_count, found.byte_count) == (2, 1, 3 * 8)
    assert [(number, session) for number, session, _ in found.samples] == [(0, 0), (1, 0)]
    assert found.trained_twice == []


def test_a_sample_of_two_batches_is_trained_twice_and_another_answer_is_another_sample(tmp_path: Path) -> None:
    rank = Process(tmp_path, "rank-0")
    for token in (7, 7, 8):
        rank.trains(("a", 0, 2), token=token)
    rank.saves()

    assert [(number, session) for number, session, _ in training(tmp_path).trained_twice] == [(0, 2)]


@pytest.mark.parametrize(("token", "equal_count"), [(7, 2), (8, 1)])
def test_batches_are_compared_by_place_whatever_the_order_of_their_fields(
    tmp_path: Path, token: int, equal_count: int
) -> None:
    records = [tmp_path / "one", tmp_path / "other"]
    for record, names in zip(records, [(), ("input_ids", "session_id", "uid", "index")], strict=True):
        record.mkdir()
        rank = Process(record, "rank-0")
        rank.trains(("a", 0, 0), names=names)
        rank.trains(("b", 1, 0), token=token if names else 7)
        rank.saves()

    assert equal_batch_count(*map(training, records)) == equal_count


def test_a_prompt_is_lost_when_it_is_neither_trained_nor_waiting_nor_to_be_dropped(tmp_path: Path) -> None:
    trainer, rank = Process(tmp_path, "trainer"), Process(tmp_path, "rank-0")
    trainer.submits(a=(0, "good"), b=(1, "good"), c=(2, "late"))
    trainer.submits(d=(3, "good"), e=(4, "good"))
    trainer.lists("a", "b", "c", "d", "e")
    trainer.lists("b", "b_0_0")
    rank.trains(("a", 0, 0))
    rank.saves()
    rank.trains(("d", 3, 0))

    found = prompts(tmp_path, training(tmp_path))

    assert found.taken == {0, 1, 2, 3, 4}
    assert (found.trained, found.waiting, found.dropped) == ({0}, {1}, {2})
    assert found.lost == {3, 4}


def test_an_outage_is_met_by_the_calls_that_were_made_in_it_or_not_answered_before(tmp_path: Path) -> None:
    process = Process(tmp_path, "trainer")
    process.calls("kv_list", seconds=0.9)  # from 0.1 to 1
    process.calls("kv_list", seconds=0.9)
    process.calls("kv_clear", seconds=0.9, error="ConnectionError")
    process.calls("metrics", answer={"val/reward": 1.0}, seconds=0.0)
    process.calls("metrics", answer={"training/global_step": 1}, seconds=0.0)
    agent = Process(tmp_path, "agent")
    agent.calls("async_kv_put", seconds=0.2)
    agent.calls("async_kv_put", seconds=0.2)  # from 1.8 to 2

    before = outage(tmp_path, since=1.5, until=1.7)
    assert (before.met_count, before.answered_seconds, before.step_seconds) == (1, 0.5, 3.5)
    assert outage(tmp_path, since=1.5, until=2.2).met_count == 3
    assert failed_calls(tmp_path) == ["kv_clear: ConnectionError"]
    assert end_of("kv_clear", tmp_path, after=1.0) == 3.0


def test_times_are_of_calls_that_were_answered(tmp_path: Path) -> None:
    process = Process(tmp_path, "trainer")
    for name, seconds in (("kv_batch_put", 0.1), ("client.async_put", 0.3), ("kv_batch_get", 0.5), ("kv_list", 0.7)):
        process.calls(name, seconds=seconds)
    process.calls("kv_batch_get", seconds=9.0, error="ValueError")

    assert median_seconds(tmp_path) == {"put": (2, 0.2), "get": (1, 0.5), "poll": (1, 0.7)}


def test_a_fault_comes_once_and_leaves_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    (tmp_path / faults.SERVICE_PID_FILE).write_text("123")
    fault = faults.Fault(title="of the service", run="run1", role="agent", call="kv_list", number=2)

    faults.inject(fault, tmp_path)
    faults.inject(fault, tmp_path)

    assert killed == [(123, 9)]
    assert float((tmp_path / fault.file_name).read_text()) > 0
