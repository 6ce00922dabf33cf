"""Latency table, predicted and measured throughput, short list and bank."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from entmtp.calibration.latency import _live, _schedulers, measure_latency
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import PromptTrace, Trace, self_rollout
from entmtp.calibration.throughput import choose_shortlist, measure, predict, timing_prompts
from entmtp.config import BankConfig, DecodingConfig, LatencyConfig
from entmtp.decoding.engine import Decoder, Generation, Step
from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import Policy
from entmtp.tree.bank import build_bank
from entmtp.tree.topology import Tree

CHAIN = Tree.of([(0,), (0, 0), (0, 0, 0)])
BUSHY = Tree.of([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1)])


def table(arch: str) -> LatencyTable:
    """forward(n) = 10 + n; head d on m rows costs d + m / 10."""
    rows = [1, 4]
    propose = [[d + m / 10 for m in rows] for d in (1, 2, 3)]
    return LatencyTable([1, 5, 9], [11.0, 15.0, 19.0], rows, propose, 0.5, 10.0, arch)


def test_latency_of_a_hydra_step_is_forward_plus_every_head_evaluation():
    latency = table("hydra")
    assert latency.forward(3) == 13.0  # between two sizes
    assert latency.step(Tree(())) == 10.0  # plain decoding, no signal
    assert latency.step(CHAIN) == pytest.approx(14 + 0.5 + 1.1 + 2.1 + 3.1)
    # head 2 sees two parents; head 3 one
    assert latency.step(BUSHY) == pytest.approx(17 + 0.5 + 1.1 + 2.2 + 3.1)


def test_a_signal_shares_its_evaluations_with_the_greedy_path():
    latency = table("hydra")
    assert latency.step(Tree(()), 0) == pytest.approx(11.5)
    assert latency.step(Tree(()), 2) == pytest.approx(11.5 + 1.1 + 2.1)
    assert latency.step(CHAIN, 0) == latency.step(CHAIN)
    assert latency.step(CHAIN, 3) == pytest.approx(latency.step(CHAIN))  # all of it is the tree's own greedy path
    assert latency.step(Tree.of([(0,)]), 3) == pytest.approx(12 + 0.5 + 1.1 + 2.1 + 3.1)
    # head 2 is evaluated on two parents for the tree and once more for the signal
    assert latency.step(BUSHY, 2) == pytest.approx(latency.step(BUSHY) + 2.1)


def test_latency_of_a_medusa_step_is_one_evaluation():
    latency = table("medusa")
    assert latency.step(CHAIN) == latency.step(CHAIN, 3) == pytest.approx(14 + 0.5 + 1.1)
    assert latency.step(Tree(())) == 10.0
    assert latency.step(Tree(()), 2) == pytest.approx(11.5 + 1.1)


@pytest.mark.parametrize("arch", ["medusa", "hydra"])
def test_measured_table_has_its_shape_and_round_trips(tiny, drafters, prompts, arch):
    decoder = Decoder(tiny, drafters[arch], 120)
    config = LatencyConfig(sizes=[1, 3, 8], widths=[1, 4], contexts=[5, 60], repeats=2)
    value = measure_latency(decoder, config, prompts[2], DecodingConfig(max_new_tokens=8))
    assert value["forward"]["tokens"] == [1, 3, 8]
    assert np.allclose(value["forward"]["ms"], np.mean(value["forward_by_context"], axis=0))
    latency = LatencyTable.from_json(value)
    assert np.shape(latency.propose_ms) == (4, 2)
    assert min(*latency.forward_ms, *np.ravel(latency.propose_ms), latency.plain_ms) > 0
    assert latency.overhead_ms >= 0
    assert value["signal_ms"] == latency.signal_ms >= 0 and value["grow_ms"] == latency.grow_ms >= 0
    expected = latency.propose_ms[0][0] + latency.forward_ms[0] + latency.overhead_ms + latency.signal_ms
    assert latency.step(Tree(()), 1) == pytest.approx(expected)
    # measuring leaves the decoder fit for use
    assert decoder.generate(prompts[0], Policy("t", [CHAIN]), DecodingConfig(max_new_tokens=9)).tokens


def test_predicted_throughput_is_tokens_a_step_over_step_time(traced):
    trace, latency = traced().trace, table("hydra")
    rows = predict([Tree(()), CHAIN, BUSHY], trace, latency)
    assert [row["num_nodes"] for row in rows] == [0, 3, 6]
    assert [row["depth"] for row in rows] == [0, 3, 3]
    for row, tree in zip(rows, (Tree(()), CHAIN, BUSHY), strict=True):
        assert Tree.of(row["paths"]) == tree
        assert row["accept_length"] == self_rollout(trace, tree).accept_length
        assert row["predicted_tokens_per_s"] == pytest.approx(1000 * row["accept_length"] / latency.step(tree))
        assert row["measured_tokens_per_s"] is None
    assert rows[0]["predicted_tokens_per_s"] == pytest.approx(100.0)


def row(nodes: int, speed: float, accept_length: float = 2.0, measured_ms: float | None = None, first: int = 0) -> dict:
    return {
        "paths": [[first + rank] for rank in range(nodes)] if not first else [[0], *([0, r] for r in range(nodes - 1))],
        "num_nodes": nodes,
        "accept_length": accept_length,
        "predicted_step_ms": 1000 * accept_length / speed,
        "predicted_tokens_per_s": speed,
        "measured_step_ms": measured_ms,
    }


def test_shortlist_is_the_predicted_pareto_front_one_tree_a_size():
    rows = [row(0, 100), row(1, 110), row(2, 105), row(3, 120), row(3, 125, first=1), row(5, 90), row(8, 130)]
    assert choose_shortlist(rows, 3) == [1, 4, 6]
    # when the front is longer than the list, its fastest trees stay
    assert choose_shortlist(rows, 2) == [4, 6]
    # when it is shorter, the fastest others follow, smallest first in the list
    assert choose_shortlist(rows, 4) == [1, 2, 4, 6]
    assert choose_shortlist(rows, 9) == [1, 2, 4, 5, 6]
    assert choose_shortlist([row(0, 100)], 3) == []


def test_bank_joins_measured_step_time_with_the_replayed_accept_length():
    rows = [row(0, 100, 1.0, 10.0), row(2, 120, 1.8, 12.0), row(4, 300, 2.2, None), row(6, 100, 2.4, 15.0)]
    bank = build_bank(rows, BankConfig(basis="measured"))
    assert [(e.tree.num_nodes, e.step_ms) for e in bank] == [(0, 10.0), (2, 12.0), (6, 15.0)]
    assert [e.tokens_per_s for e in bank] == pytest.approx([100.0, 150.0, 160.0])
    predicted = build_bank(rows, BankConfig(basis="predicted"))
    assert [e.tree.num_nodes for e in predicted] == [0, 2, 4]
    without = build_bank(rows, BankConfig(basis="measured", empty_tree=False))
    assert [e.tree.num_nodes for e in without] == [2, 6]
    assert [e.tree.num_nodes for e in build_bank(rows, BankConfig(min_gain=20.0))] == [0, 2]


def test_measured_rows_and_the_live_check(traced):
    case = traced()
    rows = predict([Tree(()), CHAIN, BUSHY], case.trace, table("hydra"))
    compared = measure(case.decoder, rows, [1, 2], case.prompts, case.decoding, "t", check=case.trace)
    assert compared["different"] == 0
    assert compared["steps"] == sum(self_rollout(case.trace, tree).steps for tree in (CHAIN, BUSHY))
    tokens = sum(len(text) - 1 for text in case.texts.values())
    for measured, tree in zip(rows, (Tree(()), CHAIN, BUSHY), strict=True):
        steps = self_rollout(case.trace, tree).steps
        seconds = measured["measured_seconds"]
        assert measured["measured_tokens"] == tokens
        assert measured["measured_tokens_per_s"] == pytest.approx(tokens / seconds)
        assert measured["measured_step_ms"] == pytest.approx(1000 * seconds / steps)


def test_the_live_check_finds_a_wrong_trace(traced):
    case = traced()
    prompts = []
    for prompt in case.trace.prompts:
        ranks = prompt.ranks.copy()
        ranks[0] = 16  # the first step of every text accepts nothing in this trace
        prompts.append(PromptTrace(prompt.prompt_id, ranks, prompt.path_values, prompt.entropy, prompt.gaps))
    wide = Tree.of([(rank,) for rank in range(16)])
    starts = [int(prompt.ranks[0, 0]) for prompt in case.trace.prompts]
    assert min(starts) < 16
    rows = predict([Tree(()), wide], case.trace, table("hydra"))
    compared = measure(case.decoder, rows, [1], case.prompts, case.decoding, "t", check=Trace(prompts))
    assert compared["different"] > 0


class FakeDecoder:
    """Records the order of runs; every run takes one step of ten milliseconds for each of its tokens."""

    def __init__(self, tokens: int = 5):
        self.calls, self.tokens = [], tokens

    def _run(self, name: object, prompt_id: str) -> Generation:
        self.calls.append((prompt_id, name))
        steps = [Step(0, 0, 0, 0, float("nan"), 0.01, 0.0, 0.0, [1])] * (self.tokens - 1)
        return Generation([1] * self.tokens, 100.0, 0.01 * len(steps), steps)

    def plain(self, prompt, decoding, prompt_id=""):
        return self._run("plain", prompt_id)

    def generate(self, prompt, policy, decoding, prompt_id=""):
        return self._run(policy.trees[0].num_nodes, prompt_id)


def test_measuring_rotates_the_order_and_leaves_out_prefill_and_warm_up():
    rows = [row(0, 100), row(2, 110), row(5, 120)]
    decoder = FakeDecoder()
    prompts = [{"id": f"p{number}", "token_ids": [1]} for number in range(3)]
    measure(decoder, rows, [1, 2], prompts, DecodingConfig(), "t")
    timed = [call for call in decoder.calls if call[0]][-9:]
    assert [name for prompt_id, name in timed if prompt_id == "p0"] == ["plain", 2, 5]
    assert [name for prompt_id, name in timed if prompt_id == "p1"] == [2, 5, "plain"]
    assert [name for prompt_id, name in timed if prompt_id == "p2"] == [5, "plain", 2]
    assert len(decoder.calls) == 9 + 3
    assert all(r["measured_tokens"] == 12 for r in rows)
    assert all(r["measured_tokens_per_s"] == pytest.approx(100.0) for r in rows)
    with pytest.raises(EntmtpError, match="too short to time"):
        measure(FakeDecoder(tokens=1), rows, [1], prompts, DecodingConfig(), "t")


def test_timing_prompts_are_a_seeded_sample():
    prompts = [{"id": number} for number in range(20)]
    chosen = timing_prompts(prompts, 6, 1)
    assert chosen == timing_prompts(prompts, 6, 1)
    assert chosen != timing_prompts(prompts, 6, 2)
    assert len({p["id"] for p in chosen}) == 6
    assert len(timing_prompts(prompts[:3], 6, 1)) == 3


def test_what_choosing_takes_is_the_median_beyond_a_single_trees():
    taken = {"static": [1e-6] * 3, "signal": [5e-6, 9e-6, 1.0], "grow": [3e-5] * 3}

    def run(prompt, policy, decoding):
        return SimpleNamespace(steps=[SimpleNamespace(scheduler_seconds=seconds) for seconds in taken[policy.name]])

    decoder = SimpleNamespace(drafter=SimpleNamespace(depth=4, width=16), generate=run)
    assert _schedulers(decoder, [5], DecodingConfig()) == pytest.approx({"signal_ms": 0.008, "grow_ms": 0.029})


def test_the_overhead_is_what_forwards_and_heads_leave_of_live_steps():
    """Chains of 1, 2 and 3 drafts cost 13.1, 16.2 and 20.3 ms by the table without any."""
    latency = replace(table("hydra"), overhead_ms=0.0)
    known = {1: 12 + 1.1, 2: 13 + 1.1 + 2.1, 3: 14 + 1.1 + 2.1 + 3.1}
    extra = {1: 0.3, 2: 0.9, 3: 0.4}

    def run(prompt, policy, decoding):
        depth = policy.trees[0].num_nodes
        seconds = (known[depth] + extra[depth]) / 1000
        return SimpleNamespace(steps=[SimpleNamespace(seconds=seconds)] * 3)

    plain = SimpleNamespace(steps=[SimpleNamespace(seconds=s) for s in (0.009, 0.010, 0.5)])
    decoder = SimpleNamespace(drafter=SimpleNamespace(depth=3), generate=run, plain=lambda *_: plain)
    assert _live(decoder, latency, [5], DecodingConfig()) == pytest.approx((10.0, 0.4))


def test_what_a_scheduler_takes_for_itself_is_part_of_its_steps():
    plain = table("hydra")
    priced = replace(plain, signal_ms=0.25)
    assert priced.step(CHAIN) == plain.step(CHAIN)
    assert priced.step(CHAIN, 2) == pytest.approx(plain.step(CHAIN, 2) + 0.25)
    assert priced.step(Tree(()), 0) == pytest.approx(plain.step(Tree(()), 0) + 0.25)


def test_beyond_the_largest_size_the_last_slope_goes_on():
    latency = table("hydra")  # 15 ms for 5 tokens, 19 for 9
    assert latency.forward(9) == 19.0 and latency.forward(13) == 23.0
    falling = LatencyTable([1, 5, 9], [11.0, 15.0, 14.0], [1], [[1.0]], 0.5, 10.0, "hydra")
    assert falling.forward(20) == 14.0  # noise makes nothing cheaper
    assert LatencyTable([1], [11.0], [1], [[1.0]], 0.5, 10.0, "hydra").forward(3) == 11.0
