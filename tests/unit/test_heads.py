"""Head modules, their native format, and batched text by the target."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from entmtp.config import DecodingConfig, HeadsConfig
from entmtp.decoding.engine import Decoder, make_chooser
from entmtp.errors import EntmtpError
from entmtp.heads.drafter import make_drafter
from entmtp.heads.model import DraftHeads, HeadsFormat, load_heads, load_kind, save_heads
from entmtp.heads.text import BatchDecoder, Sequence
from entmtp.io import read_json, write_json

ARCHS = ("medusa", "hydra")


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


@torch.inference_mode()
def test_hydra_features_are_the_straight_line(tiny, heads_maker):
    """h, then the embeddings since, oldest first; one linear layer; residual SiLU blocks."""
    heads = heads_maker(tiny, "hydra", [], seed=4, blocks=2)
    h = torch.randn(5, tiny.hidden_size)
    embeddings = [torch.randn(5, tiny.hidden_size) for _ in range(4)]
    state = heads.state_dict()
    for depth in range(1, 5):
        x = torch.cat([h] + [1.5 * e for e in embeddings[:depth]], dim=1)
        x = x @ state[f"first.{depth - 1}.weight"].T + state[f"first.{depth - 1}.bias"]
        for block in range(2):
            key = f"blocks.{depth - 1}.{block}"
            x = x + silu(x @ state[f"{key}.weight"].T + state[f"{key}.bias"])
        torch.testing.assert_close(heads.features(depth, h, embeddings), x, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_medusa_features_use_own_blocks_a_head_and_no_embedding(tiny, heads_maker):
    heads = heads_maker(tiny, "medusa", [], seed=4, blocks=2)
    h = torch.randn(3, tiny.hidden_size)
    state = heads.state_dict()
    for depth in range(1, 5):
        x = h
        for block in range(2):
            key = f"blocks.{depth - 1}.{block}"
            x = x + silu(x @ state[f"{key}.weight"].T + state[f"{key}.bias"])
        torch.testing.assert_close(heads.features(depth, h, []), x, rtol=1e-4, atol=1e-4)
    blocks = [block for head in heads.blocks for block in head]
    assert len({block.weight.data_ptr() for block in blocks}) == 8  # FACTS 5: no shared weights


@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_a_fresh_head_predicts_as_the_target(tiny, prompts, arch):
    token_map = torch.arange(20, 70)
    heads = DraftHeads(HeadsFormat(arch, 3, 2, tiny.hidden_size, 50, tiny.fingerprint), token_map)
    heads.reset(0)
    hidden = tiny.prefill(prompts[3], tiny.new_cache(40))[-1:]
    expected = tiny.model.logits(hidden)[0, 20:70]
    drafter = make_drafter(heads, tiny, 8)
    for depth in (1, 2, 3):
        got = drafter.path_logits(depth, hidden, torch.full((1, depth), 30))[0]
        if arch == "medusa":
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        else:  # the small random part lets training break the symmetry, no more
            assert F.cosine_similarity(got, expected, dim=0) > 0.95
            assert not torch.allclose(got, expected, atol=1e-4)


def test_other_weights_are_another_config(tiny, heads_maker, tmp_path):
    configs = []
    for seed in (4, 5):
        save_heads(heads_maker(tiny, "medusa", [], seed=seed), tmp_path / "heads")
        configs.append((tmp_path / "heads" / "config.json").read_bytes())
    assert configs[0] != configs[1] and load_heads(tmp_path / "heads", tiny)
    (tmp_path / "heads" / "config.json").write_bytes(configs[0])  # of other weights
    with pytest.raises(EntmtpError, match=r"not the weights that its config\.json was written with"):
        load_heads(tmp_path / "heads", tiny)


def test_reset_follows_the_seed(tiny):
    form = HeadsFormat("hydra", 2, 1, tiny.hidden_size, 10, tiny.fingerprint)

    def weights(seed: int) -> torch.Tensor:
        heads = DraftHeads(form, torch.arange(10))
        heads.reset(seed)
        return torch.cat([p.flatten() for p in heads.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("arch", [*ARCHS, "hydra_plus"])
def test_native_format_round_trip(tiny, heads_maker, tmp_path, arch):
    heads = heads_maker(tiny, arch, [7, 5], seed=1, blocks=2)
    save_heads(heads, tmp_path)
    assert {str(t.dtype) for k, t in load_file(tmp_path / "model.safetensors").items() if k != "token_map"} == {
        "torch.float16"
    }
    loaded = load_heads(tmp_path, tiny)
    assert replace(loaded.config, weights="") == heads.config
    assert not loaded.training
    assert torch.equal(loaded.token_map, heads.token_map)
    assert loaded.token_map.tolist()[:2] == [7, 5]
    for (key, old), (other, new) in zip(heads.named_parameters(), loaded.named_parameters(), strict=True):
        assert key == other
        assert new.dtype == torch.float32
        assert torch.equal(new, old.half().float())


@pytest.fixture
def saved(tiny, heads_maker, tmp_path):
    save_heads(heads_maker(tiny, "hydra", []), tmp_path)
    return tmp_path


def edit_config(folder, **changes) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | changes)


def edit_weights(folder, edit) -> None:
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


def set_nan(state: dict) -> None:
    state["blocks.1.0.weight"][3, 4] = float("nan")


def set_token(token: int):
    def edit(state: dict) -> None:
        state["token_map"][0] = token

    return edit


def repeat_token(state: dict) -> None:
    state["token_map"][1] = state["token_map"][0]


DAMAGES = {
    "no folder": (lambda f: (f / "config.json").unlink(), "no heads here"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "does not match its config"),
    "other target": (lambda f: edit_config(f, target="llama-h48-v259-other"), "llama-h48-v259-other"),
    "hidden size": (lambda f: edit_config(f, hidden_size=64), "heads for hidden size 64, but the target has 48"),
    "unknown key": (lambda f: edit_config(f, heads=3), "not a heads config"),
    "other depth": (lambda f: edit_config(f, depth=3), "does not match its config"),
    "other arch": (lambda f: edit_config(f, arch="medusa"), "does not match its config"),
    "other draft vocabulary": (lambda f: edit_config(f, draft_vocab=99), "does not match its config"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "does not match its config",
    ),
    "not a safetensors file": (lambda f: (f / "model.safetensors").write_text("<html>"), "does not match its config"),
    "missing weight": (lambda f: edit_weights(f, lambda s: s.pop("first.2.bias")), "does not match its config"),
    "NaN": (lambda f: edit_weights(f, set_nan), "NaN or infinite"),
    "token beyond the target": (lambda f: edit_weights(f, set_token(259)), "names token 259, but the target has 259"),
    "negative token": (lambda f: edit_weights(f, set_token(-1)), "token"),
    "token named twice": (lambda f: edit_weights(f, repeat_token), "names a token twice"),
    "unknown arch": (lambda f: edit_config(f, arch="eagle"), "config.json"),
    "newer format": (lambda f: edit_config(f, format="entmtp-heads-9"), "format"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_heads_that_do_not_fit_are_one_clear_error(tiny, saved, damage):
    edit, message = DAMAGES[damage]
    edit_config(saved, weights="")  # of somebody who wrote no hash: with it, other weights are named as such
    edit(saved)
    with pytest.raises(EntmtpError, match=message) as caught:
        load_heads(saved, tiny)
    assert str(saved) in str(caught.value)


def test_save_refuses_what_the_dtype_cannot_hold(tiny, heads_maker, tmp_path):
    heads = heads_maker(tiny, "hydra", [])
    with torch.no_grad():
        heads.first[1].weight[0, 0] = 1e5  # beyond float16
    with pytest.raises(EntmtpError, match=r"first\.1\.weight does not fit torch\.float16"):
        save_heads(heads, tmp_path)
    assert list(tmp_path.iterdir()) == []
    save_heads(heads, tmp_path, torch.float32)
    assert load_heads(tmp_path, tiny).first[1].weight[0, 0].item() == 1e5


# --- batched text -----------------------------------------------------------------------------------------------


def batch_case(tiny, stop: bool):
    """Mixed lengths, greedy and sampled in turn; with `stop`, texts end early and at different places."""
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 17, 1, 8, 30, 2, 11, 5, 24]
    prompts = {
        f"s{number}": torch.randint(3, tiny.vocab_size, (n,), generator=generator).tolist()
        for number, n in enumerate(lengths)
    }
    decodings = {
        key: DecodingConfig(mode="sample" if number % 2 else "greedy", temperature=0.9, seed=2, max_new_tokens=20)
        for number, key in enumerate(prompts)
    }
    target = replace(tiny, stop_ids=set(range(3, 30))) if stop else tiny
    decoder = Decoder(target, None, 64)
    expected = {key: decoder.plain(prompt, decodings[key], key).tokens for key, prompt in prompts.items()}
    return target, prompts, decodings, expected


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 9, 12])
@pytest.mark.parametrize("stop", [False, True])
def test_batched_text_equals_plain_decoding(tiny, stop, batch, compiled):
    target, prompts, decodings, expected = batch_case(tiny, stop)
    lengths = {len(tokens) for tokens in expected.values()}
    assert len(lengths) > 3 if stop else True
    assert 1 in lengths if stop else True  # one that stops with its first token
    decoder = BatchDecoder(target.fused, batch, 30 + 20, target.stop_ids, 20)
    if not compiled:  # what runs where there are no CPU kernels: a GPU
        decoder.compiled = None
    seen, active = [], []
    source = (Sequence(key, prompt, [], make_chooser(target, decodings[key], key)) for key, prompt in prompts.items())
    for sequence in decoder.run(source, active.append):
        seen.append(sequence.key)
        assert sequence.tokens == expected[sequence.key], sequence.key
    assert sorted(seen) == sorted(prompts)
    assert max(active) == min(batch, 9 if not stop else max(active))
    # the same decoder again: what lies in its slots from before must not matter
    again = {s.key: s.tokens for s in decoder.run(Sequence(k, prompts[k], []) for k in ("s4", "s0", "s2"))}
    assert again == {key: expected[key] for key in ("s4", "s0", "s2")}


def test_batched_text_refuses_what_does_not_fit(tiny):
    decoder = BatchDecoder(tiny.fused, 2, 25, tiny.stop_ids, 20)
    with pytest.raises((ValueError, EntmtpError), match="long: 6 prompt"):
        list(decoder.run([Sequence("long", [5] * 6, [])]))


def test_a_prefix_layer_must_know_the_targets_positions(tiny, heads_maker, tmp_path):
    """Its rotation is a table: a position beyond it would be read from whatever lies there."""
    heads = heads_maker(tiny, "hydra_plus", [])
    heads.config.prefix["max_positions"] = 16
    save_heads(heads, tmp_path)
    with pytest.raises(EntmtpError, match="the prefix layer knows 16 positions, but the target has 1024"):
        load_heads(tmp_path, tiny)


def test_a_configured_kind_gets_no_other_architecture(tiny, heads_maker, tmp_path):
    save_heads(heads_maker(tiny, "hydra", []), tmp_path)
    assert load_kind(tmp_path, tiny, HeadsConfig(name="hydra", arch="hydra")).config.arch == "hydra"
    with pytest.raises(EntmtpError, match=r"these are hydra heads, but the configured kind 'medusa' is medusa"):
        load_kind(tmp_path, tiny, HeadsConfig(name="medusa", arch="medusa"))
