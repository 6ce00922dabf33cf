"""Hydra at decoding time (arXiv 2402.05109): sequential heads, grounded in the drafted tokens before them."""

import torch
from torch import Tensor

from entmtp.heads.children import best_children
from entmtp.heads.packed import PackedHeads
from entmtp.tree.compiled import CompiledTree


class HydraDrafter(PackedHeads):
    """Head d sees the drafted tokens before it, so a depth is one batch over its parents."""

    def begin(self, state: Tensor, root: Tensor) -> None:
        """`state` [1, H] of the last committed token, which chose `root` [1]."""
        self.state = state
        self.greedy = root  # tokens of the greedy path, root first
        self.greedy_top1: list[Tensor] = []  # each [1]: the head's largest probability
        self.greedy_top: list[Tensor] = []  # each [1, width]: draft-vocabulary ids

    def extend(self, depth: int) -> None:
        """Evaluate heads along the greedy path up to `depth`, each once."""
        while len(self.greedy_top) < depth:
            d = len(self.greedy_top) + 1
            logits = self.path_logits(d, self.state, self.greedy[None, :d])
            top, probability = best_children(logits, self.width)
            self.greedy_top1.append(probability[0, :1])
            self.greedy_top.append(top)
            self.greedy = torch.cat([self.greedy, self.token_map[top[0, :1]]])

    def path_logits(self, depth: int, state: Tensor, paths: Tensor) -> Tensor:
        """Draft logits [rows, draft_vocab] of head `depth` after token paths [rows, depth], root first.

        `state` is [rows, H], or [1, H] for all rows (one position's tree).
        """
        rows = len(paths)
        embeddings = self.target.model.embed(paths.reshape(-1)).view(rows, -1)
        return self.logits(depth, torch.cat([state.expand(rows, -1), embeddings], dim=-1))

    def step_logits(self, depth: int, paths: Tensor) -> Tensor:
        """Draft logits [rows, draft_vocab] at this position after token paths [rows, depth], root first."""
        return self.path_logits(depth, self.state, paths)

    def greedy_probs(self, depth: int) -> Tensor:
        """float32 [depth]: q_1..q_depth."""
        self.extend(depth)
        return torch.cat(self.greedy_top1[:depth])

    def carried(self) -> list[Tensor]:
        """What the started position consists of, `greedy` and after it one tensor a head that was looked at."""
        return [self.state, self.greedy, *self.greedy_top]

    def resume(self, carried: list[Tensor]) -> None:
        """Take up a position that `carried` gave, without `greedy_top1`."""
        self.state, self.greedy, *self.greedy_top = carried
        self.greedy_top1 = []

    def fill(self, compiled: CompiledTree) -> Tensor:
        """Token ids [n] of the tree's nodes, root first."""
        tokens = torch.empty(compiled.n, dtype=torch.long, device=self.target.device)
        tokens[:1] = self.greedy[:1]
        for d, level in enumerate(compiled.levels, 1):
            if level.greedy_only:  # the greedy path's own evaluation serves (always so at depth 1)
                self.extend(d)
                top = self.greedy_top[d - 1]
            else:
                top = self.candidates(self.path_logits(d, self.state, tokens[level.ancestors]))
            tokens[level.start : level.end] = self.token_map[top[level.rows, level.ranks]]
        return tokens
