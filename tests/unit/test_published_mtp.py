"""Multi-token models in the released format: ordinary Llama and Qwen3 folders, code beside them, 32 tokens more.

The folders are written here, tiny and random, as the authors' scripts write theirs: tokens added by
add_special_tokens, the embedding padded to a multiple, `auto_map` pointing at Python that must not run.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from entmtp.config import MtpConfig, TargetConfig, compose
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.lossless import SelfVerifier
from entmtp.distill.published import check_same_vocabulary, find_mask_id, load_multi_token
from entmtp.errors import EntmtpError
from entmtp.io import read_json, read_safetensors, sha256_file
from entmtp.policy.blocks import FixedBlocks
from entmtp.target.generic import GenericForward
from entmtp.target.llama import FusedLlama
from entmtp.target.load import load_target
from entmtp.tasks.prompts import encode

ROOT = Path(__file__).resolve().parents[2]
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
FIRST = 259  # the byte-level tokenizer's size: id of the first token added
MODELS = {
    "llama": lambda rows: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=rows, rope_parameters=LLAMA3_ROPE)),
    # heads wider than hidden_size / num_attention_heads, tied, norms on queries and keys
    "qwen3": lambda rows: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, vocab_size=rows, head_dim=12, tie_word_embeddings=True)
    ),
}
FORWARDS = {"llama": FusedLlama, "qwen3": GenericForward}
BUDGET = 20


@pytest.fixture(scope="module")
def released(tiny_folder, tmp_path_factory):
    """{family: folder} in the released format."""
    folders = {}
    for family, build in MODELS.items():
        folder = tmp_path_factory.mktemp(family)
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        extra = [f"<|mtp_special_token_{number}|>" for number in range(32)]
        assert tokenizer.add_special_tokens({"additional_special_tokens": extra}) == 32
        torch.manual_seed(3)
        model = build(len(tokenizer) + (-len(tokenizer)) % 128).eval()
        with torch.no_grad():  # norms start at 1: give them values that would show when forgotten
            for parameter in (p for p in model.parameters() if p.ndim == 1):
                parameter += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        names = {"AutoConfig": f"configuration_{family}.Config", "AutoModelForCausalLM": f"modeling_{family}.Model"}
        (folder / "config.json").write_text(json.dumps({**config, "auto_map": names}))
        for name in names.values():
            (folder / f"{name.split('.')[0]}.py").write_text("raise SystemExit('remote code was run')\n")
        folders[family] = folder
    return folders


def confadapt_without_cache(model, mask_id: int, prompt: list[int], k: int, threshold: float, stops: set[int]):
    """Blocks by the paper's rule with transformers alone, everything read again each time."""
    text = list(prompt)
    while len(text) < len(prompt) + BUDGET:
        with torch.no_grad():
            logits = model(torch.tensor([text + [mask_id] * (k - 1)])).logits[0, len(text) - 1 :]
        logits[:, mask_id] = -torch.inf
        confidence, chosen = logits.softmax(dim=-1).max(dim=-1)
        kept = 1
        while kept < k and bool((confidence[: kept + 1] >= threshold).all()):
            kept += 1
        for token in chosen[:kept].tolist()[: len(prompt) + BUDGET - len(text)]:
            text.append(token)
            if token in stops:
                return text[len(prompt) :]
    return text[len(prompt) :]


@pytest.mark.parametrize("family", MODELS)
def test_a_released_folder_is_read_decoded_and_verified(released, family):
    folder = released[family]
    target, mask_id = load_multi_token(MtpConfig(source="folder"), folder, "float32")
    assert mask_id == FIRST and target.vocab_size == 384
    assert isinstance(target.model, FORWARDS[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    for prompt in ([5], [7, 9, 30, 4, 8], list(range(40, 63))):
        decoder = BlockDecoder(target, mask_id, 96)
        for k, threshold in ((1, 0.5), (4, 0.05), (4, 0.3)):
            made = decoder.generate(prompt, BlockRule(k, threshold), BUDGET).tokens
            assert made == confadapt_without_cache(model, mask_id, prompt, k, threshold, target.stop_ids)
        alone = decoder.generate(prompt, BlockRule(1, None), BUDGET).tokens
        assert SelfVerifier(target, mask_id, 96, 15).generate(prompt, FixedBlocks(4), BUDGET).tokens == alone


def test_the_fused_forward_does_not_carry_qwen3s_norms(released):
    config = TargetConfig(name="q", source="folder", forward="fused")
    with pytest.raises(EntmtpError, match="fused does not cover model_type=qwen3"):
        load_target(config, released["qwen3"], "float32")


def test_the_tokenizer_names_the_mask_and_the_configuration_may_only_agree(released):
    folder = released["llama"]
    assert load_multi_token(MtpConfig(source="folder", mask_id=FIRST), folder, "float32")[1] == FIRST
    with pytest.raises(EntmtpError, match=rf"mtp.mask_id is 7, the tokenizer's <\|mtp_special_token_0\|> is {FIRST}"):
        load_multi_token(MtpConfig(source="folder", mask_id=7), folder, "float32")


def test_stop_tokens_are_added_by_name(released):
    plain, _ = load_multi_token(MtpConfig(source="folder"), released["llama"], "float32")
    more, _ = load_multi_token(MtpConfig(source="folder", stop_tokens=["<|im_start|>"]), released["llama"], "float32")
    assert more.stop_ids == plain.stop_ids | {1} and 1 not in plain.stop_ids
    with pytest.raises(EntmtpError, match=r"mtp.stop_tokens: <\|eot_id\|> is no token"):
        load_multi_token(MtpConfig(source="folder", stop_tokens=["<|eot_id|>"]), released["llama"], "float32")


def test_who_names_the_mask(released, tiny_folder):
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_folder), AutoConfig.from_pretrained(tiny_folder)
    with pytest.raises(EntmtpError, match=r"names no mask token .* mtp.mask_id must say"):
        find_mask_id(config, tokenizer, 259)
    assert find_mask_id(config, tokenizer, 259, 250) == 250
    with pytest.raises(EntmtpError, match=r"mtp.mask_id is 259, but the embedding has 259 rows"):
        find_mask_id(config, tokenizer, 259, 259)
    for key in ("mtp_mask_id", "mask_token_id", "mask_id"):
        own = AutoConfig.from_pretrained(tiny_folder)
        setattr(own, key, 17)
        assert find_mask_id(own, tokenizer, 259) == 17
    own.mtp_mask_id = 18
    with pytest.raises(EntmtpError, match=r"config.json's mtp_mask_id is 18, config.json's mask_id is 17"):
        find_mask_id(own, tokenizer, 259)


def test_a_drafting_model_must_share_the_targets_vocabulary(released, tiny, tiny_folder):
    own, _ = load_multi_token(MtpConfig(source="folder"), released["llama"], "float32")
    check_same_vocabulary(own, tiny)  # it knows every token of the target, and the special ones beside them
    with pytest.raises(EntmtpError, match=r"token '<\|mtp_special_token_\d+\|>' has id None there"):
        check_same_vocabulary(tiny, own)


@pytest.mark.parametrize(("name", "mask_id"), [("llama31_magpie", 128259), ("qwen3_4b", 151669)])
def test_released_models_are_configured_with_their_originals(name, mask_id, tiny_folder):
    config = compose(["experiment=paper_mtp", f"target={name}", f"mtp={name}"])
    assert (config.mtp.source, config.mtp.mask_id, len(config.mtp.stop_tokens)) == ("hub", mask_id, 2)
    assert config.mtp.name != config.target.name  # each has its folder
    if name == "qwen3_4b":  # trained on question, empty line, answer
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        tokenizer.chat_template = config.target.chat_template
        ids = encode(tokenizer, [{"role": "user", "content": "How many?"}])
        assert tokenizer.decode(ids) == "How many?\n\n"


@pytest.mark.parametrize("folder", sorted((ROOT / "resources" / "adapters").iterdir()), ids=lambda path: path.name)
def test_shipped_adapters_are_whole_small_and_for_the_shipped_heads_target(folder):
    tensors, config = folder / "adapter.safetensors", read_json(folder / "config.json")
    assert tensors.stat().st_size < 30e6 and sha256_file(tensors) == config["weights"]
    assert config["target"] == read_json(ROOT / "resources/heads/smollm2-hydra_plus/config.json")["target"]
    assert config["masks_only"] and read_safetensors(tensors)["mask_row"].shape == (576,)
    card = read_json(folder / "card.json")
    assert card["curve"][-1]["step"] == card["distill"]["steps"] and (folder / "README.md").is_file()
    mtp = compose([f"mtp={folder.name.replace('-', '_')}"]).mtp
    assert (mtp.source, ROOT / mtp.path) == ("adapter", folder)
