"""The bound on scheduling: the fastest schedule that perfect foresight could take, from any set of trees.

The text is fixed, so a schedule is a path over positions: a step with tree k leads from position i to
i + num_accepted(k, i) + 1 and costs the milliseconds of that step. The shortest path is the oracle; no scheduler that
picks among the same trees at the same costs can be faster (its signal and choice would cost time on top).
"""

from dataclasses import dataclass

import numpy as np

from entmtp.calibration.kernels import shortest, walk, walk_choices
from entmtp.calibration.replay import Trace
from entmtp.errors import EntmtpError
from entmtp.tree.topology import Tree


@dataclass
class Oracle:
    """`tokens_per_s` of the oracle and of the best single tree on the same texts; `shares`: steps by tree."""

    tokens_per_s: float
    static_tokens_per_s: float
    static: int
    shares: list[float]

    @property
    def headroom(self) -> float:
        """What a perfect scheduler would gain over the best static tree: 0.1 is 10%."""
        return self.tokens_per_s / self.static_tokens_per_s - 1

    def captured(self, tokens_per_s: float) -> float:
        """Share of the headroom that a policy of this replayed speed takes; negative when it loses."""
        part = share(tokens_per_s, self.static_tokens_per_s, self.tokens_per_s)
        return float("nan") if part is None else part


def share(speed: float, static: float, bound: float) -> float | None:
    """Part of the way from a static tree to the oracle; None where there is no way to go."""
    return (speed - static) / (bound - static) if bound > static * (1 + 1e-9) else None


def oracle(trace: Trace, trees: list[Tree], step_ms: list[float]) -> Oracle:
    """The bound for `trees`, whose steps take `step_ms` milliseconds each. Raises EntmtpError without trees."""
    if not trees or len(trees) != len(step_ms):
        raise EntmtpError(f"oracle: {len(trees)} trees with {len(step_ms)} step times; one each is needed")
    tokens = int(trace.bounds[-1]) - len(trace.prompts)  # the last token of a text needs no step
    lengths = trace.lengths(trees)
    times = np.asarray(step_ms, dtype=float)
    statics = [walk(row, trace.bounds)[0] * ms for row, ms in zip(lengths, times, strict=True)]
    choices = np.zeros(lengths.shape[1], dtype=np.int64)
    total = shortest(lengths, np.broadcast_to(times[:, None], lengths.shape), trace.bounds, choices)
    uses = np.zeros(len(trees), dtype=np.int64)
    walk_choices(lengths, choices, trace.bounds, uses)
    best = int(np.argmin(statics))
    return Oracle(1000 * tokens / total, 1000 * tokens / statics[best], best, (uses / uses.sum()).tolist())
