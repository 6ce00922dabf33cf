"""Training rows for adapters that act on masks only: texts apart from masks, since the texts are read as ever.

A text's blocks of k - 1 masks stand after *cuts*: the block of cut c sees the tokens before c, and predicts those at
c + 1 … c + k - 1. The token at c itself is the model's own choice, which no training changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.distill.packing import UNKNOWN


@dataclass
class MaskBatch:
    """ids [b, L], padded at the end. positions, cut [b, M]: of every mask, M = most blocks × (k - 1); cut 0: padding.
    block [b, M]: its block's number. first, text [n, k - 1] of the batch's n real blocks: the tokens that the teacher
    would read at the masks' places if they were the text's, and the ones to predict (UNKNOWN past the text's end).
    real [b, blocks]: which blocks are there."""

    ids: Tensor
    positions: Tensor
    cut: Tensor
    block: Tensor
    first: Tensor
    text: Tensor
    real: Tensor
    k: int

    def to(self, device: str) -> "MaskBatch":
        return MaskBatch(**{name: value.to(device) if isinstance(value, Tensor) else value
                            for name, value in vars(self).items()})  # fmt: skip

    def text_mask(self) -> Tensor:
        """[1, 1, L, L] bool: causal; padding comes last, so no token sees it."""
        length = self.ids.shape[1]
        return torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()[None, None]

    def there(self) -> Tensor:
        """[b, M] bool: which masks are of real blocks."""
        return self.real.repeat_interleave(self.k - 1, dim=1)

    def block_mask(self) -> Tensor:
        """[b, 1, M, L + M] bool: a mask sees the text before its cut, the masks of its block before it, and itself."""
        at = torch.arange(self.ids.shape[1], device=self.ids.device)
        sees_text = at[None, None] < self.cut[:, :, None]
        same = self.block[:, :, None] == self.block[:, None, :]
        earlier = self.positions[:, :, None] >= self.positions[:, None, :]
        return torch.cat((sees_text, same & earlier), dim=-1)[:, None]

    def forced(self, chosen: Tensor) -> Tensor:
        """ids [b, M] at the masks' places: the text's next token, then the student's choices [n, k - 1], less one."""
        ids = torch.zeros(*self.real.shape, self.k - 1, dtype=torch.long, device=self.ids.device)
        ids[self.real] = torch.cat((self.first[:, None], chosen[:, :-1]), dim=1)
        return ids.flatten(1)


def cuts_of(prompt: int, length: int, spacing: int, shift: int, most: int) -> list[int]:
    """Cuts every `spacing` tokens of an answer from its first + `shift` on; the token after a cut must be known."""
    return list(range(prompt + shift, length - 1, spacing))[:most]


def pack_masks(texts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]], k: int) -> MaskBatch:
    """A batch of texts with blocks of k - 1 masks after their cuts."""
    rows, masks = len(texts), k - 1
    used = [text[: own[-1]] for text, own in zip(texts, cuts, strict=True)]  # what no mask sees is not read
    most, length = max(len(own) for own in cuts), max(len(text) for text in used)
    ids, cut = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, most, dtype=torch.long)
    real, first, said = torch.zeros(rows, most, dtype=torch.bool), [], []
    for row, (text, own) in enumerate(zip(texts, cuts, strict=True)):
        ids[row, : len(used[row])] = torch.tensor(used[row])
        cut[row, : len(own)], real[row, : len(own)] = torch.tensor(own), True
        first += [text[c] for c in own]
        said += [[text[p] if p < len(text) else UNKNOWN for p in range(c + 1, c + k)] for c in own]
    positions = cut[:, :, None] + torch.arange(masks)
    block = torch.arange(most).repeat_interleave(masks).expand(rows, -1)
    return MaskBatch(ids, positions.flatten(1), cut.repeat_interleave(masks, dim=1), block, torch.tensor(first),
                     torch.tensor(said), real, k)  # fmt: skip
