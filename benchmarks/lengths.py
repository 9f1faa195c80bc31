"""Token counts for balancing: drawn from a distribution, and from a recorded trace."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT

Int64s = NDArray[np.int64]

_TRACE = "azure_llm_trace_conv.csv"
_LONGEST = 32_768


def lognormal_lengths(count: int, *, seed: int = 0) -> Int64s:
    """Return lengths `(count,)` of lognormal(7.5, 1.0), capped at 32,768."""
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.0, count)
    return np.minimum(drawn, _LONGEST).astype(np.int64)


def trace_lengths() -> Int64s | None:
    """Return context plus generated tokens `(19_366,)` of the requests of a production service.

    The file, azure_llm_trace_conv.csv of the Azure Public Dataset 2023, is searched for in `TQ_BENCH_DATA` and
    `../shared/data`. Returns None if it is missing.
    """
    path = Path(os.environ.get("TQ_BENCH_DATA", ROOT.parent / "shared" / "data")) / _TRACE
    if not path.exists():
        return None
    with path.open(newline="") as lines:
        rows = csv.DictReader(lines)
        return np.array([int(row["ContextTokens"]) + int(row["GeneratedTokens"]) for row in rows], np.int64)
