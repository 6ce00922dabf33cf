"""Fitted thresholds against brute force on a small grid."""

import json
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import PromptTrace, Trace, replay_policy
from entmtp.config import PolicyConfig
from entmtp.errors import EntmtpError
from entmtp.policy.fit import build_policy, fit_policy
from entmtp.policy.fit_ladder import monotone
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.bank import Bank, BankTree
from entmtp.tree.defaults import default_tree
from entmtp.tree.topology import Tree

DEPTH, WIDTH = 2, 6
TREES = [Tree(()), Tree.of([(0,), (0, 0)]), Tree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])]
STEP_MS = [10.0, 12.0, 17.0]


def make_trace(seed: int = 0, prompts: int = 6, n: int = 40) -> Trace:
    """Texts whose acceptance follows the path value: some stretches are easy, some hard."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(prompts):
        easy = np.repeat(rng.random(n // 8) < 0.5, 8)
        p = np.where(easy, 0.9, 0.25) + rng.normal(0, 0.05, n)
        hit = rng.random((n, DEPTH)) < p[:, None]
        ranks = np.where(hit, (rng.random((n, DEPTH)) < 0.25).astype(int), rng.integers(2, WIDTH + 1, (n, DEPTH)))
        for d in range(1, DEPTH + 1):
            ranks[n - d :, d - 1] = WIDTH
        s = np.clip(p + rng.normal(0, 0.05, n), 0.01, 0.999)
        values = np.stack([s, s**2, s**3], axis=1)
        made.append(PromptTrace(f"p{number}", ranks, values, np.zeros(n), np.ones((n, DEPTH))))
    return Trace(made)


def make_latency() -> LatencyTable:
    """A head evaluation costs 0.5 ms whatever its rows; a forward 8 ms and half a millisecond a token."""
    sizes = [1, 2, 3, 6, 8]
    return LatencyTable(sizes, [8 + 0.5 * n for n in sizes], [1, 4], [[0.5, 0.5]] * DEPTH, 0.3, 9.0, "hydra")


def make_bank(count: int = 3) -> Bank:
    entries = [BankTree(tree, 1.5, speed, ms) for tree, ms, speed in zip(TREES, STEP_MS, (100.0, 130.0, 120.0))]
    return Bank("t", "hydra", "measured", entries[:count])


def speed(policy: Policy, trace: Trace, indices: list[int]) -> float:
    """Tokens a second by walking through every step of the policy."""
    latency, total = make_latency(), 0.0
    for steps in replay_policy(trace, policy):
        for step in steps:
            tree = policy.trees[step.tree]
            extra = latency.step(tree, policy.depth) - latency.step(tree)
            total += STEP_MS[indices[step.tree]] + max(0.0, extra)
    return 1000 * (len(trace.ranks) - len(trace.prompts)) / total


def fit(**config) -> dict:
    return fit_policy(PolicyConfig(name="x", **config), make_bank(), make_trace(), make_latency())


def test_ar_and_static_need_neither_bank_nor_trace():
    ar = fit_policy(PolicyConfig(name="ar", kind="ar", heads=None), None, None, None)
    assert build_policy(ar, None).trees == [Tree(())]
    static = fit_policy(PolicyConfig(name="hydra", kind="static", tree="mc_sim_7b_63"), None, None, None)
    assert build_policy(static, None).trees == [default_tree("mc_sim_7b_63")]


def test_star_is_the_fastest_tree_of_the_bank():
    fitted = fit(kind="star")
    assert fitted["trees"] == [1]
    policy = build_policy(fitted, make_bank())
    assert policy.trees == [TREES[1]]
    assert policy.depth is None
    assert fitted["calib_tokens_per_s"] == pytest.approx(speed(policy, make_trace(), [1]))
    with pytest.raises(EntmtpError, match="policy x needs a bank"):
        build_policy(fitted, None)


def grid(trace: Trace, depth: int) -> list[float]:
    values = np.concatenate([prompt.path_values[:, depth] for prompt in trace.prompts])
    return [round(float(q), 6) for q in np.quantile(values, np.linspace(0.05, 0.95, 10))]


@pytest.mark.parametrize("depth", [None, 1])
def test_tau_is_the_best_of_its_grid(depth):
    trace = make_trace()
    fitted = fit(kind="tau", depth=depth)
    assert fitted["tau_off"] <= fitted["tau_on"]
    assert depth is None or fitted["depth"] == depth
    best = build_policy(fitted, make_bank())
    assert fitted["calib_tokens_per_s"] == pytest.approx(speed(best, trace, fitted["trees"]))
    assert fitted["star_tokens_per_s"] == pytest.approx(speed(Policy("star", [TREES[1]]), trace, [1]))
    for d in range(DEPTH + 1) if depth is None else [depth]:
        for indices in [*map(list, combinations(range(3), 2)), [0, 1, 2]]:
            for off, on in combinations_with_replacement(grid(trace, d)[::3], 2):
                start = (
                    indices.index(1) if 1 in indices else min(range(len(indices)), key=lambda k: abs(indices[k] - 1))
                )
                other = TauPolicy("t", [TREES[i] for i in indices], start, d, on, off)
                assert speed(other, trace, indices) <= fitted["calib_tokens_per_s"] + 1e-9
    # the trace is made so that scheduling pays: the fit must find that
    assert fitted["calib_tokens_per_s"] > 1.002 * fitted["star_tokens_per_s"]


def test_tau_keeps_given_thresholds():
    assert fit(kind="tau", tau_on=0.55, tau_off=0.4)["tau_on"] == 0.55
    given_on = fit(kind="tau", depth=1, tau_on=0.55)
    assert given_on["tau_on"] == 0.55
    assert given_on["tau_off"] <= 0.55
    with pytest.raises(EntmtpError, match=r"must not exceed policy\.tau_on"):
        fit(kind="tau", tau_on=0.3, tau_off=0.4)


def test_depth_beyond_the_heads_is_refused():
    with pytest.raises(EntmtpError, match=r"policy.depth=3 exceeds the 2 draft heads"):
        fit(kind="tau", depth=3)


@pytest.mark.parametrize("seed", range(4))
def test_ladder_is_the_fastest_of_its_bins_by_its_own_run(seed):
    trace, bank = make_trace(seed), make_bank()
    for depth in range(DEPTH + 1):
        config = PolicyConfig(name="x", kind="ladder", depth=depth, bins=5)
        fitted = fit_policy(config, bank, trace, make_latency())
        trees, thresholds = fitted["trees"], fitted["thresholds"]
        assert thresholds == sorted(thresholds) and len(thresholds) == len(trees) - 1
        policy = build_policy(fitted, bank)
        found = fitted["calib_tokens_per_s"]
        assert found == pytest.approx(speed(policy, trace, trees))
        if len(trees) == 1:  # one alone where that is best whatever the signal says: then none is computed
            assert fitted["depth"] is None
        edges = np.unique(np.quantile(trace.path_values(depth), np.linspace(0, 1, 6)[1:-1])).tolist()
        every = [LadderPolicy("l", TREES, 1, depth, list(pair)) for pair in
                 combinations_with_replacement([-1.0, *edges, 2.0], 2)]  # fmt: skip
        alone = [speed(Policy("alone", [tree]), trace, [index]) for index, tree in enumerate(TREES)]
        assert found == pytest.approx(max(*(speed(other, trace, [0, 1, 2]) for other in every), *alone), rel=1e-9)


def test_a_ladder_is_not_fitted_to_positions_where_no_step_starts():
    """The text after an accepted draft is where the small tree would do as well; steps never start there."""
    n, hits = 60, np.tile([True, False, False], 20)
    values = np.where(hits, 0.9, 0.5)[:, None] * np.ones(3)
    ranks = np.full((n, DEPTH), WIDTH)
    ranks[:-2][hits[:-2]] = 0  # both drafts are right where the path value is high, and the next step starts there too
    trace = Trace([PromptTrace("p", ranks, values, np.zeros(n), np.ones((n, DEPTH)))])
    fitted = fit_policy(PolicyConfig(name="x", kind="ladder", depth=0), make_bank(2), trace, make_latency())
    assert fitted["trees"] == [1] and fitted["depth"] is None  # a third of the positions: all that is ever seen


def test_ladder_takes_the_best_depth():
    speeds = [fit(kind="ladder", depth=depth, bins=5)["calib_tokens_per_s"] for depth in range(DEPTH + 1)]
    free = fit(kind="ladder", bins=5)
    assert free["calib_tokens_per_s"] == max(speeds)
    # None where the best is one tree alone, whatever the signal
    assert free["depth"] == fit(kind="ladder", depth=int(np.argmax(speeds)), bins=5)["depth"]


@pytest.mark.parametrize("kind", ["tau", "ladder", "star"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_policy_json_round_trip(kind, size):
    trace, bank = make_trace(2), make_bank(size)
    fitted = fit_policy(PolicyConfig(name="x", kind=kind), bank, trace, make_latency())
    again = json.loads(json.dumps(fitted, allow_nan=False))
    assert again == fitted
    policy = build_policy(again, bank)
    assert type(policy) is {"tau": TauPolicy, "ladder": LadderPolicy, "star": Policy}[kind]
    assert policy.name == "x"
    assert replay_policy(trace, policy) is not None
    assert fitted["calib_tokens_per_s"] == pytest.approx(speed(policy, trace, again["trees"]))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_monotone_equals_enumeration(bins, trees, seed):
    value = np.random.default_rng(seed).integers(-3, 4, (bins, trees)).astype(float)
    found = monotone(value)
    assert list(found) == sorted(found)
    best = max(
        sum(value[b, tree] for b, tree in enumerate(way)) for way in combinations_with_replacement(range(trees), bins)
    )
    assert value[np.arange(bins), found].sum() == best
