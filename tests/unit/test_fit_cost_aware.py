"""Fitted estimates against known ones, the fixed point, and what cross-validation keeps."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from test_fit import STEP_MS, TREES, make_bank, make_latency, make_trace

from entmtp.calibration.replay import PromptTrace, Trace, replay_milliseconds
from entmtp.config import PolicyConfig, compose
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.policy.bandit import BanditPolicy
from entmtp.policy.cost_aware import AdaptivePolicy, CostAwarePolicy
from entmtp.policy.fit import build_policy, fit_policy, replayed_speed
from entmtp.policy.fit_cost_aware import CostAwareFitter, fit_curves, left_out, signal_sets, tokens


def config(kind: str = "cost_aware", **own) -> PolicyConfig:
    return PolicyConfig(name="x", kind=kind, bins=6, **own)


def fitter(**own) -> CostAwareFitter:
    return CostAwareFitter(config(**own), make_bank(), make_latency())


def altered(trace: Trace, seed: int, **changes) -> Trace:
    """The texts of `trace` with other `ranks` or `path_values`, made by functions of (rng, prompt)."""
    rng = np.random.default_rng(seed)
    return Trace([replace(p, **{key: change(rng, p) for key, change in changes.items()}) for p in trace.prompts])


def stark(rng: np.random.Generator, prompt: PromptTrace) -> np.ndarray:
    """Where the path value is high nearly every greedy draft is right, elsewhere nearly none."""
    right = rng.random(prompt.ranks.shape) < np.where(prompt.path_values[:, :1] > 0.6, 0.95, 0.03)
    ranks = np.where(right, 0, 6)
    ranks[-1, 0] = ranks[-2:, 1] = 6
    return ranks


def made(seed: int, prompts: int = 20, **changes) -> Trace:
    return altered(make_trace(seed, prompts), seed, **{"ranks": stark, **changes})


def noise(rng: np.random.Generator, prompt: PromptTrace) -> np.ndarray:
    return np.cumprod(rng.random(prompt.path_values.shape), axis=1)


def nothing(rng: np.random.Generator, prompt: PromptTrace) -> np.ndarray:
    return np.full_like(prompt.ranks, 6)


def test_sets_of_signals():
    sets = signal_sets(2, None, True)
    assert sets[0] == []
    assert len({tuple(names) for names in sets}) == len(sets)
    assert ["draft_1"] in sets and ["path_0"] in sets and ["mean"] in sets and ["draft_1", "draft_2", "mean"] in sets
    assert all(len(names) <= 1 for names in signal_sets(2, "single", True))
    assert all(len(names) != 1 for names in signal_sets(2, "multi", True))
    assert not any({"last", "mean"} & set(names) for names in signal_sets(3, None, False))
    assert len(signal_sets(2, "single", True)) + len(signal_sets(2, "multi", True)) == len(sets) + 1


def test_one_curve_recovers_a_rising_function_and_ignores_a_falling_one():
    rng = np.random.default_rng(0)
    x = rng.random(20000)
    accepted = np.stack([rng.binomial(4, x**2), rng.binomial(4, 1 - x)]).astype(float)
    floor, (one,) = fit_curves({"draft_1": x}, accepted, 10)
    for at in (0.2, 0.5, 0.9):
        assert one.add(at, floor)[0] == pytest.approx(4 * at**2, abs=0.12)
        assert one.add(at, floor)[1] == pytest.approx(2.0, abs=0.05)  # never falling: the mean
    assert all(a <= b for row in one.accepted for a, b in pairwise(row))


def test_curves_add_up():
    rng = np.random.default_rng(1)
    x, y = rng.random((2, 30000))
    accepted = (2 * x + y + rng.normal(0, 0.3, 30000))[None]
    floor, curves = fit_curves({"draft_1": x, "mean": y, "last": np.full(30000, 2.0)}, accepted, 5)
    assert [one.signal for one in curves] == ["draft_1", "mean"]  # a signal that does not vary tells nothing
    for a, b in ((0.1, 0.9), (0.5, 0.5), (0.9, 0.2)):
        assert curves[1].add(b, curves[0].add(a, floor))[0] == pytest.approx(2 * a + b, abs=0.05)


def test_fits_are_the_least_squares_among_rising_curves():
    """No rising curve on the same knots fits better."""
    rng = np.random.default_rng(2)
    x = rng.random(400)
    accepted = rng.poisson(1 + np.sin(6 * x))[None].astype(float)
    floor, (one,) = fit_curves({"draft_1": x}, accepted, 4)

    def loss(floor: float, heights: np.ndarray) -> float:
        return float(((np.interp(x, one.knots, floor + heights) - accepted[0]) ** 2).sum())

    least = loss(floor[0], np.array(one.accepted[0]))
    for _ in range(300):
        heights = np.array(one.accepted[0]) + np.concatenate([[0], rng.normal(0, 0.05, len(one.knots) - 1)])
        if (np.diff(heights) >= 0).all():
            assert loss(floor[0] + rng.normal(0, 0.05), heights) > least - 0.1


def test_without_signals_it_is_a_static_tree():
    trace, one = make_trace(), fitter()
    policy = one.fit(trace, [])
    assert policy.depth is None and policy.curves == []
    speeds = [tokens(trace) / replay_milliseconds(trace, CostAwarePolicy("s", TREES, floor=[float(k == tree) for k in
              range(3)], step_ms=STEP_MS, rate=1e-9), STEP_MS) for tree in range(3)]  # fmt: skip
    assert one.speed(trace, policy) == pytest.approx(max(speeds))


def test_no_other_price_of_time_does_better():
    trace, one = made(3), fitter()
    policy = one.fit(trace, ["draft_1"])
    speed = one.speed(trace, policy)
    for factor in (0.3, 0.7, 1.5, 3.0):
        assert one.speed(trace, replace(policy, rate=factor * policy.rate)) <= speed * 1.01
        priced = one.price(trace, replace(policy, rate=factor * policy.rate))
        assert one.speed(trace, priced) == pytest.approx(speed, rel=0.01)  # from wherever it starts


@pytest.mark.parametrize("kind", ["cost_aware", "adaptive"])
def test_scheduling_is_found_where_it_pays_and_holds_on_other_texts(kind):
    calib, test = made(0), made(1)
    fitted = fit_policy(config(kind), make_bank(), calib, make_latency())
    star = fit_policy(config("star"), make_bank(), calib, make_latency())
    assert fitted["cost_aware"]["curves"]
    assert fitted["calib_tokens_per_s"] > 1.01 * fitted["star_tokens_per_s"]
    speeds = [replayed_speed(one, make_bank(), test, make_latency()) for one in (fitted, star)]
    assert speeds[0] > 1.01 * speeds[1]


def test_signals_that_say_nothing_are_not_worth_their_time():
    calib, test = made(0, path_values=noise), made(1, path_values=noise)
    fitted = fit_policy(config(model="single", depth=2), make_bank(), calib, make_latency())
    star = fit_policy(config("star"), make_bank(), calib, make_latency())
    speeds = [replayed_speed(one, make_bank(), test, make_latency()) for one in (fitted, star)]
    assert speeds[0] > 0.99 * speeds[1]


def test_cross_validation_judges_by_texts_left_out():
    trace = make_trace(0, prompts=7)
    parts = left_out(trace, 3)
    assert [(len(a.prompts), len(b.prompts)) for a, b in parts] == [(4, 3), (5, 2), (5, 2)]
    for fitted, judged in parts:
        assert not {p.prompt_id for p in fitted.prompts} & {p.prompt_id for p in judged.prompts}
    assert sorted(p.prompt_id for _, judged in parts for p in judged.prompts) == [f"p{n}" for n in range(7)]
    one = trace.part([4])
    assert left_out(one, 5) == [(one, one)]
    policy, tried = fitter(signals=["draft_1"], folds=3).choose(trace)
    assert [row["signals"] for row in tried] == [["draft_1"]]
    ms = sum(replay_milliseconds(judged, fitter().fit(fitted, ["draft_1"]), policy.step_ms) for fitted, judged in parts)
    assert tried[0]["tokens_per_s"] == pytest.approx(1000 * tokens(trace) / ms)


def test_adaptive_gives_up_on_text_where_nothing_is_accepted():
    """Text unlike the calibration text: the signals promise as ever, and nothing comes of it."""
    calib, test = make_trace(0, prompts=20), altered(make_trace(1, prompts=20, n=120), 0, ranks=nothing)
    speeds = {}
    for kind in ("cost_aware", "adaptive"):
        fitted = fit_policy(config(kind, signals=["draft_1"], memory=8), make_bank(), calib, make_latency())
        speeds[kind] = replayed_speed(fitted, make_bank(), test, make_latency())
    assert speeds["adaptive"] > 1.04 * speeds["cost_aware"]


@pytest.mark.parametrize("kind", ["cost_aware", "adaptive", "bandit"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_policy_json_round_trip(kind, size):
    trace, bank = make_trace(2), make_bank(size)
    fitted = fit_policy(config(kind), bank, trace, make_latency())
    check_schema(fitted, "policy")
    again = json.loads(json.dumps(fitted, allow_nan=False))
    assert again == fitted
    policy = build_policy(again, bank)
    assert type(policy) is {"cost_aware": CostAwarePolicy, "adaptive": AdaptivePolicy, "bandit": BanditPolicy}[kind]
    assert policy.depth == fitted["depth"]
    assert len(policy.trees) == size
    assert fitted["calib_tokens_per_s"] == pytest.approx(replayed_speed(again, bank, trace, make_latency()))
    with pytest.raises(EntmtpError, match="policy x needs a bank"):
        build_policy(again, None)


def test_texts_that_end_at_once_are_no_obstacle():
    trace = make_trace(0, prompts=4)
    short = [PromptTrace(f"s{n}", *(getattr(trace.prompts[0], key)[-1:] for key in
             ("ranks", "path_values", "entropy", "gaps"))) for n in range(4)]  # fmt: skip
    mixed = Trace([short[0], *trace.prompts[:2], *short[1:]])
    fitted = fit_policy(config(folds=5), make_bank(), mixed, make_latency())
    assert fitted["calib_tokens_per_s"] > 0


def test_wrong_signals_are_named():
    with pytest.raises(EntmtpError, match="signal 'entropy' is none of path_0"):
        fit_policy(config(signals=["entropy"]), make_bank(), make_trace(), make_latency())
    with pytest.raises(EntmtpError, match=r"policy.signals=\['draft_3'\]: deeper than the 2 draft heads"):
        fit_policy(config(signals=["draft_3"]), make_bank(), make_trace(), make_latency())
    with pytest.raises(EntmtpError, match="adaptive looks back by itself"):
        fit_policy(config("adaptive", signals=["draft_1", "mean"]), make_bank(), make_trace(), make_latency())
    with pytest.raises(EntmtpError, match=r"config key 'policy\.model': 'double' is not one of None, single, multi"):
        compose(["policy=cost_aware", "policy.model=double"])
    with pytest.raises(EntmtpError, match=r"config key 'policy\.memory': 0 must be at least 1"):
        compose(["policy=adaptive", "policy.memory=0"])
