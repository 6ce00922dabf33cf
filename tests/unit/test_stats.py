import numpy as np
import pytest

from entmtp.errors import EntmtpError
from entmtp.evaluation.stats import (
    captured_share,
    geometric_mean,
    geometric_mean_of_ratios,
    ratio_of_totals,
    total_over_total,
)


def test_ratio_is_of_totals_not_a_mean_of_ratios():
    # per prompt: 10/1 against 10/2 (2x) and 100/10 against 100/10 (1x); the mean of ratios would be 1.5
    ratio, low, high = ratio_of_totals([10, 100], [1, 10], [10, 100], [2, 10], 500, 0)
    assert ratio == pytest.approx(12 / 11)
    assert low <= ratio <= high
    assert (low, high) == pytest.approx((1.0, 2.0))  # the draws of one prompt alone


def test_interval_covers_a_known_ratio_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        tokens, common = rng.integers(50, 150, 40), rng.uniform(0.5, 2, 40)
        seconds_b = tokens * common / 30
        seconds_a = seconds_b / 1.5 * np.exp(rng.normal(0, 0.2, 40) - 0.02)
        _, low, high = ratio_of_totals(tokens, seconds_a, tokens, seconds_b, 400, seed)
        # E[seconds_a] = seconds_b / 1.5, so the workload's true ratio is 1.5
        covered += low <= 1.5 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_pairing_removes_what_is_common_to_both():
    rng = np.random.default_rng(0)
    tokens, seconds = np.full(30, 100), rng.uniform(1, 10, 30)
    ratio, low, high = ratio_of_totals(tokens, seconds / 2, tokens, seconds, 1000, 0)
    # twice as fast on each prompt, whatever its length: no uncertainty is left
    assert (ratio, low, high) == pytest.approx((2, 2, 2))


def test_same_seed_same_interval():
    args = ([10, 20, 30], [1, 1.5, 4], [10, 20, 30], [2, 3, 5])
    assert ratio_of_totals(*args, 200, 3) == ratio_of_totals(*args, 200, 3)
    assert ratio_of_totals(*args, 200, 3) != ratio_of_totals(*args, 200, 4)


def test_total_over_total():
    mean, low, high = total_over_total([1, 30], [1, 10], 300, 0)
    assert mean == pytest.approx(31 / 11)
    assert (low, high) == pytest.approx((1, 3))
    assert total_over_total([0, 0], [5, 5], 100, 0) == (0, 0, 0)


def test_a_single_prompt_has_a_degenerate_interval():
    assert ratio_of_totals([10], [1], [10], [2], 50, 0) == pytest.approx((2, 2, 2))


def test_draws_without_a_denominator_are_left_out():
    mean, low, high = total_over_total([0, 2], [0, 1], 200, 0)
    assert (mean, low, high) == (2, 2, 2)


@pytest.mark.parametrize(
    "columns",
    [
        ([1, 2], [1], [1, 2], [1, 2]),  # another number of prompts
        ([], [], [], []),
        ([1], [float("nan")], [1], [1]),
        ([1], [-1.0], [1], [1]),
        ([1], [0.0], [1], [1]),  # no seconds
        ([1], [1], [0], [1]),  # the reference made nothing
    ],
)
def test_bad_input_is_one_clear_error(columns):
    with pytest.raises(EntmtpError, match="bootstrap"):
        ratio_of_totals(*columns, 10, 0)


def test_no_resamples():
    with pytest.raises(EntmtpError, match=r"bench\.bootstrap"):
        total_over_total([1], [1], 0, 0)


def test_geometric_mean():
    assert geometric_mean([1, 4]) == pytest.approx(2)
    with pytest.raises(EntmtpError):
        geometric_mean([1, 0])


def test_geometric_means_over_tasks_resample_each_on_its_own():
    rng = np.random.default_rng(0)
    groups, covered = [], 0
    for seed in range(100):
        groups = []
        for truth in (1.2, 0.9):
            tokens, seconds = rng.integers(50, 150, 40), rng.uniform(1, 5, 40)
            groups.append((tokens, seconds / truth * np.exp(rng.normal(0, 0.15, 40) - 0.01125), tokens, seconds))
        found = geometric_mean_of_ratios(groups, 300, seed)
        covered += found["low"] <= (1.2 * 0.9) ** 0.5 <= found["high"]
        assert found["ratio"] == pytest.approx(geometric_mean([ratio_of_totals(*group, 1, 0)[0] for group in groups]))
    assert covered >= 87
    one = geometric_mean_of_ratios(groups[:1], 2000, 0)
    both = geometric_mean_of_ratios([groups[0], groups[0]], 2000, 0)  # as if measured twice: narrower by a root of two
    assert 0.6 < (both["high"] - both["low"]) / (one["high"] - one["low"]) < 0.82


def test_a_captured_share_is_the_way_from_the_static_tree_to_the_oracle():
    static, bound = np.array([10.0, 20.0]), np.array([8.0, 16.0])
    assert captured_share(static, static, bound, 50, 0) == {"share": 0.0, "low": 0.0, "high": 0.0}
    whole = captured_share(bound, static, bound, 50, 0)
    assert whole == pytest.approx({"share": 1.0, "low": 1.0, "high": 1.0})
    half = captured_share(1 / ((1 / static + 1 / bound) / 2), static, bound, 50, 0)
    assert half == pytest.approx({"share": 0.5, "low": 0.5, "high": 0.5})  # in tokens/s, not in milliseconds
    mixed = captured_share(np.array([8.0, 20.0]), static, bound, 500, 0)
    assert mixed["low"] == pytest.approx(0.0) and mixed["high"] == pytest.approx(1.0)
    assert captured_share(static, static, static, 50, 0) is None
