"""The one token that a model must gain: the mask, whose embedding is drawn like the others."""

from typing import Any

import torch
from torch import nn

from entmtp.target.mask_adapter import drawn_like

MASK = "<|mtp_mask|>"


def add_mask_token(model: nn.Module, tokenizer: Any, seed: int) -> int:
    """Give a transformers causal LM and its tokenizer the mask token; its id, kept in the config as `mtp_mask_id`.

    The embedding is drawn from the mean and variance of all others, dimension by dimension. A vocabulary that was
    padded beyond the tokenizer's has a row for it already; otherwise one is appended.
    """
    tokenizer.add_tokens([MASK], special_tokens=True)
    mask_id = tokenizer.convert_tokens_to_ids(MASK)
    others = model.get_input_embeddings().weight.detach().float()
    if mask_id >= len(others):
        model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
    row = drawn_like(others, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):
            matrix.weight[mask_id] = row.to(matrix.weight)
    model.config.mtp_mask_id = mask_id
    return mask_id
