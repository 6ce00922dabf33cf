"""Training features: one teacher-forced target pass over each text, kept as flat arrays over text positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.config import TrainConfig


@dataclass
class Features:
    """Flat over positions t: root token t was chosen from `hidden[t]`; a text's positions are contiguous.

    hidden [T, H] bf16 · tokens [T] · remaining [T] tokens of the same text after t · top_ids, top_logp [T, k]: the
    target's most probable tokens at t and their log-probabilities · texts: (start, end, held_out) per text
    """

    hidden: Tensor
    tokens: Tensor
    remaining: Tensor
    top_ids: Tensor
    top_logp: Tensor
    texts: list[tuple[int, int, bool]]

    def positions(self, held_out: bool) -> Tensor:
        """Position indices of the training or the held-out texts, those with at least one token to draft."""
        parts = [torch.arange(start, end) for start, end, held in self.texts if held == held_out]
        index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
        return index[self.remaining[index] > 0]


def is_held_out(key: str, share: float) -> bool:
    """By a hash of the prompt (the key without its sample number): all texts of a prompt fall on one side."""
    return int(key.split("/")[0][:8], 16) / 2**32 < share


@torch.inference_mode()
def compute_features(target, rows: list[dict], config: TrainConfig) -> Features:
    """Run the target once over every text {key, prompt_ids, tokens}. Memory: (2 H + 8 k) bytes a position."""
    total = sum(len(row["tokens"]) for row in rows)
    k = config.distill_top_k
    hidden = torch.empty(total, target.hidden_size, dtype=torch.bfloat16)
    tokens = torch.empty(total, dtype=torch.long)
    remaining = torch.empty(total, dtype=torch.long)
    top_ids = torch.empty(total, k, dtype=torch.int32)
    top_logp = torch.empty(total, k, dtype=torch.float32)
    longest = max(len(row["prompt_ids"]) + len(row["tokens"]) for row in rows)
    cache, texts, start = target.new_cache(longest), [], 0
    for count, row in enumerate(sorted(rows, key=lambda row: row["key"]), 1):
        prompt, text = row["prompt_ids"], row["tokens"]
        end = start + len(text)
        cache.reset()
        states = target.prefill(prompt + text[:-1], cache)[len(prompt) - 1 :]
        logp = target.model.logits(states).float().log_softmax(dim=-1)
        top_logp[start:end], ids = logp.topk(k, dim=-1)
        top_ids[start:end] = ids.int()
        hidden[start:end] = states.bfloat16()
        tokens[start:end] = torch.tensor(text)
        remaining[start:end] = torch.arange(len(text) - 1, -1, -1)
        texts.append((start, end, is_held_out(row["key"], config.held_out)))
        start = end
        if count % 200 == 0:
            print(f"features: {count}/{len(rows)} texts, {start} positions", flush=True)
    return Features(hidden, tokens, remaining, top_ids, top_logp, texts)


def draft_vocabulary(features: Features, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent tokens of the training texts, most frequent first; ties go to the lower id."""
    train = torch.cat([features.tokens[start:end] for start, end, held in features.texts if not held])
    counts = torch.bincount(train, minlength=vocab_size)
    return torch.argsort(counts, descending=True, stable=True)[: min(size, vocab_size)]
