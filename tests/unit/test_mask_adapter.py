"""Adapters that act on masks only: real tokens' bits are the base model's, masks are read alike by every forward."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Decoder
from entmtp.decoding.lossless import SelfVerifier
from entmtp.distill.adapter import AdapterFormat, apply_adapter, load_adapted, save_adapter, use_adapter
from entmtp.errors import EntmtpError
from entmtp.io import read_json, read_safetensors, write_json
from entmtp.policy.blocks import FixedBlocks, PricedBlocks
from entmtp.target import native
from entmtp.target.load import fingerprint, load_target
from entmtp.target.mask_adapter import MaskAdapter

CAPACITY, BUDGET = 160, 24


def attach(model, rank: int = 4, seed: int = 3) -> MaskAdapter:
    """An adapter that changes a lot, as no start of training does."""
    adapter = MaskAdapter(model, rank, 8.0, seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter.layers.values():
        layer.up.data = 0.1 * torch.randn(layer.up.shape, generator=generator)
    return adapter


@pytest.fixture(scope="module")
def adapter_folder(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    made = attach(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32))
    save_adapter(made.tensors(), folder, AdapterFormat(fingerprint(tiny_folder), 4, 8.0, 5, 3, masks_only=True))
    return folder


def test_another_adapter_is_another_config(tiny_folder, adapter_folder, tmp_path):
    other = attach(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32), seed=4)
    form = AdapterFormat(fingerprint(tiny_folder), 4, 8.0, 5, 3, masks_only=True)
    save_adapter(other.tensors(), tmp_path, form)
    assert (tmp_path / "config.json").read_bytes() != (adapter_folder / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes((adapter_folder / "config.json").read_bytes())
    with pytest.raises(EntmtpError, match=r"not the adapter that its config\.json was written with"):
        opened(tiny_folder, tmp_path)


def opened(tiny_folder, adapter_folder, forward: str = "auto", dtype: str = "float32"):
    return load_adapted(TargetConfig(name="x", source="folder", forward=forward), tiny_folder, adapter_folder, dtype)


@torch.inference_mode()
def rows(target, prompt: list[int], tokens: list[int], sees: torch.Tensor | None = None):
    """Logits of a forward of `tokens` after `prompt`, and the cache's new keys and values."""
    cache = target.new_cache(CAPACITY)
    target.prefill(prompt, cache)
    n, start = len(tokens), cache.length
    sees = torch.ones(n, n, dtype=torch.bool).tril() if sees is None else sees
    mask = torch.zeros(n, start + n, dtype=target.dtype)
    mask[:, start:].masked_fill_(~sees, torch.finfo(target.dtype).min)
    hidden = target.model.hidden(torch.tensor(tokens), torch.arange(start, start + n), cache,
                                 mask.repeat(target.mask_rows, 1))  # fmt: skip
    return target.model.logits(hidden), cache.data[..., start : start + n, :].clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_tokens_keep_their_bits_and_masks_are_read_alike(tiny_folder, adapter_folder, prompts, dtype):
    own = opened(tiny_folder, adapter_folder, dtype=dtype)
    plain = load_target(TargetConfig(name="x", source="folder"), tiny_folder, dtype)
    generic = opened(tiny_folder, adapter_folder, "generic")  # float32: in bfloat16 each processor rounds elsewhere
    assert own.vocab_size == plain.vocab_size == own.mask_id
    limit = 1e-4 if dtype == "float32" else 0.5
    for prompt, real, masks in ((prompts[0], 1, 3), (prompts[1], 5, 12), (prompts[2], 3, 30)):
        text = [7 + n for n in range(real)]
        logits, kept = rows(own, prompt, text + [own.mask_id] * masks)
        alone, alone_kept = rows(plain, prompt, text)
        assert torch.equal(kept[..., :real, :], alone_kept), "keys and values of real tokens"
        assert torch.equal(logits[:real], alone)
        other, _ = rows(generic, prompt, text + [own.mask_id] * masks)
        torch.testing.assert_close(logits.float(), other.float(), rtol=limit, atol=limit)
        # the masks are read by the adapter, not as some token
        assert (logits[real:] - rows(plain, prompt, text + [0] * masks)[0][real:]).abs().max() > 0.1


@pytest.mark.skipif(native.library(torch.float32) is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 32])
@torch.inference_mode()
def test_the_compiled_engine_adds_what_tensor_operators_add(tiny_folder, dtype, rank):
    """Every number of real tokens and masks around the engine's tiles."""
    from entmtp.target.llama import FusedLlama

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapter = attach(model, rank)
    ours = FusedLlama(model, dtype, "cpu")
    plain = FusedLlama(model.to(dtype).float(), torch.float32, "cpu", compiled=False)
    assert ours.native is not None and ours.rows is adapter.rows
    generator = torch.Generator().manual_seed(0)
    limit = 3e-4 if dtype == torch.float32 else 0.3
    for n, first in ((1, 0), (2, 1), (12, 5), (13, 0), (17, 9), (24, 23), (25, 24), (30, 3), (50, 20), (50, 50)):
        made = []
        for forward in (ours, plain):
            cache = forward.new_cache(64)
            x = torch.randn(n, forward.hidden_size, generator=generator.manual_seed(n))
            adapter.rows.first = first
            made.append(forward.run(x, torch.arange(n), cache, None).float())
            adapter.rows.first = None
        torch.testing.assert_close(*made, rtol=limit, atol=limit)


def test_verified_blocks_are_the_original_models_text(tiny_folder, adapter_folder, prompts):
    """Whatever the masks say: lengths, stops and budgets are those of plain decoding without any adapter."""
    own = opened(tiny_folder, adapter_folder)
    plain = load_target(TargetConfig(name="x", source="folder"), tiny_folder, "float32")
    policies = [FixedBlocks(3), PricedBlocks(5, [10 + 0.05 * n for n in range(30)])]
    decoder, blocks = SelfVerifier(own, own.mask_id, CAPACITY, 29), BlockDecoder(own, own.mask_id, CAPACITY)
    for prompt in prompts:
        expected = Decoder(plain, None, CAPACITY).plain(prompt, DecodingConfig(max_new_tokens=BUDGET)).tokens
        assert blocks.generate(prompt, BlockRule(1, None), BUDGET).tokens == expected
        for policy in policies:
            assert decoder.generate(prompt, policy, BUDGET).tokens == expected
        assert own.mask_id not in blocks.generate(prompt, BlockRule(5, 0.01), BUDGET).tokens


def test_a_folder_gives_the_adapter_back_and_names_what_does_not_fit(tiny_folder, adapter_folder, tmp_path):
    use_adapter(tiny_folder, adapter_folder, tmp_path / "used")
    tensors, said = (
        read_safetensors(tmp_path / "used" / "adapter.safetensors"),
        read_json(adapter_folder / "config.json") | {"weights": ""},  # with its hash, another file is named as such
    )
    # projections that read the same vectors share the down-projection
    layers = 2
    assert len(tensors) == layers * (4 + 7) + 1
    own = opened(tiny_folder, tmp_path / "used")
    assert torch.equal(own.model.mask_row, tensors["mask_row"].float())
    with pytest.raises(EntmtpError, match="acts on masks only, so it cannot be folded"):
        apply_adapter(tiny_folder, adapter_folder, tmp_path / "folded")
    folder = tmp_path / "used"

    def refused(message: str) -> None:
        with pytest.raises(EntmtpError, match=message):
            opened(tiny_folder, folder)

    write_json(folder / "config.json", said | {"rank": 3})
    refused(r"must be \[3, 48\] and finite; it is \[4, 48\]")
    write_json(folder / "config.json", said | {"target": "llama-h9-v9-000"})
    refused("made for the target llama-h9-v9-000")
    write_json(folder / "config.json", said)
    save_file({**tensors, "mask_row": tensors["mask_row"] * torch.nan}, folder / "adapter.safetensors")
    refused("mask_row must be .* and finite")
    save_file({**tensors, "more": torch.ones(1)}, folder / "adapter.safetensors")
    refused("tensors that its format does not have: more")


def test_a_model_without_such_projections_is_refused():
    with pytest.raises(EntmtpError, match="no linear layers named q_proj"):
        MaskAdapter(torch.nn.Sequential(torch.nn.Linear(2, 2)), 1, 1.0, 0)
