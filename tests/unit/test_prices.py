"""What steps cost on each text: one clock where one context was measured, each text's own where several were."""

from dataclasses import replace

import numpy as np
import pytest
from test_fit import STEP_MS, TREES, make_bank, make_latency, make_trace
from test_science import FRONTIER, fitted

from entmtp.calibration.growth import columns, join
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import self_rollout
from entmtp.config import PolicyConfig
from entmtp.errors import EntmtpError
from entmtp.policy.fit import fit_policy, replayed_speed
from entmtp.science.prices import Texts
from entmtp.tree.topology import Tree

TABLE = {
    "arch": "hydra", "overhead_ms": 0.3, "plain_ms": 9.0, "signal_ms": 0.1, "grow_ms": 0.2,
    "contexts": [300, 100], "forward": {"tokens": [1, 5], "ms": [8.5, 11.5]},
    "forward_by_context": [[9.0, 13.0], [8.0, 10.0]], "propose": {"rows": [1, 4], "ms": [[0.5, 0.5]] * 2},
}  # fmt: skip


def test_a_table_of_several_contexts_is_read_on_the_line_between_them():
    table = LatencyTable.from_json(TABLE)
    assert table.contexts == [100, 300]  # in order, whatever the file's
    assert table.at(100).forward_ms == [8.0, 10.0] and table.at(300).forward_ms == [9.0, 13.0]
    assert table.at(200).forward_ms == table.forward_ms == [8.5, 11.5]
    assert table.at(500).forward_ms == [10.0, 16.0]  # the line goes on
    assert table.at(0).forward_ms == [7.5, 8.5]
    noisy = replace(table, by_context=[[8.0, 10.0], [7.9, 13.0]])
    assert noisy.at(900).forward_ms == [7.9, 13.0 + 3 * 3.0]  # noise makes no long context cheaper
    assert noisy.mean_context == 200
    assert table.at(300).plain_ms == 9.0 + 0.5 and table.at(200).plain_ms == table.plain_ms
    four = Tree.of([(0,), (1,), (2,), (3,)])
    assert table.at(300).step(four) - table.at(100).step(four) == pytest.approx(3.0)
    one = make_latency()
    assert one.at(700) is one  # a single context knows no other


@pytest.mark.parametrize("key", ["signal_ms", "grow_ms"])
def test_a_table_that_prices_no_scheduler_is_refused(key):
    with pytest.raises(EntmtpError, match=f"without '{key}'.*measure it again"):
        LatencyTable.from_json({name: value for name, value in TABLE.items() if name != key})


def test_with_one_context_texts_cost_what_the_whole_split_does():
    trace, bank, latency = make_trace(3), make_bank(), make_latency()
    texts = Texts.of(trace, bank, latency, {}, {prompt.prompt_id: 500 for prompt in trace.prompts}, 100.0)
    assert texts.tokens.tolist() == [len(prompt) - 1 for prompt in trace.prompts]
    for kind in ("ar", "star", "tau", "ladder", "cost_aware", "bandit"):
        policy = fitted(kind)
        speed = 1000 * texts.tokens.sum() / texts.milliseconds(policy).sum()
        assert speed == pytest.approx(replayed_speed(policy, bank, trace, latency)), kind
    assert texts.oracle(TREES).sum() == pytest.approx(
        1000 * texts.tokens.sum() / oracle(trace, TREES, STEP_MS).tokens_per_s
    )
    alone = texts.statics(TREES)
    assert alone.shape == (3, len(trace.prompts))
    assert alone.sum(axis=1) == pytest.approx(
        [self_rollout(trace, tree).steps * ms for tree, ms in zip(TREES, STEP_MS)]
    )
    assert (texts.oracle(TREES) <= alone.min(axis=0) + 1e-9).all()


def test_longer_contexts_make_larger_trees_dearer():
    trace, bank = make_trace(3), make_bank()
    by_context = [[7 + 0.3 * n for n in (1, 2, 3, 6, 8)], [9 + 0.7 * n for n in (1, 2, 3, 6, 8)]]
    latency = replace(make_latency(), contexts=[100, 300], by_context=by_context)
    short, long = (
        Texts.of(
            trace, bank, latency, {FRONTIER[-1]: 15.0}, {prompt.prompt_id: tokens for prompt in trace.prompts}, 100.0
        )
        for tokens in (80, 380)  # 40 tokens of text: contexts of 100 and 400
    )
    at_home = short.each[0].prices([*TREES, FRONTIER[-1]])
    assert at_home == pytest.approx([*STEP_MS, 15.0])  # where it was measured nothing moves
    here, there = latency.at(100), latency.at(400)
    expected = [ms * there.step(tree) / here.step(tree) for tree, ms in zip([*TREES, FRONTIER[-1]], at_home)]
    assert long.each[0].prices([*TREES, FRONTIER[-1]]) == pytest.approx(expected)
    ratio = long.milliseconds(fitted("star")) / short.milliseconds(fitted("star"))
    assert ratio == pytest.approx(np.full(len(trace.prompts), there.step(TREES[1]) / here.step(TREES[1])))
    assert (ratio > long.milliseconds(fitted("ar")) / short.milliseconds(fitted("ar"))).all()


def test_growing_policies_cost_each_text_its_own_part():
    trace = make_trace(1)
    shape = (len(trace.ranks), columns(1, 2, 2))
    rng = np.random.default_rng(0)
    first = rng.uniform(0.3, 0.8, (shape[0], 1))
    probability = np.concatenate([first, 0.3 * first, 0.7 * first, 0.2 * first], axis=1)
    parts = [
        {"probability": probability[a:b], "depth": np.tile(np.array([1, 1, 2, 2], np.int8), (b - a, 1)),
         "parent": np.tile(np.array([-1, -1, 0, 0], np.int16), (b - a, 1)),
         "on_path": np.column_stack([trace.ranks[a:b, 0] == 0, trace.ranks[a:b, 0] == 1,
                                     (trace.ranks[a:b] == 0).all(axis=1), np.zeros(b - a, bool)])}
        for a, b in zip(trace.bounds[:-1], trace.bounds[1:])
    ]  # fmt: skip
    trace.growth = join(parts, 1, 2)
    bank, latency = make_bank(), make_latency()
    policy = fit_policy(PolicyConfig(name="m", kind="marginal", nodes=4), bank, trace, latency)
    texts = Texts.of(trace, bank, latency, {})
    ms = texts.milliseconds(policy)
    assert 1000 * texts.tokens.sum() / ms.sum() == pytest.approx(replayed_speed(policy, bank, trace, latency))
    trace.growth = None
    with pytest.raises(EntmtpError, match="needs a growth trace"):
        texts.milliseconds(policy)
