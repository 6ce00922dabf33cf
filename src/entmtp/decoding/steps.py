"""What decoding a text leaves behind: its steps and their times."""

from dataclasses import dataclass, field


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


def cut(tokens: list[int], stop: set[int], budget: int) -> list[int]:
    """Committed tokens of a step: up to the first stop id, that included, and within the budget."""
    for index, token in enumerate(tokens[:budget]):
        if token in stop:
            return tokens[: index + 1]
    return tokens[:budget]
