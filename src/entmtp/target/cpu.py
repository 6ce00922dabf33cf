"""The fused layers on a CPU: packed matrix products of oneDNN, and one compiled kernel between any two of them."""

from collections.abc import Callable

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


def readable(values: Tensor) -> Tensor:
    """As the compiled kernels read them: they know no float16 (a CPU computes in it for tests and conversions only)."""
    return (values.float() if values.dtype == torch.float16 else values).contiguous()


class Buffers:
    """Activations of n rows, reused by every step of that size."""

    def __init__(self, layers: FusedLayers, n: int, intermediate: int):
        def make(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=layers.dtype)

        self.residual = np.zeros((n, layers.hidden_size), dtype=np.float32)
        self.normed, self.active = make(n, layers.hidden_size), make(n, intermediate)
        self.queries = make(layers.heads * n, layers.head_dim)
        self.active_a, self.queries_a = array(self.active), array(self.queries)
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

        def attend(index: int, qkv: Tensor) -> Tensor:
            kv = cache.layer(index)
            kernels.rotate_store(array(qkv), self.cos, self.sin, at, m.heads, m.kv_heads, array(kv[0]), array(kv[1]),
                                 start, b.queries_a)  # fmt: skip
            out = F.scaled_dot_product_attention(b.grouped, kv[0, None, :, :end], kv[1, None, :, :end], attn_mask=mask)
            return out.view(m.heads, n, m.head_dim).transpose(0, 1).reshape(n, -1)

        def activate(gate_up: Tensor) -> Tensor:
            kernels.silu_mul(array(gate_up), b.active_a)
            return b.active

        return self.through(b.residual, b.normed, attend, activate)

    def through(
        self,
        residual: np.ndarray,
        normed: Tensor,
        attend: Callable[[int, Tensor], Tensor],
        activate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """All layers: residual [n, H] float32 (changed in place) -> final hidden states [n, H].

        `normed` [n, H] is scratch. attend(layer, qkv) stores keys and values and gives what is attended [n, heads d];
        activate(gate and up [n, 2 I]) gives [n, I].
        """
        scratch, delta = array(normed), None
        for index, (_, qkv_linear, out_linear, _, up_linear, down_linear) in enumerate(self.layers.blocks):
            norm1, norm2 = self.norms[index]
            if delta is None:
                kernels.rms_norm(residual, norm1, self.eps, scratch)
            else:
                kernels.add_rms_norm(residual, array(delta), norm1, self.eps, scratch)
            attended = attend(index, qkv_linear(normed))
            kernels.add_rms_norm(residual, array(out_linear(attended)), norm2, self.eps, scratch)
            delta = down_linear(activate(up_linear(normed)))
        hidden = torch.empty_like(normed)
        kernels.add_rms_norm(residual, array(delta), self.final, self.eps, array(hidden))
        return hidden


class BatchLayers:
    """One token for each of many sequences, each in a slot of a big cache [layers, 2, slots, kv_heads, rows, d]."""

    def __init__(self, one: CpuLayers, data: Tensor):
        self.one = one
        self.kv = [(array(data[index, 0]), array(data[index, 1])) for index in range(one.layers.layers)]
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))

    def run(self, x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states [b, H] of the vectors x [b, H]; sequence i is at `positions[i]` of its slot."""
        one, m = self.one, self.one.layers
        at, lengths, rows = positions.numpy(), (positions + 1).numpy(), slots.numpy()
        queries, attended = (torch.empty(len(x), m.heads * m.head_dim, dtype=m.dtype) for _ in range(2))
        scale = np.float32(m.head_dim**-0.5)

        def attend(index: int, qkv: Tensor) -> Tensor:
            keys, values = self.kv[index]
            kernels.batch_rotate_store(array(qkv), one.cos, one.sin, rows, at, m.heads, m.kv_heads, keys, values,
                                       array(queries))  # fmt: skip
            kernels.batch_attend(array(queries), keys, values, rows, lengths, m.groups, scale, array(attended))
            return attended

        def activate(gate_up: Tensor) -> Tensor:  # many rows: tensor operators use all threads
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up

        return one.through(x.float().numpy().copy(), torch.empty_like(x), attend, activate)
