"""Compiled kernels against tensor operators, one by one and as whole layers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from entmtp.target import kernels
from entmtp.target.cpu import CpuLayers, array
from entmtp.target.llama import FusedLayers
from entmtp.tree.compiled import CompiledTree

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = DTYPES[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=limit, atol=limit)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    return request.param


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@njit
def copied(x, out):
    for j in range(x.shape[1]):
        kernels.store(out, 0, j, kernels.load(x, 0, j))


def test_bfloat16_is_rounded_to_nearest_even_as_torch_does():
    values = torch.cat([noise(4096) * 10.0 ** torch.linspace(-20, 20, 4096), torch.tensor([0.0, -0.0, 1.00390625])])
    out, back = torch.zeros(1, len(values), dtype=torch.bfloat16), torch.zeros(1, len(values))
    copied(values[None].contiguous().numpy(), array(out))
    assert torch.equal(out.view(torch.int16), values[None].bfloat16().view(torch.int16))
    copied(array(out), back.numpy())
    assert torch.equal(back, out.float())


def test_exp():
    x = torch.cat([torch.linspace(-80, 80, 9001), torch.tensor([0.0, -1e-8, -200.0])])
    gate_up = torch.stack([torch.cat([-x, torch.ones_like(x)])])
    out = torch.zeros(1, len(x))
    kernels.silu_mul(gate_up.numpy(), out.numpy())
    expected = F.silu(-x.double()).float()[None]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-30)  # an ulp of the exponent, at 80


@pytest.mark.parametrize("n", [1, 5])
def test_norms(dtype, n):
    x, delta, weight = noise(n, 48), noise(n, 48, seed=1).to(dtype), noise(48, seed=2)
    out = torch.zeros(n, 48, dtype=dtype)
    kernels.rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5), array(out))
    close(out, F.rms_norm(x, (48,), weight, 1e-5).to(dtype))
    total = x + delta.float()
    kernels.add_rms_norm(x.numpy(), array(delta), weight.numpy(), np.float32(1e-5), array(out))
    torch.testing.assert_close(x, total)
    close(out, F.rms_norm(total, (48,), weight, 1e-5).to(dtype))


def test_silu_mul(dtype):
    gate_up, out = (noise(3, 80) * 4).to(dtype), torch.zeros(3, 40, dtype=dtype)
    kernels.silu_mul(array(gate_up), array(out))
    gate, up = gate_up.float().chunk(2, dim=-1)
    close(out, (F.silu(gate) * up).to(dtype))


def test_top1(dtype):
    logits = (noise(3, 999) * 3).to(dtype)
    out = torch.zeros(3)
    kernels.top1(array(logits), out.numpy())
    assert out.tolist() == pytest.approx(logits.float().softmax(dim=-1).amax(dim=-1).tolist(), rel=1e-5)


@pytest.fixture
def layers(tiny_folder, dtype):
    from transformers import AutoModelForCausalLM

    body = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype).model
    return FusedLayers(body, dtype, "cpu", compiled=False)


@pytest.mark.parametrize("name", ["empty", "chain_4", "full", "mc_sim_7b_63"])
@torch.inference_mode()
def test_layers_equal_tensor_operators(layers, trees, dtype, name):
    """Hidden states and the cache's new rows, after a prefill, for trees of several sizes, twice over."""
    compiled, tree = CpuLayers(layers), CompiledTree(trees[name], layers.groups, 40, dtype, "cpu")
    context = 11
    prompt = noise(context, layers.hidden_size).to(dtype)
    caches = [layers.new_cache(120) for _ in range(2)]
    for cache in caches:
        layers.run(prompt, torch.arange(context), cache, None)
        cache.length = context
    for seed in (1, 2):
        x = noise(tree.n, layers.hidden_size, seed=seed).to(dtype)
        mask = tree.mask_slice(caches[0].length)
        at = tree.depths + caches[0].length
        expected = layers.run(x, at, caches[0], mask)
        got = compiled.run(x, at, caches[1], mask)
        limit = 2e-4 if dtype == torch.float32 else 0.15  # an ulp or two of values up to 8
        torch.testing.assert_close(got.float(), expected.float(), rtol=limit, atol=limit)
        new = slice(caches[0].length, caches[0].length + tree.n)
        torch.testing.assert_close(
            caches[1].data[..., new, :].float(), caches[0].data[..., new, :].float(), rtol=limit, atol=limit
        )
        for cache in caches:
            cache.commit([0])


@torch.inference_mode()
def test_a_row_does_not_depend_on_how_many_there_are():
    """The reason why kernels cannot make a tree's forward differ from a single token's."""
    x, weight = noise(7, 48), noise(48, seed=1)
    many, one = torch.zeros(7, 48), torch.zeros(1, 48)
    kernels.rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5), many.numpy())
    for i in range(7):
        kernels.rms_norm(x[i : i + 1].numpy(), weight.numpy(), np.float32(1e-5), one.numpy())
        assert torch.equal(one[0], many[i])


def test_the_fused_forward_uses_the_kernels_for_steps(tiny_folder, monkeypatch):
    """Where the compiled engine (test_native.py) is not to be had."""
    from transformers import AutoModelForCausalLM

    from entmtp.target.llama import FusedLlama

    model = FusedLlama(AutoModelForCausalLM.from_pretrained(tiny_folder), torch.bfloat16, "cpu")
    monkeypatch.setattr(model, "native", None)
    calls = []
    run = model.cpu.run
    monkeypatch.setattr(model.cpu, "run", lambda *args: calls.append(len(args[0])) or run(*args))
    cache = model.new_cache(40)
    with torch.inference_mode():
        model.hidden(torch.tensor([5, 6, 7]), torch.arange(3), cache, None)
        cache.length = 3
        model.hidden(torch.tensor([8]), torch.tensor([3]), cache, None)
    assert calls == [1]
