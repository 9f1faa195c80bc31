"""Draws the plots of reports as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Plot

_SIZE_INCHES = (7.0, 4.2)
# For four entries three columns would leave one alone in the last row.
_LEGEND_COLUMNS = {2: 2, 4: 2}


def draw(plot: Plot, directory: Path) -> Path:
    """Write a plot to `<directory>/<name>.png` and return the path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=_SIZE_INCHES, layout="constrained")
    if plot.bars:
        _draw_bars(plot, axes)
    else:
        for label, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        if plot.log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in plot.series.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        if plot.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.set_title(plot.title)
    axes.grid(alpha=0.3)
    if len(plot.series) > 1:
        figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS.get(len(plot.series), 3), frameon=False)
    path = directory / f"{plot.name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_bars(plot: Plot, axes: Any) -> None:
    """Draw horizontal bars; bars with the same x are next to each other."""
    names = list(dict.fromkeys(x for points in plot.series.values() for x, _ in points))
    height = 0.8 / len(plot.series)
    for position, (label, points) in enumerate(plot.series.items()):
        at = [names.index(x) + position * height for x, _ in points]
        axes.barh(at, [y for _, y in points], height=height * 0.9, label=label)
    middle = (len(plot.series) - 1) * height / 2
    axes.set_yticks([index + middle for index in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(plot.y_label)
