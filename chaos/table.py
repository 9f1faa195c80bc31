"""The table of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from chaos.act import Findings


def table_of(findings: Mapping[str, Findings]) -> str:
    """Return one table with a column for each topology."""
    rows = [("", list(findings))]
    targets = sorted({target for each in findings.values() for target in each.strikes})
    rows += [
        (f"strikes: {target}", [f"{each.strikes.get(target, 0):,}" for each in findings.values()]) for target in targets
    ]
    rows += [
        ("samples acknowledged", [f"{each.acknowledged_count:,}" for each in findings.values()]),
        ("samples read again and compared", [f"{each.read_count:,}" for each in findings.values()]),
        ("claims of ranks", [f"{each.claim_count:,}" for each in findings.values()]),
        ("claims asked again and compared", [f"{each.replayed_count:,}" for each in findings.values()]),
        (
            "seconds until it answers, median",
            [_figure(each.back_seconds, statistics.median) for each in findings.values()],
        ),
        ("seconds until it answers, most", [_figure(each.back_seconds, max) for each in findings.values()]),
        ("violations", [f"{len(each.violations):,}" for each in findings.values()]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join("  ".join([name.ljust(width), *(cell.rjust(10) for cell in cells)]) for name, cells in rows)


def _figure(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    return f"{of(values):.2f}" if values else "-"
