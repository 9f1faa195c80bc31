"""The result of a benchmark: a table with its aims and plots, as text, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Cell = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A target for a figure.

    Attributes:
        what: the figure, with its unit.
        measured: the measured value; None if it could not be measured.
        wanted: the target value.
        at_least: whether more is better; False: `wanted` is the maximum.
    """

    what: str
    measured: float | None
    wanted: float
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the figure meets the target; None if it could not be measured."""
        if self.measured is None:
            return None
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines or bars.

    Attributes:
        name: file name without its suffix.
        title: title of the plot.
        x_label: label of the x axis; with bars "".
        y_label: label of the y axis.
        series: for each label its points `(x, y)`; with bars x is text.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic; not for bars.
        bars: whether to draw bars instead of lines.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[Any, float]]]
    log_x: bool = False
    log_y: bool = False
    bars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one benchmark.

    Attributes:
        name: name of the benchmark, which is its module's.
        question: the question that it answers.
        columns: headings of the table, with units.
        rows: the table.
        notes: how it was measured, as far as a reader needs it.
        aims: targets for its figures.
        plots: plots of the table.
        without: peers that were unavailable.
    """

    name: str
    question: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    aims: Sequence[Aim] = ()
    plots: Sequence[Plot] = ()
    without: Sequence[str] = ()

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Parse the result of `to_json`."""
        fields = json.loads(text)
        fields["aims"] = [Aim(**aim) for aim in fields["aims"]]
        fields["plots"] = [Plot(**plot) for plot in fields["plots"]]
        return cls(**fields)

    def to_text(self) -> str:
        """Return the report as a table for a terminal."""
        cells = [list(self.columns), *([format_cell(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = [self.question, ""]
        for row in cells:
            first, *others = (
                cell.ljust(width) if not i else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join([first, *others]).rstrip())
        lines += ["", *(f"- {note}" for note in self.notes), *(f"- {aim_text(aim)}" for aim in self.aims)]
        return "\n".join(lines)

    def to_markdown(self, plot_directory: str) -> str:
        """Return the report as a section; its plots are linked as `<plot_directory>/<name>.png`."""
        lines = [f"## {self.name}", "", self.question, "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---" + "|--:" * (len(self.columns) - 1) + "|")
        lines += ["| " + " | ".join(map(format_cell, row)) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes), *(f"- {aim_text(aim)}" for aim in self.aims)]
        lines += [line for plot in self.plots for line in ("", f"![{plot.title}]({plot_directory}/{plot.name}.png)")]
        return "\n".join([*lines, ""])


def aim_text(aim: Aim) -> str:
    """Return one line about an aim."""
    bound = "at least" if aim.at_least else "at most"
    wanted = f"{bound} {format_cell(aim.wanted)} wanted"
    if aim.met is None:
        return f"{aim.what}: {wanted}: not measured"
    return f"{aim.what}: {format_cell(aim.measured)}, {wanted}: {'met' if aim.met else '**missed**'}"


def format_cell(cell: Cell) -> str:
    """Return a cell as text: three significant digits, thousands with commas."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.3g}"
