"""How draft heads are judged: evaluation rows, the self-test at load, the draft vocabulary's curve."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import PromptTrace, Trace
from entmtp.config import CorpusConfig, HeadsConfig, PlotConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.evaluation import figures_machine as draw
from entmtp.evaluation.schema import check_schema
from entmtp.heads import self_test, vocabulary
from entmtp.heads.evaluate import best_trees, confirm_live, evaluate_heads, hit_rates, propose_ms, replayed
from entmtp.heads.features import Features, compute_shard
from entmtp.tree.topology import Tree

CHAIN = Tree.of([(0,), (0, 0)])
WIDE = Tree.of([(0,), (1,), (2,), (3,)])
BIG = Tree.of([(a,) for a in range(4)] + [(a, b) for a in range(4) for b in range(3)])


def trace(*prompts: list[list[int]]) -> Trace:
    made = []
    for number, ranks in enumerate(prompts):
        array = np.array(ranks)
        nothing = np.zeros((len(array), array.shape[1] + 1))
        made.append(PromptTrace(f"p{number}", array, nothing, nothing[:, 0], nothing[:, 1:]))
    return Trace(made)


# 9 stands for "not a candidate"
EASY = [[0, 0], [0, 0], [1, 9], [0, 9], [9, 9]]
HARD = [[3, 1], [9, 0], [2, 2], [9, 9]]


def test_the_best_tree_of_each_size_is_chosen_on_calibration_texts():
    chain_wins = best_trees([CHAIN, WIDE, BIG, Tree(())], trace(EASY))
    assert chain_wins[4] == CHAIN
    assert chain_wins[64] == CHAIN  # BIG accepts no more
    assert best_trees([WIDE, BIG], trace(HARD))[64] == BIG
    assert best_trees([CHAIN, WIDE], trace(HARD))[8] == WIDE
    assert best_trees([Tree(())], trace(EASY)) == {}
    # of two equal trees the smaller one
    assert best_trees([BIG, Tree.of([*BIG.paths, (3, 3)])], trace(EASY))[64] == BIG


def test_replayed_counts_are_each_prompts_own():
    assert replayed(trace(EASY, HARD), CHAIN) == ([2 + 1, 0], [2, 3])  # 0 -> 3 -> 5; no hit: 0 1 2
    assert replayed(trace(HARD), WIDE) == ([1 + 1], [2])


def test_hit_rates_skip_what_lies_beyond_the_text():
    rates = hit_rates(trace(EASY, HARD))
    assert rates["top1"] == pytest.approx([3 / 7, 3 / 5])  # heads 1 and 2 have 4 + 3 and 3 + 2 positions
    assert rates["top5"] == pytest.approx([6 / 7, 5 / 5 - 1 / 5])


@pytest.fixture(scope="module")
def latency() -> LatencyTable:
    return LatencyTable([1, 65], [10.0, 20.0], [1, 64], [[1.0, 2.0]] * 4, 0.5, 10.0, "hydra")


@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
def test_rows_hold_and_live_steps_confirm_them(traced, trees, latency, arch):
    case = traced(arch)
    found = [trees["random_0"], trees["random_1"], trees["chain_4"], trees["fixed_16"], trees["full"]]
    options = {"bootstrap": 100, "seed": 0, "live_prompts": 3, "repeats": 2}
    rows = evaluate_heads(
        case.decoder, found, case.trace, case.trace, case.prompts, latency, case.decoding, options
    )  # fmt: skip
    whole = [{"heads": arch, "task": "t", **row} for row in rows]
    check_schema({"size": 16, "geometric_mean_num_accepted": {arch: 1.0}, "rows": whole, "provenance": {}}, "heads")
    by_size = {row["size"]: row for row in rows}
    assert by_size[64]["num_accepted"] >= by_size[16]["num_accepted"] >= by_size[4]["num_accepted"]
    row = by_size[16]
    assert row["low"] <= row["num_accepted"] <= row["high"]
    assert row["nodes"] <= 16
    assert row["live"]["prompts"] == 3
    assert row["live"]["prompts_that_differ"] == 0
    assert row["predicted_speedup"] == pytest.approx(row["accept_length"] * 10.0 / row["step_ms"])
    assert all(other["live"] is None for size, other in by_size.items() if size != 16)
    assert all(t5 >= t1 for t1, t5 in zip(row["top1"], row["top5"], strict=True))


def test_a_live_run_that_differs_is_noticed(traced, trees):
    case = traced("hydra")
    wrong = Trace([replace(prompt, ranks=np.roll(prompt.ranks, 1, axis=0)) for prompt in case.trace.prompts])
    told = confirm_live(case.decoder, trees["full"], wrong, case.prompts, case.decoding)
    assert told["prompts_that_differ"] > 0


def test_a_numerical_tie_is_no_difference_and_typical_texts_are_not_compared(traced, trees, latency):
    case = traced("hydra")
    rolled = [replace(prompt, ranks=np.roll(prompt.ranks, 1, axis=0)) for prompt in case.trace.prompts]
    near = Trace([replace(prompt, gaps=np.zeros_like(prompt.gaps)) for prompt in rolled])
    assert confirm_live(case.decoder, trees["full"], near, case.prompts, case.decoding)["prompts_that_differ"] == 0
    options = {"bootstrap": 10, "seed": 0, "live_prompts": 1, "repeats": 1}
    typical = replace(case.decoding, mode="typical")
    rows = evaluate_heads(case.decoder, [trees["fixed_16"]], case.trace, case.trace, case.prompts, latency, typical,
                          options)  # fmt: skip
    assert [row["live"] for row in rows if row["size"] == 16] == [None]


def test_no_tree_is_an_error(traced, latency):
    case = traced("hydra")
    with pytest.raises(EntmtpError, match="no tree with nodes"):
        evaluate_heads(case.decoder, [Tree(())], case.trace, case.trace, case.prompts, latency, case.decoding, {})


def test_proposals_are_timed_with_the_state_of_one_more_token(tiny, drafters, trees, prompts, monkeypatch):
    drafter, sizes = drafters["hydra_plus"], []
    start = drafter.start
    monkeypatch.setattr(drafter, "start", lambda hidden, root: sizes.append(len(hidden)) or start(hidden, root))
    assert propose_ms(Decoder(tiny, drafter, 60), trees["full"], prompts[2], 3) > 0
    assert Counter(sizes) == {8: 5, 1: 5}  # the prompt's other 8 tokens, then the timed one


# --- self-test --------------------------------------------------------------------------------------------------


class Knowing:
    """Heads that know the target: their logits for a path are the target's own after it."""

    def __init__(self, target, offset: int = 0):
        self.target, self.depth, self.width, self.offset = target, 2, 8, offset
        self.token_map = torch.arange(target.vocab_size)

    def states(self, hidden):
        return hidden

    def candidates(self, logits):
        return logits.topk(self.width, dim=-1).indices

    def path_logits(self, depth, state, paths):
        logits = torch.zeros(len(paths), self.target.vocab_size)
        for row, path in enumerate(paths.tolist()):
            at = self.text.index(path[0]) if path[0] in self.text else 0
            for place in range(len(self.text) - depth):
                if self.text[place : place + depth] == path:
                    at = place
            true = self.text[min(at + depth, len(self.text) - 1)]
            logits[row, (true + self.offset) % self.target.vocab_size] = 5.0
        return logits


@pytest.mark.parametrize(("offset", "plausible"), [(0, True), (1, False)])
def test_heads_that_do_not_fit_are_warned_about(tiny, capsys, offset, plausible):
    from entmtp.config import DecodingConfig
    from entmtp.tasks.prompts import encode

    heads = Knowing(tiny, offset)
    prompt = encode(tiny.tokenizer, [{"role": "user", "content": self_test.PROMPT}])
    heads.text = Decoder(tiny, None, 400).plain(prompt, DecodingConfig(max_new_tokens=self_test.TOKENS)).tokens
    accepted = self_test.warn_if_implausible(tiny, heads, "my heads")
    warned = capsys.readouterr().err
    assert (accepted >= self_test.IMPLAUSIBLE) == plausible
    assert ("warning: my heads accept only" in warned) == (not plausible)


# --- draft vocabulary -------------------------------------------------------------------------------------------


def test_the_vocabulary_curve_covers_more_and_more(tiny):
    rows = [{"key": f"{n:08x}/0", "task": "t", "prompt_ids": [5], "tokens": [7] * 6 + [8] * 3 + [n % 40]}
            for n in (0, 1, 2**31, 2**32 - 1, 2**32 - 2)]  # fmt: skip
    features = Features([compute_shard(tiny, rows, CorpusConfig(held_out=0.3, top_k=2))])
    ordered = vocabulary.of_training_text(features, tiny.vocab_size)
    assert ordered[0][:2].tolist() == [7, 8] and sorted(ordered[0].tolist()) == list(range(tiny.vocab_size))
    curve = vocabulary.vocabulary_curve(tiny, ordered, [1, 2, 64, 10**6], HeadsConfig(depth=3, width=4), 10.0, 2)
    assert [row["size"] for row in curve] == [1, 2, 64, tiny.vocab_size]
    assert [row["coverage"] for row in curve] == pytest.approx([0.6, 0.9, *[row["coverage"] for row in curve[2:]]])
    assert curve[-1]["coverage"] == 1.0
    a = vocabulary.ACCEPTANCE * 0.6
    assert curve[0]["tokens_per_step"] == pytest.approx(1 + a + a**2 + a**3)
    expected = curve[0]["tokens_per_step"] * 10 / (10 + 3 * curve[0]["projection_ms"])
    assert curve[0]["relative_speed"] == pytest.approx(expected)
    assert vocabulary.plain_step_ms(tiny, 3) > 0
    fig = draw.vocabulary_curve(curve, vocabulary.knee(curve), PlotConfig())
    assert list(fig.axes[0].lines[0].get_xdata()) == [row["size"] for row in curve]
    assert list(fig.axes[1].lines[0].get_ydata()) == [row["relative_speed"] for row in curve]


def test_the_vocabulary_of_heads_that_were_trained_elsewhere_covers_texts_of_tasks(tiny):
    texts = {"a": [[30, 30, 20], [10]], "b": [[5, 5, 30, 30]]}
    ordered = vocabulary.of_heads(torch.tensor([30, 20, 10], dtype=torch.int32), tiny.vocab_size, texts)
    assert ordered[0].tolist() == [30, 20, 10, *[n for n in range(tiny.vocab_size) if n not in (10, 20, 30)]]
    curve = vocabulary.vocabulary_curve(tiny, ordered, [1, 2, 3, 8, 9], HeadsConfig(depth=2, width=1), 10.0, 1)
    assert [row["coverage_by_task"]["a"] for row in curve] == [0.5, 0.75, 1, 1, 1]
    assert [row["coverage_by_task"]["b"] for row in curve] == [
        0.5,
        0.5,
        0.5,
        0.5,
        1,
    ]  # 30, 20, 10, 0, 1, 2, 3, 4, then 5
    assert [row["coverage"] for row in curve] == [0.5, 0.625, 0.75, 0.75, 1]


def test_the_knee_is_the_smallest_size_that_is_good_enough():
    speeds = {1024: 1.2, 2048: 1.4990, 4096: 1.5, 8192: 1.49}
    assert vocabulary.knee([{"size": size, "relative_speed": speed} for size, speed in speeds.items()]) == 2048
    assert vocabulary.knee([{"size": 512, "relative_speed": 1.0}]) == 512
