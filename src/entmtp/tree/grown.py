"""Trees that are grown anew at each step from the heads' own probabilities, instead of picked from a bank."""

from torch import Tensor

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
