"""Through transformers' `generate(custom_generate=…)`: its own tokens, criteria and warpers, and refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from entmtp import custom_generate, load
from entmtp.errors import EntmtpError


class StopAfter(StoppingCriteria):
    """Ends the text at a token count that no step boundary is asked about."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.count)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 20},
        {"bad_words_ids": [[40], [50, 51]], "suppress_tokens": [77, 78]},
        {"eos_token_id": None},
        {"eos_token_id": list(range(30, 60))},
    ],
)
def test_generate_through_transformers_gives_its_own_tokens(lm, model, prompts, options):
    for prompt in prompts:
        ids = torch.tensor([prompt])
        plain = model.generate(ids, do_sample=False, max_new_tokens=30, **options)
        seen = []
        ours = model.generate(ids, do_sample=False, max_new_tokens=30, custom_generate=custom_generate, entmtp=lm,
                              on_tokens=seen.extend, **options)  # fmt: skip
        assert torch.equal(ours, plain)
        assert seen == plain[0, len(prompt) :].tolist()


def test_stopping_criteria_are_asked_after_every_token(lm, model, prompts):
    ids = torch.tensor([prompts[1]])
    for count in range(5, 14):
        criteria = StoppingCriteriaList([StopAfter(count)])
        made = [model.generate(ids, do_sample=False, max_new_tokens=30, stopping_criteria=criteria, **hook)
                for hook in ({}, {"custom_generate": custom_generate, "entmtp": lm})]  # fmt: skip
        assert torch.equal(*made) and made[0].shape[1] == count


def test_sampling_through_transformers_follows_its_seed_and_warpers(lm, model, tokenizer, run, prompts):
    ids = torch.tensor([prompts[2]])
    other = load(model, run / "heads" / "hydra", tokenizer=tokenizer, policy="fixed_16")

    def sample(with_lm, seed, **options):
        torch.manual_seed(seed)
        return model.generate(ids, do_sample=True, temperature=0.9, max_new_tokens=20, custom_generate=custom_generate,
                              entmtp=with_lm, **options)  # fmt: skip

    assert torch.equal(sample(lm, 1), sample(lm, 1)) and torch.equal(sample(lm, 1), sample(other, 1))
    assert not torch.equal(sample(lm, 1), sample(lm, 2))
    greedy = model.generate(ids, do_sample=False, max_new_tokens=20)
    assert torch.equal(sample(lm, 3, top_k=1), greedy), "the warpers are heeded: of one candidate nothing is drawn"


def test_what_the_hook_refuses(lm, model, tiny_folder, prompts):
    hook = {"custom_generate": custom_generate, "max_new_tokens": 4}
    ids = torch.tensor([prompts[1]])
    for inputs, options, message in [
        (ids.repeat(2, 1), {}, "batch size 1 only"),
        (ids, {"num_beams": 2}, "without beams"),
        (ids, {"penalty_alpha": 0.6, "top_k": 4}, "contrastive search is not supported"),
        (ids, {"return_dict_in_generate": True, "output_logits": True}, "output_logits"),
        (ids, {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor is not known to be a pure"),
    ]:
        with pytest.raises(EntmtpError, match=message):
            model.generate(inputs, entmtp=lm, **hook, **options)
    padded = torch.cat([torch.zeros(1, 1, dtype=torch.long), ids], dim=1)
    with pytest.raises(EntmtpError, match="without padding"):
        model.generate(padded, attention_mask=(padded > 0).long(), entmtp=lm, **hook)
    with pytest.raises(EntmtpError, match="this very model"):
        AutoModelForCausalLM.from_pretrained(tiny_folder).generate(ids, entmtp=lm, **hook)
