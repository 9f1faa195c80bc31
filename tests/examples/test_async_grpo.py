"""Asynchronous GRPO of two policies, in a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import tq_service as tq
from examples.async_grpo import BOUNDS, GLOBAL_BATCH, GROUP_SIZE, Run, histogram, main
from tq_service.testing import ServiceProcess

STEPS = 7


def test_both_policies_stay_within_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServiceProcess() as service:
        monkeypatch.setenv("TQ_ADDRESS", service.address)
        runs = main(["--steps", str(STEPS), "--output", str(tmp_path / "staleness.png")])
        with tq.Client() as client:  # it clears up behind itself
            assert client.list_partitions() == []
            assert client.status().policies == ()
    assert [(run.name, run.max_staleness) for run in runs] == list(BOUNDS.items())
    for run in runs:
        assert [len(values) for values in run.staleness] == [GLOBAL_BATCH * GROUP_SIZE] * STEPS
        assert all(0 <= value <= run.max_staleness for values in run.staleness for value in values)
        assert any(value > 0 for values in run.staleness for value in values)  # rollouts and training overlap
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "policy eager: reward " in shown
    assert "policy patient: reward " in shown


def test_the_histogram_counts_responses_by_versions_late() -> None:
    run = Run(name="p", max_staleness=2, steps=2, staleness=[[0, 0], [1, 0]], rewards=[0.25, 0.5])
    assert histogram(run).splitlines() == [
        "policy p: reward 0.25 to 0.50, 4 responses trained",
        "  0 versions late      3 " + "#" * 45,
        "  1 versions late      1 " + "#" * 15,
        "  2 versions late      0",
        "  at most 1 late, bound 2",
    ]
