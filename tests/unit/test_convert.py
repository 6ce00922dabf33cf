"""Published checkpoint formats, made small: shapes and names of FACTS 5, outputs against straight-line arithmetic."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaModel

from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError
from entmtp.heads.convert import convert_published
from entmtp.heads.drafter import make_drafter
from entmtp.heads.model import load_heads


def medusa_state(hidden: int, vocab: int, heads: int = 3, blocks: int = 2) -> dict:
    state = {}
    for k in range(heads):
        for i in range(blocks):
            state[f"{k}.{i}.linear.weight"] = torch.randn(hidden, hidden) * 0.1
            state[f"{k}.{i}.linear.bias"] = torch.randn(hidden) * 0.1
        state[f"{k}.{blocks}.weight"] = torch.randn(vocab, hidden) * 0.1
    return state


def hydra_state(hidden: int, vocab: int, heads: int = 3, blocks: int = 2) -> dict:
    state = {}
    for k in range(heads):
        for i in range(blocks):
            width = (k + 2) * hidden if i == 0 else hidden
            state[f"hydra_mlp.{k}.{i}.linear.weight"] = torch.randn(hidden, width) * 0.1
            state[f"hydra_mlp.{k}.{i}.linear.bias"] = torch.randn(hidden) * 0.1
            if i == 0:
                state[f"hydra_mlp.{k}.0.res_connection.weight"] = torch.randn(hidden, width) * 0.1
                state[f"hydra_mlp.{k}.0.res_connection.bias"] = torch.randn(hidden) * 0.1
        state[f"hydra_lm_head.{k}.weight"] = torch.randn(vocab, hidden) * 0.1
        state[f"hydra_lm_head.{k}.bias"] = torch.randn(vocab) * 0.1
    return state


def prefix_state(target, heads: int = 3, blocks: int = 2) -> dict:
    """Hydra++: dropout slots between, a one-layer Llama over the hidden states, tables that nobody reads."""
    state = {}
    for key, value in hydra_state(target.hidden_size, target.vocab_size, heads, blocks).items():
        part, k, *rest = key.split(".")
        if part == "hydra_lm_head":
            state[f"{part}.{k}.1.{rest[0]}"] = value
        else:
            state[f"{part}.{k}.{2 * int(rest[0]) + 1}.{'.'.join(rest[1:])}"] = value
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    for key, value in LlamaModel(config).state_dict().items():
        state[f"prefix_embeding_layer.{key}"] = torch.randn(value.shape) * 0.2 + (value.dim() == 1)
    state["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["input_embed_fn.weight"] = torch.zeros(target.vocab_size, target.hidden_size)
    return state


def converted(tmp_path, tiny, arch: str, state: dict, depth: int = 3):
    torch.manual_seed(0)
    torch.save(state, tmp_path / f"{arch}_lm_head.pt")
    config = HeadsConfig(name=arch, arch=arch, depth=depth, source="hub", path=str(tmp_path))
    convert_published(config, tiny, tmp_path / "native")
    heads = load_heads(tmp_path / "native", tiny)
    return heads, make_drafter(heads, tiny, 8)


def test_medusa_outputs(tmp_path, tiny):
    state = medusa_state(tiny.hidden_size, tiny.vocab_size)
    heads, drafter = converted(tmp_path, tiny, "medusa", state)
    assert (heads.config.depth, heads.config.blocks, heads.config.projection) == (3, 2, "own")
    h = torch.randn(1, tiny.hidden_size)
    drafter.start(h, 5)
    for k in range(3):
        x = h
        for i in range(2):
            x = x + F.silu(F.linear(x, state[f"{k}.{i}.linear.weight"], state[f"{k}.{i}.linear.bias"]))
        expected = x @ state[f"{k}.2.weight"].T
        torch.testing.assert_close(drafter.head_logits[k : k + 1], expected, atol=2e-3, rtol=2e-3)  # stored in fp16


def test_hydra_outputs_take_hidden_then_oldest_embedding_first(tmp_path, tiny):
    state = hydra_state(tiny.hidden_size, tiny.vocab_size)
    _, drafter = converted(tmp_path, tiny, "hydra", state)
    h, path = torch.randn(1, tiny.hidden_size), torch.tensor([[5, 9, 7]])
    for k in range(3):
        x = torch.cat([h, *(tiny.model.embed(path[0, d : d + 1]) for d in range(k + 1))], dim=-1)
        weight = {name.split(".", 2)[2]: value for name, value in state.items() if name.startswith(f"hydra_mlp.{k}.")}
        x = F.linear(x, weight["0.res_connection.weight"], weight["0.res_connection.bias"]) + F.silu(
            F.linear(x, weight["0.linear.weight"], weight["0.linear.bias"])
        )
        x = x + F.silu(F.linear(x, weight["1.linear.weight"], weight["1.linear.bias"]))
        expected = F.linear(x, state[f"hydra_lm_head.{k}.weight"], state[f"hydra_lm_head.{k}.bias"])
        got = drafter.path_logits(k + 1, h, path[:, : k + 1])
        torch.testing.assert_close(got, expected, atol=3e-3, rtol=3e-3)


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions 0, 1, … on x [heads, n, d]: pairs (i, i + d / 2) turn by position * theta^(-2 i / d)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def straight_prefix(target, state: dict, h: torch.Tensor) -> torch.Tensor:
    """One Llama decoder layer and the final norm over hidden states h [n, H], spelled out."""
    c, n = target.config, len(h)
    w = {key.removeprefix("prefix_embeding_layer."): value.half().float() for key, value in state.items()}

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight

    def split(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(n, -1, c.head_dim).transpose(0, 1)

    x = norm(h, w["layers.0.input_layernorm.weight"])
    theta, groups = c.rope_parameters["rope_theta"], c.num_attention_heads // c.num_key_value_heads
    q, k = rotated(split(x, "q"), theta), rotated(split(x, "k"), theta).repeat_interleave(groups, 0)
    scores = (q @ k.transpose(1, 2) / c.head_dim**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    out = (scores.softmax(dim=-1) @ split(x, "v").repeat_interleave(groups, 0)).transpose(0, 1).reshape(n, -1)
    h = h + out @ w["layers.0.self_attn.o_proj.weight"].T
    x = norm(h, w["layers.0.post_attention_layernorm.weight"])
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return norm(h + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, w["norm.weight"])


def test_hydra_plus_outputs_come_from_the_prefix_layers_state(tmp_path, tiny):
    torch.manual_seed(1)
    state = prefix_state(tiny)
    heads, drafter = converted(tmp_path, tiny, "hydra", state)
    assert (heads.config.depth, heads.config.blocks, heads.config.first) == (3, 1, "residual")
    assert drafter.history
    h, path = torch.randn(7, tiny.hidden_size), torch.tensor([[5, 9, 7]])
    expected_state = straight_prefix(tiny, state, h)[-1:]
    drafter.reserve(16)
    drafter.reset()
    drafter.start(h[:4], 3)  # a prompt, then two commits
    drafter.start(h[4:6], 4)
    drafter.start(h[6:], 5)
    torch.testing.assert_close(drafter.state, expected_state, atol=1e-3, rtol=1e-3)
    for k in range(3):
        x = torch.cat([expected_state, *(tiny.model.embed(path[0, d : d + 1]) for d in range(k + 1))], dim=-1)
        mlp = f"hydra_mlp.{k}"
        x = F.linear(x, state[f"{mlp}.1.res_connection.weight"], state[f"{mlp}.1.res_connection.bias"]) + F.silu(
            F.linear(x, state[f"{mlp}.1.linear.weight"], state[f"{mlp}.1.linear.bias"])
        )
        x = x + F.silu(F.linear(x, state[f"{mlp}.3.linear.weight"], state[f"{mlp}.3.linear.bias"]))
        expected = F.linear(x, state[f"hydra_lm_head.{k}.1.weight"], state[f"hydra_lm_head.{k}.1.bias"])
        got = drafter.path_logits(k + 1, drafter.state, path[:, : k + 1])
        torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({"hydra_mlp.0.0.linear.weight": torch.zeros(1)}), "lies where arch prefix-mlp has dropout"),
        (lambda s: s.update({"hydra_lm_head.0.weight": torch.zeros(1)}), "unknown tensor 'hydra_lm_head.0.weight'"),
        (lambda s: s.pop("prefix_embeding_layer.norm.weight"), "do not fit hydra heads"),
        (lambda s: s.update({"prefix_embeding_layer.norm.weight": torch.ones(5)}), "do not fit hydra heads"),
    ],
)
def test_what_does_not_fit_in_a_hydra_plus_checkpoint_is_named(tmp_path, tiny, change, message):
    state = prefix_state(tiny)
    change(state)
    with pytest.raises(EntmtpError, match=message):
        converted(tmp_path, tiny, "hydra", state)
    assert not (tmp_path / "native").exists()


def test_first_heads_are_kept(tmp_path, tiny):
    heads, _ = converted(tmp_path, tiny, "medusa", medusa_state(tiny.hidden_size, tiny.vocab_size), depth=2)
    assert len(heads.projections) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({"strange": torch.zeros(1)}), "unknown tensor 'strange'"),
        (lambda s: s.update({k: v[:50] for k, v in s.items() if k.endswith(".2.weight")}), "another target"),
        (lambda s: [s.pop(k) for k in list(s) if k.endswith(".2.weight")], "no vocabulary projection"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, tiny, change, message):
    state = medusa_state(tiny.hidden_size, tiny.vocab_size)
    change(state)
    with pytest.raises(EntmtpError, match=message):
        converted(tmp_path, tiny, "medusa", state)


def test_too_few_heads(tmp_path, tiny):
    with pytest.raises(EntmtpError, match=r"holds 3 heads, heads\.depth=4"):
        converted(tmp_path, tiny, "medusa", medusa_state(tiny.hidden_size, tiny.vocab_size), depth=4)


class Malicious:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_malicious_pickle_is_refused_not_executed(tmp_path, tiny):
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Malicious()}))
    config = HeadsConfig(name="medusa", arch="medusa", depth=3, source="hub", path=str(tmp_path))
    with pytest.raises(EntmtpError, match="not a checkpoint of plain tensors"):
        convert_published(config, tiny, tmp_path / "native")
    assert not (tmp_path / "native").exists()
