"""Fitted growing policies on made-up candidates whose best answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from entmtp.calibration.growth import join
from entmtp.calibration.latency_table import LatencyTable
from entmtp.policy.fit_growing import GrowthFitter, calibrate

LATENCY = LatencyTable([1, 5, 9], [10.0, 10.5, 20.0], [1, 4], [[0.5, 0.6], [0.5, 0.8]], 0.3, 10.2, "hydra")


def made_trace(rng: np.random.Generator, texts: int = 4, n: int = 400):
    """Two heads, beam 2, 3 children. The true hit rate of a candidate is the square of its path probability."""
    parts = []
    for _ in range(texts):
        first = np.sort(rng.dirichlet([0.6, 0.5, 0.4], n), axis=1)[:, ::-1]
        second = np.sort(rng.dirichlet([0.6, 0.5, 0.4], (n, 2)), axis=2)[:, :, ::-1] * first[:, :2, None]
        probability = np.concatenate([first, second.reshape(n, 6)], axis=1)
        hit = rng.random(n)[:, None]
        chance = probability**2
        on_first = (hit >= np.cumsum(chance[:, :3], axis=1) - chance[:, :3]) & (hit < np.cumsum(chance[:, :3], axis=1))
        again = rng.random((n, 6)) * probability[:, [0, 0, 0, 1, 1, 1]] ** 2
        share = chance[:, 3:].reshape(n, 2, 3)
        low = np.cumsum(share, axis=2) - share
        draw = again.reshape(n, 2, 3)[:, :, :1]
        on_second = (on_first[:, :2, None] & (draw >= low) & (draw < low + share)).reshape(n, 6)
        parts.append({
            "probability": probability,
            "depth": np.tile(np.array([1] * 3 + [2] * 6, dtype=np.int8), (n, 1)),
            "parent": np.tile(np.array([-1] * 3 + [0] * 3 + [1] * 3, dtype=np.int16), (n, 1)),
            "on_path": np.concatenate([on_first, on_second], axis=1),
        })  # fmt: skip
    return join(parts, beam=2, children=3)


@pytest.fixture(scope="module")
def trace():
    return made_trace(np.random.default_rng(0))


def test_calibration_recovers_the_hit_rate_and_never_falls(trace):
    calibration = calibrate(trace)
    for values in calibration.values:
        assert values == sorted(values)
        assert 0 <= values[0] <= values[-1] <= 1
    for p in (0.3, 0.6, 0.9):
        assert calibration.accepted(p, 1) == pytest.approx(p**2, abs=0.09)


def test_marginal_is_no_slower_than_the_fixed_point_and_what_it_could_have_been(trace):
    fitter = GrowthFitter(trace, LATENCY, 8)
    marginal = fitter.marginal("m")
    speed = fitter.speed(marginal)
    fixed = marginal
    for _ in range(20):
        fixed = replace(fixed, rate=fitter.speed(fixed))
    assert fitter.speed(fixed) == pytest.approx(fixed.rate)
    assert 0.99 * speed < fixed.rate <= speed * (1 + 1e-9)
    for rate in (0.5 * speed, 0.8 * speed, 1.25 * speed, 2 * speed):
        assert fitter.speed(replace(marginal, rate=rate)) <= speed * (1 + 5e-3)
    assert speed > fitter.speed(replace(marginal, rate=None, nodes=8))
    assert speed >= 0.995 * fitter.speed(fitter.dynamic("d"))


def test_dynamic_is_the_best_size(trace):
    fitter = GrowthFitter(trace, LATENCY, 8)
    dynamic = fitter.dynamic("d")
    speeds = [fitter.speed(replace(dynamic, nodes=n)) for n in range(1, 9)]
    assert fitter.speed(dynamic) == pytest.approx(max(speeds), rel=1e-3)
    assert dynamic.nodes <= 5  # beyond four nodes this machine is dear


def test_costs_come_from_the_table(trace):
    fitter = GrowthFitter(trace, LATENCY, 8)
    assert fitter.step_ms[0] == pytest.approx(10.3)
    assert fitter.step_ms[4] == pytest.approx(10.8)
    assert fitter.propose_ms.shape == (2, 3)
    assert fitter.propose_ms[1, 2] == pytest.approx(0.6)
    assert fitter.propose_ms[:, 0].tolist() == [0, 0]


def test_growing_itself_is_paid_for_at_every_size(trace):
    free, priced = (GrowthFitter(trace, replace(LATENCY, grow_ms=ms), 8) for ms in (0.0, 0.4))
    assert priced.step_ms == pytest.approx(free.step_ms + 0.4)


def test_medusas_heads_are_paid_for_once(trace):
    hydra = GrowthFitter(trace, LATENCY, 8)
    medusa = GrowthFitter(trace, replace(LATENCY, arch="medusa"), 8)
    assert (medusa.propose_ms[0] == hydra.propose_ms[0]).all() and not medusa.propose_ms[1:].any()


def test_the_best_rate_on_the_way_is_kept(trace):
    """However few rounds Dinkelbach's iteration is given: what is returned is the fastest that was replayed."""
    fitter = GrowthFitter(trace, LATENCY, 8)
    seen: list[float] = []
    speed = fitter.speed

    def watched(policy, expected=None):
        seen.append(speed(policy, expected))
        return seen[-1]

    fitter.speed = watched
    for rounds in (1, 2, 3):
        seen.clear()
        assert speed(fitter.marginal("m", rounds)) == max(seen)
