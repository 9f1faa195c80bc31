"""The live display: a table redrawn on a terminal, or a line every few steps elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
STEPS_PER_LINE = 10
STEPS_SHOWN = 8
NOTES_SHOWN = 12
Step = Mapping[str, Any]


class Progress(AbstractContextManager["Progress"], Protocol):
    """Shows the progress of a run."""

    def show(self, step: Step) -> None:
        """Show another step."""
        ...

    def note(self, text: str) -> None:
        """Show an event, with the number of seconds since the start of the run."""
        ...

    def set_state(self, text: str) -> None:
        """Show why the run is waiting before its first step. The text replaces the previous text."""
        ...


def make_progress(title: str, *, plain: bool, console: Console | None = None) -> Progress:
    """Return a display for the console: a table if the console is a terminal and `plain` is False, otherwise lines."""
    console = console or Console()
    return TableProgress(title, console) if console.is_terminal and not plain else LineProgress(title, console)


class LineProgress:
    """Prints a line for every tenth step, and a line for each note."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._begun = time.monotonic()
        self._state = ""

    def __enter__(self) -> LineProgress:
        self._print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, step: Step) -> None:
        """Print every tenth step."""
        if step["step"] % STEPS_PER_LINE == 0:
            self._print(line_of(step))

    def note(self, text: str) -> None:
        """Print the note."""
        self._print(_timed(self._begun, text))

    def set_state(self, text: str) -> None:
        """Print the state if it has changed."""
        if text != self._state:
            self._state = text
            self.note(text)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


class TableProgress:
    """Redraws a table of the last steps, the curves of reward and imbalance, and the last notes."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._begun = time.monotonic()
        self._state = ""
        self._rewards: list[float] = []
        self._imbalances: list[float] = []
        self._notes: deque[str] = deque(maxlen=NOTES_SHOWN)
        self._recent: deque[Step] = deque(maxlen=STEPS_SHOWN)
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._draw)

    def __enter__(self) -> TableProgress:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, step: Step) -> None:
        """Add the step to the table and the curves."""
        self._state = ""
        self._rewards.append(step["reward"])
        self._imbalances.append(step["imbalance"])
        self._recent.append(step)

    def note(self, text: str) -> None:
        """Add the note below the table."""
        self._notes.append(_timed(self._begun, text))

    def set_state(self, text: str) -> None:
        """Show the state below the notes."""
        self._state = text

    def _draw(self) -> Group:
        table = Table(title=self._title, title_justify="left")
        for column in ("step", "reward", "solved", "tokens per rank", "imbalance", "waiting", "samples/s", "lag"):
            table.add_column(column, justify="right")
        for step in list(self._recent):
            table.add_row(*cells_of(step))
        highest = max(self._imbalances, default=0.0)
        lines = [f"reward    {curve(self._rewards)}"] if self._rewards else []
        if highest:
            lines.append(f"imbalance {curve([each / highest for each in self._imbalances])} highest {highest:.1%}")
        lines += list(self._notes)
        if self._state:
            lines.append(_timed(self._begun, self._state))
        return Group(table, Text("\n".join(lines)))


def _timed(begun: float, text: str) -> str:
    return f"{time.monotonic() - begun:6.1f} s  {text}"


def cells_of(step: Step) -> tuple[str, ...]:
    """Return a step as the cells of a table row."""
    return (
        str(step["step"]),
        f"{step['reward']:.3f}",
        f"{step['solved']:.0%}",
        " ".join(f"{tokens:,}" for tokens in step["tokens"]),
        f"{step['imbalance']:.2%}",
        f"{step['waiting']:.0%}",
        f"{step['samples_per_second']:,.0f}",
        f"{step['version_lag']:.1f}",
    )


def line_of(step: Step) -> str:
    """Return a step as one line of text."""
    number, reward, solved, tokens, imbalance, waiting, speed, lag = cells_of(step)
    return (
        f"step {number:>4}  reward {reward}  solved {solved:>4}  tokens {tokens}  imbalance {imbalance}  "
        f"waiting {waiting:>4}  {speed} samples/s  lag {lag}"
    )


def curve(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Return values in [0, 1] as a line of block characters, at most `width` wide.

    >>> curve([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    return "".join(BARS[min(len(BARS) - 1, int(max(0.0, mean) * len(BARS)))] for mean in means)
