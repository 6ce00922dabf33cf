"""Synthetic results in the contract's formats: two tasks, five policies, small enough to check by hand."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from entmtp.config import BenchConfig
from entmtp.evaluation.summary import build_summary, summarise

TASKS = ["humaneval", "litbench"]
POLICIES = ["ar", "medusa", "hydra", "entmtp_star", "entmtp_tau"]
HEADS = {"ar": None, "medusa": "medusa", "hydra": "hydra", "entmtp_star": "hydra", "entmtp_tau": "hydra"}
KINDS = {"ar": "ar", "medusa": "static", "hydra": "static", "entmtp_star": "star", "entmtp_tau": "tau"}
NODES = {"ar": [0], "medusa": [63], "hydra": [63], "entmtp_star": [4], "entmtp_tau": [4, 8]}
STEP_MS = {0: 30.0, 4: 33.0, 8: 38.0, 63: 95.0}
PATHS = {0: [], 4: [[0], [0, 0], [0, 0, 0], [1]], 8: [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]}
PROVENANCE = {"git": "abc123", "cpu": "test <cpu> & co", "threads": 2, "versions": {"torch": "0"}}
CONFIG = BenchConfig(bootstrap=300)


def bench_row(task: str, policy: str, prompt: int, order: int = 0) -> dict:
    """One generation of 24 to 40 tokens; a step accepts 0 to 2 tokens (plain decoding: none)."""
    rng = np.random.default_rng([len(task), POLICIES.index(policy), prompt])
    total, accepted, trees = 24 + 4 * (prompt % 5), [], []
    in_steps = total - prompt % 2  # every second text ends in a root that needs no step, as the decoder's may
    while sum(accepted) + len(accepted) < in_steps:
        left = in_steps - sum(accepted) - len(accepted) - 1
        accepted.append(0 if policy == "ar" else min(left, int(rng.integers(0, 3))))
        trees.append(int(rng.integers(0, len(NODES[policy]))))
    nodes = [NODES[policy][tree] for tree in trees]
    step_ms = [STEP_MS[size] * (1 + 0.02 * rng.random()) for size in nodes]
    scheduled = policy == "entmtp_tau"
    return {
        "task": task,
        "policy": policy,
        "heads": HEADS[policy],
        "kind": KINDS[policy],
        "mode": "greedy",
        "dtype": "float32",
        "prompt_id": f"{task}/{prompt}",
        "prompt_tokens": 50 + prompt,
        "new_tokens": total,
        "prefill_s": 0.1,
        "decode_s": sum(step_ms) / 1000,
        "scheduler_s": (2e-5 if scheduled else 1e-6) * len(nodes),
        "switch_s": (1e-5 if scheduled else 1e-6) * len(nodes),
        "tokens": list(range(total)),
        "step_tree": trees,
        "step_nodes": nodes,
        "step_accepted": accepted,
        "step_signal": [float(rng.random()) if scheduled else None for _ in nodes],
        "step_ms": step_ms,
        "order": order,
    }


def bench(task: str, policies: list[str] = POLICIES, prompts: int = 6) -> pd.DataFrame:
    return pd.DataFrame([bench_row(task, policy, i, j) for i in range(prompts) for j, policy in enumerate(policies)])


def lossless(task: str, policies: list[str] = POLICIES, **verdicts: str) -> dict:
    found = {
        policy: {
            "verdict": verdicts.get(policy, "n/a" if policy == "ar" else "exact"),
            "prompts": 6,
            "differences": [],
        }
        for policy in policies
    }
    return {"task": task, "dtype": "float32", "policies": found}


def replay(task: str, policies: list[str] = POLICIES) -> dict:
    return {"task": task, "policies": {policy: {"verdict": "equal", "steps": 90, "texts": 6} for policy in policies}}


def perplexity(task: str, policies: list[str] = POLICIES) -> dict:
    found = {policy: {"nll": 120.0 + i, "tokens": 192} for i, policy in enumerate(policies)}
    return {"task": task, "policies": found}


def summary(tasks: list[str] = TASKS, policies: list[str] = POLICIES, **verdicts: str) -> dict:
    checks = {task: lossless(task, policies, **verdicts) for task in tasks}
    frames = pd.concat([bench(task, policies) for task in tasks], ignore_index=True)
    rows = summarise(frames, checks, {task: perplexity(task, policies) for task in tasks}, CONFIG, policies)
    return build_summary(rows, checks, {task: replay(task, policies) for task in tasks}, PROVENANCE)


def recalibrated(task: str, heads: str) -> dict:
    trees = [
        {
            "paths": PATHS.get(n, []),
            "num_nodes": n,
            "depth": min(n, 3),
            "search_depth": depth,
            "first_score": 1.1 + 0.3 * np.log2(n + 1) + 0.02 * depth,
            "accept_length": 1.0 + 0.28 * np.log2(n + 1) + 0.02 * depth,
            "steps": 900,
            "tokens": 1800,
        }
        for depth in (1, 2, 3)
        for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    ]
    return {"task": task, "heads": heads, "trees": trees}


def throughput(task: str, heads: str) -> dict:
    trees = []
    for n in (0, 1, 2, 4, 8, 16, 32, 64):
        length, ms = 1.0 + 0.28 * np.log2(n + 1), 30 + 0.03 * n**2
        measured = 1000 * length / ms * 0.97 if n in (0, 2, 4, 8) else None
        trees.append(
            {
                "paths": PATHS.get(n, []),
                "num_nodes": n,
                "accept_length": length,
                "predicted_step_ms": ms,
                "predicted_tokens_per_s": 1000 * length / ms,
                "measured_tokens_per_s": measured,
            }
        )
    return {"task": task, "heads": heads, "trees": trees}


def bank(task: str, heads: str) -> dict:
    rows = {tree["num_nodes"]: tree for tree in throughput(task, heads)["trees"]}
    trees = [
        {
            "paths": PATHS[n],
            "num_nodes": n,
            "accept_length": rows[n]["accept_length"],
            "tokens_per_s": rows[n]["measured_tokens_per_s"],
        }
        for n in (0, 4, 8)
    ]
    return {"task": task, "heads": heads, "basis": "measured", "star": 1, "trees": trees}


def policy(name: str) -> dict:
    return {
        "policy": name,
        "kind": "tau",
        "depth": 2,
        "tau_on": 0.6,
        "tau_off": 0.3,
        "thresholds": [],
        "trees": [1, 2],
        "start": 0,
        "calib_tokens_per_s": 55.0,
        "star_tokens_per_s": 54.0,
    }


def latency() -> dict:
    rows = [1, 2, 4, 8, 16]
    return {
        "dtype": "float32",
        "threads": 2,
        "context": 256,
        "forward": {"tokens": [1, 2, 5, 9, 17, 33, 65], "ms": [30, 30.5, 31, 36, 46, 66, 128]},
        "propose": {"rows": rows, "ms": [[0.4 + 0.02 * d + 0.03 * n for n in rows] for d in range(4)]},
        "overhead_ms": 0.8,
    }


def trace(task: str, prompts: int = 5, positions: int = 40) -> pd.DataFrame:
    """Ranks are worse where the entropy is higher."""
    rng = np.random.default_rng(len(task))
    rows = []
    for prompt in range(prompts):
        for position in range(positions):
            entropy = float(rng.exponential(0.8))
            ranks = [int(rank) for rank in np.minimum(rng.poisson(entropy, 4), 16)]
            values = [float(value) for value in np.cumprod(rng.random(5))]
            rows.append([f"{task}/{prompt}", position, ranks, [0.5] * 4, values, entropy])
    return pd.DataFrame(rows, columns=["prompt_id", "position", "ranks", "gaps", "path_values", "entropy"])


def write_run(run: Path, tasks: list[str] = TASKS, policies: list[str] = POLICIES) -> None:
    """A whole run folder, summary.json excepted."""

    def write(path: str, value: dict) -> None:
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text(json.dumps(value))

    heads = sorted({HEADS[name] for name in policies if HEADS[name]})
    (run / "bench").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("experiment: synthetic\nnote: a < b & c\n")
    for task in tasks:
        bench(task, policies).to_parquet(run / "bench" / f"{task}.parquet", index=False)
        write(f"checks/lossless/{task}.json", lossless(task, policies))
        write(f"checks/replay/{task}.json", replay(task, policies))
        write(f"perplexity/{task}.json", perplexity(task, policies))
        for name in heads:
            write(f"trees/{name}/{task}/recalibrated.json", recalibrated(task, name))
            write(f"trees/{name}/{task}/throughput.json", throughput(task, name))
            write(f"trees/{name}/{task}/bank.json", bank(task, name))
            write(f"trees/{name}/{task}/policy/entmtp_tau.json", policy("entmtp_tau"))
            (run / "traces" / name).mkdir(parents=True, exist_ok=True)
            trace(task).to_parquet(run / "traces" / name / f"{task}.test.parquet", index=False)
    for name in heads:
        write(f"latency/{name}.json", latency())
