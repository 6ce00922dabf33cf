"""What a target refuses: models of another make, positions past its last, numbers that are none."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from entmtp import LanguageModel, generate
from entmtp.calibration.latency import forward_table
from entmtp.config import LatencyConfig
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.lossless import DraftedVerifier, SelfVerifier
from entmtp.errors import EntmtpError
from entmtp.heads.text import batch_decoder
from entmtp.policy.blocks import FixedBlocks
from entmtp.policy.schedulers import Policy
from entmtp.target.fetch import model_fingerprint
from entmtp.target.load import wrap_model
from entmtp.tree.topology import Tree

AR = Policy("ar", [Tree(())])


def small():
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)).eval()


def wrapped(model):
    return wrap_model(model, SimpleNamespace(eos_token_id=5), "auto", "float32", "cpu", fingerprint="test")


class Other(torch.nn.Module):
    """Of a make that is refused before anything is run."""

    def __init__(self, head: bool = True, **config):
        super().__init__()
        self.config = SimpleNamespace(
            **{"model_type": "other", "hidden_size": 8, "max_position_embeddings": 9, **config}
        )
        self.head = torch.nn.Linear(8, 11) if head else None

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Other(head=False), "no vocabulary head; load it as a causal language model"),
        (Other(max_position_embeddings=None), "its config has no max_position_embeddings"),
        (Other(layer_types=["full_attention", "conv"]), "layers of type conv: only attention"),
    ],
)
def test_models_of_another_make_are_refused_by_name(model, message):
    with pytest.raises(EntmtpError, match=message):
        wrapped(model)


def test_a_model_whose_forward_fails_is_refused_when_it_is_wrapped():
    model = small()
    model.config.head_dim = 5  # not what its layers keep
    with pytest.raises(EntmtpError, match="model_type=gpt_neox: not supported by the generic forward"):
        wrapped(model)


def test_a_context_ends_with_an_attention_chunk():
    model = small()
    model.config.attention_chunk_size = 16
    assert wrapped(model).max_positions == 16


def test_parts_that_are_configured_apart_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "seeing", "text_config": {"vocab_size": 9}}')
    with pytest.raises(EntmtpError, match="model_type=seeing: its config names no hidden_size and vocab_size of one"):
        model_fingerprint(tmp_path)


@pytest.mark.parametrize("policy", [AR, Policy("pair", [Tree.of([(0,), (1,)])])])
def test_half_precision_that_overflows_after_the_prompt_is_said(tiny, drafters, monkeypatch, policy):
    """Not at the prompt, but at the third position after it: no text of token 0 comes."""
    lm = LanguageModel(tiny, drafters["hydra"] if policy.max_nodes else None, policy)
    ids, real, asked = lm.encode("Hi"), tiny.model.logits, []

    def overflowing(hidden):
        asked.append(len(hidden))
        return real(hidden) * (float("nan") if len(asked) > 2 else 1.0)

    monkeypatch.setattr(tiny.model, "logits", overflowing)
    with pytest.raises(EntmtpError, match=r"not numbers \(NaN\)"):
        generate(lm, ids, max_new_tokens=20)


def test_typical_acceptance_that_overflows_after_the_prompt_is_said(tiny, drafters, monkeypatch):
    lm, real, asked = LanguageModel(tiny, drafters["hydra"], Policy("one", [Tree.of([(0,)])])), tiny.model.logits, []

    def overflowing(hidden):
        asked.append(len(hidden))
        return real(hidden) * (float("nan") if len(asked) > 2 else 1.0)

    monkeypatch.setattr(tiny.model, "logits", overflowing)
    with pytest.raises(EntmtpError, match=r"not numbers \(NaN\)"):
        generate(lm, lm.encode("Hi"), max_new_tokens=20, temperature=0.8, lossy=True)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("verifier", ["self", "draft"])
def test_verified_blocks_that_overflow_are_said(tiny, monkeypatch, verifier, after):
    drafter = BlockDecoder(tiny, 250, 96, 250)
    decoder = SelfVerifier(tiny, 250, 96, 24) if verifier == "self" else DraftedVerifier(tiny, drafter, 96, 24)
    real, asked = tiny.model.logits, []

    def overflowing(hidden):
        asked.append(len(hidden))
        return real(hidden) * (float("nan") if len(asked) > after else 1.0)

    monkeypatch.setattr(tiny.model, "logits", overflowing)
    with pytest.raises(EntmtpError, match=r"not numbers \(NaN\)"):
        decoder.generate([5, 6, 7], FixedBlocks(4), 20)


def test_blocks_that_overflow_are_said(tiny, monkeypatch):
    blocks, real = BlockDecoder(tiny, 250, 96), tiny.model.logits
    monkeypatch.setattr(tiny.model, "logits", lambda hidden: real(hidden) * float("nan"))
    with pytest.raises(EntmtpError, match=r"not numbers \(NaN\)"):
        blocks.generate([5, 6, 7], BlockRule(4, 0.5), 9)


def test_positions_past_the_last_are_refused_before_anything_is_read(tiny):
    with pytest.raises(EntmtpError, match=rf"up to {tiny.max_positions + 1} positions .* the target has"):
        batch_decoder(tiny, 2, tiny.max_positions + 1, 8)
    config = LatencyConfig(sizes=[1, 2], contexts=[8, tiny.max_positions - 1], repeats=1)
    with pytest.raises(EntmtpError, match=r"latency\.contexts': \d+, but the target has"):
        forward_table(tiny, config)
