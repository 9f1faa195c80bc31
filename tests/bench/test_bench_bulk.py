"""`bulk --by clients` and `--by claims`: their data, and one short run of each."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks import bulk, bulk_by_claims, bulk_by_clients
from benchmarks.bulk_clients import Data
from benchmarks.harness import Options
from benchmarks.report import Report

BRIEFLY = Options(repeats=1, quick=True)


def columns(report: Report, how: str) -> dict[str, object]:
    (row,) = [row for row in report.rows if how in row]
    return dict(zip(report.columns, row, strict=True))


@pytest.mark.parametrize("row_bytes", [1 << 20, 32 << 10])
def test_dense_data_has_the_rows_that_it_says(row_bytes: int) -> None:
    tensor = Data(4 << 20, row_bytes).make(seed=1)
    assert (tensor.shape[0] * row_bytes, tensor.shape[1] * 4) == (4 << 20, row_bytes)


def test_jagged_data_has_the_rows_and_the_bytes_that_it_says() -> None:
    tensor = Data(4 << 20, None).make(seed=1)
    sizes = np.diff(tensor.offsets().numpy()) * 4
    assert (sizes.min() >= 2 << 10, sizes.max() <= 6 << 10, sizes.sum()) == (True, True, 4 << 20)
    assert len(set(sizes.tolist())) > 100


@pytest.mark.parametrize("text", ["0", "33", "1,,4", "many", ""])
def test_numbers_of_clients_are_checked(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected numbers from 1 to 32"):
        bulk._counts(text)
    assert bulk._counts("1,4,32") == (1, 4, 32)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_puts_and_gets_of_clients_go_over_the_bulk_port_and_in_frames() -> None:
    report = bulk_by_clients.measure(BRIEFLY, [2], ["4 MiB, rows of 2-6 KiB"])
    assert [row[1] for row in report.rows] == ["raw TCP", "bulk", "frames"]
    assert [note for note in report.notes if "bulk transfers, expected" in note] == []
    for how in ("bulk", "frames"):
        figures = columns(report, how)
        assert [name for name, figure in figures.items() if not figure] == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_claims_are_made_beside_clients() -> None:
    report = bulk_by_claims.measure(BRIEFLY, [1])
    assert [row[0] for row in report.rows] == [0] * 4 + [1] * 4
    for row in report.rows:
        figures = dict(zip(report.columns, row, strict=True))
        assert figures["claims/s"] > 0  # type: ignore[operator]
        assert bool(figures["puts and gets, GB/s"]) is bool(row[0])
