"""The result table of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from chaos.scenario import Report


def table_of(reports: Mapping[str, Report]) -> str:
    """Return one table with a column for each topology."""
    rows = [("", list(reports))]
    targets = sorted({target for each in reports.values() for target in each.faults})
    rows += [
        (f"faults: {target}", [f"{each.faults.get(target, 0):,}" for each in reports.values()]) for target in targets
    ]
    rows += [
        ("samples acknowledged", [f"{each.acknowledged_count:,}" for each in reports.values()]),
        ("samples read again and compared", [f"{each.read_count:,}" for each in reports.values()]),
        ("claims of ranks", [f"{each.claim_count:,}" for each in reports.values()]),
        ("claims repeated and compared", [f"{each.replayed_count:,}" for each in reports.values()]),
        (
            "seconds until it answers, median",
            [_figure(each.back_seconds, statistics.median) for each in reports.values()],
        ),
        ("seconds until it answers, maximum", [_figure(each.back_seconds, max) for each in reports.values()]),
        ("violations", [f"{len(each.violations):,}" for each in reports.values()]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join("  ".join([name.ljust(width), *(cell.rjust(10) for cell in cells)]) for name, cells in rows)


def _figure(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    return f"{of(values):.2f}" if values else "-"
