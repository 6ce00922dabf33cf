"""The bound on scheduling against exhaustive search, and the compiled sweep against the policy objects."""

from functools import cache, partial

import numpy as np
import pytest
import trace_fixture
from hypothesis import given
from hypothesis import strategies as st

from entmtp.calibration.kernels import sweep_tau, walk
from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import Trace, replay_milliseconds, replay_policy
from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.topology import Tree

TREES = [
    Tree(()),
    Tree.of([(0,)]),
    Tree.of([(0,), (0, 0), (1,)]),
    Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
]


random_trace = partial(trace_fixture.random_trace, longest=14, width=4, hit=0.5)


def exhaustive(trace: Trace, step_ms: list[float]) -> float:
    """Milliseconds of the fastest schedule, by trying every tree at every position."""
    total = 0.0
    for index in range(len(trace.prompts)):
        accepted = [trace.accepted(tree)[index] for tree in TREES]
        last = len(accepted[0]) - 1

        @cache
        def remaining(i: int, accepted=accepted, last=last) -> float:
            if i >= last:
                return 0.0
            return min(ms + remaining(i + counts[i] + 1) for ms, counts in zip(step_ms, accepted, strict=True))

        total += remaining(0)
    return total


@given(st.integers(0, 10**6))
def test_the_oracle_is_the_fastest_of_all_schedules(seed):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    tokens = int(trace.bounds[-1]) - len(trace.prompts)
    step_ms = (rng.random(len(TREES)) + 0.2).tolist()
    if not tokens:
        return
    found = oracle(trace, TREES, step_ms)
    assert found.tokens_per_s == pytest.approx(1000 * tokens / exhaustive(trace, step_ms))
    statics = [replay_milliseconds(trace, Policy("s", [tree]), [ms]) for tree, ms in zip(TREES, step_ms, strict=True)]
    assert found.static_tokens_per_s == pytest.approx(1000 * tokens / min(statics))
    assert found.static == int(np.argmin(statics))
    assert found.headroom >= -1e-12
    assert sum(found.shares) == pytest.approx(1)
    for policy in (
        TauPolicy("t", TREES, 1, 2, 0.5, 0.2),
        LadderPolicy("l", TREES, 0, 1, [0.2, 0.5, 0.8]),
    ):
        speed = 1000 * tokens / replay_milliseconds(trace, policy, step_ms)
        assert speed <= found.tokens_per_s * (1 + 1e-12)


def test_captured_share():
    rng = np.random.default_rng(1)
    trace = random_trace(rng, 6, longest=40)
    found = oracle(trace, TREES, [1.0, 1.1, 1.25, 1.6])
    assert found.headroom > 0.01
    assert found.captured(found.static_tokens_per_s) == 0
    assert found.captured(found.tokens_per_s) == 1
    assert found.captured(0.9 * found.static_tokens_per_s) < 0
    one = oracle(trace, TREES[:1], [1.0])
    assert one.headroom == 0
    assert np.isnan(one.captured(one.tokens_per_s))


@pytest.mark.parametrize(("trees", "step_ms"), [([], []), (TREES, [1.0])])
def test_trees_without_times_are_refused(trees, step_ms):
    with pytest.raises(EntmtpError, match="oracle"):
        oracle(random_trace(np.random.default_rng(0)), trees, step_ms)


@given(st.integers(0, 10**6))
def test_the_compiled_sweep_takes_the_policy_objects_steps(seed):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    pairs = np.sort(rng.random((9, 2)), axis=1)[:, ::-1].copy()
    pairs[0] = pairs[1, 0]  # tau_on = tau_off
    signal = trace.path_values(2)
    pairs[2, 0] = signal[0]  # a threshold that a signal meets exactly
    pairs[2, 1] = min(pairs[2])
    uses = np.zeros((len(pairs), len(TREES)), dtype=np.int64)
    sweep_tau(trace.lengths(TREES), signal, trace.bounds, pairs, 1, uses)
    for (on, off), row in zip(pairs.tolist(), uses.tolist(), strict=True):
        steps = [step.tree for run in replay_policy(trace, TauPolicy("t", TREES, 1, 2, on, off)) for step in run]
        assert row == np.bincount(steps, minlength=len(TREES)).tolist()


def test_walks_count_steps_and_accepted_tokens():
    trace = random_trace(np.random.default_rng(4), 5, longest=30)
    for tree in TREES:
        steps = [step for run in replay_policy(trace, Policy("s", [tree])) for step in run]
        assert walk(trace.length(tree), trace.bounds) == (len(steps), sum(step.accepted for step in steps))
