"""Growing a draft tree at a step: candidates depth by depth, then the likeliest of them."""

from time import perf_counter

import torch
from torch import Tensor

from entmtp.policy.growing import GrowingPolicy
from entmtp.tree.grown import Candidates, GrownTree, MaskPool


def top_children(drafter, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Target token ids and probabilities [rows, count] of the `count` likeliest candidates of each row of logits."""
    top = logits.topk(count, dim=-1)
    probability = (top.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
    return drafter.token_map[top.indices], probability


@torch.inference_mode()
def grow(drafter, root: int, policy: GrowingPolicy, masks: MaskPool) -> tuple[GrownTree, float]:
    """The tree of this step, and the seconds spent on anything but the heads. `drafter.start` has been called."""
    begin, proposing = perf_counter(), 0.0
    found = Candidates([root])
    frontier = [0]
    for depth in range(1, policy.max_depth + 1):
        parents = policy.parents(frontier, found.probability)
        if not parents:
            break
        asked = perf_counter()
        paths = torch.tensor([found.path(parent) for parent in parents], device=masks.device)
        tokens, probability = top_children(drafter, drafter.step_logits(depth, paths), policy.children)
        rows = list(zip(parents, tokens.tolist(), probability.tolist(), strict=True))
        proposing += perf_counter() - asked
        first = len(found.tokens)
        for parent, row_tokens, row_p in rows:
            found.add(parent, row_tokens, row_p)
        frontier = list(range(first, len(found.tokens)))
    ranked = found.ranked()
    count = policy.size([(found.probability[node], found.depth[node]) for node in ranked[: policy.nodes]])
    tree = GrownTree(found, ranked[:count], masks)
    return tree, perf_counter() - begin - proposing
