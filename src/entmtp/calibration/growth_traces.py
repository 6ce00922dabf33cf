"""The model's part of growth traces: one full expansion at every position of a known text."""

import numpy as np
import torch
from torch import Tensor

from entmtp.calibration.growth import GrowthTrace, join
from entmtp.heads.children import best_children
from entmtp.policy.growing import rows_per_depth


@torch.inference_mode()
def trace_growth(drafter, states: Tensor, text: list[int], beam: int, children: int, chunk: int = 64) -> dict:
    """Arrays [n, C] of one text whose heads start from `states` [n, H]: probability, depth, parent, on_path."""
    parts = [
        _expand(drafter, states[start : start + chunk], text[start : start + chunk + drafter.depth], beam, children)
        for start in range(0, len(states), chunk)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _expand(drafter, states: Tensor, text: list[int], beam: int, children: int) -> dict:
    """`text`: the roots of these positions, and as many tokens after them as there are heads."""
    n, device = len(states), states.device
    roots = torch.tensor(text[:n], device=device)
    paths = roots[:, None, None]  # [n, frontier, depth]: tokens of the frontier's paths, root first
    probability = torch.ones(n, 1, dtype=torch.float64, device=device)
    on_path = torch.ones(n, 1, dtype=torch.bool, device=device)
    first, columns, made = -1, 0, []  # column of the frontier's first candidate (the root is -1), columns so far
    for depth, rows in enumerate(rows_per_depth(beam, children, drafter.depth), 1):
        chosen = probability.sort(dim=1, descending=True, stable=True).indices[:, :rows]  # [n, rows]
        parents = paths.gather(1, chosen[:, :, None].expand(-1, -1, depth))
        logits = drafter.path_logits(depth, states.repeat_interleave(rows, 0), parents.reshape(n * rows, depth))
        ids, conditional = (part.view(n, rows, children) for part in best_children(logits, children))
        tokens = drafter.token_map[ids]
        true = torch.tensor([text[i + depth] if i + depth < len(text) else -1 for i in range(n)], device=device)
        probability = (probability.gather(1, chosen)[:, :, None] * conditional.double()).view(n, -1)
        on_path = (on_path.gather(1, chosen)[:, :, None] & (tokens == true[:, None, None])).view(n, -1)
        paths = torch.cat([parents[:, :, None].expand(-1, -1, children, -1), tokens[..., None]], dim=-1)
        paths = paths.view(n, rows * children, depth + 1)
        parent = (chosen + first)[:, :, None].expand(-1, -1, children).reshape(n, -1)
        first, columns = columns, columns + rows * children
        made.append({
            "probability": probability.cpu().numpy(),
            "depth": np.full((n, rows * children), depth, dtype=np.int8),
            "parent": parent.cpu().numpy().astype(np.int16),
            "on_path": on_path.cpu().numpy(),
        })  # fmt: skip
    return {name: np.concatenate([part[name] for part in made], axis=1) for name in made[0]}


@torch.inference_mode()
def growth_of(
    target, decoder, prompts: list[dict], texts: dict[str, list[int]], beam: int, children: int
) -> GrowthTrace:
    """The growth trace of `texts` {prompt id: tokens}, in the order of `prompts`."""
    parts = []
    for prompt in prompts:
        if prompt["id"] not in texts:
            continue
        ids, text = prompt["token_ids"], texts[prompt["id"]]
        decoder.cache.reset()
        hidden = target.prefill(ids + text[:-1], decoder.cache)
        states = decoder.drafter.states(hidden)[len(ids) - 1 :]
        parts.append(trace_growth(decoder.drafter, states, text, beam, children))
        print(f"growth {prompt['id']}: {len(text)} positions", flush=True)
    return join(parts, beam, children)
