"""The whole demo, with all its processes, in a few steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tq_service.demo import run_demo


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Fail where a process of the demo outlives it; other tests may have some of their own."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert [process for process in psutil.Process().children(recursive=True) if process.pid not in before] == []


def test_training(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_HOST", "0.0.0.0")  # of another service, and refused without a door
    assert run_demo(steps=5, seconds=60.0, output=tmp_path, plain=True) == 0
    history = json.loads((tmp_path / "history.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in history["steps"]] == [0, 1, 2, 3, 4]
    assert {step["samples"] for step in history["steps"]} == {192}
    assert all(len(step["tokens"]) == 2 and step["imbalance"] < 0.2 for step in history["steps"])
    assert all(0 <= step["version_lag"] <= 2 for step in history["steps"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "too few to judge" in capsys.readouterr().out


def test_recorded_solutions(tmp_path: Path, solutions_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(input=solutions_file, output=tmp_path, plain=True) == 0
    replayed = json.loads((tmp_path / "history.json").read_text(encoding="utf-8"))["replayed"]
    assert (replayed["expected"], replayed["received"], replayed["whole_groups"]) == (36, 36, 12)
    assert "0 missing, 0 repeated, 0 with a wrong checksum" in capsys.readouterr().out


def test_recorded_trace(tmp_path: Path, trace_file: Path) -> None:
    assert run_demo(input=trace_file, speed=50.0, output=tmp_path, plain=True) == 0
    history = json.loads((tmp_path / "history.json").read_text(encoding="utf-8"))
    assert history["replayed"]["received"] == 40
    assert sum(step["samples"] for step in history["steps"]) == 40
    assert history["outcome"]["seconds"] > 9 / 50  # the last request came 9 s after the first, 50 times faster


def test_a_service_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], unused_address: str) -> None:
    assert run_demo(steps=1, output=tmp_path, address=unused_address) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_an_input_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(input=tmp_path / "absent.jsonl", output=tmp_path) == 1
    assert "absent.jsonl" in capsys.readouterr().err
