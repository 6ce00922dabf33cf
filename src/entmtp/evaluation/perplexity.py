"""Perplexity of generated text under the target, teacher-forced in float32."""

import torch


@torch.inference_mode()
def text_nll(target, cache, prompt: list[int], tokens: list[int]) -> float:
    """Sum of -log p(token | prompt, tokens before) in nats over `tokens`."""
    cache.reset()
    hidden = target.prefill(prompt + tokens[:-1], cache)[len(prompt) - 1 :]
    logp = target.model.logits(hidden).float().log_softmax(dim=-1)
    return float(-logp.gather(1, torch.tensor(tokens, device=logp.device)[:, None]).sum())


def policy_nll(target, cache, bench: list[dict], prompts: list[dict]) -> dict[str, dict]:
    """{policy: {"nll": total nats, "tokens": count}}; a text that several policies share is scored once."""
    by_id = {prompt["id"]: prompt["token_ids"] for prompt in prompts}
    known: dict[tuple, float] = {}
    result: dict[str, dict] = {}
    for row in bench:
        key = (row["prompt_id"], tuple(row["tokens"]))
        if key not in known:
            known[key] = text_nll(target, cache, by_id[row["prompt_id"]], list(row["tokens"]))
        entry = result.setdefault(row["policy"], {"nll": 0.0, "tokens": 0})
        entry["nll"] += known[key]
        entry["tokens"] += len(row["tokens"])
    return result
