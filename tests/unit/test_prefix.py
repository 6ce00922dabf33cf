"""Hydra++'s prefix attention: in pieces as at once, packed as plain, padded as alone, and right after tree commits."""

from dataclasses import asdict

import pytest
import torch

from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder
from entmtp.heads.model import DraftHeads, HeadsFormat
from entmtp.heads.prefix import PrefixDecoder, make_prefix, prefix_like, prefix_states
from entmtp.policy.schedulers import LadderPolicy, Policy


@pytest.fixture
def layer(tiny_heads):
    return tiny_heads["hydra_plus"].prefix


@torch.inference_mode()
def test_states_in_pieces_equal_the_plain_module_at_once(tiny, layer):
    hidden = torch.randn(23, tiny.hidden_size)
    expected = layer(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
    decoder = PrefixDecoder(layer, tiny.dtype, tiny.device)
    torch.testing.assert_close(decoder.states(hidden), expected, rtol=1e-4, atol=1e-4)
    decoder.reserve(23)
    for _ in range(2):  # a second text starts afresh
        decoder.reset()
        pieces = [decoder.advance(part) for part in hidden.split([9, 1, 4, 1, 1, 5, 2])]
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_padding_and_other_texts_do_not_leak(tiny, layer):
    lengths = torch.tensor([3, 11, 7])
    texts = [torch.randn(int(n), tiny.hidden_size) for n in lengths]
    padded = torch.full((3, 11, tiny.hidden_size), 5.0)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    states = prefix_states(layer, padded, lengths)
    for row, text in zip(states, texts, strict=True):
        alone = layer(inputs_embeds=text[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(row[: len(text)], alone, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_fresh_layer_hands_the_hidden_state_through(tiny):
    form = HeadsFormat("hydra", 1, 1, tiny.hidden_size, 10, tiny.fingerprint, prefix=asdict(prefix_like(tiny.config)))
    heads = DraftHeads(form, torch.arange(10))
    heads.reset(0, hidden_rms=3.0)
    hidden = torch.randn(6, tiny.hidden_size)
    hidden *= 3 / hidden.square().mean(dim=-1, keepdim=True).sqrt()
    states = PrefixDecoder(heads.prefix, tiny.dtype, tiny.device).states(hidden)
    torch.testing.assert_close(states, hidden, rtol=1e-3, atol=1e-3)


def test_the_layer_follows_the_seed_and_moves_nobody_elses(tiny):
    form = HeadsFormat("hydra", 1, 1, tiny.hidden_size, 10, tiny.fingerprint, prefix=asdict(prefix_like(tiny.config)))

    def weights(seed: int) -> torch.Tensor:
        heads = DraftHeads(form, torch.arange(10))
        heads.reset(seed)
        return torch.cat([parameter.flatten() for parameter in heads.prefix.parameters()])

    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    make_prefix(prefix_like(tiny.config), tiny.hidden_size)
    assert torch.equal(torch.randn(4), expected)
    first = weights(5)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


@torch.inference_mode()
@pytest.mark.parametrize("policy", ["static", "with the empty tree"])
def test_after_every_commit_the_state_is_that_of_the_whole_text(tiny, drafters, prompts, trees, policy, monkeypatch):
    """Accepted nodes are scattered over the tree; rejected ones must leave no trace in the layer's cache."""
    drafter = drafters["hydra_plus"]
    decoder = Decoder(tiny, drafter, 160)
    chosen = Policy("s", [trees["full"]])
    if policy != "static":
        chosen = LadderPolicy("l", [trees["empty"], trees["random_1"], trees["full"]], depth=2, thresholds=[1e-3, 3e-2])
    seen, start = [], drafter.start

    def recorded(hidden: torch.Tensor, root: int) -> None:
        start(hidden, root)
        seen.append((decoder.cache.length, drafter.state.clone()))

    monkeypatch.setattr(drafter, "start", recorded)
    accepted = 0
    for prompt in prompts:
        seen.clear()
        made = decoder.generate(prompt, chosen, DecodingConfig(max_new_tokens=40))
        accepted += sum(step.accepted for step in made.steps)
        whole = drafter.states(tiny.prefill(prompt + made.tokens, tiny.new_cache(160)))
        assert len(seen) == len(made.steps)
        for length, state in seen:
            torch.testing.assert_close(state, whole[length - 1 : length], rtol=1e-3, atol=1e-3)
    assert accepted > 3
