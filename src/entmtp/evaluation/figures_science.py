"""Figures of `snakemake scheduling` and of the second method. As in `figures`: data in, a matplotlib Figure out."""

import numpy as np
from matplotlib.figure import Figure

from entmtp.config import PlotConfig
from entmtp.evaluation.figures import GREY, MARKERS, panels, styled
from entmtp.evaluation.stats import share_interval
from entmtp.science.headroom import REFERENCES, plain_clock


def headroom(rows: list[dict], plot: PlotConfig) -> Figure:
    """Gain over the static optimum, a panel per task: live with its interval, replayed beside it, the oracles as
    lines. Policies that lose more than half are left to the tables. `rows`: of scheduling.json."""
    with styled(plot) as colours:
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        shown = [row for row in rows if row["policy"] not in REFERENCES and row["over_static"]["ratio"] > 0.5]
        policies = list(dict.fromkeys(row["policy"] for row in shown))
        fig, axes = panels(1, len(tasks), 3.0, 0.45 * max(3, len(policies)) + 0.9, sharex=True, sharey=True)
        for ax, task in zip(axes[0], tasks, strict=True):
            for row in (row for row in shown if row["task"] == task):
                place, over = policies.index(row["policy"]), row["over_static"]
                low, value, high = (100 * (over[key] - 1) for key in ("low", "ratio", "high"))
                ax.errorbar(value, place, xerr=[[value - low], [high - value]], fmt=MARKERS[0], capsize=2.5,
                            color=colours[0], label="live" if not place else None)  # fmt: skip
                if row["replayed_over_static"] is not None:
                    ax.plot(100 * (row["replayed_over_static"]["ratio"] - 1), place + 0.22, MARKERS[2],
                            color=colours[1], label="replayed" if not place else None)  # fmt: skip
            own = next(row for row in rows if row["task"] == task)
            ax.axvline(0, color="0.2", lw=1)
            for key, style, name in (("oracle_headroom", "--", "oracle, bank"),
                                     ("frontier_headroom", ":", "oracle, all trees")):  # fmt: skip
                ax.axvline(100 * own[key]["gain"], color=GREY, ls=style, lw=1.2, label=name)
            ax.set(title=task, xlabel="% over the best static tree")
        axes[0, 0].set_yticks(range(len(policies)), policies)
        axes[0, 0].set_ylim(len(policies) - 0.4, -0.6)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return fig


def predicted_against_measured(rows: list[dict], plot: PlotConfig) -> Figure:
    """Tokens/s by replay against live ones, every task × policy, with a band of 3% about equality. Predictions are in
    the clock of plain decoding's own run, as in the record's `prediction`."""
    with styled(plot) as colours:
        fig, axes = panels(1, 1, 5.2, 4.6)
        rows = [row for row in rows if row["replayed_tokens_per_s"] is not None]
        ax, tasks = axes[0, 0], list(dict.fromkeys(row["task"] for row in rows))
        plain = plain_clock(rows)
        for i, task in enumerate(tasks):
            own = [row for row in rows if row["task"] == task]
            ax.plot([row["live_tokens_per_s"] for row in own],
                    [row["replayed_tokens_per_s"] * plain.get(task, 1.0) for row in own], MARKERS[i % 8],
                    color=colours[i % 8], label=task)  # fmt: skip
        ends = np.array([0.0, 1.08 * max(row["live_tokens_per_s"] for row in rows)])
        ax.plot(ends, ends, color="0.2", lw=1)
        ax.fill_between(ends, 0.97 * ends, 1.03 * ends, color=GREY, alpha=0.25, lw=0)
        ax.set(xlabel="tokens/s, live", ylabel="tokens/s, by replay", xlim=ends, ylim=ends)
        ax.legend(fontsize=9)
    return fig


def accuracy_frontier(rows: list[dict], plot: PlotConfig) -> Figure:
    """Accuracy against measured speed over plain decoding, a panel per task: lines through the thresholds (of all
    predictions, of the masks alone) and through the static blocks, single points for what is lossless, with 95%
    intervals; an empty panel where answers were not judged. `rows`: of confadapt.json."""
    families = [("confadapt", "ConfAdapt", "-"), ("masks", "masks' confidence", "-"), ("static", "static k", "-"),
                ("lossless", "blocks, verified", ""), ("", "plain decoding and EntMTP", "")]  # fmt: skip
    with styled(plot) as colours:
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        columns = min(3, len(tasks))
        fig, axes = panels(-(-len(tasks) // columns), columns, 3.6, 3.0)
        for ax in axes.flat[len(tasks) :]:
            ax.set_axis_off()
        for ax, task in zip(axes.flat, tasks, strict=False):
            left = [row for row in rows if row["task"] == task and row["accuracy"] is not None]
            if not left:
                ax.text(0.5, 0.5, "not judged", ha="center", va="center", transform=ax.transAxes)
            for i, (prefix, name, line) in enumerate(families):
                own = [row for row in left if row["method"].startswith(prefix)]
                left = [row for row in left if row not in own]
                own.sort(key=lambda row: row["over_plain"]["ratio"])
                shares = np.array([row["accuracy"] for row in own])
                ends = np.array([share_interval(row["accuracy"], row["prompts"]) for row in own]).reshape(-1, 2)
                ax.errorbar(
                    [row["over_plain"]["ratio"] for row in own], shares, fmt=MARKERS[i] + line,
                    yerr=np.abs(ends.T - shares),
                    color=colours[i], capsize=2, ms=5, lw=1.2, label=name,
                )  # fmt: skip
            ax.set(title=task, xlabel="× own plain decoding", ylim=(-0.03, 1.03))
        for ax in axes[:, 0]:
            ax.set_ylabel("accuracy")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(families), fontsize=9)
    return fig


def training_curves(curve: list[dict], plot: PlotConfig) -> Figure:
    """Self-distillation over its steps: loss, agreement with the labels, tokens a block that are at least 0.9 sure.
    `curve`: of confadapt.json's training."""
    shown = {"loss": "loss", "agreement": "predictions that agree", "block": "tokens ≥ 0.9 sure, a block"}
    with styled(plot) as colours:
        fig, axes = panels(1, len(shown), 3.4, 2.8)
        for i, (ax, (key, name)) in enumerate(zip(axes[0], shown.items(), strict=True)):
            ax.plot([row["step"] for row in curve], [row[key] for row in curve], color=colours[i], lw=1.4)
            ax.set(xlabel="step", ylabel=name)
    return fig
