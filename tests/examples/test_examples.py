"""The examples run as programs and print what they say; the code of docs/concepts runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tq_service as tq
from tq_service.testing import ServiceProcess

EXAMPLES = Path(__file__).parents[2] / "examples"

EXPECTED = {
    "custom_sampler.py": ["batch 0: versions [3, 3]", "batch 1: versions [2, 2]", "batch 2: versions [1, 1]"],
    "follow_tags.py": [
        "trained on 200 of 2000 prompts; followed tags equal listed ones: True",
        "samples received: 22",  # each once, and once more where it changed
    ],
    "leased_worker.py": ["a worker crashed: invalid literal", "scored 9 of 10; dead-lettered: [9]"],
    "resume_everything.py": [" are trained again, by 1 rank", "each of 48 prompts was trained exactly once"],
    "train_loop.py": [],
    "train_with_packs.py": ["32 optimizer steps; loss per token went from ", " of their tokens are padding"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServiceProcess]:
    with ServiceProcess(env={"PYTHONPATH": str(EXAMPLES)}) as process:  # where it imports the custom sampler from
        yield process


def test_every_example_is_tested() -> None:
    of_their_own = {"async_grpo.py"}  # have tests of their own
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED) | of_their_own


@pytest.mark.timeout(300)  # resume_everything starts ten processes that import torch
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name == "resume_everything.py")) for name in EXPECTED],
)
def test_the_example_runs(server: ServiceProcess, name: str) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "TQ_ADDRESS": server.address},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    for line in EXPECTED[name]:
        assert line in run.stdout
    with tq.Client(server.address) as client:  # each clears up behind itself
        assert client.list_partitions() == []


def test_the_code_of_the_concepts_runs(server: ServiceProcess) -> None:
    """Blocks of a page marked `python` are parts of one program; those marked `py` have names of their readers."""
    pages = sorted((EXAMPLES.parent / "docs" / "concepts").glob("*.md"))
    with tq.Client(server.address) as client:
        client.put("train@0", {"text": [f"answer {number}" for number in range(32)]})
        for path in pages:
            page, name = path.read_text(), f"docs/concepts/{path.name}"
            for part in re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
                compile(part, name, "exec")
            names = {
                "tq": tq, "client": client,
                "score": lambda batch: torch.tensor([len(text) for text in batch["text"]]),
            }  # fmt: skip
            for program in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
                exec(compile(program, name, "exec"), names)
        status = client.check_consumption(partition_id="train@0", task_name="reward")
        assert (status.consumed_count, status.leased_count) == (32, 0)
        (admission,) = client.describe_partition("train").admissions
        assert (admission.most, admission.unit, admission.given_back) == (64, "group", "published")
        for summary in client.list_partitions():
            client.clear_partition(summary.partition_id)


def test_the_code_of_the_page_on_asynchronous_rl_runs(server: ServiceProcess) -> None:
    page = (EXAMPLES.parent / "docs" / "asynchronous_rl.md").read_text()
    programs = re.findall(r"(?<!<!-- not run -->\n)^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with tq.Client(server.address) as client:
        client.put("train", {"x": torch.arange(44)}, custom_meta={"start_version": torch.arange(44)})
        client.put("jobs", {"x": torch.arange(2)})
        asks = {"partition_id": "train", "task_name": "update_actor", "data_fields": ["x"], "batch_size": 1}
        for index in range(43):
            client.get_meta(**asks, batch_index=index, dp_rank=0, dp_size=1)
        for program in programs:
            exec(compile(program, "docs/asynchronous_rl.md", "exec"), {"tq": tq, "client": client})
        (task,) = client.describe_partition("train").tasks
        assert (task.trained_batch_count, task.planned_batch_count, task.epoch) == (42, 42, 1)
        assert client.get_version() == 42
        status = client.check_consumption("jobs", "reward")
        assert (status.consumed_count, status.leased_count) == (2, 0)
        for summary in client.list_partitions():
            client.clear_partition(summary.partition_id)
        client.remove_policy()


def test_the_code_of_the_page_on_resuming_runs(server: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLES.parent / "docs" / "resuming.md").read_text()
    with tq.Client(server.address) as client:
        names = {"tq": tq, "client": client}
        for program in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
            exec(compile(program, "docs/resuming.md", "exec"), names)
        assert capsys.readouterr().out == "4 1 4\n"
        assert names["batch"].global_indexes == [16, 17, 18, 19]  # type: ignore[attr-defined]
        found = client.describe_partition("train")
        assert (found.released_count, found.summary.present_count) == (16, 8)
        client.clear_partition("train")
        client.remove_policy()


def test_the_code_of_the_tutorial_on_agents_runs(server: ServiceProcess) -> None:
    page = (EXAMPLES.parent / "docs" / "agents.md").read_text()
    with tq.Client(server.address) as client:
        names: dict[str, Any] = {"tq": tq, "client": client}
        for program in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
            exec(compile(program, "docs/agents.md", "exec"), names)
        tokens = {
            group: row.tolist() for group, row in zip(names["batch"].groups, names["data"]["tokens"], strict=True)
        }
        assert tokens["p0"] == [21, 91, 92, 22, 2]
        (prompts,) = client.describe_partition("prompts").tasks
        assert (prompts.consumed_count, prompts.leased_count) == (4, 0)
        for summary in client.list_partitions():
            client.clear_partition(summary.partition_id)
        client.remove_policy()
