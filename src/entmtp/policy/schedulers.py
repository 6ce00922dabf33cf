"""Schedulers: pure state machines from signals to a tree index. The same objects run live and in replay.

`s` is the path value at the policy's own depth (DESIGN 3): s_0 is the base top-1 probability, s_d multiplies in the
heads' top-1 probabilities along the greedy draft path down to depth d.

A run calls `reset` at the start of a prompt, and at every step `decide` with the path values s_0..s_depth of the
position and then `observe` with what the step accepted. Both are in the rank trace: replay makes the very same calls.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from entmtp.errors import EntmtpError
from entmtp.tree.topology import Tree, largest


@dataclass
class Policy:
    """One tree, always: plain `static` policies and the base of the others.

    `trees` are what `choose` indexes. `depth` is None when no signal is looked at, so that none is computed.
    """

    name: str
    trees: list[Tree]
    start: int = 0
    depth: int | None = None
    base = True  # whether s_0 is the base top-1 probability; else it is 1, which spares a softmax over the vocabulary

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree that the policy may use: what a cache must have room for."""
        return largest(self.trees)

    def reset(self) -> None:
        """Called at the start of every prompt: no state survives from one to the next."""

    @property
    def edges(self) -> list[float]:
        """Values of s at which the choice changes: only there can a rounding error change a tree."""
        return []

    def choose(self, s: float) -> int:
        return self.start

    def decide(self, values: Sequence[float]) -> int:
        """Index of this step's tree. `values`: path values s_0..s_depth of this very position, none without `depth`."""
        return self.choose(values[-1] if values else float("nan"))

    def observe(self, accepted: int) -> None:
        """Called after every step with its num_accepted."""

    def margin(self, values: Sequence[float]) -> float:
        """How near the decision at `values` is to another tree: what a rounding error of the signals must reach."""
        return min((abs(values[-1] - edge) for edge in self.edges), default=float("inf"))


@dataclass
class LadderPolicy(Policy):
    """Threshold ladder `l`: the more predictable the text, the larger the tree.

    Tree k is used when exactly k of the ascending `thresholds` are below s.
    """

    thresholds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.thresholds) != len(self.trees) - 1:
            raise EntmtpError(f"ladder of {len(self.trees)} trees needs {len(self.trees) - 1} thresholds")
        if sorted(self.thresholds) != self.thresholds:
            raise EntmtpError(f"ladder thresholds must ascend: {self.thresholds}")

    @property
    def edges(self) -> list[float]:
        return self.thresholds

    def choose(self, s: float) -> int:
        return bisect_left(self.thresholds, s)


@dataclass
class TauPolicy(Policy):
    """Hysteresis `tau`: one tree up when s > tau_on, one down when s <= tau_off (tau_off <= tau_on), else stay."""

    tau_on: float = 0.5
    tau_off: float = 0.5

    def __post_init__(self) -> None:
        if self.tau_off > self.tau_on:
            raise EntmtpError(f"tau_off={self.tau_off} must not exceed tau_on={self.tau_on}")
        self.state = self.start

    @property
    def edges(self) -> list[float]:
        return [self.tau_on, self.tau_off]

    def reset(self) -> None:
        self.state = self.start

    def choose(self, s: float) -> int:
        if s > self.tau_on:
            self.state = min(self.state + 1, len(self.trees) - 1)
        elif s <= self.tau_off:
            self.state = max(self.state - 1, 0)
        return self.state
