"""Heat maps of a sweep over tau_on × tau_off: its Parquet's rows in, a matplotlib Figure out."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

SHARE = 0.01  # what counts as near the optimum


@dataclass(frozen=True)
class ThresholdGrid:
    """One task and policy: tokens/s, and its ratio to the best static tree, by -tau_off (rows) and tau_on (columns).

    Rows are negated thresholds, so that thresholds grow upwards in a figure. A pair that was skipped (tau_off >
    tau_on) is NaN. Rows of the sweep that differ in something else too (depth, experiment, …) share a cell, which then
    holds the best of them.
    """

    task: str
    policy: str
    title: str
    speed: pd.DataFrame
    over_star: pd.DataFrame

    @property
    def optimum(self) -> tuple[float, float]:
        """(tau_on, tau_off) of the fastest pair; of several equally fast ones the first in the order of the grid."""
        row, column = np.unravel_index(np.nanargmax(self.speed.to_numpy()), self.speed.shape)
        return float(self.speed.columns[column]), float(-self.speed.index[row])

    def near(self, share: float = SHARE) -> pd.DataFrame:
        """Which pairs are at most `share` slower than the optimum: where the choice hardly matters."""
        return self.speed >= (1 - share) * np.nanmax(self.speed.to_numpy())


def threshold_grids(rows: pd.DataFrame) -> Iterator[ThresholdGrid]:
    """A grid for each task and policy of a sweep's rows.parquet that has thresholds and a finished pair."""
    rows = rows.dropna(subset=["tau_on", "tau_off"])
    for (task, policy), own in rows.groupby(["task", "policy"], sort=False):
        own = own.assign(tau_off=-own["tau_off"])
        cells = {"index": "tau_off", "columns": "tau_on", "aggfunc": "max", "dropna": False}
        speed, over_star = (own.pivot_table(values=key, **cells) for key in ("tokens_per_s", "over_star"))
        if speed.notna().any(axis=None):
            title = f"{task}, {policy} ({own['engine'].iloc[0]}, {own['split'].iloc[0]} split)"
            yield ThresholdGrid(str(task), str(policy), title, speed, over_star)


def heat_map(grid: ThresholdGrid) -> Figure:
    """Tokens/s of every pair. Solid frame: the optimum; dashed: pairs within 1% of it; blank: skipped pairs."""
    speed, near = grid.speed, grid.near().to_numpy()
    notes = [[f"{v:.1f}\n{r:.3f}×" if v == v else "" for v, r in zip(*pair, strict=True)]
             for pair in zip(speed.to_numpy(), grid.over_star.to_numpy(), strict=True)]  # fmt: skip
    fig = Figure(figsize=(2.6 + 0.95 * speed.shape[1], 1.6 + 0.7 * speed.shape[0]), layout="constrained")
    ax, bar = fig.subplots(), {"label": "tokens/s (× the best static tree)"}
    sns.heatmap(speed, ax=ax, annot=np.array(notes), fmt="", cmap="Blues", linewidths=1, cbar_kws=bar)
    best = int(np.nanargmax(speed.to_numpy()))
    for row, column in np.argwhere(near):
        optimum = row * speed.shape[1] + column == best
        style = {"lw": 2.5} if optimum else {"lw": 1.2, "ls": "--"}
        inset = 0.0 if optimum else 0.04  # neighbours' frames stay apart
        size = 1 - 2 * inset
        ax.add_patch(Rectangle((column + inset, row + inset), size, size, fill=False, ec="black", clip_on=False,
                               **style))  # fmt: skip
    ax.set_xticklabels([f"{tau:.4g}" for tau in speed.columns], rotation=0)
    ax.set_yticklabels([f"{-tau:.4g}" for tau in speed.index], rotation=0)
    ax.set(xlabel="tau_on (one tree up above it)", ylabel="tau_off (one tree down at or below it)", title=grid.title)
    return fig
