"""What draft heads are worth on a task: accepted tokens by tree size, hit rates per head, milliseconds to propose."""

import numpy as np
import torch

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace, self_rollout
from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.evaluation.checks import TIE_GAP, replay_verdict
from entmtp.evaluation.stats import total_over_total
from entmtp.policy.schedulers import Policy
from entmtp.timing import median_ms
from entmtp.tree.topology import Tree

SIZES = [4, 8, 16, 32, 64]
CONFIRMED = 16  # nodes of the tree that is run live as well


def best_trees(trees: list[Tree], calib: Trace) -> dict[int, Tree]:
    """For each size the tree of at most as many nodes with the largest accept length on the calibration texts."""
    lengths = {tree: self_rollout(calib, tree).accept_length for tree in trees}
    found = {}
    for size in SIZES:
        fitting = [tree for tree in trees if 0 < tree.num_nodes <= size]
        if fitting:
            found[size] = max(fitting, key=lambda tree: (lengths[tree], -tree.num_nodes))
    return found


def replayed(trace: Trace, tree: Tree) -> tuple[list[int], list[int]]:
    """Accepted tokens and steps of each prompt's own run: ([prompts], [prompts])."""
    runs = [self_rollout(Trace([prompt]), tree) for prompt in trace.prompts]
    return [run.accepted for run in runs], [run.steps for run in runs]


def hit_rates(trace: Trace) -> dict[str, list[float]]:
    """top-1 and top-5 of each head at all positions that have a token to draft, given the text so far."""
    rates: dict[str, list[float]] = {"top1": [], "top5": []}
    for d in range(trace.depth):
        ranks = np.concatenate([prompt.ranks[: max(0, len(prompt) - 1 - d), d] for prompt in trace.prompts])
        for key, k in (("top1", 1), ("top5", 5)):
            rates[key].append(float((ranks < k).mean()) if len(ranks) else 0.0)
    return rates


@torch.inference_mode()
def propose_ms(decoder: Decoder, tree: Tree, prompt: list[int], repeats: int) -> float:
    """Median milliseconds of a whole proposal after a prompt: the position's state (one committed token), all heads."""
    drafter, compiled = decoder.drafter, decoder.compile(tree)
    decoder.cache.reset()
    hidden = decoder.target.prefill(prompt, decoder.cache)

    def all_but_the_last() -> None:
        drafter.reset()
        if len(prompt) > 1:
            drafter.start(hidden[:-1], prompt[-1])

    def last() -> None:
        drafter.start(hidden[-1:], prompt[-1])
        drafter.fill(compiled).tolist()

    return median_ms(last, repeats, warmup=2, before=all_but_the_last)


def confirm_live(decoder: Decoder, tree: Tree, trace: Trace, prompts: list[dict], decoding: DecodingConfig) -> dict:
    """Decode `prompts` with the tree and compare each step's accepted tokens with the trace's. `prompts_that_differ`:
    by more than a numerical tie."""
    policy, rows = Policy("confirm", [tree]), []
    for prompt in prompts:
        steps = decoder.generate(prompt["token_ids"], policy, decoding, prompt["id"]).steps
        rows.append({"prompt_id": prompt["id"], "step_tree": [step.tree for step in steps],
                     "step_accepted": [step.accepted for step in steps],
                     "step_signal": [None] * len(steps)})  # fmt: skip
    accepted = [count for row in rows for count in row["step_accepted"]]
    differing = sum(replay_verdict(trace, policy, [row], TIE_GAP)["verdict"] == "fail" for row in rows)
    return {
        "prompts": len(prompts),
        "num_accepted": sum(accepted) / max(1, len(accepted)),
        "prompts_that_differ": differing,
    }


def evaluate_heads(
    decoder: Decoder,
    trees: list[Tree],
    calib: Trace,
    test: Trace,
    prompts: list[dict],
    latency: LatencyTable,
    decoding: DecodingConfig,
    options: dict,
) -> list[dict]:
    """A row per tree size: {size, nodes, prompts, positions, num_accepted, low, high, accept_length, top1, top5,
    propose_ms, step_ms, predicted_speedup, live}.

    Trees are chosen on the calibration texts and judged on the test texts. `options`: bootstrap, seed, live_prompts,
    repeats.
    """
    chosen, rates, rows = best_trees(trees, calib), hit_rates(test), []
    if not chosen:
        raise EntmtpError("heads evaluation: the search found no tree with nodes")
    median_prompt = sorted(prompts, key=lambda prompt: len(prompt["token_ids"]))[len(prompts) // 2]["token_ids"]
    for size, tree in chosen.items():
        accepted, steps = replayed(test, tree)
        value, low, high = total_over_total(accepted, steps, options["bootstrap"], options["seed"])
        milliseconds = latency.step(tree)
        live = None
        if size == CONFIRMED and options["live_prompts"] and decoding.mode != "typical":  # a typical text is the tree's
            live = confirm_live(decoder, tree, test, prompts[: options["live_prompts"]], decoding)
        rows.append(
            {
                "size": size,
                "nodes": tree.num_nodes,
                "prompts": len(test.prompts),
                "positions": int(test.bounds[-1]),
                "num_accepted": value,
                "low": low,
                "high": high,
                "accept_length": value + 1,
                **rates,
                "propose_ms": propose_ms(decoder, tree, median_prompt, options["repeats"]),
                "step_ms": milliseconds,
                "predicted_speedup": (value + 1) * latency.plain_ms / milliseconds,
                "live": live,
            }
        )
        print(f"heads: {size} nodes: num_accepted {value:.2f} [{low:.2f}, {high:.2f}]", flush=True)
    return rows
