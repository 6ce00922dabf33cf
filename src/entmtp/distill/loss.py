"""The objective: what the student says in one forward, corrected by what the teacher says when it reads just that.

*Student forcing*: the student's own choices are written into the masks' places, and the frozen teacher, which started
from the same weights, reads them under the same attention. So the teacher judges the continuation that the student
would have committed, not the corpus' one, and no labels are needed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entmtp.distill.mask_token import without_mask
from entmtp.distill.packing import Batch


@dataclass
class Outcome:
    """`loss` to differentiate; how often the teacher agrees, and tokens a block that the student would commit at a
    confidence of 0.9 (ConfAdapt's), both over the blocks that count."""

    loss: Tensor
    agreement: float
    block: float


def predictions(model: nn.Module, batch: Batch, ids: Tensor, mask_id: int) -> Tensor:
    """Logits [b, R, k, V] at the batch's predicting places, with `ids` [b, W] as input."""
    weight = model.get_input_embeddings().weight
    mask = torch.zeros(batch.mask.shape, dtype=weight.dtype, device=weight.device)
    mask = mask.masked_fill_(~batch.mask, torch.finfo(weight.dtype).min)
    hidden = model.base_model(input_ids=ids, attention_mask=mask, position_ids=batch.positions, use_cache=False)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    logits = model.get_output_embeddings()(hidden.last_hidden_state[rows, batch.predict]).float()
    return without_mask(logits, mask_id) if mask_id < logits.shape[-1] else logits


def distillation(
    student: nn.Module,
    teacher: nn.Module,
    batch: Batch,
    mask_id: int,
    stop_ids: set[int],
    soft: bool = False,
    prefix_threshold: float | None = None,
) -> Outcome:
    """Hard teacher: cross-entropy with its argmax. Soft: KL divergence from its distribution (zero when they agree).

    Mean over blocks × k. After the teacher's first stop id in a block nothing counts: decoding ends there. With
    `prefix_threshold` only the predictions count that ConfAdapt would reach at this threshold: the student's confident
    prefix and the first one after it.
    """
    logits = predictions(student, batch, batch.ids, mask_id)
    confidence, chosen = logits.detach().softmax(dim=-1).max(dim=-1)
    with torch.no_grad():
        judged = predictions(teacher, batch, batch.forced(chosen), mask_id)
        labels = judged.argmax(dim=-1)
    counts = batch.real[..., None] & before_first(torch.isin(labels, torch.tensor(sorted(stop_ids)).to(labels)))
    if prefix_threshold is not None:
        counts = counts & before_first(confidence < prefix_threshold)
    aligned = logits[..., : judged.shape[-1]]  # the teacher may lack the mask's column
    if soft:
        target = judged.softmax(dim=-1)
        each = F.kl_div(aligned.log_softmax(dim=-1), target, reduction="none").nan_to_num(0.0).sum(dim=-1)
    else:
        each = F.cross_entropy(aligned.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    weight = counts.float()
    with torch.no_grad():
        agreement = float(((chosen == labels) & counts).sum() / counts.sum().clamp_min(1))
        sure = (confidence[..., 1:] >= 0.9).long().cumprod(dim=-1).sum(dim=-1)
        block = 1 + float(sure[batch.real].float().mean())
    return Outcome((each * weight).sum() / weight.sum().clamp_min(1), agreement, block)


def before_first(events: Tensor) -> Tensor:
    """[..., k] -> [..., k]: True up to the first event, that included."""
    return (events.long().cumsum(dim=-1) - events.long()) == 0
