"""Topology, compiled trees, published trees and banks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entmtp.errors import EntmtpError
from entmtp.io import read_json
from entmtp.tree.bank import Bank, BankTree, strict_pareto
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.defaults import default_tree
from entmtp.tree.topology import Tree

PATHS = st.sets(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=10)
TREES = PATHS.map(lambda paths: Tree.of({path[:k] for path in paths for k in range(1, len(path) + 1)}))


@given(TREES, st.randoms(use_true_random=False))
def test_a_tree_does_not_depend_on_the_order_of_its_paths(tree, random):
    shuffled = random.sample(tree.paths, len(tree.paths))
    assert Tree.of(shuffled) == tree
    assert hash(Tree.of(shuffled)) == hash(tree)


@given(TREES)
def test_mask_parents_children_and_paths_follow_from_the_rank_paths(tree):
    nodes = [(), *tree.paths]  # rank path of every node
    assert tree.depths == [len(path) for path in nodes]
    assert tree.depths == sorted(tree.depths)  # parents come before children
    mask = tree.ancestors()
    for i, path in enumerate(nodes):
        assert tree.path_nodes(i) == [nodes.index(path[:k]) for k in range(len(path) + 1)]
        assert tree.parents[i] == (nodes.index(path[:-1]) if path else -1)
        assert [nodes[child] for child in tree.children[i]] == sorted(
            other for other in tree.paths if other[:-1] == path
        )
        for j, other in enumerate(nodes):
            assert bool(mask[i, j]) == (path[: len(other)] == other)
    assert tree.depth == max(tree.depths)
    assert tree.max_rank == max((rank for path in tree.paths for rank in path), default=-1)
    inner = [path for path in nodes if any(other[:-1] == path for other in tree.paths)]
    assert tree.widths == [sum(len(path) == d for path in inner) for d in range(tree.depth)]


@given(TREES)
def test_levels_cover_every_node_once_with_the_right_parent_and_rank(tree):
    compiled = CompiledTree(tree, 1, 8, torch.float32, "cpu")
    covered = []
    for depth, level in enumerate(compiled.levels, 1):
        covered += list(range(level.start, level.end))
        for offset, node in enumerate(range(level.start, level.end)):
            ancestors = level.ancestors[level.rows[offset]].tolist()
            assert [*ancestors, node] == tree.path_nodes(node)
            assert int(level.ranks[offset]) == tree.paths[node - 1][-1]
        assert len(level.ancestors) == tree.widths[depth - 1]
        parents = {path[:-1] for path in tree.paths if len(path) == depth}
        assert level.greedy_only == (parents == {(0,) * (depth - 1)})
    assert covered == list(range(1, tree.num_nodes + 1))
    assert compiled.node_depth.tolist() == [len(path) - 1 for path in tree.paths]
    assert compiled.node_rank.tolist() == [path[-1] for path in tree.paths]


@given(TREES, st.integers(1, 3), st.integers(0, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_mask_slice_is_zero_on_the_context_and_the_tree_on_the_right(tree, groups, context, dtype):
    compiled = CompiledTree(tree, groups, 9, dtype, "cpu")
    mask = compiled.mask_slice(context)
    if tree.num_nodes == 0:
        assert mask is None
        return
    n = tree.num_nodes + 1
    assert mask.shape == (groups * n, context + n)
    assert mask.dtype == dtype
    assert mask.data_ptr() >= compiled.buffer.data_ptr()  # a view: a step writes nothing
    block = torch.where(torch.from_numpy(tree.ancestors()), 0.0, torch.finfo(dtype).min).to(dtype)
    for group in range(groups):
        rows = mask[group * n : (group + 1) * n]
        assert torch.all(rows[:, :context] == 0)
        assert torch.equal(rows[:, context:], block)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1,), (0,)], "twice"),
        ([(0,), (1, 0)], r"path \[1, 0\] has no parent \[1\]"),
        ([(0,), (0, -1)], "ranks >= 0"),
        ([(0,), ()], "ranks >= 0"),
    ],
)
def test_broken_trees_are_refused(paths, message):
    with pytest.raises(EntmtpError, match=message):
        Tree.of(paths)


def test_published_tree():
    tree = default_tree("mc_sim_7b_63")
    assert (tree.num_nodes, tree.depth, tree.max_rank) == (63, 4, 9)
    # nodes at each depth, counted in Medusa's own list
    assert [sum(len(path) == d for path in tree.paths) for d in (1, 2, 3, 4)] == [10, 28, 23, 2]
    with pytest.raises(EntmtpError, match="choose one of chain_4, empty, fixed_16, mc_sim_7b_63"):
        default_tree("mc_sim")


def test_check_fits_names_what_does_not_fit():
    tree = Tree.of([(0,), (0, 5), (0, 5, 0)])
    tree.check_fits(3, 6)
    with pytest.raises(EntmtpError, match="depth 3 exceeds the 2 draft heads"):
        tree.check_fits(2, 6)
    with pytest.raises(EntmtpError, match="rank 5 is outside the 5 candidates"):
        tree.check_fits(3, 5)
    Tree(()).check_fits(1, 1)


def entry(nodes: int, speed: float) -> BankTree:
    return BankTree(Tree.of([(rank,) for rank in range(nodes)]), 1.0 + nodes / 10, speed, 1000 / speed)


def test_bank_round_trip(tmp_path):
    bank = Bank("humaneval", "hydra", "measured", [entry(0, 10.25), entry(2, 31.5), entry(5, 20.0)])
    path = tmp_path / "bank.json"
    bank.save(path, provenance={"git": "abc"})
    loaded = Bank.load(path)
    assert (loaded.task, loaded.heads, loaded.basis, loaded.star) == ("humaneval", "hydra", "measured", 1)
    assert [t.tree for t in loaded.trees] == [t.tree for t in bank.trees]
    for old, new in zip(bank.trees, loaded.trees, strict=True):
        assert (new.accept_length, new.tokens_per_s) == (old.accept_length, old.tokens_per_s)
        assert new.step_ms == pytest.approx(old.step_ms, abs=1e-5)
    assert read_json(path)["provenance"] == {"git": "abc"}
    assert read_json(path)["trees"][1]["paths"] == [[0], [1]]


@pytest.mark.parametrize(
    "content", ['{"task": "a", "heads": "h", "basis": "measured", "trees": []}', '{"trees": 3}', "[]"]
)
def test_bank_load_refuses_other_files(tmp_path, content):
    path = tmp_path / "bank.json"
    path.write_text(content)
    with pytest.raises(EntmtpError, match=r"bank\.json"):
        Bank.load(path)


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([10.0, 20.0, 20.5, 30.0])), min_size=1, max_size=8))
def test_strict_pareto_equals_brute_force(items):
    kept = strict_pareto([entry(nodes, speed) for nodes, speed in items], 1e-9)
    smallest = min(nodes for nodes, _ in items)
    expected = []
    for nodes in sorted({nodes for nodes, _ in items}):
        speed = max(s for n, s in items if n == nodes)
        if nodes == smallest or speed > max(s for n, s in items if n < nodes):
            expected.append((nodes, speed))
    assert [(t.tree.num_nodes, t.tokens_per_s) for t in kept] == expected


def test_strict_pareto_needs_more_than_min_gain():
    trees = [entry(0, 10.0), entry(1, 10.5), entry(2, 11.2)]
    assert [t.tree.num_nodes for t in strict_pareto(trees, 1.0)] == [0, 2]  # each gain counts from the last kept tree
    assert [t.tree.num_nodes for t in strict_pareto(trees, 1e-9)] == [0, 1, 2]
