"""The figures. Each function takes data and returns a matplotlib Figure; nothing here reads a file or touches pyplot.

Tasks are panels or colours with their own markers, so that no figure depends on colour alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from entmtp.config import PlotConfig
from entmtp.evaluation import paper
from entmtp.evaluation.tables import label
from entmtp.io import atomic

MARKERS = "osD^vPX*"
GREY = "0.45"
ByHeadsTask = dict[tuple[str, str], dict]


@contextmanager
def styled(plot: PlotConfig) -> Iterator[list]:
    """Apply the style inside the block and yield the palette (8 colours)."""
    settings = {**sns.axes_style(plot.style), **sns.plotting_context("notebook", font_scale=0.9)}
    own = {"axes.titlesize": 11, "legend.frameon": False, "figure.dpi": plot.dpi, "grid.linewidth": 0.6}
    with mpl.rc_context({**settings, **own}):
        yield sns.color_palette(plot.palette, 8)


def panels(rows: int, cols: int, width: float, height: float, **share) -> tuple[Figure, np.ndarray]:
    fig = Figure(figsize=(max(5.0, width * cols), height * rows + 0.6), layout="constrained")
    return fig, fig.subplots(rows, cols, squeeze=False, **share)


def nodes_axis(ax: Axes, largest: int) -> None:
    """Powers of two, with room for 0 nodes (the empty tree)."""
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xlim(-0.3, max(2, largest) * 1.3)
    ax.set_xticks([0] + [2**i for i in range(12) if 2**i <= max(2, largest) * 1.3])
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.minorticks_off()


def _legend_below(fig: Figure) -> None:
    """One legend for all panels, under them."""
    handles: dict = {}
    for ax in fig.axes:
        handles |= {text: handle for handle, text in zip(*ax.get_legend_handles_labels())}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


def _keys(data: dict) -> tuple[list[str], list[str]]:
    """Heads and tasks of data by (heads, task), in order."""
    return list(dict.fromkeys(key[0] for key in data)), list(dict.fromkeys(key[1] for key in data))


def _facets(data: ByHeadsTask, ylabel: str) -> Iterator[tuple[Axes, dict]]:
    """Axes and data of a panel per heads (row) and task (column), over tree nodes; a legend under them at the end."""
    heads, tasks = _keys(data)
    largest = max(tree["num_nodes"] for of_pair in data.values() for tree in of_pair["trees"])
    fig, axes = panels(len(heads), len(tasks), 3.3, 2.9, sharex=True, sharey=True)
    for (i, name), (j, task) in product(enumerate(heads), enumerate(tasks)):
        axes[i, j].set_title(f"{task}, {name} heads")
        if i == len(heads) - 1:
            axes[i, j].set_xlabel("tree nodes (root excluded)")
        if (name, task) in data:
            yield axes[i, j], data[name, task]
        else:
            axes[i, j].set_visible(False)
    nodes_axis(axes[0, 0], largest)
    for row in axes:
        row[0].set_ylabel(ylabel)
    _legend_below(fig)


def _frontier(trees: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Trees not beaten by a smaller tree: nodes, values."""
    nodes, values = [], []
    for tree in sorted(trees, key=lambda tree: (tree["num_nodes"], -tree[key])):
        if not values or tree[key] > values[-1]:
            nodes.append(tree["num_nodes"])
            values.append(tree[key])
    return nodes, values


def acceptance_frontier(recalibrated: ByHeadsTask, plot: PlotConfig) -> Figure:
    """Accept length against tree size before (first score) and after recalibration (self-rollout)."""
    with styled(plot) as colours:
        for ax, data in _facets(recalibrated, "accept length (tokens/step)"):
            trees = data["trees"]
            points = [tree["num_nodes"] for tree in trees], [tree["accept_length"] for tree in trees]
            ax.plot(*points, ".", color=GREY, alpha=0.35, ms=4, label="every tree, recalibrated")
            ax.plot(*_frontier(trees, "first_score"), "--", color=colours[1], lw=1.8, label="frontier by first score")
            ax.plot(*_frontier(trees, "accept_length"), "-", color=colours[0], lw=1.8, label="frontier, recalibrated")
    return ax.figure


def throughput_tree_size(throughput: ByHeadsTask, banks: ByHeadsTask, plot: PlotConfig) -> Figure:
    """Tokens/s against tree size: predicted (best of a size), measured, the bank, the best static tree."""
    with styled(plot) as colours:
        for ax, data in _facets(throughput, "tokens/s"):
            best: dict[int, float] = {}
            for tree in data["trees"]:
                best[tree["num_nodes"]] = max(best.get(tree["num_nodes"], 0), tree["predicted_tokens_per_s"])
            ax.plot(*zip(*sorted(best.items())), "-", color=colours[0], lw=1.6, label="predicted, best of a size")
            timed = [tree for tree in data["trees"] if tree["measured_tokens_per_s"] is not None]
            points = [tree["num_nodes"] for tree in timed], [tree["measured_tokens_per_s"] for tree in timed]
            ax.plot(*points, "o", color=colours[1], ms=5, label="measured")
            bank = banks.get((data["heads"], data["task"]), {"trees": []})
            points = [t["num_nodes"] for t in bank["trees"]], [t["tokens_per_s"] for t in bank["trees"]]
            ax.plot(*points, "o", mfc="none", mec="black", mew=1.2, ms=15, label="bank")
            if bank["trees"]:
                star = bank["trees"][bank["star"]]
                marks = {"color": colours[2], "mec": "black", "mew": 0.6, "ms": 11}
                ax.plot(star["num_nodes"], star["tokens_per_s"], "*", **marks, label="best static tree")
    return ax.figure


def step_latency(latency: dict[str, dict], throughput: ByHeadsTask, steps: pd.DataFrame, plot: PlotConfig) -> Figure:
    """Milliseconds of a step against tree nodes, and of a draft head against the rows that it evaluates.

    `latency` by heads; `steps` from `bench_step_latency` (median live step by tree size).
    """
    with styled(plot) as colours:
        fig, axes = panels(1, 2, 5.2, 3.8)
        left, right = axes[0]
        largest = 1
        for i, (name, table) in enumerate(latency.items()):
            nodes = [tokens - 1 for tokens in table["forward"]["tokens"]]
            largest = max(largest, *nodes)
            marks = {"color": colours[i], "marker": MARKERS[i]}
            left.plot(nodes, table["forward"]["ms"], "-", ms=4, lw=1.6, **marks, label=f"target forward ({name} run)")
            trees = {
                (tree["num_nodes"], tree["predicted_step_ms"])
                for (heads, _), data in throughput.items()
                if heads == name
                for tree in data["trees"]
            }
            if trees:
                left.plot(
                    *zip(*sorted(trees)), ".", color=colours[i], alpha=0.35, ms=4, label=f"{name} step, predicted"
                )
            live = steps[steps["heads"] == name]
            if len(live):
                live_marks = {"mfc": "none", "mec": colours[i], "ms": 9, "mew": 1.5}
                left.plot(live["nodes"], live["ms"], MARKERS[i], **live_marks, label=f"{name} step, bench median")
                largest = max(largest, int(live["nodes"].max()))
            together = table.get("arch") == "medusa"  # one evaluation of all heads
            for depth, ms in enumerate(table["propose"]["ms"][:1] if together else table["propose"]["ms"], 1):
                style = ["-", "--", "-.", ":"][(depth - 1) % 4]
                label = f"{name}, all heads" if together else f"{name} head {depth}"
                right.plot(table["propose"]["rows"], ms, style, ms=4, **marks, label=label)
        nodes_axis(left, largest)
        left.set(xlabel="tree nodes (root excluded)", ylabel="ms", title="step")
        right.set(xlabel="rows (nodes with children)", ylabel="ms", title="draft head")
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter("{x:.0f}")
        for ax in (left, right):
            ax.set_ylim(bottom=0)
            columns = 2 if len(ax.get_legend_handles_labels()[1]) > 3 else 1
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, fontsize=8, handlelength=3.2)
    return fig


def speedup(rows: list[dict], plot: PlotConfig) -> Figure:
    """Bars: throughput over plain decoding with its 95% interval, a panel per task. `rows`: the summary's."""
    with styled(plot) as colours:
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        compared = [row for row in rows if row["over_ar"] and row["policy"] != "ar"]
        policies = list(dict.fromkeys(row["policy"] for row in compared))
        names = {row["policy"]: label(row) for row in rows}
        fig, axes = panels(1, len(tasks), 3.2, 0.42 * max(3, len(policies)) + 0.6, sharex=True, sharey=True)
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line at 1 stays off the number
        top = max((row["over_ar"]["high"] for row in compared), default=1.0)
        for ax, task in zip(axes[0], tasks):
            for row in (row for row in compared if row["task"] == task):
                place, over = policies.index(row["policy"]), row["over_ar"]
                reach = [[over["ratio"] - over["low"]], [over["high"] - over["ratio"]]]
                hatch = "///" if row["lossless"] == "lossy" else None
                ax.barh(
                    place, over["ratio"], xerr=reach, height=0.68, color=colours[place % 8], hatch=hatch,
                    edgecolor="white", error_kw={"ecolor": "0.2", "capsize": 2.5, "lw": 1.2},
                )  # fmt: skip
                ax.text(over["high"] + 0.03 * top, place, f"{over['ratio']:.2f}", va="center", fontsize=9, bbox=clear)
            ax.axvline(1, color="0.2", lw=1, ls="--")
            ax.set(title=task, xlabel="× plain decoding", xlim=(0, top * 1.22))
            ax.grid(axis="y", visible=False)
        axes[0, 0].set_yticks(range(len(policies)), [names[policy] for policy in policies])
        if policies:
            axes[0, 0].set_ylim(len(policies) - 0.4, -0.6)
    return fig


def accept_entropy(binned: dict[tuple[str, str], tuple[int, pd.DataFrame]], plot: PlotConfig) -> Figure:
    """Mean num_accepted of the best static tree against the base entropy at the step's start, a line per task."""
    with styled(plot) as colours:
        heads, tasks = _keys(binned)
        fig, axes = panels(1, len(heads), 5.0, 3.6, sharey=True)
        for ax, name in zip(axes[0], heads):
            for i, task in enumerate(tasks):
                if (name, task) not in binned:
                    continue
                nodes, frame = binned[name, task]
                x, colour = frame["entropy"], colours[i % 8]
                text = f"{task} ({nodes} nodes)"
                ax.plot(x, frame["num_accepted"], "-", marker=MARKERS[i % 8], color=colour, ms=5, label=text)
                ax.fill_between(x, frame["low"], frame["high"], color=colour, alpha=0.15, lw=0)
            ax.set(xlabel="base entropy (nats)", title=f"{name} heads")
            ax.set_ylim(bottom=0)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)
        axes[0, 0].set_ylabel("num_accepted (draft tokens/step)")
    return fig


def tree_choice(row: pd.Series, thresholds: dict[str, float], plot: PlotConfig) -> Figure:
    """One generation step by step: nodes of the tree chosen, num_accepted, and the signal with its thresholds.

    `row`: a bench row. The signal's panel is left out for a policy that looks at none.
    """
    signal = np.asarray(row["step_signal"], dtype=float)
    with styled(plot) as colours:
        shown = 3 if np.isfinite(signal).any() else 2
        fig, axes = panels(shown, 1, 9.5, 1.6, sharex=True)
        step = np.arange(1, len(row["step_nodes"]) + 1)
        nodes, accepted = axes[0, 0], axes[1, 0]
        nodes.step(step, row["step_nodes"], where="mid", color=colours[0], lw=1.6)
        nodes.set(ylabel="tree nodes", title=f"{row['policy']} on {row['task']}, prompt {row['prompt_id']}")
        nodes.set_ylim(0, max(1, *row["step_nodes"]) * 1.15)
        accepted.bar(step, row["step_accepted"], color=colours[2], width=0.8, lw=0)
        accepted.set(ylabel="num_accepted")
        for ax in (nodes, accepted):
            ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        if shown == 3:
            ax = axes[2, 0]
            ax.plot(step, signal, "-o", color=colours[4], ms=3, lw=1, label="path value")
            styles = ["--", ":"] if len(thresholds) == 2 else ["--"] * len(thresholds)
            # a ladder has many thresholds: one legend entry stands for all
            for i, ((name, value), style) in enumerate(zip(thresholds.items(), styles)):
                text = f"{name} = {value:.2f}" if len(thresholds) <= 2 else "thresholds" if i == 0 else None
                ax.axhline(value, color="0.2", ls=style, lw=1.1, label=text)
            ax.set(ylabel="path value", ylim=(-0.03, 1.03))
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
        axes[-1, 0].set_xlabel("step")
        axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def scheduler_overhead(rows: list[dict], plot: PlotConfig) -> Figure:
    """Milliseconds per step, a point per task × policy: the whole scheduler filled; choice and switch alone hollow,
    which is what the paper bounds."""
    with styled(plot) as colours:
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        policies = list(dict.fromkeys(row["policy"] for row in rows))
        fig, axes = panels(1, 1, 7.5, 0.36 * max(3, len(policies)) + 0.8)
        ax = axes[0, 0]
        for i, task in enumerate(tasks):
            own = [row for row in rows if row["task"] == task]
            places = [policies.index(row["policy"]) + 0.17 * (i - (len(tasks) - 1) / 2) for row in own]
            for key, fill, note in (("scheduler_ms", "full", task), ("switch_ms", "none", f"{task}, switch alone")):
                style = {"color": colours[i % 8], "fillstyle": fill, "label": note}
                ax.plot([row[key] for row in own], places, MARKERS[i % 8], ms=6, clip_on=False, **style)
        bound = f"{paper.SWITCH_MS} ms (paper's bound on a switch)"
        ax.axvline(paper.SWITCH_MS, color="0.2", ls="--", lw=1.1, label=bound)
        ax.set(xlabel="scheduler time per step (ms)", ylim=(len(policies) - 0.4, -0.6))
        ax.set_xlim(left=0)
        ax.set_yticks(range(len(policies)), policies)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return fig


def save_figure(fig: Figure, path: str | Path) -> None:
    """Write `<path>.png` and `<path>.svg`, each whole or not at all; the same data give the same bytes."""
    path = Path(path)
    with mpl.rc_context({"svg.hashsalt": "entmtp"}):
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            with atomic(path.with_name(f"{path.name}.{suffix}")) as partial:
                fig.savefig(partial, format=suffix, dpi="figure", metadata=metadata)
