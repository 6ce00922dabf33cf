"""The fused forward of the Llama family: q/k/v in one matrix, gate/up in one, packed weights, one KV tensor.

Covers Llama, Mistral, Qwen2, SmolLM and Vicuna: RMS norm, rotary positions, SiLU-gated MLP, grouped-query attention,
optional projection biases, tied or untied head. On a CPU the compiled engine (`target/native.py`) runs it,
elsewhere kernels between matrix products or plain tensor operators. It is built from a loaded transformers model, which
thus stays the one place that knows checkpoint formats, rotary variants and weight names.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp.target.cache import KVCache
from entmtp.target.linear import MOST_ROWS, make_linear, takes_all
from entmtp.target.mask_adapter import Rows, adapter_of
from entmtp.target.native import NativeLayers, NativeLinear, covers

FAMILY = ("llama", "mistral", "qwen2")


def supports(config) -> bool:
    """Whether the fused forward covers this transformers config exactly (otherwise the generic forward serves)."""
    if config.model_type not in FAMILY or getattr(config, "hidden_act", "silu") != "silu":
        return False
    sliding = getattr(config, "use_sliding_window", config.model_type == "mistral")
    if sliding and config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        return False
    # rotary variants whose tables change with the sequence length cannot be tabulated once
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in ("dynamic", "longrope")


class FusedLayers:
    """Decoder layers and final norm of a transformers Llama-family body: vectors in, hidden states out."""

    def __init__(self, body, dtype: torch.dtype, device: str, compiled: bool = True):
        config = body.config
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.groups = self.heads // self.kv_heads
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.dtype, self.device = dtype, device
        self.rows = getattr(body.layers[0].self_attn.q_proj, "rows", None) or Rows()

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(device=device, dtype=dtype)

        def blocks(make: Callable) -> list[tuple]:
            def fuse(*modules, paired: bool = False):
                weight = torch.cat([cast(m.weight) for m in modules])
                bias = torch.cat([cast(m.bias) for m in modules]) if modules[0].bias is not None else None
                return make(weight, bias, paired=paired, adapter=adapter_of(modules, cast))

            return [
                (
                    cast(layer.input_layernorm.weight),
                    fuse(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                    fuse(layer.self_attn.o_proj),
                    cast(layer.post_attention_layernorm.weight),
                    fuse(layer.mlp.gate_proj, layer.mlp.up_proj, paired=True),
                    fuse(layer.mlp.down_proj),
                )
                for layer in body.layers
            ]

        native = blocks(NativeLinear) if compiled and covers(self) else None
        if native is not None and takes_all(dtype):
            self.blocks = [tuple(self._rounded(part) for part in block) for block in native]
        else:
            self.blocks = blocks(partial(make_linear, native=False))
        self.final_norm = cast(body.norm.weight)
        self._build_rotary(body, config.max_position_embeddings)
        self.native = None if native is None else NativeLayers(self, native)
        self.cpu = self._compiled() if compiled else None

    def _rounded(self, part: Tensor | NativeLinear) -> Tensor | Callable[[Tensor], Tensor]:
        """Of a block of the engine's: a linear layer whose results have the layers' dtype."""
        rounds = isinstance(part, NativeLinear) and self.dtype != torch.float32
        return (lambda x: part(x).to(self.dtype)) if rounds else part

    def _compiled(self):
        """The same layers with one compiled kernel between any two matrix products."""
        if self.device != "cpu" or self.dtype not in (torch.float32, torch.bfloat16):
            return None
        from entmtp.target.cpu import CpuLayers

        return CpuLayers(self)

    def _build_rotary(self, body, positions: int) -> None:
        index = torch.arange(positions)[None]
        cos, sin = body.rotary_emb(torch.zeros(1, 1, dtype=torch.float32), index)  # [1, positions, head_dim]
        half = self.head_dim // 2
        # x * cos + roll(x, half) * sin equals transformers' rotate_half once the first half of sin is negated
        sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self.rotary = cos[0], sin  # float32 [positions, head_dim]
        self.cos = cos[0].to(self.device, self.dtype)[:, None]  # [positions, 1, head_dim]
        self.sin = sin.to(self.device, self.dtype)[:, None]

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self.layers, self.kv_heads, self.head_dim, capacity, self.dtype, self.device)

    def run(self, x: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """Final-norm hidden states [n, hidden] of the vectors `x` [n, hidden] at `positions` [n].

        `mask` is additive [groups * n, context + n], rows repeated once per query group; None for a single vector
        (it sees everything) and for a prefill (causal, onto an empty cache).
        """
        n, start = len(x), cache.length
        cache.require(n)
        if self.native is not None and (n <= MOST_ROWS or takes_all(self.dtype)):
            return self.native.run(x, positions, cache, mask)
        x = x.to(self.dtype)
        if self.cpu is not None and n <= MOST_ROWS and (mask is not None or n == 1):
            return self.cpu.run(x, positions, cache, mask)

        def keep(index: int, keys: Tensor, values: Tensor) -> Tensor:
            kv = cache.layer(index)
            kv[0, :, start : start + n], kv[1, :, start : start + n] = keys, values
            return kv[:, :, : start + n]

        return self._through(x, positions, keep, mask, mask is None and n > 1)

    def run_at(self, x: Tensor, positions: Tensor, rows: Tensor, cache: KVCache, mask: Tensor) -> Tensor:
        """As `run`, but no number of the host decides anything, so that a CUDA graph can repeat it: new keys and values
        go to `rows` [n] of the cache, and `mask` [groups * n, capacity] says which of all its rows are seen.
        """

        def keep(index: int, keys: Tensor, values: Tensor) -> Tensor:
            kv = cache.layer(index)
            kv[0].index_copy_(1, rows, keys)
            kv[1].index_copy_(1, rows, values)
            return kv

        return self._through(x.to(self.dtype), positions, keep, mask, False)

    def _through(
        self,
        x: Tensor,
        positions: Tensor,
        keep: Callable[[int, Tensor, Tensor], Tensor],
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """All layers by tensor operators. keep(layer, keys, values [kv_heads, n, d]) stores them and gives what is
        attended to [2, kv_heads, s, d].
        """
        n = len(x)
        cos, sin = self.cos[positions], self.sin[positions]
        rotated_heads = self.heads + self.kv_heads
        for index, (norm1, qkv_linear, out_linear, norm2, up_linear, down_linear) in enumerate(self.blocks):
            h = F.rms_norm(x, (self.hidden_size,), norm1, self.eps)
            qkv = qkv_linear(h).view(n, rotated_heads + self.kv_heads, self.head_dim)
            qk = qkv[:, :rotated_heads]
            qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
            kv = keep(index, qk[:, self.heads :].transpose(0, 1), qkv[:, rotated_heads:].transpose(0, 1))
            x = x + out_linear(self._attend(qk[:, : self.heads], kv, mask, causal))
            h = F.rms_norm(x, (self.hidden_size,), norm2, self.eps)
            gate, up = up_linear(h).chunk(2, dim=-1)
            x = x + down_linear(F.silu(gate) * up)
        return F.rms_norm(x, (self.hidden_size,), self.final_norm, self.eps)

    def _attend(self, q: Tensor, kv: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q [n, heads, d] over kv [2, kv_heads, s, d] -> [n, heads * d].

        Query heads of one key head become rows of one attention problem, so keys are read once a group.
        """
        n = q.shape[0]
        if causal:
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], kv[0][None], kv[1][None], is_causal=True, enable_gqa=self.groups > 1
            )
            return out[0].transpose(0, 1).reshape(n, -1)
        rows = q.view(n, self.kv_heads, self.groups, self.head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(1, self.kv_heads, self.groups * n, self.head_dim)
        out = F.scaled_dot_product_attention(rows, kv[0][None], kv[1][None], attn_mask=mask)
        out = out.view(self.kv_heads, self.groups, n, self.head_dim).permute(2, 0, 1, 3)
        return out.reshape(n, -1)


class FusedLlama(FusedLayers):
    """A causal LM: embedding, layers, vocabulary head. `hidden` takes any ancestor mask among the new tokens."""

    def __init__(self, model, dtype: torch.dtype, device: str, compiled: bool = True):
        super().__init__(model.model, dtype, device, compiled)
        embedding, projection = model.get_input_embeddings().weight, model.get_output_embeddings()

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=device, dtype=dtype).contiguous()

        self.embedding = cast(embedding)
        self.head_weight = self.embedding if projection.weight is embedding else cast(projection.weight)
        bias = None if projection.bias is None else cast(projection.bias)
        self.head = make_linear(self.head_weight, bias, native=compiled)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def hidden(self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """Final-norm hidden states [n, hidden] of `tokens` [n]; see `run`."""
        return self.run(self.embed(tokens), positions, cache, mask)

    def hidden_at(self, tokens: Tensor, positions: Tensor, rows: Tensor, cache: KVCache, mask: Tensor) -> Tensor:
        """As `hidden`, for a CUDA graph; see `run_at`."""
        return self.run_at(self.embed(tokens), positions, rows, cache, mask)
