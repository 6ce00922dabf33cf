"""One preallocated key/value cache for all layers of a target, and masks for what is appended to it."""

import torch
from torch import Tensor

from entmtp.errors import EntmtpError


class KVCache:
    """Keys and values of every layer in one tensor [layers, 2, kv_heads, capacity, head_dim].

    Rows [0, length) are committed context. A forward writes its n new rows at [length, length + n) and leaves
    `length` alone; `commit` then keeps the accepted ones. Nothing is allocated after construction.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: str):
        self.data = torch.zeros(layers, 2, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def layer(self, index: int) -> Tensor:
        """[2, kv_heads, capacity, head_dim] of one layer."""
        return self.data[index]

    def require(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            raise EntmtpError(f"KV cache of {self.capacity} rows has no room for {rows} more after {self.length}")

    def commit(self, nodes: list[int]) -> None:
        """Keep the new rows `nodes` (ascending offsets from `length`), moved together, and advance `length`."""
        count = len(nodes)
        if nodes != list(range(count)):  # a prefix of the new rows already lies where it belongs
            # Only rows after the first gap move; index_select copies them out first, so overlap cannot harm.
            start = next(i for i, node in enumerate(nodes) if node != i)
            source = torch.tensor([self.length + node for node in nodes[start:]], device=self.data.device)
            moved = self.data.index_select(3, source)
            self.data[:, :, :, self.length + start : self.length + count] = moved
        self.length += count

    def commit_at(self, length: Tensor, nodes: Tensor) -> None:
        """As `commit`, for a CUDA graph: `nodes` [k] may go on past the accepted ones, since rows beyond the next
        `length` [1] are written again before they are seen. `length` itself is the caller's."""
        rows = length + torch.arange(len(nodes), device=self.data.device)
        self.data.index_copy_(3, rows, self.data.index_select(3, length + nodes))

    def reset(self) -> None:
        self.length = 0


def mask_at(block: Tensor, rows: Tensor, length: Tensor, capacity: int, groups: int) -> Tensor:
    """Additive mask [groups * n, capacity] of n new rows that lie at `rows` [n] of a cache: each sees what lies before
    `length` [1], and of the new ones what `block` [n, n] says."""
    columns = torch.arange(capacity, device=block.device)
    seen = torch.zeros(len(block), capacity, dtype=block.dtype, device=block.device)
    seen.masked_fill_(columns >= length, torch.finfo(block.dtype).min)
    return seen.index_copy_(1, rows, block).repeat(groups, 1)


class CausalMasks:
    """Additive masks of n new rows after a context: each sees the context, the rows before it and itself.

    Made once per n and cut to length, since steps ask for one each time.
    """

    def __init__(self, groups: int, capacity: int, dtype: torch.dtype, device: str):
        self.groups, self.capacity, self.dtype, self.device = groups, capacity, dtype, device
        self.made: dict[int, Tensor] = {}

    def __call__(self, n: int, end: int) -> Tensor:
        """[groups * n, end]: the rows lie at the last n of `end` positions."""
        if n not in self.made:
            mask = torch.zeros(n, self.capacity, dtype=self.dtype, device=self.device)
            ahead = torch.ones(n, n, dtype=torch.bool, device=self.device).triu(1)
            mask[:, -n:].masked_fill_(ahead, torch.finfo(self.dtype).min)
            self.made[n] = mask.repeat(self.groups, 1)
        return self.made[n][:, -end:]
