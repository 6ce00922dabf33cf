"""Replay against live decoding, step for step, and its arithmetic against brute force."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_fixture import random_trace

from entmtp.calibration.replay import (
    PromptTrace,
    Rollout,
    Trace,
    num_accepted,
    replay_milliseconds,
    replay_policy,
    replay_uses,
    self_rollout,
)
from entmtp.errors import EntmtpError
from entmtp.io import read_parquet, write_parquet
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.topology import Tree

CASES = [
    ("medusa", "greedy", False),
    ("hydra", "greedy", True),
    ("hydra", "sample", False),
    ("medusa", "sample", True),
    ("hydra_plus", "greedy", True),
    ("hydra_plus", "sample", False),
]
WIDTH = 5
PATHS = st.sets(st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=4).map(tuple), max_size=12)
TREES = PATHS.map(lambda paths: Tree.of({path[:k] for path in paths for k in range(1, len(path) + 1)}))


def some_policies(trees: dict[str, Tree]) -> list[Policy]:
    bank = [trees["empty"], trees["wide"], trees["full"], trees["mc_sim_7b_63"]]
    return [
        *(Policy(name, [tree]) for name, tree in trees.items() if name not in ("random_2", "random_3")),
        TauPolicy("tau_0", bank, 1, 0, 0.7, 0.4),
        TauPolicy("tau_2", bank, 3, 2, 0.03, 0.01),
        TauPolicy("tau_4", bank, 0, 4, 1e-4, 1e-4),
        LadderPolicy("ladder_1", bank, 0, 1, [0.03, 0.07, 0.2]),
        LadderPolicy("ladder_3", bank, 0, 3, [-1.0, 0.001, 0.004]),
    ]


@pytest.mark.parametrize(("arch", "mode", "stop"), CASES)
def test_replay_takes_the_live_decoders_very_steps(traced, trees, arch, mode, stop):
    case = traced(arch, mode, stop)
    assert not stop or any(len(text) < 40 for text in case.texts.values())
    switched, accepted = set(), 0
    for policy in some_policies(trees):
        runs = case.live(policy)
        replayed = replay_policy(case.trace, policy)
        for prompt, run, steps in zip(case.prompts, runs, replayed, strict=True):
            assert run.tokens == case.texts[prompt["id"]]
            assert [(s.tree, s.accepted) for s in run.steps] == [(s.tree, s.accepted) for s in steps]
            position = 0
            for live, step in zip(run.steps, steps, strict=True):
                assert step.position == position
                position += step.accepted + 1
                if policy.depth is None:
                    assert live.signal != live.signal
                    assert step.signal != step.signal
                else:
                    assert step.signal == pytest.approx(live.signal, rel=1e-3)
                    switched.add((policy.name, live.tree))
                accepted += live.accepted
        if policy.name in trees:
            rollout = self_rollout(case.trace, policy.trees[0])
            assert rollout.steps == sum(len(run.steps) for run in runs)
            assert rollout.accepted == sum(step.accepted for run in runs for step in run.steps)
            assert rollout.tokens == sum(len(run.tokens) for run in runs)
    assert accepted > (10 if stop else 30)
    assert len(switched) > 6


def brute_accepted(ranks: list[int], tree: Tree) -> int:
    length = 0
    while length < len(ranks) and tuple(ranks[: length + 1]) in tree.paths:
        length += 1
    return length


@given(TREES, st.integers(0, 10**6), st.integers(1, 4))
def test_num_accepted_equals_brute_force(tree, seed, depth):
    """Trees deeper than the trace and trees with ranks that the trace never shows included."""
    trace = random_trace(np.random.default_rng(seed), depth=depth)
    expected = [[brute_accepted(row.tolist(), tree) for row in prompt.ranks] for prompt in trace.prompts]
    assert num_accepted(trace, tree).tolist() == [count for counts in expected for count in counts]
    assert trace.accepted(tree) == expected


def test_not_a_candidate_is_never_accepted(traced):
    """Rank `width` stands for "not a candidate"; a tree wider than the heads is refused, as it is live."""
    trace = traced().trace
    assert (trace.ranks == 16).any()
    assert max(num_accepted(trace, Tree.of([(rank,) for rank in range(16)]))) == 1
    with pytest.raises(EntmtpError):
        trace.accepted(Tree.of([(16,)]))


@given(TREES, st.integers(0, 10**6))
def test_self_rollout_equals_a_straight_walk(tree, seed):
    trace = random_trace(np.random.default_rng(seed))
    steps = accepted = tokens = 0
    for prompt in trace.prompts:
        text = list(range(len(prompt)))
        produced = []
        while len(produced) < len(text):
            i = len(produced)
            if i == len(text) - 1:  # the last token is committed without a forward
                produced.append(text[i])
                break
            count = brute_accepted(prompt.ranks[i].tolist(), tree)
            produced += text[i : i + count + 1]
            steps, accepted = steps + 1, accepted + count
        tokens += len(produced)
    run = self_rollout(trace, tree)
    assert (run.steps, run.accepted, run.tokens) == (steps, accepted, tokens)
    assert run.accept_length == (1 + accepted / steps if steps else 1.0)


def test_accept_length_counts_the_root():
    assert Rollout(steps=4, accepted=6, tokens=11).accept_length == 2.5


@given(st.integers(0, 10**6), st.lists(TREES, min_size=3, max_size=3), st.integers(0, 3))
def test_milliseconds_are_the_sum_over_steps(seed, trees, depth):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    step_ms = rng.integers(1, 9, 3).tolist()  # whole numbers: the sums are exact
    for policy in (
        TauPolicy("tau", trees, 1, depth, 0.6, 0.3),
        LadderPolicy("ladder", trees, 0, depth, [0.3, 0.7]),
        Policy("static", trees, 2),
    ):
        total = sum(step_ms[step.tree] for steps in replay_policy(trace, policy) for step in steps)
        assert replay_milliseconds(trace, policy, step_ms) == pytest.approx(total)
        uses = Counter(step.tree for steps in replay_policy(trace, policy) for step in steps)
        assert replay_uses(trace, policy).tolist() == [uses[tree] for tree in range(len(policy.trees))]


def test_replay_starts_every_prompt_afresh():
    ranks = np.full((4, 1), WIDTH)
    high, low = np.full((4, 2), 0.9), np.full((4, 2), 0.5)
    prompts = [PromptTrace(str(i), ranks, v, np.zeros(4), np.zeros((4, 1))) for i, v in enumerate((high, low))]
    policy = TauPolicy("tau", [Tree(()), Tree.of([(0,)]), Tree.of([(0,), (1,)])], 0, 1, 0.8, 0.2)
    runs = replay_policy(Trace(prompts), policy)
    assert [[step.tree for step in steps] for steps in runs] == [[1, 2, 2], [0, 0, 0]]


def test_trace_survives_parquet_in_order(traced, tmp_path):
    case = traced("medusa", "sample", True)
    frame = case.frame.copy()
    frame["prompt_id"] = frame["prompt_id"].map({"p0": "z", "p1": "10", "p2": "9", "p3": "a"})
    write_parquet(tmp_path / "traces.parquet", frame)
    trace = Trace.from_frame(read_parquet(tmp_path / "traces.parquet"))
    assert [prompt.prompt_id for prompt in trace.prompts] == ["z", "10", "9", "a"]
    assert np.array_equal(trace.ranks, case.trace.ranks)
    assert trace.ranks.dtype == np.int64
    for new, old in zip(trace.prompts, case.trace.prompts, strict=True):
        assert np.array_equal(new.path_values, old.path_values)
        assert np.array_equal(new.gaps, old.gaps)
        assert np.array_equal(new.entropy, old.entropy)


def test_an_empty_trace_is_refused():
    with pytest.raises(EntmtpError, match="without prompts"):
        Trace([])
