"""The curves of a run as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.demo.fault import Outage

SMOOTHED_OVER_STEPS = 9
RANK_STYLES = ("-", "--", "-.", ":")


def plot_history(
    path: Path,
    title: str,
    steps: Sequence[Mapping[str, Any]],
    unbalanced_steps: int = 0,
    outage: Outage | None = None,
) -> None:
    """Draw reward, tokens by rank, imbalance and waiting, and speed over the steps.

    Args:
        path: path of the PNG.
        title: title of the figure.
        steps: steps of the run.
        unbalanced_steps: number of steps at the start that were not balanced. These steps are shaded.
        outage: the outage. Its step is marked.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(15, 8), sharex=True, layout="constrained")
    (reward, tokens, imbalance), (waiting, speed, lag) = panels
    figure.suptitle(title)
    numbers = [step["step"] for step in steps]

    def draw(axes: Any, values: Sequence[float], label: str, **style: Any) -> None:
        (line,) = axes.plot(numbers, smoothed(values), label=label, **style)
        axes.plot(numbers, values, color=line.get_color(), alpha=0.25, linewidth=0.8)

    draw(reward, [step["reward"] for step in steps], "mean reward")
    draw(reward, [step["solved"] for step in steps], "share with reward 1")
    reward.set(title="Reward", ylim=(0, 1.02))
    means = [fmean(step["tokens"]) for step in steps]
    for rank in range(len(steps[0]["tokens"])):  # relative to the mean: lines of balanced ranks would overlap
        shares = [100 * step["tokens"][rank] / max(1, mean) for step, mean in zip(steps, means, strict=True)]
        draw(tokens, shares, f"rank {rank}", linestyle=RANK_STYLES[rank % len(RANK_STYLES)])
    tokens.set(title="Tokens of each rank, % of the mean")
    draw(imbalance, [100 * step["imbalance"] for step in steps], "most loaded rank over the mean")
    imbalance.set(title="Imbalance, %", ylim=(0, None))
    draw(waiting, [100 * step["waiting"] for step in steps], "ranks' time spent waiting for data")
    waiting.set(title="Waiting, %", xlabel="step", ylim=(0, 100))
    draw(speed, [step["samples_per_second"] for step in steps], "samples trained on")
    speed.set(title="Samples per second", xlabel="step", ylim=(0, None))
    draw(lag, [step["version_lag"] for step in steps], "versions between sampling and learning")
    lag.set(title="Version lag", xlabel="step", ylim=(0, 3))
    marks: dict[str, Any] = {}
    for axes in panels.flat:
        marks = _marked(axes, unbalanced_steps, outage)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    if marks:
        figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _marked(axes: Any, unbalanced_steps: int, outage: Outage | None) -> dict[str, Any]:
    """Mark the first steps and the outage, and return the marks by legend text."""
    marks = {}
    if unbalanced_steps:
        span = axes.axvspan(-0.5, unbalanced_steps - 0.5, color="tab:gray", alpha=0.15)
        marks["first steps: batches not balanced by tokens"] = span
    if outage is not None:
        killed = "the service and a rank" if outage.service_seconds is not None else "a rank"
        marks[f"{killed} killed in this step, which was repeated"] = axes.axvline(outage.step, color="black", ls=":")
    return marks


def smoothed(values: Sequence[float], width: int = SMOOTHED_OVER_STEPS) -> list[float]:
    """Return a moving average over `width` values."""
    half = width // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
