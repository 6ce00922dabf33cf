"""Hydra++'s prefix attention (arXiv 2402.05109, section 4): one decoder layer over the target's hidden states.

The target's hidden state h_t was trained to choose token t + 1 alone. The layer attends over all hidden states up to t
and gives the heads a state s_t in h_t's place that was trained to tell several tokens. The layer has a key/value cache
of its own. Its inputs are hidden states of committed tokens only, so it never holds a rejected draft, and a tree
commit needs nothing but the accepted nodes' hidden states, in order.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from entmtp.target.cache import CausalMasks, mask_at
from entmtp.target.llama import FAMILY, FusedLayers


@dataclass
class PrefixFormat:
    """Shape of the layer, as `config.json` holds it under `prefix`."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float = 1e-5
    max_positions: int = 2048
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})


def prefix_like(config) -> PrefixFormat:
    """A layer of the shape of one of the target's own. `config` is the target's transformers config."""
    heads = config.num_attention_heads
    return PrefixFormat(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        eps=getattr(config, "rms_norm_eps", 1e-5),
        max_positions=config.max_position_embeddings,
        **({"rope": dict(config.rope_parameters)} if config.model_type in FAMILY else {}),  # others: plain rotary
    )


def make_prefix(form: PrefixFormat, hidden_size: int) -> nn.Module:
    """The layer as a transformers LlamaModel of one layer without embeddings, named as published heads name it."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1,
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=form.heads,
        num_key_value_heads=form.kv_heads,
        head_dim=form.head_dim,
        intermediate_size=form.intermediate_size,
        rms_norm_eps=form.eps,
        max_position_embeddings=form.max_positions,
        rope_parameters=dict(form.rope),
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # its initial weights are replaced: they must not move anybody's seed
        body = LlamaModel(config)
    body.embed_tokens = nn.Identity()  # it is fed hidden states
    return body


def reset_prefix(body: nn.Module, generator: torch.Generator, hidden_rms: float) -> None:
    """Start as nearly the identity: both residual branches add nothing, the final norm gives h's usual size back."""
    for name, parameter in body.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    nn.init.constant_(body.norm.weight, hidden_rms)


def prefix_states(body: nn.Module, hidden: Tensor, lengths: Tensor) -> Tensor:
    """Training: hidden [b, s, H], right-padded to `lengths` [b] -> states [b, s, H]; each text sees itself only."""
    real = torch.arange(hidden.shape[1], device=hidden.device)[None] < lengths[:, None]
    return body(inputs_embeds=hidden, attention_mask=real.long(), use_cache=False).last_hidden_state


class PrefixDecoder:
    """Decoding: the packed layer and its cache, which holds every committed hidden state seen so far."""

    def __init__(self, body: nn.Module, dtype: torch.dtype, device: str):
        self.layers = FusedLayers(body, dtype, device)
        self.reserve(1)

    def reserve(self, capacity: int) -> None:
        self.cache = self.layers.new_cache(capacity)
        self.length = torch.zeros(1, dtype=torch.long, device=self.layers.device)  # of the cache, for `advance_at`
        self.masks = CausalMasks(self.layers.groups, capacity, self.layers.dtype, self.layers.device)

    def reset(self) -> None:
        self.cache.reset()

    def advance(self, hidden: Tensor) -> Tensor:
        """Append hidden states [k, H] of newly committed tokens, in order. Returns their states [k, H]."""
        k, context = len(hidden), self.cache.length
        end = context + k
        # a prefill is causal by itself, a single row sees everything
        mask = self.masks(k, end) if k > 1 and context else None
        states = self.layers.run(hidden, torch.arange(context, end, device=hidden.device), self.cache, mask)
        self.cache.length = end
        return states

    def advance_at(self, hidden: Tensor, count: Tensor) -> Tensor:
        """As `advance`, for a CUDA graph: the first `count` [1] of `hidden` [k, H] are new. Returns the last one's
        state [1, H] and adds to `length`, which the caller sets after a prefill."""
        k, low = len(hidden), torch.finfo(self.layers.dtype).min
        rows = self.length + torch.arange(k, device=hidden.device)
        causal = torch.full((k, k), low, dtype=self.layers.dtype, device=hidden.device).triu(1)
        mask = mask_at(causal, rows, self.length, self.cache.capacity, self.layers.groups)
        positions = rows.clamp_max(len(self.layers.cos) - 1)  # of rows that are not new
        states = self.layers.run_at(hidden, positions, rows, self.cache, mask)
        self.length += count
        return states[count - 1]

    def states(self, hidden: Tensor) -> Tensor:
        """States [n, H] of a whole sequence [n, H] from its start, beside the decoding cache."""
        cache = self.layers.new_cache(len(hidden))
        return self.layers.run(hidden, torch.arange(len(hidden), device=hidden.device), cache, None)
