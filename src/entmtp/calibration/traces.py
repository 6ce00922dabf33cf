"""Rank traces: one teacher-forced pass over a known text tells what every tree would accept at every position.

Position i is the step whose root is text token i. Rank d is the place of the true token i + d among head d's
candidates, given the true tokens before it; `width` stands for "not a candidate" (also past the text's end). With
r = (r_1, r_2, …) a tree accepts the longest prefix of r that is one of its paths (DESIGN 2).
"""

import torch
from torch import Tensor

from entmtp.decoding.sampling import Chooser
from entmtp.errors import EntmtpError
from entmtp.heads.drafter import Drafter, top1_prob

COLUMNS = ["prompt_id", "position", "token", "ranks", "gaps", "path_values", "entropy", "head_entropy",
           "choice_margin"]  # fmt: skip


@torch.inference_mode()
def trace_text(target, drafter: Drafter, cache, prompt_id: str, prompt: list[int], text: list[int], chooser: Chooser):
    """Rows (dicts with COLUMNS) for one prompt and the target's own continuation of it.

    `choice_margin` is the score of the text's token minus the best other one's (negative: this pass would have
    chosen otherwise, which only a numerical tie explains). `gaps` are the draft-logit distances of the true token to
    its nearest rival, so that a rank can be told from a numerical tie.
    """
    if not text:
        raise EntmtpError(f"{prompt_id}: empty continuation")
    n, depth, width = len(text), drafter.depth, drafter.width
    cache.reset()
    everything = target.prefill(prompt + text[:-1], cache)
    hidden = everything[len(prompt) - 1 :]  # [n, H]; row i chose text[i]
    states = drafter.states(everything)[len(prompt) - 1 :]  # [n, H]: what the heads start from
    tokens = torch.tensor(text, device=target.device)
    logits = target.model.logits(hidden)
    scores = chooser.scores(logits, list(range(len(prompt), len(prompt) + n))).float()
    margin = _margin(scores, tokens)
    entropy, of_heads = _entropy(logits), []
    values = [top1_prob(logits)]
    greedy = tokens[:, None]
    ranks = torch.full((n, depth), width, dtype=torch.long, device=target.device)
    gaps = torch.full((n, depth), float("inf"), device=target.device)
    for d in range(1, depth + 1):
        head = drafter.path_logits(d, states, greedy)
        values.append(values[-1] * top1_prob(head))
        of_heads.append(_entropy(head))
        greedy = torch.cat([greedy, drafter.token_map[drafter.candidates(head)[:, :1]]], dim=-1)
        if n > d:
            paths = torch.stack([tokens[k : n - d + k] for k in range(d)], dim=-1)
            head = drafter.path_logits(d, states[: n - d], paths)
            ranks[: n - d, d - 1], gaps[: n - d, d - 1] = _ranks(drafter, head, tokens[d:])
    path_values, head_entropy = torch.stack(values, dim=-1), torch.stack(of_heads, dim=-1)
    return [
        {
            "prompt_id": prompt_id,
            "position": i,
            "token": text[i],
            "ranks": ranks[i].tolist(),
            "gaps": gaps[i].tolist(),
            "path_values": path_values[i].tolist(),
            "entropy": float(entropy[i]),
            "head_entropy": head_entropy[i].tolist(),
            "choice_margin": float(margin[i]),
        }
        for i in range(n)
    ]


def _entropy(logits: Tensor) -> Tensor:
    """[n, v] -> [n], nats; excluded tokens (logit -inf) add nothing."""
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp).nansum(dim=-1)


def _margin(scores: Tensor, tokens: Tensor) -> Tensor:
    """[n, v], [n] -> [n]: score of the token minus the largest other score."""
    own = scores.gather(1, tokens[:, None])
    return (own - scores.scatter(1, tokens[:, None], -torch.inf).amax(dim=-1, keepdim=True))[:, 0]


def _ranks(drafter: Drafter, logits: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each true token among the candidates (width: none) and its distance to the nearest other logit."""
    top = drafter.candidates(logits)
    match = drafter.token_map[top] == true[:, None]
    rank = torch.where(match.any(dim=-1), match.long().argmax(dim=-1), drafter.width)
    inverse = torch.full((drafter.target.vocab_size,), -1, dtype=torch.long, device=true.device)
    inverse[drafter.token_map] = torch.arange(len(drafter.token_map), device=true.device)
    column = inverse[true]
    own = logits.float().gather(1, column.clamp_min(0)[:, None])
    distance = (logits.float() - own).abs().scatter(1, column.clamp_min(0)[:, None], torch.inf).amin(dim=-1)
    return rank, torch.where(column >= 0, distance, torch.inf)
