"""`summary.json`: what the tables show, one row per task × policy, with verdicts and provenance."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from entmtp.config import BenchConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.evaluation.stats import ratio_interval, total_over_total
from entmtp.io import write_json

REFERENCES = {"over_ar": "ar", "over_hydra": "hydra", "over_medusa": "medusa"}


def summarise(
    bench: pd.DataFrame,
    lossless: dict[str, dict],
    perplexity: dict[str, dict],
    bench_config: BenchConfig,
    policy_order: list[str],
    seed: int = 0,
) -> list[dict]:
    """Rows of the summary, by task (in the order of `bench`) and policy (in `policy_order`).

    `bench` holds a row per task × policy × prompt; `lossless` and `perplexity` map a task to its check's JSON.
    Counts (new_tokens, steps, accepted) are totals over prompts and every rate is a ratio of totals; seconds are
    prefill + decode. num_accepted = accepted / steps, root excluded; accept_length = (accepted + steps) / steps, the
    tokens that a step commits, root included. (new_tokens can be one larger a prompt: a text's last root may need no
    step.) over_* compare with the reference policy on the same prompts, null where the run lacks it. Raises
    EntmtpError for a missing or doubled prompt, a missing policy or a failed lossless check.
    """
    rows = []
    for task, of_task in bench.groupby("task", sort=False):
        frames = {policy: rows_of_policy(of_task, task, policy) for policy in policy_order}
        for policy, frame in frames.items():
            row = {"task": task, "policy": policy, **_counts(frame, bench_config.bootstrap, seed)}
            for key, reference in REFERENCES.items():
                row[key] = None
                if reference in frames:
                    row[key] = _over(frame, frames[reference], bench_config.bootstrap, seed)
            row["lossless"] = _verdict(lossless, task, policy)
            row.update(_perplexity(perplexity.get(task, {}).get("policies", {}), policy))
            rows.append(row)
    return rows


def rows_of_policy(frame: pd.DataFrame, task: str, policy: str) -> pd.DataFrame:
    """Rows of one task × policy, one a prompt, in prompt order."""
    rows = frame[frame["policy"] == policy].sort_values("prompt_id").reset_index(drop=True)
    if rows.empty:
        raise EntmtpError(f"bench of {task}: no rows of policy '{policy}'")
    if rows["prompt_id"].duplicated().any():
        raise EntmtpError(f"bench of {task}: policy '{policy}' has a prompt twice")
    for column in ("heads", "dtype", "mode"):
        if rows[column].nunique(dropna=False) != 1:
            raise EntmtpError(f"bench of {task}: policy '{policy}' mixes values of {column}")
    return rows


def _seconds(frame: pd.DataFrame) -> np.ndarray:
    return (frame["prefill_s"] + frame["decode_s"]).to_numpy(float)


def _counts(frame: pd.DataFrame, resamples: int, seed: int) -> dict[str, Any]:
    steps = frame["step_accepted"].map(len).to_numpy()
    accepted = frame["step_accepted"].map(sum).to_numpy()
    tokens, seconds = int(frame["new_tokens"].sum()), float(_seconds(frame).sum())
    if not steps.sum() or seconds <= 0:
        raise EntmtpError(f"bench of {frame['task'][0]}: policy '{frame['policy'][0]}' has no steps or no seconds")
    num_accepted, low, high = total_over_total(accepted, steps, resamples, seed)
    nodes, uses = np.unique(np.concatenate([np.asarray(row) for row in frame["step_nodes"]]), return_counts=True)
    switches = sum(int((np.diff(np.asarray(row)) != 0).sum()) for row in frame["step_tree"])
    heads = frame["heads"][0]
    return {
        "heads": None if pd.isna(heads) else str(heads),
        "dtype": str(frame["dtype"][0]),
        "prompts": len(frame),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": int(steps.sum()),
        "accepted": int(accepted.sum()),
        "num_accepted": num_accepted,
        "num_accepted_interval": {"low": low, "high": high},
        "accept_length": num_accepted + 1,
        "scheduler_ms": 1000 * float(frame["scheduler_s"].sum()) / int(steps.sum()),
        "switch_ms": 1000 * float(frame["switch_s"].sum()) / int(steps.sum()),
        "trees": {str(int(size)): float(use / uses.sum()) for size, use in zip(nodes, uses)},
        "switches": switches / int(steps.sum()),
    }


def _over(frame: pd.DataFrame, reference: pd.DataFrame, resamples: int, seed: int) -> dict[str, float]:
    if list(frame["prompt_id"]) != list(reference["prompt_id"]):
        raise EntmtpError(
            f"bench of {frame['task'][0]}: '{frame['policy'][0]}' and '{reference['policy'][0]}' ran on other prompts"
        )
    return ratio_interval(
        frame["new_tokens"], _seconds(frame), reference["new_tokens"], _seconds(reference), resamples, seed
    )


def _verdict(lossless: dict[str, dict], task: str, policy: str) -> str:
    found = lossless.get(task, {}).get("policies", {}).get(policy, {"verdict": "n/a"} if policy == "ar" else None)
    if found is None:
        raise EntmtpError(f"lossless check of {task}: no verdict for policy '{policy}'")
    if found["verdict"] == "fail":
        raise EntmtpError(f"lossless check of {task}: policy '{policy}' failed; a summary would hide it")
    return found["verdict"]


def _perplexity(policies: dict[str, dict], policy: str) -> dict[str, float | None]:
    """Perplexity of a policy's texts under the target, and its difference to plain decoding's in nats per token."""
    own, plain = policies.get(policy), policies.get("ar")
    if own is None or not own["tokens"]:
        return {"ppl": None, "delta_nats": None}
    nats = own["nll"] / own["tokens"]
    delta = nats - plain["nll"] / plain["tokens"] if plain and plain["tokens"] else None
    return {"ppl": math.exp(nats), "delta_nats": delta}


def build_summary(
    rows: list[dict], lossless: dict[str, dict], replay: dict[str, dict], provenance: dict[str, Any]
) -> dict[str, Any]:
    """{"rows", "checks": {"lossless" | "replay": {task: {policy: verdict and counts}}}, "provenance"}."""
    checks = {
        "lossless": {
            task: {
                policy: {
                    "verdict": found["verdict"],
                    "prompts": found.get("prompts", 0),
                    "differences": len(found.get("differences", [])),
                }
                for policy, found in check["policies"].items()
            }
            for task, check in lossless.items()
        },
        "replay": {
            task: {
                policy: {"verdict": found["verdict"], "steps": found.get("steps", 0)}
                for policy, found in check["policies"].items()
            }
            for task, check in replay.items()
        },
    }
    return {"rows": rows, "checks": checks, "provenance": provenance}


def write_summary(path: str | Path, summary: dict[str, Any]) -> None:
    """Validate against workflow/schemas/summary.schema.json and write. Raises EntmtpError that names the place."""
    check_schema(summary, "summary")
    write_json(path, summary)
