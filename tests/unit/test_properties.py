"""Properties over generated trees, drafts and targets: commits move the right rows, decoding equals plain decoding."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder
from entmtp.decoding.sampling import Chooser, GumbelNoise
from entmtp.decoding.steps import cut
from entmtp.decoding.verify import accept_exact
from entmtp.heads import kernels
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import Policy
from entmtp.target.cache import KVCache
from entmtp.tree.grown import GrownShape, MaskPool
from entmtp.tree.topology import Tree

PATHS = st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=10)
TREES = PATHS.map(lambda paths: Tree.of({path[:k] for path in paths for k in range(1, len(path) + 1)}))
SEEDS = st.integers(0, 10**6)
VOCAB = 6


# -- trees and the cache


@given(TREES, st.integers(0, 5), SEEDS)
def test_committing_any_path_keeps_its_rows_in_order_and_the_context(tree, context, seed):
    """Rows are numbered, so that a row that moved to a wrong place, or was overwritten before it moved, shows."""
    rng = np.random.default_rng(seed)
    cache = KVCache(2, 1, 1, context + tree.num_nodes + 1, torch.float32, "cpu")
    numbers = torch.arange(cache.data.numel(), dtype=torch.float32).view_as(cache.data)
    node = int(rng.integers(tree.num_nodes + 1))
    path = tree.path_nodes(node)
    cache.data.copy_(numbers)
    cache.length = context
    cache.commit(path)
    rows = [*range(context), *(context + step for step in path)]
    assert cache.length == len(rows)
    assert torch.equal(cache.data[:, :, :, : cache.length], numbers[:, :, :, rows])


@given(TREES, SEEDS)
def test_a_path_is_one_step_of_depth_a_node_and_lies_within_the_mask(tree, seed):
    mask = tree.ancestors()
    for node in range(tree.num_nodes + 1):
        path = tree.path_nodes(node)
        assert [tree.depths[step] for step in path] == list(range(len(path)))
        assert path == sorted(path)  # what a commit relies on: rows only move to the left
        assert set(np.flatnonzero(mask[node])) == set(path)
        assert all(parent == tree.parents[child] for parent, child in itertools.pairwise(path))


GROWN = st.lists(st.tuples(SEEDS, st.floats(0, 1)), max_size=14)


def hung(grown: list[tuple[int, float]]) -> tuple[list[int], list[int], np.ndarray]:
    """Candidates hung under earlier ones at random: parents (the root's is -1), depths, path probabilities."""
    parents, depths, probability = [-1], [0], [1.0]
    for place, conditional in grown:
        parents.append(place % len(parents))
        depths.append(depths[parents[-1]] + 1)
        probability.append(probability[parents[-1]] * conditional)
    return parents, depths, np.array(probability)


@given(GROWN, st.integers(0, 6))
def test_the_mask_of_any_grown_tree_is_its_ancestor_relation(grown, context):
    parents, depths, _ = hung(grown)
    n, shape = len(parents), GrownShape(parents, depths)
    pool = MaskPool(14, 2, 8, torch.float32, "cpu")
    pool.fill([-1, *range(n - 1)])  # another tree's mask of the same size must leave nothing behind
    mask = pool.fill(parents)[:, 8 - context :]
    expected = [[other in shape.path_nodes(node) for other in range(n)] for node in range(n)]
    assert mask.shape == (2 * n, context + n)
    for group in (mask[:n], mask[n:]):
        assert torch.all(group[:, :context] == 0)
        assert ((group[:, context:] == 0).tolist()) == expected


@given(GROWN, st.integers(1, 15))
def test_the_likeliest_few_candidates_are_closed_under_parents(grown, most):
    parents, depths, probability = hung(grown)
    order = np.zeros(most + 1, np.int64)
    taken = kernels.rank(len(parents), most, probability, np.array(depths), order)
    kept = {0, *order[:taken].tolist()}
    assert len(kept) == 1 + min(most, len(grown))
    assert all(parents[node] in kept for node in kept - {0})


# -- verification: any target, any tree, any drafts


class Table:
    """A target without a model: logits are a pure function of the prefix, few values, so that ties are common."""

    def __init__(self, seed: int, values: int):
        self.seed, self.values = seed, values

    def logits(self, prefix: list[int]) -> torch.Tensor:
        rng = np.random.default_rng([self.seed, len(prefix), *prefix[-4:]])
        return torch.from_numpy(rng.integers(0, self.values, VOCAB).astype(np.float32))


def drafts(tree: Tree, rng: np.random.Generator, root: int) -> list[int]:
    """Tokens that differ among siblings and are anything otherwise."""
    tokens = [root] + [0] * tree.num_nodes
    for children in tree.children:
        for child, token in zip(children, rng.permutation(VOCAB), strict=False):
            tokens[child] = int(token)
    return tokens


def decoded(table: Table, trees: list[Tree], rng, chooser: Chooser, budget: int, stop: set[int]) -> list[int]:
    """The engine's loop over a table: draft, verify every node with its own prefix, accept, cut."""
    text = []
    root = chooser(table.logits([])[None], [0])[0]
    while True:
        tree = trees[int(rng.integers(len(trees)))]
        tokens = drafts(tree, rng, root)
        prefixes = [text + [tokens[step] for step in tree.path_nodes(node)] for node in range(tree.num_nodes + 1)]
        logits = torch.stack([table.logits(prefix) for prefix in prefixes])
        choices = chooser(logits, [len(prefix) for prefix in prefixes])
        nodes = accept_exact(tree, tokens, choices)
        root = choices[nodes[-1]]
        committed = cut([tokens[node] for node in nodes], stop, budget - len(text))
        text += committed
        if committed[-1] in stop or len(text) == budget:
            return text


def plainly(table: Table, chooser: Chooser, budget: int, stop: set[int]) -> list[int]:
    text = []
    while len(text) < budget:
        text.append(chooser(table.logits(text)[None], [len(text)])[0])
        if text[-1] in stop:
            break
    return text


@given(st.lists(TREES, min_size=1, max_size=3), SEEDS, st.integers(1, 4), st.integers(1, 14),
       st.sets(st.integers(0, VOCAB - 1), max_size=1), st.booleans())  # fmt: skip
@settings(max_examples=150)
def test_any_tree_over_any_target_gives_the_tokens_of_plain_decoding(trees, seed, values, budget, stop, sampled):
    chooser = Chooser(0.8, GumbelNoise(seed, "p", VOCAB)) if sampled else Chooser()
    table = Table(seed, values)
    expected = plainly(table, chooser, budget, stop)
    assert decoded(table, trees, np.random.default_rng(seed), chooser, budget, stop) == expected


class AnyDrafter:
    """Drafts anything at all, distinct among siblings; now and then the truth, so that whole paths are accepted."""

    arch, history, depth, width = "hydra", False, 4, 4

    def __init__(self, decoder: Decoder, prompt: list[int], text: list[int], seed: int):
        self.cache, self.start_of_text, self.text = decoder.cache, len(prompt), text
        self.vocab, self.rng = decoder.target.vocab_size, np.random.default_rng(seed)

    def reset(self) -> None: ...

    def start(self, hidden, root) -> None:
        self.root, self.at = root, self.cache.length - self.start_of_text

    def fill(self, compiled) -> torch.Tensor:
        tree, tokens = compiled.tree, [self.root] + [0] * compiled.tree.num_nodes
        for parent, children in enumerate(tree.children):
            drawn = self.rng.choice(self.vocab, len(children), replace=False).tolist()
            place = self.at + tree.depths[parent] + 1
            true = self.text[place] if place < len(self.text) else None
            if children and true is not None and true not in drawn and self.rng.random() < 0.7:
                drawn[int(self.rng.integers(len(children)))] = true
            for child, token in zip(children, drawn, strict=True):
                tokens[child] = token
        return torch.tensor(tokens)


@given(TREES, SEEDS, st.integers(0, 3), st.integers(1, 30))
@settings(max_examples=60)
def test_any_tree_on_a_real_forward_gives_the_tokens_of_plain_decoding(
    tiny, prompts, greedy_texts, tree, seed, which, budget
):
    decoder = Decoder(tiny, None, 96)
    decoder.drafter = AnyDrafter(decoder, prompts[which], greedy_texts[which], seed)
    run = decoder.generate(prompts[which], Policy("t", [tree]), DecodingConfig(max_new_tokens=budget))
    assert run.tokens == greedy_texts[which][:budget]


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0, 0.5), st.integers(0, 12), SEEDS)
@settings(max_examples=25)
def test_any_growing_policy_gives_the_tokens_of_plain_decoding(
    tiny, drafters, prompts, greedy_texts, beam, children, expand, nodes, seed
):
    drafters["hydra"].reserve(96)
    policy = GrowingPolicy("g", [], nodes=max(nodes, 1), beam=beam, children=children, expand=expand)
    run = Decoder(tiny, drafters["hydra"], 96).generate(
        prompts[seed % 4], policy, DecodingConfig(max_new_tokens=24), "p"
    )
    assert run.tokens == greedy_texts[seed % 4][:24]


# -- sampling: the coupled draws have the exact distribution


def chi_squared(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", range(6))
def test_coupled_draws_follow_the_softmax_of_any_logits(seed):
    """5,000 positions of one prompt; 15 degrees of freedom: 44.3 is exceeded with probability 1e-4."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 1.2, 16).astype(np.float32))
    temperature, count = (0.5, 0.8, 1.0, 1.5)[seed % 4], 5000
    chooser = Chooser(temperature, GumbelNoise(seed, f"prompt {seed}", 16, keep=4))
    chosen = [chooser(logits[None], [position])[0] for position in range(count)]
    exact = (logits.double() / temperature).softmax(dim=-1).numpy()
    assert chi_squared(np.bincount(chosen, minlength=16), count * exact) < 44.3


def test_texts_decoded_with_trees_follow_the_targets_joint_distribution():
    """Two tokens of 4,000 seeds through the whole loop, with drafts that depend on the root: 35 degrees of freedom (36
    pairs); 74.9 is exceeded with probability 1e-4. A rule that preferred drafted tokens would fail here."""
    table, count = Table(3, 3), 4000
    trees = [Tree.of([(0,), (1,), (0, 0)])]
    observed = np.zeros((VOCAB, VOCAB))
    for seed in range(count):
        chooser = Chooser(1.0, GumbelNoise(seed, "joint", VOCAB))
        first, second = decoded(table, trees, np.random.default_rng(7), chooser, 2, set())
        observed[first, second] += 1
    p = table.logits([]).double().softmax(dim=-1).numpy()
    exact = np.stack([p[a] * table.logits([a]).double().softmax(dim=-1).numpy() for a in range(VOCAB)])
    assert chi_squared(observed, count * exact) < 74.9
