"""The whole demo, with all its processes, in a few steps."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from examples.demo.__main__ import run_demo
from tq_service.testing import ServiceProcess


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Fail where a process of the demo outlives it; other tests may have some of their own."""
    with ServiceProcess():  # so that the server that forks it is there
        pass
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert [process for process in psutil.Process().children(recursive=True) if process.pid not in before] == []


STEPS = 14
"""So many that on a busy machine the demo finds rank 1 in the middle of one of the second half."""


@pytest.mark.timeout(300)  # on a busy machine: torch is imported six times, by several processes at once
def test_training(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TLS_CA", "/there/is/no/such")  # of another service
    monkeypatch.setenv("TQ_TOKEN", "tq_elsewhere")
    assert run_demo(steps=STEPS, seconds=600.0, output=tmp_path, plain=True) == 0
    history = json.loads((tmp_path / "history.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in history["steps"]] == list(range(STEPS))
    assert {step["samples"] for step in history["steps"]} == {192}
    assert all(len(step["tokens"]) == 2 and step["imbalance"] < 0.5 for step in history["steps"])
    assert all(step["lost"] == step["twice"] == 0 for step in history["steps"])
    assert all(0 <= step["version_lag"] <= 2 for step in history["steps"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    outage = history["outage"]
    assert STEPS // 2 - 1 <= outage["step"] < STEPS  # the first one that rank 1 is found in the middle of
    assert outage["sample_count"] >= 192
    assert outage["service_seconds"] < outage["rank_seconds"] < outage["resumed_seconds"]
    assert outage["redelivered"]["count"] == outage["redelivered"]["equal_count"] > 0
    shown = capsys.readouterr().out
    assert "killed the service and trainer rank 1 in the middle of step" in shown
    assert "0 samples lost, 0 trained on twice" in shown
    assert "too few to judge" in shown


def test_a_service_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        unused_address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert run_demo(steps=1, output=tmp_path, address=unused_address) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_token_goes_to_a_running_service_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQ_TLS_CA", "/there/is/no/such")
    with ServiceProcess() as service:
        assert run_demo(steps=1, output=tmp_path, address=service.address) == 1
    assert "could not read /there/is/no/such" in capsys.readouterr().err
