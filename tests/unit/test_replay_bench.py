"""The benchmark of replay on a small run: its sweep is the policy's own, its stages are the pipeline's."""

import numpy as np
import pytest
from test_fit import TREES, make_bank, make_trace

from entmtp import replay_bench
from entmtp.calibration.replay import replay_uses
from entmtp.config import compose
from entmtp.errors import EntmtpError
from entmtp.io import read_json, write_json, write_parquet
from entmtp.policy.schedulers import TauPolicy
from entmtp.tree.bank import Bank, BankTree

LATENCY = {
    "forward": {"tokens": [1, 65], "ms": [10.0, 60.0]}, "propose": {"rows": [1, 16], "ms": [[0.5, 1.0]] * 4},
    "overhead_ms": 0.2, "plain_ms": 10.0, "arch": "hydra", "signal_ms": 0.1, "grow_ms": 0.1,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, traced, trees):
    case, kind = traced("hydra"), "hydra"
    folder = tmp_path / "results" / "smoke"
    write_parquet(folder / "traces" / kind / "sharegpt.calib.parquet", case.frame)
    write_json(folder / "latency" / f"{kind}.json", LATENCY)
    entries = [BankTree(trees[name], 1.1, speed, ms) for name, speed, ms in
               [("empty", 100.0, 10.0), ("chain_4", 110.0, 12.0), ("full", 90.0, 14.0)]]  # fmt: skip
    Bank("sharegpt", kind, "measured", entries).save(folder / "trees" / kind / "sharegpt" / "bank.json")
    return [f"results={tmp_path / 'results'}", "experiment=smoke", "tasks=[sharegpt]"]


def test_four_hundred_pairs_never_cross():
    signal = make_trace().path_values(1)
    pairs = replay_bench.threshold_pairs(signal)
    assert pairs.shape == (400, 2) and (pairs[:, 1] <= pairs[:, 0]).all()
    assert len({tuple(pair) for pair in pairs.tolist()}) == 400


def test_the_sweep_counts_the_policys_own_steps():
    trace, star = make_trace(), make_bank().star
    signal, lengths = trace.path_values(2), trace.lengths(TREES)
    pairs = replay_bench.threshold_pairs(signal)[::57]
    uses = replay_bench._swept(lengths, signal, trace.bounds, pairs, star)
    for (on, off), row in zip(pairs, uses, strict=True):
        assert row.tolist() == replay_uses(trace, TauPolicy("t", TREES, star, 2, on, off)).tolist()


def test_a_runs_replay_is_measured_and_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replay_bench, "LEAST", 0.01)
    replay_bench.main(run)
    (row,) = read_json(tmp_path / "results" / "replay.json")["rows"]
    assert row["task"] == "sharegpt" and row["pairs"] == 400 and row["steps_per_s"] > 0 and row["stages_s"] > 0
    assert 1 <= row["within_1_percent"] <= 400 and row["tau_off"] <= row["tau_on"]
    text = (tmp_path / "results" / "replay.md").read_text()
    assert text in capsys.readouterr().out and "| sharegpt |" in text and "| all |" in text


def test_the_stages_choose_trees_as_the_pipeline_does(run, tmp_path):
    from entmtp.calibration.latency_table import LatencyTable

    config = compose(run)
    path = tmp_path / "results/smoke/traces/hydra/sharegpt.calib.parquet"
    chosen = replay_bench.three_stages(config, path, LatencyTable.from_json(LATENCY))
    assert len(chosen) == len(set(chosen)) == config.bank.shortlist
    assert np.array(chosen).min() > 0  # the empty tree is always timed, as plain decoding


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EntmtpError, match=r"bank\.json is missing: finish the run first"):
        replay_bench.main([f"results={tmp_path}", "experiment=smoke", "tasks=[sharegpt]"])
    assert list(tmp_path.iterdir()) == []
