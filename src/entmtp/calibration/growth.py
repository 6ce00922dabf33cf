"""Exact replay of growing policies: one stored expansion a position tells every tree that they would grow there.

The trace pass expands each position as a live step with `expand` = 0 would. A live policy with a higher `expand` looks
at a subset of these candidates: those whose ancestors all reach `expand`. (Among the nodes of one depth that reach it,
the `beam` likeliest are the same in both, since whatever a skipped parent would have added is less likely still.)
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration.kernels import grow_all
from entmtp.errors import EntmtpError
from entmtp.io import atomic
from entmtp.policy.growing import Calibration, GrowingPolicy, rows_per_depth


@dataclass
class GrowthTrace:
    """Candidates of every position, flat over texts: [N, C], the root left out, in order of making.

    `probability` of the path, `depth`, `parent` (column, -1: the root), `on_path`: whether the text continues so;
    `order`: columns, likeliest first, parents before children.
    """

    probability: NDArray[np.float64]
    depth: NDArray[np.int8]
    parent: NDArray[np.int16]
    on_path: NDArray[np.bool_]
    order: NDArray[np.int16]
    bounds: NDArray[np.int64]
    beam: int
    children: int


def columns(beam: int, children: int, depth: int) -> int:
    """Candidates of a position: C."""
    return sum(children * rows for rows in rows_per_depth(beam, children, depth))


ARRAYS = ("probability", "depth", "parent", "on_path", "order", "bounds")


def save_growth(trace: GrowthTrace, path: str | Path) -> None:
    with atomic(path) as partial, partial.open("wb") as file:
        arrays = {name: getattr(trace, name) for name in ARRAYS}
        np.savez_compressed(file, **arrays, shape=np.array([trace.beam, trace.children]))


def load_growth(path: str | Path) -> GrowthTrace:
    try:
        with np.load(path, allow_pickle=False) as file:
            beam, children = file["shape"].tolist()
            return GrowthTrace(**{name: file[name] for name in ARRAYS}, beam=beam, children=children)
    except (OSError, ValueError, KeyError) as error:
        raise EntmtpError(f"{path}: not a growth trace ({error}); delete it and run again") from error


def join(parts: list[dict], beam: int, children: int) -> GrowthTrace:
    """Texts' arrays to one trace."""
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    column = np.arange(arrays["depth"].shape[1])
    keys = (np.broadcast_to(column, arrays["depth"].shape), arrays["depth"], -arrays["probability"])
    order = np.lexsort(keys, axis=1).astype(np.int16)
    bounds = np.cumsum([0] + [len(part["depth"]) for part in parts])
    return GrowthTrace(**arrays, order=order, bounds=bounds, beam=beam, children=children)


@dataclass
class Grown:
    """What a policy grows at every position: nodes [N], num_accepted [N], rows that each head evaluates [N, D]."""

    nodes: NDArray[np.int64]
    accepted: NDArray[np.int64]
    rows: NDArray[np.int64]

    def milliseconds(self, step_ms: NDArray, propose_ms: NDArray) -> NDArray[np.float64]:
        """Cost of a step at each position. step_ms [n + 1] by nodes, propose_ms [D, beam + 1] by rows (0 rows: 0)."""
        proposing = sum(propose_ms[d][self.rows[:, d]] for d in range(self.rows.shape[1]))
        return step_ms[self.nodes] + proposing


def chances(trace: GrowthTrace, calibration: Calibration | None) -> NDArray[np.float64]:
    """What a policy with this calibration expects of every candidate [N, C]: how likely it is to be accepted."""
    if calibration is None:
        return trace.probability
    expected = np.zeros(trace.probability.shape)
    for level, (edges, values) in enumerate(zip(calibration.edges, calibration.values, strict=True), 1):
        here = trace.depth == level
        expected[here] = np.asarray(values)[np.searchsorted(edges, trace.probability[here], side="right")]
    return expected


def replay_growth(trace: GrowthTrace, policy: GrowingPolicy, expected: NDArray[np.float64] | None = None) -> Grown:
    """Every tree that `policy` would grow. Its beam and children must be the trace's own. `expected` [N, C]: of each
    candidate, where it is known already or is not the policy's own calibration's."""
    if (policy.beam, policy.children) != (trace.beam, trace.children):
        raise EntmtpError(
            f"policy {policy.name}: beam {policy.beam} and {policy.children} children, but the growth trace was made "
            f"with growth.beam={trace.beam} growth.children={trace.children}"
        )
    depth = int(trace.depth.max())
    n = len(trace.depth)
    made = Grown(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros((n, depth), np.int64))
    rate = -1.0 if policy.rate is None else policy.rate
    if expected is None:
        expected = chances(trace, policy.calibration)
    grow_all(trace.order, trace.probability, expected, trace.depth, trace.parent, trace.on_path, policy.expand,
             policy.max_depth, policy.nodes, rate, policy.step_array, made.nodes, made.accepted,
             made.rows)  # fmt: skip
    return made


# relative errors of a path probability: one evaluation and a batch of them differ by some 1e-6 to 1e-4
ERRORS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def decision_margin(trace: GrowthTrace, policy: GrowingPolicy, i: int) -> float:
    """The relative error of path probabilities, to the next power of ten, that it takes for the policy to grow another
    tree at position i; infinite where none does."""
    return next((error for error in ERRORS if _unsettled(trace, policy, i, error)), float("inf"))


def _unsettled(trace: GrowthTrace, policy: GrowingPolicy, i: int, error: float) -> bool:
    """Whether errors up to `error` could change who is expanded, who is kept, or how many."""
    p, depth, parent = trace.probability[i].tolist(), trace.depth[i].tolist(), trace.parent[i].tolist()
    chance = {-1: 1.0, **dict(enumerate(p))}
    seen, frontier = set(), [-1]

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= error * max(a, b)

    for level in range(1, policy.max_depth + 1):
        if any(near(chance[node], policy.expand) for node in frontier if node >= 0):
            return True
        able = sorted((chance[node] for node in frontier if chance[node] >= policy.expand), reverse=True)
        if len(able) > policy.beam and near(able[policy.beam - 1], able[policy.beam]):
            return True
        parents = set(policy.parents(frontier, chance))
        frontier = [c for c in range(len(p)) if depth[c] == level and parent[c] in parents]
        seen.update(frontier)
    ranked = [(p[c], depth[c]) for c in trace.order[i].tolist() if c in seen]
    kept = policy.size(ranked[: policy.nodes])
    if 0 < kept < len(ranked) and near(ranked[kept - 1][0], ranked[kept][0]):
        return True
    return policy.rate is not None and _other_size(policy, ranked[: policy.nodes], kept, error)


def _other_size(policy: GrowingPolicy, ranked: list[tuple[float, int]], kept: int, error: float) -> bool:
    """Whether with the least or the most that each candidate may be worth another number of nodes is worth more.
    Neighbours so near that they may change places share their bounds."""
    accepted = policy.calibration.accepted if policy.calibration else lambda p, _: p
    least = [accepted(p * (1 - error), d) for p, d in ranked]
    most = [accepted(p * (1 + error), d) for p, d in ranked]
    for a in range(len(ranked) - 1):
        if ranked[a][0] - ranked[a + 1][0] <= error * ranked[a][0]:
            least[a : a + 2] = [min(least[a : a + 2])] * 2
            most[a : a + 2] = [max(most[a : a + 2])] * 2
    price = [policy.rate * ms for ms in policy.step_ms]
    larger = (sum(most[kept:n]) > price[n] - price[kept] for n in range(kept + 1, len(ranked) + 1))
    smaller = (sum(least[n:kept]) <= price[kept] - price[n] for n in range(kept))
    return any(larger) or any(smaller)
