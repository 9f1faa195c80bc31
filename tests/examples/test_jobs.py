"""Each job of examples/jobs runs with a service of its own, prints its result, and is as short as the pages say."""

from __future__ import annotations

import re
import runpy
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "examples" / "jobs"
PRINTED = {
    "put.py": r"samples \[0, 1, 2, 3, 4, 5, 6, 7\] in 2 groups\n",
    "reward_worker.py": r"rewards \[1\.0, 0\.0, 0\.0\]\n",
    "add_reward.py": r"2 of 2 samples have a response and a reward\n",
    "balanced_batch.py": r"rank 0: groups \[[^]]*\], 200 tokens\nrank 1: groups \[[^]]*\], 200 tokens\n",
    "loader.py": r"samples \[0, 1, 2, 3\], 10 tokens\nsamples \[4, 5, 6, 7\], 26 tokens\n",
    "keys.py": r"\['5', '4'\], tags \{'a': \{'score': 1\}, 'b': \{'score': 0\}\}\n",
    "resume.py": r"trained \[0, 1, 2, 3, 4, 5, 6, 7\]\n",
    "async_rl.py": r"10 batches, samples at most [01] versions late; 40 samples cleared\n",
    "watch.py": r"\{'a': \{'score': 1\}, 'b': \{'score': 0\}\}\n",
}
MOST_LINES = {  # half of the lines that the job took before there were calls for it; a job of two lines stays
    "put.py": 3, "reward_worker.py": 2, "add_reward.py": 1, "balanced_batch.py": 6, "loader.py": 6, "keys.py": 3,
    "resume.py": 2, "async_rl.py": 7, "watch.py": 3,
}  # fmt: skip


def lines_of_job(name: str) -> int:
    """Return the number of lines between a comment `# Job` and the next empty line, or the end."""
    lines = (JOBS / name).read_text().splitlines()
    begins = [at for at, line in enumerate(lines, 1) if line.lstrip().startswith("# Job")]
    assert begins, name
    return sum(len(list(takewhile(str.strip, lines[at:]))) for at in begins)


def test_every_job_is_tested() -> None:
    assert {path.name for path in JOBS.iterdir() if path.suffix} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_the_job_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: torch, which some import, takes seconds to import."""
    runpy.run_path(str(JOBS / name), run_name="__main__")
    assert re.fullmatch(PRINTED[name], capsys.readouterr().out)


def test_jobs_are_as_short_as_the_pages_say() -> None:
    lines = {name: lines_of_job(name) for name in PRINTED}
    assert {name: count for name, count in lines.items() if count > MOST_LINES[name]} == {}
    for page, place in (("README.md", "examples/jobs/"), ("docs/index.md", "../examples/jobs/")):
        rows = re.findall(
            rf"^\| .+ \| (\d+) \| \[(\w+\.py)\]\({place}\2\) \|$", (ROOT / page).read_text(), re.MULTILINE
        )
        assert {name: int(count) for count, name in rows} == lines, page


def test_jobs_fit_a_screen() -> None:
    assert [name for name in PRINTED if len((JOBS / name).read_text().splitlines()) > 30] == []
