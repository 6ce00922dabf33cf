"""Fitting `cost_aware` and `adaptive`: estimates, the price of time, and which signals to look at.

Estimates are monotone curves by least squares, fitted where the policy's own steps start. The price of time is at its
fixed point under replay. The signals (and `adaptive`'s memory) are those with which the policy replays fastest on texts
that it was not fitted to.
"""

from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace, cost_aware_run, replay_milliseconds
from entmtp.config import PolicyConfig
from entmtp.errors import EntmtpError
from entmtp.policy.cost_aware import HISTORY, AdaptivePolicy, CostAwarePolicy, Curve, depth_of
from entmtp.policy.fit import step_times
from entmtp.tree.bank import Bank
from entmtp.tree.topology import Tree

MEMORIES = (8, 16, 32, 64, 128)
ROUNDS = 3  # fits, each at the positions that the one before visits
RIDGE = 1.0  # in steps: pulls curves towards flat ones where signals are nearly the same


def signal_sets(depth: int, model: str | None, history: bool) -> list[list[str]]:
    """What is tried with `depth` heads: no signal (the best static tree), one signal (`single`), several (`multi`)."""
    drafts = [f"draft_{d}" for d in range(1, depth + 1)]
    single = [[name] for name in (*drafts, *(f"path_{d}" for d in range(depth + 1)), *(HISTORY if history else ()))]
    more = [[], ["path_0"], *([["mean"], ["path_0", "last", "mean"]] if history else [])]
    multi = [drafts[:d] + extra for d in range(1, depth + 1) for extra in more if d > 1 or extra]
    return [[], *({"single": single, "multi": multi}.get(model) or single + multi)]


def fit_curves(signals: dict[str, NDArray], accepted: NDArray, pieces: int) -> tuple[list[float], list[Curve]]:
    """(floor, curves) for num_accepted [trees, n] from signals [n] each: the least-squares sum of curves that never
    fall, linear between quantiles of their signal. One signal alone: isotonic regression with interpolation.

    A curve is a sum of ramps, one between each two knots, so monotone means that no ramp's weight is negative. A signal
    that does not vary gets no curve.
    """
    from sklearn.linear_model import LinearRegression

    knots = {name: np.unique(np.quantile(x, np.linspace(0, 1, pieces + 1))) for name, x in signals.items()}
    knots = {name: found for name, found in knots.items() if len(found) > 1}
    ramps = [np.clip((signals[name][:, None] - k[:-1]) / np.diff(k), 0, 1) for name, k in knots.items()]
    design = np.concatenate([np.ones((accepted.shape[1], 1)), *ramps], axis=1)
    ridge = RIDGE * np.eye(design.shape[1])
    ridge[0, 0] = 1e-9  # the floor is not pulled
    factor = np.linalg.cholesky(design.T @ design + ridge)  # the same least squares in as few rows as there are weights
    target = np.linalg.solve(factor, design.T @ accepted.T)
    weights = LinearRegression(positive=True, fit_intercept=False).fit(factor.T, target).coef_  # [trees, weights]
    curves, at = [], 1
    for name, k in knots.items():
        rises = weights[:, at : at + len(k) - 1]
        at += len(k) - 1
        heights = np.concatenate([np.zeros((len(rises), 1)), np.cumsum(rises, axis=1)], axis=1)
        curves.append(Curve(name, k.tolist(), heights.tolist()))
    return weights[:, 0].tolist(), curves


@dataclass
class CostAwareFitter:
    """Fits on the clock of `bank`: a step's milliseconds are the bank's, plus what looking at the signals costs."""

    config: PolicyConfig
    bank: Bank
    latency: LatencyTable

    @property
    def trees(self) -> list[Tree]:
        return [entry.tree for entry in self.bank.trees]

    def step_ms(self, signals: list[str]) -> list[float]:
        return step_times(self.bank, self.latency, self.trees, depth_of(signals))

    def fit(self, trace: Trace, signals: list[str]) -> CostAwarePolicy:
        """The policy that looks at `signals`, on the texts of `trace`.

        The first fit takes every position for a step's start and knows no history; the later ones take the starts of
        the steps that the policies before them took.
        """
        lengths, star = trace.lengths(self.trees), self.bank.star
        mean = float(lengths[star].mean())
        at, history = np.arange(lengths.shape[1]), np.full((lengths.shape[1], 2), mean)
        rate, visited = (1 + mean) / self.bank.trees[star].step_ms, []
        for _ in range(ROUNDS):
            known = {name: history[:, HISTORY.index(name)] if name in HISTORY else trace.signal(name)[at]
                     for name in signals}  # fmt: skip
            floor, curves = fit_curves(known, lengths[:, at], self.config.bins)
            policy = CostAwarePolicy(self.config.name, self.trees, star, None, floor, curves, self.step_ms(signals),
                                     rate, mean)  # fmt: skip
            policy = self.price(trace, policy)
            chosen, seen = cost_aware_run(trace, policy)
            started = np.flatnonzero(chosen >= 0)
            mean, rate = float(lengths[chosen[started], started].mean()), policy.rate
            visited.append((started, seen[started]))
            at, history = (np.concatenate(parts) for parts in zip(*visited))
        return replace(policy, accepted=mean)

    def price(self, trace: Trace, policy: CostAwarePolicy) -> CostAwarePolicy:
        """The policy at the best price of time on the way to Dinkelbach's fixed point, where the rate is the tokens a
        millisecond that it reaches by replay (estimates are not the truth, so the last need not be the best)."""
        best, best_speed = policy, 0.0
        for _ in range(12):
            speed = self.speed(trace, policy)
            if speed >= best_speed:  # of equals the later, whose rate is the speed itself
                best, best_speed = policy, speed
            if abs(speed - policy.rate) < 1e-9:
                break
            policy = replace(policy, rate=speed)
        return best

    def speed(self, trace: Trace, policy: CostAwarePolicy) -> float:
        """Replayed tokens a millisecond."""
        return tokens(trace) / replay_milliseconds(trace, policy, policy.step_ms)

    def options(self, trace: Trace) -> list[list[str]]:
        adaptive, limit = self.config.kind == "adaptive", self.config.depth
        named = self.config.signals
        if adaptive and set(named) & set(HISTORY):
            raise EntmtpError(f"policy.signals={named}: adaptive looks back by itself; leave out last and mean")
        if (depth_of(named) or 0) > trace.depth:
            raise EntmtpError(f"policy.signals={named}: deeper than the {trace.depth} draft heads")
        if named:
            return [list(named)]
        return signal_sets(trace.depth if limit is None else limit, self.config.model, not adaptive)

    def variants(self, policy: CostAwarePolicy) -> dict[int, CostAwarePolicy]:
        """By memory: `adaptive` policies on the same estimates; 0: the policy itself where it does not adapt."""
        if self.config.kind != "adaptive":
            return {0: policy}
        own = {field.name: getattr(policy, field.name) for field in fields(policy)}
        memories = MEMORIES if self.config.memory is None else (self.config.memory,)
        return {memory: AdaptivePolicy(**own, memory=memory) for memory in memories}

    def choose(self, trace: Trace) -> tuple[CostAwarePolicy, list[dict]]:
        """The policy with the signals (and memory) that replay fastest on texts left out of the fit, fitted on all;
        and what was tried: {"signals", "memory", "tokens_per_s"}. Of equals the one with fewer signals."""
        parts = left_out(trace, self.config.folds)
        tried = []
        for signals in self.options(trace):
            total: dict[int, float] = {}
            for fitted, judged in parts:
                for memory, policy in self.variants(self.fit(fitted, signals)).items():
                    ms = replay_milliseconds(judged, policy, policy.step_ms)
                    total[memory] = total.get(memory, 0.0) + ms
            judged_tokens = sum(tokens(judged) for _, judged in parts)
            tried += [{"signals": signals, "memory": memory, "tokens_per_s": 1000 * judged_tokens / ms}
                      for memory, ms in total.items()]  # fmt: skip
        best = max(tried, key=lambda one: (one["tokens_per_s"], -len(one["signals"])))
        return self.variants(self.fit(trace, best["signals"]))[best["memory"]], tried


def left_out(trace: Trace, folds: int) -> list[tuple[Trace, Trace]]:
    """(texts to fit on, texts to judge by), every text judged once. A single text must serve as both."""
    numbers = [number for number, prompt in enumerate(trace.prompts) if len(prompt) > 1]  # others take no step
    folds = min(folds, len(numbers))
    if folds < 2:
        return [(trace, trace)]
    judged = [numbers[fold::folds] for fold in range(folds)]
    return [(trace.part([number for number in numbers if number not in own]), trace.part(own)) for own in judged]


def tokens(trace: Trace) -> int:
    """Tokens that steps commit: all but each text's last, which needs none."""
    return int(trace.bounds[-1]) - len(trace.prompts)


def fitted_json(policy: CostAwarePolicy, tried: list[dict]) -> dict:
    """What `build_policy` needs beside the trees, and the cross-validation for who reads it."""
    return {
        "floor": policy.floor,
        "curves": [asdict(curve) for curve in policy.curves],
        "step_ms": policy.step_ms,
        "rate": policy.rate,
        "accepted": policy.accepted,
        "window": policy.window,
        "memory": policy.memory if isinstance(policy, AdaptivePolicy) else None,
        "cross_validation": tried,
    }
