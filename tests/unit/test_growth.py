"""Growing policies: live growth against the stored expansion, and the compiled rules against the policy object."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from entmtp.calibration.growth import (
    columns,
    join,
    load_growth,
    replay_growth,
    save_growth,
)
from entmtp.calibration.growth_traces import trace_growth
from entmtp.calibration.kernels import walk_cost
from entmtp.calibration.replay import replay_policy
from entmtp.errors import EntmtpError
from entmtp.evaluation.checks import replay_verdict
from entmtp.heads import kernels
from entmtp.heads.grow import Nursery, grow
from entmtp.policy.growing import Calibration, GrowingPolicy, rows_per_depth
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.grown import GrownTree
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
    "marginal, uncalibrated": GrowingPolicy("m", [], nodes=8, beam=BEAM, children=CHILDREN, expand=0.03, rate=0.12,
                                            step_ms=COST),
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
    sizes = set()
    for policy in POLICIES.values():
        told, at = replay_growth(trace, policy), 0
        nursery = Nursery(policy, 1, 160, torch.float32, "cpu")
        for prompt in case.prompts:
            ids, text = prompt["token_ids"], case.texts[prompt["id"]]
            hidden, _ = states_of(case, prompt)
            for i in range(0, len(text), 5):
                case.drafter.reset()
                case.drafter.start(hidden[: len(ids) + i], text[i])
                tree, _ = grow(case.drafter, text[i], nursery)
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


def grown_by_hand(nodes: int, levels: list[tuple[list[list[int]], list[list[float]]]]) -> GrownTree:
    """The tree kept of given candidates, level by level: (tokens, probabilities given the parent) [rows, 2]."""
    policy = GrowingPolicy("d", [], nodes=nodes, beam=2, children=2, max_depth=len(levels), expand=0.2)
    nursery = Nursery(policy, 3, 9, torch.float32, "cpu")
    rows = nursery.plant(5)
    for depth, (tokens, conditional) in enumerate(levels, 1):
        assert rows == len(tokens)
        rows = nursery.extend(depth, torch.tensor(tokens), torch.tensor(conditional))
    return nursery.keep()


def test_candidates_rank_parents_first_even_when_equally_likely():
    levels = [([[6, 7]], [[1.0, 0.25]]), ([[8, 9], [10, 11]], [[1.0, 0.25], [0.5, 0.25]])]
    for nodes, tokens in (
        (1, [5, 6]),
        (2, [5, 6, 8]),
        (3, [5, 6, 7, 8]),
        (4, [5, 6, 7, 8, 9]),
        (5, [5, 6, 7, 8, 9, 10]),
    ):
        assert grown_by_hand(nodes, levels).tokens.tolist() == tokens


@pytest.mark.parametrize("seed", range(20))
def test_ranking_is_sorting(seed):
    rng = np.random.default_rng(seed)
    count, most = int(rng.integers(1, 40)), int(rng.integers(1, 12))
    probability = np.round(rng.random(count), 1)  # many ties
    depths = rng.integers(1, 4, count)
    order = np.zeros(most + 1, np.int64)
    taken = kernels.rank(count, most, probability, depths, order)
    expected = sorted(range(1, count), key=lambda node: (-probability[node], depths[node], node))[:most]
    assert order[:taken].tolist() == expected


def test_a_grown_tree_has_the_masks_of_the_same_compiled_tree():
    levels = [([[6, 7]], [[0.6, 0.3]]), ([[8, 9], [10, 11]], [[0.5, 0.2], [0.4, 0.1]]), ([[12, 13]], [[0.9, 0.05]])]
    for nodes, paths, tokens in (
        (1, [(0,)], [5, 6]),
        (3, [(0,), (1,), (0, 0)], [5, 6, 7, 8]),  # of the equally likely 7 and 8 both
        (4, [(0,), (1,), (0, 0), (0, 0, 0)], [5, 6, 7, 8, 12]),
        (6, [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], [5, 6, 7, 8, 9, 10, 12]),
    ):
        grown = grown_by_hand(nodes, levels)
        compiled = CompiledTree(Tree.of(paths), 3, 9, torch.float32, "cpu")
        assert grown.tree.parents == compiled.tree.parents
        assert grown.tree.children == compiled.tree.children
        assert grown.tree.depths == grown.depths.tolist() == compiled.depths.tolist()
        assert grown.tokens.tolist() == tokens
        for context in (0, 5):
            assert torch.equal(grown.mask_slice(context), compiled.mask_slice(context))
        for node in range(grown.n):
            assert grown.tree.path_nodes(node) == compiled.tree.path_nodes(node)


def test_the_root_alone_needs_no_mask():
    policy = GrowingPolicy("n", [], nodes=6, beam=2, children=2, max_depth=2, expand=1.1)
    nursery = Nursery(policy, 3, 9, torch.float32, "cpu")
    assert nursery.plant(5) == 0
    tree = nursery.keep()
    assert (tree.n, tree.tokens.tolist(), tree.mask_slice(4)) == (1, [5], None)


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
            expected.append((int(told.nodes[start + i]), int(told.accepted[start + i])))  # nodes, accepted
            i += expected[-1][1] + 1
        assert [(step.nodes, step.accepted) for step in run.steps] == expected
        assert all(0 <= step.scheduler_seconds < step.seconds for step in run.steps)
        start += len(text)


def test_what_does_not_fit_the_heads_is_refused(traced):
    case = traced("hydra")
    for change, message in (({"max_depth": 5}, "max_depth=5"), ({"children": 17}, "children=17")):
        with pytest.raises(EntmtpError, match=message):
            case.live(GrowingPolicy("d", [], **change))


def test_a_growth_trace_survives_its_file(traced, tmp_path):
    case = traced("hydra")
    parts = [trace_growth(case.drafter, states_of(case, prompt)[1], case.texts[prompt["id"]], BEAM, CHILDREN)
             for prompt in case.prompts]  # fmt: skip
    trace = join(parts, BEAM, CHILDREN)
    save_growth(trace, tmp_path / "t.growth.npz")
    again = load_growth(tmp_path / "t.growth.npz")
    assert (again.beam, again.children) == (BEAM, CHILDREN)
    for name in ("probability", "depth", "parent", "on_path", "order", "bounds"):
        assert np.array_equal(getattr(again, name), getattr(trace, name))
        assert getattr(again, name).dtype == getattr(trace, name).dtype
    (tmp_path / "t.growth.npz").write_bytes(b"PK")
    with pytest.raises(EntmtpError, match=r"t\.growth\.npz: not a growth trace"):
        load_growth(tmp_path / "t.growth.npz")
    with pytest.raises(EntmtpError, match=r"growth\.beam=3"):
        replay_growth(trace, GrowingPolicy("d", [], beam=2, children=CHILDREN))


def traced_growth(case) -> None:
    """Give the case's rank trace its full expansions."""
    parts = [trace_growth(case.drafter, states_of(case, prompt)[1], case.texts[prompt["id"]], BEAM, CHILDREN)
             for prompt in case.prompts]  # fmt: skip
    case.trace.growth = join(parts, BEAM, CHILDREN)


def bench_rows(case, policy) -> list[dict]:
    return [
        {
            "prompt_id": prompt["id"],
            "step_tree": [step.tree for step in run.steps],
            "step_accepted": [step.accepted for step in run.steps],
            "step_signal": [None] * len(run.steps),
        }
        for prompt, run in zip(case.prompts, case.live(policy), strict=True)
    ]


@pytest.mark.parametrize("name", ["dynamic", "marginal"])
def test_the_replay_check_holds_grown_trees_to_equality(traced, name):
    case, policy = traced("hydra"), POLICIES[name]
    traced_growth(case)
    rows = bench_rows(case, policy)
    assert replay_verdict(case.trace, policy, rows, 1e-6)["verdict"] == "equal"
    # another rule than the one that ran: more than a tie
    other = replace(policy, expand=0.6, nodes=2)
    assert replay_verdict(case.trace, other, rows, 1e-6)["verdict"] == "fail"
    # a decision that is as near as the limit allows is a tie
    rows[2]["step_tree"][1] += 1
    wide = replay_verdict(case.trace, policy, rows, 1.0)
    assert wide["verdict"] == "tie"
    assert wide["differences"][0]["what"] == "grown tree"


def test_replay_without_expansions_is_refused(traced):
    case = traced("medusa", "sample")
    case.trace.growth = None
    with pytest.raises(EntmtpError, match="needs a growth trace"):
        replay_policy(case.trace, POLICIES["dynamic"])


def test_a_fitted_policy_is_the_same_after_its_json(traced):
    import json

    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.config import PolicyConfig
    from entmtp.evaluation.schema import check_schema
    from entmtp.policy.fit import build_policy, fit_policy
    from entmtp.tree.bank import Bank, BankTree

    case = traced("hydra")
    traced_growth(case)
    latency = LatencyTable([1, 20], [10.0, 16.0], [1, 8], [[0.5, 0.7]] * DEPTH, 0.2, 10.1, "hydra")
    bank = Bank("t", "hydra", "measured", [BankTree(Tree.of([(0,)]), 1.5, 130.0, 11.6)])
    for kind in ("dynamic", "marginal"):
        fitted = fit_policy(PolicyConfig(name=kind, kind=kind, nodes=6), bank, case.trace, latency)
        check_schema(fitted, "policy")
        policy = build_policy(json.loads(json.dumps(fitted)), None)
        assert isinstance(policy, GrowingPolicy)
        assert policy.max_nodes == policy.nodes <= 6
        assert (policy.rate is None) == (kind == "dynamic")
        assert fitted["calib_tokens_per_s"] > 0
        assert fitted["star_tokens_per_s"] > 0
        assert [run.tokens for run in case.live(policy)] == [case.texts[prompt["id"]] for prompt in case.prompts]
        told = [[(step.tree, step.accepted) for step in run] for run in replay_policy(case.trace, policy)]
        assert told == [[(step.tree, step.accepted) for step in run.steps] for run in case.live(policy)]
    # costs are on the bank's clock: a bank that is twice as slow halves the prediction
    slow = Bank("t", "hydra", "measured", [BankTree(Tree.of([(0,)]), 1.5, 130.0, 23.2)])
    config = PolicyConfig(name="d", kind="dynamic", nodes=6)
    a, b = (fit_policy(config, of, case.trace, latency)["calib_tokens_per_s"] for of in (bank, slow))
    assert a == pytest.approx(2 * b)
