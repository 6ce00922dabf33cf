"""Plain decoding: one target forward a token. The baseline, and the judge of losslessness."""

import torch

from entmtp.decoding.sampling import Chooser


@torch.inference_mode()
def plain_tokens(target, cache, prompt: list[int], max_new_tokens: int, chooser: Chooser):
    """Yield token ids until the first stop id (yielded too) or `max_new_tokens`. `cache` must have room."""
    cache.reset()
    hidden = target.prefill(prompt, cache)
    root = chooser(target.model.logits(hidden[-1:]), [len(prompt)])[0]
    for count in range(1, max_new_tokens + 1):
        yield root
        if root in target.stop_ids or count == max_new_tokens:
            return
        position = torch.tensor([cache.length], device=target.device)
        hidden = target.model.hidden(torch.tensor([root], device=target.device), position, cache, None)
        cache.length += 1
        root = chooser(target.model.logits(hidden), [cache.length])[0]
