"""What the figures show, read from a run folder `results/<experiment>`; small computations on it."""

from pathlib import Path

import numpy as np
import pandas as pd

from entmtp.evaluation.stats import total_over_total
from entmtp.io import read_json, read_parquet


def read_bench(run: str | Path, tasks: list[str]) -> pd.DataFrame:
    """Timed rows of all tasks, one per task × policy × prompt."""
    return pd.concat([read_parquet(Path(run) / "bench" / f"{task}.parquet") for task in tasks], ignore_index=True)


def read_checks(run: str | Path, kind: str, tasks: list[str]) -> dict[str, dict]:
    """{task: JSON} of `checks/lossless`, `checks/replay` or `perplexity`."""
    return {task: read_json(Path(run) / kind / f"{task}.json") for task in tasks}


def read_trees(run: str | Path, heads: list[str], tasks: list[str], file: str) -> dict[tuple[str, str], dict]:
    """{(heads, task): JSON} of `trees/<heads>/<task>/<file>`; a pair that the run did not calibrate is left out."""
    paths = {(name, task): Path(run) / "trees" / name / task / file for name in heads for task in tasks}
    return {key: read_json(path) for key, path in paths.items() if path.exists()}


def accepted_on_trace(paths: list[list[int]], ranks: np.ndarray) -> np.ndarray:
    """num_accepted of a static tree at every position: the longest prefix of its ranks that is a path (DESIGN 2).

    `ranks` int [positions, D]; returns int [positions]. The tree must be prefix-closed.
    """
    accepted = np.zeros(len(ranks), dtype=int)
    alive = np.ones(len(ranks), dtype=bool)
    for depth in range(1, 1 + min(max((len(path) for path in paths), default=0), ranks.shape[1])):
        of_depth = [path for path in paths if len(path) == depth]
        # [positions, paths of this depth]: do all of the first `depth` ranks agree with the path?
        alive = alive & (ranks[:, None, :depth] == np.asarray(of_depth)[None]).all(-1).any(1)
        accepted += alive
    return accepted


def shown_tree(bank: dict) -> dict:
    """The best static tree of a bank, or its largest if the best is the empty tree, which accepts nothing anywhere."""
    star = bank["trees"][bank["star"]]
    return star if star["num_nodes"] else max(bank["trees"], key=lambda tree: tree["num_nodes"])


def accepted_by_entropy(trace: pd.DataFrame, paths: list[list[int]], bins: int = 8, resamples: int = 500) -> pd.DataFrame:
    """Mean num_accepted in quantile bins of the base entropy, over all positions of a trace.

    Returns a row per bin: entropy (mean, nats), num_accepted, low, high (95% bootstrap over prompts), positions.
    """
    accepted = accepted_on_trace(paths, np.stack(trace["ranks"].to_list()).astype(int))
    frame = pd.DataFrame({"prompt": trace["prompt_id"], "entropy": trace["entropy"], "accepted": accepted})
    edges = np.unique(np.quantile(frame["entropy"], np.linspace(0, 1, bins + 1)))
    frame["bin"] = np.clip(np.searchsorted(edges, frame["entropy"], side="right") - 1, 0, max(len(edges) - 2, 0))
    rows = []
    for _, in_bin in frame.groupby("bin"):
        by_prompt = in_bin.groupby("prompt")["accepted"].agg(["sum", "count"])
        mean, low, high = total_over_total(by_prompt["sum"], by_prompt["count"], resamples, 0)
        entropy = in_bin["entropy"].mean()
        rows.append({"entropy": entropy, "num_accepted": mean, "low": low, "high": high, "positions": len(in_bin)})
    return pd.DataFrame(rows)


def read_accepted_by_entropy(
    run: str | Path, heads: list[str], tasks: list[str], split: str
) -> dict[tuple[str, str], tuple[int, pd.DataFrame]]:
    """{(heads, task): (nodes of the tree shown, its `accepted_by_entropy`)}."""
    found = {}
    for (name, task), bank in read_trees(run, heads, tasks, "bank.json").items():
        tree = shown_tree(bank)
        trace = read_parquet(Path(run) / "traces" / name / f"{task}.{split}.parquet")
        found[name, task] = tree["num_nodes"], accepted_by_entropy(trace, tree["paths"])
    return found


def pick_generation(bench: pd.DataFrame) -> pd.Series:
    """The row whose tree choice is shown: of the first scheduler found (tau, then ladder, then any that drafts), the
    prompt with most switches."""
    for kind in ("tau", "ladder", None):
        rows = bench[bench["kind"] == kind] if kind else bench[bench["kind"] != "ar"]
        if len(rows):
            break
    else:
        rows = bench
    rows = rows[rows["policy"] == rows["policy"].iloc[0]]
    switches = [int((np.diff(np.asarray(row)) != 0).sum()) for row in rows["step_tree"]]
    return rows.iloc[int(np.argmax(switches))]


def read_thresholds(run: str | Path, row: pd.Series) -> dict[str, float]:
    """Named thresholds that the policy of a bench row compares its signal with; empty for one without."""
    if row["kind"] not in ("tau", "ladder"):
        return {}
    policy = read_json(Path(run) / "trees" / row["heads"] / row["task"] / "policy" / f"{row['policy']}.json")
    if row["kind"] == "tau":
        return {"τ_on": policy["tau_on"], "τ_off": policy["tau_off"]}
    return {f"threshold {i}": value for i, value in enumerate(policy["thresholds"], 1)}


def bench_step_latency(bench: pd.DataFrame) -> pd.DataFrame:
    """Median step time in the bench by tree size: heads, nodes, ms, steps. Plain decoding counts for no heads."""
    rows = bench[bench["kind"] != "ar"]
    steps = pd.DataFrame(
        {
            "heads": np.repeat(rows["heads"].to_numpy(), rows["step_ms"].map(len)),
            "nodes": np.concatenate([[], *rows["step_nodes"]]),
            "ms": np.concatenate([[], *rows["step_ms"]]),
        }
    )
    return steps.groupby(["heads", "nodes"], as_index=False)["ms"].agg(ms="median", steps="count")
