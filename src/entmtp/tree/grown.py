"""Trees that are grown anew at each step from the heads' own probabilities, instead of picked from a bank."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from entmtp.tree.topology import Topology


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

    def path(self, node: int) -> list[int]:
        """Tokens from the root to a candidate."""
        tokens = [self.tokens[node]]
        while self.parent[node] >= 0:
            node = self.parent[node]
            tokens.append(self.tokens[node])
        return tokens[::-1]

    def ranked(self) -> list[int]:
        """All but the root, likeliest first. A child never comes before its parent: it is no likelier, and deeper."""
        return sorted(range(1, len(self.tokens)), key=lambda i: (-self.probability[i], self.depth[i], i))


class GrownShape(Topology):
    """The shape of the kept candidates."""

    def __init__(self, parents: list[int], depths: list[int]):
        self.parents, self.depths = parents, depths


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
        self._buffer, self._capacity = masks.fill(self.tree), masks.capacity

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

    def fill(self, tree: Topology) -> Tensor:
        """Buffer [groups * n, capacity + n]: zeros on the context, the tree's ancestors on the right."""
        n = tree.num_nodes + 1
        buffer = self.buffers[n - 1]
        block = buffer.view(self.groups, n, -1)[:, :, self.capacity :]
        block.zero_().masked_fill_(~torch.from_numpy(tree.ancestors()).to(self.device), self.low)
        return buffer
