"""What each policy takes of what there is: replayed and live speed, over the static optimum, against the oracle."""

import numpy as np
import pandas as pd

from entmtp.errors import EntmtpError
from entmtp.evaluation.stats import captured_share, ratio_interval
from entmtp.evaluation.summary import rows_of_policy
from entmtp.science.prices import Texts
from entmtp.tree.topology import Tree

STAR = "entmtp_star"
REFERENCES = ("ar", STAR)  # what others are compared with


def headroom_rows(
    task: str, fitted: dict[str, dict], texts: Texts, frontier: list[Tree], bench: pd.DataFrame, options: dict
) -> list[dict]:  # fmt: skip
    """A row per policy on the test texts. `fitted`: the task's policies that draft with the bank's heads, and plain
    decoding; `bench`: the task's timed rows, whose other policies get live figures alone; `options`: bootstrap, seed.

    Live speeds count decoding seconds without the prefill, which no scheduler touches. `over_static` is live, against
    the static optimum on the same prompts; `captured` is the share of the bank's oracle headroom by replay. The static
    optimum was chosen on the calibration texts; `hindsight_headroom` is what the single tree that is fastest on these
    very test texts, of all that the search found, would gain over it. `prompts` holds what the intervals are made of.
    """
    if STAR not in fitted:
        raise EntmtpError(f"scheduling needs the policy {STAR} among the run's policies")
    draws = options["bootstrap"], options["seed"]
    entries = [entry.tree for entry in texts.each[0].bank.trees]
    static, tokens = texts.milliseconds(fitted[STAR]), texts.tokens
    bank = texts.oracle([Tree(()), *(tree for tree in entries if tree.num_nodes)])
    everything = [Tree(()), *frontier]
    hindsight = texts.statics(everything)
    bounds = {"oracle_headroom": bank, "frontier_headroom": texts.oracle(everything),
              "hindsight_headroom": hindsight[hindsight.sum(axis=1).argmin()]}  # fmt: skip
    gains = {name: _gain(tokens, ms, static, draws) for name, ms in bounds.items()}
    reference = rows_of_policy(bench, task, STAR)
    rows = []
    for name in dict.fromkeys([*fitted, *bench["policy"]]):
        own = rows_of_policy(bench, task, name)
        steps = int(own["step_accepted"].map(len).sum())
        replayed = _replayed(fitted.get(name), texts, static, bank, draws)
        rows.append(
            {
                "task": task,
                "policy": name,
                "live_tokens_per_s": float((own["new_tokens"] - 1).sum() / own["decode_s"].sum()),
                "over_static": ratio_interval(own["new_tokens"], own["decode_s"], reference["new_tokens"],
                                              reference["decode_s"], *draws),
                **replayed,
                **gains,
                "scheduler_ms": 1000 * float(own["scheduler_s"].sum()) / steps,
                "switch_ms": 1000 * float(own["switch_s"].sum()) / steps,
            }
        )  # fmt: skip
        rows[-1]["prompts"]["new_tokens"] = own["new_tokens"].tolist()
        rows[-1]["prompts"]["decode_s"] = own["decode_s"].tolist()
    return rows


def _gain(tokens: np.ndarray, ms: np.ndarray, static: np.ndarray, draws: tuple[int, int]) -> dict[str, float]:
    """{"gain", "low", "high"}: 0.1 is a tenth faster than the static optimum."""
    found = ratio_interval(tokens, ms, tokens, static, *draws)
    return {"gain": found["ratio"] - 1, "low": found["low"] - 1, "high": found["high"] - 1}


def _replayed(fitted: dict | None, texts: Texts, static: np.ndarray, bank: np.ndarray, draws: tuple[int, int]) -> dict:
    """Columns by replay; empty ones for a policy of other heads than the bank's (`fitted` None)."""
    if fitted is None:
        return {"replayed_tokens_per_s": None, "replayed_over_static": None, "calib_over_static": None,
                "captured": None, "prompts": {}}  # fmt: skip
    ms, tokens = texts.milliseconds(fitted), texts.tokens
    on_calib = fitted["calib_tokens_per_s"] / fitted["star_tokens_per_s"] if "star_tokens_per_s" in fitted else None
    return {
        "replayed_tokens_per_s": float(1000 * tokens.sum() / ms.sum()),
        "replayed_over_static": ratio_interval(tokens, ms, tokens, static, *draws),
        "calib_over_static": on_calib,
        "captured": captured_share(ms, static, bank, *draws),
        "prompts": {"tokens": tokens.tolist(), "replayed_ms": ms.tolist(), "static_ms": static.tolist()},
    }


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
        for row in rows if row["replayed_tokens_per_s"] is not None
    ]  # fmt: skip
    size = np.abs([entry["error"] for entry in errors if entry["policy"] != "ar"])
    return {"rows": errors, "within_3_percent": float((size <= 0.03).mean()), "median": float(np.median(size)),
            "largest": float(size.max())}  # fmt: skip
