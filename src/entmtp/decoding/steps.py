"""Decoding a text step by step, whoever makes the steps, and what it leaves behind: its steps and their times."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from entmtp.policy.schedulers import Policy


@dataclass
class Step:
    """One round. `accepted` drafted tokens were committed beside the root; times are seconds."""

    tree: int
    nodes: int
    accepted: int
    node: int  # the tree's node that the last committed token belongs to
    signal: float  # deepest path value that the policy saw; NaN when it looks at none
    seconds: float
    scheduler_seconds: float  # signal, choice and switch
    switch_seconds: float  # choice and switch alone, and what the policy learns from the step
    tokens: list[int]


@dataclass
class Generation:
    """A finished text. `seconds` = prefill + decode; `tokens` include the stop token that ended it."""

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    steps: list[Step] = field(default_factory=list)

    @property
    def scheduler_seconds(self) -> float:
        return sum(step.scheduler_seconds for step in self.steps)

    @property
    def switch_seconds(self) -> float:
        return sum(step.switch_seconds for step in self.steps)


@dataclass
class Round:
    """What one round of draft, verification and commit decided, before the text's end cuts it; times are seconds."""

    tree: int
    drafted: int
    nodes: list[int]  # accepted, root first
    tokens: list[int]  # theirs
    signal: float
    scheduler_seconds: float
    switch_seconds: float
    root: int  # of the next round


def decode_steps(
    root: int, take: Callable[[int], Round], policy: Policy, stop: set[int], budget: int
) -> Iterator[Step]:
    """Steps up to a stop token or the budget. take(root) makes a round; the policy observes what it committed.

    A last root that needs no forward comes as a Step with nodes -1.
    """
    count = 0
    while True:
        if root in stop or count + 1 == budget:
            yield Step(0, -1, 0, 0, float("nan"), 0.0, 0.0, 0.0, [root])
            return
        begin = time.perf_counter()
        made = take(root)
        committed = cut(made.tokens, stop, budget - count)
        count, last, root = count + len(committed), len(committed) - 1, made.root
        done = time.perf_counter()
        policy.observe(last)
        end = time.perf_counter()
        yield Step(made.tree, made.drafted, last, made.nodes[last], made.signal, end - begin,
                   made.scheduler_seconds + end - done, made.switch_seconds + end - done, committed)  # fmt: skip
        if committed[-1] in stop or count == budget:
            return


def cut(tokens: list[int], stop: set[int], budget: int) -> list[int]:
    """Committed tokens of a step: up to the first stop id, that included, and within the budget."""
    for index, token in enumerate(tokens[:budget]):
        if token in stop:
            return tokens[: index + 1]
    return tokens[:budget]
