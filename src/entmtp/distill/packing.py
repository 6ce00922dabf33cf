"""Rows of training: real text with blocks of mask tokens between, at the positions of the tokens they stand for.

A *cut* at position c puts K = k - 1 masks at positions c … c + K - 1 after the real tokens 0 … c - 1; the real tokens
then go on from c. The k predictions of a cut come from its last real token and its K masks. Attention is causal; a real
token sees earlier real tokens only, so that the text reads as if no masks were there; a mask sees earlier real tokens
and earlier masks of its own block. One row thus trains many blocks at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.errors import EntmtpError

REAL, PADDING = -1, -2  # in place of a block's number
UNKNOWN = -1  # in place of a token


@dataclass(frozen=True)
class Layout:
    """One row in the order of the sequence: `positions` [W] for the rotary embedding, `block` [W] (number of the mask's
    block, or REAL), `predict` [blocks][k] indices of the row that predict a block's tokens."""

    positions: list[int]
    block: list[int]
    predict: list[list[int]]

    def tokens(self, text: Sequence[int], mask_id: int) -> list[int]:
        """The row's token ids: the text at real places, `mask_id` elsewhere."""
        return [text[p] if b == REAL else mask_id for p, b in zip(self.positions, self.block, strict=True)]


def layout(cuts: Sequence[int], k: int, length: int) -> Layout:
    """Row of `length` real tokens with a block of k - 1 masks at every cut (ascending, 1 <= cut <= length)."""
    if k < 1 or not cuts or cuts[0] < 1 or cuts[-1] > length or list(cuts) != sorted(set(cuts)):
        raise EntmtpError(f"packing: cuts {list(cuts)} of k={k} must ascend within 1..{length}")
    positions, block, predict, start = [], [], [], 0
    for number, cut in enumerate(cuts):
        positions += range(start, cut + k - 1)  # the real tokens, and the masks after them
        block += [REAL] * (cut - start) + [number] * (k - 1)
        predict.append(list(range(len(positions) - k, len(positions))))
        start = cut
    positions += range(start, length)
    block += [REAL] * (length - start)
    return Layout(positions, block, predict)


def paper_layout(width: int, regions: int, k: int, offset: int = 0, length: int | None = None) -> Layout | None:
    """The paper's row of fixed width: M regions of P = width / M - (k - 1) real tokens; `offset` in -(P - 1) … 0
    shortens the first one, and the width is filled with real tokens at the end. A text of `length` tokens may be too
    short for that: blocks that it does not reach are left out. None: it reaches no block."""
    between = region(width, regions, k)
    if width % regions or between < 1 or not -between < offset <= 0:
        raise EntmtpError(
            f"packing: width {width} in {regions} regions of k={k} leaves {between} real tokens between (at least 1 is "
            f"needed, the width a multiple of the regions, and the offset {offset} in {1 - between}..0)"
        )
    whole = width - regions * (k - 1)
    length = whole if length is None else min(length, whole)
    cuts = [cut for number in range(regions) if (cut := offset + (number + 1) * between) <= length]
    return layout(cuts, k, length) if cuts else None


def region(width: int, regions: int, k: int) -> int:
    """P: real tokens from one block of the paper's row to the next."""
    return width // regions - (k - 1)


def text_layout(prompt: int, length: int, k: int, spacing: int, shift: int, most: int) -> Layout | None:
    """A chat row: blocks every `spacing` tokens of the answer, the first one `shift` (0 … spacing - 1) tokens into it,
    `most` at most; real tokens after the last block are left out. None: the answer is too short for one."""
    cuts = list(range(prompt + shift, length + 1, spacing))[:most]
    return layout(cuts, k, cuts[-1]) if cuts else None


@dataclass
class Batch:
    """ids, positions [b, W]; mask [b, 1, W, W] bool (True: sees); predict [b, R, k] indices into a row; real [b, R]:
    which blocks are there (rows have different numbers); text [b, R, k]: what the text has there, UNKNOWN past its end.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    predict: Tensor
    real: Tensor
    text: Tensor

    def to(self, device: str) -> "Batch":
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def forced(self, chosen: Tensor) -> Tensor:
        """ids with the student's choices [n, k] of the n blocks in the places of the masks (its last has none)."""
        ids = self.ids.clone()
        places = self.predict[..., 1:][self.real]
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(self.real)[self.real]
        ids[rows[:, None].expand_as(places), places] = chosen[:, :-1]
        return ids


def block_mask(block: Tensor) -> Tensor:
    """[b, W] numbers of blocks, REAL or PADDING -> [b, W, W]: whether a place (row) sees another (column)."""
    width = block.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=block.device).tril()
    real = block == REAL
    same = (block[:, :, None] == block[:, None, :]) & (block >= 0)[:, :, None]
    sees = causal & (real[:, None, :] | same)
    return sees | torch.eye(width, dtype=torch.bool, device=block.device)  # padding sees itself: no empty softmax


def pack(texts: Sequence[Sequence[int]], layouts: Sequence[Layout], mask_id: int) -> Batch:
    """A batch of rows; shorter ones are padded at the end."""
    width, most = max(len(one.block) for one in layouts), max(len(one.predict) for one in layouts)
    k = len(layouts[0].predict[0])
    ids, positions = (torch.zeros(len(layouts), width, dtype=torch.long) for _ in range(2))
    block = torch.full((len(layouts), width), PADDING)
    predict = torch.zeros(len(layouts), most, k, dtype=torch.long)
    real = torch.zeros(len(layouts), most, dtype=torch.bool)
    said = torch.full_like(predict, UNKNOWN)
    for row, (text, one) in enumerate(zip(texts, layouts, strict=True)):
        n, blocks = len(one.block), len(one.predict)
        ids[row, :n] = torch.tensor(one.tokens(text, mask_id))
        positions[row, :n], block[row, :n] = torch.tensor(one.positions), torch.tensor(one.block)
        predict[row, :blocks], real[row, :blocks] = torch.tensor(one.predict), True
        said[row, :blocks] = torch.tensor([[_next(text, one.positions[i]) for i in places] for places in one.predict])
    return Batch(ids, positions, block_mask(block)[:, None], predict, real, said)


def _next(text: Sequence[int], position: int) -> int:
    return text[position + 1] if position + 1 < len(text) else UNKNOWN
