"""Random rank traces: ranks mostly low, each text's end padded with `width` as in real traces."""

import numpy as np

from entmtp.calibration.replay import PromptTrace, Trace


def random_trace(
    rng: np.random.Generator, prompts: int = 3, longest: int = 12, depth: int = 3, width: int = 5, hit: float = 0.4
) -> Trace:
    """`hit` is the chance of rank 0; a text has fewer than `longest` tokens."""
    made = []
    for number in range(prompts):
        n = int(rng.integers(1, longest))
        ranks = np.minimum(rng.geometric(hit, (n, depth)) - 1, width).astype(np.int64)
        for d in range(1, depth + 1):
            ranks[max(0, n - d) :, d - 1] = width
        values = np.cumprod(rng.random((n, depth + 1)) ** 0.5, axis=1)
        made.append(PromptTrace(f"p{number}", ranks, values, rng.random(n), rng.random((n, depth))))
    return Trace(made)
