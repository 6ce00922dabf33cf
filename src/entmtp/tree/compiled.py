"""A tree as tensors: what proposing, verifying and committing read, made once per tree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.tree.topology import Tree


@dataclass(frozen=True)
class Level:
    """Indices that fill one depth: children [c] are nodes start..end, candidates come from `rows` x `ranks`."""

    ancestors: Tensor  # [rows, d] nodes from the root to each parent
    rows: Tensor  # [c] row of each child's parent
    ranks: Tensor  # [c]
    start: int
    end: int
    greedy_only: bool  # the only parent lies on the greedy path


class CompiledTree:
    """A tree's tensors on the target's device, made once; switching trees is choosing another of these.

    `mask_slice(context)` is additive [groups * n, context + n]: a view into one buffer whose left part, the
    context, is all zeros and whose right part is the tree, so that a step writes nothing (see KVCache: context rows
    come first).
    """

    def __init__(self, tree: Tree, groups: int, capacity: int, dtype: torch.dtype, device: str):
        self.tree, self.n, self.capacity = tree, tree.num_nodes + 1, capacity
        block = torch.zeros(self.n, self.n, dtype=dtype, device=device)
        block.masked_fill_(~torch.from_numpy(tree.ancestors()).to(device), torch.finfo(dtype).min)
        self.block = block  # additive [n, n]
        buffer = torch.zeros(self.n, capacity + self.n, dtype=dtype, device=device)
        buffer[:, capacity:] = block
        self.buffer = buffer.repeat(groups, 1)
        self.depths = torch.tensor(tree.depths, device=device)
        self.node_depth = torch.tensor([len(path) - 1 for path in tree.paths], dtype=torch.long, device=device)
        self.node_rank = torch.tensor([path[-1] for path in tree.paths], dtype=torch.long, device=device)
        self.levels = [self._level(tree, depth, device) for depth in range(1, tree.depth + 1)]

    @staticmethod
    def _level(tree: Tree, depth: int, device: str) -> Level:
        nodes = [node for node, d in enumerate(tree.depths) if d == depth]
        parents = sorted({tree.parents[node] for node in nodes})
        row = {parent: index for index, parent in enumerate(parents)}
        greedy = all(rank == 0 for parent in parents if parent for rank in tree.paths[parent - 1])
        return Level(
            ancestors=torch.tensor([tree.path_nodes(parent) for parent in parents], device=device),
            rows=torch.tensor([row[tree.parents[node]] for node in nodes], device=device),
            ranks=torch.tensor([tree.paths[node - 1][-1] for node in nodes], device=device),
            start=nodes[0],
            end=nodes[-1] + 1,
            greedy_only=len(parents) == 1 and greedy,
        )

    def mask_slice(self, context: int) -> Tensor | None:
        return None if self.n == 1 else self.buffer[:, self.capacity - context :]
