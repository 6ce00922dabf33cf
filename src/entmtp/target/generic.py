"""The generic forward: any transformers causal LM with 4-D masks, on our own preallocated cache.

Every name of transformers that changes between releases (cache classes, forward arguments) stays in this module.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from entmtp.target.cache import KVCache


class _OwnLayer(CacheLayerMixin):
    """A transformers cache layer whose memory is none of transformers' business."""

    is_sliding = False

    def __init__(self):
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        pass  # there is nothing to allocate

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _Layer(_OwnLayer):
    """Writes into one layer of a KVCache and hands out views."""

    def __init__(self, owner: KVCache, index: int):
        super().__init__()
        self.owner, self.index = owner, index

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.owner.length
        end = start + key_states.shape[-2]
        kv = self.owner.layer(self.index)
        kv[0, :, start:end] = key_states[0]
        kv[1, :, start:end] = value_states[0]
        return kv[0, None, :, :end], kv[1, None, :, :end]

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return self.owner.capacity


class _Kept(_OwnLayer):
    """Keeps the first forward's keys and values and shows them to every later one, unchanged."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        return torch.cat((self.keys, key_states), dim=-2), torch.cat((self.values, value_states), dim=-2)

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def get_max_length(self) -> int:
        return -1


class _Growing(_OwnLayer):
    """Starts from what a `_Kept` holds and adds every forward's keys and values, gradients and all."""

    def __init__(self, kept: _Kept):
        super().__init__()
        self.keys, self.values = kept.keys, kept.values

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat((self.keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[-2]

    def get_max_length(self) -> int:
        return -1


def growing(context: Cache) -> Cache:
    """For forwards that see what `text_context` holds and one another; the context stays as it is."""
    return Cache(layers=[_Growing(layer) for layer in context.layers])


def text_context(model) -> Cache:
    """For keys and values of a batch of texts, read once by `run_layers` and seen by further forwards over them."""
    return Cache(layers=[_Kept() for _ in range(model.config.num_hidden_layers)])


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Booleans (True: sees) as what attention adds to its scores."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)


def run_layers(model, vectors: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """Last hidden states [b, n, hidden] of `vectors` [b, n, hidden] at `positions` [b, n] after what the cache holds.

    `mask` is additive [b, 1, n, context + n].
    """
    out = model.base_model(
        inputs_embeds=vectors, attention_mask=mask, position_ids=positions, use_cache=True, **{_CACHE_ARGUMENT: cache}
    )
    return out.last_hidden_state


def with_weights(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """The model on a device with its weights in a dtype. Buffers keep theirs: rotary frequencies are float32 whatever
    the weights are, and a rounded one is off by a radian some hundred positions on."""
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class GenericForward:
    """`hidden`, `logits`, `embed`, `new_cache` over a transformers model."""

    groups = 1  # mask rows are not repeated: transformers expands key heads itself

    def __init__(self, model, dtype: torch.dtype, device: str):
        self.model = with_weights(model, device, dtype).requires_grad_(False)
        self.dtype, self.device = dtype, device
        self.head_weight = model.get_output_embeddings().weight.detach()
        config = model.config
        self.layers = config.num_hidden_layers
        heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self.layers, self.kv_heads, self.head_dim, capacity, self.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def hidden(self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """Last hidden states [n, hidden]; `mask` is additive [n, context + n] or None (single token, prefill)."""
        n = len(tokens)
        cache.require(n)
        if mask is None:  # spelled out, so that no model falls back to a mask of its own guess
            sees = torch.ones(n, cache.length + n, dtype=torch.bool, device=self.device).tril(cache.length)
            mask = additive(sees, self.dtype)
        layers = Cache(layers=[_Layer(cache, index) for index in range(self.layers)])
        return run_layers(self.model, self.embed(tokens)[None], positions[None], mask[None, None], layers)[0]


# transformers 5.24 renamed the forward argument `past_key_values` to `cache` (the old name warns)
_CACHE_ARGUMENT = "cache"
