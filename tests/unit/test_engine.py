"""The step loop: the same tokens as plain decoding for every tree, counted and cut the same way."""

from dataclasses import replace

import pytest
import torch

from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.engine import Decoder, Generation
from entmtp.errors import EntmtpError
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.target.load import load_target
from entmtp.tree.topology import Tree

BUDGETS = (1, 2, 7, 40)
CAPACITY = 160
MODES = {"greedy": DecodingConfig(mode="greedy"), "sample": DecodingConfig(mode="sample", temperature=0.8, seed=3)}
TREE_NAMES = ("empty", "chain_4", "wide", "full", "mc_sim_7b_63", "random_0", "random_1", "random_2", "random_3")
PERFECT = Tree.of([(0,) * d for d in range(1, 5)])


def with_budget(decoding: DecodingConfig, budget: int) -> DecodingConfig:
    return replace(decoding, max_new_tokens=budget)


def assert_accounting(run: Generation, policy: Policy, stop: set[int], budget: int) -> None:
    """Tokens are those of the steps, in order, and perhaps one last root that needed no forward."""
    assert 1 <= len(run.tokens) <= budget
    assert not stop & set(run.tokens[:-1])
    assert len(run.tokens) == budget or run.tokens[-1] in stop
    committed = [token for step in run.steps for token in step.tokens]
    assert committed == run.tokens[: len(committed)]
    rest = len(run.tokens) - len(committed)
    assert rest in (0, 1)
    assert sum(step.accepted + 1 for step in run.steps) + rest == len(run.tokens)
    for step in run.steps:
        tree = policy.trees[step.tree]
        assert step.accepted == len(step.tokens) - 1
        assert step.nodes == tree.num_nodes
        assert tree.depths[step.node] == step.accepted
        assert 0 <= step.switch_seconds <= step.scheduler_seconds <= step.seconds
    if rest == 0:  # the last step was cut by the budget or a stop token, or ended exactly there
        assert run.steps[-1].tokens[-1] == run.tokens[-1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TREE_NAMES)
def test_tokens_equal_plain_decoding_for_every_tree(tiny, prompts, trees, oracle, mode, name):
    drafter = oracle()
    decoder = Decoder(tiny, drafter, CAPACITY)
    policy = Policy(name, [trees[name]])
    accepted = 0
    for number, prompt in enumerate(prompts):
        text = decoder.plain(prompt, with_budget(MODES[mode], 50), f"p{number}").tokens
        drafter.attach(decoder, prompt, text)
        for budget in BUDGETS if number % 2 else BUDGETS[:3]:
            decoding = with_budget(MODES[mode], budget)
            plain = decoder.plain(prompt, decoding, f"p{number}")
            run = decoder.generate(prompt, policy, decoding, f"p{number}")
            assert plain.tokens == text[:budget]
            assert run.tokens == plain.tokens
            assert len(plain.steps) == len(plain.tokens) - 1
            assert_accounting(run, policy, tiny.stop_ids, budget)
            accepted += sum(step.accepted for step in run.steps)
    if name in ("chain_4", "wide", "full", "mc_sim_7b_63"):
        assert accepted > 20  # the tree was of use, so acceptance and commits were really tested


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
def test_tokens_equal_plain_decoding_with_real_heads_and_schedulers(tiny, prompts, trees, drafters, mode, arch):
    decoder = Decoder(tiny, drafters[arch], CAPACITY)
    decoding = with_budget(MODES[mode], 40)
    bank = [trees["empty"], trees["wide"], trees["full"], trees["mc_sim_7b_63"]]
    policies = [Policy(name, [trees[name]]) for name in ("wide", "mc_sim_7b_63", "random_1")]
    policies += [TauPolicy("tau", bank, 1, 2, 0.05, 0.01), LadderPolicy("ladder", bank, 0, 1, [0.02, 0.05, 0.2])]
    # heads so weak that the bank is the empty tree alone: the signal needs them all the same
    policies += [LadderPolicy(f"empty {depth}", [Tree(())], 0, depth, []) for depth in (0, 2)]
    used = set()
    for number, prompt in enumerate(prompts):
        plain = decoder.plain(prompt, decoding, f"p{number}").tokens
        for policy in policies:
            run = decoder.generate(prompt, policy, decoding, f"p{number}")
            assert run.tokens == plain
            assert_accounting(run, policy, tiny.stop_ids, 40)
            used |= {(policy.name, step.tree) for step in run.steps}
            assert all((step.signal == step.signal) == (policy.depth is not None) for step in run.steps)
    assert len([tree for name, tree in used if name == "tau"]) > 1  # the scheduler did switch


def test_generic_forward_decodes_the_same_tokens(tiny, tiny_folder, prompts, trees, oracle):
    generic = load_target(TargetConfig(source="random", forward="generic"), tiny_folder, "float32")
    drafter = oracle()
    decoder = Decoder(generic, drafter, CAPACITY)
    decoding = DecodingConfig(max_new_tokens=30)
    for prompt in prompts[:3]:
        text = Decoder(tiny, None, CAPACITY).plain(prompt, DecodingConfig(max_new_tokens=50)).tokens
        drafter.attach(decoder, prompt, text)
        assert decoder.generate(prompt, Policy("t", [trees["mc_sim_7b_63"]]), decoding).tokens == text[:30]


@pytest.mark.parametrize("mode", MODES)
def test_every_stop_place_ends_the_text_there(tiny, prompts, trees, oracle, mode):
    """Stop tokens at the first token, at roots and in the middle of accepted blocks."""
    decoding = with_budget(MODES[mode], 40)
    prompt = prompts[2]
    text = Decoder(tiny, None, CAPACITY).plain(prompt, with_budget(MODES[mode], 60), "p").tokens
    places = [i for i, token in enumerate(text[:18]) if text.index(token) == i]
    assert len(places) > 8
    mid_block = 0
    for place in places:
        target = replace(tiny, stop_ids={text[place]})
        drafter = oracle(wrong=0.1, top=2)
        decoder = Decoder(target, drafter, CAPACITY)
        drafter.attach(decoder, prompt, text)
        plain = decoder.plain(prompt, decoding, "p").tokens
        assert plain == text[: place + 1]
        for name in ("empty", "chain_4", "full", "mc_sim_7b_63"):
            policy = Policy(name, [trees[name]])
            run = decoder.generate(prompt, policy, decoding, "p")
            assert run.tokens == plain
            assert_accounting(run, policy, target.stop_ids, 40)
            mid_block += bool(run.steps) and run.steps[-1].accepted > 0 and run.steps[-1].tokens[-1] == text[place]
            if place == 0:
                assert run.steps == []
    assert mid_block > 4


def test_several_stop_ids_the_first_one_ends(tiny, prompts, oracle):
    prompt = prompts[1]
    text = Decoder(tiny, None, CAPACITY).plain(prompt, DecodingConfig(max_new_tokens=60)).tokens
    places = [i for i, token in enumerate(text[:20]) if text.index(token) == i and i > 2][:2]
    drafter = oracle(wrong=0.0, top=1)
    decoder = Decoder(replace(tiny, stop_ids={text[places[1]], text[places[0]]}), drafter, CAPACITY)
    drafter.attach(decoder, prompt, text)
    run = decoder.generate(prompt, Policy("chain", [PERFECT]), DecodingConfig(max_new_tokens=40))
    assert run.tokens == text[: places[0] + 1]


@pytest.mark.parametrize("budget", range(1, 13))
def test_a_perfect_drafter_is_cut_at_the_budget(tiny, prompts, oracle, budget):
    """Five tokens a step: budgets that fall on every place of a block, and the number of forwards that they need."""
    drafter = oracle(wrong=0.0, top=1)
    decoder = Decoder(tiny, drafter, CAPACITY)
    text = decoder.plain(prompts[3], DecodingConfig(max_new_tokens=30)).tokens
    drafter.attach(decoder, prompts[3], text)
    run = decoder.generate(prompts[3], Policy("chain", [PERFECT]), DecodingConfig(max_new_tokens=budget))
    assert run.tokens == text[:budget]
    full, rest = divmod(budget, 5)
    # one token left over is the root that the last forward already gave
    expected = [4] * full + ([rest - 1] if rest > 1 else [])
    assert [step.accepted for step in run.steps] == expected


def test_the_model_s_last_positions_can_be_used(tiny, oracle):
    """Prompt and budget fill all positions; drafts that lie beyond them must neither crash nor change the text."""
    prompt = torch.randint(3, tiny.vocab_size, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter = oracle()
    decoding = DecodingConfig(max_new_tokens=24)
    decoder = Decoder(tiny, drafter, Decoder.room(1000, 24, PERFECT.num_nodes))
    text = decoder.plain(prompt, decoding).tokens
    drafter.attach(decoder, prompt, text)
    assert decoder.generate(prompt, Policy("chain", [PERFECT]), decoding).tokens == text
    with pytest.raises(EntmtpError, match="1024 positions"):
        decoder.generate(prompt, Policy("chain", [PERFECT]), DecodingConfig(max_new_tokens=25))


def test_room_is_exactly_enough(tiny, prompts, trees, oracle):
    tree, prompt = trees["mc_sim_7b_63"], prompts[2]
    drafter = oracle()
    decoder = Decoder(tiny, drafter, Decoder.room(len(prompt), 20, tree.num_nodes))
    decoding = DecodingConfig(max_new_tokens=20)
    text = decoder.plain(prompt, decoding).tokens
    drafter.attach(decoder, prompt, text)
    assert decoder.generate(prompt, Policy("t", [tree]), decoding).tokens == text
    small = Decoder(tiny, drafter, decoder.capacity - 1)
    with pytest.raises(EntmtpError, match=f"needs {decoder.capacity} cache rows"):
        small.generate(prompt, Policy("t", [tree]), decoding)


def test_policy_state_does_not_survive_a_prompt(tiny, prompts, trees, oracle):
    bank = [trees["empty"], trees["chain_4"], trees["full"]]

    def run(policy: Policy, numbers: list[int]) -> list[list[tuple]]:
        drafter = oracle(seed=5)
        decoder = Decoder(tiny, drafter, CAPACITY)
        found = []
        for number in numbers:
            text = decoder.plain(prompts[number], DecodingConfig(max_new_tokens=50)).tokens
            drafter.attach(decoder, prompts[number], text)
            steps = decoder.generate(prompts[number], policy, DecodingConfig(max_new_tokens=21)).steps
            found.append([(step.tree, step.accepted) for step in steps])
        return found

    def tau() -> TauPolicy:
        return TauPolicy("tau", bank, 0, 1, 0.2, 0.01)

    together = run(tau(), [0, 1, 2, 3])
    assert together == [run(tau(), [number])[0] for number in range(4)]
    assert any(steps[-1][0] != 0 for steps in together[:-1])  # a state that would have leaked


def test_signal_is_the_path_value_of_this_position(tiny, prompts, oracle):
    drafter = oracle()
    decoder = Decoder(tiny, drafter, CAPACITY)
    prompt = prompts[1]
    text = decoder.plain(prompt, DecodingConfig(max_new_tokens=50)).tokens
    drafter.attach(decoder, prompt, text)
    cache = tiny.new_cache(CAPACITY)
    with torch.inference_mode():
        base = tiny.model.logits(tiny.prefill(prompt + text, cache)).softmax(dim=-1).amax(dim=-1)
    for depth in (0, 1, 3):
        policy = TauPolicy("tau", [PERFECT, Tree(())], 0, depth, 2.0, -1.0)
        at = 0
        for step in decoder.generate(prompt, policy, DecodingConfig(max_new_tokens=30)).steps:
            drafter.at = at
            expected = float(base[len(prompt) - 1 + at]) * float(drafter.greedy_probs(depth).prod() if depth else 1)
            assert step.signal == pytest.approx(expected, rel=1e-4)
            at += step.accepted + 1


def test_the_cache_is_never_reallocated(tiny, prompts, trees, drafters):
    decoder = Decoder(tiny, drafters["hydra"], CAPACITY)
    pointer, size = decoder.cache.data.data_ptr(), decoder.cache.data.shape
    for prompt in prompts:
        decoder.generate(prompt, Policy("t", [trees["mc_sim_7b_63"]]), DecodingConfig(max_new_tokens=12))
        decoder.plain(prompt, DecodingConfig(max_new_tokens=5))
        assert (decoder.cache.data.data_ptr(), decoder.cache.data.shape) == (pointer, size)
    compiled = decoder.compile(trees["mc_sim_7b_63"])
    assert decoder.compile(Tree.of(trees["mc_sim_7b_63"].paths)) is compiled


def test_an_abandoned_stream_leaves_no_trace(tiny, prompts, trees, drafters):
    decoder = Decoder(tiny, drafters["medusa"], CAPACITY)
    policy, decoding = Policy("t", [trees["full"]]), DecodingConfig(max_new_tokens=20)
    expected = decoder.generate(prompts[2], policy, decoding).tokens
    stream = decoder.stream(prompts[3], policy, decoding)
    assert next(stream) is None
    next(stream)
    stream.close()
    assert decoder.generate(prompts[2], policy, decoding).tokens == expected


def test_stream_yields_every_token_once(tiny, prompts, trees, drafters, greedy_texts):
    decoder = Decoder(tiny, drafters["hydra"], CAPACITY)
    stream = decoder.stream(prompts[1], Policy("t", [trees["wide"]]), DecodingConfig(max_new_tokens=17))
    assert next(stream) is None
    assert [token for step in stream for token in step.tokens] == greedy_texts[1][:17]


def test_bad_requests_are_refused(tiny, prompts, trees, drafters):
    decoder = Decoder(tiny, drafters["medusa"], CAPACITY)
    decoding = DecodingConfig(max_new_tokens=4)
    wide = Policy("t", [trees["wide"]])
    for prompt in ([], [[1, 2], [3, 4]]):
        with pytest.raises(EntmtpError, match="one non-empty list of token ids"):
            decoder.generate(prompt, wide, decoding)
        with pytest.raises(EntmtpError, match="one non-empty list of token ids"):
            decoder.plain(prompt, decoding)
    deep = Tree.of([(0,) * d for d in range(1, 6)])
    with pytest.raises(EntmtpError, match="depth 5 exceeds the 4 draft heads"):
        decoder.generate(prompts[0], Policy("t", [trees["wide"], deep]), decoding)
    with pytest.raises(EntmtpError, match="rank 16 is outside the 16 candidates"):
        decoder.generate(prompts[0], Policy("t", [Tree.of([(16,)])]), decoding)
    with pytest.raises(EntmtpError, match="needs draft heads"):
        Decoder(tiny, None, CAPACITY).generate(prompts[0], wide, decoding)
    assert Decoder(tiny, None, 40).generate(prompts[0], Policy("ar", [Tree(())]), decoding).steps[0].nodes == 0


@pytest.mark.parametrize("arch", ["medusa", "hydra"])
def test_a_signal_deeper_than_the_heads_is_refused(tiny, prompts, drafters, arch):
    """Medusa must not silently take the deepest signal that it has."""
    decoder = Decoder(tiny, drafters[arch], CAPACITY)
    policy = TauPolicy("tau", [Tree(()), PERFECT], 0, 5, 0.5, 0.5)
    with pytest.raises(EntmtpError, match="depth"):
        decoder.generate(prompts[0], policy, DecodingConfig(max_new_tokens=4))


def typical(epsilon: float = 0.09, alpha: float = 0.3, budget: int = 40) -> DecodingConfig:
    return DecodingConfig(mode="typical", max_new_tokens=budget, epsilon=epsilon, alpha=alpha)


@pytest.mark.parametrize("arch", ["medusa", "hydra"])
def test_typical_runs_is_repeatable_and_keeps_the_budget(tiny, prompts, trees, drafters, arch):
    decoder = Decoder(tiny, drafters[arch], CAPACITY)
    for name in ("empty", "full", "mc_sim_7b_63"):
        policy = Policy(name, [trees[name]])
        for prompt in prompts:
            for budget in (1, 2, 7, 40):
                run = decoder.generate(prompt, policy, typical(budget=budget))
                assert_accounting(run, policy, tiny.stop_ids, budget)
            assert decoder.generate(prompt, policy, typical()).tokens == run.tokens


def test_typical_between_its_two_extremes(tiny, prompts, trees, drafters, greedy_texts):
    decoder = Decoder(tiny, drafters["hydra"], CAPACITY)
    policy = Policy("chain", [trees["chain_4"]])
    # nothing has p > 1: every step commits its greedy root only
    strict = decoder.generate(prompts[1], policy, typical(epsilon=1.0, alpha=1e9))
    assert strict.tokens == greedy_texts[1][:40]
    assert {step.accepted for step in strict.steps} == {0}
    # everything has p > 0: the whole chain is committed
    free = decoder.generate(prompts[1], policy, typical(alpha=0.0))
    assert [step.accepted for step in free.steps] == [4] * 8
