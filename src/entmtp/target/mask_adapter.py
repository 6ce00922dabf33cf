"""Adapters that act on mask tokens only: a model that learns to read masks and reads real tokens as it always did.

Low-rank additions (LoRA, arXiv 2106.09685) to the layers' projections and an embedding for the mask. Rows that hold
real tokens go through the untouched weights (gated LoRA, arXiv 2507.11851), so keys, values and logits of a text are
the original model's (with our compiled engine to the bit): what the masks say can be verified by the model itself, in
the forward that asks them, and the text that comes out is the *original* model's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from entmtp.errors import EntmtpError

# projections that read the same vectors share the down-projection, as they share a matrix product in our engine
SHARING = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@dataclass
class Rows:
    """Which rows of a forward the adapters act on: those from `first` on, or none. Masks always come last."""

    first: int | None = None
    rank: int = 0  # of the adapters


@dataclass
class Adapter:
    """What the rows of masks get beside x @ weight.T: (x @ down.T) @ up.T, with down [rank, in], up [out, rank]."""

    down: Tensor
    up: Tensor
    rows: Rows


def fresh_down(rank: int, inputs: int, generator: torch.Generator) -> Tensor:
    """A down-projection [rank, in] before training; its up-projection is zero."""
    return nn.init.kaiming_uniform_(torch.empty(rank, inputs), a=math.sqrt(5), generator=generator)


def drawn_like(embedding: Tensor, generator: torch.Generator) -> Tensor:
    """A further row for an embedding [V, hidden], drawn from its rows' mean and variance, dimension by dimension."""
    noise = torch.randn(embedding.shape[1], generator=generator)
    return embedding.mean(dim=0) + embedding.std(dim=0) * noise


class MaskLinear(nn.Module):
    """base(x), and for rows that hold masks + scale · up(down(x)); starts as the base itself, which stays frozen."""

    def __init__(self, base: nn.Linear, down: nn.Parameter, scale: float, rows: Rows):
        super().__init__()
        self.base, self.down, self.scale, self.rows = base.requires_grad_(False), down, scale, rows
        self.up = nn.Parameter(torch.zeros(base.out_features, len(down)))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        first = self.rows.first
        if first is None:
            return self.base(x)
        masks = x[..., first:, :].flatten(0, -2)
        added = self.base(masks)
        # scaled where it is smallest and added in the product's own pass and memory: training is bound by such passes
        added.addmm_(self.scale * (masks @ self.down.to(x.dtype).T), self.up.to(x.dtype).T)
        added = added.view(*x.shape[:-2], -1, added.shape[-1])
        return added if first == 0 else torch.cat((self.base(x[..., :first, :]), added), dim=-2)


class MaskAdapter:
    """The adapters of a transformers causal LM, attached to its layers; the model's weights are frozen.

    `row` [hidden]: the mask's embedding. `mask_id`: the first token id that the model's embedding does not have.
    """

    def __init__(self, model: nn.Module, rank: int, alpha: float, seed: int):
        model.requires_grad_(False)
        self.rows = Rows(rank=rank)
        self.layers: dict[str, MaskLinear] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, parent in list(model.named_modules()):
            children = dict(parent.named_children())
            for names in SHARING:
                if all(isinstance(children.get(one), nn.Linear) for one in names):
                    shared = nn.Parameter(fresh_down(rank, children[names[0]].in_features, generator))
                    for one in names:
                        layer = MaskLinear(children[one], shared, alpha / rank, self.rows)
                        setattr(parent, one, layer)
                        self.layers[f"{name}.{one}"] = layer
        if not self.layers:
            wanted = ", ".join(one for names in SHARING for one in names)
            raise EntmtpError(f"mask adapters: the model has no linear layers named {wanted}")
        embedding = model.get_input_embeddings().weight.detach().float()
        self.mask_id, self.row = len(embedding), nn.Parameter(drawn_like(embedding, generator))

    def parameters(self) -> list[nn.Parameter]:
        return list(self.tensors().values())

    def tensors(self) -> dict[str, nn.Parameter]:
        """Name to parameter; a shared one has the name of the first layer that uses it."""
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, layer in self.layers.items():
            if id(layer.down) not in seen:
                seen.add(id(layer.down))
                found[f"{name}.down"] = layer.down
            found[f"{name}.up"] = layer.up
        return {**found, "mask_row": self.row}


def adapter_of(modules: Sequence[nn.Module], cast: Callable[[Tensor], Tensor]) -> Adapter | None:
    """The adapter of linear layers that are fused into one, or None."""
    if not isinstance(modules[0], MaskLinear):
        return None
    first = modules[0]
    return Adapter(cast(first.down), cast(first.scale * torch.cat([module.up for module in modules])), first.rows)
