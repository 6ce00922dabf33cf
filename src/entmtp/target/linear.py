"""Linear layers for decoding: weights reordered once on the CPU, plain `F.linear` elsewhere."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp.target.mask_adapter import Adapter
from entmtp.target.native import NativeLinear, library

LinearFn = Callable[[Tensor], Tensor]

# The block layout that oneDNN chooses depends on the number of rows it is told to expect. 16 suits draft trees.
EXPECTED_ROWS = 16
MOST_ROWS = 96  # of a step


def takes_all(dtype: torch.dtype) -> bool:
    """Whether the compiled engine, where there is one, multiplies any number of rows itself.

    In bfloat16 more than MOST_ROWS go to oneDNN's matrix unit; without such a unit oneDNN is several times slower than
    the engine.
    """
    return dtype == torch.float32 or not library(dtype).unit


class AdaptedLinear:
    """A linear layer and what rows of masks add to it."""

    def __init__(self, linear: LinearFn, adapter: Adapter):
        self.linear, self.adapter = linear, adapter

    def __call__(self, x: Tensor) -> Tensor:
        out, first = self.linear(x), self.adapter.rows.first
        if first is not None:
            out[first:] += F.linear(F.linear(x[first:], self.adapter.down), self.adapter.up)
        return out


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    pack: bool = True,
    native: bool = True,
    paired: bool = False,
    adapter: Adapter | None = None,
) -> LinearFn:
    """Return x [n, in] -> [n, out]. On the CPU `weight` [out, in] is packed: for our own compiled engine where there is
    one (`native`; `paired` as there; its results are float32), else for oneDNN.

    In bfloat16 both, unless the engine `takes_all`.

    oneDNN's packing operators are private to torch, so they live in this one function and a test holds them equal to
    `F.linear` (FACTS 2: packing nearly halves a matrix product of few rows).
    """
    if adapter is not None:
        return AdaptedLinear(make_linear(weight, bias, pack, native, paired), adapter)
    weight = weight.detach().contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    if pack and native and weight.device.type == "cpu" and library(weight.dtype) is not None:
        few = NativeLinear(weight, bias, paired)
        if takes_all(weight.dtype):
            return few
        many = make_linear(weight, bias, native=False)
        return lambda x: few(x) if x.numel() <= MOST_ROWS * x.shape[-1] else many(x.to(weight.dtype)).float()
    if pack and weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
            op = torch.ops.mkldnn._linear_pointwise
            op(torch.zeros(1, weight.shape[1], dtype=weight.dtype), packed, bias, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):
            pass  # this build or processor has no such kernel for this dtype
        else:
            return lambda x: op(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)
