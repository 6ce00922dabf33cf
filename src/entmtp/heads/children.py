"""The likeliest drafts after some nodes, from draft logits: what every proposal consists of."""

import torch
from torch import Tensor

from entmtp.heads import kernels
from entmtp.target.cpu import array, readable


def best_children(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draft-vocabulary ids (int64) and probabilities (float32) [rows, count] of each row's likeliest, best first.

    logits [rows, draft_vocab]; of equal ones the lower id comes first on a CPU, elsewhere as torch.topk decides.
    Traces and live steps use this very function.
    """
    if logits.device.type != "cpu":
        top = logits.topk(count, dim=-1)
        return top.indices, (top.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
    ids, probability = torch.empty(len(logits), count, dtype=torch.long), torch.empty(len(logits), count)
    kernels.best_of_rows(array(readable(logits)), ids.numpy(), probability.numpy())
    return ids, probability
