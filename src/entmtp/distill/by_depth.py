"""Student forcing depth by depth: only masks that count are read, by the student, its gradient and the teacher.

What a mask says does not depend on the masks after it, and under `prefix_threshold` nothing counts after the first one
that is not sure, nor after the teacher's stop. So the first masks of all blocks are read together, then the second
ones of the blocks that still count, and so on: the loss of `loss.distillation`, for about a third of the rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.distill.loss import SURE, Outcome, losses, one_of
from entmtp.distill.mask_rows import MaskBatch

# logits [rows, V] of what is read at `there` [b, m], after what was read before: masks (positions [b, m], sees
# [b, 1, m, …], there), or the tokens `ids` [b, m] (ids, positions, sees, there)
Asked = Callable[[Tensor, Tensor, Tensor], Tensor]
Answered = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Rows:
    """The blocks that are read at a depth: numbers [b, m] in their text, -1 where a text has fewer; `cut` [b, m]."""

    blocks: Tensor
    cut: Tensor

    @property
    def there(self) -> Tensor:
        return self.blocks >= 0

    def sees(self, length: int, earlier: Tensor) -> Tensor:
        """[b, 1, m, length + earlier + m] bool: the text before the cut, the block's own earlier rows (`earlier`
        [b, …]: whose the rows before are), itself."""
        text = torch.arange(length, device=self.cut.device) < self.cut[:, :, None]
        own = self.blocks[:, :, None] == earlier[:, None, :]
        itself = torch.eye(self.cut.shape[1], dtype=torch.bool, device=self.cut.device).expand(len(self.cut), -1, -1)
        return torch.cat((text & self.there[:, :, None], own & self.there[:, :, None], itself), dim=-1)[:, None]


def rows_of(batch: MaskBatch, alive: Tensor) -> Rows:
    """Rows of the blocks in `alive` [n], each text's side by side."""
    grid = torch.zeros_like(batch.real)
    grid[batch.real] = alive
    most = int(grid.sum(dim=1).max())
    blocks = (~grid).long().argsort(dim=1, stable=True)[:, :most]  # those that are alive first, in their order
    cut = batch.cut.view(*batch.real.shape, batch.k - 1)[..., 0].gather(1, blocks)
    there = grid.gather(1, blocks)
    return Rows(torch.where(there, blocks, -1), torch.where(there, cut, 0))


def forced_by_depth(
    batch: MaskBatch, student: Asked, teacher: Answered, counting: Tensor, stop_ids: set[int], soft: bool,
    threshold: float,
) -> Outcome:  # fmt: skip
    """As `loss.against_teacher` with this prefix threshold (at most 0.9), of masks' predictions; `counting` [n]: blocks
    that count at all, over which the figures are taken."""
    alive, sure, reads = counting.clone(), counting.clone(), batch.first.clone()
    parts, counted, right, block = [], 0, 0, 0
    earlier = batch.cut.new_zeros(len(batch.cut), 0)
    for depth in range(batch.k - 1):
        at = alive.nonzero().squeeze(1)
        if not len(at):
            break
        rows = rows_of(batch, alive)
        positions, sees = torch.where(rows.there, rows.cut + depth, 0), rows.sees(batch.ids.shape[1], earlier)
        said = student(positions, sees, rows.there).float().log_softmax(dim=-1)
        best, chosen = said.detach().max(dim=-1)
        ids = torch.zeros_like(rows.blocks)
        ids[rows.there] = reads[at]
        judged = teacher(ids, positions, sees, rows.there)
        labels = judged.max(dim=-1).indices
        parts.append(losses(said, judged, labels, soft).sum())
        counted, right = counted + len(at), right + int((chosen == labels).sum())
        sure[at] &= best >= SURE
        block += int(sure[at].sum())
        alive[at] = (best >= math.log(threshold)) & ~one_of(labels, stop_ids)
        reads[at] = chosen
        earlier = torch.cat((earlier, rows.blocks), dim=1)
    loss = sum(parts) / counted if parts else torch.zeros((), requires_grad=True)
    return Outcome(loss, right / max(1, counted), 1 + block / max(1, int(counting.sum())))
