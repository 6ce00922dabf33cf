"""How large a draft vocabulary should be: what a size covers against the milliseconds that it costs."""

from collections import defaultdict

import torch
from torch import Tensor

from entmtp.config import HeadsConfig
from entmtp.heads.children import best_children
from entmtp.heads.features import Features, draft_vocabulary
from entmtp.heads.packed import matrices
from entmtp.timing import cold_ms

# Head d's draft is accepted with about this probability given the earlier ones, were every token in the vocabulary:
# what the heads that we shipped first reach on greedy text. It weighs coverage against time, no more.
ACCEPTANCE = 0.55


Ordered = tuple[Tensor, dict[str, Tensor]]  # all token ids, most frequent first [V], and per task the tokens to cover


def of_training_text(features: Features, vocab_size: int) -> Ordered:
    """What the heads' training text gives: its tokens by frequency, and those of its held-out texts."""
    held = defaultdict(list)
    for number in features.text_numbers(held_out=True).tolist():
        text = features.texts[number]
        held[text.task].append(features.tokens[text.start : text.end])
    return draft_vocabulary(features, vocab_size, vocab_size), {task: torch.cat(parts) for task, parts in held.items()}


def of_heads(token_map: Tensor, vocab_size: int, texts: dict[str, list]) -> Ordered:
    """What heads give that were trained elsewhere: their own vocabulary, which is in the order of its frequency, then
    all other ids by number; and the tokens of `texts`, per task lists of token ids that they have not learned from."""
    own = token_map.long().cpu()
    rest = torch.ones(vocab_size, dtype=torch.bool)
    rest[own] = False
    order = torch.cat([own, rest.nonzero()[:, 0]])
    return order, {task: torch.cat([torch.tensor(list(text)) for text in found]) for task, found in texts.items()}


@torch.inference_mode()
def vocabulary_curve(
    target, ordered: Ordered, sizes: list[int], config: HeadsConfig, plain_ms: float, repeats: int
) -> list[dict]:
    """A row per size: {size, coverage, coverage_by_task, projection_ms, tokens_per_step, relative_speed}.

    `coverage` is the share of the tokens to cover (`ordered`) inside the `size` most frequent ones; `projection_ms` a
    head's vocabulary projection and candidates for one row, as decoding reads them (`config.storage`).
    `relative_speed` is that of a chain of `config.depth` drafts: (1 + sum of (ACCEPTANCE * coverage)^d) tokens in a
    plain step and as many projections, over one token a plain step.
    """
    order, held = ordered
    rank = torch.empty(target.vocab_size, dtype=torch.long)
    rank[order] = torch.arange(target.vocab_size)
    ranks = {task: rank[tokens] for task, tokens in held.items()}
    every = torch.cat(list(ranks.values()))
    rows = []
    for size in sorted({min(size, target.vocab_size) for size in sizes}):
        token_map = order[:size]
        coverage = float((every < size).float().mean())
        by_task = {task: float((found < size).float().mean()) for task, found in ranks.items()}
        project = matrices(target, config.storage)(target.head_rows(token_map.to(target.device)))
        state = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
        width = min(config.width, size)
        ms = cold_ms(lambda: best_children(project(state), width)[0].tolist(), repeats)  # noqa: B023
        tokens_per_step = 1 + sum((ACCEPTANCE * coverage) ** d for d in range(1, config.depth + 1))
        speed = tokens_per_step * plain_ms / (plain_ms + config.depth * ms)
        rows.append({"size": size, "coverage": coverage, "coverage_by_task": by_task, "projection_ms": ms,
                     "tokens_per_step": tokens_per_step, "relative_speed": speed})  # fmt: skip
        print(f"vocabulary {size}: coverage {coverage:.4f}, {ms:.3f} ms a head, relative speed {speed:.3f}", flush=True)
    return rows


@torch.inference_mode()
def plain_step_ms(target, repeats: int, context: int = 200) -> float:
    """Median milliseconds of a one-token forward."""
    cache = target.new_cache(context + 1)
    cache.length = context
    token, position = torch.tensor([1], device=target.device), torch.tensor([context], device=target.device)
    return cold_ms(lambda: target.model.logits(target.model.hidden(token, position, cache, None)).sum().item(), repeats)


def knee(rows: list[dict], within: float = 0.002) -> int:
    """The smallest size whose relative speed is within `within` of the best."""
    best = max(row["relative_speed"] for row in rows)
    return next(row["size"] for row in rows if row["relative_speed"] >= (1 - within) * best)
