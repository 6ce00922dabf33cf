"""Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers: few numbers to train, to keep and to ship."""

import torch
from torch import Tensor, nn

from entmtp.errors import EntmtpError
from entmtp.target.mask_adapter import fresh_down


class LoraLinear(nn.Module):
    """base(x) + (alpha / rank) · up(down(x)); starts as the base itself, whose weights stay frozen."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.down = nn.Parameter(fresh_down(rank, base.in_features, generator).to(base.weight))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank).to(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.scale * self.up @ self.down
        return self.base


class MaskRow(nn.Module):
    """An embedding whose row of one token is trained and whose other rows are not."""

    def __init__(self, base: nn.Embedding, token: int):
        super().__init__()
        self.base, self.token = base.requires_grad_(False), token
        self.row = nn.Parameter(base.weight.detach()[token].clone())

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.where((ids == self.token)[..., None], self.row, self.base(ids))

    def merged(self) -> nn.Embedding:
        with torch.no_grad():
            self.base.weight[self.token] = self.row
        return self.base


def add_mask_row(model: nn.Module, token: int) -> nn.Parameter:
    """Train the mask token's embedding beside adapters, which leave the embedding alone."""
    wrapped = MaskRow(model.get_input_embeddings(), token)
    model.set_input_embeddings(wrapped)
    return wrapped.row


def add_lora(model: nn.Module, rank: int, alpha: float, names: tuple[str, ...], seed: int) -> list[nn.Parameter]:
    """Freeze the model, put adapters on its linear layers of these last names; the adapters' parameters."""
    model.requires_grad_(False)
    generator, parameters = torch.Generator().manual_seed(seed), []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                adapter = LoraLinear(child, rank, alpha, generator)
                setattr(parent, name, adapter)
                parameters += [adapter.down, adapter.up]
    if not parameters:
        raise EntmtpError(f"LoRA: the model has no linear layers named {', '.join(names)}")
    return parameters


def merge(model: nn.Module) -> None:
    """Fold every adapter and mask row into its layer; the model is then an ordinary one again."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear | MaskRow):
                setattr(parent, name, child.merged())
