"""ConfAdapt (arXiv 2602.06019): a self-distilled target emits as many tokens a forward as it is sure of. Lossy.

Each forward reads the tokens that the last one committed, then k_max - 1 masks. The last token and the masks predict
the next k_max tokens; the longest prefix whose top-1 probabilities reach the threshold is committed, one token at
least. The masks' keys and values are dropped, so the cache holds real tokens only. Nothing is verified: speed is bought
with quality.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.decoding.engine import Decoder
from entmtp.decoding.sampling import refuse_nan
from entmtp.decoding.steps import Generation, Step, cut
from entmtp.errors import EntmtpError
from entmtp.target.cache import CausalMasks


@dataclass
class BlockRule:
    """How many of k_max predictions to commit: those at least `threshold` sure; with None always all (static k).

    The first prediction is plain decoding's own and is committed in any case. In the paper nothing follows it where it
    is not sure itself. With `first_free` its certainty is not asked for, and only the masks' decide: a mask is as
    likely to be right as it says whatever the token before it cost in doubt."""

    k_max: int
    threshold: float | None
    first_free: bool = False

    def __post_init__(self) -> None:
        if self.k_max < 1 or (self.threshold is not None and not 0 < self.threshold <= 1):
            raise EntmtpError(
                f"k_max={self.k_max} must be at least 1, and the threshold {self.threshold} in (0, 1] or null"
            )

    def keep(self, confidence: list[float]) -> int:
        if self.threshold is None:
            return len(confidence)
        asked = [1.0, *confidence[1:]] if self.first_free else confidence
        return max(1, next((n for n, p in enumerate(asked) if p < self.threshold), len(asked)))


class BlockDecoder:
    """A target that knows a mask token, with one cache for all prompts.

    Only tokens below `limit` are predicted, where another model with a smaller vocabulary is to read them.
    """

    def __init__(self, target, mask_id: int, capacity: int, limit: int | None = None):
        if mask_id != target.mask_id and not 0 <= mask_id < target.vocab_size:
            raise EntmtpError(f"mask token {mask_id} is outside the target's vocabulary of {target.vocab_size}")
        self.target, self.mask_id, self.capacity, self.limit = target, mask_id, capacity, limit
        self.cache = target.new_cache(capacity)
        self.masks = CausalMasks(target.mask_rows, capacity, target.dtype, target.device)

    @staticmethod
    def rows(k_max: int) -> int:
        """Cache rows of a forward: the tokens that the last one committed, and the masks."""
        return 2 * k_max

    def generate(self, prompt: list[int], rule: BlockRule, max_new_tokens: int) -> Generation:
        """Decode one prompt greedily. A step's `accepted` counts the tokens beyond its first, as a tree's does."""
        return timed(self.stream(prompt, rule, max_new_tokens))

    @torch.inference_mode()
    def stream(self, prompt: list[int], rule: BlockRule, max_new_tokens: int) -> Iterator[Step]:
        """Every block as it is committed; the first comes with the prefill."""
        self.start(prompt, max_new_tokens, self.rows(rule.k_max))
        fresh, count = prompt, 0
        while True:
            begin = time.perf_counter()
            confidence, chosen = self.predict(fresh, rule.k_max)
            block = cut(chosen[: rule.keep(confidence)], self.target.stop_ids, max_new_tokens - count)
            count += len(block)
            seconds = time.perf_counter() - begin
            yield Step(0, rule.k_max - 1, len(block) - 1, len(block) - 1, confidence[0], seconds, 0.0, 0.0, block)
            if block[-1] in self.target.stop_ids or count == max_new_tokens:
                return
            fresh = block

    def start(self, prompt: list[int], max_new_tokens: int, rows: int) -> None:
        """A new text: check that there is room for it and `rows` rows of a forward, empty the cache."""
        check_room(self.target, self.capacity, prompt, max_new_tokens, rows)
        self.cache.reset()

    def predict(self, fresh: list[int], k: int) -> tuple[list[float], list[int]]:
        """Commit `fresh` tokens to the cache; top-1 probabilities and tokens of the k predictions after them."""
        target, cache, model = self.target, self.cache, self.target.model
        n, start = len(fresh) + k - 1, self.cache.length
        tokens = torch.tensor(fresh + [self.mask_id] * (k - 1), device=target.device)
        positions = torch.arange(start, start + n, device=target.device).clamp_max(target.max_positions - 1)
        # a prefill is causal by itself, a single row sees everything
        mask = self.masks(n, start + n) if start and n > 1 else None
        logits = model.logits(model.hidden(tokens, positions, cache, mask)[len(fresh) - 1 :])
        cache.length = start + len(fresh)
        scores = self.scores(logits)
        chosen = scores.argmax(dim=-1).tolist()
        refuse_nan(scores, chosen[0])
        return scores.softmax(dim=-1).amax(dim=-1).tolist(), chosen

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [n, V] in float32, in which only what may be said can be chosen."""
        logits = logits.float()
        logits[:, self.mask_id : self.mask_id + 1] = -torch.inf  # nothing, where an adapter reads the mask
        return logits[:, : self.limit]


def check_room(target, capacity: int, prompt: list[int], max_new_tokens: int, rows: int) -> None:
    """Refuse a text that does not fit the target's positions or a cache of `capacity` rows."""
    if not prompt:
        raise EntmtpError("the prompt is empty: it must have at least one token")
    if max_new_tokens < 1:
        raise EntmtpError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    target.check_room(len(prompt), max_new_tokens)
    need = Decoder.room(len(prompt), max_new_tokens, rows)
    if need > capacity:
        raise EntmtpError(f"this run needs {need} cache rows, the decoder has {capacity}")


def timed(stream: Iterator[Step]) -> Generation:
    """Run a stream of blocks to its end; its first step is the prefill's."""
    start = time.perf_counter()
    steps = [next(stream)]
    prefill_end = time.perf_counter()
    steps += stream
    end = time.perf_counter()
    tokens = [token for step in steps for token in step.tokens]
    return Generation(tokens, prefill_end - start, end - prefill_end, steps)
