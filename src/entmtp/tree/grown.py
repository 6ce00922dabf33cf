"""Trees that are grown anew at each step from the heads' own probabilities, instead of picked from a bank."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Candidates:
    """Drafts that a growing step has looked at, in order of making: parents come before children.

    Candidate 0 is the root. `probability` is the product of the heads' probabilities along the path (1 at the root).
    """

    tokens: list[int]
    probability: list[float] = field(default_factory=lambda: [1.0])
    parent: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])

    def add(self, parent: int, tokens: list[int], conditional: list[float]) -> None:
        """Children of one candidate with their probabilities given it."""
        self.tokens += tokens
        self.probability += [self.probability[parent] * p for p in conditional]
        self.parent += [parent] * len(tokens)
        self.depth += [self.depth[parent] + 1] * len(tokens)

    def ranked(self) -> list[int]:
        """All but the root, likeliest first. A child never comes before its parent: it is no likelier, and deeper."""
        return sorted(range(1, len(self.tokens)), key=lambda i: (-self.probability[i], self.depth[i], i))


class GrownShape:
    """Parents, depths and children of the kept candidates: what acceptance reads of a Tree."""

    def __init__(self, parents: list[int], depths: list[int]):
        self.parents, self.depths, self.num_nodes = parents, depths, len(parents) - 1
        self.children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents[1:], 1):
            self.children[parent].append(node)

    def path_nodes(self, node: int) -> list[int]:
        nodes = [node]
        while nodes[-1] != 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]


class GrownTree:
    """As CompiledTree, for one step: `tree` (its shape), `n`, `depths` [n], `tokens` [n], `mask_slice`."""

    def __init__(self, candidates: Candidates, kept: list[int], masks: "MaskPool"):
        """`kept`: indices of candidates, the root excluded; closed under parents."""
        order = [0, *sorted(kept)]  # the order of making: parents first
        place = {candidate: node for node, candidate in enumerate(order)}
        parents = [-1] + [place[candidates.parent[candidate]] for candidate in order[1:]]
        self.tree = GrownShape(parents, [candidates.depth[candidate] for candidate in order])
        self.n = len(order)
        self.tokens = torch.tensor([candidates.tokens[candidate] for candidate in order], device=masks.device)
        self.depths = torch.tensor(self.tree.depths, device=masks.device)
        self._buffer, self._capacity = masks.fill(parents), masks.capacity

    def mask_slice(self, context: int) -> Tensor | None:
        return None if self.n == 1 else self._buffer[:, self._capacity - context :]


class MaskPool:
    """One attention-mask buffer per tree size, written in place: a step allocates nothing."""

    def __init__(self, max_nodes: int, groups: int, capacity: int, dtype: torch.dtype, device: str):
        self.capacity, self.groups, self.device = capacity, groups, device
        self.low = torch.finfo(dtype).min
        self.buffers = [
            torch.zeros(groups * n, capacity + n, dtype=dtype, device=device) for n in range(1, max_nodes + 2)
        ]

    def fill(self, parents: list[int]) -> Tensor:
        """Buffer [groups * n, capacity + n]: zeros on the context, the tree's ancestors on the right."""
        n = len(parents)
        buffer = self.buffers[n - 1]
        if n == 1:
            return buffer
        seen: list[list[float]] = []
        for node, parent in enumerate(parents):
            row = list(seen[parent]) if parent >= 0 else [self.low] * n
            row[node] = 0.0
            seen.append(row)
        block = torch.tensor(seen, dtype=buffer.dtype, device=buffer.device)
        buffer.view(self.groups, n, -1)[:, :, self.capacity :] = block
        return buffer
