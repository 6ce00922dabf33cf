"""How good draft heads are on texts that they were not trained on: ranks, and what a fixed small tree would accept."""

from math import exp, log

import numpy as np
import torch
from torch import Tensor

from entmtp.calibration.replay import PromptTrace, Trace, self_rollout
from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError
from entmtp.heads.features import Features
from entmtp.tree.defaults import DEFAULT_TREES
from entmtp.tree.topology import Tree

CHUNK = 16  # texts at a time


def fixed_tree(depth: int, width: int = 4) -> Tree:
    """The tree of every comparison between heads: 16 nodes, or the part of it that fewer or narrower heads can fill."""
    return Tree.of(path for path in DEFAULT_TREES["fixed_16"].paths if len(path) <= depth and max(path) < width)


class HeldOut:
    """Held-out texts of a corpus, as many as hold `eval_positions`, in an order that mixes the tasks."""

    def __init__(self, features: Features, config: HeadsConfig):
        self.features, self.config = features, config
        texts = features.text_numbers(held_out=True)  # in the order of their keys, which are hashes
        sizes = torch.tensor([features.texts[n].end - features.texts[n].start for n in texts.tolist()])
        self.texts = texts[: int((sizes.cumsum(0) <= config.train.eval_positions).sum())] if len(texts) else texts
        if not len(self.texts):  # every epoch would look alike, and the first would be kept
            raise EntmtpError(
                f"heads training: {len(texts)} texts are held out and none fits heads.train.eval_positions="
                f"{config.train.eval_positions}: raise corpus.held_out or that, or add prompts"
            )

    @torch.inference_mode()
    def ranks(self, trainer) -> Tensor:
        """Rank [N, depth] of the true token among each head's candidates, given the text so far; `width`: not one.

        N positions of the held-out texts in order, each text's last one included (it has nothing to draft).
        """
        f, width = self.features, self.config.width
        ranks = []
        for part in self.texts.split(CHUNK):
            index, states = trainer.text_states(part)
            found = torch.full((len(index), self.config.depth), width)
            for depth in range(1, self.config.depth + 1):
                label, _, _, _ = trainer.labels(index, depth)
                top = trainer.logits(index, states, depth).topk(width, dim=-1).indices
                match = top == label[:, None]
                rank = torch.where(match.any(dim=-1), match.long().argmax(dim=-1), width)
                found[:, depth - 1] = rank.cpu()
            at = 0
            for number in part.tolist():
                text = f.texts[number]
                n = text.end - text.start - 1
                ranks.append(torch.cat([found[at : at + n], torch.full((1, self.config.depth), width)]))
                at += n
        return torch.cat(ranks) if ranks else torch.zeros(0, self.config.depth, dtype=torch.long)

    def figures(self, trainer) -> dict:
        """top-1 and top-5 per head (a token outside the draft vocabulary is a miss), and the fixed tree's
        num_accepted per task by replay. `accept_length` is their geometric mean, each with the root counted."""
        ranks = self.ranks(trainer)
        remaining = [self.features.remaining[t.start : t.end].cpu() for t in self._texts()]
        remaining = torch.cat(remaining or [torch.zeros(0)])
        rates = []
        for depth in range(1, self.config.depth + 1):
            own = ranks[remaining >= depth, depth - 1]
            rates.append([float((own < k).float().mean()) if len(own) else 0.0 for k in (1, 5)])
        accepted = self._accepted(ranks.numpy())
        lengths = [log(1 + value) for value in accepted.values()]
        return {
            "positions": len(ranks),
            "top1": [round(rate[0], 4) for rate in rates],
            "top5": [round(rate[1], 4) for rate in rates],
            "num_accepted": {task: round(value, 4) for task, value in accepted.items()},
            "accept_length": round(exp(sum(lengths) / len(lengths)), 4) if lengths else 1.0,
        }

    def _texts(self) -> list:
        return [self.features.texts[n] for n in self.texts.tolist()]

    def _accepted(self, ranks: np.ndarray) -> dict[str, float]:
        tree, found, at = fixed_tree(self.config.depth, self.config.width), {}, 0
        for number, text in enumerate(self._texts()):
            rows = ranks[at : at + text.end - text.start].astype(np.int64)
            at += len(rows)
            nothing = np.zeros((len(rows), self.config.depth + 1))
            trace = PromptTrace(str(number), rows, nothing, nothing[:, 0], nothing[:, 1:])
            found.setdefault(text.task, []).append(trace)
        rollouts = {task: self_rollout(Trace(traces), tree) for task, traces in sorted(found.items())}
        return {task: run.accepted / run.steps if run.steps else 0.0 for task, run in rollouts.items()}
