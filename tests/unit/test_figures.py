from pathlib import Path

import eval_fixture as fixture
import numpy as np
import pandas as pd
import pytest

from entmtp.config import PlotConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation import figure_data as read
from entmtp.evaluation import figures as draw
from entmtp.evaluation.make import make_figures, make_summary
from entmtp.evaluation.report import FIGURES
from entmtp.io import write_json

PLOT = PlotConfig(dpi=40)
PAIRS = [("hydra", task) for task in fixture.TASKS]


def line(ax, label):
    found = [line for line in ax.lines if line.get_label() == label]
    assert len(found) == 1, f"{label}: {len(found)} lines"
    return found[0]


def test_speedup_has_a_bar_and_an_interval_per_task_and_policy():
    rows = fixture.summary(medusa="lossy")["rows"]
    fig = draw.speedup(rows, PLOT)
    assert [ax.get_title() for ax in fig.axes] == fixture.TASKS
    for ax, task in zip(fig.axes, fixture.TASKS):
        own = [row for row in rows if row["task"] == task and row["policy"] != "ar"]
        assert [bar.get_width() for bar in ax.patches] == pytest.approx([row["over_ar"]["ratio"] for row in own])
        ends = np.concatenate([c.get_segments()[i] for c in ax.collections for i in range(1)])[:, 0]
        assert list(ends) == pytest.approx([row["over_ar"][key] for row in own for key in ("low", "high")])
        assert [bool(bar.get_hatch()) for bar in ax.patches] == [row["policy"] == "medusa" for row in own]
    assert "medusa (lossy)" in [text.get_text() for text in fig.axes[0].get_yticklabels()]


def test_acceptance_frontier_is_monotone_and_keeps_every_tree():
    data = {pair: fixture.recalibrated(pair[1], pair[0]) for pair in PAIRS}
    fig = draw.acceptance_frontier(data, PLOT)
    assert len(fig.axes) == 2
    for ax in fig.axes:
        assert len(line(ax, "every tree, recalibrated").get_xdata()) == 36
        for label in ("frontier by first score", "frontier, recalibrated"):
            x, y = line(ax, label).get_data()
            assert len(x) == 12 and (np.diff(x) > 0).all() and (np.diff(y) > 0).all()
    assert max(line(fig.axes[0], "frontier by first score").get_ydata()) > max(
        line(fig.axes[0], "frontier, recalibrated").get_ydata()
    )


def test_frontier_drops_trees_beaten_by_a_smaller_one():
    trees = [{"num_nodes": n, "v": v} for n, v in ((4, 2.0), (1, 1.5), (2, 1.4), (8, 2.0), (4, 1.9))]
    assert draw._frontier(trees, "v") == ([1, 4], [1.5, 2.0])


def test_throughput_marks_measured_bank_and_star():
    data = {pair: fixture.throughput(pair[1], pair[0]) for pair in PAIRS}
    banks = {pair: fixture.bank(pair[1], pair[0]) for pair in PAIRS}
    for ax in draw.throughput_tree_size(data, banks, PLOT).axes:
        assert len(line(ax, "predicted, best of a size").get_xdata()) == 8
        assert list(line(ax, "measured").get_xdata()) == [0, 2, 4, 8]
        assert list(line(ax, "bank").get_xdata()) == [0, 4, 8]
        assert list(line(ax, "best static tree").get_xdata()) == [4]


def test_a_pair_without_trees_leaves_its_panel_empty():
    data = {pair: fixture.throughput(pair[1], pair[0]) for pair in [*PAIRS, ("medusa", "humaneval")]}
    visible = [ax.get_visible() for ax in draw.throughput_tree_size(data, {}, PLOT).axes]
    assert visible == [True, True, True, False]


def test_step_latency():
    frame = pd.concat([fixture.bench(task) for task in fixture.TASKS])
    steps = read.bench_step_latency(frame)
    assert {(row.heads, row.nodes) for row in steps.itertuples()} == {
        ("hydra", 4),
        ("hydra", 8),
        ("hydra", 63),
        ("medusa", 63),
    }
    assert steps[steps.nodes == 4]["ms"].iloc[0] == pytest.approx(33.3, abs=0.4)
    throughput = {pair: fixture.throughput(pair[1], pair[0]) for pair in PAIRS}
    left, right = draw.step_latency({"hydra": fixture.latency()}, throughput, steps, PLOT).axes
    assert list(line(left, "target forward (hydra run)").get_xdata()) == [0, 1, 4, 8, 16, 32, 64]
    assert len(line(left, "hydra step, predicted").get_xdata()) == 8
    assert list(line(left, "hydra step, bench median").get_xdata()) == [4, 8, 63]
    assert len(right.lines) == 4  # one per head


def test_accepted_by_entropy_counts_the_longest_prefix_that_is_a_path():
    ranks = [[0, 0, 5, 0], [0, 1, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [9, 9, 9, 9], [9, 9, 9, 9], [9, 9, 9, 9]]
    frame = pd.DataFrame({"prompt_id": "p", "ranks": ranks, "gaps": [[0.0] * 4] * 7, "path_values": [[0.5] * 5] * 7})
    frame["entropy"] = [0.1, 0.2, 0.3, 0.4, 9, 9, 9]
    # tree of depth 3: the last three positions are left out
    found = read.accepted_by_entropy(frame, [[0], [0, 0], [0, 0, 0], [1]], bins=4, resamples=10)
    assert list(found["num_accepted"]) == [2, 1, 1, 0]
    assert list(found["entropy"]) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_accepted_by_entropy_falls_and_covers_its_positions():
    trace = fixture.trace("humaneval", prompts=8)
    found = read.accepted_by_entropy(trace, fixture.PATHS[4], bins=6)
    assert len(found) == 6 and found["positions"].sum() == 8 * (40 - 3)
    assert found["num_accepted"].iloc[0] > found["num_accepted"].iloc[-1]
    assert (found["low"] <= found["num_accepted"]).all() and (found["num_accepted"] <= found["high"]).all()
    flat = trace.assign(entropy=0.0)  # a single bin, not an error
    assert len(read.accepted_by_entropy(flat, fixture.PATHS[4])) == 1
    assert read.accepted_by_entropy(trace.groupby("prompt_id").head(2), fixture.PATHS[4]).empty


def test_accept_entropy_draws_a_line_and_a_band_per_task():
    binned = {pair: (4, read.accepted_by_entropy(fixture.trace(pair[1]), fixture.PATHS[4])) for pair in PAIRS}
    (ax,) = draw.accept_entropy(binned, PLOT).axes
    assert [line.get_label() for line in ax.lines] == ["humaneval (4 nodes)", "litbench (4 nodes)"]
    assert len(ax.collections) == 2
    assert len({line.get_marker() for line in ax.lines}) == 2  # not by colour alone


def test_the_empty_star_is_replaced_by_the_largest_tree():
    bank = fixture.bank("humaneval", "hydra")
    assert read.shown_tree(bank)["num_nodes"] == 4
    assert read.shown_tree(bank | {"star": 0})["num_nodes"] == 8


def test_tree_choice_shows_every_step_and_the_thresholds(tmp_path):
    fixture.write_run(tmp_path)
    row = read.pick_generation(read.read_bench(tmp_path, fixture.TASKS))
    assert row["kind"] == "tau"
    thresholds = read.read_thresholds(tmp_path, row)
    nodes, accepted, signal = draw.tree_choice(row, thresholds, PLOT).axes
    assert list(nodes.lines[0].get_ydata()) == list(row["step_nodes"])
    assert [bar.get_height() for bar in accepted.patches] == list(row["step_accepted"])
    assert [line.get_label() for line in signal.lines] == ["path value", "τ_on = 0.60", "τ_off = 0.30"]


def test_unfitted_thresholds_are_left_out(tmp_path):
    fixture.write_run(tmp_path)
    write_json(
        tmp_path / "trees/hydra/humaneval/policy/entmtp_tau.json",
        fixture.policy("entmtp_tau") | {"tau_on": None, "tau_off": None, "thresholds": None},
    )
    row = read.pick_generation(fixture.bench("humaneval"))
    assert read.read_thresholds(tmp_path, row) == {}
    assert read.read_thresholds(tmp_path, pd.Series({**row, "kind": "ladder"})) == {}
    assert len(draw.tree_choice(row, {}, PLOT).axes[2].lines) == 1


def test_tree_choice_without_a_signal_or_a_scheduler():
    static = fixture.bench("humaneval", ["ar", "hydra"])
    row = read.pick_generation(static)
    assert row["policy"] == "hydra" and read.read_thresholds("nowhere", row) == {}
    assert len(draw.tree_choice(row, {}, PLOT).axes) == 2
    assert read.pick_generation(fixture.bench("humaneval", ["ar"]))["policy"] == "ar"


def test_scheduler_overhead_has_a_point_per_task_and_policy():
    rows = fixture.summary()["rows"]
    (ax,) = draw.scheduler_overhead(rows, PLOT).axes
    for task in fixture.TASKS:
        own = [row for row in rows if row["task"] == task]
        assert list(line(ax, task).get_xdata()) == [row["scheduler_ms"] for row in own]
        assert list(line(ax, f"{task}, switch alone").get_xdata()) == [row["switch_ms"] for row in own]
    assert ax.lines[-1].get_xdata()[0] == 0.1


def test_saved_twice_gives_the_same_bytes(tmp_path):
    rows = fixture.summary()["rows"]
    for name in "ab":
        draw.save_figure(draw.scheduler_overhead(rows, PLOT), tmp_path / name / "figure")
    for suffix in ("png", "svg"):
        a, b = ((tmp_path / name / f"figure.{suffix}").read_bytes() for name in "ab")
        assert a == b and len(a) > 1000
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_make_figures_writes_all(tmp_path):
    fixture.write_run(tmp_path)
    make_summary(tmp_path, fixture.TASKS, fixture.POLICIES, fixture.CONFIG, {})
    make_figures(tmp_path, fixture.TASKS, ["hydra", "medusa"], PLOT, tmp_path)
    names = {Path(path).name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg")}
    with pytest.raises(EntmtpError, match="no calibrated trees"):
        make_figures(tmp_path, fixture.TASKS, ["other"], PLOT, tmp_path)
