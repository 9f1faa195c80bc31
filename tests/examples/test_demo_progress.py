from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo.history import outcome_of, write_history
from examples.demo.plots import plot_history, smoothed
from examples.demo.progress import LineProgress, TableProgress, curve, make_progress
from examples.demo.settings import DemoSettings
from examples.demo.step_stats import imbalance_of, timed
from examples.demo.training_result import judge_training


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
    result = judge_training(outcome)
    assert result.is_good
    assert "0.036 at the start, 0.756 at the end" in result.text


def test_no_rise_is_an_error_with_both_rewards() -> None:
    result = judge_training(outcome_of(_steps(100, rise=0.05)))
    assert not result.is_good
    assert result.text.startswith("error: reward 0.002 at the start")


def test_a_few_steps_are_not_judged() -> None:
    result = judge_training(outcome_of(_steps(5, rise=0.05)))
    assert result.is_good
    assert "too few to judge" in result.text


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


def test_table_shows_the_last_steps_and_the_curve() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    with make_progress("title", plain=False, console=console) as progress:
        assert isinstance(progress, TableProgress)
        for step in _steps(20, rise=1.0):
            progress.show(step)
    assert "tokens per rank" in out.getvalue()
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
    plot_history(tmp_path / "curves.png", "title", steps)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = DemoSettings(address="localhost:1", output="out", steps=3, seed=7)
    settings.save(tmp_path / "settings.json")
    assert DemoSettings.load(tmp_path / "settings.json") == settings


@pytest.mark.parametrize("bad", [{"prompts_per_step": 6}, {"steps": 0}, {"seconds": 0.0}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DemoSettings(address="", output="", **bad)
