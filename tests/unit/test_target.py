"""Fused and generic forwards against transformers, the KV cache, and what a target refuses."""

import numpy as np
import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from entmtp.config import TargetConfig
from entmtp.errors import EntmtpError
from entmtp.target import llama
from entmtp.target.cache import KVCache
from entmtp.target.fetch import fetch_target
from entmtp.target.generic import GenericForward
from entmtp.target.load import load_target, wrap_model
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

VOCAB, POSITIONS = 61, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
MODELS = {
    "llama_gqa_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama_biases_llama3_rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=1, attention_bias=True, rope_parameters=LLAMA3_ROPE)
    ),
    "llama_own_head_dim": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4, head_dim=12)),
    "qwen2_untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None)),
    "mistral_wide_window": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=POSITIONS)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}
CASES = [
    (name, forward) for name in MODELS for forward in ("fused", "generic") if (name, forward) != ("gpt_neox", "fused")
]
TREE = Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (2, 0, 3), (2, 0, 3, 0)])


class NoTokenizer:
    eos_token_id = 5


def build(name: str, seed: int = 0):
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    with torch.no_grad():  # biases and norms start at 0 and 1: give them values that would show when forgotten
        for _, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
        if (offset := model.get_output_embeddings().bias) is not None:
            offset += torch.randn_like(offset)
    return model


def wrap(model, forward: str = "auto", dtype: str = "float32"):
    return wrap_model(model, NoTokenizer(), forward, dtype, "cpu", fingerprint="test")


@torch.inference_mode()
def plain_logits(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def assert_same(got: torch.Tensor, expected: torch.Tensor, relative: float = 1e-4) -> None:
    assert got.shape == expected.shape
    difference, scale = float((got - expected).abs().max()), float(expected.abs().max())
    assert difference <= relative * scale


@pytest.mark.parametrize(("name", "forward"), CASES)
@torch.inference_mode()
def test_logits_equal_transformers(name, forward):
    """Prefill, single tokens and a tree, and again after the tree's path was committed."""
    model = build(name)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, 14).tolist()
    expected = plain_logits(model, ids)
    target = wrap(model, forward)
    assert isinstance(target.model, llama.FusedLlama if forward == "fused" else GenericForward)
    cache = target.new_cache(POSITIONS)

    hidden = target.prefill(ids[:11], cache)
    assert cache.length == 11
    assert_same(target.model.logits(hidden), expected[:11])
    for position in (11, 12, 13):
        hidden = target.model.hidden(torch.tensor([ids[position]]), torch.tensor([position]), cache, None)
        cache.length += 1
        assert_same(target.model.logits(hidden), expected[position : position + 1])

    compiled = CompiledTree(TREE, target.mask_rows, POSITIONS, target.dtype, "cpu")
    tokens = rng.integers(0, VOCAB, compiled.n)
    hidden = target.model.hidden(
        torch.from_numpy(tokens), compiled.depths + cache.length, cache, compiled.mask_slice(cache.length)
    )
    assert cache.length == 14  # a forward does not commit
    logits = target.model.logits(hidden)
    for node in range(compiled.n):
        branch = [int(tokens[n]) for n in TREE.path_nodes(node)]
        assert_same(logits[node : node + 1], plain_logits(model, ids + branch)[-1:])

    path = TREE.path_nodes(TREE.paths.index((2, 0, 3)) + 1)
    cache.commit(path)
    text = ids + [int(tokens[node]) for node in path]
    assert cache.length == len(text)
    more = [3, 17]
    after = target.model.hidden(torch.tensor(more[:1]), torch.tensor([cache.length]), cache, None)
    assert_same(target.model.logits(after), plain_logits(model, text + more[:1])[-1:])


@pytest.mark.parametrize(("name", "forward"), CASES)
@torch.inference_mode()
def test_embedding_and_head_rows_are_the_models(name, forward):
    model = build(name)
    table = model.get_input_embeddings().weight.detach().clone()
    projection = model.get_output_embeddings().weight.detach().clone()
    target = wrap(model, forward)
    ids = torch.tensor([5, 0, 60, 5])
    assert torch.equal(target.model.embed(ids), table[ids])
    assert torch.equal(target.head_rows(ids), projection[ids])
    assert (target.vocab_size, target.hidden_size, target.max_positions) == (VOCAB, 32, POSITIONS)
    assert target.stop_ids == {2, 5}  # the config's and the tokenizer's


@pytest.mark.parametrize("forward", ["fused", "generic"])
@torch.inference_mode()
def test_bfloat16_forwards_stay_near_float32(forward):
    ids = np.random.default_rng(2).integers(0, VOCAB, 20).tolist()
    expected = plain_logits(build("llama_gqa_tied"), ids)
    target = wrap(build("llama_gqa_tied"), forward, "bfloat16")
    got = target.model.logits(target.prefill(ids, target.new_cache(32)))
    assert_same(got.float(), expected, relative=0.1)


@pytest.mark.parametrize("family", ["llama_gqa_tied", "gpt_neox"])
def test_rotary_frequencies_stay_float32_in_half_precision(family):
    """As transformers keeps them: rounded to bfloat16 they would be off by a radian some hundred positions on."""
    model = build(family)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any(name.endswith("inv_freq") and buffer.dtype == torch.float32 for name, buffer in before.items())
    target = wrap(model, "generic", "bfloat16")
    for name, buffer in target.model.model.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    assert all(parameter.dtype == torch.bfloat16 for parameter in target.model.model.parameters())


@torch.inference_mode()
def test_committed_rows_equal_a_cache_filled_plainly():
    target = wrap(build("llama_gqa_tied"))
    rng = np.random.default_rng(3)
    ids = rng.integers(0, VOCAB, 9).tolist()
    compiled = CompiledTree(TREE, target.mask_rows, 40, target.dtype, "cpu")
    for leaf in range(compiled.n):
        cache, plain = target.new_cache(40), target.new_cache(40)
        target.prefill(ids, cache)
        tokens = rng.integers(0, VOCAB, compiled.n)
        target.model.hidden(torch.from_numpy(tokens), compiled.depths + 9, cache, compiled.mask_slice(9))
        path = TREE.path_nodes(leaf)
        cache.commit(path)
        target.prefill(ids + [int(tokens[node]) for node in path], plain)
        assert cache.length == plain.length == 9 + len(path)
        torch.testing.assert_close(
            cache.data[..., : cache.length, :], plain.data[..., : cache.length, :], rtol=1e-4, atol=1e-4
        )


def test_commit_moves_rows_and_nothing_else():
    cache = KVCache(2, 3, 4, 12, torch.float32, "cpu")
    cache.data.copy_(torch.arange(12.0)[:, None].expand_as(cache.data))
    cache.length = 3
    cache.commit([0, 2, 3, 7])  # sources and destinations overlap
    assert cache.length == 7
    assert torch.equal(cache.data[1, 1, 2, :7, 3], torch.tensor([0.0, 1, 2, 3, 5, 6, 10]))
    assert torch.equal(cache.data[0, 0, 0, 7:, 0], torch.arange(7.0, 12))


def test_cache_is_sized_by_kv_heads_and_refuses_what_does_not_fit():
    target = wrap(build("llama_gqa_tied"))
    cache = target.new_cache(10)
    assert cache.data.shape == (2, 2, 2, 10, 8)  # layers, k and v, kv heads (not 4), capacity, head_dim
    generic = wrap(build("llama_gqa_tied"), "generic").new_cache(10)
    assert generic.data.shape == cache.data.shape
    target.prefill([1, 2, 3, 4], cache)
    with pytest.raises(EntmtpError, match="KV cache of 10 rows has no room for 7 more after 4"):
        cache.require(7)
    for forward in ("fused", "generic"):
        small = wrap(build("llama_gqa_tied"), forward)
        with pytest.raises(EntmtpError, match="no room"):
            small.prefill(list(range(11)), small.new_cache(10))


def test_prompts_that_do_not_fit_are_refused():
    target = wrap(build("llama_gqa_tied"))
    target.check_room(60, 4)
    with pytest.raises(EntmtpError, match=r"60 tokens; with max_new_tokens=5 .* 64 positions"):
        target.check_room(60, 5)
    with pytest.raises(EntmtpError, match="empty"):
        target.prefill([], target.new_cache(4))


BASE = dict(num_key_value_heads=2, **SIZES)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "covered"),
    [
        (LlamaConfig(**BASE), True),
        (LlamaConfig(**BASE, rope_parameters=LLAMA3_ROPE), True),
        (LlamaConfig(**BASE, hidden_act="gelu"), False),
        (LlamaConfig(**BASE, rope_parameters=DYNAMIC), False),
        (MistralConfig(**BASE, sliding_window=None), True),
        (MistralConfig(**BASE, sliding_window=POSITIONS), True),
        (MistralConfig(**BASE, sliding_window=POSITIONS - 1), False),
        (MistralConfig(**BASE, sliding_window=POSITIONS, rope_parameters=DYNAMIC), False),
        (Qwen2Config(**BASE), True),
        (Qwen2Config(**BASE, use_sliding_window=True, sliding_window=8, max_window_layers=0), False),
        (GPTNeoXConfig(**SIZES), False),
    ],
)
def test_supports(config, covered):
    assert llama.supports(config) is covered


def test_fused_refuses_what_it_does_not_cover():
    with pytest.raises(EntmtpError, match=r"target\.forward=fused does not cover model_type=gpt_neox"):
        wrap(build("gpt_neox"), "fused")
    target = wrap(build("llama_gqa_tied"), "generic")
    with pytest.raises(EntmtpError, match="needs the fused forward"):
        _ = target.fused


def exact_or_refused(model, ids: list[int]) -> None:
    """A model that no forward computes exactly must be refused, never decoded as something else."""
    expected = plain_logits(model, ids)
    try:
        target = wrap(model)
        target.check_room(len(ids), 1)
        hidden = target.prefill(ids, target.new_cache(POSITIONS))
    except EntmtpError:
        return
    assert_same(target.model.logits(hidden), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MistralForCausalLM(MistralConfig(**BASE, sliding_window=6)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**BASE, use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    ],
    ids=["mistral", "qwen2"],
)  # fmt: skip
def test_context_beyond_a_sliding_window_is_exact_or_refused(make):
    torch.manual_seed(0)
    with torch.inference_mode():
        exact_or_refused(make().eval(), list(range(3, 23)))


def test_scaled_logits_are_exact_or_refused():
    torch.manual_seed(0)
    with torch.inference_mode():
        exact_or_refused(GraniteForCausalLM(GraniteConfig(**BASE, logits_scaling=8.0)).eval(), list(range(3, 23)))


def test_load_target_names_a_wrong_dtype_device_or_folder(tiny_folder, tmp_path):
    config = TargetConfig(name="tiny", source="random")
    with pytest.raises(EntmtpError, match="dtype=float64: choose one of float32, bfloat16, float16"):
        load_target(config, tiny_folder, "float64")
    if not torch.cuda.is_available():
        with pytest.raises(EntmtpError, match="device=cuda: this torch build sees no GPU; use device=cpu"):
            load_target(config, tiny_folder, "float32", "cuda")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EntmtpError, match="not a loadable causal language model"):
        load_target(config, tmp_path, "float32")


def test_random_target_is_its_seed(tiny, tiny_folder, tmp_path):
    """Weights of another seed are another target: heads for one must not load on the other."""
    config = TargetConfig(name="tiny", source="random", seed=1)
    again = load_target(
        TargetConfig(source="random"), fetch_target(TargetConfig(source="random"), tmp_path / "a"), "float32"
    )
    other = load_target(config, fetch_target(config, tmp_path / "b"), "float32")
    ids = torch.arange(tiny.vocab_size)
    assert torch.equal(again.model.embed(ids), tiny.model.embed(ids))
    assert not torch.equal(other.model.embed(ids), tiny.model.embed(ids))
    assert again.fingerprint == tiny.fingerprint
    assert other.fingerprint != tiny.fingerprint


def test_chat_template_of_the_config_wins(tiny_folder):
    config = TargetConfig(source="random", chat_template="{{ messages[0]['content'] }}!")
    target = load_target(config, tiny_folder, "float32")
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "hi!"


def test_the_context_ends_where_a_forward_would_depend_on_more_than_positions():
    """GPT-Neo's local layers look back over cache rows; longrope rotates a whole forward by its largest position."""
    from transformers import GPTNeoConfig, Phi3Config

    from entmtp.target.load import _max_positions

    neo = {"max_position_embeddings": 64, "num_layers": 2, "window_size": 16}
    assert _max_positions(GPTNeoConfig(**neo, attention_types=[[["global", "local"], 1]])) == 16
    assert _max_positions(GPTNeoConfig(**neo, attention_types=[[["global"], 2]])) == 64
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = Phi3Config(hidden_size=32, num_attention_heads=4, max_position_embeddings=128,
                     original_max_position_embeddings=32, sliding_window=None, pad_token_id=0,
                     rope_scaling={"type": "longrope", **factors})  # fmt: skip
    assert _max_positions(phi) == 32
