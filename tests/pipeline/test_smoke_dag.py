"""The main job, end to end, on a two-layer random model."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from entmtp.evaluation.schema import check_schema

from .conftest import ROOT, snakemake

POLICIES = ["ar", "medusa", "hydra", "entmtp_star", "entmtp_ladder", "entmtp_tau", "entmtp_tau_medusa", "marginal",
            "cost_aware", "adaptive", "bandit"]  # fmt: skip


def test_products_exist(smoke):
    for name in ("summary.json", "report.html", "replay_generation.html", "config.yaml", "tables/speed.csv",
                 "tables/perplexity.md", "tables/trees.tex", "figures/speedup.png",
                 "figures/tree_choice.svg"):  # fmt: skip
        assert (smoke / "results" / name).stat().st_size > 0, name


def test_summary_holds_a_row_per_task_and_policy(smoke):
    summary = json.loads((smoke / "results/summary.json").read_text())
    check_schema(summary, "summary")
    assert [(row["task"], row["policy"]) for row in summary["rows"]] == [
        (task, policy) for task in ("sharegpt", "litbench") for policy in POLICIES
    ]
    for row in summary["rows"]:
        assert row["prompts"] == 3
        assert row["tokens_per_s"] * row["seconds"] == row["new_tokens"] or abs(
            row["tokens_per_s"] * row["seconds"] / row["new_tokens"] - 1
        ) < 1e-6  # fmt: skip
    assert set(summary["provenance"]["prompts_sha256"]) == {"sharegpt", "litbench"}


def test_every_policy_is_lossless_and_replay_equals_live(smoke):
    for task in ("sharegpt", "litbench"):
        lossless = json.loads((smoke / f"results/smoke/checks/lossless/{task}.json").read_text())["policies"]
        assert {name: entry["verdict"] for name, entry in lossless.items()} == {
            name: "n/a" if name == "ar" else "exact" for name in POLICIES
        }
        replay = json.loads((smoke / f"results/smoke/checks/replay/{task}.json").read_text())["policies"]
        assert all(replay[name]["verdict"] == "equal" and replay[name]["steps"] for name in POLICIES if name != "ar")


def test_interrupted_bench_resumed_and_lost_nothing(smoke):
    """The first prompt was finished before Ctrl-C: its rows are older than the resumed run."""
    log = (smoke / "finished.log").read_text()
    frames = [pd.read_parquet(path) for path in sorted((smoke / "results/smoke/bench").glob("*.parquet"))]
    assert all(len(frame) == 3 * len(POLICIES) for frame in frames)
    timed_now = log.count("tokens/s so far") - log.count("[throughput")
    assert timed_now < 2 * 3 * len(POLICIES), "the resumed run timed every prompt again"
    kept = [json.loads(line) for line in (smoke / "kept.jsonl").read_text().splitlines()]
    rows = {(row["task"], row["policy"], row["prompt_id"]): row for frame in frames for row in frame.to_dict("records")}
    whole = Counter(row["prompt_id"] for row in kept)  # a prompt that was cut is timed again, for all policies
    kept = [row for row in kept if whole[row["prompt_id"]] == len(POLICIES)]
    assert len(kept) >= len(POLICIES)
    for row in kept:
        now = rows[row["task"], row["policy"], row["prompt_id"]]
        assert (now["decode_s"], list(now["tokens"])) == (row["decode_s"], row["tokens"])
    assert not list((smoke / "results/smoke/bench").glob("*.journal.jsonl"))


def test_a_bench_whose_end_was_never_noted_is_not_timed_again(smoke, tmp_path):
    """Killed after the job's last line and before Snakemake's own, an output counts as incomplete and is deleted."""
    folder, name = tmp_path / "copy", "results/smoke/bench/sharegpt.parquet"
    shutil.copytree(smoke, folder)
    seconds = [pd.read_parquet(folder / name)["decode_s"].tolist()]
    for _ in range(2):
        (folder / name).unlink()
        done = snakemake(folder, name)
        assert done.returncode == 0, done.stderr[-3000:]
        seconds.append(pd.read_parquet(folder / name)["decode_s"].tolist())
    assert seconds[0] != seconds[1] == seconds[2]


def test_second_run_has_nothing_to_do(smoke):
    done = snakemake(smoke)
    assert done.returncode == 0
    assert "Nothing to be done" in done.stderr + done.stdout


def test_plot_colour_reruns_no_decoding(smoke):
    done = snakemake(smoke, "--dry-run", overrides="plot.palette=deep")
    text = done.stdout + done.stderr
    assert "figures" in text
    for rule in ("bench", "traces", "throughput", "summary", "frontier"):
        assert f"rule {rule}:" not in text, rule


def test_a_changed_threshold_reruns_the_policy_and_the_bench(smoke):
    text = snakemake(smoke, "--dry-run", overrides="policy.tau_on=0.3").stdout
    assert "rule policy:" in text and "rule bench:" in text and "rule traces:" not in text and "rule bank:" not in text


def test_another_warm_up_reruns_the_bench_only(smoke):
    text = snakemake(smoke, "--dry-run", overrides="bench.warmup_tokens=5").stdout
    assert "rule bench:" in text and "rule traces:" not in text and "rule policy:" not in text


def test_resolved_config_is_beside_the_results(smoke):
    text = (smoke / "results/config.yaml").read_text()
    assert "experiment: smoke" in text and "entmtp_tau_medusa" in text


def test_scheduling_is_judged_by_replay_of_the_finished_run(smoke):
    done = snakemake(smoke, "scheduling")
    assert done.returncode == 0, done.stderr[-3000:]
    for rule in ("bench", "traces", "throughput"):
        assert f"rule {rule}:" not in done.stdout + done.stderr, rule
    record = json.loads((smoke / "results/smoke/scheduling.json").read_text())
    check_schema(record, "scheduling")
    judged = [name for name in POLICIES if "medusa" not in name]
    others = [name for name in POLICIES if "medusa" in name]  # on other heads: live figures alone
    assert [(row["task"], row["policy"]) for row in record["rows"]] == [
        (task, policy) for task in ("sharegpt", "litbench") for policy in [*judged, *others]
    ]
    assert {row["policy"] for row in record["rows"] if row["replayed_over_static"] is None} == set(others)
    assert {(row["fitted_on"], row["used_on"]) for row in record["transfer"]} == {
        (a, b) for a in ("sharegpt", "litbench") for b in ("sharegpt", "litbench")
    }
    assert (smoke / "results/smoke/scheduling/headroom.svg").stat().st_size > 0
    assert "# Scheduling" in (smoke / "results/smoke/scheduling/scheduling.md").read_text()


def test_the_vocabulary_of_heads_that_were_not_trained_here_is_judged_by_the_tasks_texts(smoke):
    done = snakemake(smoke, "results/smoke/heads/vocabulary.png")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rule texts:" not in done.stdout + done.stderr and "rule heads_text:" not in done.stdout + done.stderr
    last = json.loads((smoke / "results/smoke/heads/vocabulary.json").read_text())["rows"][-1]
    assert last["coverage"] == 1 and set(last["coverage_by_task"]) == {"sharegpt"}


def test_peers_take_turns_on_the_runs_prompts(smoke):
    command = [sys.executable, "-m", "entmtp.peers.bench", "experiment=smoke", "dtype=float32",
               "decoding.max_new_tokens=6", f"results={smoke / 'results'}",
               f"resources={ROOT / 'resources'}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=smoke)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((smoke / "results/peers.json").read_text())
    peers = ["entmtp plain", "entmtp best", "transformers eager", "transformers sdpa", "transformers prompt lookup"]
    assert [(row["task"], row["peer"]) for row in record["rows"]] == [
        (task, peer) for task in ("sharegpt", "litbench") for peer in peers
    ]
    # a random target comes from no GGUF, and llama.cpp is no requirement of ours
    assert set(record["absent"]) == {"llama.cpp", "llama.cpp Q4_1"}
    assert all(row["same_text"] == 1.0 for row in record["rows"])  # greedy float32: the same text from all of them
    assert all(row["best_over"]["ratio"] == 1.0 for row in record["rows"] if row["peer"] == "entmtp best")
    assert "| sharegpt | float32 | transformers eager |" in (smoke / "results/peers.md").read_text()


def test_tracking_wrote_offline_runs(smoke):
    record = json.loads((smoke / "results/smoke/tracking/sharegpt.json").read_text())
    assert record["mode"] == "offline" and len(record["runs"]) == len(POLICIES)


def test_no_absolute_path_of_this_machine_in_summary(smoke):
    text = (smoke / "results/summary.json").read_text().replace(str(ROOT / "resources"), "")
    for path in (ROOT, smoke, Path(sys.prefix)):
        assert str(path) not in text, path
