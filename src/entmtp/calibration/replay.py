"""Exact replay: what any tree and any policy would do on a known text, from its rank trace alone.

No model runs here, only arithmetic. A step at position i (root = text token i) is taken while i < N - 1 (the text's
last token needs no forward), accepts what the tree accepts and moves i on by num_accepted + 1; so does the live
decoder, step for step.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Path, Tree


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
    """The texts of one task under one kind of heads, with every tree's acceptance computed once."""

    def __init__(self, prompts: list[PromptTrace]):
        if not prompts:
            raise EntmtpError("a rank trace without prompts: is the split empty?")
        self.prompts = prompts
        self.depth = prompts[0].ranks.shape[1]
        self.ranks = np.concatenate([prompt.ranks for prompt in prompts])
        self.base = int(self.ranks.max()) + 2  # radix of prefix codes
        self.bounds = np.cumsum([0] + [len(prompt) for prompt in prompts])
        self._accepted: dict[Tree, list[list[int]]] = {}

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

    @cached_property
    def codes(self) -> np.ndarray:
        """[positions, D]: column d - 1 encodes the rank prefix of length d as one integer."""
        codes = np.empty_like(self.ranks)
        code = np.zeros(len(self.ranks), dtype=np.int64)
        for d in range(self.depth):
            code = code * self.base + self.ranks[:, d] + 1
            codes[:, d] = code
        return codes

    def code(self, path: Path) -> int:
        code = 0
        for rank in path:
            code = code * self.base + min(rank, self.base - 2) + 1
        return code

    def accepted(self, tree: Tree) -> list[list[int]]:
        """num_accepted of `tree` at every position: per prompt a list [N]."""
        if tree not in self._accepted:
            # rank `width` stands for "not a candidate" and is no path's rank, here as live (every text's end has it)
            tree.check_fits(tree.depth, int(self.ranks.max()), "replayed tree")
            flat = num_accepted(self, tree)
            self._accepted[tree] = [
                flat[start:end].tolist() for start, end in zip(self.bounds[:-1], self.bounds[1:], strict=True)
            ]
        return self._accepted[tree]


def num_accepted(trace: Trace, tree: Tree) -> np.ndarray:
    """int [positions]: length of the longest prefix of each position's ranks that is a path of the tree."""
    alive = np.ones(len(trace.ranks), dtype=bool)
    total = np.zeros(len(trace.ranks), dtype=np.int64)
    for d in range(1, min(tree.depth, trace.depth) + 1):
        # a rank beyond every candidate cannot match, since no path may hold it
        paths = [trace.code(path) for path in tree.paths if len(path) == d and max(path) <= trace.base - 2]
        alive = alive & np.isin(trace.codes[:, d - 1], paths)
        total += alive
    return total


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
    steps = accepted = 0
    for acceptance in trace.accepted(tree):
        i, last = 0, len(acceptance) - 1
        while i < last:
            accepted += acceptance[i]
            steps += 1
            i += acceptance[i] + 1
    return Rollout(steps, accepted, int(trace.bounds[-1]))


class ReplayObserver:
    """Accepted rank paths of a tree's run, for the greedy search: from traces."""

    def __init__(self, trace: Trace):
        self.trace = trace

    def observe(self, tree: Tree) -> Counter:
        """Counter of accepted paths, one a step; () when nothing was accepted."""
        paths: Counter = Counter()
        for prompt, acceptance in zip(self.trace.prompts, self.trace.accepted(tree), strict=True):
            i, last = 0, len(acceptance) - 1
            ranks = prompt.ranks
            while i < last:
                count = acceptance[i]
                paths[tuple(ranks[i, :count].tolist())] += 1
                i += count + 1
        del self.trace._accepted[tree]  # the search looks at each union tree once
        return paths


@dataclass
class ReplayStep:
    position: int
    tree: int
    accepted: int
    signal: float


def replay_policy(trace: Trace, policy: Policy) -> list[list[ReplayStep]]:
    """Every decision of `policy` on every text: per prompt a list of steps, as the live decoder takes them."""
    acceptance = [trace.accepted(tree) for tree in policy.trees]
    runs = []
    for index, prompt in enumerate(trace.prompts):
        policy.reset()
        accepted = [per_tree[index] for per_tree in acceptance]
        signals = prompt.path_values[:, policy.depth].tolist() if policy.depth is not None else None
        steps, i, last = [], 0, len(prompt) - 1
        while i < last:
            s = signals[i] if signals is not None else float("nan")
            tree = policy.choose(s)
            count = accepted[tree][i]
            steps.append(ReplayStep(i, tree, count, s))
            i += count + 1
        runs.append(steps)
    return runs


def replay_milliseconds(trace: Trace, policy: Policy, step_ms: list[float]) -> float:
    """Total milliseconds of all steps of `policy` on all texts, `step_ms` per tree of the policy."""
    acceptance = [trace.accepted(tree) for tree in policy.trees]
    total, choose, use_signal = 0.0, policy.choose, policy.depth is not None
    for index, prompt in enumerate(trace.prompts):
        policy.reset()
        accepted = [per_tree[index] for per_tree in acceptance]
        signals = prompt.path_values[:, policy.depth].tolist() if use_signal else [0.0] * len(prompt)
        i, last = 0, len(prompt) - 1
        while i < last:
            tree = choose(signals[i])
            total += step_ms[tree]
            i += accepted[tree][i] + 1
    return total
