"""The picture of `tq-service plan`: tokens of each rank under each sampler, and how full packs are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tq_service.cli.plan_preview import Preview

_SHOWN_AS_BARS = ("sequential", "rank_aware", "seqlen_balanced")


def draw(previews: Sequence[Preview], path: Path) -> None:
    """Write the picture as PNG."""
    import matplotlib as mpl  # noqa: PLC0415  (slow to import, and needed for pictures only)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  (after the backend is chosen)

    figure, (ranks, packs) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    bars = [preview for preview in previews if preview.sampler in _SHOWN_AS_BARS]
    width = 0.8 / len(bars)
    for place, preview in enumerate(bars):
        at = np.arange(preview.rank_tokens.size) + (place - (len(bars) - 1) / 2) * width
        ranks.bar(at, preview.rank_tokens, width, label=preview.sampler)
    ranks.axhline(float(bars[0].rank_tokens.mean()), color="black", linewidth=0.8, linestyle="--", label="mean")
    ranks.set(title="Tokens of each rank", xlabel="dp_rank", ylabel="tokens")
    ranks.yaxis.set_major_formatter("{x:,.0f}")
    ranks.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)
    for preview in previews:
        if preview.pack_fills is not None:
            fills = np.sort(preview.pack_fills)[::-1]
            label = f"{preview.sampler}: {fills.size} packs, {fills.mean():.1%} full"
            packs.step(np.arange(fills.size), 100 * fills, where="post", label=label)
    packs.set(title="Fill of the packs of all ranks, fullest first", xlabel="pack", ylabel="% of pack_max_length")
    packs.set_ylim(0, 105)
    packs.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
