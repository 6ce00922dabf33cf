"""Verified blocks: the tokens of plain decoding whatever is drafted, and drafts that are those of the masks."""

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp.config import ConfAdaptConfig, DecodingConfig, DistillConfig
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Decoder
from entmtp.decoding.lossless import DraftedVerifier, SelfVerifier, block_tree, prefix_probabilities
from entmtp.distill.mask_token import add_mask_token
from entmtp.distill.student import WholeStudent
from entmtp.distill.train import SelfDistiller
from entmtp.errors import EntmtpError
from entmtp.evaluation.confadapt import block_arms, decode_all, rules_of
from entmtp.evaluation.lossless_blocks import DRAFT, ORIGINAL, SELF, draft_arms, milliseconds, self_arm, verdicts_of
from entmtp.io import Journal
from entmtp.policy.blocks import BlockPlan, FixedBlocks, PricedBlocks
from entmtp.target.load import wrap_model

BUDGET, CAPACITY, NODES = 24, 160, 48
COSTS = {
    "free": [10.0] * (NODES + 1),
    "flat": [10 + 0.05 * n for n in range(NODES + 1)],
    "steps": [10.0 + 3 * (n // 4) for n in range(NODES + 1)],
    "dear": [10 + 30.0 * n for n in range(NODES + 1)],
}
POLICIES = {f"fixed {k}": FixedBlocks(k) for k in (1, 2, 3, 4, 6)}
POLICIES |= {f"priced, {name}": PricedBlocks(5, ms, [0.0, *ms[:9]]) for name, ms in COSTS.items()}


@pytest.fixture(scope="module")
def student(tiny_folder, prompts, greedy_texts, tmp_path_factory):
    """The tiny target, self-distilled on its own texts until its masks are often right; and its mask token."""
    teacher = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_folder), copy.deepcopy(teacher)
    mask_id = add_mask_token(model, tokenizer, seed=1)
    rows = [
        {"key": f"{number:016x}/0", "prompt_ids": prompt, "tokens": text}
        for number, (prompt, text) in enumerate(zip(prompts, greedy_texts, strict=True))
    ]
    config = DistillConfig(k_max=4, spacing=3, blocks=10, batch=4, steps=150, learning_rate=3e-3, warmup=5,
                           dtype="float32", report_every=50, checkpoint_every=150)  # fmt: skip
    whole = WholeStudent(model, teacher, list(model.parameters()), mask_id, {2}, config)
    trainer = SelfDistiller(whole, rows, config)
    history = trainer.run(tmp_path_factory.mktemp("student") / "checkpoint.pt")
    assert history[-1]["agreement"] > 0.5
    return wrap_model(model.eval(), tokenizer, "auto", "float32", "cpu", "student"), mask_id


def own_text(target, mask_id: int, prompt: list[int], budget: int = BUDGET) -> list[int]:
    return BlockDecoder(target, mask_id, CAPACITY).generate(prompt, BlockRule(1, None), budget).tokens


def plain_text(target, prompt: list[int], budget: int = BUDGET) -> list[int]:
    return Decoder(target, None, CAPACITY).plain(prompt, DecodingConfig(max_new_tokens=budget)).tokens


class Oracle:
    """Drafts the known continuation with seeded errors, so that every length of acceptance comes up."""

    def __init__(self, text: list[int], seed: int):
        self.text, self.rng = text, np.random.default_rng(seed)

    def draft(self, at: int, count: int) -> tuple[list[int], list[float]]:
        """Tokens for the places at, at + 1, … of the text, and confidences that do not know which are wrong."""
        true = [self.text[place] if place < len(self.text) else 0 for place in range(at, at + count)]
        tokens = [(token + int(self.rng.random() < 0.2)) % 250 for token in true]
        return tokens, (0.5 + 0.5 * self.rng.random(count)).tolist()


class OracleSelf(SelfVerifier):
    def _verify(self, root, drafts, plan):
        block, draft, _ = super()._verify(root, drafts, plan)
        self.at += len(block)
        tokens, confidence = self.oracle.draft(self.at, len(draft))
        return block, tokens, prefix_probabilities(confidence)

    def write(self, prompt, oracle, policy, budget):
        self.oracle, self.at = oracle, 1  # the prefill decides the first token
        return self.generate(prompt, policy, budget)


class OracleDrafter(BlockDecoder):
    def knowing(self, prompt, oracle):
        self.oracle, self.offset = oracle, len(prompt)
        return self

    def predict(self, fresh, k):
        super().predict(fresh, k)
        tokens, confidence = self.oracle.draft(self.cache.length - self.offset, k)
        return confidence, tokens


def check_steps(made, budget: int) -> None:
    assert made.tokens == [token for step in made.steps for token in step.tokens]
    assert [step.accepted + 1 for step in made.steps] == [len(step.tokens) for step in made.steps]
    assert len(made.tokens) <= budget


@pytest.mark.parametrize("name", POLICIES)
def test_a_model_that_verifies_itself_says_what_it_says_alone(student, prompts, name):
    (target, mask_id), policy = student, POLICIES[name]
    decoder, forwards = SelfVerifier(target, mask_id, CAPACITY, NODES), {}
    for prompt in prompts:
        for budget in (1, 2, 5, BUDGET):
            made = decoder.generate(prompt, policy, budget)
            assert made.tokens == own_text(target, mask_id, prompt, budget)
            check_steps(made, budget)
            forwards[budget] = forwards.get(budget, 0) + len(made.steps)
    if name == "fixed 1":
        assert forwards[BUDGET] == sum(len(own_text(target, mask_id, prompt)) for prompt in prompts)
    elif name != "priced, dear":  # the masks of a trained model are worth reading
        assert forwards[BUDGET] < 0.8 * sum(len(own_text(target, mask_id, prompt)) for prompt in prompts)


@pytest.mark.parametrize("name", POLICIES)
def test_no_draft_changes_a_token(tiny, prompts, name):
    """Both verifiers, drafts right and wrong at every length, texts that end in a stop token, the last position."""
    mask_id, policy = 250, POLICIES[name]
    accepted: set[int] = set()
    for number, prompt in enumerate(prompts):
        own, plain = own_text(tiny, mask_id, prompt), plain_text(tiny, prompt)
        stops = {own[len(own) // 2]}
        for target in (tiny, replace(tiny, stop_ids=stops), replace(tiny, max_positions=len(prompt) + BUDGET)):
            decoder = OracleSelf(target, mask_id, CAPACITY, NODES)
            drafter = OracleDrafter(target, mask_id, CAPACITY, limit=tiny.vocab_size)
            drafted = DraftedVerifier(target, drafter, CAPACITY, NODES)
            expected_own, expected_plain = own_text(target, mask_id, prompt), plain_text(target, prompt)
            for seed in range(2):
                made = decoder.write(prompt, Oracle(own, 10 * number + seed), policy, BUDGET)
                assert made.tokens == expected_own
                check_steps(made, BUDGET)
                accepted |= {step.accepted for step in made.steps}
                drafter.knowing(prompt, Oracle(plain, seed))
                made = drafted.generate(prompt, policy, BUDGET)
                assert made.tokens == expected_plain
                check_steps(made, BUDGET)
                assert all(step.accepted <= step.nodes for step in made.steps[1:])
                accepted |= {step.accepted for step in made.steps}
    if name.startswith("fixed"):
        assert accepted == set(range(policy.k))
    else:
        assert {0, 1, 2, 3} <= accepted or name == "priced, dear"


@pytest.mark.parametrize("name", POLICIES)
def test_another_models_blocks_leave_the_target_its_text(tiny, student, prompts, name):
    own, mask_id = student
    policy = POLICIES[name]
    drafter = BlockDecoder(own, mask_id, CAPACITY, limit=tiny.vocab_size)
    decoder = DraftedVerifier(tiny, drafter, CAPACITY, NODES)
    steps = []
    for prompt in prompts:
        made = decoder.generate(prompt, policy, BUDGET)
        assert made.tokens == plain_text(tiny, prompt)
        check_steps(made, BUDGET)
        steps += made.steps
        assert made.steps[0].drafter_forwards == 0  # the prefill is the target's alone
    drafted = [step for step in steps if step.drafter_forwards]
    if name in ("fixed 1", "priced, dear"):
        assert not drafted
    else:  # a drafting forward may cost more than it brings; where it is asked, it brings tokens
        assert drafted and len(steps) < 0.9 * sum(len(plain_text(tiny, prompt)) for prompt in prompts)


def test_masks_after_the_place_that_a_step_ends_at_draft_what_they_draft_alone(student, prompts):
    """Positions and ancestors: the same masks after the same real tokens, read afresh, say the same."""
    target, mask_id = student

    class Watched(SelfVerifier):
        def _verify(self, root, drafts, plan):
            made = super()._verify(root, drafts, plan)
            self.seen.append((self.cache.length, made[1], made[2], len(made[0])))
            return made

    class WatchedOracle(OracleSelf, Watched):
        """Verifies drafts that are sometimes wrong; what is watched is what its own masks say."""

    for k in (2, 4):
        ends = set()
        for number, prompt in enumerate(prompts):
            decoder = WatchedOracle(target, mask_id, CAPACITY, NODES)
            decoder.seen = []
            oracle = Oracle(own_text(target, mask_id, prompt), number)
            text = prompt + decoder.write(prompt, oracle, FixedBlocks(k), BUDGET).tokens
            ends |= {decided for *_, decided in decoder.seen}
            for length, draft, sure, _ in decoder.seen:
                afresh = BlockDecoder(target, mask_id, CAPACITY)
                confidence, chosen = afresh.predict(text[:length], len(draft) + 1)
                assert chosen[1:] == draft
                assert prefix_probabilities(confidence[1:]) == pytest.approx(sure, abs=1e-4)
        assert ends == set(range(1, k + 1))  # steps ended at every place


def test_a_forwards_rows_are_a_tree():
    shape, groups = block_tree(BlockPlan(2, [2, 0, 1]))
    assert shape.parents == [-1, 0, 1, 0, 3, 2]
    assert shape.depths == [0, 1, 2, 1, 2, 3]
    assert groups == [range(3, 5), range(5, 5), range(5, 6)]
    sees = [[i for i, seen in enumerate(row) if seen] for row in shape.ancestors()]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 1, 2, 5]]
    assert block_tree(BlockPlan(0, [0]))[0].parents == [-1]


def sure_of(rng) -> list[float]:
    return prefix_probabilities(rng.random(int(rng.integers(0, 7))).tolist())


def test_plans_keep_what_they_stand_on_and_never_more_than_is_wanted():
    rng = np.random.default_rng(0)
    for case in range(400):
        costs = np.cumsum(rng.random(NODES + 1) * rng.choice([0.0, 0.2, 3.0]))
        policy = PricedBlocks(int(rng.integers(1, 7)), (10 + costs).tolist(), (5 + costs).tolist())
        for _ in range(int(rng.integers(0, 5))):
            policy.note(sure_of(rng), int(rng.integers(1, 7)), 12.0)
        sure, left = sure_of(rng), int(rng.integers(1, 12))
        plan = policy.plan(sure, left)
        assert plan.drafts <= min(len(sure), left - 1), case
        assert len(plan.masks) == plan.drafts + 1 and plan.nodes <= policy.max_nodes
        for place, masks in enumerate(plan.masks):
            assert 0 <= masks <= max(0, min(policy.k_max - 1, left - 2 - place))
        assert 0 <= policy.ask(5, left) <= max(0, min(policy.k_max, left - 1))


def test_lengths_follow_confidence_and_price():
    sure = prefix_probabilities([0.95, 0.9, 0.9, 0.3])
    free, dear = PricedBlocks(5, COSTS["free"]), PricedBlocks(5, COSTS["dear"])
    everything = free.plan(sure, 99)
    assert everything.drafts == 4 and everything.masks == [4] * 5
    assert dear.plan(sure, 99) == BlockPlan(0, [0])
    # a node costs 0.4 ms, so 0.04 tokens at the rate of plain decoding: drafts by their probability, most masks where
    # the step most probably ends
    some = PricedBlocks(5, [10 + 0.4 * n for n in range(NODES + 1)]).plan(sure, 99)
    assert some.drafts == 4
    ends = [a - b for a, b in pairwise([1.0, *sure, 0.0])]
    assert some.masks[int(np.argmax(ends))] == max(some.masks) > min(some.masks)
    assert PricedBlocks(5, [10 + 0.4 * n for n in range(NODES + 1)]).plan([0.02], 99).drafts == 0


def test_the_forecast_learns_from_a_text_and_forgets_the_last_one():
    policy = PricedBlocks(4, COSTS["flat"], [0.0, *[12.0] * 8], prior=0.7)
    fresh = list(policy.forecast)
    assert policy.ask(1, 99) == 4  # four tokens at 0.7, 0.49, … for 12 ms at 0.1 tokens a millisecond
    for _ in range(12):
        policy.note([0.05, 0.01, 0.001, 0.0], 1, 22.0)
    assert policy.ask(1, 99) == 0  # this text is not worth a drafting model's time
    for _ in range(30):
        policy.note([], 1, 10.0)  # steps without a draft teach nothing: back to what holds of any text
    assert policy.ask(1, 99) == 4
    for _ in range(12):
        policy.note([0.9, 0.81], 3, 12.0)  # beyond the end of a short block as within it
    assert policy.forecast == pytest.approx([0.9, 0.81, 0.729, 0.656], abs=0.02)
    assert policy.price.rate > 0.1
    policy.reset()
    assert policy.forecast == fresh and policy.price.rate == 0.1


def test_only_what_the_original_model_knows_is_said(student, prompts):
    """A multi-token model may have rows for tokens that the original lacks; nobody could judge or verify those."""
    target, mask_id = student
    limit = sorted({token for prompt in prompts for token in own_text(target, mask_id, prompt)})[-1]
    decoder, alone = SelfVerifier(target, mask_id, CAPACITY, 15, limit), BlockDecoder(target, mask_id, CAPACITY, limit)
    for prompt in prompts:
        made = decoder.generate(prompt, FixedBlocks(4), BUDGET).tokens
        assert made == alone.generate(prompt, BlockRule(1, None), BUDGET).tokens
        assert max(made) < limit


def test_what_does_not_fit_is_refused(tiny, prompts):
    decoder = SelfVerifier(tiny, 250, CAPACITY, 8)
    with pytest.raises(EntmtpError, match=r"up to 15 nodes, the decoder's 8"):
        decoder.generate(prompts[0], FixedBlocks(4), 5)
    with pytest.raises(EntmtpError, match="k must be at least 1"):
        FixedBlocks(0)
    with pytest.raises(EntmtpError, match="k_max >= 1"):
        PricedBlocks(0, [1.0])
    with pytest.raises(EntmtpError, match=f"tokens from {tiny.vocab_size} on"):
        DraftedVerifier(tiny, BlockDecoder(tiny, 250, CAPACITY), CAPACITY, 8)
    with pytest.raises(EntmtpError, match="cache rows"):
        SelfVerifier(tiny, 250, 20, 8).generate(prompts[0], FixedBlocks(2), BUDGET)
    with pytest.raises(EntmtpError, match=r"forwards of 17 rows, but latency.sizes ends at 9"):
        milliseconds({"tokens": [1, 9], "ms": [1.0, 2.0]}, 17, ConfAdaptConfig())
    assert milliseconds({"tokens": [1, 3], "ms": [1.0, 2.0]}, 3, ConfAdaptConfig()) == [1.0, 1.5, 2.0]


def test_methods_run_side_by_side_and_their_promise_is_checked(tiny, student, prompts, tmp_path):
    own, mask_id = student
    config = ConfAdaptConfig(k_max=4, thresholds=[0.5], static=[2], max_nodes=12)
    table = {"tokens": [1, 4, 16], "ms": [10.0, 10.5, 14.0]}
    latency = {"own": table, "original": table}
    rows = [{"id": f"p{number}", "token_ids": prompt} for number, prompt in enumerate(prompts)]
    arms = block_arms(BlockDecoder(own, mask_id, CAPACITY), rules_of(config))
    arms[SELF] = self_arm(own, mask_id, CAPACITY, tiny.vocab_size, latency, config)
    arms |= draft_arms(own, mask_id, tiny, CAPACITY, latency, config)
    made = decode_all(arms, rows, BUDGET, Journal(tmp_path / "journal", "x"))
    texts = {(row["policy"], row["prompt_id"]): row["tokens"] for row in made}
    assert all(texts[SELF, row["id"]] == texts["k=1", row["id"]] for row in rows)
    assert all(texts[DRAFT, row["id"]] == texts[ORIGINAL, row["id"]] for row in rows)
    by_name = {name: [row for row in made if row["policy"] == name] for name in arms}
    assert all(row["forwards"] == len(row["tokens"]) for name in ("k=1", ORIGINAL) for row in by_name[name])
    assert sum(row["drafter_forwards"] for row in by_name[DRAFT]) > 0
    assert all(row["drafter_forwards"] == 0 for name in arms if name != DRAFT for row in by_name[name])
    targets = {SELF: own, DRAFT: tiny}
    verdicts = verdicts_of(made, rows, targets, 1e-3)
    assert {name: entry["verdict"] for name, entry in verdicts.items()} == {SELF: "exact", DRAFT: "exact"}
    broken = [
        {**row, "tokens": [*row["tokens"][:-1], (row["tokens"][-1] + 1) % 200]} if row["policy"] == DRAFT else row
        for row in made
    ]
    assert verdicts_of(broken, rows, targets, 1e-3)[DRAFT]["verdict"] == "fail"
    only = [row for row in made if row["policy"] not in (DRAFT, ORIGINAL)]
    assert set(verdicts_of(only, rows, {SELF: own, DRAFT: None}, 1e-3)) == {SELF}
