from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED_DATA = Path(os.environ.get("TQ_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture
def data_file() -> Callable[[str], Path]:
    """Return the path of a file of real data, or skip the test where there is none."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.exists():
            pytest.skip(f"{path} is absent; set TQ_TEST_DATA to the folder that has {name}")
        return path

    return find


@pytest.fixture
def solutions_file(tmp_path: Path) -> Path:
    """Twelve problems with three solutions each, of very different lengths, some right and some wrong."""
    path = tmp_path / "solutions.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for i in range(12):
            answers = {"right": i + 1, "wrong": i, "none": None}
            problem: dict[str, object] = {"question": f"What is {i} + 1? ✓", "ground_truth": f"Add.\nA: {i + 1}"}
            for model, answer in answers.items():
                solution = "So " * (i * 5) + ("I do not know" if answer is None else f"\nA: {answer}")
                problem[model] = {"is_correct": answer == i + 1, "solution": solution}
            lines.write(json.dumps(problem) + "\n")
    return path


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Forty requests of a trace, in bursts of four."""
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{i // 4:02d}.6805900,{50 + 37 * i % 400},{1 + 13 * i % 90}" for i in range(40)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def unused_address() -> str:
    """An address of this host where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
