"""Exact replay of growing policies: one stored expansion a position tells every tree that they would grow there.

The trace pass expands each position as a live step with `expand` = 0 would. A live policy with a higher `expand` looks
at a subset of these candidates: those whose ancestors all reach `expand`. (Among the nodes of one depth that reach it,
the `beam` likeliest are the same in both, since whatever a skipped parent would have added is less likely still.)
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entmtp.calibration.kernels import grow_all
from entmtp.heads.grow import top_children
from entmtp.policy.growing import GrowingPolicy


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


def rows_per_depth(beam: int, children: int, depth: int) -> list[int]:
    """Parents that a full expansion evaluates at depths 1..depth."""
    rows = [1]
    while len(rows) < depth:
        rows.append(min(beam, rows[-1] * children))
    return rows


@torch.inference_mode()
def trace_growth(drafter, states: Tensor, text: list[int], beam: int, children: int, chunk: int = 64) -> dict:
    """Arrays [n, C] of one text whose heads start from `states` [n, H]: probability, depth, parent, on_path."""
    parts = [
        _expand(drafter, states[start : start + chunk], text[start : start + chunk + drafter.depth], beam, children)
        for start in range(0, len(states), chunk)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _expand(drafter, states: Tensor, text: list[int], beam: int, children: int) -> dict:
    """`text`: the roots of these positions, and as many tokens after them as there are heads."""
    n, device = len(states), states.device
    roots = torch.tensor(text[:n], device=device)
    paths = roots[:, None, None]  # [n, frontier, depth]: tokens of the frontier's paths, root first
    probability = torch.ones(n, 1, dtype=torch.float64, device=device)
    on_path = torch.ones(n, 1, dtype=torch.bool, device=device)
    first, made = -1, []  # column of the frontier's first candidate; the root is column -1
    for depth, rows in enumerate(rows_per_depth(beam, children, drafter.depth), 1):
        chosen = probability.sort(dim=1, descending=True, stable=True).indices[:, :rows]  # [n, rows]
        parents = paths.gather(1, chosen[:, :, None].expand(-1, -1, depth))
        logits = drafter.path_logits(depth, states.repeat_interleave(rows, 0), parents.reshape(n * rows, depth))
        tokens, conditional = (part.view(n, rows, children) for part in top_children(drafter, logits, children))
        true = torch.tensor([text[i + depth] if i + depth < len(text) else -1 for i in range(n)], device=device)
        probability = (probability.gather(1, chosen)[:, :, None] * conditional.double()).view(n, -1)
        on_path = (on_path.gather(1, chosen)[:, :, None] & (tokens == true[:, None, None])).view(n, -1)
        paths = torch.cat([parents[:, :, None].expand(-1, -1, children, -1), tokens[..., None]], dim=-1)
        paths = paths.view(n, rows * children, depth + 1)
        parent = (chosen + first if depth > 1 else chosen - 1)[:, :, None].expand(-1, -1, children).reshape(n, -1)
        first = sum(len(part["depth"][0]) for part in made)
        made.append({
            "probability": probability.cpu().numpy(),
            "depth": np.full((n, rows * children), depth, dtype=np.int8),
            "parent": parent.cpu().numpy().astype(np.int16),
            "on_path": on_path.cpu().numpy(),
        })  # fmt: skip
    return {name: np.concatenate([part[name] for part in made], axis=1) for name in made[0]}


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


def replay_growth(trace: GrowthTrace, policy: GrowingPolicy) -> Grown:
    """Every tree that `policy` would grow. Its beam and children must be the trace's own."""
    assert (policy.beam, policy.children) == (trace.beam, trace.children), "a growth trace serves one beam"
    depth = int(trace.depth.max())
    edges, values = _calibration(policy, depth)
    n = len(trace.depth)
    made = Grown(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros((n, depth), np.int64))
    step_ms = np.asarray(policy.step_ms or [0.0] * (policy.nodes + 1))
    rate = -1.0 if policy.rate is None else policy.rate
    grow_all(trace.order, trace.probability, trace.depth, trace.parent, trace.on_path, policy.expand,
             policy.max_depth, policy.nodes, rate, step_ms, edges, values, made.nodes, made.accepted,
             made.rows)  # fmt: skip
    return made


def _calibration(policy: GrowingPolicy, depth: int) -> tuple[NDArray, NDArray]:
    """Edges [D, E] and values [D, E + 1], padded: unused edges are infinite."""
    if policy.calibration is None:
        return np.full((depth, 1), np.inf), np.zeros((depth, 2))
    most = max(len(row) for row in policy.calibration.edges)
    edges, values = np.full((depth, most), np.inf), np.zeros((depth, most + 1))
    for d, (row, own) in enumerate(zip(policy.calibration.edges, policy.calibration.values, strict=True)):
        edges[d, : len(row)] = row
        values[d, : len(own)] = own
    return edges, values
