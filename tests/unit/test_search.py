"""Greedy growth on hand-made rank traces and against a brute-force search."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp.calibration.replay import PromptTrace, ReplayObserver, Trace
from entmtp.calibration.search import candidate_children, grow, keep_unbeaten, search_frontier
from entmtp.config import SearchConfig
from entmtp.tree.topology import Tree

WIDTH = 9


def trace_of(texts: list[list[list[int]]]) -> Trace:
    """Ranks of every text; a last position without any candidate is added to each (it takes no step)."""
    prompts = []
    for number, rows in enumerate(texts):
        ranks = np.array([*rows, [WIDTH] * len(rows[0])])
        n, depth = ranks.shape
        prompts.append(PromptTrace(str(number), ranks, np.ones((n, depth + 1)), np.zeros(n), np.ones((n, depth))))
    return Trace(prompts)


def single_steps(counts: dict[tuple[int, int], int]) -> Trace:
    """Texts of one step each, so that no tree changes which steps are taken."""
    return trace_of([[list(ranks)] for ranks, count in counts.items() for _ in range(count)])


def order(trace: Trace, depth: int, max_nodes: int, max_children: int = 3) -> list[tuple[int, ...]]:
    """Paths in the order in which they were added."""
    grown = grow(ReplayObserver(trace), depth, max_nodes, max_children)
    added = [set(grown[0].tree.paths)]
    added += [set(b.tree.paths) - set(a.tree.paths) for a, b in itertools.pairwise(grown)]
    assert all(len(new) == 1 for new in added)
    return [new.pop() for new in added]


def test_growth_order_by_hand():
    trace = single_steps({(0, 0): 5, (0, 1): 2, (1, 0): 3, (2, 9): 3, (9, 9): 4})
    assert order(trace, depth=2, max_nodes=6) == [
        (0,),
        (0, 0),  # 5 steps
        (1,),  # 3 steps against 2 of (0, 1)
        (1, 0),  # 3 steps, as (2,) has: ranks sum to 1 against 2
        (2,),  # 3 steps against 2
        (0, 1),
    ]


def test_ties_go_to_the_smaller_rank_sum_then_the_shallower_node_then_path_order():
    # nothing is ever accepted below (0,): all gains are zero, ties alone decide
    trace = single_steps({(9, 9): 3})
    assert order(trace, depth=2, max_nodes=12) == [
        (0,), (0, 0), (1,), (0, 1), (1, 0), (2,), (0, 2), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)
    ]  # fmt: skip
    # equal gains: (1,) and (0, 1) both have rank sum 1
    assert order(single_steps({(0, 0): 4, (0, 1): 2, (1, 9): 2}), 2, 4) == [(0,), (0, 0), (1,), (0, 1)]
    # a larger gain beats every tie rule
    assert order(single_steps({(0, 9): 1, (1, 9): 2, (2, 9): 5}), 2, 3) == [(0,), (1,), (2,)]


def test_scores_are_mean_accept_lengths_root_included():
    trace = single_steps({(0, 0): 5, (0, 1): 2, (1, 0): 3, (9, 9): 6})
    grown = grow(ReplayObserver(trace), depth=2, max_nodes=3, max_children=3)
    assert [g.tree.num_nodes for g in grown] == [1, 2, 3]
    assert [g.score for g in grown] == [1 + 7 / 16, 1 + 12 / 16, 1 + 15 / 16]
    assert {g.search_depth for g in grown} == {2}


def test_growth_stops_when_no_child_is_left():
    trace = single_steps({(0, 0): 1})
    assert [g.tree.num_nodes for g in grow(ReplayObserver(trace), 1, 64, 3)] == [1, 2, 3]
    assert [g.tree.num_nodes for g in grow(ReplayObserver(trace), 2, 64, 2)] == list(range(1, 7))
    assert [g.tree.num_nodes for g in grow(ReplayObserver(trace), 2, 4, 2)] == [1, 2, 3, 4]


def test_candidate_children():
    paths = [(0,), (0, 0), (1,)]
    assert candidate_children(paths, 2, 3) == [(2,), (0, 1), (1, 0)]
    assert candidate_children(paths, 3, 3) == [(2,), (0, 1), (0, 0, 0), (1, 0)]
    assert candidate_children(paths, 1, 3) == [(2,)]  # depth limit
    assert candidate_children(paths, 2, 2) == [(0, 1), (1, 0)]  # children limit of the root
    assert candidate_children(paths, 2, 1) == [(1, 0)]


def brute_walk(trace: Trace, union: set) -> list[tuple[int, ...]]:
    """Accepted path of every step of a run with the tree `union`."""
    steps = []
    for prompt in trace.prompts:
        i = 0
        while i < len(prompt) - 1:
            ranks = tuple(prompt.ranks[i].tolist())
            length = max(k for k in range(len(ranks) + 1) if all(ranks[:j] in union for j in range(1, k + 1)))
            steps.append(ranks[:length])
            i += length + 1
    return steps


def mean_accept_length(steps: list[tuple[int, ...]], tree: set) -> float:
    return 1 + sum(
        max(k for k in range(len(s) + 1) if all(s[:j] in tree for j in range(1, k + 1))) for s in steps
    ) / len(steps)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_growth_equals_brute_force(seed, depth, max_children):
    """Every round: score all candidates by the difference of mean accept lengths within the union's own run."""
    rng = np.random.default_rng(seed)
    trace = trace_of([np.minimum(rng.geometric(0.5, (12, 3)) - 1, WIDTH).tolist() for _ in range(3)])
    observer = ReplayObserver(trace)
    grown = grow(observer, depth, 8, max_children)
    paths = {(0,)}
    for step, item in enumerate(grown):
        assert set(item.tree.paths) == paths
        candidates = set()
        for parent in [(), *paths]:
            ranks = [path[-1] for path in paths if path[:-1] == parent]
            if len(parent) < depth and len(ranks) < max_children:
                candidates.add((*parent, len(ranks)))
        steps = brute_walk(trace, paths | candidates)
        assert Counter(steps) == observer.observe(Tree.of(paths | candidates))
        base = mean_accept_length(steps, paths)
        assert item.score == pytest.approx(base)
        if not candidates or len(paths) == 8:
            assert step == len(grown) - 1
            break
        gains = {c: round(mean_accept_length(steps, paths | {c}) - base, 9) for c in candidates}
        paths.add(min(candidates, key=lambda c: (-gains[c], sum(c), len(c), c)))
    else:
        pytest.fail("the search stopped early")


def test_search_frontier_searches_each_depth_within_the_heads_width():
    trace = single_steps({(0, 0): 5, (1, 0): 3, (2, 2): 3})
    config = SearchConfig(max_nodes=5, max_children=10, depths=[1, 2])
    grown = search_frontier(ReplayObserver(trace), config, width=2)
    assert [(g.search_depth, g.tree.num_nodes) for g in grown] == [(1, 1), (1, 2), *((2, n) for n in range(1, 6))]
    assert all(g.tree.max_rank < 2 for g in grown)
    assert all(g.tree.depth <= g.search_depth for g in grown)


def test_keep_unbeaten():
    chain = Tree.of([(0,), (0, 0)])
    wide = Tree.of([(0,), (1,)])
    one, three = Tree.of([(0,)]), Tree.of([(0,), (1,), (2,)])
    four = Tree.of([(0,), (1,), (2,), (3,)])
    scored = [(four, 1.8), (three, 1.6), (chain, 1.6), (wide, 1.5), (one, 1.4)]
    # three nodes only match two: dropped; of equal size the better stays
    assert keep_unbeaten(scored) == [(one, 1.4), (chain, 1.6), (four, 1.8)]
    # of equal size and score the shallower stays
    assert keep_unbeaten([(chain, 1.5), (wide, 1.5)]) == [(wide, 1.5)]
    assert keep_unbeaten([(one, 1.4), (chain, 1.3)]) == [(one, 1.4)]
