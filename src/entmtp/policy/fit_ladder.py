"""The best threshold ladder over given trees, by exact replay: thresholds between quantiles of the signal.

Which positions steps start at depends on the thresholds, so a sum over all positions is not what a ladder takes
(docs/theory.md). Such a sum only gives the search its start; every candidate is judged by its own run.
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration import kernels

NEVER, ALWAYS = 2.0, -1.0  # thresholds beyond s in (0, 1], finite for JSON


def fit_ladder(
    lengths: NDArray[np.int64], values: NDArray, bounds: NDArray, step_ms: NDArray, bins: int
) -> list[float] | None:
    """Thresholds [trees - 1] of the fastest ladder found; None where it would always choose one tree.

    `lengths` [trees, N]: num_accepted of each tree at every position; `values` [N]: the signal; `step_ms` [trees].
    A ladder is `cuts`: tree k is taken in the bins [cuts[k - 1], cuts[k]). From the assignment that is best over all
    positions, and from the best ladder of two trees (or one), one cut at a time moves to where the replayed run is
    fastest, until none gains. A tree that no bin uses gets two coinciding thresholds.
    """
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1]))
    levels, count = np.searchsorted(edges, values, side="left"), len(edges) + 1

    def milliseconds(cuts: list[int]) -> float:
        tree_of = np.searchsorted(cuts, np.arange(count), side="right")
        return kernels.walk_levels(lengths, levels, tree_of, bounds, step_ms)

    single = [[0] * tree + [count] * (len(lengths) - 1 - tree) for tree in range(len(lengths))]
    fastest = min(single, key=milliseconds)
    pairs = [[0] * a + [cut] * (b - a) + [count] * (len(lengths) - 1 - b)
             for a, b in combinations(range(len(lengths)), 2) for cut in range(1, count)]  # fmt: skip
    starts = [_over_all_positions(lengths, levels, count, step_ms), min([fastest, *pairs], key=milliseconds)]
    cuts = min((_climb(start, count, milliseconds) for start in starts), key=milliseconds)
    if len(set(np.searchsorted(cuts, np.arange(count), side="right").tolist())) == 1:
        return None
    return [ALWAYS if cut == 0 else NEVER if cut == count else float(edges[cut - 1]) for cut in cuts]


def _climb(cuts: list[int], count: int, milliseconds) -> list[int]:
    best, moved = milliseconds(cuts), True
    while moved:
        moved = False
        for k in range(len(cuts)):
            low, high = (cuts[k - 1] if k else 0), (cuts[k + 1] if k + 1 < len(cuts) else count)
            for cut in range(low, high + 1):
                other = [*cuts[:k], cut, *cuts[k + 1 :]]
                if (ms := milliseconds(other)) < best * (1 - 1e-12):
                    cuts, best, moved = other, ms, True
    return cuts


def _over_all_positions(lengths: NDArray, levels: NDArray, count: int, step_ms: NDArray) -> list[int]:
    """Cuts of the best monotone assignment of trees to bins if steps started at every position, by dynamic programming
    at Dinkelbach's rate."""
    there = np.bincount(levels, minlength=count)
    tokens = np.stack([np.bincount(levels, weights=own + 1.0, minlength=count) for own in lengths], axis=1)
    rate = max(1 / ms for ms in step_ms)
    for _ in range(20):
        assignment = monotone(tokens - rate * there[:, None] * step_ms[None])
        new_rate = tokens[np.arange(count), assignment].sum() / (there * step_ms[assignment]).sum()
        if abs(new_rate - rate) < 1e-12:
            break
        rate = new_rate
    return [int(np.searchsorted(assignment, tree, side="right")) for tree in range(len(lengths) - 1)]


def monotone(value: NDArray) -> NDArray[np.int64]:
    """Non-decreasing assignment tree[bin] that maximises Σ value[bin, tree[bin]]. value [bins, trees]."""
    bins, trees = value.shape
    best = np.zeros((bins, trees))
    came = np.zeros((bins, trees), dtype=int)
    for b in range(bins):
        if b:
            came[b] = [int(np.argmax(best[b - 1, : t + 1])) for t in range(trees)]
            best[b] = best[b - 1, came[b]]
        best[b] += value[b]
    assignment = np.zeros(bins, dtype=int)
    assignment[-1] = int(np.argmax(best[-1]))
    for b in range(bins - 1, 0, -1):
        assignment[b - 1] = came[b, assignment[b]]
    return assignment
