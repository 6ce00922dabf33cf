"""Thresholds fitted by replay on the calibration split, and policies from their readable JSON."""

from dataclasses import asdict
from itertools import combinations

import numpy as np

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace, replay_milliseconds
from entmtp.config import PolicyConfig
from entmtp.errors import EntmtpError
from entmtp.policy.bandit import BanditPolicy
from entmtp.policy.cost_aware import AdaptivePolicy, CostAwarePolicy, Curve
from entmtp.policy.growing import Calibration, GrowingPolicy
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.bank import Bank
from entmtp.tree.defaults import default_tree
from entmtp.tree.topology import Tree

GROWING = ("dynamic", "marginal")
COST_AWARE = ("cost_aware", "adaptive")


def build_policy(config: dict, bank: Bank | None) -> Policy:
    """A policy from a fitted `policy.json` (see `fit_policy`) and its bank."""
    kind, name = config["kind"], config["policy"]
    if kind == "ar":
        return Policy(name, [Tree(())])
    if kind == "static":
        return Policy(name, [default_tree(config["tree"])])
    if kind in GROWING:
        grown = dict(config["growing"])
        calibration = grown.pop("calibration")
        return GrowingPolicy(name, [], **grown, calibration=Calibration(**calibration) if calibration else None)
    if bank is None:
        raise EntmtpError(f"policy {name} needs a bank: run the pipeline for this task first")
    trees = [bank.trees[index].tree for index in config["trees"]]
    if kind == "star":
        return Policy(name, trees)
    if kind == "ladder":
        return LadderPolicy(name, trees, config["start"], config["depth"], config["thresholds"])
    if kind in COST_AWARE:
        return _build_cost_aware(name, trees, config["start"], config["cost_aware"])
    if kind == "bandit":
        return BanditPolicy(name, trees, **config["bandit"])
    return TauPolicy(name, trees, config["start"], config["depth"], config["tau_on"], config["tau_off"])


def _build_cost_aware(name: str, trees: list[Tree], start: int, fitted: dict) -> CostAwarePolicy:
    own = {key: value for key, value in fitted.items() if key not in ("curves", "memory", "cross_validation")}
    own["curves"] = [Curve(**curve) for curve in fitted["curves"]]
    if fitted["memory"] is None:
        return CostAwarePolicy(name, trees, start, **own)
    return AdaptivePolicy(name, trees, start, **own, memory=fitted["memory"])


def fit_policy(config: PolicyConfig, bank: Bank | None, trace: Trace | None, latency: LatencyTable | None) -> dict:
    """Fit what `config` leaves open (null). Returns the content of `policy.json`."""
    base = {"policy": config.name, "kind": config.kind, "heads": config.heads, "tree": config.tree, "depth": None,
            "tau_on": None, "tau_off": None, "thresholds": None, "trees": [], "start": 0, "growing": None,
            "cost_aware": None, "bandit": None}  # fmt: skip
    if config.kind in ("ar", "static"):
        return base
    fitter = _Fitter(config, bank, trace, latency)
    star = {**base, "kind": "star", "trees": [bank.star]}
    if config.kind in GROWING:
        grown, speed = _fit_growing(config, bank, trace, latency)
        return {**base, "growing": grown, "calib_tokens_per_s": speed, "star_tokens_per_s": fitter.speed(star)}
    fitted = star if config.kind == "star" else {**base, **fitter.fit(config.kind)}
    return {**fitted, "calib_tokens_per_s": fitter.speed(fitted), "star_tokens_per_s": fitter.speed(star)}


def _fit_growing(config: PolicyConfig, bank: Bank, trace: Trace, latency: LatencyTable) -> tuple[dict, float]:
    """What `build_policy` needs, and predicted tokens/s. On the bank's own clock: the latency table's milliseconds are
    scaled by what the static optimum's measured step is to its predicted one."""
    from entmtp.policy.fit_growing import GrowthFitter

    if trace.growth is None:
        raise EntmtpError(f"policy {config.name} grows its trees: fitting it needs a growth trace")
    fitter = GrowthFitter(trace.growth, latency, config.nodes, clock(bank, latency))
    policy = getattr(fitter, config.kind)(config.name)
    keys = ("nodes", "beam", "children", "max_depth", "expand", "rate", "step_ms")
    calibration = asdict(policy.calibration) if policy.calibration else None
    return {**{key: getattr(policy, key) for key in keys}, "calibration": calibration}, 1000 * fitter.speed(policy)


def step_times(bank: Bank, latency: LatencyTable, trees: list[Tree], depth: int | None) -> list[float]:
    """Milliseconds of a step with each tree, under a policy whose signal is the path value of `depth` (None: none).

    The bank's own step time where it has the tree, else the latency table's on the bank's clock; plus what the signal
    adds to it.
    """
    known, scale = {entry.tree: entry.step_ms for entry in bank.trees}, clock(bank, latency)
    return [
        known.get(tree, scale * latency.step(tree)) + max(0.0, latency.step(tree, depth) - latency.step(tree))
        for tree in trees
    ]


def clock(bank: Bank, latency: LatencyTable) -> float:
    """Milliseconds of the bank's measured steps for one of the latency table's, by the static optimum."""
    star = bank.trees[bank.star]
    return star.step_ms / latency.step(star.tree)


def replayed_speed(fitted: dict, bank: Bank, trace: Trace, latency: LatencyTable) -> float:
    """Tokens/s of a fitted policy on the texts of `trace`, by replay, on the bank's clock (plain decoding included).

    Raises EntmtpError for a growing policy on a trace without expansions.
    """
    policy, tokens = build_policy(fitted, bank), int(trace.bounds[-1]) - len(trace.prompts)
    if isinstance(policy, GrowingPolicy):
        from entmtp.policy.fit_growing import GrowthFitter

        if trace.growth is None:
            raise EntmtpError(f"policy {policy.name} grows its trees: replaying it needs a growth trace")
        return 1000 * GrowthFitter(trace.growth, latency, policy.nodes, clock(bank, latency)).speed(policy)
    step_ms = step_times(bank, latency, policy.trees, policy.depth)
    return 1000 * tokens / replay_milliseconds(trace, policy, step_ms)


class _Fitter:
    """Replayed throughput on the calibration texts is the objective; step times are the bank's own."""

    def __init__(self, config: PolicyConfig, bank: Bank, trace: Trace, latency: LatencyTable):
        self.config, self.bank, self.trace, self.latency = config, bank, trace, latency
        self.depths = [config.depth] if config.depth is not None else list(range(trace.depth + 1))
        if max(self.depths) > trace.depth:
            raise EntmtpError(f"policy.depth={max(self.depths)} exceeds the {trace.depth} draft heads")

    def step_ms(self, depth: int | None, trees: list[int]) -> list[float]:
        return step_times(self.bank, self.latency, [self.bank.trees[index].tree for index in trees], depth)

    def speed(self, fitted: dict) -> float:
        """Predicted tokens/s of a fitted policy on the calibration texts."""
        return replayed_speed(fitted, self.bank, self.trace, self.latency)

    def fit(self, kind: str) -> dict:
        """What `build_policy` needs of the policy, fitted."""
        if kind in COST_AWARE:
            return self._cost_aware()
        if kind == "bandit":
            return self._bandit()
        options = [option for depth in self.depths for option in getattr(self, f"_{kind}_options")(depth)]
        named = [{"policy": self.config.name, "kind": kind, **option} for option in options]
        best = max(named, key=self.speed)
        return {key: value for key, value in best.items() if key not in ("policy", "kind")}

    def _cost_aware(self) -> dict:
        """Its signals are chosen by cross-validation, not by the speed on the texts that it was fitted to."""
        from entmtp.policy.fit_cost_aware import CostAwareFitter, fitted_json

        policy, tried = CostAwareFitter(self.config, self.bank, self.latency).choose(self.trace)
        trees = list(range(len(policy.trees)))
        return {"depth": policy.depth, "trees": trees, "start": policy.start, "cost_aware": fitted_json(policy, tried)}

    def _bandit(self) -> dict:
        """Nothing is calibrated: trees and milliseconds are the bank's."""
        trees = list(range(len(self.bank.trees)))
        return {"trees": trees, "bandit": {"explore": self.config.explore, "step_ms": self.step_ms(None, trees)}}

    def _values(self, depth: int) -> np.ndarray:
        return self.trace.path_values(depth)

    def _tau_options(self, depth: int) -> list[dict]:
        """Every pair of bank trees and the whole bank, over a grid of (tau_on, tau_off) at quantiles of s."""
        size = len(self.bank.trees)
        groups = [list(pair) for pair in combinations(range(size), 2)]
        if size != 2:
            groups.append(list(range(size)))
        grid = sorted({round(float(q), 6) for q in np.quantile(self._values(depth), np.linspace(0.05, 0.95, 10))})
        given = [value for value in (self.config.tau_on, self.config.tau_off) if value is not None]
        on = [self.config.tau_on] if self.config.tau_on is not None else [*grid, *given]
        off = [self.config.tau_off] if self.config.tau_off is not None else [*grid, *given]
        pairs = sorted({(a, b) for a in on for b in off if b <= a})
        if not pairs:
            raise EntmtpError(f"policy.tau_off={off[0]} must not exceed policy.tau_on={on[0]}")
        return [
            {"depth": depth, "tau_on": a, "tau_off": b, "trees": trees, "start": self._start(trees)}
            for trees in groups
            for a, b in pairs
        ]

    def _start(self, trees: list[int]) -> int:
        """Begin a prompt with the static optimum, or the tree of the group that is nearest to it in size."""
        return min(range(len(trees)), key=lambda index: abs(trees[index] - self.bank.star))

    def _ladder_options(self, depth: int) -> list[dict]:
        """The best ladder over the whole bank, and the best single tree, for which no signal is computed."""
        from entmtp.policy.fit_ladder import fit_ladder

        trees = list(range(len(self.bank.trees)))
        found = fit_ladder(self.trace.lengths([entry.tree for entry in self.bank.trees]), self._values(depth),
                           self.trace.bounds, np.array(self.step_ms(depth, trees)), self.config.bins)  # fmt: skip
        alone = max(trees, key=lambda tree: self.speed({"policy": "", "kind": "star", "trees": [tree]}))
        options = [{"depth": None, "thresholds": [], "trees": [alone], "start": 0}]
        if found is not None:
            options.append({"depth": depth, "thresholds": found, "trees": trees, "start": self.bank.star})
        return options
