"""The curves of a run as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

SMOOTHED_OVER_STEPS = 9


def plot_history(path: Path, title: str, steps: Sequence[Mapping[str, Any]]) -> None:
    """Draw reward, tokens by rank, imbalance and waiting, and speed over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((reward, tokens), (shares, speed)) = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    figure.suptitle(title)
    numbers = [step["step"] for step in steps]

    def draw(axes: Any, values: Sequence[float], label: str) -> None:
        (line,) = axes.plot(numbers, smoothed(values), label=label)
        axes.plot(numbers, values, color=line.get_color(), alpha=0.25, linewidth=0.8)

    draw(reward, [step["reward"] for step in steps], "mean reward")
    draw(reward, [step["solved"] for step in steps], "share with reward 1")
    reward.set(title="Reward", ylim=(0, 1.02))
    for rank in range(len(steps[0]["tokens"])):
        draw(tokens, [step["tokens"][rank] for step in steps], f"rank {rank}")
    tokens.set(title="Tokens of a step, by rank", ylim=(0, None))
    draw(shares, [100 * step["imbalance"] for step in steps], "imbalance: heaviest rank over the mean")
    draw(shares, [100 * step["waiting"] for step in steps], "ranks' time spent waiting for data")
    shares.set(title="Balance and waiting, %", xlabel="step", ylim=(0, None))
    draw(speed, [step["samples_per_second"] for step in steps], "samples/s")
    speed.set(title="Samples per second", xlabel="step", ylim=(0, None))
    lag = speed.twinx()
    lag.plot(numbers, [step["version_lag"] for step in steps], color="tab:red", linewidth=0.8, label="version lag")
    lag.set(ylim=(0, 3), ylabel="version lag")
    for axes in (reward, tokens, shares, speed):
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smoothed(values: Sequence[float], width: int = SMOOTHED_OVER_STEPS) -> list[float]:
    """Return the mean of each value and its neighbours, `width` together."""
    half = width // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
