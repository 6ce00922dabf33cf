"""Logits processors: the tokens of plain decoding under the same processors, and refusal of those that keep state."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as hf

from entmtp import LanguageModel, generate, stateless
from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder, make_chooser
from entmtp.decoding.plain import plain_tokens
from entmtp.decoding.processors import MODULE, STATELESS, ProcessedChooser, checked_processors
from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Tree

TREES = {"chain": Tree.of([(0,) * d for d in range(1, 5)]), "bushy": Tree.of([(a,) for a in range(3)] + [
    (a, b) for a in range(3) for b in range(3)] + [(0, 0, 0), (1, 0, 0)])}  # fmt: skip

CHANGES = {
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5)],
    "ngrams": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "words": lambda: [hf.NoBadWordsLogitsProcessor([[40], [41, 42]] + [[token] for token in range(60, 90)])],
    "bias": lambda: [hf.SequenceBiasLogitsProcessor({(45,): 6.0, (45, 46): -9.0})],
    "several": lambda: [hf.SuppressTokensLogitsProcessor([2, 33]), hf.RepetitionPenaltyLogitsProcessor(1.2),
                        hf.NoRepeatNGramLogitsProcessor(3)],
    "beginning": lambda: [hf.MinLengthLogitsProcessor(30, 2), hf.ExponentialDecayLengthPenalty((3, 1.2), 2, 9)],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def knowing(tiny, oracle, tree: Tree, ids: list[int], text: list[int]) -> LanguageModel:
    drafter = oracle(wrong=0.15, top=3 if tree.max_rank else 1)
    made = LanguageModel(tiny, drafter, Policy("t", [tree]))
    drafter.attach(made.decoder(256), ids, text)
    return made


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_tokens_are_those_of_transformers_under_the_same_processors(
    tiny, model, oracle, prompts, greedy_texts, change, tree
):
    accepted = differs = 0
    for ids, unchanged in zip(prompts, greedy_texts, strict=True):
        made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=48,
                              logits_processor=LogitsProcessorList(CHANGES[change]()))  # fmt: skip
        text = made[0, len(ids) :].tolist()
        lm = knowing(tiny, oracle, TREES[tree], ids, text)
        ours = generate(lm, ids, max_new_tokens=40, processors=CHANGES[change]())
        assert ours.tokens == text[:40]
        accepted += sum(step.accepted for step in ours.steps)
        differs += text[:40] != unchanged[:40]
    assert accepted > 20 and differs  # drafts were accepted, and the processors did change the texts


@pytest.mark.parametrize("change", ["repetition", "several"])
def test_sampled_tokens_are_those_of_plain_decoding_under_the_same_processors(tiny, oracle, prompts, change):
    decoding = DecodingConfig("sample", 48, temperature=0.9, seed=5)
    warpers = [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.95)]
    accepted = 0
    for number, ids in enumerate(prompts):
        chooser = make_chooser(tiny, decoding, f"p{number}", [*CHANGES[change](), *warpers], ids)
        text = list(plain_tokens(tiny, tiny.new_cache(128), ids, 48, chooser))
        lm = knowing(tiny, oracle, TREES["bushy"], ids, text)
        ours = generate(lm, ids, max_new_tokens=40, temperature=0.9, seed=5, prompt_id=f"p{number}",
                        processors=[*CHANGES[change](), *warpers])  # fmt: skip
        assert ours.tokens == text[:40]
        accepted += sum(step.accepted for step in ours.steps)
    assert accepted > 20


def test_real_heads_and_a_signal_under_processors(tiny, drafters, prompts):
    """The base probability that policies look at is the target's own: processors work on a copy of the logits."""
    from entmtp.policy.schedulers import TauPolicy

    policy = TauPolicy("tau", [Tree(()), TREES["bushy"]], 1, 2, 0.05, 0.01)
    decoder = Decoder(tiny, drafters["hydra"], 160)
    decoding = DecodingConfig(max_new_tokens=30)
    for ids in prompts:
        chooser = make_chooser(tiny, decoding, "", CHANGES["words"](), ids)
        plain = list(plain_tokens(tiny, tiny.new_cache(128), ids, 30, chooser))
        steps = [step for step in decoder.stream(ids, policy, decoding, processors=CHANGES["words"]()) if step]
        assert [token for step in steps for token in step.tokens] == plain
    inplace = stateless(lambda ids, scores: scores.fill_(0.0).index_fill_(1, ids[0, -1:], 1.0))
    logits = torch.randn(1, tiny.vocab_size)
    before = logits.clone()
    assert ProcessedChooser([inplace], [7]).choose(logits, 1) == 7
    assert torch.equal(logits, before)


def test_every_listed_class_exists_in_the_pinned_transformers():
    assert hf.__name__ == MODULE
    assert all(issubclass(getattr(hf, name), hf.LogitsProcessor) for name in STATELESS)


class Counting(hf.LogitsProcessor):
    """Keeps state: suppresses another token at each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.calls % 50]), -torch.inf)


class Changed(hf.RepetitionPenaltyLogitsProcessor):
    pass


@pytest.mark.parametrize(
    "processor", [Counting(), Changed(1.2), lambda ids, scores: scores, hf.PrefixConstrainedLogitsProcessor(len, 1)]
)
def test_unknown_processors_are_refused_with_the_way_out(processor):
    with pytest.raises(EntmtpError, match=r"wrap it: entmtp\.stateless") as refused:
        checked_processors([hf.RepetitionPenaltyLogitsProcessor(1.1), processor])
    assert "RepetitionPenaltyLogitsProcessor" in str(refused.value)


def test_promised_processors_are_used_and_a_broken_promise_is_found(tiny, oracle, prompts, greedy_texts):
    ids, text = prompts[2], greedy_texts[2]
    forbidden = text[4]

    def without(input_ids, scores):
        return scores.index_fill(1, torch.tensor([forbidden]), -torch.inf)

    lm = knowing(tiny, oracle, TREES["chain"], ids, text)
    made = generate(lm, ids, max_new_tokens=4, processors=[stateless(without)])
    assert made.tokens == text[:4] and forbidden not in made.tokens
    counting = stateless(Counting())
    for _ in range(2):  # however often the promise is made
        with pytest.raises(EntmtpError, match=r"Counting answers the same question differently"):
            generate(lm, ids, max_new_tokens=4, processors=[counting])
    noisy = stateless(lambda input_ids, scores: scores + torch.rand_like(scores))
    with pytest.raises(EntmtpError, match="keeps state or draws random numbers"):
        generate(lm, ids, max_new_tokens=4, processors=[noisy])
    with pytest.raises(EntmtpError, match=r"must return scores \[1, 259\]"):
        generate(lm, ids, max_new_tokens=4, processors=[stateless(lambda input_ids, scores: scores[:, :9])])


def test_typical_acceptance_takes_no_processors(tiny):
    with pytest.raises(EntmtpError, match="takes no logits processors"):
        make_chooser(tiny, DecodingConfig("typical"), "", [hf.TopKLogitsWarper(5)], [3])


def test_choices_are_made_along_one_path_only():
    chooser = ProcessedChooser([hf.TopKLogitsWarper(2)], [5, 6])
    choices = chooser(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), [2, 3])
    assert (choices[0], choices[0], choices[1]) == (1, 1, 0)
    assert chooser.text == [5, 6, 1, 0]
    with pytest.raises(ValueError, match="does not follow"):
        chooser.choose(torch.zeros(1, 3), 2)
