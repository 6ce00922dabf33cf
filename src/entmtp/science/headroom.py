"""What each policy takes of what there is: replayed and live speed, over the static optimum, against the oracle."""

import numpy as np
import pandas as pd

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.oracle import Oracle, oracle, share
from entmtp.calibration.replay import Trace
from entmtp.errors import EntmtpError
from entmtp.evaluation.stats import ratio_interval
from entmtp.evaluation.summary import rows_of_policy
from entmtp.policy.fit import replayed_speed, step_times
from entmtp.tree.bank import Bank
from entmtp.tree.topology import Tree

STAR = "entmtp_star"
REFERENCES = ("ar", STAR)  # what others are compared with


Timed = dict[Tree, float]  # measured milliseconds of a step, of the trees that the throughput stage timed


def timed_steps(throughput: dict) -> Timed:
    """Of `throughput.json`: whether a tree then came into the bank or not."""
    return {Tree.of(row["paths"]): row["measured_step_ms"] for row in throughput["trees"] if row["measured_step_ms"]}


def step_prices(bank: Bank, latency: LatencyTable, trees: list[Tree], timed: Timed) -> list[float]:
    """Milliseconds of a step with each tree: as measured where it was, else the latency table's on the bank's clock."""
    return [timed.get(tree, ms) for tree, ms in zip(trees, step_times(bank, latency, trees, None), strict=True)]


def bounds(bank: Bank, frontier: list[Tree], trace: Trace, latency: LatencyTable, timed: Timed) -> dict[str, Oracle]:
    """The oracle over the bank's trees (and none), and over every tree that the search found."""
    sets = {"bank": [Tree(()), *(entry.tree for entry in bank.trees if entry.tree.num_nodes)],
            "frontier": [Tree(()), *frontier]}  # fmt: skip
    return {name: oracle(trace, trees, step_prices(bank, latency, trees, timed)) for name, trees in sets.items()}


def headroom_rows(
    task: str,
    fitted: dict[str, dict],
    bank: Bank,
    frontier: list[Tree],
    trace: Trace,
    latency: LatencyTable,
    bench: pd.DataFrame,
    options: dict,
    timed: Timed,
) -> list[dict]:
    """A row per policy on the test texts. `fitted`: the task's policies that draft with the bank's heads, and plain
    decoding; `bench`: the task's timed rows; `options`: bootstrap, seed.

    Live speeds count decoding seconds without the prefill, which no scheduler touches. `over_static` is live, against
    the static optimum on the same prompts; `captured` is the share of the bank's oracle headroom by replay. The static
    optimum was chosen on the calibration texts; `hindsight_headroom` is what the single tree that is fastest on these
    very test texts, of all that the search found, would gain over it.
    """
    if STAR not in fitted:
        raise EntmtpError(f"scheduling needs the policy {STAR} among the run's policies")
    bound = bounds(bank, frontier, trace, latency, timed)
    static = replayed_speed(fitted[STAR], bank, trace, latency)
    reference = rows_of_policy(bench, task, STAR)
    rows = []
    for name, policy in fitted.items():
        own = rows_of_policy(bench, task, name)
        speed = replayed_speed(policy, bank, trace, latency)
        steps = int(own["step_accepted"].map(len).sum())
        over = ratio_interval(own["new_tokens"], own["decode_s"], reference["new_tokens"], reference["decode_s"],
                              options["bootstrap"], options["seed"])  # fmt: skip
        rows.append(
            {
                "task": task,
                "policy": name,
                "live_tokens_per_s": float((own["new_tokens"] - 1).sum() / own["decode_s"].sum()),
                "replayed_tokens_per_s": speed,
                "over_static": over,
                "replayed_over_static": speed / static,
                "captured": share(speed, static, bound["bank"].tokens_per_s),
                "oracle_headroom": bound["bank"].tokens_per_s / static - 1,
                "frontier_headroom": bound["frontier"].tokens_per_s / static - 1,
                "hindsight_headroom": bound["frontier"].static_tokens_per_s / static - 1,
                "scheduler_ms": 1000 * float(own["scheduler_s"].sum()) / steps,
                "switch_ms": 1000 * float(own["switch_s"].sum()) / steps,
            }
        )
    return rows


def plain_clock(rows: list[dict]) -> dict[str, float]:
    """Live over replayed speed of plain decoding, per task: how fast the machine was during the timed runs."""
    return {row["task"]: row["live_tokens_per_s"] / row["replayed_tokens_per_s"] for row in rows
            if row["policy"] == "ar"}  # fmt: skip


def prediction_errors(rows: list[dict]) -> dict:
    """How far replayed speeds are from live ones, relative to plain decoding's own clock error, per task × policy."""
    plain = plain_clock(rows)
    errors = [
        {"task": row["task"], "policy": row["policy"],
         "error": row["replayed_tokens_per_s"] * plain.get(row["task"], 1.0) / row["live_tokens_per_s"] - 1}
        for row in rows
    ]  # fmt: skip
    size = np.abs([entry["error"] for entry in errors if entry["policy"] != "ar"])
    return {"rows": errors, "within_3_percent": float((size <= 0.03).mean()), "median": float(np.median(size)),
            "largest": float(size.max())}  # fmt: skip
