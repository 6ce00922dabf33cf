"""Draft heads at decoding time: one state a step, any topology filled without Python loops over nodes.

A step has two parts, because a policy looks at the heads' confidence before it picks a tree:

    drafter.reset()                  # a new text
    drafter.start(hidden, root)      # a new position
    drafter.extend(depth)            # heads along the greedy draft path
    drafter.greedy_probs(depth)      # their top-1 probabilities q_1..q_depth
    drafter.fill(tree)               # token ids of the whole tree, root first

What the second part computed is reused by the third where it is the same evaluation.
"""

from typing import Protocol

from torch import Tensor

from entmtp.heads.hydra import HydraDrafter
from entmtp.heads.medusa import MedusaDrafter
from entmtp.heads.model import DraftHeads
from entmtp.target.choices import top1_prob
from entmtp.tree.compiled import CompiledTree

__all__ = ["Drafter", "make_drafter", "top1_prob"]


class Drafter(Protocol):
    depth: int
    width: int
    arch: str
    history: bool

    def reserve(self, capacity: int) -> None: ...
    def reset(self) -> None: ...
    def start(self, hidden: Tensor, root: int) -> None: ...
    def start_at(self, hidden: Tensor, count: Tensor, root: Tensor) -> None: ...
    def carried(self) -> list[Tensor]: ...
    def resume(self, carried: list[Tensor]) -> None: ...
    def extend(self, depth: int) -> None: ...
    def greedy_probs(self, depth: int) -> Tensor: ...
    def fill(self, compiled: CompiledTree) -> Tensor: ...
    def states(self, hidden: Tensor) -> Tensor: ...
    def path_logits(self, depth: int, state: Tensor, paths: Tensor) -> Tensor: ...
    def candidates(self, logits: Tensor) -> Tensor: ...


def make_drafter(heads: DraftHeads, target, width: int, storage: str = "target") -> MedusaDrafter | HydraDrafter:
    """Packed drafter of `heads` for `target`; `width` candidates a node (clear error beyond the draft vocabulary).

    `storage`: of the heads' matrices, see PackedHeads.
    """
    return (MedusaDrafter if heads.config.arch == "medusa" else HydraDrafter)(heads, target, width, storage)
