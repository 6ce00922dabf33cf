"""Does a token's choice depend on how many rows its forward had? In float32 it must not; in half precision it may."""

import torch
from torch import Tensor

from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

NODES = 16
TOKENS = 128  # of a text


@torch.inference_mode()
def flips(target, prompts: list[list[int]], tokens: int = TOKENS) -> dict:
    """Plain decoding's choices against those of forwards of 16 drafted nodes over the same text (a chain, every draft
    right), each on the cache that its own forwards wrote.

    {dtype, nodes, tokens, flips_per_1000, largest_margin, largest_difference, compiled}: in how many of a thousand
    tokens the largest logit is another one; the largest margin by which plain decoding had preferred its own; the
    largest difference between any two logits of the same token; whether the compiled engine did the forwards.
    """
    chain = Tree.of([(0,) * depth for depth in range(1, NODES + 1)])
    compared, flipped, margin, difference = 0, 0, 0.0, 0.0
    for prompt in prompts:
        cache = target.new_cache(len(prompt) + tokens + chain.num_nodes + 1)
        text, alone = plain(target, cache, prompt, tokens)
        together = in_chains(target, cache, prompt, text, CompiledTree(
            chain, target.mask_rows, cache.capacity, target.dtype, target.device))  # fmt: skip
        chosen, other = alone.argmax(dim=-1, keepdim=True), together.argmax(dim=-1, keepdim=True)
        differ = chosen != other
        compared, flipped = compared + len(alone), flipped + int(differ.sum())
        margin = max(margin, float((alone.gather(1, chosen) - alone.gather(1, other)).max()))
        difference = max(difference, float((alone - together).abs().max()))
    return {"dtype": target.dtype_name, "nodes": NODES, "tokens": compared, "flips_per_1000": 1000 * flipped / compared,
            "largest_margin": margin, "largest_difference": difference,
            "compiled": getattr(target.model, "native", None) is not None}  # fmt: skip


def plain(target, cache, prompt: list[int], tokens: int) -> tuple[list[int], Tensor]:
    """Greedy text, whatever stop tokens it has, and the logits [tokens, V] after each of its tokens."""
    cache.reset()
    text = [int(target.model.logits(target.prefill(prompt, cache)[-1:]).argmax())]
    rows = []
    for _ in range(tokens):
        at = torch.tensor([cache.length], device=target.device)
        hidden = target.model.hidden(torch.tensor(text[-1:], device=target.device), at, cache, None)
        cache.commit([0])
        rows.append(target.model.logits(hidden).float())
        text.append(int(rows[-1].argmax()))
    return text[:-1], torch.cat(rows)


def in_chains(target, cache, prompt: list[int], text: list[int], chain: CompiledTree) -> Tensor:
    """Logits [tokens, V] after each token of `text`, a root and its drafts at a time."""
    cache.reset()
    target.prefill(prompt, cache)
    rows = []
    for start in range(0, len(text), chain.n):
        part = text[start : start + chain.n]
        padded = torch.tensor(part + [part[-1]] * (chain.n - len(part)), device=target.device)
        mask = chain.mask_slice(cache.length)
        logits = target.model.logits(target.model.hidden(padded, chain.depths + cache.length, cache, mask))
        cache.commit(list(range(len(part))))
        rows.append(logits[: len(part)].float())
    return torch.cat(rows)
