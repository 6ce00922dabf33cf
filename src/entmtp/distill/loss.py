"""The objective: what the student says in one forward, corrected by what the teacher says when it reads just that.

*Student forcing*: the student's own choices are written into the masks' places, and the frozen teacher, which started
from the same weights, reads them under the same attention. So the teacher judges the continuation that the student
would have committed, not the corpus' one, and no labels are needed.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entmtp.distill.packing import UNKNOWN, Batch
from entmtp.target.generic import additive

SURE = math.log(0.9)


@dataclass
class Outcome:
    """`loss` to differentiate; how often the teacher agrees, over what counts; `block`: 1 and the masks in a row that
    are at least 0.9 sure, of a block. That is what ConfAdapt would commit at this threshold wherever the block's first
    prediction, the ordinary one, is as sure; it stops there where it is not."""

    loss: Tensor
    agreement: float
    block: float


def predictions(model: nn.Module, batch: Batch, ids: Tensor, mask_id: int) -> Tensor:
    """Log-probabilities [n, k, V] of the batch's n blocks, row by row, with `ids` [b, W] read; -inf for the mask."""
    weight = model.get_input_embeddings().weight
    mask = additive(batch.mask, weight.dtype)
    hidden = model.base_model(input_ids=ids, attention_mask=mask, position_ids=batch.positions, use_cache=False)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None].expand_as(batch.predict)
    chosen = hidden.last_hidden_state[rows[batch.real], batch.predict[batch.real]]
    head = model.get_output_embeddings()
    # in the product's own pass: a pass over [n, k, V] takes as long as several layers
    bias = torch.zeros(len(head.weight), dtype=weight.dtype, device=weight.device)
    bias[mask_id : mask_id + 1] = -torch.inf
    bias = bias if getattr(head, "bias", None) is None else bias + head.bias
    return F.linear(chosen, head.weight, bias).float().log_softmax(dim=-1)


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
    said = predictions(student, batch, batch.ids, mask_id)
    with torch.no_grad():
        judged = predictions(teacher, batch, batch.forced(said.max(dim=-1).indices), mask_id)
    return against_teacher(said, judged, stop_ids, soft, prefix_threshold)


def against_teacher(
    said: Tensor, judged: Tensor, stop_ids: set[int], soft: bool, prefix_threshold: float | None,
    counting: Tensor | None = None, own: int = 1,
) -> Outcome:  # fmt: skip
    """Outcome of the student's log-probabilities `said` [n, k, V] against the teacher's logits at the same places; see
    `distillation`. `counting` [n]: blocks that count at all. `own`: leading predictions that are no mask's."""
    best, chosen = said.detach().max(dim=-1)
    labels = judged.max(dim=-1).indices  # argmax takes twice as long on a CPU
    counts = before_stop(labels, stop_ids)
    if counting is not None:
        counts = counts & counting[:, None]
    if prefix_threshold is not None:
        counts = counts & before_first(best.exp() < prefix_threshold)
    return _outcome(losses(said, judged, labels, soft), counts, best[:, own:], chosen == labels)


def losses(said: Tensor, judged: Tensor, labels: Tensor, soft: bool) -> Tensor:
    """Of each of the student's log-probabilities `said` [..., V]: cross-entropy with the teacher's choices `labels`
    [...], or KL divergence from its distribution (logits `judged` [..., V])."""
    if not soft:
        return -said.gather(-1, labels[..., None])[..., 0]
    aligned = said[..., : judged.shape[-1]]  # the teacher may lack the mask's column
    return F.kl_div(aligned, judged.float().softmax(dim=-1), reduction="none").nan_to_num(0.0).sum(dim=-1)


def text_loss(student: nn.Module, batch: Batch, mask_id: int, stop_ids: set[int]) -> Outcome:
    """Cross-entropy with what the text itself says next, up to its first stop id. The text is the teacher's own greedy
    one, so the labels are its choices after the true tokens instead of after the student's: a cheaper start (no forward
    of the teacher), while the student's choices are still those of a stranger to masks."""
    return against_text(predictions(student, batch, batch.ids, mask_id), batch.text[batch.real], stop_ids)


def against_text(
    said: Tensor, text: Tensor, stop_ids: set[int], counting: Tensor | None = None, own: int = 1
) -> Outcome:
    """Outcome of the student's log-probabilities `said` [n, k, V] against the text's tokens [n, k]; see `text_loss`."""
    best, chosen = said.detach().max(dim=-1)
    counts = (text != UNKNOWN) & before_stop(text, stop_ids)
    if counting is not None:
        counts = counts & counting[:, None]
    each = -said.gather(-1, text.clamp_min(0)[..., None])[..., 0]
    return _outcome(each, counts, best[:, own:], chosen == text)


def before_stop(labels: Tensor, stop_ids: set[int]) -> Tensor:
    """[n, k] -> [n, k]: True up to the first stop id, that included."""
    return before_first(one_of(labels, stop_ids))


def one_of(ids: Tensor, of: set[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(sorted(of)).to(ids))


def _outcome(each: Tensor, counts: Tensor, masks: Tensor, right: Tensor) -> Outcome:
    """`each` [n, k] losses of which `counts` count; `masks` [n, masks]: top-1 log-probabilities of what masks say."""
    weight = counts.float()
    agreement = float((right & counts).sum() / counts.sum().clamp_min(1))
    sure = (masks >= SURE).long().cumprod(dim=-1).sum(dim=-1)
    return Outcome((each * weight).sum() / weight.sum().clamp_min(1), agreement, 1 + float(sure.float().mean()))


def before_first(events: Tensor) -> Tensor:
    """[..., k] -> [..., k]: True up to the first event, that included."""
    return (events.long().cumsum(dim=-1) - events.long()) == 0
