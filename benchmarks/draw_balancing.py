"""Draws the figures of docs/balancing.md: `python -m benchmarks.draw_balancing`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT
from benchmarks.lengths import lognormal_lengths
from benchmarks.packing import CAP, METHODS, RANKS
from tq_service.balancing import get_seqlen_balanced_partitions, karmarkar_karp

Int64s = NDArray[np.int64]

_DIRECTORY = ROOT / "docs" / "images"
_RANKS, _SAMPLES = 64, 1_024
_PACKED_SAMPLES = 640


def draw_ranks(path: Path) -> None:
    """Draw the tokens of each rank before balancing, after differencing, and after the refinement."""
    lengths = lognormal_lengths(_SAMPLES, seed=1)
    parts: dict[str, Sequence[Any]] = {
        "in blocks of neighbours": np.array_split(np.arange(_SAMPLES), _RANKS),
        "Karmarkar-Karp": karmarkar_karp(lengths, _RANKS, True),
        "refined": get_seqlen_balanced_partitions(lengths, _RANKS, True),
    }
    figure, all_axes = _figure(len(parts))
    for axes, (name, of_ranks) in zip(all_axes, parts.items(), strict=True):
        totals = np.array([lengths[part].sum() for part in of_ranks])
        axes.bar(np.arange(_RANKS), totals, width=0.9)
        axes.axhline(totals.mean(), color="black", linewidth=0.8, linestyle="--")
        axes.set(title=f"{name}\nheaviest {totals.max() / totals.mean() - 1:.2%} above the mean", xlabel="dp_rank")
        axes.yaxis.set_major_formatter("{x:,.0f}")
    all_axes[0].set_ylabel("tokens")
    figure.savefig(path, dpi=110)


def draw_packs(path: Path) -> None:
    """Draw the fill of every pack, one row per rank, separated by step."""
    lengths = np.minimum(lognormal_lengths(_PACKED_SAMPLES, seed=3), CAP)
    names = ("next fit", "plan_packs", "plan_packs, uneven steps")
    figure, all_axes = _figure(len(names))
    for axes, name in zip(all_axes, names, strict=True):
        packs = METHODS[name](lengths)
        fills = np.array([[lengths[pack].sum() / CAP for step in steps for pack in step] for steps in packs])
        image = axes.imshow(fills, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        for end in np.cumsum([len(step) for step in packs[0]])[:-1]:
            axes.axvline(end - 0.5, color="white", linewidth=3)
        axes.set(title=f"{name}\n{fills.size} packs, {fills.mean():.1%} full", xlabel="packs, by step", xticks=[])
        axes.set_yticks(range(RANKS))
    all_axes[0].set_ylabel("dp_rank")
    figure.colorbar(image, ax=all_axes, label="fill of a pack", format="{x:.0%}")
    figure.savefig(path, dpi=110)


def _figure(count: int) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(1, count, figsize=(11, 3.6), layout="constrained", sharey=True)


if __name__ == "__main__":
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    draw_ranks(_DIRECTORY / "balancing_ranks.png")
    draw_packs(_DIRECTORY / "balancing_packs.png")
