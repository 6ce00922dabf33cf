"""How large a draft vocabulary should be: what a size covers against the milliseconds that it costs."""

import torch

from entmtp.heads.features import Features, draft_vocabulary
from entmtp.target.linear import make_linear
from entmtp.timing import cold_ms

# Head d's draft is accepted with about this probability given the earlier ones, were every token in the vocabulary:
# what the heads that we shipped first reach on greedy text. It weighs coverage against time, no more.
ACCEPTANCE = 0.55


@torch.inference_mode()
def vocabulary_curve(
    target, features: Features, sizes: list[int], depth: int, width: int, plain_ms: float, repeats: int
) -> list[dict]:
    """A row per size: {size, coverage, projection_ms, tokens_per_step, relative_speed}.

    `coverage` is the share of held-out tokens inside the `size` most frequent training tokens; `projection_ms` a head's
    vocabulary projection and candidates for one row. `relative_speed` is that of a chain of `depth` drafts:
    (1 + sum of (ACCEPTANCE * coverage)^d) tokens in a plain step and `depth` projections, over one token a plain step.
    """
    held = [features.texts[n] for n in features.text_numbers(held_out=True).tolist()]
    tokens = torch.cat([features.tokens[text.start : text.end] for text in held])
    rows = []
    for size in sorted({min(size, target.vocab_size) for size in sizes}):
        token_map = draft_vocabulary(features, size, target.vocab_size)
        inside = torch.zeros(target.vocab_size, dtype=torch.bool)
        inside[token_map] = True
        coverage = float(inside[tokens].float().mean())
        project = make_linear(target.head_rows(token_map.to(target.device)))
        state = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
        ms = cold_ms(lambda: project(state).topk(min(width, size)).indices.tolist(), repeats)  # noqa: B023
        tokens_per_step = 1 + sum((ACCEPTANCE * coverage) ** d for d in range(1, depth + 1))
        speed = tokens_per_step * plain_ms / (plain_ms + depth * ms)
        rows.append({"size": size, "coverage": coverage, "projection_ms": ms,
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
