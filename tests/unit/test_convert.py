"""Published checkpoint formats, made small: shapes and names of FACTS 5, outputs against straight-line arithmetic."""

import pickle

import pytest
import torch
import torch.nn.functional as F

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
