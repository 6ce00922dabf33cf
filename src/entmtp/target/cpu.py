"""The fused layers on a CPU: packed matrix products of oneDNN, and one compiled kernel between any two of them."""

import numba
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


class BatchLayers:
    """One token for each of many sequences, each in a slot of a big cache [layers, 2, slots, kv_heads, rows, d]."""

    def __init__(self, one: "CpuLayers", data: Tensor):
        self.one, self.data = one, data
        self.kv = [(array(data[index, 0]), array(data[index, 1])) for index in range(one.layers.layers)]
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))

    def run(self, x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states [b, H] of the vectors x [b, H]; sequence i is at `positions[i]` of its slot."""
        one, m, b = self.one, self.one.layers, len(x)
        at, lengths, rows = positions.numpy(), (positions + 1).numpy(), slots.numpy()
        residual = x.float().numpy().copy()
        normed = torch.empty(b, m.hidden_size, dtype=m.dtype)
        queries, attended = (torch.empty(b, m.heads * m.head_dim, dtype=m.dtype) for _ in range(2))
        scale = np.float32(m.head_dim**-0.5)
        delta = None
        for (_, qkv_linear, out_linear, _, up_linear, down_linear), (norm1, norm2), (keys, values) in zip(
            m.blocks, one.norms, self.kv, strict=True
        ):
            if delta is None:
                kernels.rms_norm(residual, norm1, one.eps, array(normed))
            else:
                kernels.add_rms_norm(residual, array(delta), norm1, one.eps, array(normed))
            kernels.batch_rotate_store(array(qkv_linear(normed)), one.cos, one.sin, rows, at, m.heads, m.kv_heads,
                                       keys, values, array(queries))  # fmt: skip
            kernels.batch_attend(array(queries), keys, values, rows, lengths, m.groups, scale, array(attended))
            kernels.add_rms_norm(residual, array(out_linear(attended)), norm2, one.eps, array(normed))
            gate, up = up_linear(normed).chunk(2, dim=-1)  # many rows: tensor operators use all threads
            delta = down_linear(F.silu(gate) * up)
        hidden = torch.empty(b, m.hidden_size, dtype=m.dtype)
        kernels.add_rms_norm(residual, array(delta), one.final, one.eps, array(hidden))
        return hidden


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
