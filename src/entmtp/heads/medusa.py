"""Medusa at decoding time (arXiv 2401.10774): independent heads, one evaluation a position serves every tree."""

import torch
from torch import Tensor

from entmtp.heads.model import run_body
from entmtp.heads.packed import PackedHeads
from entmtp.target.choices import top1_prob
from entmtp.tree.compiled import CompiledTree


class MedusaDrafter(PackedHeads):
    def begin(self, state: Tensor, root: Tensor) -> None:
        """`state` [1, H] of the last committed token, which chose `root` [1]."""
        self.root = root
        features = [run_body(state, None, blocks) for blocks in self.blocks]
        if self.config.projection == "own":
            logits = [project(x) for project, x in zip(self.projections, features, strict=True)]
            self.head_logits = torch.cat(logits)  # [depth, draft_vocab]
        else:  # one projection is shared: one matrix product for all depths
            self.head_logits = self.projections[0](torch.cat(features))
        self.top = self.token_map[self.candidates(self.head_logits)]  # [depth, width]

    def path_logits(self, depth: int, state: Tensor, paths: Tensor) -> Tensor:
        """Draft logits [rows, draft_vocab] of head `depth`: the drafted path does not matter to Medusa."""
        return self.logits(depth, state)

    def step_logits(self, depth: int, paths: Tensor) -> Tensor:
        """Draft logits [rows, draft_vocab] of head `depth` at this position, the same for every path."""
        return self.head_logits[depth - 1].expand(len(paths), -1)

    def extend(self, depth: int) -> None:
        """Nothing to do: all heads were evaluated at the start."""

    def greedy_probs(self, depth: int) -> Tensor:
        """float32 [depth]: q_1..q_depth."""
        return top1_prob(self.head_logits[:depth])

    def carried(self) -> list[Tensor]:
        """What the started position consists of."""
        return [self.root, self.top]

    def resume(self, carried: list[Tensor]) -> None:
        """Take up a position that `carried` gave, without the heads' probabilities."""
        self.root, self.top = carried

    def fill(self, compiled: CompiledTree) -> Tensor:
        """Token ids [n] of the tree's nodes, root first."""
        tokens = torch.empty(compiled.n, dtype=torch.long, device=self.target.device)
        tokens[:1] = self.root
        tokens[1:] = self.top[compiled.node_depth, compiled.node_rank]
        return tokens
