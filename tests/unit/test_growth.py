"""Growing policies: live growth against the stored expansion, and the compiled rules against the policy object."""

import numpy as np
import pytest
import torch

from entmtp.calibration.growth import columns, join, replay_growth, rows_per_depth, trace_growth
from entmtp.calibration.kernels import walk_cost
from entmtp.errors import EntmtpError
from entmtp.heads.grow import grow
from entmtp.policy.growing import Calibration, GrowingPolicy
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.grown import Candidates, GrownTree, MaskPool
from entmtp.tree.topology import Tree

BEAM, CHILDREN, DEPTH = 3, 4, 4
CALIBRATION = Calibration(
    edges=[[0.1, 0.4], [0.05], [0.2, 0.3, 0.6], []],
    values=[[0.05, 0.3, 0.7], [0.02, 0.5], [0.0, 0.1, 0.3, 0.8], [0.4]],
)
COST = [10.0, 10.2, 10.4, 10.8, 11.5, 12.0, 13.0, 15.0, 18.0]
POLICIES = {
    "dynamic": GrowingPolicy("d", [], nodes=6, beam=BEAM, children=CHILDREN, expand=0.0),
    "dynamic, shallow": GrowingPolicy("d", [], nodes=8, beam=BEAM, children=CHILDREN, max_depth=2, expand=0.02),
    "never expands": GrowingPolicy("n", [], nodes=6, beam=BEAM, children=CHILDREN, expand=1.1),
    "marginal": GrowingPolicy("m", [], nodes=8, beam=BEAM, children=CHILDREN, expand=0.03, rate=0.12, step_ms=COST,
                              calibration=CALIBRATION),
    "marginal, dear": GrowingPolicy("m", [], nodes=8, beam=BEAM, children=CHILDREN, expand=0.1, rate=1.5,
                                    step_ms=COST, calibration=CALIBRATION),
}  # fmt: skip


def test_full_expansions_have_this_many_rows_and_columns():
    assert rows_per_depth(3, 4, 4) == [1, 3, 3, 3]
    assert rows_per_depth(9, 4, 3) == [1, 4, 9]
    assert columns(3, 4, 4) == 4 * 10


def states_of(case, prompt) -> torch.Tensor:
    ids, text = prompt["token_ids"], case.texts[prompt["id"]]
    with torch.inference_mode():
        hidden = case.target.prefill(ids + text[:-1], case.target.new_cache(160))
        return hidden, case.drafter.states(hidden)[len(ids) - 1 :]


@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
def test_replayed_growth_is_live_growth(traced, arch):
    case, parts = traced(arch), []
    for prompt in case.prompts:
        _, states = states_of(case, prompt)
        parts.append(trace_growth(case.drafter, states, case.texts[prompt["id"]], BEAM, CHILDREN, chunk=7))
    trace = join(parts, BEAM, CHILDREN)
    assert trace.probability.shape == (len(case.trace.ranks), columns(BEAM, CHILDREN, DEPTH))
    masks = MaskPool(8, 1, 160, torch.float32, "cpu")
    sizes = set()
    for policy in POLICIES.values():
        told, at = replay_growth(trace, policy), 0
        for prompt in case.prompts:
            ids, text = prompt["token_ids"], case.texts[prompt["id"]]
            hidden, _ = states_of(case, prompt)
            for i in range(0, len(text), 5):
                case.drafter.reset()
                case.drafter.start(hidden[: len(ids) + i], text[i])
                tree, _ = grow(case.drafter, text[i], policy, masks)
                assert tree.n - 1 == told.nodes[at + i]
                assert walk(tree, text[i:]) == told.accepted[at + i]
                sizes.add(tree.n)
            at += len(text)
    assert len(sizes) > 3


def walk(tree: GrownTree, text: list[int]) -> int:
    node, length, tokens = 0, 0, tree.tokens.tolist()
    while length + 1 < len(text):
        node = next((child for child in tree.tree.children[node] if tokens[child] == text[length + 1]), None)
        if node is None:
            break
        length += 1
    return length


@pytest.mark.parametrize("name", POLICIES)
def test_compiled_rules_are_the_policys_own(traced, name):
    """Rows a head evaluates, nodes kept, hits: from the stored candidates with the policy object's methods."""
    case, policy = traced("hydra"), POLICIES[name]
    prompt = case.prompts[3]
    _, states = states_of(case, prompt)
    trace = join([trace_growth(case.drafter, states, case.texts[prompt["id"]], BEAM, CHILDREN)], BEAM, CHILDREN)
    told = replay_growth(trace, policy)
    for i in range(len(trace.depth)):
        p = trace.probability[i].tolist()
        live, rows, frontier = [], [], [-1]
        for depth in range(1, policy.max_depth + 1):
            chance = {-1: 1.0} | {c: p[c] for c in live}
            parents = [f for f in sorted(frontier, key=lambda f: -chance[f]) if chance[f] >= policy.expand][:BEAM]
            assert parents == policy.parents(frontier, chance)
            if not parents:
                break
            rows.append(len(parents))
            frontier = [c for c in range(len(p)) if trace.parent[i, c] in parents and trace.depth[i, c] == depth]
            live += frontier
        assert told.rows[i].tolist() == rows + [0] * (DEPTH - len(rows))
        ranked = [c for c in trace.order[i].tolist() if c in live]
        count = policy.size([(p[c], int(trace.depth[i, c])) for c in ranked[: policy.nodes]])
        assert told.nodes[i] == count
        assert told.accepted[i] == sum(bool(trace.on_path[i, c]) for c in ranked[:count])


def test_a_larger_tree_accepts_no_less_and_costs_more(traced):
    case = traced("hydra")
    parts = [trace_growth(case.drafter, states_of(case, prompt)[1], case.texts[prompt["id"]], BEAM, CHILDREN)
             for prompt in case.prompts]  # fmt: skip
    trace = join(parts, BEAM, CHILDREN)
    small, large = (
        replay_growth(trace, GrowingPolicy("d", [], nodes=n, beam=BEAM, children=CHILDREN, expand=0.0)) for n in (3, 12)
    )
    assert (large.accepted >= small.accepted).all()
    assert large.accepted.sum() > small.accepted.sum()
    ms = large.milliseconds(np.arange(13.0), np.array([[0.0, 1.0, 2.0, 3.0]] * DEPTH))
    assert ms.tolist() == (large.nodes + large.rows.sum(axis=1)).tolist()
    steps, total = walk_cost(large.accepted, ms, trace.bounds)
    assert total > steps > 0


def test_marginal_takes_what_is_worth_its_time():
    policy = GrowingPolicy("m", [], nodes=4, rate=0.1, step_ms=[10, 10, 10, 14, 15],
                           calibration=Calibration([[]] * 2, [[0.3], [0.1]]))  # fmt: skip
    ranked = [(0.9, 1), (0.5, 2), (0.2, 1), (0.1, 1)]
    assert policy.size(ranked) == 4  # .3 + .1 + .3 + .3 - .5 = .5 beats .4 for two
    assert policy.size(ranked[:3]) == 2  # a third node alone is not worth four milliseconds
    policy.rate = 1.0
    assert policy.size(ranked) == 2
    assert policy.size([]) == 0
    policy.rate = None
    assert policy.size(ranked) == 4


def test_candidates_rank_parents_first_even_when_equally_likely():
    found = Candidates([5])
    found.add(0, [6, 7], [1.0, 0.25])
    found.add(1, [8, 9], [1.0, 0.25])
    assert [found.tokens[i] for i in found.ranked()] == [6, 8, 7, 9]
    assert found.depth == [0, 1, 1, 2, 2]


def test_a_grown_tree_has_the_masks_of_the_same_compiled_tree():
    masks = MaskPool(6, 3, 9, torch.float32, "cpu")
    found = Candidates([5])
    found.add(0, [6, 7], [0.6, 0.3])
    found.add(1, [8], [0.5])
    found.add(3, [9], [0.9])
    for kept, paths in (([1, 2, 3, 4], [(0,), (1,), (0, 0), (0, 0, 0)]), ([1, 3], [(0,), (0, 0)]), ([], [])):
        grown = GrownTree(found, kept, masks)
        compiled = CompiledTree(Tree.of(paths), 3, 9, torch.float32, "cpu")
        assert grown.tree.parents == compiled.tree.parents
        assert grown.tree.children == compiled.tree.children
        assert grown.depths.tolist() == compiled.depths.tolist()
        assert grown.tokens.tolist() == [found.tokens[i] for i in [0, *kept]]
        for context in (0, 5):
            if kept:
                assert torch.equal(grown.mask_slice(context), compiled.mask_slice(context))
            else:
                assert grown.mask_slice(context) is None
        for node in range(grown.n):
            assert grown.tree.path_nodes(node) == compiled.tree.path_nodes(node)


@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
@pytest.mark.parametrize("name", POLICIES)
def test_live_steps_are_lossless_and_replayed_exactly(traced, arch, name):
    case, policy = traced(arch, "sample" if arch == "hydra" else "greedy"), POLICIES[name]
    parts = [trace_growth(case.drafter, states_of(case, prompt)[1], case.texts[prompt["id"]], BEAM, CHILDREN)
             for prompt in case.prompts]  # fmt: skip
    told, start = replay_growth(join(parts, BEAM, CHILDREN), policy), 0
    for prompt, run in zip(case.prompts, case.live(policy), strict=True):
        text = case.texts[prompt["id"]]
        assert run.tokens == text
        i, expected = 0, []
        while i < len(text) - 1:
            expected.append((int(told.nodes[start + i]), int(told.accepted[start + i])))
            i += expected[-1][1] + 1
        assert [(step.nodes, step.accepted) for step in run.steps] == expected
        assert all(0 <= step.scheduler_seconds < step.seconds for step in run.steps)
        start += len(text)


def test_what_does_not_fit_the_heads_is_refused(traced):
    case = traced("hydra")
    for change, message in (({"max_depth": 5}, "max_depth=5"), ({"children": 17}, "children=17")):
        with pytest.raises(EntmtpError, match=message):
            case.live(GrowingPolicy("d", [], **change))
