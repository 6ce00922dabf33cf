"""One model that is student and teacher: with its adapters, which act on masks only, and without.

The text is read once, without gradients: its keys and values are the same for both. Then the student reads the masks,
and the teacher, at the same places, what the student said there.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entmtp.config import DistillConfig
from entmtp.distill.by_depth import forced_by_depth
from entmtp.distill.loss import SURE, Outcome, against_teacher, against_text, one_of
from entmtp.distill.mask_rows import MaskBatch, cuts_of, pack_masks
from entmtp.target.generic import Cache, additive, growing, run_layers, text_context
from entmtp.target.mask_adapter import MaskAdapter


class MaskStudent:
    """`model`: a transformers causal LM with `adapter` attached. A `Student` (see there)."""

    def __init__(self, model: nn.Module, adapter: MaskAdapter, stop_ids: set[int], config: DistillConfig):
        self.model, self.adapter, self.config = model, adapter, config
        self.parameters, self.mask_id, self.stop_ids = adapter.parameters(), adapter.mask_id, stop_ids

    def to(self, device: str, dtype: torch.dtype) -> None:
        # the base learns nothing, so it keeps its weights as its forwards read them
        self.model.to(device)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.to(dtype)
        self.adapter.row.data = self.adapter.row.to(device)

    def batch(self, texts: Sequence[list[int]], prompts: Sequence[int], k: int, shift: int) -> MaskBatch:
        c = self.config
        cuts = [cuts_of(prompt, len(text), c.spacing, shift, c.blocks) or [prompt]
                for text, prompt in zip(texts, prompts, strict=True)]  # fmt: skip
        return pack_masks(texts, cuts, k)

    def learn(self, batch: MaskBatch, from_text: bool) -> Outcome:
        """As `loss.text_loss` or `loss.distillation`, of the masks' predictions."""
        context, counting = self.read(batch), ~one_of(batch.first, self.stop_ids)
        threshold = self.config.prefix_threshold
        if not from_text and threshold and threshold <= math.exp(SURE):
            student, teacher = partial(self.asked, growing(context)), partial(self.answered, growing(context))
            return forced_by_depth(batch, student, teacher, counting, self.stop_ids, self.config.soft, threshold)
        said = self.said(batch, context)
        if from_text:
            return against_text(said, batch.text, self.stop_ids, counting, own=0)
        judged = self.judged(batch, context, said.detach().max(dim=-1).indices)
        return against_teacher(said, judged, self.stop_ids, self.config.soft, threshold, counting, own=0)

    def read(self, batch: MaskBatch) -> Cache:
        """Keys and values of the batch's texts."""
        context, positions = text_context(self.model), torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
        with torch.no_grad():
            vectors = self._embed(batch.ids)
            run_layers(self.model, vectors, positions, additive(batch.text_mask(), vectors.dtype), context)
        return context

    def said(self, batch: MaskBatch, context: Cache) -> Tensor:
        """Log-probabilities [n, k - 1, V] of what the masks say, with gradients."""
        logits = self.asked(context, batch.positions, batch.block_mask(), batch.there())
        return logits.view(-1, batch.k - 1, logits.shape[-1]).float().log_softmax(dim=-1)

    def judged(self, batch: MaskBatch, context: Cache, chosen: Tensor) -> Tensor:
        """Logits [n, k - 1, V] of the original model, which reads what the student chose [n, k - 1]."""
        logits = self.answered(context, batch.forced(chosen), batch.positions, batch.block_mask(), batch.there())
        return logits.view(-1, batch.k - 1, logits.shape[-1])

    def asked(self, context: Cache, positions: Tensor, sees: Tensor, there: Tensor) -> Tensor:
        """The student's logits [rows, V] of masks at `positions` [b, m] that see `sees` [b, 1, m, context + m], where
        `there` [b, m] says."""
        vectors = self.adapter.row.to(self._embedding.weight.dtype).expand(*positions.shape, -1)
        self.adapter.rows.first = 0
        try:
            return self._logits(vectors, positions, sees, there, context)
        finally:
            self.adapter.rows.first = None

    @torch.no_grad()
    def answered(self, context: Cache, ids: Tensor, positions: Tensor, sees: Tensor, there: Tensor) -> Tensor:
        """As `asked`, the original model's of tokens."""
        return self._logits(self._embed(ids), positions, sees, there, context)

    def _logits(self, vectors: Tensor, positions: Tensor, sees: Tensor, there: Tensor, context: Cache) -> Tensor:
        hidden = run_layers(self.model, vectors, positions, additive(sees, vectors.dtype), context)
        head = self.model.get_output_embeddings()
        return F.linear(hidden[there], head.weight, head.bias)

    @property
    def _embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def _embed(self, ids: Tensor) -> Tensor:
        return self._embedding(ids)
