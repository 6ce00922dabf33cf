"""`bandit`: the bank's trees as arms of a bandit, without any calibration of what they accept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt

from entmtp.errors import EntmtpError
from entmtp.policy.cost_aware import best
from entmtp.policy.schedulers import Policy


@dataclass
class BanditPolicy(Policy):
    """UCB1 (Auer, Cesa-Bianchi & Fischer, Machine Learning 2002) on tokens a millisecond.

    An arm's index is its optimistic tokens a step over the milliseconds that the bank knows: 1 + the mean of what it
    accepted + explore * depth * sqrt(2 ln t / n), for num_accepted lies between 0 and the tree's depth. So nothing is
    spent on trying the empty tree, whose one token a step is certain. Every arm starts with one imagined step that
    accepted half of its depth: on texts of some sixty steps, trying every arm once would cost too much.

    Like every policy it starts each prompt anew (replay must not depend on the order of prompts), so it pays for
    learning in every prompt.
    """

    step_ms: list[float] = field(default_factory=list)
    explore: float = 0.2

    def __post_init__(self) -> None:
        if len(self.step_ms) != len(self.trees):
            raise EntmtpError(
                f"policy {self.name}: step_ms is for {len(self.step_ms)} trees, but there are {len(self.trees)}"
            )
        if self.explore < 0:
            raise EntmtpError(f"policy {self.name}: explore={self.explore} must not be below 0")
        self.reset()

    def reset(self) -> None:
        self.steps = 1
        self.uses = [1] * len(self.trees)
        self.accepted = [tree.depth / 2 for tree in self.trees]
        self.choice = 0

    def indices(self) -> list[float]:
        """Optimistic tokens a millisecond of every tree."""
        spread = self.explore * sqrt(2 * log(self.steps))
        return [
            (1 + accepted / uses + spread * tree.depth / sqrt(uses)) / ms
            for tree, accepted, uses, ms in zip(self.trees, self.accepted, self.uses, self.step_ms)
        ]

    def decide(self, values: Sequence[float]) -> int:
        self.choice = best(self.indices())
        return self.choice

    def observe(self, accepted: int) -> None:
        self.steps += 1
        self.uses[self.choice] += 1
        self.accepted[self.choice] += accepted
