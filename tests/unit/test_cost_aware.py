"""cost_aware, adaptive and bandit: their arithmetic, and live against replay against the compiled walk."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checks import edited, rows_of
from trace_fixture import random_trace

from entmtp.calibration.replay import cost_aware_run, curve_values, replay_policy, replay_uses
from entmtp.errors import EntmtpError
from entmtp.evaluation.checks import replay_verdict
from entmtp.policy.bandit import BanditPolicy
from entmtp.policy.cost_aware import AdaptivePolicy, CostAwarePolicy, Curve, best, read_signal
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Tree

TREES = [Tree(()), Tree.of([(0,)]), Tree.of([(0,), (1,), (0, 0)])]
STEP_MS = [10.0, 11.0, 14.0]
SIGNALS = ["path_0", "draft_1", "path_2", "draft_3", "last", "mean"]


def curve(signal: str, rng: np.random.Generator, trees: int = 3, knots: list[float] | None = None) -> Curve:
    at = knots or np.sort(rng.random(int(rng.integers(2, 6)))).tolist()
    return Curve(signal, at, np.cumsum(rng.random((trees, len(at))), axis=1).tolist())


def made(rng: np.random.Generator, signals: list[str], memory: int | None = None, **own) -> CostAwarePolicy:
    """A policy over TREES with random curves."""
    curves = [curve(name, rng) for name in signals]
    floor = np.sort(rng.random(3)).tolist()
    known = {"floor": floor, "curves": curves, "step_ms": STEP_MS, "rate": 0.2, "accepted": 0.7, "window": 3, **own}
    if memory is None:
        return CostAwarePolicy("c", TREES, **known)
    return AdaptivePolicy("a", TREES, **known, memory=memory)


def test_signals_have_names_and_depths():
    assert read_signal("path_0") == ("path", 0)
    assert read_signal("draft_12") == ("draft", 12)
    assert read_signal("mean") == ("mean", 0)
    for name in ("draft_0", "path", "path_x", "entropy", "path_-1", ""):
        with pytest.raises(EntmtpError, match=f"signal '{name}' is none of path_0"):
            read_signal(name)


@given(st.integers(0, 10**6))
def test_a_curve_is_linear_interpolation(seed):
    rng = np.random.default_rng(seed)
    one = curve("path_1", rng)
    x = np.concatenate([rng.random(20) * 1.4 - 0.2, one.knots])
    expected = np.stack([np.interp(x, one.knots, row) for row in one.accepted])
    assert curve_values(one, x) == pytest.approx(expected)
    added = np.array([one.add(value, [1.0, 2.0, 3.0]) for value in x.tolist()]).T
    assert added == pytest.approx(expected + np.array([[1.0], [2.0], [3.0]]))


def test_broken_curves_and_sizes_are_refused():
    with pytest.raises(EntmtpError, match="two knots or more, ascending"):
        Curve("path_1", [0.5], [[1.0]])
    with pytest.raises(EntmtpError, match="two knots or more, ascending"):
        Curve("path_1", [0.5, 0.5], [[1.0, 2.0]])
    with pytest.raises(EntmtpError, match="each tree needs 2 values"):
        Curve("path_1", [0.5, 0.6], [[1.0]])
    rng = np.random.default_rng(0)
    with pytest.raises(EntmtpError, match="policy c: floor is for 2 trees, but there are 3"):
        made(rng, [], floor=[0.0, 1.0])
    with pytest.raises(EntmtpError, match="the curve of mean is for 2 trees, but there are 3"):
        made(rng, [], curves=[curve("mean", rng, trees=2)])
    with pytest.raises(EntmtpError, match="rate=0 must be above 0"):
        made(rng, [], rate=0)
    with pytest.raises(EntmtpError, match="step_ms is for 1 trees, but there are 3"):
        BanditPolicy("b", TREES, step_ms=[1.0])


def test_what_a_policy_looks_at_follows_from_its_signals():
    rng = np.random.default_rng(0)
    expected = {(): (None, False), ("mean",): (None, False), ("draft_2",): (2, False), ("path_0",): (0, True),
                ("draft_1", "path_3"): (3, True)}  # fmt: skip
    made_of = {names: made(rng, list(names)) for names in expected}
    assert {names: (policy.depth, policy.base) for names, policy in made_of.items()} == expected


@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), max_size=8))
def test_cost_aware_equals_its_definition(seed, accepts):
    rng = np.random.default_rng(seed)
    policy = made(rng, ["mean", "draft_2", "last", "path_1"])
    last = mean = 0.7
    for accepted in accepts:
        values = np.cumprod(rng.random(3)).tolist()
        seen = {"draft_2": values[2] / values[0], "path_1": values[1], "last": last, "mean": mean}
        expected = np.array(policy.floor)
        for one in policy.curves:
            expected = expected + [np.interp(seen[one.signal], one.knots, row) for row in one.accepted]
        assert policy.estimates(values) == pytest.approx(expected)
        worths = expected - 0.2 * np.array(STEP_MS)
        assert policy.decide(values) == int(np.argmax(worths))
        assert policy.margin(values) == pytest.approx(np.diff(np.sort(worths))[-1])
        policy.observe(accepted)
        last, mean = accepted, mean + (accepted - mean) / 3
    policy.reset()
    assert policy.last == policy.mean == 0.7


def test_of_equals_the_smaller_tree():
    assert best([1.0, 2.0, 2.0]) == 1
    policy = CostAwarePolicy("c", TREES[:1], floor=[0.0], step_ms=[10.0], rate=0.1)
    assert policy.decide([]) == 0
    assert policy.margin([]) == float("inf")


def test_adaptive_starts_as_calibrated_and_learns_from_broken_promises():
    rng = np.random.default_rng(3)
    plain, adaptive = made(rng, [], floor=[0.0, 0.5, 1.2], rate=0.12), None
    adaptive = made(rng, [], 8, floor=[0.0, 0.5, 1.2], rate=0.12)
    assert adaptive.worths([0.0, 0.5, 1.2]) == pytest.approx(plain.worths([0.0, 0.5, 1.2]))
    assert adaptive.decide([]) == 2
    choices = []
    for _ in range(60):
        choices.append(adaptive.decide([]))
        adaptive.observe(0)
    assert choices[0] == 2 and choices[-1] == 0 and sorted(choices, reverse=True) == choices
    adaptive.reset()
    assert adaptive.decide([]) == 2
    for _ in range(60):  # better than promised: the larger tree stays, and the price of time rises
        adaptive.observe(2)
        assert adaptive.decide([]) == 2
    factor = adaptive.got / adaptive.promised
    assert factor == pytest.approx(2 / 1.2, rel=1e-2)
    assert (1 + adaptive.got) / adaptive.taken == pytest.approx(3 / STEP_MS[2], rel=1e-2)


def test_bandit_finds_the_best_tree_and_spends_nothing_on_the_certain_one():
    def run(chances: list[float], steps: int = 1500) -> Counter:
        rng = np.random.default_rng(0)
        policy = BanditPolicy("b", TREES, step_ms=STEP_MS)
        uses = Counter()
        for _ in range(steps):
            tree = policy.decide([])
            policy.observe(int(rng.binomial(TREES[tree].depth, chances[tree])))
            uses[tree] += 1
        return uses

    assert run([0.0, 0.9, 0.3])[1] > 1200  # 1.9 / 11 against 1.6 / 14 and 1 / 10
    assert run([0.0, 0.1, 0.8])[2] > 1200
    assert run([0.0, 0.9, 0.3])[0] == 0  # an index of 1 / 10 that cannot grow
    assert run([0.0, 0.02, 0.02])[0] > 1200


def test_bandit_forgets_the_prompt():
    policy = BanditPolicy("b", TREES, step_ms=STEP_MS)
    first = policy.indices()
    for _ in range(9):
        policy.decide([])
        policy.observe(0)
    assert policy.indices() != first
    policy.reset()
    assert policy.indices() == first


# --- compiled against step by step -------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.lists(st.sampled_from(SIGNALS), unique=True), st.sampled_from([None, 1, 4, 30]))
def test_the_compiled_walk_takes_the_policys_steps(seed, signals, memory):
    rng = np.random.default_rng(seed)
    trace, policy = random_trace(rng, longest=30), made(rng, signals, memory)
    runs = replay_policy(trace, policy)
    uses = Counter(step.tree for steps in runs for step in steps)
    assert replay_uses(trace, policy).tolist() == [uses[tree] for tree in range(3)]
    chosen, seen = cost_aware_run(trace, policy)
    for first, steps in zip(trace.bounds[:-1].tolist(), runs, strict=True):
        policy.reset()
        for step in steps:
            assert chosen[first + step.position] == step.tree
            assert seen[first + step.position].tolist() == [policy.last, policy.mean]
            policy.observe(step.accepted)
    assert (chosen >= 0).sum() == sum(uses.values()) == (~np.isnan(seen[:, 0])).sum()


# --- live against replay -----------------------------------------------------------------------------------------


def live_policies(case, trees: dict[str, Tree]) -> list[Policy]:
    """Policies over a bank of four, whose knots lie among the case's own signals so that the choice changes."""
    bank = [trees["empty"], trees["chain_4"], trees["wide"], trees["full"]]

    def curves(*signals: str) -> list[Curve]:
        """Together they promise the trees 0 where all signals are low, and 0 to 0.3 where all are high."""
        found = []
        for name in signals:
            past = name in ("last", "mean")
            knots = [0.0, 0.2, 0.4] if past else np.quantile(case.trace.signal(name), [0.1, 0.5, 0.9]).tolist()
            found.append(Curve(name, knots, [[0.0, 0.05 * k / len(signals), 0.1 * k / len(signals)] for k in range(4)]))
        return found

    def policy(kind: type, *signals: str, floor: float = 0.0, **own) -> CostAwarePolicy:
        """Time is worth 0.05 to 0.1 tokens more with the larger trees."""
        return kind(" ".join(signals), bank, floor=[floor * k for k in range(4)], curves=curves(*signals), rate=0.05,
                    step_ms=[10.0, 11.0, 11.5, 12.0], accepted=0.4, **own)  # fmt: skip

    return [
        policy(CostAwarePolicy, "draft_1"),
        policy(CostAwarePolicy, "path_2"),
        policy(CostAwarePolicy, "mean", "last"),
        policy(CostAwarePolicy, "draft_1", "draft_4", "path_0", "last", "mean"),
        policy(AdaptivePolicy, "draft_1", "draft_2", memory=5),
        policy(AdaptivePolicy, floor=0.1, memory=3),
        BanditPolicy("bandit", bank, step_ms=[10.0, 11.0, 11.5, 12.0], explore=0.5),
    ]


@pytest.mark.parametrize(
    ("arch", "mode", "stop"),
    [
        ("hydra", "greedy", True),
        ("hydra", "sample", False),
        ("medusa", "greedy", False),
        ("hydra_plus", "sample", True),
    ],
)
def test_live_takes_replays_very_steps_and_writes_plain_text(traced, trees, arch, mode, stop):
    case, switched = traced(arch, mode, stop), set()
    for policy in live_policies(case, trees):
        for prompt, run, steps in zip(case.prompts, case.live(policy), replay_policy(case.trace, policy), strict=True):
            assert run.tokens == case.texts[prompt["id"]]
            assert [(s.tree, s.accepted) for s in run.steps] == [(s.tree, s.accepted) for s in steps]
            for live, step in zip(run.steps, steps, strict=True):
                assert (live.signal == live.signal) == (policy.depth is not None) == (step.signal == step.signal)
                if policy.depth is not None:
                    assert live.signal == pytest.approx(step.signal, rel=1e-3)
                switched.add((policy.name, live.tree))
                assert 0 <= live.switch_seconds <= live.scheduler_seconds <= live.seconds
    changing = {name for name, _ in switched if sum(other == name for other, _ in switched) > 1}
    assert len(changing) >= 6, changing


def test_the_base_is_not_computed_for_who_does_not_look_at_it(traced, trees, monkeypatch):
    case = traced("hydra", "greedy")
    policies = live_policies(case, trees)
    monkeypatch.setattr("entmtp.decoding.engine.top1_prob", lambda logits: pytest.fail("base top-1 computed"))
    case.live(policies[0])
    with pytest.raises(pytest.fail.Exception, match="base top-1 computed"):
        case.live(policies[1])


@pytest.mark.parametrize("number", [0, 3, 4])
def test_another_tree_fails_unless_the_decision_was_a_tie(traced, trees, number):
    case = traced("hydra", "greedy")
    policy = live_policies(case, trees)[number]
    arm = {"policy": "c", "kind": "cost_aware", "heads": "hydra"}
    rows = rows_of(case, arm, policy)
    assert replay_verdict(case.trace, policy, rows, 1e-3)["verdict"] == "equal"
    chosen = list(rows[3]["step_tree"])
    chosen[2] = (chosen[2] + 1) % 4
    other = edited(rows, 3, step_tree=chosen)
    (difference,) = replay_verdict(case.trace, policy, other, 1e-5)["differences"]
    assert (difference["what"], difference["step"]) == ("tree", 2)
    assert difference["distance"] > 1e-5
    # the margin is that of the state at that very step, and a resolution as coarse makes it a tie
    assert replay_verdict(case.trace, policy, other, difference["distance"])["verdict"] == "tie"
    assert replay_verdict(case.trace, policy, other, difference["distance"] * 0.999)["verdict"] == "fail"
    # a live signal that was another position's is no tie, however near the decision
    signals = list(rows[3]["step_signal"])
    signals[2] += 0.5
    assert replay_verdict(case.trace, policy, edited(other, 3, step_signal=signals), 0.3)["verdict"] == "fail"


def test_without_signals_nothing_rounds_so_nothing_is_a_tie(traced, trees):
    case = traced("hydra", "greedy")
    for policy in (live_policies(case, trees)[2], live_policies(case, trees)[6]):
        rows = rows_of(case, {"policy": "b", "kind": "bandit", "heads": "hydra"}, policy)
        chosen = list(rows[1]["step_tree"])
        chosen[1] = (chosen[1] + 1) % 4
        assert replay_verdict(case.trace, policy, edited(rows, 1, step_tree=chosen), 1e9)["verdict"] == "fail"


def test_a_policy_copied_for_another_price_shares_no_state():
    policy = made(np.random.default_rng(0), ["mean"], 4)
    policy.decide([])
    policy.observe(3)
    assert replace(policy, rate=0.5).mean == 0.7


@given(st.integers(0, 10**6))
def test_the_bandit_is_its_definition(seed):
    """UCB1's index by hand: mean and spread of what an arm accepted, over its milliseconds."""
    rng, policy = np.random.default_rng(seed), BanditPolicy("b", TREES, step_ms=STEP_MS, explore=0.3)
    used, got = [1] * len(TREES), [tree.depth / 2 for tree in TREES]
    for step in range(1, 12):
        index = [(1 + g / n + 0.3 * tree.depth * np.sqrt(2 * np.log(step) / n)) / ms
                 for tree, g, n, ms in zip(TREES, got, used, STEP_MS, strict=True)]  # fmt: skip
        assert policy.indices() == pytest.approx(index)
        at = policy.decide([])
        accepted = int(rng.integers(TREES[at].depth + 1))
        policy.observe(accepted)
        used[at], got[at] = used[at] + 1, got[at] + accepted
