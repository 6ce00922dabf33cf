"""Gumbel-max sampling with counter-based noise: the token at a position does not depend on how it was reached.

argmax(logits / T + g) with standard Gumbel noise g is an exact draw from softmax(logits / T). The noise is a pure
function of (seed, prompt id, absolute position), so plain decoding and every tree share it, and the sampled text is
the same for all of them (DESIGN 4).
"""

import hashlib
from math import isnan

import numpy as np
import torch
from torch import Tensor

from entmtp.errors import EntmtpError
from entmtp.target.choices import first_largest


class GumbelNoise:
    """Gumbel noise [vocab] for any absolute position of one prompt."""

    def __init__(self, seed: int, prompt_id: str, vocab_size: int, device: str = "cpu", keep: int = 64):
        digest = hashlib.sha256(f"{seed}\x00{prompt_id}".encode()).digest()
        self.key = np.frombuffer(digest[:16], dtype=np.uint64)
        self.vocab_size, self.device, self.keep = vocab_size, device, keep
        self.rows: dict[int, Tensor] = {}

    def row(self, position: int) -> Tensor:
        """float32 [vocab]; recent positions are kept, since a tree looks at them again in the next step."""
        row = self.rows.get(position)
        if row is None:
            # the position is the high word of Philox's counter: streams of different positions never overlap
            bits = np.random.Philox(key=self.key, counter=np.array([0, 0, 0, position], dtype=np.uint64))
            exponential = np.random.Generator(bits).standard_exponential(self.vocab_size, dtype=np.float64)
            row = torch.from_numpy(-np.log(exponential)).to(torch.float32).to(self.device)
            if len(self.rows) >= self.keep:
                del self.rows[min(self.rows)]
            self.rows[position] = row
        return row


def refuse_nan(scores: Tensor, token: int) -> None:
    """Half precision can overflow at any position, and the argmax over NaN is a token like any other, or none. On a
    device the look would be one more wait: there only the prompt's states are looked at (`Target.prefill`)."""
    if scores.device.type == "cpu" and (token >= scores.shape[1] or isnan(scores[0, token])):
        raise EntmtpError("the target's logits are not numbers (NaN): its weights are damaged, or its dtype overflows; "
                          "try dtype=float32 or dtype=bfloat16")  # fmt: skip


class Chooser:
    """The target's choice of a token from its logits: argmax, or argmax of logits / T + noise at that position."""

    def __init__(self, temperature: float = 0.0, noise: GumbelNoise | None = None):
        if (temperature > 0) != (noise is not None):
            raise ValueError("sampling needs both a temperature above 0 and its noise; greedy needs neither")
        self.temperature, self.noise = temperature, noise

    def scores(self, logits: Tensor, positions: list[int]) -> Tensor:
        """Scores [n, vocab] whose argmax is the choice. `positions` [n] are those of the tokens to be chosen."""
        if self.noise is None:
            return logits
        noise = torch.stack([self.noise.row(position) for position in positions])
        return logits.float() / self.temperature + noise

    def __call__(self, logits: Tensor, positions: list[int]) -> list[int]:
        """logits [n, vocab] -> n token ids, the lowest of equally good ones on a CPU."""
        scores = self.scores(logits, positions)
        tokens = first_largest(scores)
        refuse_nan(scores, tokens[0])
        return tokens

    def choose(self, logits: Tensor, position: int) -> int:
        """logits [1, vocab] -> the token at `position`."""
        return self(logits, [position])[0]


class Choices(dict):
    """The target's choice after each node, made when it is asked for: most nodes of a large tree are never reached."""

    def __init__(self, chooser: Chooser, logits: Tensor, positions: list[int]):
        super().__init__()
        self.chooser, self.logits, self.positions = chooser, logits, positions

    def __missing__(self, node: int) -> int:
        self[node] = self.chooser.choose(self.logits[node : node + 1], self.positions[node])
        return self[node]
