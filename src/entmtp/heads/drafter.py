"""Draft heads at decoding time: packed weights, one state a step, any topology filled without Python loops over nodes.

A step has two parts, because a policy looks at the heads' confidence before it picks a tree:

    drafter.start(hidden, root)      # a new position
    drafter.extend(depth)            # heads along the greedy draft path
    drafter.greedy_probs(depth)      # their top-1 probabilities q_1..q_depth
    drafter.fill(tree)               # token ids of the whole tree, root first

What the second part computed is reused by the third where it is the same evaluation.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from entmtp.errors import EntmtpError
from entmtp.heads.model import DraftHeads, ResidualFirst, residual_first, run_body
from entmtp.target.linear import LinearFn, make_linear
from entmtp.tree.topology import CompiledTree


class Drafter(Protocol):
    depth: int
    width: int
    arch: str

    def start(self, hidden: Tensor, root: int) -> None: ...
    def extend(self, depth: int) -> None: ...
    def greedy_probs(self, depth: int) -> Tensor: ...
    def fill(self, compiled: CompiledTree) -> Tensor: ...
    def path_logits(self, depth: int, hidden: Tensor, paths: Tensor) -> Tensor: ...
    def candidates(self, logits: Tensor) -> Tensor: ...


class _Packed:
    """Weights of DraftHeads packed in the target's dtype, and the restricted vocabulary projection."""

    def __init__(self, heads: DraftHeads, target, width: int):
        self.config, self.target = heads.config, target
        self.arch, self.depth = heads.config.arch, heads.config.depth
        if width > heads.config.draft_vocab:
            raise EntmtpError(f"heads.width={width} exceeds the draft vocabulary of {heads.config.draft_vocab}")
        self.width = width

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=target.device, dtype=target.dtype)

        def packed(linear: torch.nn.Linear, embedding_scale: float = 1.0) -> LinearFn:
            weight = linear.weight.detach().clone()
            weight[:, heads.config.hidden_size :] *= embedding_scale  # folded into what meets the embeddings
            return make_linear(cast(weight), None if linear.bias is None else cast(linear.bias))

        self.token_map = heads.token_map.long().to(target.device)
        self.blocks = [[packed(block) for block in blocks] for blocks in heads.blocks]
        scale = heads.config.embedding_scale
        self.first: list[LinearFn | None] = [None] * self.depth
        for d, layer in enumerate(heads.first):
            if isinstance(layer, ResidualFirst):
                parts = packed(layer.linear, scale), packed(layer.res_connection, scale)
                self.first[d] = partial(_apply_residual_first, *parts)
            else:
                self.first[d] = packed(layer, scale)
        if heads.config.projection == "own":
            self.projections = [packed(projection) for projection in heads.projections]
        else:
            self.projections = [make_linear(target.head_rows(self.token_map))] * self.depth

    def logits(self, depth: int, x: Tensor) -> Tensor:
        """Draft logits [n, draft_vocab] of head `depth` from its input x [n, in]."""
        return self.projections[depth - 1](run_body(x, self.first[depth - 1], self.blocks[depth - 1]))

    def candidates(self, logits: Tensor) -> Tensor:
        """Draft-vocabulary ids [n, width], best first. Ties fall as torch.topk decides; traces use this very call."""
        return logits.topk(self.width, dim=-1).indices


def top1_prob(logits: Tensor) -> Tensor:
    """Largest softmax probability of each row: [n, v] -> float32 [n]. Two kernels: it runs at every scheduled step."""
    return logits.softmax(dim=-1, dtype=torch.float32).amax(dim=-1)


def _apply_residual_first(linear: LinearFn, res_connection: LinearFn, x: Tensor) -> Tensor:
    return residual_first(x, linear, res_connection)


class MedusaDrafter(_Packed):
    """Independent heads: one projection for all depths gives every candidate."""

    def start(self, hidden: Tensor, root: int) -> None:
        """hidden [1, H] chose `root`."""
        self.root = root
        features = [run_body(hidden, None, blocks) for blocks in self.blocks]
        if self.config.projection == "own":
            logits = [project(x) for project, x in zip(self.projections, features, strict=True)]
            self.head_logits = torch.cat(logits)  # [depth, draft_vocab]
        else:  # one projection is shared: one matrix product for all depths
            self.head_logits = self.projections[0](torch.cat(features))
        self.top = self.token_map[self.candidates(self.head_logits)]  # [depth, width]

    def path_logits(self, depth: int, hidden: Tensor, paths: Tensor) -> Tensor:
        """Draft logits [rows, draft_vocab] of head `depth`: the drafted path does not matter to Medusa."""
        return self.logits(depth, hidden)

    def extend(self, depth: int) -> None:
        """Nothing to do: all heads were evaluated at the start."""

    def greedy_probs(self, depth: int) -> Tensor:
        """float32 [depth]: q_1..q_depth."""
        return top1_prob(self.head_logits[:depth])

    def fill(self, compiled: CompiledTree) -> Tensor:
        """Token ids [n] of the tree's nodes, root first."""
        tokens = torch.empty(compiled.n, dtype=torch.long, device=self.target.device)
        tokens[0] = self.root
        tokens[1:] = self.top[compiled.node_depth, compiled.node_rank]
        return tokens


class HydraDrafter(_Packed):
    """Sequential heads: head d sees the drafted tokens before it, so a depth is one batch over its parents."""

    def start(self, hidden: Tensor, root: int) -> None:
        """hidden [1, H] chose `root`."""
        self.hidden, self.root = hidden, root
        self.greedy = torch.tensor([root], device=self.target.device)  # tokens of the greedy path, root first
        self.greedy_logits: list[Tensor] = []  # each [1, draft_vocab]
        self.greedy_top: list[Tensor] = []  # each [1, width]: draft-vocabulary ids

    def extend(self, depth: int) -> None:
        """Evaluate heads along the greedy path up to `depth`, each once."""
        while len(self.greedy_logits) < depth:
            d = len(self.greedy_logits) + 1
            logits = self.path_logits(d, self.hidden, self.greedy[None, :d])
            top = self.candidates(logits)
            self.greedy_logits.append(logits)
            self.greedy_top.append(top)
            self.greedy = torch.cat([self.greedy, self.token_map[top[0, :1]]])

    def path_logits(self, depth: int, hidden: Tensor, paths: Tensor) -> Tensor:
        """Draft logits [rows, draft_vocab] of head `depth` after token paths [rows, depth], root first.

        `hidden` is [rows, H], or [1, H] for all rows (one position's tree).
        """
        rows = len(paths)
        embeddings = self.target.model.embed(paths.reshape(-1)).view(rows, -1)
        return self.logits(depth, torch.cat([hidden.expand(rows, -1), embeddings], dim=-1))

    def greedy_probs(self, depth: int) -> Tensor:
        """float32 [depth]: q_1..q_depth."""
        self.extend(depth)
        return top1_prob(torch.cat(self.greedy_logits[:depth]))

    def fill(self, compiled: CompiledTree) -> Tensor:
        """Token ids [n] of the tree's nodes, root first."""
        tokens = torch.empty(compiled.n, dtype=torch.long, device=self.target.device)
        tokens[0] = self.root
        for d, level in enumerate(compiled.levels, 1):
            if level.greedy_only:  # the greedy path's own evaluation serves (always so at depth 1)
                self.extend(d)
                top = self.greedy_top[d - 1]
            else:
                top = self.candidates(self.path_logits(d, self.hidden, tokens[level.ancestors]))
            tokens[level.start : level.end] = self.token_map[top[level.rows, level.ranks]]
        return tokens


def make_drafter(heads: DraftHeads, target, width: int) -> MedusaDrafter | HydraDrafter:
    """Packed drafter of `heads` for `target`; `width` candidates a node (clear error beyond the draft vocabulary)."""
    return (MedusaDrafter if heads.config.arch == "medusa" else HydraDrafter)(heads, target, width)
