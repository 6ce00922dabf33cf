"""Acceptance rules against brute force, with the traps of padded paths and ties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entmtp.decoding.verify import accept_exact, accept_typical
from entmtp.tree.topology import Tree

PATHS = st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=10)
TREES = PATHS.map(lambda paths: Tree.of({path[:k] for path in paths for k in range(1, len(path) + 1)}))


def sibling_tokens(tree: Tree, rng: np.random.Generator, vocab: int) -> list[int]:
    """A root and tokens that differ among siblings but repeat elsewhere."""
    tokens = [int(rng.integers(vocab))] + [0] * tree.num_nodes
    for children in tree.children:
        for child, token in zip(children, rng.permutation(vocab), strict=False):
            tokens[child] = int(token)
    return tokens


@given(TREES, st.integers(0, 10**6))
def test_exact_acceptance_equals_brute_force(tree, seed):
    rng = np.random.default_rng(seed)
    tokens = sibling_tokens(tree, rng, 5)
    choices = rng.integers(0, 5, tree.num_nodes + 1).tolist()
    matching = [
        path
        for path in (tree.path_nodes(node) for node in range(tree.num_nodes + 1))
        if all(tokens[node] == choices[parent] for parent, node in itertools.pairwise(path))
    ]
    longest = [path for path in matching if len(path) == max(map(len, matching))]
    assert len(longest) == 1
    assert accept_exact(tree, tokens, choices) == longest[0]


def test_exact_acceptance_does_not_count_padding():
    """FACTS 5: with padded retrieve rows, a short path whose padding happens to match looks as long as a real one."""
    tree = Tree.of([(0,), (1,), (1, 0)])
    # the target follows (1, 0); token 0 fills anything padded and the target also chooses 0 at the end
    tokens, choices = [9, 0, 4, 0], [4, 0, 0, 0]
    assert accept_exact(tree, tokens, choices) == [0, 2, 3]
    # the target follows (0,) and then 0, which (0,) has no child for: the equal path (1, 0) must not be taken
    assert accept_exact(tree, [9, 4, 7, 0], [4, 0, 0, 0]) == [0, 1]
    # nothing matches: the root alone, not an argmax over zero lengths
    assert accept_exact(tree, [9, 1, 2, 3], [8, 1, 3, 0]) == [0]
    assert accept_exact(Tree(()), [9], [3]) == [0]


def straight_line_typical(tree, tokens, logits, temperature, epsilon, alpha) -> list[int]:
    """Independent of the code under test: float64, one node at a time."""

    def distribution(row):
        weights = [math.exp((x - max(row)) / temperature) for x in row]
        return [w / sum(weights) for w in weights]

    rows = [distribution([float(x) for x in row]) for row in logits]
    best, best_key = [0], (0, 0.0)
    for leaf in range(1, tree.num_nodes + 1):
        path = tree.path_nodes(leaf)
        log_likelihood, accepted = 0.0, True
        for parent, node in itertools.pairwise(path):
            p = rows[parent][tokens[node]]
            entropy = -sum(q * math.log(q) for q in rows[parent] if q > 0)
            accepted = accepted and p > min(epsilon, alpha * math.exp(-entropy))
            log_likelihood += math.log(p) if p > 0 else -math.inf
        if accepted and (len(path) - 1, log_likelihood) > best_key:
            best, best_key = path, (len(path) - 1, log_likelihood)
    return best


@given(TREES, st.integers(0, 10**6), st.sampled_from([(0.7, 0.09, 0.3), (1.0, 0.3, 0.8), (0.3, 0.02, 2.0)]))
def test_typical_acceptance_equals_the_straight_line(tree, seed, parameters):
    rng = np.random.default_rng(seed)
    tokens = sibling_tokens(tree, rng, 6)
    logits = torch.from_numpy(rng.normal(0, 1.5, (tree.num_nodes + 1, 6)).astype(np.float32))
    assert accept_typical(tree, tokens, logits, *parameters) == straight_line_typical(tree, tokens, logits, *parameters)


def test_typical_takes_the_longest_then_the_likeliest_path():
    tree = Tree.of([(0,), (1,), (2,), (1, 0), (2, 0)])
    flat = torch.zeros(6, 4)
    flat[0] = torch.tensor([3.0, 2.0, 2.5, 0.0])
    tokens = [0, 0, 1, 2, 0, 0]
    # the likeliest child of the root has no children: the longer paths win, and of these the likelier one
    assert accept_typical(tree, tokens, flat, 1.0, 0.01, 1.0) == [0, 3, 5]
    # equally likely: the first in node order
    assert accept_typical(tree, tokens, torch.zeros(6, 4), 1.0, 0.01, 1.0) == [0, 2, 4]


def test_typical_needs_more_than_the_threshold_at_every_node():
    tree = Tree.of([(0,), (0, 0)])
    # uniform over 4: p = 0.25, exp(-H) = 0.25, so alpha = 1 gives the threshold 0.25 and p is not above it
    assert accept_typical(tree, [0, 1, 2], torch.zeros(3, 4), 1.0, 1.0, 1.001) == [0]
    assert accept_typical(tree, [0, 1, 2], torch.zeros(3, 4), 1.0, 1.0, 0.999) == [0, 1, 2]
    # epsilon caps the threshold
    assert accept_typical(tree, [0, 1, 2], torch.zeros(3, 4), 1.0, 0.2, 9.0) == [0, 1, 2]
    # a rejected parent rejects its child, however likely
    logits = torch.zeros(3, 4)
    logits[0] = torch.tensor([50.0, 0, 0, 0])
    logits[1] = torch.tensor([0, 0, 50.0, 0])
    assert accept_typical(tree, [0, 1, 2], logits, 1.0, 0.09, 0.3) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_typical_survives_impossible_tokens(dtype):
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [0.0, 0.0, -math.inf]], dtype=dtype)
    assert accept_typical(Tree.of([(0,)]), [0, 0], logits, 0.7, 0.09, 0.3) == [0, 1]
    assert accept_typical(Tree.of([(0,)]), [0, 1], logits, 0.7, 0.09, 0.3) == [0]
