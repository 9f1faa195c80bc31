from __future__ import annotations

import pytest

from benchmarks.__main__ import BENCHMARKS, OF_BULK
from benchmarks.bulk import BY
from benchmarks.harness import ROOT

DIRECTORY = ROOT / "benchmarks"


def test_every_benchmark_is_run_with_the_others() -> None:
    written = {
        path.stem for path in DIRECTORY.glob("*.py") if "def run(options: Options) -> Report:" in path.read_text()
    }
    assert written == {"bulk" if name.startswith(OF_BULK) else name for name in BENCHMARKS}
    assert len(BENCHMARKS) == len(set(BENCHMARKS)) == len(written) - 1 + len(BY)
    assert {OF_BULK + by for by in BY} <= set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_in_the_table_of_the_readme(name: str) -> None:
    name = "bulk" if name.startswith(OF_BULK) else name
    assert f"| `{name}.py` |" in (DIRECTORY / "README.md").read_text()
