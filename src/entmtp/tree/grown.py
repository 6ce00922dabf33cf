"""Trees that are grown anew at each step from the heads' own probabilities, instead of picked from a bank."""

import numpy as np
import torch
from torch import Tensor

from entmtp.target.cpu import array
from entmtp.target.kernels import tree_mask
from entmtp.tree.topology import Topology


class GrownShape(Topology):
    """The shape of the kept candidates."""

    def __init__(self, parents: list[int], depths: list[int]):
        self.parents, self.depths = parents, depths


class GrownTree:
    """As CompiledTree, for one step: `tree` (its shape), `n`, `depths` [n], `tokens` [n], `mask_slice`."""

    def __init__(self, shape: GrownShape, tokens: Tensor, depths: Tensor, mask: Tensor, capacity: int):
        self.tree, self.n = shape, len(shape.parents)
        self.tokens, self.depths, self._mask, self._capacity = tokens, depths, mask, capacity

    def mask_slice(self, context: int) -> Tensor | None:
        return None if self.n == 1 else self._mask[:, self._capacity - context :]


class MaskPool:
    """One attention-mask buffer per tree size, written in place: a step allocates nothing."""

    def __init__(self, max_nodes: int, groups: int, capacity: int, dtype: torch.dtype, device: str):
        self.capacity, self.device, self.low = capacity, device, np.float32(torch.finfo(dtype).min)
        self.dtype = dtype
        kept = torch.float32 if dtype == torch.float16 else dtype  # the kernel knows no float16
        self.buffers = [torch.zeros(groups * n, capacity + n, dtype=kept) for n in range(1, max_nodes + 2)]

    def fill(self, parents: list[int]) -> Tensor:
        """Buffer [groups * n, capacity + n]: zeros on the context, the ancestors of n nodes on the right."""
        buffer = self.buffers[len(parents) - 1]
        tree_mask(array(buffer), self.capacity, np.asarray(parents), self.low)
        return buffer.to(self.device, self.dtype)
