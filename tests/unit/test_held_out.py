"""Figures on held-out texts: what the trainer of draft heads chooses epochs by."""

from math import exp, log

import pytest
import torch
from train_fixture import make_config

from entmtp.heads.held_out import HeldOut, fixed_tree
from entmtp.heads.prefix import PrefixDecoder
from entmtp.heads.train import HeadsTrainer


def test_the_fixed_tree():
    assert fixed_tree(4).num_nodes == 16
    assert fixed_tree(2).depth == 2
    assert set(fixed_tree(2).paths) < set(fixed_tree(4).paths)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra_plus"])
def test_held_out_figures_are_the_straight_line(tiny, features, kind):
    """Rank by rank with the plain module in float32, then a walk over each text."""
    trainer = HeadsTrainer(tiny, features, make_config(kind))
    with torch.no_grad():
        for parameter in trainer.heads.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    held = HeldOut(features, trainer.config)
    token_map = trainer.heads.token_map.tolist()
    table = tiny.model.embed(torch.arange(tiny.vocab_size))
    projection = tiny.head_rows(torch.tensor(token_map))
    tree = set(fixed_tree(3).paths)
    got, at, doubtful = held.ranks(trainer), 0, 0
    with torch.inference_mode():
        for n in held.texts.tolist():
            text = features.texts[n]
            states = features.sequence(text).float()
            if trainer.heads.prefix is not None:
                states = PrefixDecoder(trainer.heads.prefix, torch.float32, "cpu").states(states)
            states = states[text.prompt_rows :]
            for i in range(text.end - text.start):
                for depth in range(1, 4):
                    rank = int(got[at + i, depth - 1])
                    if i + depth >= text.end - text.start:
                        assert rank == 8
                        continue
                    true = int(features.tokens[text.start + i + depth])
                    if true not in token_map:
                        assert rank == 8
                        continue
                    path = [table[features.tokens[text.start + i + d]][None] for d in range(depth)]
                    logits = (trainer.heads.features(depth, states[i : i + 1], path) @ projection.T)[0]
                    own = float(logits[token_map.index(true)])
                    expected = min(int((logits > own).sum()), 8)
                    near = int(((logits - own).abs() < 0.05 * float(logits.std())).sum()) - 1  # bfloat16 may swap these
                    assert abs(rank - expected) <= near
                    doubtful += rank != expected
            at += text.end - text.start
    assert at == len(got)
    assert doubtful < 0.2 * got.numel()
    figures = held.figures(trainer)
    accepted, steps, at = {"maths": 0, "chat": 0}, {"maths": 0, "chat": 0}, 0
    for n in held.texts.tolist():
        text = features.texts[n]
        i = 0
        while i < text.end - text.start - 1:
            path = tuple(got[at + i].tolist())
            count = max((d for d in range(1, 4) if path[:d] in tree), default=0)
            accepted[text.task] += count
            steps[text.task] += 1
            i += count + 1
        at += text.end - text.start
    expected = {task: accepted[task] / steps[task] for task in accepted}
    assert figures["num_accepted"] == pytest.approx(expected, abs=1e-4)
    mean = exp(sum(log(1 + value) for value in expected.values()) / 2)
    assert figures["accept_length"] == pytest.approx(mean, abs=1e-4)


def test_held_out_texts_end_at_the_budget(features):
    few = HeldOut(features, make_config(eval_positions=30))
    sizes = [features.texts[n].end - features.texts[n].start for n in few.texts.tolist()]
    assert 0 < sum(sizes) <= 30
    assert len(HeldOut(features, make_config()).texts) > len(few.texts)
