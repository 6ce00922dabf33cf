"""Steps that stay on the device: the operators that a CUDA graph would hold, run one by one on the CPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.engine import Decoder
from entmtp.decoding.on_device import DeviceLoop, Verdict
from entmtp.decoding.verify import accept_exact
from entmtp.heads.prefix import PrefixDecoder
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.target.cache import mask_at
from entmtp.target.load import load_target
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

CAPACITY = 160
GREEDY = DecodingConfig(max_new_tokens=30)  # the fourth text has a numerical tie at its 36th token


def on_device(target, drafter) -> Decoder:
    """A decoder that behaves as on CUDA, but for the capture."""
    decoder = Decoder(target, drafter, CAPACITY)
    decoder.graphs = True
    return decoder


def outline(run) -> list[tuple]:
    return [(step.tree, step.nodes, step.accepted, step.node, step.tokens) for step in run.steps]


@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
def test_the_same_steps_as_the_ordinary_loop(tiny, prompts, trees, drafters, arch):
    bank = [trees["empty"], trees["wide"], trees["full"], trees["mc_sim_7b_63"]]
    policies = [Policy(name, [trees[name]]) for name in ("empty", "wide", "mc_sim_7b_63", "random_1")]
    policies += [TauPolicy("tau", bank, 1, 2, 0.05, 0.01), LadderPolicy("ladder", bank, 0, 1, [0.02, 0.05, 0.2])]
    policies += [LadderPolicy(f"empty {depth}", [Tree(())], 0, depth, []) for depth in (0, 2)]
    ordinary, ours = Decoder(tiny, drafters[arch], CAPACITY), on_device(tiny, drafters[arch])
    accepted, used = 0, set()
    for prompt in prompts:
        plain = ordinary.plain(prompt, GREEDY)
        assert ours.plain(prompt, GREEDY).tokens == plain.tokens
        for policy in policies:
            expected, got = ordinary.generate(prompt, policy, GREEDY), ours.generate(prompt, policy, GREEDY)
            assert got.tokens == plain.tokens
            assert outline(got) == outline(expected)
            signals = [[step.signal for step in run.steps] for run in (got, expected)]
            assert signals[0] == pytest.approx(signals[1], rel=1e-3, nan_ok=True)
            accepted += sum(step.accepted for step in got.steps)
            used |= {(policy.name, step.tree) for step in got.steps}
    assert ours.loops
    assert accepted > 0
    assert len([tree for name, tree in used if name == "tau"]) > 1


@pytest.fixture
def knowing(oracle):
    """A drafter of the text's own tokens that can be asked as on a device."""

    class Knowing(oracle):
        prefix = None

        def carried(self) -> list[torch.Tensor]:
            return []

        def resume(self, carried: list[torch.Tensor]) -> None:
            assert carried == []

        def start_at(self, hidden: torch.Tensor, count: torch.Tensor, root: torch.Tensor) -> None:
            self.at, self.root = self.at + int(count), int(root)

    return Knowing


@pytest.mark.parametrize("name", ["chain_4", "wide", "full", "mc_sim_7b_63", "random_2"])
def test_accepted_nodes_are_committed_and_texts_cut(tiny, prompts, trees, knowing, name):
    drafter = knowing()
    decoder, plain, accepted = on_device(tiny, drafter), Decoder(tiny, None, CAPACITY), 0
    policy = Policy(name, [trees[name]])
    for prompt in prompts:
        text = plain.plain(prompt, replace(GREEDY, max_new_tokens=60)).tokens
        drafter.attach(decoder, prompt, text)
        for budget in (1, 2, 7, 30):
            run = decoder.generate(prompt, policy, replace(GREEDY, max_new_tokens=budget))
            assert run.tokens == text[:budget]
            accepted += sum(step.accepted for step in run.steps)
    assert accepted > 20 or name.startswith("random")
    places = [i for i, token in enumerate(text[:18]) if text.index(token) == i]
    for place in places:  # a stop token as the first one, as a root, in the middle of a block
        target = replace(tiny, stop_ids={text[place]})
        stopping = on_device(target, drafter)
        drafter.attach(stopping, prompt, text)
        assert stopping.generate(prompt, policy, GREEDY).tokens == text[: place + 1]


class Recorder(TorchDispatchMode):
    """Operators, their arguments' shapes, and the numbers among the arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def shape(argument):
            if isinstance(argument, torch.Tensor):
                return tuple(argument.shape)
            return [shape(item) for item in argument] if isinstance(argument, list | tuple) else argument

        self.calls.append((str(function), shape(args), shape(list((kwargs or {}).values()))))
        return function(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "nonzero", "equal.default", "is_nonzero", "unique", "masked_select")


@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
def test_a_step_is_the_same_operators_everywhere_and_never_waits(tiny, prompts, trees, drafters, arch):
    """Static shapes, no number of the host that changes between steps, the same buffers: what a graph needs."""
    decoder = on_device(tiny, drafters[arch])
    policy = LadderPolicy("ladder", [trees["empty"], trees["full"], trees["mc_sim_7b_63"]], 1, 3, [0.02, 0.2])
    decoder.generate(prompts[1], policy, GREEDY)
    (loop,) = decoder.loops.values()

    def places() -> list[int]:
        buffers = [loop.root, loop.length, loop.report, *loop.carry, decoder.cache.data]
        return [tensor.data_ptr() for tensor in buffers]

    before, recorded = places(), []
    for prompt in prompts[2:]:
        loop.cache.reset()
        loop.begin(prompt)
        for index in (0, 1, 2, 1):
            with torch.inference_mode(), Recorder() as recorder:
                loop._run(index)
            recorded.append((index, recorder.calls))
            assert not [name for name, *_ in recorder.calls if any(wait in name for wait in WAITS)]
    for index in range(3):
        first, *others = [calls for at, calls in recorded if at == index]
        assert len(first) > 50
        assert len(others) in (1, 3)
        assert all(calls == first for calls in others)
    assert places() == before


def test_what_the_loop_does_not_cover_is_left_to_the_ordinary_one(tiny, tiny_folder, prompts, trees, drafters):
    policy = Policy("wide", [trees["wide"]])
    decoder = on_device(tiny, drafters["hydra"])
    for mode in ("sample", "typical"):
        decoding = DecodingConfig(mode=mode, temperature=0.8, max_new_tokens=12)
        expected = Decoder(tiny, drafters["hydra"], CAPACITY).generate(prompts[1], policy, decoding, "p")
        assert decoder.generate(prompts[1], policy, decoding, "p").tokens == expected.tokens
    assert not decoder.loops
    generic = on_device(load_target(TargetConfig(source="random", forward="generic"), tiny_folder, "float32"), None)
    ar = Policy("ar", [Tree(())])
    assert generic.generate(prompts[1], ar, GREEDY).tokens == decoder.generate(prompts[1], ar, GREEDY).tokens
    assert not generic.loops
    assert decoder.loops


@given(st.integers(0, 2**32 - 1))
def test_acceptance_by_tensors_equals_acceptance_by_steps(tree_maker, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    tree = tree_maker(rng)
    tokens = [int(rng.integers(5)), *[path[-1] for path in tree.paths]]  # siblings differ
    choices = rng.integers(0, 3, tree.num_nodes + 1).tolist()
    compiled = CompiledTree(tree, 1, 8, torch.float32, "cpu")
    verdict = Verdict(compiled, tree.depth + 3, "cpu")
    node = verdict(torch.tensor(tokens), torch.tensor(choices))
    nodes = accept_exact(tree, tokens, choices)
    assert verdict.depths[node].tolist() == [len(nodes) - 1]
    assert verdict.paths[node][0].tolist() == nodes + nodes[-1:] * (tree.depth + 3 - len(nodes))


@torch.inference_mode()
def test_masks_and_commits_by_tensors(tiny, trees):
    compiled = CompiledTree(trees["full"], 3, 60, torch.float32, "cpu")
    length = torch.tensor([20])
    mask = mask_at(compiled.block, length + torch.arange(compiled.n), length, 60, 3)
    assert torch.equal(mask[:, : 20 + compiled.n], compiled.mask_slice(20))
    assert (mask[:, 20 + compiled.n :] < -1e30).all()
    caches = [tiny.new_cache(60) for _ in range(2)]
    for cache in caches:
        cache.data.copy_(torch.arange(60.0)[:, None].expand(cache.data.shape))
        cache.length = 20
    caches[0].commit([0, 3, 11])
    caches[1].commit_at(length, torch.tensor([0, 3, 11, 11, 11]))
    assert torch.equal(caches[0].data[..., :23, :], caches[1].data[..., :23, :])


@torch.inference_mode()
def test_prefix_states_of_some_rows_of_a_block(tiny, tiny_heads):
    layer = tiny_heads["hydra_plus"].prefix
    hidden = torch.randn(30, tiny.hidden_size)
    one, other = (PrefixDecoder(layer, tiny.dtype, tiny.device) for _ in range(2))
    for decoder in (one, other):
        decoder.reserve(40)
        decoder.advance(hidden[:9])
    other.length.fill_(9)
    at = 9
    for count in (1, 4, 2, 5):
        block = torch.full((5, tiny.hidden_size), 7.0)  # rows beyond `count` are anything
        block[:count] = hidden[at : at + count]
        expected = one.advance(hidden[at : at + count])[-1:]
        torch.testing.assert_close(other.advance_at(block, torch.tensor([count])), expected, rtol=1e-4, atol=1e-4)
        at += count
    assert other.length.tolist() == [at]


def test_only_cuda_decodes_this_way_by_itself(tiny):
    assert not Decoder(tiny, None, CAPACITY).graphs
    empty = CompiledTree(Tree(()), 1, 8, tiny.dtype, "cpu")
    assert DeviceLoop(tiny, None, tiny.new_cache(8), [empty], None, True).graphs == []
