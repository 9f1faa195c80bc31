"""Recorded rollouts: what a file of them means, as groups of samples with the time of their arrival."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SYNTHETIC_VOCABULARY = 32_000
ANSWER_MARK = "A:"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """One response.

    Attributes:
        number: place in the file, from 0.
        prompt: `(prompt_tokens,)` int32.
        response: `(response_tokens,)` int32.
        reference: text that the reward is computed from, "" where there is none.
        recorded_reward: the reward in the file; NaN where there is none.
    """

    number: int
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    reference: str = ""
    recorded_reward: float = float("nan")

    @property
    def checksum(self) -> int:
        """CRC-32 of the tokens, by which a consumer proves that it got them bit for bit."""
        return checksum_of(self.prompt, self.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """Responses to one prompt, which arrive together.

    Attributes:
        name: unique in the file.
        arrival_seconds: after the first group of the file; 0 where the file has no times.
        samples: its members.
    """

    name: str
    arrival_seconds: float
    samples: tuple[RecordedSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What is known of a file before it is replayed.

    Attributes:
        path: the file.
        group_count: number of groups.
        group_size: samples in each group.
        has_text: whether tokens are bytes of text, with a reference to compute rewards from.
    """

    path: Path
    group_count: int
    group_size: int
    has_text: bool

    @property
    def sample_count(self) -> int:
        """Number of samples in all groups."""
        return self.group_count * self.group_size

    def groups(self) -> Iterator[RecordedGroup]:
        """Yield the groups in the order of the file."""
        source = _text_groups(self.path) if self.has_text else _trace_groups(self.path)
        for _, group in zip(range(self.group_count), source, strict=False):
            yield group


def open_recording(path: Path, limit: int | None = None) -> Recording:
    """Look at a file and return what it holds.

    Args:
        path: `.jsonl`: one problem a line, with `question`, `ground_truth`, and any number of models, each an object
            with `solution` and `is_correct`. `.csv`: one request a line, with `TIMESTAMP`, `ContextTokens` and
            `GeneratedTokens`.
        limit: take so many groups at most.

    Raises:
        ValueError: the file is neither, or is empty.
    """
    if path.suffix not in {".jsonl", ".csv"}:
        raise ValueError(
            f"got {path}; expected a .jsonl file of solutions or a .csv trace with TIMESTAMP, ContextTokens, "
            "GeneratedTokens"
        )
    has_text = path.suffix == ".jsonl"
    source = _text_groups(path) if has_text else _trace_groups(path)
    first = next(source, None)
    if first is None:
        raise ValueError(f"{path} holds no recorded rollouts; give a file with at least one")
    group_count = 1
    for group in source:
        if len(group.samples) != len(first.samples):
            raise ValueError(
                f"{path}: group {group.name} has {len(group.samples)} responses, the first has {len(first.samples)}; "
                "give every prompt the same number of responses"
            )
        group_count += 1
    return Recording(
        path=path,
        group_count=group_count if limit is None else min(limit, group_count),
        group_size=len(first.samples),
        has_text=has_text,
    )


def checksum_of(prompt: NDArray[np.int32], response: NDArray[np.int32]) -> int:
    """Return the CRC-32 of the bytes of prompt and response."""
    return zlib.crc32(response.tobytes(), zlib.crc32(prompt.tobytes()))


def text_reward(solution: str, ground_truth: str) -> float:
    r"""Return 1 where the last `A: ...` of both texts is the same answer, else 0.

    >>> text_reward("5 + 5 = 10\nA: 1,010", "A: 1010")
    1.0
    """
    answer = _final_answer(solution)
    return float(answer is not None and answer == _final_answer(ground_truth))


def _final_answer(text: str) -> str | None:
    _, mark, answer = text.rpartition(ANSWER_MARK)
    return answer.strip().replace(",", "") if mark else None


def _bytes_of(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def text_of(tokens: NDArray[np.int32]) -> str:
    """Return the text of byte-level tokens."""
    return tokens.astype(np.uint8).tobytes().decode()


def _text_groups(path: Path) -> Iterator[RecordedGroup]:
    number = 0
    with path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            question, ground_truth, solutions = _parse_problem(line, f"{path}, line {line_number}")
            samples = [
                RecordedSample(
                    number=number + i,
                    prompt=_bytes_of(question + "\n"),
                    response=_bytes_of(solution["solution"]),
                    reference=ground_truth,
                    recorded_reward=float(solution["is_correct"]),
                )
                for i, solution in enumerate(solutions)
            ]
            number += len(samples)
            yield RecordedGroup(name=f"q{line_number}", arrival_seconds=0.0, samples=tuple(samples))


def _parse_problem(line: str, where: str) -> tuple[str, str, list[dict[str, Any]]]:
    try:
        problem = json.loads(line)
        question, ground_truth = str(problem["question"]), str(problem["ground_truth"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: got {error!r}; expected an object with question and ground_truth") from error
    solutions = [value for value in problem.values() if isinstance(value, dict) and "solution" in value]
    if not solutions:
        raise ValueError(f"{where}: no model has a solution; expected at least one object with solution, is_correct")
    return question, ground_truth, solutions


def _trace_groups(path: Path) -> Iterator[RecordedGroup]:
    begun: datetime | None = None
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            try:
                arrival = datetime.fromisoformat(row["TIMESTAMP"])
                prompt_tokens, response_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, request {number}: got {error!r}; expected TIMESTAMP, ContextTokens, GeneratedTokens"
                ) from error
            begun = begun or arrival
            tokens = np.random.default_rng(number).integers(
                SYNTHETIC_VOCABULARY, size=prompt_tokens + response_tokens, dtype=np.int32
            )
            sample = RecordedSample(number=number, prompt=tokens[:prompt_tokens], response=tokens[prompt_tokens:])
            yield RecordedGroup(name=f"r{number}", arrival_seconds=(arrival - begun).total_seconds(), samples=(sample,))
