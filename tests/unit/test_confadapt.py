"""ConfAdapt decoding against a loop without a cache, and against plain decoding where the two must agree."""

import pytest
import torch

from entmtp.config import DecodingConfig
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError

MASK_ID, BUDGET = 250, 24


def reference(target, prompt: list[int], rule: BlockRule) -> list[list[int]]:
    """Blocks by re-reading everything each time, masks appended."""
    text, blocks = list(prompt), []
    while True:
        ids = text + [MASK_ID] * (rule.k_max - 1)
        hidden = target.prefill(ids, target.new_cache(len(ids)))
        logits = target.model.logits(hidden[len(text) - 1 :]).float()
        logits[:, MASK_ID] = -torch.inf
        p, chosen = logits.softmax(dim=-1).max(dim=-1)
        p[0] = 1.0 if rule.first_free else p[0]
        kept = 1
        while kept < rule.k_max and (rule.threshold is None or bool((p[: kept + 1] >= rule.threshold).all())):
            kept += 1
        block = chosen[:kept].tolist()[: BUDGET - (len(text) - len(prompt))]
        stop = next((i for i, token in enumerate(block) if token in target.stop_ids), None)
        block = block if stop is None else block[: stop + 1]
        blocks.append(block)
        text += block
        if stop is not None or len(text) - len(prompt) >= BUDGET:
            return blocks


@pytest.mark.parametrize("k_max", [1, 2, 5])
@pytest.mark.parametrize("threshold", [None, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("first_free", [False, True])
def test_blocks_are_those_of_a_loop_without_cache(tiny, prompts, k_max, threshold, first_free):
    rule, decoder = BlockRule(k_max, threshold, first_free), BlockDecoder(tiny, MASK_ID, 96)
    for prompt in prompts:
        made = decoder.generate(prompt, rule, BUDGET)
        blocks = [step.tokens for step in made.steps]
        assert blocks == reference(tiny, prompt, rule)
        assert made.tokens == [token for block in blocks for token in block]
        assert [step.accepted + 1 for step in made.steps] == [len(block) for block in blocks]


def test_a_threshold_that_nothing_reaches_is_plain_decoding(tiny, prompts):
    plain = Decoder(tiny, None, 96)
    for prompt in prompts:
        expected = plain.plain(prompt, DecodingConfig(max_new_tokens=BUDGET)).tokens
        if MASK_ID in expected:
            continue
        for rule in (BlockRule(1, None), BlockRule(4, 1.0)):
            assert BlockDecoder(tiny, MASK_ID, 96).generate(prompt, rule, BUDGET).tokens == expected


def test_low_thresholds_commit_more_at_a_time(tiny, prompts):
    lengths = []
    for threshold in (1.0, 0.2, 0.02, None):
        runs = [BlockDecoder(tiny, MASK_ID, 96).generate(prompt, BlockRule(4, threshold), BUDGET) for prompt in prompts]
        lengths.append(sum(len(run.tokens) for run in runs) / sum(len(run.steps) for run in runs))
    assert lengths[0] == 1.0 < lengths[-1]
    assert lengths == sorted(lengths)


def test_a_free_first_prediction_lets_sure_masks_follow():
    confidence = [0.4, 0.95, 0.9, 0.5, 0.99]
    assert [BlockRule(5, threshold).keep(confidence) for threshold in (0.9, 0.4)] == [1, 5]
    assert [BlockRule(5, threshold, first_free=True).keep(confidence) for threshold in (0.9, 0.92, 0.97)] == [3, 2, 1]
    assert BlockRule(5, None, first_free=True).keep(confidence) == 5
    assert BlockRule(1, 0.9, first_free=True).keep([0.4]) == 1


def test_rules_and_room_are_checked(tiny):
    for k_max, threshold in ((0, None), (2, 0.0), (2, 1.1)):
        with pytest.raises(EntmtpError, match="k_max"):
            BlockRule(k_max, threshold)
    with pytest.raises(EntmtpError, match="mask token 9999"):
        BlockDecoder(tiny, 9999, 96)
    with pytest.raises(EntmtpError, match="cache rows"):
        BlockDecoder(tiny, MASK_ID, 30).generate([5, 6], BlockRule(4, 0.5), BUDGET)
    with pytest.raises(EntmtpError, match="prompt is empty"):
        BlockDecoder(tiny, MASK_ID, 96).generate([], BlockRule(4, 0.5), BUDGET)
