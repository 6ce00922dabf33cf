"""Heat maps and clouds of sweeps: the optimum, and the outline of what is as good to within 1%."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection

from entmtp.config import PlotConfig
from entmtp.errors import EntmtpError
from entmtp.io import write_json
from entmtp.sweep_figures import (
    describe_optima,
    draw_cloud,
    draw_grid,
    heat_maps,
    outline,
    over_best,
    threshold_grids,
)
from entmtp.sweep_gather import check_multirun, gather


def grid() -> pd.DataFrame:
    """tokens/s over 3 × 3 thresholds: optimum at (0.3, 0.1), one more cell within 1%, impossible pairs skipped."""
    speeds = {(0.2, 0.1): 40.0, (0.3, 0.1): 50.0, (0.4, 0.1): 49.6, (0.3, 0.25): 45.0, (0.4, 0.25): 30.0,
              (0.4, 0.35): 20.0}  # fmt: skip
    return pd.DataFrame([
        {"task": "gsm8k", "policy": "entmtp_tau", "engine": "replay", "split": "calib", "tau_on": on, "tau_off": off,
         "status": "ok" if (on, off) in speeds else "skipped", "tokens_per_s": speeds.get((on, off), np.nan),
         "over_star": speeds.get((on, off), np.nan) / 40}
        for on, off in product((0.2, 0.3, 0.4), (0.1, 0.25, 0.35))
    ])  # fmt: skip


def cloud(seed: int = 0, count: int = 30) -> pd.DataFrame:
    """What a search over continuous thresholds leaves: no pair shares a value with another."""
    on, off = np.random.default_rng(seed).uniform(0.01, 1, (2, count))
    speeds = np.where(off > on, np.nan, 50 - 20 * np.abs(on - 0.5))
    row = {"task": "gsm8k", "policy": "entmtp_tau", "engine": "replay", "split": "calib"}
    return pd.DataFrame([
        {**row, "tau_on": a, "tau_off": b, "tokens_per_s": speed, "over_star": speed / 40}
        for a, b, speed in zip(on, off, speeds, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_outline_is_every_border_between_inside_and_outside(seed):
    inside = np.random.default_rng(seed).random((4, 6)) < 0.4

    def within(row: int, column: int) -> bool:
        return 0 <= row < 4 and 0 <= column < 6 and bool(inside[row, column])

    expected = {((x, y), (x + 1, y)) for y in range(5) for x in range(6) if within(y, x) != within(y - 1, x)}
    expected |= {((x, y), (x, y + 1)) for y in range(4) for x in range(7) if within(y, x) != within(y, x - 1)}
    found = outline(inside)
    assert set(found) == expected and len(found) == len(expected)


def test_grid_marks_the_optimum_and_outlines_the_region_within_one_percent():
    (table,) = threshold_grids(grid())
    figure = draw_grid(table)
    ax = figure.axes[0]
    assert ax.get_title() == "gsm8k, entmtp_tau (replay, calib split)"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.2", "0.3", "0.4"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0.35", "0.25", "0.1"]  # upwards
    (border,) = [item for item in ax.collections if isinstance(item, LineCollection)]
    segments = {tuple(map(tuple, segment)) for segment in np.array(border.get_segments(), int).tolist()}
    # columns 1 and 2 (0.3 and 0.4) of row 2 (0.1): a rectangle of two cells
    assert segments == {((1, 2), (2, 2)), ((2, 2), (3, 2)), ((1, 3), (2, 3)), ((2, 3), (3, 3)), ((1, 2), (1, 3)),
                        ((3, 2), (3, 3))}  # fmt: skip
    (star,) = ax.lines
    assert (int(star.get_xdata()[0]), int(star.get_ydata()[0])) == (1, 2)
    assert any(text.get_text() == "50.0\n1.250×" for text in ax.texts)


def test_cloud_rims_what_is_within_one_percent_and_marks_the_optimum():
    rows = cloud()
    ax = draw_cloud(rows, "gsm8k").axes[0]
    dots = next(item for item in ax.collections if isinstance(item, PathCollection) and item.get_array() is not None)
    speeds = np.asarray(dots.get_array())
    black = (dots.get_edgecolors()[:, :3] == 0).all(axis=1)
    assert len(speeds) == rows["tokens_per_s"].notna().sum()
    assert (black == (speeds >= 0.99 * speeds.max())).all() and 0 < black.sum() < len(speeds)
    best = rows.loc[rows["tokens_per_s"].idxmax()]
    assert (ax.lines[0].get_xdata()[0], ax.lines[0].get_ydata()[0]) == (best["tau_on"], best["tau_off"])


def test_a_grid_is_told_from_a_cloud():
    full = [next(threshold_grids(rows)).full for rows in (grid(), cloud(), grid().iloc[:1])]
    assert full == [True, False, True]


def test_of_rows_that_share_a_pair_the_best_counts():
    twice = pd.concat([grid(), grid().assign(tokens_per_s=lambda rows: rows["tokens_per_s"] + 1)], ignore_index=True)
    (table,) = threshold_grids(twice)
    assert table.speed.loc[-0.1, 0.3] == 51.0 and np.isnan(table.speed.loc[-0.35, 0.2])
    assert (table.best["tau_on"], table.best["tau_off"], table.best["tokens_per_s"]) == (0.3, 0.1, 51.0)
    near = table.near().stack()
    assert set(near[near].index) == {(-0.1, 0.3), (-0.1, 0.4)}
    assert table.near(0.85).to_numpy().sum() == 3


def test_what_has_no_thresholds_or_no_finished_pair_has_no_grid():
    assert list(threshold_grids(grid().assign(tau_on=np.nan))) == []
    assert list(threshold_grids(grid().assign(tokens_per_s=np.nan))) == []


def test_a_wide_grid_drops_its_numbers():
    values = np.linspace(0.01, 0.9, 20)
    row = grid().iloc[0].to_dict()
    rows = pd.DataFrame([{**row, "tau_on": on, "tau_off": off, "tokens_per_s": 40 + on - off, "over_star": 1.0}
                         for on, off in product(values, values)])  # fmt: skip
    ax = draw_grid(next(threshold_grids(rows))).axes[0]
    assert not ax.texts and len(ax.get_xticklabels()) == 20


def test_optima_in_words_and_in_the_rows():
    assert describe_optima(grid()) == [
        "optimum of gsm8k, entmtp_tau: tau_on=0.3 tau_off=0.1, 50 tokens/s, 1.250 times the best static tree; "
        "2 of 6 pairs are within 1% of it"
    ]
    share = over_best(grid())
    assert share.max() == 1.0 and share.isna().sum() == 3
    two = pd.concat([grid(), grid().assign(task="humaneval", tokens_per_s=lambda rows: rows["tokens_per_s"] / 2)])
    assert over_best(two.reset_index(drop=True)).eq(1).sum() == 2, "the best of each task"


def test_a_figure_a_task_and_policy(tmp_path):
    frame = pd.concat([grid(), cloud().assign(policy="entmtp_tau_medusa"), grid().assign(task="copying")])
    frame = pd.concat([frame, grid().assign(task="nothing", tokens_per_s=np.nan)], ignore_index=True)
    made = heat_maps(frame, tmp_path, PlotConfig(dpi=60))
    assert [path.name for path in made] == [
        "heatmap_gsm8k_entmtp_tau.png", "heatmap_gsm8k_entmtp_tau_medusa.png", "heatmap_copying_entmtp_tau.png"
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_what_was_measured_in_other_ways_is_kept_apart(tmp_path):
    """A replayed speed has no prefill, and calibration texts are no test texts: no cell holds the larger of two."""
    live = grid().assign(engine="live", tokens_per_s=lambda rows: 0.8 * rows["tokens_per_s"])
    test = grid().assign(split="test", tokens_per_s=lambda rows: 0.9 * rows["tokens_per_s"])
    frame = pd.concat([grid(), live, test], ignore_index=True)
    assert [table.best["tokens_per_s"] for table in threshold_grids(frame)] == pytest.approx([50.0, 40.0, 45.0])
    assert over_best(frame).eq(1).sum() == 3
    names = [path.name for path in heat_maps(frame, tmp_path, PlotConfig(dpi=40))]
    assert names == ["heatmap_gsm8k_replay_calib.png", "heatmap_gsm8k_live_calib.png", "heatmap_gsm8k_replay_test.png"]


def test_both_numbers_of_a_cell_are_of_its_fastest_row():
    slow = grid().assign(depth=1, tokens_per_s=lambda rows: 0.5 * rows["tokens_per_s"],
                         over_star=lambda rows: 9 * rows["over_star"])  # fmt: skip
    (table,) = threshold_grids(pd.concat([grid().assign(depth=2), slow], ignore_index=True))
    assert table.over_star.max(axis=None) == 50.0 / 40


def test_gather_reads_what_jobs_left(tmp_path, capsys):
    with pytest.raises(EntmtpError, match="no job of this sweep wrote a row"):
        gather(tmp_path, PlotConfig(dpi=60))
    for number, row in enumerate(grid().to_dict("records")):
        given = {key: value for key, value in row.items() if value == value}  # a skipped row has no speed
        write_json(tmp_path / str(number) / "row.json", {**given, "job": number})
    gather(tmp_path, PlotConfig(dpi=60))
    rows = pd.read_parquet(tmp_path / "rows.parquet")
    assert rows["over_best"].max() == 1 and (rows["over_best"] >= 0.99).sum() == 2
    said = capsys.readouterr().out
    assert "2 of 6 pairs are within 1% of it" in said and "6 rows, 3 skipped" in said


def settings(launcher: str = "BasicLauncher", sweeper: str = "BasicSweeper", *task: str, **launching) -> dict:
    return {
        "launcher": {"_target_": f"some.plugin.{launcher}", **launching},
        "sweeper": {"_target_": f"some.plugin.{sweeper}"},
        "overrides": {"task": list(task)},
    }


@pytest.mark.parametrize(
    "good",
    [
        settings("BasicLauncher", "BasicSweeper", "sweep.engine=live", "task=gsm8k,humaneval"),
        settings("JoblibLauncher", "BasicSweeper", "sweep.engine=live", n_jobs=1),
        settings("JoblibLauncher", "OptunaSweeper", "task=gsm8k", "policy=entmtp_tau,entmtp_tau_medusa", n_jobs=-1),
    ],
)
def test_sensible_multiruns_pass(good):
    assert check_multirun(good) is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (settings("JoblibLauncher", "BasicSweeper", "sweep.engine=live", n_jobs=-1), "jobs side by side"),
        (settings("LocalLauncher", "BasicSweeper", "sweep.engine=replay,live"), "jobs side by side"),
        (settings("BasicLauncher", "OptunaSweeper", "task=gsm8k,humaneval"), "task=gsm8k,humaneval would let it take"),
        (settings("BasicLauncher", "OptunaSweeper", "+experiment=main,quick"), "one search each"),
    ],
)
def test_misleading_multiruns_are_refused(bad, message):
    with pytest.raises(EntmtpError, match=message):
        check_multirun(bad)


@pytest.mark.parametrize(("exclusive", "refused"), [({}, True), ({"exclusive": True}, False)])
def test_measuring_on_slurm_takes_exclusive_nodes(exclusive, refused, tmp_path, monkeypatch):
    bad = settings("SlurmLauncher", "BasicSweeper", "sweep.engine=live", additional_parameters=exclusive)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EntmtpError, match="finds no sbatch here"):
        check_multirun(bad)
    (tmp_path / "sbatch").touch(mode=0o755)
    if not refused:
        assert check_multirun(bad) is None
        return
    with pytest.raises(EntmtpError, match="slurm_exclusive"):
        check_multirun(bad)
