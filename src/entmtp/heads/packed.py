"""What all drafters share: weights packed in the target's dtype, the restricted projection, the state of a position."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from entmtp.errors import EntmtpError
from entmtp.heads.children import best_children
from entmtp.heads.model import DraftHeads, ResidualFirst, residual_first, run_body
from entmtp.heads.prefix import PrefixDecoder
from entmtp.target.linear import LinearFn, make_linear
from entmtp.target.native import NativeLinear, library


def matrices(target, storage: str) -> Callable[..., LinearFn]:
    """How a head's matrix (weight [out, in], bias [out] or None) is read in decoding; see PackedHeads."""
    small = storage == "bfloat16" and target.device == "cpu" and library(torch.bfloat16) is not None

    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(device=target.device, dtype=target.dtype)

    def matrix(weight: Tensor, bias: Tensor | None = None) -> LinearFn:
        if small:  # for any number of rows: traces must see what steps see
            offset = None if bias is None else bias.detach().float()
            return NativeLinear(weight.detach().bfloat16(), offset, exact=target.dtype == torch.float32)
        return make_linear(cast(weight), cast(bias))

    return matrix


class PackedHeads:
    """Weights of DraftHeads, packed. `state` [1, H] is what the heads of the current position start from.

    With `storage` "bfloat16" the compiled engine, where there is one, reads the heads' matrices as bfloat16 (arithmetic
    stays float32) whatever the target's dtype: half the bytes of a proposal, and what the target decides is untouched.
    """

    def __init__(self, heads: DraftHeads, target, width: int, storage: str = "target"):
        self.config, self.target = heads.config, target
        self.arch, self.depth = heads.config.arch, heads.config.depth
        if width > heads.config.draft_vocab:
            raise EntmtpError(f"heads.width={width} exceeds the draft vocabulary of {heads.config.draft_vocab}")
        self.width, matrix = width, matrices(target, storage)

        def packed(linear: torch.nn.Linear, embedding_scale: float = 1.0) -> LinearFn:
            weight = linear.weight.detach().clone()
            weight[:, heads.config.hidden_size :] *= embedding_scale  # folded into what meets the embeddings
            return matrix(weight, linear.bias)

        self.prefix = None if heads.prefix is None else PrefixDecoder(heads.prefix, target.dtype, target.device)
        self.token_map = heads.token_map.long().to(target.device)
        self.blocks = [[packed(block) for block in blocks] for blocks in heads.blocks]
        scale = heads.config.embedding_scale
        self.first: list[LinearFn | None] = [None] * self.depth
        for d, layer in enumerate(heads.first):
            if isinstance(layer, ResidualFirst):
                parts = packed(layer.linear, scale), packed(layer.res_connection, scale)
                self.first[d] = partial(_apply_residual_first, *parts)
            else:
                self.first[d] = packed(layer, scale)
        if heads.config.projection == "own":
            self.projections = [packed(projection) for projection in heads.projections]
        else:
            self.projections = [matrix(target.head_rows(self.token_map))] * self.depth

    @property
    def history(self) -> bool:
        """Whether `start` needs every committed token's hidden state, or the last one only."""
        return self.prefix is not None

    def reserve(self, capacity: int) -> None:
        """Make room for texts of `capacity` tokens."""
        if self.prefix is not None:
            self.prefix.reserve(capacity)

    def reset(self) -> None:
        """A new text begins."""
        if self.prefix is not None:
            self.prefix.reset()

    def states(self, hidden: Tensor) -> Tensor:
        """States [n, H] at all positions of a sequence of hidden states [n, H] that starts with the text."""
        return hidden if self.prefix is None else self.prefix.states(hidden)

    def start(self, hidden: Tensor, root: int) -> None:
        """A new position: `hidden` [k, H] of the tokens committed since the last start (the whole prompt at first; the
        last row will do without prefix attention), which chose `root`."""
        state = hidden[-1:] if self.prefix is None else self.prefix.advance(hidden)[-1:]
        self.begin(state, torch.tensor([root], device=self.target.device))

    def start_at(self, hidden: Tensor, count: Tensor, root: Tensor) -> None:
        """As `start`, for a CUDA graph: of `hidden` [k, H] the first `count` [1] rows are new, `root` is [1]."""
        self.begin(hidden[count - 1] if self.prefix is None else self.prefix.advance_at(hidden, count), root)

    def logits(self, depth: int, x: Tensor) -> Tensor:
        """Draft logits [n, draft_vocab] of head `depth` from its input x [n, in]."""
        return self.projections[depth - 1](run_body(x, self.first[depth - 1], self.blocks[depth - 1]))

    def candidates(self, logits: Tensor) -> Tensor:
        """Draft-vocabulary ids [n, width], best first."""
        return best_children(logits, self.width)[0]


def _apply_residual_first(linear: LinearFn, res_connection: LinearFn, x: Tensor) -> Tensor:
    return residual_first(x, linear, res_connection)
