"""The compiled engine: against tensor operators, and the same bits however rows come together."""

import os

import pytest
import torch
import torch.nn.functional as F

from entmtp.target import native
from entmtp.target.llama import FusedLlama
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

pytestmark = pytest.mark.skipif(native.library(torch.float32) is None, reason="no C compiler on this machine")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def llama(dim: int = 16, heads: int = 6, kv_heads: int = 2, **options):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    qwen = options.pop("qwen", False)
    config, kind = (Qwen2Config, Qwen2ForCausalLM) if qwen else (LlamaConfig, LlamaForCausalLM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = kind(config(
            vocab_size=101, hidden_size=48, intermediate_size=112, num_hidden_layers=3, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=dim, initializer_range=0.2, tie_word_embeddings=False,
            **{"max_position_embeddings": 128} | options,
        ))  # fmt: skip
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return made.eval()


@pytest.fixture
def tiles_in_c(monkeypatch):
    """The engine as where the processor has a matrix unit, whose instructions are carried out in C."""
    monkeypatch.setenv("ENTMTP_TILES", "c")
    native.library.cache_clear()
    assert native.library(torch.bfloat16).unit
    yield
    native.library.cache_clear()


@pytest.fixture(params=["float32", "bfloat16", "bfloat16, tiles in C"])
def dtype(request) -> torch.dtype:
    if "tiles" in request.param:
        request.getfixturevalue("tiles_in_c")
    return getattr(torch, request.param.split(",")[0])


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (960, 576), (70, 36), (1, 1), (47, 5), (33, 100)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype, outputs, inputs, bias):
    weight, offset = noise(outputs, inputs).to(dtype), noise(outputs, seed=1).to(dtype) if bias else None
    for exact in (False, True):  # where there is no matrix unit both are the same
        linear = native.NativeLinear(weight, offset, exact=exact)
        everything = noise(150, inputs, seed=2)
        met = everything.to(dtype).float() if linear.struct.unit else everything  # the unit's inputs are rounded
        expected = F.linear(met, weight.float(), offset.float() if bias else None)
        for rows in (1, 2, 11, 12, 13, 24, 25, 41, 150):
            got = linear(everything[:rows])
            torch.testing.assert_close(got, expected[:rows], rtol=1e-4, atol=1e-4)
            for row in range(rows if rows < 150 else 0):  # the same bits alone
                assert torch.equal(linear(everything[row : row + 1])[0], got[row])


def test_paired_columns_come_out_in_order():
    weight, offset, x = noise(96, 20), noise(96, seed=1), noise(5, 20, seed=2)
    assert torch.equal(native.NativeLinear(weight, offset, paired=True)(x), native.NativeLinear(weight, offset)(x))


def test_leading_dimensions_and_strides_are_kept():
    weight, x = noise(40, 20), noise(20, 3, 7, seed=2).permute(2, 1, 0)
    torch.testing.assert_close(native.NativeLinear(weight)(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


MODELS = {
    "three query heads a key head": {},
    "one": {"dim": 32, "heads": 2, "kv_heads": 2},
    "seven, biases": {"heads": 7, "kv_heads": 1, "qwen": True},
    "wide heads": {"dim": 128, "heads": 2, "kv_heads": 1},
    "64": {"dim": 64, "heads": 4, "kv_heads": 1},
}


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_forward_equals_tensor_operators(name, dtype, trees):
    """Hidden states and the cache's new rows: prefill, single tokens, trees of several sizes."""
    model = llama(**MODELS[name])
    ours = FusedLlama(model, dtype, "cpu")
    # in bfloat16 weights, keys, values and the result are rounded, the arithmetic is not
    plain = FusedLlama(model.to(dtype).float(), torch.float32, "cpu", compiled=False)
    limit = 3e-4 if dtype == torch.float32 else 0.15
    assert ours.native is not None
    assert plain.native is plain.cpu is None
    caches = ours.new_cache(110), plain.new_cache(110)

    def both(tokens, positions, mask):
        got = ours.hidden(tokens, positions, caches[0], mask)
        expected = plain.hidden(tokens, positions, caches[1], None if mask is None else mask.float())
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=limit, atol=limit)
        torch.testing.assert_close(ours.logits(got), plain.logits(expected), rtol=3 * limit, atol=3 * limit)
        new = slice(caches[0].length, caches[0].length + len(tokens))
        kept, told = (cache.data[..., new, :].float() for cache in caches)
        torch.testing.assert_close(kept, told, rtol=limit, atol=limit)

    both(torch.arange(11) % 101, torch.arange(11), None)
    for cache in caches:
        cache.length = 11
    for tree in (Tree(()), *trees.values()):
        compiled = CompiledTree(tree, ours.groups, 110, dtype, "cpu")
        both(torch.arange(tree.num_nodes + 1) * 7 % 101, compiled.depths + caches[0].length,
             compiled.mask_slice(caches[0].length))  # fmt: skip
        for cache in caches:
            cache.commit([0])


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_in_a_tree_and_in_a_prefill(name, dtype):
    """Why exact acceptance is exact here: no tie can fall otherwise in a tree than in plain decoding."""
    model = FusedLlama(llama(**MODELS[name]), dtype, "cpu")
    text = (noise(40, seed=3).abs() * 50).long() % 101
    whole = model.new_cache(80)
    prefilled = model.hidden(text, torch.arange(40), whole, None)
    # one by one after a prompt of nine
    single = model.new_cache(80)
    model.hidden(text[:9], torch.arange(9), single, None)
    single.length = 9
    for at in range(9, 40):
        hidden = model.hidden(text[at : at + 1], torch.tensor([at]), single, None)
        assert torch.equal(hidden[0], prefilled[at])
        assert torch.equal(model.logits(hidden)[0], model.logits(prefilled)[at])
        single.length += 1
    assert torch.equal(single.data[..., :40, :], whole.data[..., :40, :])
    # in trees whose siblings are other tokens: the path (1, 1, 1, 1) carries the text
    paths = [(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 1, 1), (2, 0)]
    tree = CompiledTree(Tree.of(paths), model.groups, 80, dtype, "cpu")
    on_path = [0] + [node for node, path in enumerate(tree.tree.paths, 1) if set(path) == {1}]
    cache = model.new_cache(80)
    model.hidden(text[:9], torch.arange(9), cache, None)
    cache.length = 9
    for at in range(9, 35, 5):
        tokens = torch.full((tree.n,), 17)
        for depth, node in enumerate(on_path):
            tokens[node] = text[at + depth]
        hidden = model.hidden(tokens, tree.depths + at, cache, tree.mask_slice(at))
        assert torch.equal(hidden[on_path], prefilled[at : at + 5])
        cache.commit(on_path)
    assert torch.equal(cache.data[..., :39, :], whole.data[..., :39, :])


@pytest.mark.parametrize(("dim", "heads"), [(64, 6), (128, 2)])
@torch.inference_mode()
def test_a_token_has_the_same_bits_after_a_long_context(dtype, dim, heads):
    """Values are packed by hundreds and added in blocks: at their borders, for more rows than share a tile."""
    model = FusedLlama(llama(dim, heads, 2, max_position_embeddings=640), dtype, "cpu")
    text = (noise(600, seed=3).abs() * 50).long() % 101
    cache, prefilled, start = model.new_cache(640), [], 0
    for rows in (96, 31, 65, 64, 1, 95, 90, 96, 62):
        piece = slice(start, start + rows)
        prefilled.append(model.hidden(text[piece], torch.arange(start, start + rows), cache, None))
        cache.length = start = start + rows
    prefilled, whole = torch.cat(prefilled), cache.data.clone()
    paths = [(0,), (1,), (2,), (3,), (4,), *((2,) * d for d in range(2, 8)), *((2, 2, n) for n in range(9) if n != 2),
             *((4, n) for n in range(5))]  # fmt: skip
    tree = CompiledTree(Tree.of(paths), model.groups, 640, dtype, "cpu")
    on_path = [0] + [node for node, path in enumerate(tree.tree.paths, 1) if set(path) == {2}]
    for at in (30, 255, 256, 284, 287, 505, 511, 512, 580):
        cache.data.copy_(whole)
        cache.length = at
        tokens = torch.full((tree.n,), 17)
        for depth, node in enumerate(on_path):
            tokens[node] = text[at + depth]
        alone = model.hidden(text[at : at + 1], torch.tensor([at]), cache, None)
        assert torch.equal(alone[0], prefilled[at])
        hidden = model.hidden(tokens, tree.depths + at, cache, tree.mask_slice(at))
        assert torch.equal(hidden[on_path], prefilled[at : at + 8])


def test_many_rows_in_bfloat16_go_to_onednns_matrix_unit(tiles_in_c):
    """A prefill of more rows than a step has, where there is a matrix unit: the same up to bfloat16's rounding."""
    model = FusedLlama(llama(), torch.bfloat16, "cpu")
    plain = FusedLlama(llama(), torch.bfloat16, "cpu", compiled=False)
    tokens, at = torch.arange(100) % 101, torch.arange(100)
    with torch.inference_mode():
        got, expected = (m.hidden(tokens, at, m.new_cache(100), None) for m in (model, plain))
        assert torch.equal(got, expected)
        torch.testing.assert_close(model.logits(got), plain.logits(got).float(), rtol=0.05, atol=0.05)


@torch.inference_mode()
def test_threads_do_not_change_bits(tiny):
    tokens, at = torch.arange(30) + 40, torch.arange(30)
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(tiny.model.logits(tiny.model.hidden(tokens, at, tiny.new_cache(40), None)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_sizes_that_do_not_fit_are_left_to_others():
    model = llama(dim=24, heads=2, kv_heads=2)
    layers = FusedLlama(model, torch.float32, "cpu")
    assert layers.native is None
    assert layers.cpu is not None
    assert FusedLlama(llama(), torch.float16, "cpu").native is None


def test_it_is_built_once(tmp_path):
    first = native.build(tmp_path, torch.float32)
    written = first.stat().st_mtime_ns
    assert native.build(tmp_path, torch.float32) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 1000, 49152])
def test_choices_from_logits(size):
    library = native.library(torch.float32)
    logits = 4 * noise(5, size)
    logits[1, size // 2] = logits[1].amax() + 1
    logits[2, size // 3], logits[2, size - 1] = 99.0, 99.0  # of equal ones the first
    logits[3] = -torch.inf
    logits[3, size - 1] = -5.0
    logits[4] = -1e30
    out = torch.empty(5)
    library.top1(logits.data_ptr(), 5, size, out.data_ptr())
    torch.testing.assert_close(out, logits.double().softmax(dim=-1).amax(dim=-1).float(), rtol=1e-5, atol=0)
    found = [library.first_largest(row.data_ptr(), size) for row in logits]
    assert found == logits.argmax(dim=-1).tolist() and found[2] == size // 3


@torch.inference_mode()
def test_a_long_prefill_in_parts_is_the_whole(monkeypatch):
    """Scratch grows with the rows of a call, and each thread has its own."""
    model = FusedLlama(llama(), torch.float32, "cpu")
    text, at = torch.arange(70) % 101, torch.arange(70)
    whole, parts = model.new_cache(90), model.new_cache(90)
    expected = model.hidden(text, at, whole, None)
    needed = len(model.native.scratch)
    model.native.scratch = torch.empty(0)
    monkeypatch.setattr(native, "PART", 16)
    assert torch.equal(model.hidden(text, at, parts, None), expected)
    assert torch.equal(parts.data[..., :70, :], whole.data[..., :70, :])
    assert len(model.native.scratch) < needed


def test_code_that_others_may_write_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    known = tmp_path / f"entmtp-{os.getuid()}"
    assert native._own_folder() == known and known.stat().st_mode & 0o777 == 0o700
    known.chmod(0o777)
    other = native._own_folder()
    assert other != known and other.stat().st_mode & 0o777 == 0o700
