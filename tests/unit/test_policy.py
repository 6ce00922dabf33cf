"""Schedulers as state machines, boundaries included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.topology import Tree

TREES = [Tree.of([(rank,) for rank in range(size)]) for size in (0, 1, 2, 4)]
SIGNALS = st.sampled_from([0.0, 0.1, 0.3, 0.300001, 0.5, 0.6, 0.600001, 0.9, 1.0])


def test_static_policy_keeps_its_tree_and_asks_for_no_signal():
    policy = Policy("static", TREES[2:3])
    assert policy.depth is None
    assert [policy.choose(s) for s in (0.0, 1.0, float("nan"))] == [0, 0, 0]
    assert Policy("static", TREES, start=2).choose(0.5) == 2


def tau(start: int = 1, on: float = 0.6, off: float = 0.3) -> TauPolicy:
    return TauPolicy("tau", TREES, start, 2, on, off)


def test_tau_boundaries():
    assert tau().choose(0.6) == 1  # s == tau_on stays: up needs s > tau_on
    assert tau().choose(0.600001) == 2
    assert tau().choose(0.3) == 0  # s == tau_off goes down
    assert tau().choose(0.300001) == 1
    # with one threshold there is no band to stay in
    assert tau(on=0.5, off=0.5).choose(0.5) == 0
    assert tau(on=0.5, off=0.5).choose(0.500001) == 2


def test_tau_moves_one_tree_a_step_and_clamps_at_both_ends():
    policy = tau()
    assert [policy.choose(0.9) for _ in range(4)] == [2, 3, 3, 3]
    assert [policy.choose(0.1) for _ in range(5)] == [2, 1, 0, 0, 0]
    assert policy.choose(0.9) == 1


def test_tau_reset_forgets_the_prompt():
    policy = tau(start=2)
    policy.choose(0.1)
    policy.choose(0.1)
    policy.reset()
    assert policy.choose(0.5) == 2


def test_tau_refuses_crossed_thresholds():
    with pytest.raises(EntmtpError, match=r"tau_off=0\.7 must not exceed tau_on=0\.6"):
        tau(on=0.6, off=0.7)


@given(st.lists(SIGNALS, max_size=30), st.integers(0, 3), st.sampled_from([(0.6, 0.3), (0.5, 0.5), (0.3, 0.3)]))
def test_tau_equals_its_definition(signals, start, thresholds):
    on, off = thresholds
    policy = tau(start, on, off)
    state = start
    for s in signals:
        state += (s > on) - (s <= off)
        state = min(max(state, 0), len(TREES) - 1)
        assert policy.choose(s) == state


@given(st.lists(SIGNALS, min_size=3, max_size=3).map(sorted), SIGNALS)
def test_ladder_counts_thresholds_below_s(thresholds, s):
    policy = LadderPolicy("ladder", TREES, 0, 1, thresholds)
    assert policy.choose(s) == sum(threshold < s for threshold in thresholds)
    policy.choose(1.0)
    assert policy.choose(s) == sum(threshold < s for threshold in thresholds)  # no memory


def test_ladder_refuses_wrong_thresholds():
    with pytest.raises(EntmtpError, match="ladder of 4 trees needs 3 thresholds"):
        LadderPolicy("ladder", TREES, 0, 1, [0.2, 0.4])
    with pytest.raises(EntmtpError, match="must ascend"):
        LadderPolicy("ladder", TREES, 0, 1, [0.2, 0.6, 0.4])
