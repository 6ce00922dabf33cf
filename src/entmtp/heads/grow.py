"""Growing a draft tree at a step: candidates depth by depth, then the likeliest of them."""

from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from entmtp.heads import kernels
from entmtp.heads.children import best_children
from entmtp.policy.growing import GrowingPolicy, rows_per_depth
from entmtp.tree.grown import GrownShape, GrownTree, MaskPool


class Nursery:
    """The candidates of a policy's steps, and room for the trees that are kept of them: made once, filled anew.

    Candidates are numbered in order of making, 0 is the root. `probability` is the product of the heads' probabilities
    along the path.
    """

    def __init__(self, policy: GrowingPolicy, groups: int, capacity: int, dtype: torch.dtype, device: str):
        self.policy, self.capacity, self.device = policy, capacity, device
        rows = rows_per_depth(policy.beam, policy.children, policy.max_depth)
        self.tokens, self.parent, self.depth = np.zeros((3, 1 + policy.children * sum(rows)), np.int64)
        self.probability = np.ones(len(self.tokens))
        self.parent[0] = -1
        self.chosen = np.zeros(policy.beam, np.int64)
        self.paths = np.zeros((policy.beam, policy.max_depth + 1), np.int64)
        self.order = np.zeros(policy.nodes + 1, np.int64)
        self.kept = np.zeros((3, policy.nodes + 1), np.int64)  # tokens, parents, depths
        self.masks = MaskPool(policy.nodes, groups, capacity, dtype, device)

    def plant(self, root: int) -> int:
        """Begin a step. Returns how many parents the first head is asked about: the root, if even that."""
        self.tokens[0] = self.paths[0, 0] = root
        self.count, self.chosen[0] = 1, 0
        return int(self.policy.max_depth > 0 and self.policy.expand <= 1.0)

    def extend(self, depth: int, tokens: Tensor, conditional: Tensor) -> int:
        """Children [rows, children] of the parents last chosen, with their probabilities given these. Returns how many
        of them are parents next; `paths` holds the way to each, root first."""
        self.count, rows = kernels.extend(
            tokens.numpy(), conditional.numpy(), self.count, depth, self.policy.expand, self.chosen, self.paths,
            self.tokens, self.probability, self.parent, self.depth,
        )  # fmt: skip
        return rows

    def keep(self) -> GrownTree:
        """The tree that the policy makes of the candidates. Its tensors are valid until the next step."""
        policy = self.policy
        rate = -1.0 if policy.rate is None else policy.rate
        size = kernels.rank(self.count, policy.nodes, self.probability, self.depth, self.order)
        size = kernels.worthwhile(size, rate, policy.step_array, *policy.calibration_arrays, self.probability,
                                  self.depth, self.order)  # fmt: skip
        tokens, parents, depths = self.kept[:, : size + 1]
        kernels.keep(self.order, size, self.tokens, self.parent, self.depth, tokens, parents, depths)
        shape = GrownShape(parents.tolist(), depths.tolist())
        tokens, depths = (torch.from_numpy(part).to(self.device) for part in (tokens, depths))
        return GrownTree(shape, tokens, depths, self.masks.fill(parents), self.capacity)


@torch.inference_mode()
def grow(drafter, root: int, nursery: Nursery) -> tuple[GrownTree, float]:
    """The tree of this step, and the seconds spent on anything but the heads. `drafter.start` has been called."""
    policy, begin, proposing = nursery.policy, perf_counter(), 0.0
    rows = nursery.plant(root)
    for depth in range(1, policy.max_depth + 1):
        if not rows:
            break
        asked = perf_counter()
        paths = torch.from_numpy(nursery.paths[:rows, :depth]).to(nursery.device)
        ids, probability = best_children(drafter.step_logits(depth, paths), policy.children)
        tokens, probability = drafter.token_map[ids].cpu(), probability.cpu()
        proposing += perf_counter() - asked
        rows = nursery.extend(depth, tokens, probability)
    tree = nursery.keep()
    return tree, perf_counter() - begin - proposing
