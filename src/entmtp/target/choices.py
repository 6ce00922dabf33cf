"""What is asked of logits: the largest, and its share. On a CPU by the compiled engine if there is one, else by Numba.

Live steps, traces and plain decoding use these very functions.
"""

import torch
from torch import Tensor

from entmtp.target import kernels
from entmtp.target.cpu import array, readable
from entmtp.target.native import library


def top1_prob(logits: Tensor) -> Tensor:
    """Largest softmax probability of each row: [n, v] -> float32 [n]."""
    if logits.device.type != "cpu":
        return logits.softmax(dim=-1, dtype=torch.float32).amax(dim=-1)
    logits = readable(logits)
    probability, compiled = torch.empty(len(logits)), _compiled(logits)
    if compiled is not None:
        compiled.top1(logits.data_ptr(), *logits.shape, probability.data_ptr())
    else:
        kernels.top1(array(logits), probability.numpy())
    return probability


def first_largest(scores: Tensor) -> list[int]:
    """Column of each row's largest of scores [n, v]: of equals the first on a CPU, elsewhere as torch decides."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1).tolist()
    scores = readable(scores)
    compiled = _compiled(scores)
    if compiled is None:
        values = array(scores)
        return [kernels.argmax(values, row) for row in range(len(values))]
    at, size = scores.data_ptr(), scores.shape[1]
    return [compiled.first_largest(at + scores.itemsize * size * row, size) for row in range(len(scores))]


def _compiled(values: Tensor):
    return library(torch.float32) if values.dtype == torch.float32 else None
