"""Packed drafters against the plain module, node by node."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from entmtp.errors import EntmtpError
from entmtp.heads.children import best_children
from entmtp.heads.drafter import make_drafter, top1_prob
from entmtp.target.native import library
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

ARCHS = ("medusa", "hydra")
ROOT = 40


def compiled(tree: Tree) -> CompiledTree:
    return CompiledTree(tree, 1, 8, torch.float32, "cpu")


@pytest.fixture(scope="module")
def hidden(tiny, prompts) -> torch.Tensor:
    with torch.inference_mode():
        return tiny.prefill(prompts[3], tiny.new_cache(32))[-1:]


@torch.inference_mode()
def straight_logits(target, heads, hidden, path: list[int]) -> torch.Tensor:
    """Draft logits after the token path (root first) by the unpacked module: [draft_vocab]."""
    embeddings = [target.model.embed(torch.tensor([token])) for token in path]
    return F.linear(heads.features(len(path), hidden, embeddings), target.head_rows(heads.token_map.long()))[0]


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_fill_equals_the_straight_line_for_every_tree(tiny, tiny_heads, drafters, trees, hidden, arch):
    heads, drafter = tiny_heads[arch], drafters[arch]
    gaps = []
    for tree in trees.values():
        drafter.start(hidden, ROOT)
        tokens = drafter.fill(compiled(tree)).tolist()
        assert tokens[0] == ROOT
        for node in range(1, tree.num_nodes + 1):
            path = [tokens[n] for n in tree.path_nodes(tree.parents[node])]
            ranked = straight_logits(tiny, heads, hidden, path).sort(descending=True)
            rank = tree.paths[node - 1][-1]
            gaps.append(float((ranked.values[:20].diff().abs()).min()))
            assert tokens[node] == int(heads.token_map[ranked.indices[rank]])
    assert min(gaps) > 1e-5  # no near tie that could hide or fake a difference


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_greedy_probs_are_the_heads_top1_along_their_own_path(tiny, tiny_heads, drafters, hidden, arch):
    heads, drafter = tiny_heads[arch], drafters[arch]
    path, expected = [ROOT], []
    for _ in range(4):
        logits = straight_logits(tiny, heads, hidden, path)
        expected.append(float(logits.softmax(dim=-1).max()))
        path.append(int(heads.token_map[int(logits.argmax())]))
    for depth in (3, 1, 4, 2):  # in any order, asked again or not
        drafter.start(hidden, ROOT)
        drafter.extend(depth)
        assert drafter.greedy_probs(depth).tolist() == pytest.approx(expected[:depth], rel=1e-4)
        assert drafter.greedy_probs(1).tolist() == pytest.approx(expected[:1], rel=1e-4)
    chain = Tree.of([(0,) * d for d in range(1, 5)])
    assert drafter.fill(compiled(chain)).tolist() == path


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_what_a_signal_computed_does_not_change_the_tree(drafters, trees, hidden, arch):
    drafter = drafters[arch]
    for tree in trees.values():
        drafter.start(hidden, ROOT)
        fresh = drafter.fill(compiled(tree))
        for depth in range(1, 5):
            drafter.start(hidden, ROOT)
            drafter.greedy_probs(depth)
            assert torch.equal(drafter.fill(compiled(tree)), fresh)
        drafter.start(hidden * 0.5, ROOT + 1)  # another position in between
        drafter.greedy_probs(4)
        drafter.start(hidden, ROOT)
        assert torch.equal(drafter.fill(compiled(tree)), fresh)


@torch.inference_mode()
def test_hydra_path_logits_broadcast_one_hidden_state(drafters, hidden):
    drafter = drafters["hydra"]
    paths = torch.tensor([[5, 6], [7, 8], [5, 8]])
    rows = drafter.path_logits(2, hidden.expand(3, -1).contiguous(), paths)
    torch.testing.assert_close(drafter.path_logits(2, hidden, paths), rows)
    assert not torch.allclose(rows[0], rows[2])  # the last token matters
    assert not torch.allclose(rows[1], rows[2])  # and the root does


def test_top1_prob():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    got = top1_prob(logits)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(logits.float().softmax(dim=-1).amax(dim=-1).tolist())


@pytest.mark.parametrize("arch", ARCHS)
def test_width_beyond_the_draft_vocabulary_is_refused(tiny, tiny_heads, arch):
    assert make_drafter(tiny_heads[arch], tiny, 100).width == 100
    with pytest.raises(EntmtpError, match=r"heads\.width=101 exceeds the draft vocabulary of 100"):
        make_drafter(tiny_heads[arch], tiny, 101)


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_bfloat16_drafter_follows_the_targets_dtype(tiny_bf16, tiny_heads, trees, prompts, arch):
    drafter = make_drafter(tiny_heads[arch], tiny_bf16, 16)
    state = tiny_bf16.prefill(prompts[2], tiny_bf16.new_cache(32))[-1:]
    drafter.start(state, ROOT)
    tokens = drafter.fill(compiled(trees["full"])).tolist()
    allowed = set(tiny_heads[arch].token_map.tolist())
    assert set(tokens[1:]) <= allowed
    assert len(set(tokens[1:6])) == 5
    logits = straight_logits(tiny_bf16, copy.deepcopy(tiny_heads[arch]).bfloat16(), state, [ROOT]).float()
    best = logits[drafter.token_map == tokens[1]]
    assert float(logits.max() - best) < 0.1 * float(logits.max() - logits.min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "count"), [(1, 8192, 10), (3, 777, 8), (2, 64, 64), (4, 65, 1)])
def test_best_children_are_the_topk_of_the_softmax(dtype, rows, size, count):
    generator = torch.Generator().manual_seed(size)
    logits = (4 * torch.randn(rows, size, generator=generator)).to(dtype)
    ids, probability = best_children(logits, count)
    softmax = logits.double().softmax(dim=-1)
    expected = softmax.topk(count, dim=-1).values
    torch.testing.assert_close(probability.double(), expected, rtol=2e-5, atol=1e-12)
    torch.testing.assert_close(softmax.gather(1, ids), expected)  # ties may be told apart by their place only
    assert all(len(set(row)) == count for row in ids.tolist())


def test_of_equal_children_the_lower_id_comes_first():
    logits = torch.zeros(2, 300)
    logits[1, [250, 70, 71]] = 1.0
    assert best_children(logits, 4)[0].tolist() == [[0, 1, 2, 3], [70, 71, 250, 0]]


@pytest.mark.skipif(library(torch.bfloat16) is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_heads_stored_in_bfloat16_are_those_of_rounded_weights(tiny, tiny_heads, hidden, arch):
    """The arithmetic is float32, alone and among many rows (steps, traces)."""
    small = make_drafter(tiny_heads[arch], tiny, 10, "bfloat16")
    rounded = copy.deepcopy(tiny_heads[arch]).bfloat16().float()
    target = replace(tiny, model=copy.copy(tiny.model))
    target.model.head_weight = tiny.model.head_weight.bfloat16().float()
    exact = make_drafter(rounded, target, 10)
    paths = torch.tensor([[ROOT, 7, 9, 12], [ROOT, 11, 5, 2], [ROOT, 3, 3, 3]])
    for depth in (1, 2, 3, 4):
        many = small.path_logits(depth, hidden.expand(3, -1), paths[:, :depth])
        expected = exact.path_logits(depth, hidden.expand(3, -1), paths[:, :depth])
        # the embeddings' scale is folded into the weights before they are rounded
        torch.testing.assert_close(many, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
        for row in range(3):
            alone = small.path_logits(depth, hidden, paths[row : row + 1, :depth])[0]
            torch.testing.assert_close(alone, many[row], rtol=1e-5, atol=1e-6)  # torch's SiLU may differ by an ulp
