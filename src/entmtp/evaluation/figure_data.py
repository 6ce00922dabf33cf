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


def shown_tree(bank: dict) -> dict:
    """The best static tree of a bank, or its largest if the best is the empty tree, which accepts nothing anywhere."""
    star = bank["trees"][bank["star"]]
    return star if star["num_nodes"] else max(bank["trees"], key=lambda tree: tree["num_nodes"])


def accepted_by_entropy(
    trace: pd.DataFrame, paths: list[list[int]], bins: int = 8, resamples: int = 500
) -> pd.DataFrame:
    """Mean num_accepted of a static tree in quantile bins of the base entropy, over the positions of a trace.

    The last positions of a text are left out, where its end and not the heads limits what a step can accept.
    Returns a row per bin: entropy (mean, nats), num_accepted, low, high (95% bootstrap over prompts), positions.
    """
    from entmtp.calibration.replay import Trace  # imports torch, which no other figure needs
    from entmtp.tree.topology import Tree

    texts, tree = Trace.from_frame(trace), Tree.of(paths)
    frame = pd.concat(
        pd.DataFrame({"prompt": text.prompt_id, "entropy": text.entropy, "accepted": accepted}).head(
            -tree.depth or None
        )
        for text, accepted in zip(texts.prompts, texts.accepted(tree))
    )
    rows = []
    if len(frame):
        edges = np.unique(np.quantile(frame["entropy"], np.linspace(0, 1, bins + 1)))
        frame["bin"] = np.searchsorted(edges[1:-1], frame["entropy"], side="right")
        for _, in_bin in frame.groupby("bin"):
            by_prompt = in_bin.groupby("prompt")["accepted"].agg(["sum", "count"])
            mean, low, high = total_over_total(by_prompt["sum"], by_prompt["count"], resamples, 0)
            entropy = in_bin["entropy"].mean()
            rows.append({"entropy": entropy, "num_accepted": mean, "low": low, "high": high, "positions": len(in_bin)})
    return pd.DataFrame(rows, columns=["entropy", "num_accepted", "low", "high", "positions"])


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
        found = {"τ_on": policy["tau_on"], "τ_off": policy["tau_off"]}
    else:
        found = {f"threshold {i}": value for i, value in enumerate(policy["thresholds"] or [], 1)}
    # a bank of one tree leaves nothing to fit
    return {name: value for name, value in found.items() if value is not None}


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
