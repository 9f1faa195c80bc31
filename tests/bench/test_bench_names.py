from __future__ import annotations

import pytest

from benchmarks import bulk, gpu
from benchmarks.__main__ import BENCHMARKS, BY_OPTION
from benchmarks.harness import ROOT, Options

DIRECTORY = ROOT / "benchmarks"


def file_of(name: str) -> str:
    by = BY_OPTION.fullmatch(name)
    return name if by is None else by[1]


def test_every_benchmark_is_run_with_the_others() -> None:
    written = {
        path.stem for path in DIRECTORY.glob("*.py") if "def run(options: Options) -> Report:" in path.read_text()
    }
    assert written == set(map(file_of, BENCHMARKS))
    assert len(BENCHMARKS) == len(set(BENCHMARKS)) == len(written) - 2 + len(bulk.BY) + len(gpu.BY)
    assert {f"bulk_by_{by}" for by in bulk.BY} | {f"gpu_by_{by}" for by in gpu.BY} <= set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_in_the_table_of_the_readme(name: str) -> None:
    assert f"| `{file_of(name)}.py` |" in (DIRECTORY / "README.md").read_text()


@pytest.mark.parametrize("by", gpu.BY)
def test_without_a_gpu_nothing_is_measured_and_the_report_says_why(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    report = gpu.measure(Options(quick=True), by)
    assert (report.rows, [aim.met for aim in report.aims]) == ([], [None])
    assert report.notes == ["nothing was measured: torch sees no CUDA device on this machine"]
    assert by in report.to_text()
