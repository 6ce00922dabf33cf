"""Fitting policies that grow their trees, by exact replay on the calibration split."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import isotonic_regression

from entmtp.calibration.growth import GrowthTrace, chances, replay_growth
from entmtp.calibration.kernels import walk_cost
from entmtp.calibration.latency_table import LatencyTable
from entmtp.policy.growing import Calibration, GrowingPolicy

EXPAND = [0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45]


def calibrate(trace: GrowthTrace, bins: int = 24) -> Calibration:
    """How often a candidate of some path probability lies on the text's path: per depth, in bins made monotone."""
    edges, values = [], []
    for depth in range(1, int(trace.depth.max()) + 1):
        here = trace.depth == depth
        p, hit = trace.probability[here], trace.on_path[here]
        # most candidates are unlikely: bins by quantiles of the likelier half keep resolution where it matters
        inner = np.unique(np.quantile(p[p >= np.median(p)], np.linspace(0, 1, bins)[:-1]))
        place = np.searchsorted(inner, p, side="right")
        counts = np.bincount(place, minlength=len(inner) + 1)
        hits = np.bincount(place, weights=hit, minlength=len(inner) + 1)
        means = isotonic_regression(hits / np.maximum(counts, 1), sample_weight=np.maximum(counts, 1e-9))
        edges.append(inner.tolist())
        values.append(means.tolist())
    return Calibration(edges, values)


class GrowthFitter:
    """Milliseconds come from the latency table, times `scale`: verifying n nodes, and each head for 0..beam rows."""

    def __init__(self, trace: GrowthTrace, latency: LatencyTable, max_nodes: int, scale: float = 1.0):
        self.trace, self.max_nodes = trace, max_nodes
        depth = int(trace.depth.max())
        own = latency.overhead_ms + latency.grow_ms
        self.step_ms = scale * np.array([latency.forward(n + 1) + own for n in range(max_nodes + 1)])
        rows = range(1, trace.beam + 1)
        self.propose_ms = scale * np.array([[0.0] + [latency.propose(d, r) for r in rows] for d in range(1, depth + 1)])
        if latency.arch == "medusa":  # one evaluation of all heads serves every depth
            self.propose_ms[1:] = 0.0
        self.tokens = int(trace.bounds[-1]) - (len(trace.bounds) - 1)  # a text's last token needs no step
        self.base = GrowingPolicy("", [], beam=trace.beam, children=trace.children, max_depth=depth, nodes=max_nodes)

    def speed(self, policy: GrowingPolicy, expected: NDArray[np.float64] | None = None) -> float:
        """Replayed tokens a millisecond; `expected` as in `replay_growth`."""
        grown = replay_growth(self.trace, policy, expected)
        cost = grown.milliseconds(self.step_ms, self.propose_ms)
        return self.tokens / walk_cost(grown.accepted, cost, self.trace.bounds)[1]

    def dynamic(self, name: str) -> GrowingPolicy:
        """The best fixed number of nodes (the likeliest ones) and threshold of expansion."""
        sizes = self._sizes().tolist()
        options = [replace(self.base, name=name, nodes=n, expand=expand) for n in sizes for expand in EXPAND]
        return max(options, key=self.speed)

    def marginal(self, name: str, rounds: int = 12) -> GrowingPolicy:
        """The price of time at its fixed point (Dinkelbach), for the best threshold of expansion."""
        calibration, step_ms = calibrate(self.trace), self.step_ms.tolist()
        expected = chances(self.trace, calibration)
        best, best_speed = None, 0.0
        for expand in EXPAND:
            policy = replace(self.base, name=name, expand=expand, rate=1 / step_ms[0], step_ms=step_ms,
                             calibration=calibration)  # fmt: skip
            for _ in range(rounds):
                speed = self.speed(policy, expected)
                # expectations are not the truth: the last rate need not be the best; of equals it is the speed itself
                if speed > best_speed or (best is not None and speed == best_speed and expand == best.expand):
                    best, best_speed = policy, speed
                if abs(speed - policy.rate) < 1e-9:
                    break
                policy = replace(policy, rate=speed)
        return best

    def _sizes(self) -> NDArray[np.int64]:
        return np.unique(np.round(np.geomspace(1, self.max_nodes, 12)).astype(int))
