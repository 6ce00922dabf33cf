"""Throughput evaluation (paper stage 3): which trees are worth timing, and their live timing."""

import random

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace, self_rollout
from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Tree


def predict(trees: list[Tree], trace: Trace, latency: LatencyTable) -> list[dict]:
    """Replayed accept length and predicted throughput of every tree: rows of `throughput.json`."""
    rows = []
    for tree in trees:
        run = self_rollout(trace, tree)
        step_ms = latency.step(tree)
        rows.append(
            {
                "paths": [list(path) for path in tree.paths],
                "num_nodes": tree.num_nodes,
                "depth": tree.depth,
                "accept_length": run.accept_length,
                "predicted_step_ms": step_ms,
                "predicted_tokens_per_s": 1000 * run.accept_length / step_ms,
                "measured_tokens_per_s": None,
                "measured_step_ms": None,
                "measured_tokens": None,
                "measured_seconds": None,
            }
        )
    return rows


def choose_shortlist(rows: list[dict], count: int) -> list[int]:
    """Indices of the rows worth a live timing: predicted Pareto trees first, then the fastest of the others.

    One tree a size: neighbours of one size differ by less than timing noise.
    """
    by_speed = sorted(range(len(rows)), key=lambda i: -rows[i]["predicted_tokens_per_s"])
    best_of_size: dict[int, int] = {}
    for index in by_speed:
        if rows[index]["num_nodes"]:
            best_of_size.setdefault(rows[index]["num_nodes"], index)
    front, best = [], 0.0
    for size in sorted(best_of_size):
        speed = rows[best_of_size[size]]["predicted_tokens_per_s"]
        if speed > best:
            front.append(best_of_size[size])
            best = speed
    front = front[-count:]
    others = [best_of_size[rows[i]["num_nodes"]] for i in by_speed if rows[i]["num_nodes"]]
    for index in others:
        if len(front) >= count:
            break
        if index not in front:
            front.append(index)
    return sorted(front, key=lambda i: rows[i]["num_nodes"])


def measure(
    decoder: Decoder, rows: list[dict], chosen: list[int], prompts: list[dict], decoding: DecodingConfig, task: str,
    check: Trace | None = None,
) -> dict:  # fmt: skip
    """Time the chosen trees live, end to end, and plain decoding beside them: every prompt, trees in rotated order.

    Writes the measured columns into `rows`. With `check` (greedy or sampled float32), every live step is held
    against replay; returns {steps: compared steps, different: runs with a differing step}.
    """
    arms: list[int | None] = [None, *chosen]  # None: plain decoding
    totals = {arm: [0, 0.0, 0] for arm in arms}  # tokens, seconds, steps
    compared = {"steps": 0, "different": 0}
    decoder.plain(prompts[0]["token_ids"], decoding)  # warm-up
    for arm in chosen:
        _run(decoder, rows, arm, prompts[0], decoding)
    for number, prompt in enumerate(prompts):
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            run = _run(decoder, rows, arm, prompt, decoding)
            # decoding time only: prefill is the same for all trees and would drown small differences
            totals[arm][0] += len(run.tokens) - 1
            totals[arm][1] += run.decode_seconds
            totals[arm][2] += len(run.steps)
            if check is not None and arm is not None:
                same = _same_steps(check, Tree.of(rows[arm]["paths"]), prompt["id"], run)
                compared["steps"] += len(run.steps)
                compared["different"] += not same
        rate = sum(t for t, _, _ in totals.values()) / max(1e-9, sum(s for _, s, _ in totals.values()))
        print(f"throughput {task}: prompt {number + 1}/{len(prompts)}, {rate:.1f} tokens/s so far", flush=True)
    for arm, (tokens, seconds, steps) in totals.items():
        target = rows[arm] if arm is not None else _empty_row(rows)
        if steps == 0:
            raise EntmtpError(f"task {task}: the calibration texts are too short to time (they stop at once)")
        target |= {
            "measured_tokens_per_s": tokens / seconds,
            "measured_step_ms": 1000 * seconds / steps,
            "measured_tokens": tokens,
            "measured_seconds": seconds,
        }
    return compared


def _run(decoder: Decoder, rows: list[dict], arm: int | None, prompt: dict, decoding: DecodingConfig):
    if arm is None:
        return decoder.plain(prompt["token_ids"], decoding, prompt["id"])
    policy = Policy("static", [Tree.of(rows[arm]["paths"])])
    return decoder.generate(prompt["token_ids"], policy, decoding, prompt["id"])


def _empty_row(rows: list[dict]) -> dict:
    return next(row for row in rows if row["num_nodes"] == 0)


def _same_steps(trace: Trace, tree: Tree, prompt_id: str, run) -> bool:
    index = next(i for i, prompt in enumerate(trace.prompts) if prompt.prompt_id == prompt_id)
    accepted, i = trace.accepted(tree)[index], 0
    # a shorter budget than the trace's ends the live run early: its last step may be cut
    for step in run.steps[:-1]:
        if accepted[i] != step.accepted:
            return False
        i += step.accepted + 1
    return True


def timing_prompts(prompts: list[dict], count: int, seed: int) -> list[dict]:
    """A seeded sample of the calibration prompts."""
    return random.Random(seed).sample(prompts, min(count, len(prompts)))
