"""Forwards of a model whose adapter reads mask tokens: real tokens' rows are what they are without it, bit for bit."""

import torch
from torch import Tensor

from entmtp.target.cache import KVCache
from entmtp.target.generic import GenericForward
from entmtp.target.llama import FusedLlama
from entmtp.target.mask_adapter import MaskAdapter


class _ReadsMasks:
    """Beside a forward: tokens `mask_id` come last among a forward's, and are read through the adapter."""

    def __init__(self, model, adapter: MaskAdapter, dtype: torch.dtype, device: str):
        for parameter in adapter.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.to(device, dtype)
        super().__init__(model, dtype, device)
        self.rows, self.mask_id, self.mask_row = adapter.rows, adapter.mask_id, adapter.row.detach()

    def embed(self, tokens: Tensor) -> Tensor:
        masks = tokens == self.mask_id
        return torch.where(masks[:, None], self.mask_row, super().embed(tokens.masked_fill(masks, 0)))

    def hidden(self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """As the forward's own, of real tokens and then masks."""
        masks = int((tokens == self.mask_id).sum())
        self.rows.first = len(tokens) - masks if masks else None
        try:
            return super().hidden(tokens, positions, cache, mask)
        finally:
            self.rows.first = None


class MaskLlama(_ReadsMasks, FusedLlama):
    pass


class MaskGeneric(_ReadsMasks, GenericForward):
    pass
