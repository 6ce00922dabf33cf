"""Who is trained: a whole model (or with adapters folded in later), or adapters that act on masks only."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import nn

from entmtp.config import DistillConfig
from entmtp.distill.loss import Outcome, distillation, text_loss
from entmtp.distill.packing import Batch, Layout, pack, paper_layout, text_layout
from entmtp.target.generic import with_weights


class Student(Protocol):
    """What `SelfDistiller` trains. `learn`: the loss on a batch, by the text itself or by the teacher."""

    parameters: list[nn.Parameter]
    mask_id: int
    stop_ids: set[int]

    def to(self, device: str, dtype: torch.dtype) -> None: ...
    def batch(self, texts: Sequence[list[int]], prompts: Sequence[int], k: int, shift: int): ...
    def learn(self, batch, from_text: bool) -> Outcome: ...


class WholeStudent:
    """`student` and the frozen `teacher` it started from, transformers causal LMs; the student knows the mask token.

    `parameters`: what is trained (all of the student's, or adapters' that will be folded into it).
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        parameters: Sequence[nn.Parameter],
        mask_id: int,
        stop_ids: set[int],
        config: DistillConfig,
    ):
        self.student, self.teacher, self.parameters = student, teacher, list(parameters)
        self.mask_id, self.stop_ids, self.config = mask_id, stop_ids, config

    def to(self, device: str, dtype: torch.dtype) -> None:
        # nothing is learned by the teacher, so it keeps its weights as its forwards read them
        self.teacher = with_weights(self.teacher, device, dtype).eval().requires_grad_(False)
        self.student = self.student.to(device).train()
        half = dtype == torch.bfloat16
        self.precision = torch.autocast(torch.device(device).type, dtype=dtype) if half else nullcontext()

    def batch(self, texts: Sequence[list[int]], prompts: Sequence[int], k: int, shift: int) -> Batch:
        # no block after a text's stop token: decoding never gets there
        lengths = [len(text) - (text[-1] in self.stop_ids) for text in texts]
        layouts = [self._layout(prompt, length, k, shift) for length, prompt in zip(lengths, prompts, strict=True)]
        return pack(texts, layouts, self.mask_id)

    def _layout(self, prompt: int, length: int, k: int, shift: int) -> Layout:
        """The paper's regions over the whole chat, else blocks along its answer; with the first one as early as it may
        be where the text ends before the one that was drawn."""
        c = self.config
        if c.regions:
            row = paper_layout(c.row_width, c.regions, k, -shift, length)
        else:
            row = text_layout(prompt, length, k, c.spacing, shift, c.blocks)
        return row or text_layout(prompt, length, k, c.spacing, 0, c.blocks)

    def learn(self, batch: Batch, from_text: bool) -> Outcome:
        with self.precision:
            if from_text:
                return text_loss(self.student, batch, self.mask_id, self.stop_ids)
            return distillation(self.student, self.teacher, batch, self.mask_id, self.stop_ids, self.config.soft,
                                self.config.prefix_threshold)  # fmt: skip
