"""`python -m entmtp.sweep` as a user runs it, on a run folder that the stages made."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Files

import pandas as pd
import pytest
import yaml

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace
from entmtp.config import PolicyConfig, compose, to_plain
from entmtp.io import read_json, read_parquet
from entmtp.policy.fit import fit_policy
from entmtp.stages import offline
from entmtp.tree.bank import Bank

from .sweep_world import LATENCY


def sweep(world: Path, *arguments: str) -> subprocess.CompletedProcess:
    places = [f"results={world / 'results'}", f"resources={world / 'resources'}", "experiment=smoke"]
    command = [sys.executable, "-m", "entmtp.sweep", *arguments, *places]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=world)


def test_multirun_skips_impossible_pairs_and_gathers_rows(world):
    out = world / "grid"
    done = sweep(
        world, "-m", "task=sharegpt,litbench", "policy=entmtp_tau", "policy.tau_on=0.005,0.02",
        "policy.tau_off=0.001,0.01", f"hydra.sweep.dir={out}", "tracking=offline",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = pd.read_parquet(out / "rows.parquet")
    assert len(rows) == 8 == len(pd.read_csv(out / "rows.csv"))
    skipped = rows[rows["status"] == "skipped"]
    assert set(zip(skipped["tau_on"], skipped["tau_off"])) == {(0.005, 0.01)} and len(skipped) == 2
    assert all("tau_off=0.01 exceeds tau_on=0.005" in reason for reason in skipped["reason"])
    for path in (out / "heatmap_sharegpt.png", out / "heatmap_litbench.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list((world / "logs" / "wandb").glob("offline-run-*"))) == 8, "one W&B run a job"
    assert done.stdout.rstrip().endswith(f"rows: {out / 'rows.parquet'}")
    assert "6 rows, 2 skipped" in done.stdout and "over_star" in done.stdout

    fine = rows[rows["status"] == "ok"]
    assert (fine["accept_length"] == fine["num_accepted"] + 1).all()
    assert all(sum(shares) == pytest.approx(1) for shares in fine["shares"])
    assert (fine["over_star"] == fine["tokens_per_s"] / fine["star_tokens_per_s"]).all()
    assert (fine["tokens_per_s"] == 1000 * fine["tokens"] / fine["milliseconds"]).all()
    row = fine[(fine["task"] == "sharegpt") & (fine["tau_on"] == 0.02) & (fine["tau_off"] == 0.01)].iloc[0]
    assert row["tokens_per_s"] == pytest.approx(fitted(world, "sharegpt", tau_on=0.02, tau_off=0.01)), (
        "a sweep's row on the calibration split is what the pipeline's fit predicts"
    )


def fitted(world: Path, task: str, **thresholds: float) -> float:
    run = world / "results" / "smoke"
    trace = Trace.from_frame(read_parquet(run / "traces" / "hydra" / f"{task}.calib.parquet"))
    bank = Bank.load(run / "trees" / "hydra" / task / "bank.json")
    config = PolicyConfig(name="entmtp_tau", kind="tau", **thresholds)
    return fit_policy(config, bank, trace, LatencyTable.from_json(LATENCY))["calib_tokens_per_s"]


def test_joblib_launcher_and_open_thresholds(world):
    out = world / "joblib"
    done = sweep(
        world, "-m", "task=sharegpt", "policy=entmtp_tau,entmtp_star,ar", "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={out}", "tracking=disabled",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = pd.read_parquet(out / "rows.parquet").set_index("policy")
    assert list(rows.index) == ["entmtp_tau", "entmtp_star", "ar"]
    assert rows.loc["entmtp_tau", "tau_off"] <= rows.loc["entmtp_tau", "tau_on"], "fitted on the calibration split"
    assert rows.loc["entmtp_star", "over_star"] <= 1 and rows.loc["ar", "accept_length"] == 1


def test_parallel_replay_gives_the_same_rows(world):
    frames = []
    for name, launcher in (("serial", []), ("cores", ["hydra/launcher=cores", "hydra.launcher.n_jobs=2"])):
        done = sweep(
            world, "-m", "task=sharegpt", "policy=entmtp_tau", "policy.tau_on=0.005,0.02", "policy.tau_off=0.001",
            f"hydra.sweep.dir={world / name}", "tracking=disabled", *launcher,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        frames.append(pd.read_parquet(world / name / "rows.parquet"))
    pd.testing.assert_frame_equal(*(frame.drop(columns="overrides") for frame in frames))


def search(world: Path, name: str, *arguments: str) -> pd.DataFrame:
    done = sweep(
        world, "-m", "hydra/sweeper=tau", "task=sharegpt", "policy=entmtp_tau", "hydra.sweeper.n_trials=8",
        "policy.tau_on=tag(log, interval(0.001, 0.1))", "policy.tau_off=tag(log, interval(0.001, 0.1))",
        f"hydra.sweep.dir={world / name}", "tracking=disabled", *arguments,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "optimum of sharegpt, entmtp_tau: tau_on=" in done.stdout
    return pd.read_parquet(world / name / "rows.parquet")


def test_optuna_searches_continuous_thresholds(world):
    rows = search(world, "optuna")
    assert len(rows) == 8 and rows["tau_on"].nunique() == rows["tau_off"].nunique() == 8
    assert rows[["tau_on", "tau_off"]].stack().between(0.001, 0.1).all()
    assert (rows["status"] == "skipped").eq(rows["tau_off"] > rows["tau_on"]).all()
    found = yaml.safe_load((world / "optuna" / "optimization_results.yaml").read_text())
    best = rows.loc[rows["tokens_per_s"].idxmax()]
    assert found["best_value"] == best["tokens_per_s"]
    assert found["best_params"] == {"policy.tau_on": best["tau_on"], "policy.tau_off": best["tau_off"]}
    for row in rows[rows["status"] == "ok"].itertuples():
        assert row.tokens_per_s == pytest.approx(fitted(world, "sharegpt", tau_on=row.tau_on, tau_off=row.tau_off))
    assert (world / "optuna" / "heatmap_sharegpt.png").read_bytes().startswith(b"\x89PNG")

    # the first ten trials are draws of the seed alone, however many run at once
    again = search(world, "again", "hydra/launcher=cores", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=4")
    pd.testing.assert_frame_equal(again.drop(columns="overrides"), rows.drop(columns="overrides"))


def test_submitit_runs_jobs_in_processes_of_their_own(world):
    """As hydra/launcher=slurm does, but on this machine; on a real Slurm: `make test-slurm`."""
    pytest.importorskip("submitit")
    out = world / "submitit"
    launcher = ["hydra/launcher=submitit_local", f"hydra.sweep.dir={out}", "tracking=disabled"]
    done = sweep(world, "-m", "task=sharegpt", "policy=entmtp_star,ar", *launcher)
    assert done.returncode == 0, done.stderr
    assert list(pd.read_parquet(out / "rows.parquet")["policy"]) == ["entmtp_star", "ar"]
    done = sweep(world, "-m", "task=gsm8k", "policy=entmtp_star,ar", *launcher)
    assert done.returncode == 1
    assert "the pipeline has not made it for task 'gsm8k'" in done.stderr.rstrip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_every_kind_of_policy_can_be_swept(world):
    out = world / "kinds"
    done = sweep(
        world, "-m", "task=sharegpt", "policy=cost_aware,adaptive,bandit", f"hydra.sweep.dir={out}",
        "tracking=disabled",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = pd.read_parquet(out / "rows.parquet")
    assert list(rows["policy"]) == ["cost_aware", "adaptive", "bandit"]
    assert (rows["tokens_per_s"] > 0).all() and (rows["tokens"] == rows["tokens"][0]).all()
    assert all(sum(shares) == pytest.approx(1) for shares in rows["shares"])


def test_live_engine_measures(world):
    out = world / "live"
    done = sweep(
        world, "task=litbench", "policy=entmtp_tau", "policy.tau_on=0.02", "policy.tau_off=0.01", "sweep.engine=live",
        "sweep.prompts=2", "sweep.split=test", f"hydra.run.dir={out}", "tracking=disabled",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = read_json(out / "row.json")
    assert (row["engine"], row["split"], row["prompts"]) == ("live", "test", 2)
    assert row["tokens"] > 0 and row["milliseconds"] > 0 and row["star_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "task=sharegpt,nope"], "unknown task 'nope': choose one of arena_creative, arithmetic, "),
        (["task=sharegpt", "policy.tau_onn=1"], "config: Could not override 'policy.tau_onn'"),
        (["-m", "task=gsm8k", "policy.tau_on=0.2,0.3"], "the pipeline has not made it for task 'gsm8k'"),
        (["task=sharegpt", "sweep.split=test"], "run `snakemake --cores all --config experiment=smoke` first"),
        (["-m", "task=sharegpt", "hydra.sweep.dir=/dev/null/no"], "/dev/null/no: Not a directory"),
        (["-m", "hydra/launcher=nowhere"], "Could not find 'hydra/launcher/nowhere'"),
        (["-m", "hydra/sweeper=tau", "task=sharegpt,litbench"], "would let it take the fastest of them"),
        (["-m", "hydra/launcher=cores", "task=sharegpt", "sweep.engine=live"], "jobs side by side would slow"),
        (["task=sharegpt", "sweep.engine=fast"], "config key 'sweep.engine': 'fast' is not one of replay, live"),
    ],
)
def test_mistakes_are_one_line(world, arguments, message):
    place = "sweep" if "-m" in arguments else "run"
    elsewhere = any(argument.startswith("hydra.") for argument in arguments)
    out = [] if elsewhere else [f"hydra.{place}.dir={world / 'wrong'}"]
    done = sweep(world, *arguments, *out, "tracking=disabled")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert not (world / "wrong" / "rows.parquet").exists()


def test_composing_config_is_unaffected(world):
    assert "hydra" not in to_plain(compose([])) and json.dumps(to_plain(compose(["experiment=main"])))


def test_both_search_engines_grow_the_same_frontier(world, tmp_path):
    """`search.engine=rollout`, the paper's own procedure, by the stage; replay grows the same trees from the traces."""
    run, made = world / "results/smoke", {}
    config = to_plain(compose(["experiment=smoke", f"resources={world / 'resources'}"]))
    inp = Files(traces=run / "traces/hydra/sharegpt.calib.parquet", prompts=run / "prompts/sharegpt.jsonl",
                heads=run / "heads/hydra/config.json", target=world / "resources/targets/tiny/entmtp.json")  # fmt: skip
    for engine in ("replay", "rollout"):
        search = {**config["search"], "engine": engine, "rollout_prompts": 3}
        offline.frontier(inp, Files(frontier=tmp_path / f"{engine}.json"), {**config, "search": search})
        made[engine] = [tree["paths"] for tree in read_json(tmp_path / f"{engine}.json")["trees"]]
    assert made["replay"] == made["rollout"] and len(made["replay"]) > 3
