"""Rank traces against straight-line computations with the unpacked heads, and against the drafter itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from entmtp.calibration.traces import COLUMNS, trace_text
from entmtp.decoding.engine import make_chooser
from entmtp.decoding.sampling import Chooser
from entmtp.errors import EntmtpError
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

ARCHS, MODES = ("medusa", "hydra", "hydra_plus"), ("greedy", "sample")
WIDTH, DEPTH = 16, 4


@torch.inference_mode()
def hidden_states(case, prompt, prefix=None) -> torch.Tensor:
    """Row i chose text token i. With a prefix layer: its outputs instead, by the plain module."""
    text = case.texts[prompt["id"]]
    hidden = case.target.prefill(prompt["token_ids"] + text, case.target.new_cache(160))
    if prefix is not None:
        hidden = prefix(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
    return hidden[len(prompt["token_ids"]) - 1 : -1]


@torch.inference_mode()
def head_logits(case, heads, hidden, path: list[int]) -> torch.Tensor:
    """Draft logits of head len(path) after the token path, root first, with the plain module."""
    embeddings = [case.target.model.embed(torch.tensor([token])) for token in path]
    features = heads.features(len(path), hidden[None], embeddings)  # `hidden`: a row of hidden_states
    return F.linear(features, case.target.head_rows(heads.token_map.long()))[0]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_and_gaps_equal_the_straight_line(traced, tiny_heads, arch, mode):
    case, heads = traced(arch, mode), tiny_heads[arch]
    token_map = heads.token_map.tolist()
    inside = 0
    for prompt in case.prompts:
        text, hidden = case.texts[prompt["id"]], hidden_states(case, prompt, heads.prefix)
        rows = case.frame[case.frame.prompt_id == prompt["id"]]
        assert rows.position.tolist() == list(range(len(text)))
        assert rows.token.tolist() == text
        for i, (ranks, gaps) in enumerate(zip(rows.ranks, rows.gaps, strict=True)):
            for d in range(1, DEPTH + 1):
                if i + d >= len(text):
                    assert (ranks[d - 1], gaps[d - 1]) == (WIDTH, float("inf"))
                    continue
                if text[i + d] not in token_map:
                    assert (ranks[d - 1], gaps[d - 1]) == (WIDTH, float("inf"))
                    continue
                logits = head_logits(case, heads, hidden[i], text[i : i + d])
                own = logits[token_map.index(text[i + d])]
                distance = (logits - own).abs().sort().values[1]
                assert gaps[d - 1] == pytest.approx(float(distance), abs=1e-4)
                if distance > 1e-3:  # no numerical tie
                    assert ranks[d - 1] == min(int((logits > own).sum()), WIDTH)
                    inside += ranks[d - 1] < WIDTH
    assert inside > 30


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_ranks_are_places_in_the_trees_that_the_drafter_fills(traced, arch):
    """Full-width last level below the true path: the true token stands at its rank, or nowhere."""
    case = traced(arch)
    found = [0] * (DEPTH + 1)
    for prompt in case.prompts:
        ids, text = prompt["token_ids"], case.texts[prompt["id"]]
        hidden = case.target.prefill(ids + text, case.target.new_cache(160))
        for i, row in enumerate(case.trace.prompts[case.prompts.index(prompt)].ranks.tolist()):
            case.drafter.reset()
            case.drafter.start(hidden[: len(ids) + i], text[i])
            for d in range(1, min(DEPTH, len(text) - 1 - i) + 1):
                before = tuple(row[: d - 1])
                if WIDTH in before:
                    break
                prefixes = [before[:k] for k in range(1, d)]
                tree = Tree.of(prefixes + [(*before, rank) for rank in range(WIDTH)])
                tokens = case.drafter.fill(CompiledTree(tree, 1, 8, torch.float32, "cpu")).tolist()
                for k, prefix in enumerate(prefixes, 1):
                    assert tokens[tree.paths.index(prefix) + 1] == text[i + k]
                last = {path[-1]: tokens[n] for n, path in enumerate(tree.paths, 1) if len(path) == d}
                assert len(set(last.values())) == WIDTH  # siblings differ
                places = [rank for rank, token in last.items() if token == text[i + d]]
                assert places == ([row[d - 1]] if row[d - 1] < WIDTH else [])
                found[d] += bool(places)
    assert found[1] > 10
    assert found[2] > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_path_values_and_entropy_equal_the_straight_line(traced, tiny_heads, arch):
    case, heads = traced(arch), tiny_heads[arch]
    token_map = heads.token_map.tolist()
    for prompt, trace in zip(case.prompts, case.trace.prompts, strict=True):
        text, hidden = case.texts[prompt["id"]], hidden_states(case, prompt)
        states = hidden_states(case, prompt, heads.prefix)
        with torch.inference_mode():
            base = case.target.model.logits(hidden).double().softmax(dim=-1)
        for i in range(0, len(text), 3):
            p = base[i].numpy()
            assert trace.entropy[i] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-4)
            value, path = p.max(), [text[i]]
            assert trace.path_values[i, 0] == pytest.approx(value, rel=1e-4)
            for d in range(1, DEPTH + 1):  # complete at every position, at the text's end too
                logits = head_logits(case, heads, states[i], path)
                value *= float(logits.softmax(dim=-1).max())
                path.append(token_map[int(logits.argmax())])
                assert trace.path_values[i, d] == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mode", MODES)
def test_choice_margin_says_that_the_target_would_choose_the_text(traced, arch, mode):
    case = traced(arch, mode)
    assert case.frame.choice_margin.min() > 0
    prompt = case.prompts[2]
    text = list(case.texts[prompt["id"]])
    true, text[5] = text[5], (text[5] + 1) % case.target.vocab_size
    chooser = make_chooser(case.target, case.decoding, prompt["id"])
    rows = trace_text(case.target, case.drafter, case.decoder.cache, "x", prompt["token_ids"], text, chooser)
    margins = [row["choice_margin"] for row in rows]
    assert all(margin > 0 for margin in margins[:5])
    assert margins[5] < 0
    with torch.inference_mode():
        logits = case.target.model.logits(hidden_states(case, prompt)[5:6])
    scores = chooser.scores(logits, [len(prompt["token_ids"]) + 5])[0]
    assert margins[5] == pytest.approx(float(scores[text[5]] - scores[true]), abs=1e-4)


def test_one_token_text_and_empty_text(traced):
    case = traced()
    rows = trace_text(case.target, case.drafter, case.decoder.cache, "x", [5, 6], [9], Chooser())
    assert len(rows) == 1
    assert list(rows[0]) == COLUMNS
    assert rows[0]["ranks"] == [WIDTH] * DEPTH
    with pytest.raises(EntmtpError, match="x: empty continuation"):
        trace_text(case.target, case.drafter, case.decoder.cache, "x", [5, 6], [], Chooser())
