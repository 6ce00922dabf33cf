"""Heat maps of a sweep: the optimum, the region within 1% of it, and pairs that were skipped."""

import numpy as np
import pandas as pd

from entmtp.evaluation.figures_sweep import heat_map, threshold_grids

SPEED = {(0.2, 0.1): 50.0, (0.4, 0.1): 49.6, (0.4, 0.3): 49.4, (0.6, 0.1): 40.0, (0.6, 0.3): None, (0.2, 0.3): None}


def sweep(**changes) -> pd.DataFrame:
    rows = [
        {"task": task, "policy": "entmtp_tau", "tau_on": on, "tau_off": off, "engine": "replay", "split": "calib",
         "tokens_per_s": None if value is None else value * scale, "over_star": None if value is None else value / 45,
         **changes}
        for task, scale in (("gsm8k", 1.0), ("litbench", 2.0))
        for (on, off), value in SPEED.items()
    ]  # fmt: skip
    return pd.DataFrame(rows).astype({"tokens_per_s": float, "over_star": float})


def test_a_grid_a_task_with_its_optimum_and_what_is_near_it():
    grids = list(threshold_grids(sweep()))
    assert [(grid.task, grid.policy) for grid in grids] == [("gsm8k", "entmtp_tau"), ("litbench", "entmtp_tau")]
    for grid, scale in zip(grids, (1.0, 2.0), strict=True):
        assert grid.optimum == (0.2, 0.1)
        near = grid.near().stack()
        assert {(on, -off) for off, on in near[near].index} == {(0.2, 0.1), (0.4, 0.1)}
        assert grid.near(0.02).to_numpy().sum() == 3 and grid.near(0.0).to_numpy().sum() == 1
        assert grid.speed.max(axis=None) == 50.0 * scale


def test_of_rows_that_share_a_pair_the_best_counts():
    twice = pd.concat([sweep(depth=1), sweep(depth=2).assign(tokens_per_s=lambda rows: rows["tokens_per_s"] + 1)])
    assert next(threshold_grids(twice)).speed.max(axis=None) == 51.0


def test_a_policy_without_thresholds_or_without_a_finished_pair_has_no_grid():
    assert list(threshold_grids(sweep(tau_on=np.nan))) == []
    assert list(threshold_grids(sweep(tokens_per_s=np.nan))) == []


def test_the_heat_map_frames_the_optimum_and_its_region():
    fig = heat_map(next(threshold_grids(sweep())))
    ax = fig.axes[0]
    frames = {(round(patch.get_x()), round(patch.get_y())): patch for patch in ax.patches}
    # columns are tau_on ascending, rows tau_off descending: (0.2, 0.1) is the lower left cell
    assert set(frames) == {(0, 1), (1, 1)}
    assert frames[0, 1].get_linestyle() in ("-", "solid") and frames[0, 1].get_linewidth() == 2.5
    assert frames[1, 1].get_linestyle() in ("--", "dashed")
    texts = [text.get_text() for text in ax.texts]
    assert "50.0\n1.111×" in texts and len([text for text in texts if text]) == 4
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.2", "0.4", "0.6"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0.3", "0.1"]
    assert ax.get_title() == "gsm8k, entmtp_tau (replay, calib split)"
