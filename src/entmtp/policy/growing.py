"""Schedulers without a bank: the tree of a step follows the heads' own probabilities.

- `dynamic` (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276): always the `nodes` likeliest candidates.
- `marginal`: as many of the likeliest as pay. A node that is accepted with probability a saves a * (1 / rate) seconds
  of later steps at `rate` tokens a second; it is worth having while that exceeds what it adds to this step.

Both look at the same candidates: at each depth the `beam` likeliest nodes whose path probability is at least `expand`
get `children` children each. `expand` is one number for all depths, so whether a node is expanded does not depend on
what less likely nodes did: the rule that makes exact replay possible from one stored expansion (calibration/growth.py).
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from entmtp.policy.schedulers import Policy


def rows_per_depth(beam: int, children: int, depth: int) -> list[int]:
    """Parents that a full expansion evaluates at depths 1..depth."""
    rows = [1]
    while len(rows) < depth:
        rows.append(min(beam, rows[-1] * children))
    return rows[:depth]


@dataclass
class Calibration:
    """Acceptance probability of a node by its path probability, per depth: piecewise constant, non-decreasing."""

    edges: list[list[float]]  # per depth, ascending
    values: list[list[float]]  # per depth, one more than edges

    def accepted(self, probability: float, depth: int) -> float:
        return self.values[depth - 1][bisect_right(self.edges[depth - 1], probability)]


@dataclass
class GrowingPolicy(Policy):
    """`step_ms[n]`: milliseconds of verifying n drafted nodes and of everything but proposing. `rate`: tokens a
    millisecond that the policy reaches (Dinkelbach's fixed point), the price of time. `nodes`: most nodes of a tree;
    with `rate` None all of them are taken (`dynamic`). Path probabilities count as they are without `calibration`."""

    nodes: int = 8
    beam: int = 4
    children: int = 8
    max_depth: int = 4
    expand: float = 0.05
    rate: float | None = None
    step_ms: list[float] = field(default_factory=list)
    calibration: Calibration | None = None

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @cached_property
    def step_array(self) -> NDArray[np.float64]:
        """`step_ms` as the compiled rules read it."""
        return np.asarray(self.step_ms or [0.0] * (self.nodes + 1))

    @cached_property
    def calibration_arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Edges [D, E] and values [D, E + 1] of the calibration, padded: unused edges are infinite. D = 0 without."""
        if self.calibration is None:
            return np.zeros((0, 0)), np.zeros((0, 1))
        edges, values = self.calibration.edges, self.calibration.values
        depth, most = max(self.max_depth, len(edges)), max(map(len, edges), default=0)
        padded, steps = np.full((depth, most), np.inf), np.zeros((depth, most + 1))
        for d, (row, own) in enumerate(zip(edges, values, strict=True)):
            padded[d, : len(row)] = row
            steps[d, : len(own)] = own
        return padded, steps

    def parents(self, frontier: list[int], probability: list[float]) -> list[int]:
        """Which of a depth's candidates get children: the likeliest first."""
        likely = [node for node in frontier if probability[node] >= self.expand]
        return sorted(likely, key=lambda node: (-probability[node], node))[: self.beam]

    def size(self, ranked: list[tuple[float, int]]) -> int:
        """How many of the ranked candidates (path probability, depth) to verify."""
        if self.rate is None:
            return min(self.nodes, len(ranked))
        worths = self.worths(ranked)
        return max(range(len(worths)), key=worths.__getitem__)  # of equals the smallest

    def worths(self, ranked: list[tuple[float, int]]) -> list[float]:
        """What verifying the first 0, 1, … ranked candidates brings, in tokens: accepted, minus time at `rate`."""
        gained, worths = 0.0, [0.0]
        for n, candidate in enumerate(ranked[: self.nodes], 1):
            gained += self.calibration.accepted(*candidate) if self.calibration else candidate[0]
            worths.append(gained - self.rate * (self.step_ms[n] - self.step_ms[0]))
        return worths
