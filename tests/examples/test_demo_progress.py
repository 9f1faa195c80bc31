from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo.batch_notes import Redelivered
from examples.demo.fault import Outage
from examples.demo.history import outcome_of, write_history
from examples.demo.plots import plot_history, smoothed
from examples.demo.progress import LineProgress, TableProgress, curve, make_progress
from examples.demo.result import judge
from examples.demo.settings import DemoSettings
from examples.demo.step_stats import imbalance_of, timed


def _steps(count: int, rise: float) -> list[dict[str, Any]]:
    return [
        {
            "step": i,
            "elapsed_seconds": float(i + 1),
            "reward": rise * i / count,
            "solved": 0.5,
            "samples": 192,
            "tokens": [1000 + i, 1000],
            "imbalance": 0.01,
            "waiting": 0.2,
            "samples_per_second": 192.0,
            "version_lag": 1.5,
            "lost": 0,
            "twice": 0,
        }
        for i in range(count)
    ]


def test_imbalance_is_the_heaviest_rank_over_the_mean() -> None:
    assert imbalance_of([100, 100]) == 0.0
    assert imbalance_of([150, 50]) == pytest.approx(0.5)
    assert imbalance_of([0, 0]) == 0.0


def test_timed_gives_every_item() -> None:
    assert [item for item, waited in timed("abc") if waited >= 0.0] == ["a", "b", "c"]


def test_a_clear_rise_is_good() -> None:
    outcome = outcome_of(_steps(100, rise=0.8))
    assert (outcome.steps, outcome.samples) == (100, 19200)
    assert outcome.reward_at_end > outcome.reward_at_start + 0.7
    result = judge(outcome, _steps(100, rise=0.8), None)
    assert result.is_good
    assert "0.036 in the first tenth of the steps, 0.756 in the last" in result.text
    assert "0 samples lost, 0 trained on twice" in result.text


def test_no_rise_is_an_error_with_both_rewards() -> None:
    result = judge(outcome_of(_steps(100, rise=0.05)), _steps(100, rise=0.05), None)
    assert not result.is_good
    assert "error: reward 0.002 in the first tenth" in result.text


def test_a_few_steps_are_not_judged() -> None:
    result = judge(outcome_of(_steps(5, rise=0.05)), _steps(5, rise=0.05), None)
    assert result.is_good
    assert "too few to judge" in result.text


def test_what_the_service_gets_wrong_is_an_error_whatever_the_reward() -> None:
    steps = _steps(100, rise=0.8)
    steps[50]["lost"], steps[60]["twice"] = 3, 2
    redelivered = Redelivered(count=3, equal_count=2, size_bytes=100)
    outage = Outage(step=50, service_seconds=1.0, rank_seconds=2.0, resumed_seconds=3.0, redelivered=redelivered)
    result = judge(outcome_of(steps), steps, outage)
    assert not result.is_good
    for problem in (
        "3 samples were lost",
        "2 samples were trained on twice",
        "1 micro-batches of the killed rank differ",
    ):
        assert f"error: {problem}" in result.text
    assert "did not resume" in judge(outcome_of(steps), steps, Outage(step=50)).text


def test_balanced_and_unbalanced_steps_are_told_apart() -> None:
    steps = _steps(100, rise=0.8)
    for step in steps[:20]:
        step["imbalance"] = 0.05
    outcome = outcome_of(steps, 20)
    assert (outcome.imbalance, outcome.unbalanced_imbalance) == (pytest.approx(0.01), pytest.approx(0.05))
    assert (
        "imbalance 1.00% with batches balanced by tokens, 5.00% in the first steps" in judge(outcome, steps, None).text
    )


def test_no_step_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="--seconds"):
        outcome_of([])


def test_lines_come_every_few_steps() -> None:
    out = io.StringIO()
    with LineProgress("title", Console(file=out, width=40)) as progress:
        for step in _steps(21, rise=1.0):
            progress.show(step)
    lines = out.getvalue().splitlines()
    assert lines[0] == "title"
    assert [line[:9] for line in lines[1:]] == ["step    0", "step   10", "step   20"]
    assert "imbalance 1.00%" in lines[1]


def test_lines_have_notes_at_once_and_a_state_when_it_changes() -> None:
    out = io.StringIO()
    with LineProgress("title", Console(file=out, width=40)) as progress:
        progress.note("one")
        for state in ("two", "two", "three"):
            progress.set_state(state)
    assert [line.split(" s  ")[1] for line in out.getvalue().splitlines()[1:]] == ["one", "two", "three"]


def test_table_shows_the_last_steps_and_the_curve() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    with make_progress("title", plain=False, console=console) as progress:
        assert isinstance(progress, TableProgress)
        progress.note("a note")
        progress.set_state("the state")
        for step in _steps(20, rise=1.0):
            progress.show(step)
    assert "tokens per rank" in out.getvalue()
    assert "a note" in out.getvalue()
    assert "▁" in out.getvalue()


def test_plain_and_pipes_get_lines() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_progress("t", plain=True, console=terminal), LineProgress)
    assert isinstance(make_progress("t", plain=False, console=Console(file=io.StringIO())), LineProgress)


def test_curve_has_a_width() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(curve([0.1] * 1000)) == 60
    assert curve([]) == ""


def test_smoothing_keeps_the_length() -> None:
    assert smoothed([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert smoothed([0.0, 3.0, 0.0], width=3) == [1.5, 1.0, 1.5]


def test_history_and_plot_are_written(tmp_path: Path) -> None:
    steps = _steps(12, rise=0.8)
    settings = DemoSettings(address="localhost:1", output=str(tmp_path))
    write_history(tmp_path / "history.json", settings, steps, outcome_of(steps))
    history = json.loads((tmp_path / "history.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in history["steps"]] == list(range(12))
    assert history["outcome"]["samples"] == 12 * 192
    plot_history(tmp_path / "curves.png", "title", steps, 3, Outage(step=6))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = DemoSettings(address="localhost:1", output="out", steps=3, seed=7)
    settings.save(tmp_path / "settings.json")
    assert DemoSettings.load(tmp_path / "settings.json") == settings


@pytest.mark.parametrize("bad", [{"prompts_per_step": 6}, {"steps": 0}, {"seconds": 0.0}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DemoSettings(address="", output="", **bad)
