"""The verdicts that a run stands on: same tokens as plain decoding, same steps as replay."""

import torch

from entmtp.calibration.growth import decision_margin
from entmtp.calibration.replay import Trace, margin_at, replay_policy
from entmtp.decoding.engine import make_chooser
from entmtp.decoding.sampling import Chooser
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import Policy

# Signals and draft logits closer than this to their rival are numerical ties: batched and single evaluations of the
# same float32 value differ by about 1e-5.
TIE_GAP = 1e-3


@torch.inference_mode()
def choice_margin(target, cache, prompt: list[int], prefix: list[int], expected: int, got: int, chooser: Chooser):
    """Score of `expected` minus score of `got` as the token after prompt + prefix, by one plain forward."""
    cache.reset()
    hidden = target.prefill(prompt + prefix, cache)[-1:]
    scores = chooser.scores(target.model.logits(hidden), [len(prompt) + len(prefix)])[0].float()
    return float(scores[expected] - scores[got])


def lossless_verdicts(target, cache, bench: list[dict], prompts: list[dict], decoding, tie_margin: float) -> dict:
    """Per policy: exact, tie (all first differences are numerical ties), lossy (typical acceptance), n/a (ar) or fail.

    `differences` has one entry a prompt at most: position, margin between the two tokens, the tokens themselves. A
    text that merely ends earlier or later differs too (its margin is infinite, so it fails).
    """
    by_id = {prompt["id"]: prompt["token_ids"] for prompt in prompts}
    reference = {row["prompt_id"]: row["tokens"] for row in bench if row["kind"] == "ar"}
    policies: dict[str, dict] = {}
    for row in bench:
        entry = policies.setdefault(row["policy"], {"verdict": "n/a", "prompts": 0, "differences": []})
        entry["prompts"] += 1
        if row["kind"] == "ar":
            continue
        if entry["verdict"] == "n/a":
            entry["verdict"] = "lossy" if row["mode"] == "typical" else "exact"
        expected, got = list(reference[row["prompt_id"]]), list(row["tokens"])
        if expected == got:
            continue
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        difference = {"prompt_id": row["prompt_id"], "position": at, "margin": None, "expected": None, "got": None}
        if at is None:
            difference["position"] = min(len(expected), len(got))
        elif row["mode"] != "typical":
            prompt = by_id[row["prompt_id"]]
            chooser = make_chooser(target, decoding, row["prompt_id"])
            margin = choice_margin(target, cache, prompt, expected[:at], expected[at], got[at], chooser)
            difference |= {"margin": margin, "expected": int(expected[at]), "got": int(got[at])}
        entry["differences"].append(difference)
        if row["mode"] != "typical":
            tie = difference["margin"] is not None and abs(difference["margin"]) <= tie_margin
            entry["verdict"] = "fail" if not tie or entry["verdict"] == "fail" else "tie"
    return policies


def replay_verdict(trace: Trace, policy: Policy, rows: list[dict], tie_gap: float) -> dict:
    """Live steps of `rows` (one policy) against replay: equal, tie or fail, with the first difference of each prompt.

    A differing num_accepted is a numerical tie when a draft logit of the true token lies within `tie_gap` of a
    rival's somewhere on the path; a differing tree when the live signal is replay's and the decision lies within
    `tie_gap` of another tree (Policy.margin). Signals against thresholds, and probabilities of grown trees, are
    products of probabilities: there `tie_gap` is relative.
    """
    runs = {
        prompt.prompt_id: (prompt, steps)
        for prompt, steps in zip(trace.prompts, replay_policy(trace, policy), strict=True)
    }
    verdict, steps_seen, differences = "equal", 0, []
    for row in rows:
        prompt, replayed = runs[row["prompt_id"]]
        live = list(zip(row["step_tree"], row["step_accepted"], strict=True))
        steps_seen += len(live)
        expected = [(step.tree, step.accepted) for step in replayed]
        if live == expected:
            continue
        at = next((i for i, (a, b) in enumerate(zip(live, expected, strict=False)) if a != b), None)
        if at is None:
            verdict = "fail"
            differences.append({"prompt_id": row["prompt_id"], "step": min(len(live), len(expected)), "what": "count"})
            continue
        step = replayed[at]
        if isinstance(policy, GrowingPolicy):
            flat = int(trace.bounds[trace.prompts.index(prompt)]) + step.position
            what, distance = "grown tree", decision_margin(trace.growth, policy, flat)
            if live[at][0] == expected[at][0]:
                distance = min(distance, float(prompt.gaps[step.position].min()))
        elif live[at][0] != expected[at][0]:
            seen = policy.depth is not None  # without a signal there is nothing that rounds
            apart = abs(step.signal - row["step_signal"][at]) if seen else float("inf")
            what, distance = "tree", max(margin_at(prompt, policy, replayed, at), apart)
            distance /= max(step.signal, 1e-12) if policy.edges else 1.0
        else:
            depth = max(live[at][1], expected[at][1]) + 1
            distance = float(prompt.gaps[step.position, :depth].min())
            what = "num_accepted"
        tie = distance <= tie_gap
        verdict = "fail" if not tie or verdict == "fail" else "tie"
        differences.append({"prompt_id": row["prompt_id"], "step": at, "what": what, "distance": distance,
                            "live": list(live[at]), "replay": list(expected[at])})  # fmt: skip
    return {"verdict": verdict, "prompts": len(rows), "steps": steps_seen, "differences": differences}
