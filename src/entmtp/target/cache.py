"""One preallocated key/value cache for all layers of a target."""

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

    def reset(self) -> None:
        self.length = 0
