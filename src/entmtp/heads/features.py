"""Training features: one teacher-forced target pass over each text, kept as flat arrays over text positions."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.config import TrainConfig
from entmtp.io import atomic, sha256_json


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


TENSORS = ("hidden", "tokens", "remaining", "top_ids", "top_logp")


def load_or_compute(target, rows: list[dict], config: TrainConfig, path: Path) -> Features:
    """Features of `rows`, from `path` when it holds exactly these (all kinds of heads learn from the same ones)."""
    identity = sha256_json([target.fingerprint, target.dtype_name, config.distill_top_k, config.held_out,
                            sorted([row["key"], row["prompt_ids"], row["tokens"]] for row in rows)])  # fmt: skip
    if path.exists():
        with safe_open(path, framework="pt") as file:
            meta = file.metadata()
            if meta.get("identity") == identity:
                texts = [tuple(text) for text in json.loads(meta["texts"])]
                return Features(*(file.get_tensor(name) for name in TENSORS), texts)
    features = compute_features(target, rows, config)
    with atomic(path) as partial:
        save_file({name: getattr(features, name) for name in TENSORS}, partial,
                  metadata={"identity": identity, "texts": json.dumps(features.texts)})  # fmt: skip
    return features


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
