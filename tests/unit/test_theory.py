"""docs/theory.md beyond the fitted policies: arbitrary state machines and schedules, and what is said not to hold."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_fixture import random_trace

from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import PromptTrace, Trace, replay_policy, self_rollout
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Tree

SMALL, LARGE = Tree.of([(0,)]), Tree.of([(0,), (0, 0)])
BANK = [Tree(()), SMALL, LARGE, Tree.of([(0,), (1,), (2,), (0, 0), (1, 0), (0, 1), (0, 0, 0)])]


@dataclass
class Machine(Policy):
    """Theorem 4's general policy: the next state is any function of state and num_accepted, the tree one of state."""

    seed: int = 0

    def reset(self) -> None:
        self.state = self.seed

    def decide(self, values: Sequence[float]) -> int:
        return self.state % len(self.trees)

    def observe(self, accepted: int) -> None:
        self.state = (self.state * 7919 + 31 * accepted + 17) % 104729


class Whim(Policy):
    """A policy that is no function of anything that a trace holds."""

    def decide(self, values: Sequence[float]) -> int:
        return random.randrange(len(self.trees))


@pytest.mark.parametrize(("arch", "mode"), [("hydra", "greedy"), ("medusa", "sample"), ("hydra_plus", "greedy")])
def test_theorem_4_for_any_state_machine(traced, trees, arch, mode):
    case, bank = traced(arch, mode, True), [trees["empty"], trees["wide"], trees["full"], trees["chain_4"]]
    used = set()
    for seed in range(6):
        policy = Machine("machine", bank, seed=seed)
        for prompt, run, steps in zip(case.prompts, case.live(policy), replay_policy(case.trace, policy), strict=True):
            assert run.tokens == case.texts[prompt["id"]]
            assert [(s.tree, s.accepted) for s in run.steps] == [(s.tree, s.accepted) for s in steps]
            used |= {step.tree for step in steps}
    assert used == {0, 1, 2, 3}


def test_theorem_1_holds_for_a_policy_that_replay_does_not_cover(traced, trees):
    case = traced("hydra", "greedy", True)
    policy = Whim("whim", [trees["empty"], trees["wide"], trees["full"]])
    for _ in range(3):
        for prompt, run in zip(case.prompts, case.live(policy), strict=True):
            assert run.tokens == case.texts[prompt["id"]]


@given(st.integers(0, 10**6))
def test_theorem_7_no_schedule_is_cheaper(seed):
    """Whatever picks the trees, a run costs at least the shortest path."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, longest=20, width=4, hit=0.6)
    tokens = int(trace.bounds[-1]) - len(trace.prompts)
    if not tokens:
        return
    step_ms = (rng.random(len(BANK)) + 0.2).tolist()
    bound = 1000 * tokens / oracle(trace, BANK, step_ms).tokens_per_s
    for machine in range(5):
        runs = replay_policy(trace, Machine("machine", BANK, seed=seed + machine))
        assert sum(step_ms[step.tree] for steps in runs for step in steps) >= bound - 1e-9


@given(st.integers(0, 10**6))
def test_a_larger_tree_accepts_no_less_at_any_position(seed):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, width=4)
    lengths = trace.lengths(BANK)
    assert (np.diff(lengths, axis=0) >= 0).all(), "each tree of the bank holds the one before"


NOTHING = 4  # a rank that no tree here has


def text_with(accepting: dict[int, list[int]], length: int) -> Trace:
    """A text whose true tokens have these ranks at some positions and are no candidates elsewhere."""
    ranks = np.full((length, 3), NOTHING)
    for position, row in accepting.items():
        ranks[position, : len(row)] = row
    return Trace([PromptTrace("p", ranks, np.ones((length, 4)), np.zeros(length), np.ones((length, 3)))])


def test_but_accepting_more_may_take_more_steps():
    """From position 0 the smaller tree lands on 2, where three drafts are right, the larger one on 3, where none is."""
    smaller = Tree.of([(0,), (1,), (1, 0), (1, 0, 0)])
    larger = Tree.of([*smaller.paths, (0, 0)])
    trace = text_with({0: [0, 0], 2: [1, 0, 0]}, 7)
    assert trace.length(smaller)[0] < trace.length(larger)[0]
    places = [[step.position for step in replay_policy(trace, Policy("p", [tree]))[0]] for tree in (smaller, larger)]
    assert places == [[0, 2], [0, 3, 4, 5]]
    found = oracle(trace, [smaller, larger], [1.0, 1.0])
    assert found.tokens_per_s == pytest.approx(1000 * 6 / 2), "the shortest path takes the smaller tree first"


def test_and_a_trees_mean_over_positions_is_not_its_own_runs():
    trace = text_with({0: [0, 0], 3: [0, 0], 6: [0, 0]}, 10)
    run = self_rollout(trace, LARGE)
    assert (run.steps, run.accepted) == (3, 6)
    assert trace.length(LARGE).mean() == pytest.approx(0.6)
