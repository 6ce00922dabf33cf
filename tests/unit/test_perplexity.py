"""Perplexity under the target against transformers."""

import pytest
import torch

from entmtp.evaluation import perplexity
from entmtp.evaluation.perplexity import policy_nll, text_nll


@pytest.fixture(scope="module")
def model(tiny_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()


@torch.inference_mode()
def straight_nll(model, prompt: list[int], tokens: list[int]) -> float:
    total = 0.0
    for place in range(len(tokens)):  # one forward a token
        logits = model(torch.tensor([prompt + tokens[:place]])).logits[0, -1]
        total -= float(logits.log_softmax(dim=-1)[tokens[place]])
    return total


@pytest.mark.parametrize("tokens", [[9], [4, 4, 250, 17, 3, 88]])
def test_nll_of_a_text_equals_transformers(tiny, model, prompts, tokens):
    for prompt in prompts:
        cache = tiny.new_cache(64)
        cache.length = 5  # a used cache
        assert text_nll(tiny, cache, prompt, tokens) == pytest.approx(straight_nll(model, prompt, tokens), rel=1e-4)


def test_policies_sum_nats_and_count_tokens(tiny, model, prompts, monkeypatch):
    rows = [{"id": "a", "token_ids": prompts[1]}, {"id": "b", "token_ids": prompts[2]}]
    same, other, long = [5, 6, 7], [5, 6, 8], [9, 10, 11, 12]
    bench = [
        {"policy": "ar", "prompt_id": "a", "tokens": same},
        {"policy": "ar", "prompt_id": "b", "tokens": long},
        {"policy": "hydra", "prompt_id": "a", "tokens": same},
        {"policy": "hydra", "prompt_id": "b", "tokens": same},  # the same tokens after another prompt
        {"policy": "typical", "prompt_id": "a", "tokens": other},
    ]
    scored = []
    original = perplexity.text_nll

    def counted(target, cache, prompt, tokens):
        scored.append(tokens)
        return original(target, cache, prompt, tokens)

    monkeypatch.setattr(perplexity, "text_nll", counted)
    found = policy_nll(tiny, tiny.new_cache(64), bench, rows)
    assert len(scored) == 4  # the text that two policies share is scored once
    a, b = prompts[1], prompts[2]
    expected = {
        "ar": (straight_nll(model, a, same) + straight_nll(model, b, long), 7),
        "hydra": (straight_nll(model, a, same) + straight_nll(model, b, same), 6),
        "typical": (straight_nll(model, a, other), 3),
    }
    assert {p: v["tokens"] for p, v in found.items()} == {p: tokens for p, (_, tokens) in expected.items()}
    for policy, (nll, _) in expected.items():
        assert found[policy]["nll"] == pytest.approx(nll, rel=1e-4)
