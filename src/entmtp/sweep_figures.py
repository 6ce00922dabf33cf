"""Figures of a sweep: tokens/s over (tau_on, tau_off), the optimum, and the region that is as good to within 1%."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entmtp.io import atomic

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

NEAR = 0.99  # share of the optimum from which a pair of thresholds counts as good as it
ANNOTATED = 120  # cells of a heat map that still carry their numbers
AXES = {"xlabel": "tau_on (one tree up above it)", "ylabel": "tau_off (one tree down at or below it)"}
BAR = "tokens/s (× the best static tree)"
STAR = {"marker": "*", "color": "crimson", "markeredgecolor": "white", "linestyle": "none"}


# rows that differ in one of these are not compared: replayed and live speeds, or two splits, are different quantities
APART = ("task", "policy", "experiment", "engine", "split")


def apart(frame: "pd.DataFrame") -> list[str]:
    return [key for key in APART if key in frame]


def over_best(frame: "pd.DataFrame") -> "pd.Series":
    """Each row's tokens/s over the best of its task, policy, experiment, engine and split; NaN where it was skipped."""
    return frame["tokens_per_s"] / frame.groupby(apart(frame), dropna=False)["tokens_per_s"].transform("max")


@dataclass(frozen=True)
class ThresholdGrid:
    """Rows of one task, policy, experiment, engine and split that have both thresholds.

    `speed` (tokens/s) and `over_star` (its ratio to the best static tree) are tables by -tau_off (rows) and tau_on
    (columns): rows are negated, so that thresholds grow upwards in a figure. A pair that was skipped (tau_off > tau_on)
    or not tried is NaN. Rows that differ in something else too (the depth) share a cell, which then holds the fastest.
    """

    task: str
    policy: str
    rows: "pd.DataFrame"
    label: str  # task, policy, and whatever else tells it from the sweep's other grids

    @property
    def title(self) -> str:
        return f"{self.label} ({self.rows['engine'].iloc[0]}, {self.rows['split'].iloc[0]} split)"

    def _table(self, key: str) -> "pd.DataFrame":
        fastest = self.rows.sort_values("tokens_per_s", na_position="first").drop_duplicates(
            ["tau_on", "tau_off"], keep="last"
        )
        rows = fastest.assign(tau_off=-fastest["tau_off"])
        return rows.pivot_table(values=key, index="tau_off", columns="tau_on", aggfunc="max", dropna=False)

    @cached_property
    def speed(self) -> "pd.DataFrame":
        return self._table("tokens_per_s")

    @cached_property
    def over_star(self) -> "pd.DataFrame":
        return self._table("over_star")

    @property
    def best(self) -> "pd.Series":
        """The fastest row."""
        return self.rows.loc[self.rows["tokens_per_s"].idxmax()]

    def near(self, share: float = NEAR) -> "pd.DataFrame":
        """Which pairs reach this share of the optimum: where the choice hardly matters."""
        return self.speed >= share * self.best["tokens_per_s"]

    @property
    def full(self) -> bool:
        """Whether at least half of the combinations of thresholds were tried (skipped ones were tried too)."""
        return 2 * len(self.rows[["tau_on", "tau_off"]].drop_duplicates()) >= self.speed.size


def threshold_grids(frame: "pd.DataFrame") -> Iterator[ThresholdGrid]:
    """For each task, policy, experiment, engine and split of a sweep's rows that has thresholds and a pair that ran."""
    rows = frame.dropna(subset=["tau_on", "tau_off"])
    several = [key for key in apart(rows)[2:] if rows[key].nunique(dropna=False) > 1]
    for (task, policy, *_), group in rows.groupby(apart(rows), sort=False, dropna=False):
        if group["tokens_per_s"].notna().any():
            more = [str(group[key].iloc[0]) for key in several]
            yield ThresholdGrid(task, policy, group, ", ".join([task, policy, *more]))


def describe_optima(frame: "pd.DataFrame") -> list[str]:
    """One line a task and policy: the best thresholds, and how many pairs are as good to within 1%."""
    lines = []
    for grid in threshold_grids(frame):
        best, pairs = grid.best, int(grid.speed.notna().sum(axis=None))
        lines.append(
            f"optimum of {grid.label}: tau_on={best['tau_on']:.4g} tau_off={best['tau_off']:.4g}, "
            f"{best['tokens_per_s']:.4g} tokens/s, {best['over_star']:.3f} times the best static tree; "
            f"{int(grid.near().sum(axis=None))} of {pairs} pairs are within 1% of it"
        )
    return lines


def heat_maps(frame: "pd.DataFrame", folder: Path, plot: Any) -> list[Path]:
    """`heatmap_<task>.png` for every grid; the name has whatever else keeps grids apart where the sweep has several."""
    grids, paths = list(threshold_grids(frame)), []
    named = [key for key in apart(frame)[1:] if len({grid.rows[key].iloc[0] for grid in grids}) > 1]
    for grid in grids:
        paths.append(folder / f"heatmap_{'_'.join([grid.task, *(str(grid.rows[key].iloc[0]) for key in named)])}.png")
        with atomic(paths[-1]) as partial:
            heat_map(grid).savefig(partial, dpi=plot.dpi, format="png")
    return paths


def heat_map(grid: ThresholdGrid) -> "Figure":
    """A heat map where the pairs make a grid, their cloud where they do not (Optuna)."""
    return draw_grid(grid) if grid.full else draw_cloud(grid.rows, grid.title)


def outline(inside: "np.ndarray") -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Border of a region of cells, inside: bool [rows, columns], as segments ((x, y), (x, y)); a cell is 1 × 1."""
    import numpy as np

    padded = np.pad(inside.astype(bool), 1)
    lying = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]).tolist()  # between a cell and the one above it
    standing = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]).tolist()  # between a cell and the one to its left
    return [((x, y), (x + 1, y)) for y, x in lying] + [((x, y), (x, y + 1)) for y, x in standing]


def draw_grid(grid: ThresholdGrid) -> "Figure":
    """Heat map of tokens/s: star at the optimum, a line around the cells within 1% of it, skipped pairs blank."""
    import numpy as np
    import seaborn as sns
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    speeds = grid.speed
    values, few = speeds.to_numpy(), speeds.size <= ANNOTATED
    notes = [[f"{v:.1f}\n{r:.3f}×" if v == v else "" for v, r in zip(*pair, strict=True)]
             for pair in zip(values, grid.over_star.to_numpy(), strict=True)]  # fmt: skip
    width, height = (0.95, 0.7) if few else (0.42, 0.32)
    figure = Figure(figsize=(2.8 + width * values.shape[1], 2.0 + height * values.shape[0]), layout="constrained")
    ax = figure.subplots()
    sns.heatmap(speeds, ax=ax, annot=np.array(notes) if few else None, fmt="", cmap="Blues",
                linewidths=1 if few else 0, cbar_kws={"label": BAR})  # fmt: skip
    border = LineCollection(outline(grid.near().to_numpy()), colors="black", linewidths=2.2, clip_on=False)
    ax.add_collection(border, autolim=False)
    row, column = np.unravel_index(np.nanargmax(values), values.shape)
    ax.plot(column + (0.87 if few else 0.5), row + (0.17 if few else 0.5), markersize=13, clip_on=False, **STAR)
    ax.set_xticks(np.arange(values.shape[1]) + 0.5, [f"{tau:.4g}" for tau in speeds.columns], rotation=0 if few else 90)
    ax.set_yticks(np.arange(values.shape[0]) + 0.5, [f"{-tau:.4g}" for tau in speeds.index], rotation=0)
    ax.set(**AXES, title=grid.title)
    _legend(figure)
    return figure


def draw_cloud(rows: "pd.DataFrame", title: str) -> "Figure":
    """The pairs that were tried, coloured by tokens/s: star at the optimum, black rims within 1% of it."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 5.6), layout="constrained")
    ax = figure.subplots()
    done = rows[rows["tokens_per_s"].notna()].sort_values("tokens_per_s")  # the best are drawn last
    skipped, speeds = rows[rows["tokens_per_s"].isna()], done["tokens_per_s"].to_numpy()
    near = speeds >= NEAR * speeds.max()
    if len(skipped):
        crosses = {"marker": "x", "s": 16, "color": "0.7", "label": "skipped (tau_off > tau_on)"}
        ax.scatter(skipped["tau_on"], skipped["tau_off"], **crosses)
    dots = ax.scatter(done["tau_on"], done["tau_off"], c=speeds, cmap="Blues", s=52,
                      edgecolors=np.where(near, "black", "0.75"), linewidths=np.where(near, 1.8, 0.5))  # fmt: skip
    figure.colorbar(dots, label="tokens/s")
    best = done.iloc[-1]
    ax.plot(best["tau_on"], best["tau_off"], markersize=15, **STAR)
    if (rows[["tau_on", "tau_off"]] > 0).all(axis=None):
        ax.set(xscale="log", yscale="log")  # a path value spans orders of magnitude
    ax.set(**AXES, title=title)
    _legend(figure, *ax.get_legend_handles_labels()[0])
    return figure


def _legend(figure: "Figure", *further: Any) -> None:
    from matplotlib.lines import Line2D

    star = Line2D([], [], markersize=11, label="optimum", **STAR)
    rim = Line2D([], [], color="black", linewidth=2.2, label="within 1% of it")
    figure.legend(handles=[star, rim, *further], loc="outside lower center", ncols=3, frameon=False)
