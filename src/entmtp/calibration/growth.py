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
        expected = trace.probability if policy.rate is None else chances(trace, policy.calibration)
    grow_all(trace.order, trace.probability, expected, trace.depth, trace.parent, trace.on_path, policy.expand,
             policy.max_depth, policy.nodes, rate, policy.step_array, made.nodes, made.accepted,
             made.rows)  # fmt: skip
    return made


def decision_margin(trace: GrowthTrace, policy: GrowingPolicy, i: int) -> float:
    """How near the policy's closest decision at position i is to going the other way.

    Decisions: a parent against `expand`, the beam's last against the next, the last kept candidate against the first
    left out, and for `marginal` the chosen size against every other in tokens worth.
    """
    p, depth, parent = trace.probability[i].tolist(), trace.depth[i].tolist(), trace.parent[i].tolist()
    margins, seen, frontier = [1.0], set(), [-1]
    chance = {-1: 1.0, **dict(enumerate(p))}
    for level in range(1, policy.max_depth + 1):
        margins += [abs(chance[node] - policy.expand) for node in frontier]
        able = sorted((chance[node] for node in frontier if chance[node] >= policy.expand), reverse=True)
        if len(able) > policy.beam:
            margins.append(able[policy.beam - 1] - able[policy.beam])
        parents = set(policy.parents(frontier, chance))
        frontier = [c for c in range(len(p)) if depth[c] == level and parent[c] in parents]
        seen.update(frontier)
    ranked = [c for c in trace.order[i].tolist() if c in seen]
    candidates = [(p[c], depth[c]) for c in ranked[: policy.nodes]]
    kept = policy.size(candidates)
    if 0 < kept < len(ranked):
        margins.append(p[ranked[kept - 1]] - p[ranked[kept]])
    if policy.rate is not None:
        worths = policy.worths(candidates)
        margins += [abs(worths[kept] - other) for n, other in enumerate(worths) if n != kept]
        edges = [edge for row in policy.calibration.edges for edge in row]
        margins += [min((abs(p[c] - edge) for edge in edges), default=1.0) for c in ranked[: policy.nodes]]
    return min(margins)
