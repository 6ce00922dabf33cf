"""`cost_aware` and `adaptive`: the tree whose expected tokens are worth most beyond what its milliseconds cost.

With tokens a step T_k and milliseconds L_k under tree k, the fastest schedule maximises Σ T / Σ L. Dinkelbach (1967):
at the best ratio λ that is the same as to maximise T_k - λ L_k at every step. T_k = 1 + num_accepted is not known
before the step; its expectation is estimated from signals of this very position and of the steps before:

- `path_d`: the path value s_d (DESIGN 3); `path_0` is the base top-1 probability;
- `draft_d`: s_d / s_0, the heads' part of it; `draft_1` is the first head's top-1 probability;
- `last`, `mean`: num_accepted of the last step, and its running mean, over this prompt.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import Policy

HISTORY = ("last", "mean")


def read_signal(name: str) -> tuple[str, int]:
    """("path" | "draft", depth), or ("last" | "mean", 0). Raises EntmtpError for anything else."""
    kind, _, depth = name.partition("_")
    if name in HISTORY:
        return name, 0
    if kind in ("path", "draft") and depth.isdecimal() and (kind == "path" or int(depth) > 0):
        return kind, int(depth)
    raise EntmtpError(
        f"signal '{name}' is none of path_0, path_1, … (path values), draft_1, … (without the base), last, mean"
    )


def depth_of(signals: Sequence[str]) -> int | None:
    """Depth of the path values that the signals need; None when they need none."""
    read = [read_signal(name) for name in signals]
    return max((depth for kind, depth in read if kind not in HISTORY), default=None)


@dataclass
class Curve:
    """What one signal adds to the estimates: linear between `knots` [M], flat beyond them. `accepted` [trees, M]."""

    signal: str
    knots: list[float]
    accepted: list[list[float]]

    def __post_init__(self) -> None:
        if len(self.knots) < 2 or any(a >= b for a, b in zip(self.knots, self.knots[1:])):
            raise EntmtpError(f"curve of {self.signal}: needs two knots or more, ascending, not {self.knots}")
        if any(len(row) != len(self.knots) for row in self.accepted):
            raise EntmtpError(f"curve of {self.signal}: each tree needs {len(self.knots)} values, one a knot")

    def add(self, x: float, totals: Sequence[float]) -> list[float]:
        """`totals` [trees] with this curve's values at x added."""
        piece = min(max(bisect_right(self.knots, x) - 1, 0), len(self.knots) - 2)
        low = self.knots[piece]
        weight = min(max((x - low) / (self.knots[piece + 1] - low), 0.0), 1.0)
        return [
            total + (row[piece] + weight * (row[piece + 1] - row[piece])) for total, row in zip(totals, self.accepted)
        ]


@dataclass
class CostAwarePolicy(Policy):
    """argmax over trees of E[num_accepted | signals] - rate * step_ms; E is `floor` plus every curve.

    `rate`: tokens a millisecond, the price of time. `accepted`: mean num_accepted of a calibration step, from which
    `last` and `mean` start in every prompt. `window`: steps that `mean` looks back on, by exponential weights.
    `depth` and `base` follow from the signals.
    """

    floor: list[float] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    rate: float = 0.0
    accepted: float = 0.0
    window: int = 8

    def __post_init__(self) -> None:
        for what, size in (
            ("floor", len(self.floor)),
            ("step_ms", len(self.step_ms)),
            *((f"the curve of {curve.signal}", len(curve.accepted)) for curve in self.curves),
        ):
            if size != len(self.trees):
                raise EntmtpError(f"policy {self.name}: {what} is for {size} trees, but there are {len(self.trees)}")
        if self.rate <= 0:
            raise EntmtpError(f"policy {self.name}: rate={self.rate} must be above 0 tokens a millisecond")
        # history last, in this order: the compiled walk's sums must be these very sums
        rank = {name: place for place, name in enumerate(HISTORY, 1)}
        self.curves = sorted(self.curves, key=lambda curve: rank.get(curve.signal, 0))
        self.signals = [read_signal(curve.signal) for curve in self.curves]
        self.depth = depth_of([curve.signal for curve in self.curves])
        self.base = any(kind == "path" for kind, _ in self.signals)
        self.reset()

    def reset(self) -> None:
        self.last = self.mean = self.accepted

    def observe(self, accepted: int) -> None:
        self.last = float(accepted)
        self.mean += (accepted - self.mean) / self.window

    def estimates(self, values: Sequence[float]) -> list[float]:
        """E[num_accepted] of every tree at this step."""
        totals: Sequence[float] = self.floor
        for curve, (kind, depth) in zip(self.curves, self.signals):
            if kind == "draft":
                x = values[depth] / values[0]
            elif kind == "path":
                x = values[depth]
            else:
                x = self.last if kind == "last" else self.mean
            totals = curve.add(x, totals)
        return list(totals)

    def worths(self, estimates: Sequence[float]) -> list[float]:
        """Tokens of a step with each tree less what its time is worth; the root, which every tree commits, left out."""
        return [estimate - self.rate * ms for estimate, ms in zip(estimates, self.step_ms)]

    def decide(self, values: Sequence[float]) -> int:
        return best(self.worths(self.estimates(values)))

    def margin(self, values: Sequence[float]) -> float:
        """In tokens: between the best tree and the next."""
        worths = sorted(self.worths(self.estimates(values)))
        return worths[-1] - worths[-2] if len(worths) > 1 else float("inf")


@dataclass
class AdaptivePolicy(CostAwarePolicy):
    """`cost_aware` that keeps its estimates current on the text at hand, for text unlike the calibration text.

    Running means over the prompt's steps (exponential weights over `memory` steps; they start where calibration left
    them) of what the chosen trees accepted, what E had promised, and the milliseconds they took: their ratios correct
    every tree's estimate and the price of time. Of trees that were not chosen a step says nothing, so one factor serves
    all.
    """

    memory: int = 32

    def reset(self) -> None:
        super().reset()
        self.got = self.promised = self.accepted
        self.taken = (1 + self.accepted) / self.rate
        self.choice = (0.0, 0.0)  # promise and milliseconds of the step under way

    def observe(self, accepted: int) -> None:
        super().observe(accepted)
        promise, ms = self.choice
        self.got += (accepted - self.got) / self.memory
        self.promised += (promise - self.promised) / self.memory
        self.taken += (ms - self.taken) / self.memory

    def worths(self, estimates: Sequence[float]) -> list[float]:
        factor = self.got / self.promised if self.promised > 0 else 1.0
        rate = (1 + self.got) / self.taken
        return [factor * estimate - rate * ms for estimate, ms in zip(estimates, self.step_ms)]

    def decide(self, values: Sequence[float]) -> int:
        estimates = self.estimates(values)
        index = best(self.worths(estimates))
        self.choice = estimates[index], self.step_ms[index]
        return index


def best(worths: Sequence[float]) -> int:
    """Index of the largest; of equals the first, the smaller tree."""
    return max(range(len(worths)), key=worths.__getitem__)
