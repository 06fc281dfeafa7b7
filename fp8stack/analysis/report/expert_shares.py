"""The tokens of each expert of a mixture, in the last sample of a run: a map and findings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm

from fp8stack.analysis.report.drawing import Picture, new_figure, style
from fp8stack.analysis.report.formatting import Finding
from fp8stack.analysis.report.heatmaps import DEAD, color_bar, map_height
from fp8stack.analysis.report.read import Figures, RunRecord
from fp8stack.common.tables import counted

RANGE = 8.0  # the colours reach from 1/8 of the mean to 8 times the mean


def relative_loads(run: RunRecord) -> tuple[list[str], Figures]:
    """The layers, and the tokens of each expert over the mean of its layer: [layers, experts], NaN
    where a layer has fewer experts."""
    most = max((len(shares) for _, shares in run.expert_shares.values()), default=0)
    loads = np.full((len(run.expert_shares), most), np.nan)
    for row, (_, shares) in zip(loads, run.expert_shares.values(), strict=True):
        row[: len(shares)] = np.array(shares) * len(shares)
    return list(run.expert_shares), loads


def expert_map(run: RunRecord, name: str) -> Picture | None:
    """The load of experts by layer. None for a model without experts."""
    layers, loads = relative_loads(run)
    if not loads.size:
        return None
    last = max(step for step, _ in run.expert_shares.values())
    with style():
        figure = new_figure(10, map_height(len(layers)))
        axes = figure.subplots()
        cmap = colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0), under=DEAD)
        drawn = np.where(loads == 0, 1e-9, np.clip(loads, 1 / RANGE, RANGE))
        axes.grid(False)
        image = axes.imshow(
            np.ma.masked_invalid(drawn), cmap=cmap, norm=LogNorm(1 / RANGE, RANGE), aspect="auto",
            interpolation="none",
        )  # fmt: skip
        every = -(-len(layers) // 40)
        axes.set_yticks(range(0, len(layers), every), layers[::every], fontsize=7)
        axes.set_xlabel("expert")
        bar = color_bar(figure, image, axes, label="tokens / mean")
        bar.set_ticks([1 / RANGE, 0.5, 1, 2, RANGE], labels=["1/8", "1/2", "1", "2", "8"])
        bar.ax.minorticks_off()
        return Picture(
            figure=figure,
            name=name,
            title="Tokens by expert",
            caption=f"Tokens of each expert at step {last}, over the mean of its layer. Red: none.",
            alt=f"Heat map of the tokens of {loads.shape[1]} experts in {len(layers)} layers at "
            f"step {last}.",
            wide=True,
        )


def expert_findings(run: RunRecord) -> Iterator[Finding]:
    """Findings on experts that got no token in the last sample."""
    layers, loads = relative_loads(run)
    idle = {layer: int((row == 0).sum()) for layer, row in zip(layers, loads, strict=True)}
    if total := sum(idle.values()):
        worst = max(idle, key=lambda layer: idle[layer])
        count, step = int(np.isfinite(loads).sum()), run.expert_shares[worst][0]
        yield Finding(
            "warning" if total > count / 4 else "note",
            f"{counted(total, 'expert')} of {count} got no token at step {step}, {idle[worst]} of "
            f"them in {worst}. A larger balance or bias in [experts] spreads the tokens.",
        )
