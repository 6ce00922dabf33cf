"""Exact replay: what any tree and any policy would do on a known text, from its rank trace alone.

No model runs here, only arithmetic. A step at position i (root = text token i) is taken while i < N - 1 (the text's
last token needs no forward), accepts what the tree accepts and moves i on by num_accepted + 1; so does the live
decoder, step for step.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from entmtp.calibration import kernels
from entmtp.calibration.growth import GrowthTrace, replay_growth
from entmtp.errors import EntmtpError
from entmtp.policy.cost_aware import AdaptivePolicy, CostAwarePolicy, Curve, read_signal
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.topology import Tree


@dataclass
class PromptTrace:
    """One text: ranks [N, D], path_values [N, D + 1], entropy [N], gaps [N, D]."""

    prompt_id: str
    ranks: np.ndarray
    path_values: np.ndarray
    entropy: np.ndarray
    gaps: np.ndarray

    def __len__(self) -> int:
        return len(self.ranks)


class Trace:
    """The texts of one task under one kind of heads, flat over positions; each tree's acceptance is computed once."""

    def __init__(self, prompts: list[PromptTrace]):
        if not prompts:
            raise EntmtpError("a rank trace without prompts: is the split empty?")
        self.prompts = prompts
        self.depth = prompts[0].ranks.shape[1]
        self.ranks = np.ascontiguousarray(np.concatenate([prompt.ranks for prompt in prompts]))
        self.width = int(self.ranks.max())  # the rank that stands for "not a candidate": every text's end has it
        self.bounds = np.cumsum([0] + [len(prompt) for prompt in prompts])
        self.growth: GrowthTrace | None = None  # full expansions, where policies grow their trees
        self._lengths: dict[Tree, NDArray[np.int64]] = {}
        self._values: dict[int, NDArray[np.float64]] = {}

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> "Trace":
        return cls(
            [
                PromptTrace(
                    str(prompt_id),
                    np.stack(rows["ranks"].to_list()).astype(np.int64),
                    np.stack(rows["path_values"].to_list()),
                    rows["entropy"].to_numpy(),
                    np.stack(rows["gaps"].to_list()),
                )
                for prompt_id, rows in frame.groupby("prompt_id", sort=False)
            ]
        )

    def path_values(self, depth: int) -> NDArray[np.float64]:
        """s_depth at every position: [N]."""
        if depth not in self._values:
            self._values[depth] = np.concatenate([prompt.path_values[:, depth] for prompt in self.prompts])
        return self._values[depth]

    def signal(self, name: str) -> NDArray[np.float64]:
        """`path_d`, or `draft_d` = s_d / s_0, at every position: [N]."""
        kind, depth = read_signal(name)
        return self.path_values(depth) / self.path_values(0) if kind == "draft" else self.path_values(depth)

    def part(self, prompts: list[int]) -> "Trace":
        """Some of the texts, by their places, without expansions."""
        return Trace([self.prompts[number] for number in prompts])

    def length(self, tree: Tree) -> NDArray[np.int64]:
        """num_accepted of `tree` at every position: [N]."""
        if tree not in self._lengths:
            # rank `width` is no path's rank, here as live
            tree.check_fits(tree.depth, self.width, "replayed tree")
            self._lengths[tree] = num_accepted(self, tree)
        return self._lengths[tree]

    def lengths(self, trees: list[Tree]) -> NDArray[np.int64]:
        """[trees, N]."""
        return np.stack([self.length(tree) for tree in trees])

    def accepted(self, tree: Tree) -> list[list[int]]:
        """num_accepted of `tree` at every position: per prompt a list."""
        flat = self.length(tree)
        return [flat[start:end].tolist() for start, end in zip(self.bounds[:-1], self.bounds[1:], strict=True)]


def num_accepted(trace: Trace, tree: Tree) -> NDArray[np.int64]:
    """[N]: length of the longest prefix of each position's ranks that is a path of the tree."""
    return _follow(trace, tree)[0]


def _follow(trace: Trace, tree: Tree) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lengths, ends = np.zeros((2, len(trace.ranks)), dtype=np.int64)
    kernels.follow(kernels.child_table(tree, max(trace.width, tree.max_rank + 1)), trace.ranks, lengths, ends)
    return lengths, ends


@dataclass
class Rollout:
    """Counts of a replayed (or live) run over several prompts."""

    steps: int
    accepted: int
    tokens: int

    @property
    def accept_length(self) -> float:
        """Tokens a step: mean num_accepted + 1."""
        return self.accepted / self.steps + 1 if self.steps else 1.0


def self_rollout(trace: Trace, tree: Tree) -> Rollout:
    """The tree's own run over every text (paper stage 2, without the model)."""
    steps, accepted = kernels.walk(trace.length(tree), trace.bounds)
    return Rollout(steps, accepted, int(trace.bounds[-1]))


class ReplayObserver:
    """Accepted rank paths of a tree's run, for the greedy search: from traces."""

    def __init__(self, trace: Trace):
        self.trace = trace

    def observe(self, tree: Tree) -> Counter:
        """Counter of accepted paths, one a step; () when nothing was accepted."""
        tree.check_fits(tree.depth, self.trace.width, "replayed tree")
        lengths, ends = _follow(self.trace, tree)
        counts = np.zeros(tree.num_nodes + 1, dtype=np.int64)
        kernels.walk_ends(lengths, ends, self.trace.bounds, counts)
        return Counter({path: int(n) for path, n in zip([(), *tree.paths], counts, strict=True) if n})


@dataclass
class ReplayStep:
    position: int
    tree: int
    accepted: int
    signal: float


def replay_policy(trace: Trace, policy: Policy) -> list[list[ReplayStep]]:
    """Every decision of `policy` on every text: per prompt a list of steps, as the live decoder takes them.

    A grown tree goes by its number of nodes. Raises EntmtpError for a growing policy on a trace without expansions.
    """
    if isinstance(policy, GrowingPolicy):
        return _replay_growing(trace, policy)
    acceptance = [trace.accepted(tree) for tree in policy.trees]
    runs = []
    for index, prompt in enumerate(trace.prompts):
        policy.reset()
        accepted = [per_tree[index] for per_tree in acceptance]
        values = seen_values(prompt, policy)
        steps, i, last = [], 0, len(prompt) - 1
        while i < last:
            tree = policy.decide(values[i])
            count = accepted[tree][i]
            policy.observe(count)
            steps.append(ReplayStep(i, tree, count, values[i][-1] if values[i] else float("nan")))
            i += count + 1
        runs.append(steps)
    return runs


def seen_values(prompt: PromptTrace, policy: Policy) -> list[list[float]]:
    """Path values s_0..s_depth as `policy` sees them at every position of a text; empty ones without a depth."""
    if policy.depth is None:
        return [[]] * len(prompt)
    values = prompt.path_values[:, : policy.depth + 1]
    return (values if policy.base else values / values[:, :1]).tolist()


def margin_at(prompt: PromptTrace, policy: Policy, steps: list[ReplayStep], at: int) -> float:
    """The policy's margin at step `at` of its replayed run over one text."""
    values = seen_values(prompt, policy)
    policy.reset()
    for step in steps[:at]:
        policy.decide(values[step.position])
        policy.observe(step.accepted)
    return policy.margin(values[steps[at].position])


def _replay_growing(trace: Trace, policy: GrowingPolicy) -> list[list[ReplayStep]]:
    if trace.growth is None:
        raise EntmtpError(f"policy {policy.name} grows its trees: replaying it needs a growth trace")
    grown, runs = replay_growth(trace.growth, policy), []
    for first, end in zip(trace.bounds[:-1].tolist(), trace.bounds[1:].tolist(), strict=True):
        steps, i = [], first
        while i < end - 1:
            count = int(grown.accepted[i])
            steps.append(ReplayStep(i - first, int(grown.nodes[i]), count, float("nan")))
            i += count + 1
        runs.append(steps)
    return runs


def replay_uses(trace: Trace, policy: Policy) -> NDArray[np.int64]:
    """Steps that `policy` takes with each of its trees over all texts: [trees].

    Compiled for the policies whose rules are compiled too, step by step for any other; the same counts either way.
    """
    lengths = trace.lengths(policy.trees)
    uses = np.zeros(len(policy.trees), dtype=np.int64)
    if type(policy) in (Policy, LadderPolicy) and policy.depth is None:  # always the same tree
        uses[policy.start] = kernels.walk(lengths[policy.start], trace.bounds)[0]
    elif type(policy) is TauPolicy:
        signal = trace.path_values(policy.depth)
        kernels.walk_tau(lengths, signal, trace.bounds, policy.tau_on, policy.tau_off, policy.start, uses)
    elif type(policy) is LadderPolicy:
        choices = np.searchsorted(policy.thresholds, trace.path_values(policy.depth), side="left")
        kernels.walk_choices(lengths, choices, trace.bounds, uses)
    elif isinstance(policy, CostAwarePolicy):
        chosen, _ = cost_aware_run(trace, policy)
        uses += np.bincount(chosen[chosen >= 0], minlength=len(uses))
    else:
        for steps in replay_policy(trace, policy):
            for step in steps:
                uses[step.tree] += 1
    return uses


def cost_aware_run(trace: Trace, policy: CostAwarePolicy) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The policy's run over all texts, compiled: the tree of each position's step, -1 where none starts [N], and what
    `last` and `mean` were there [N, 2]."""
    lengths = trace.lengths(policy.trees)
    estimates = np.repeat(np.asarray(policy.floor, dtype=float)[:, None], lengths.shape[1], axis=1)
    history = {name: (np.zeros(0), np.zeros((len(policy.trees), 0))) for name in ("last", "mean")}
    for curve in policy.curves:
        if curve.signal in history:
            history[curve.signal] = np.array(curve.knots), np.array(curve.accepted)
        else:
            estimates += curve_values(curve, trace.signal(curve.signal))
    chosen, seen = np.full(lengths.shape[1], -1), np.full((lengths.shape[1], 2), np.nan)
    memory = float(policy.memory) if isinstance(policy, AdaptivePolicy) else 0.0
    kernels.walk_cost_aware(lengths, estimates, *history["last"], *history["mean"], np.asarray(policy.step_ms, float),
                            policy.rate, policy.accepted, float(policy.window), memory, trace.bounds, chosen,
                            seen)  # fmt: skip
    return chosen, seen


def curve_values(curve: Curve, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """[trees, N]: the curve at each x, by Curve.add's very arithmetic."""
    knots, accepted = np.array(curve.knots), np.array(curve.accepted)
    piece = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    weight = np.clip((x - knots[piece]) / (knots[piece + 1] - knots[piece]), 0.0, 1.0)
    return accepted[:, piece] + weight * (accepted[:, piece + 1] - accepted[:, piece])


def replay_milliseconds(trace: Trace, policy: Policy, step_ms: list[float]) -> float:
    """Total milliseconds of all steps of `policy` on all texts, `step_ms` per tree of the policy."""
    return float(replay_uses(trace, policy) @ np.asarray(step_ms, dtype=float))
