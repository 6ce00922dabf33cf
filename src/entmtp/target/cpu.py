"""The fused layers on a CPU: packed matrix products of oneDNN, and one compiled kernel between any two of them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp.target import kernels
from entmtp.target.cache import KVCache
from entmtp.target.llama import FusedLayers


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as NumPy sees it: float32, or bfloat16 as int16 bit patterns."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class Buffers:
    """Activations of n rows, reused by every step of that size."""

    def __init__(self, layers: FusedLayers, n: int, intermediate: int):
        def make(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=layers.dtype)

        self.residual = np.zeros((n, layers.hidden_size), dtype=np.float32)
        self.normed, self.active = make(n, layers.hidden_size), make(n, intermediate)
        self.queries = make(layers.heads * n, layers.head_dim)
        self.normed_a, self.active_a, self.queries_a = (array(t) for t in (self.normed, self.active, self.queries))
        self.grouped = self.queries.view(1, layers.kv_heads, layers.groups * n, layers.head_dim)


class CpuLayers:
    """Runs a FusedLayers' weights. Residual stream, norms, activations and rotations are float32 in every dtype."""

    def __init__(self, layers: FusedLayers):
        self.layers = layers
        self.norms = [(n1.float().numpy(), n2.float().numpy()) for n1, _, _, n2, _, _ in layers.blocks]
        self.final = layers.final_norm.float().numpy()
        self.cos, self.sin = (table.detach().float().contiguous().numpy() for table in layers.rotary)
        self.eps = np.float32(layers.eps)
        self.buffers: dict[int, Buffers] = {}

    def run(self, x: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """As FusedLayers.run, for few rows on a non-empty cache or a single one."""
        m, n, start = self.layers, len(x), cache.length
        end = start + n
        if n not in self.buffers:
            self.buffers[n] = Buffers(m, n, m.intermediate_size)
        b, at = self.buffers[n], positions.numpy()
        b.residual[:] = x.float().numpy()
        delta = None
        for index, (_, qkv_linear, out_linear, _, up_linear, down_linear) in enumerate(m.blocks):
            norm1, norm2 = self.norms[index]
            if delta is None:
                kernels.rms_norm(b.residual, norm1, self.eps, b.normed_a)
            else:
                kernels.add_rms_norm(b.residual, array(delta), norm1, self.eps, b.normed_a)
            kv = cache.layer(index)
            keys, values = array(kv[0]), array(kv[1])
            kernels.rotate_store(array(qkv_linear(b.normed)), self.cos, self.sin, at, m.heads, m.kv_heads, keys,
                                 values, start, b.queries_a)  # fmt: skip
            out = F.scaled_dot_product_attention(b.grouped, kv[0, None, :, :end], kv[1, None, :, :end], attn_mask=mask)
            out = out.view(m.heads, n, m.head_dim).transpose(0, 1).reshape(n, -1)
            kernels.add_rms_norm(b.residual, array(out_linear(out)), norm2, self.eps, b.normed_a)
            kernels.silu_mul(array(up_linear(b.normed)), b.active_a)
            delta = down_linear(b.active)
        hidden = torch.empty(n, m.hidden_size, dtype=m.dtype)
        kernels.add_rms_norm(b.residual, array(delta), self.final, self.eps, array(hidden))
        return hidden
