from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tq_service.demo.recorded import checksum_of, open_recording, text_of, text_reward


def test_solutions_become_groups(solutions_file: Path) -> None:
    recording = open_recording(solutions_file)
    assert (recording.group_count, recording.group_size, recording.sample_count) == (12, 3, 36)
    assert recording.has_text
    groups = list(recording.groups())
    assert len({group.name for group in groups}) == 12
    assert [sample.number for group in groups for sample in group.samples] == list(range(36))
    first = groups[0].samples[0]
    assert text_of(first.prompt) == "What is 0 + 1? ✓\n"
    assert text_of(first.response) == "\nA: 1"
    assert first.recorded_reward == 1.0


def test_rewards_of_text_agree_with_the_recorded_ones(solutions_file: Path) -> None:
    samples = [sample for group in open_recording(solutions_file).groups() for sample in group.samples]
    assert len({sample.recorded_reward for sample in samples}) > 1
    for sample in samples:
        assert text_reward(text_of(sample.response), sample.reference) == sample.recorded_reward


def test_trace_becomes_groups_of_one_with_arrival_times(trace_file: Path) -> None:
    recording = open_recording(trace_file)
    assert (recording.group_count, recording.group_size, recording.has_text) == (40, 1, False)
    groups = list(recording.groups())
    assert [group.arrival_seconds for group in groups[:6]] == [0, 0, 0, 0, 1, 1]
    sample = groups[1].samples[0]
    assert (sample.prompt.size, sample.response.size) == (87, 14)
    assert math.isnan(sample.recorded_reward)


def test_replays_of_a_file_are_equal(trace_file: Path) -> None:
    recording = open_recording(trace_file)
    first, second = ([g.samples[0].checksum for g in recording.groups()] for _ in range(2))
    assert first == second
    assert len(set(first)) == 40


def test_limit_takes_the_first_groups(solutions_file: Path) -> None:
    recording = open_recording(solutions_file, limit=5)
    assert recording.group_count == len(list(recording.groups())) == 5
    assert open_recording(solutions_file, limit=500).group_count == 12


def test_checksum_notices_a_changed_token() -> None:
    prompt, response = np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)
    changed = response.copy()
    changed[1] += 1
    assert checksum_of(prompt, response) != checksum_of(prompt, changed)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "expected a .jsonl"),
        ("a.jsonl", "", "holds no recorded rollouts"),
        ("a.jsonl", "{broken\n", "line 1"),
        ("a.jsonl", '{"question": "q", "ground_truth": "A: 1"}\n', "no model has a solution"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no recorded rollouts"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "GeneratedTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4\n", "request 0"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        open_recording(path)


def test_groups_of_different_sizes_are_refused(tmp_path: Path, solutions_file: Path) -> None:
    path = tmp_path / "uneven.jsonl"
    lonely = '{"question": "q", "ground_truth": "A: 1", "m": {"is_correct": true, "solution": "A: 1"}}\n'
    path.write_text(solutions_file.read_text(encoding="utf-8") + lonely, encoding="utf-8")
    with pytest.raises(ValueError, match="group q13 has 1 responses, the first has 3"):
        open_recording(path)


@pytest.mark.parametrize(
    ("solution", "truth", "reward"),
    [
        ("A: 18", "so\nA: 18", 1.0),
        ("A: 17\nA: 18", "A: 18", 1.0),
        ("A: 1,018", "A: 1018", 1.0),
        ("18", "A: 18", 0.0),
        ("A: 17", "A: 18", 0.0),
    ],
)
def test_text_reward(solution: str, truth: str, reward: float) -> None:
    assert text_reward(solution, truth) == reward


def test_real_solutions(data_file: Callable[[str], Path]) -> None:
    recording = open_recording(data_file("gsm8k_model_solutions.jsonl"))
    assert (recording.group_count, recording.group_size) == (1319, 4)
    samples = [sample for group in recording.groups() for sample in group.samples]
    rewards = [text_reward(text_of(sample.response), sample.reference) for sample in samples]
    assert rewards == [sample.recorded_reward for sample in samples]


def test_real_trace(data_file: Callable[[str], Path]) -> None:
    recording = open_recording(data_file("azure_llm_trace_conv.csv"), limit=500)
    arrivals = [group.arrival_seconds for group in recording.groups()]
    assert len(arrivals) == 500
    assert arrivals == sorted(arrivals)
    first = next(recording.groups()).samples[0]
    assert (first.prompt.size, first.response.size) == (374, 44)
