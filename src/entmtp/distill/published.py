"""Multi-token models from a folder: the run's own, and the released ones of arXiv 2602.06019.

A released folder (jwkirchenbauer/L3-1-8B-Magpie-MTP, jwkirchenbauer/Qwen3-4B-Inst-2507-MTP) is an ordinary Llama or
Qwen3 checkpoint beside code of its own, which is never run here. Its authors added 32 tokens <|mtp_special_token_0|> …
to the tokenizer and use the first as the mask; their generation code takes its id as an argument, which the model cards
give as 128259 (Llama) and 151669 (Qwen3). Folders that this project writes name theirs in config.json.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from entmtp.config import MtpConfig
from entmtp.distill.adapter import is_adapter, load_adapted
from entmtp.distill.mask_token import MASK
from entmtp.errors import EntmtpError
from entmtp.target.load import Target, load_target

CONFIG_KEYS = ("mtp_mask_id", "mask_token_id", "mask_id")  # ours first
MASK_TOKENS = (MASK, "<|mtp_special_token_0|>")


def find_mask_id(config: Any, tokenizer: Any, rows: int, said: int | None = None) -> int:
    """The mask token's id: what `said` (mtp.mask_id), config.json and tokenizer agree on, among those that name one.

    `rows`: of the embedding. Raises EntmtpError where nobody names one, two disagree, or the embedding lacks its row.
    """
    named = {} if said is None else {"mtp.mask_id": said}
    configured = {key: getattr(config, key, None) for key in CONFIG_KEYS}
    named |= {f"config.json's {key}": value for key, value in configured.items() if value is not None}
    vocabulary = tokenizer.get_vocab()
    named |= {f"the tokenizer's {token}": vocabulary[token] for token in MASK_TOKENS if token in vocabulary}
    if not named:
        raise EntmtpError(
            f"this model names no mask token (config.json: {', '.join(CONFIG_KEYS)}; tokenizer: "
            f"{', '.join(MASK_TOKENS)}): it is no multi-token model, or mtp.mask_id must say which token it is"
        )
    if len(set(named.values())) > 1:
        raise EntmtpError("the mask token is ambiguous: " + ", ".join(f"{who} is {id_}" for who, id_ in named.items()))
    who, mask_id = next(iter(named.items()))
    if not isinstance(mask_id, int) or not 0 <= mask_id < rows:
        raise EntmtpError(f"mask token: {who} is {mask_id}, but the embedding has {rows} rows")
    return mask_id


def load_multi_token(
    config: MtpConfig, folder: str | Path, dtype: str, device: str = "cpu", base: str | Path | None = None
) -> tuple[Target, int]:
    """A multi-token model as a target, and its mask token's id. `folder` may be an adapter's for the model in `base`.
    Raises EntmtpError for an unknown stop token."""
    if base is not None and is_adapter(folder):
        target = load_adapted(config, base, folder, dtype, device)
        mask_id = target.mask_id
        if config.mask_id not in (None, mask_id):
            raise EntmtpError(f"mtp.mask_id={config.mask_id}: the adapter's own mask is {mask_id}")
    else:
        target = load_target(config, folder, dtype, device)
        mask_id = find_mask_id(target.config, target.tokenizer, target.vocab_size, config.mask_id)
    vocabulary = target.tokenizer.get_vocab()
    unknown = [token for token in config.stop_tokens if token not in vocabulary]
    if unknown:
        raise EntmtpError(f"mtp.stop_tokens: {', '.join(unknown)} is no token of {folder}")
    stops = target.stop_ids | {vocabulary[token] for token in config.stop_tokens}
    return replace(target, stop_ids=stops), mask_id


def check_same_vocabulary(drafting: Target, verifying: Target) -> None:
    """A drafting model's token ids must mean to the verifying one what they mean to it. It may know more tokens."""
    own, other = drafting.tokenizer.get_vocab(), verifying.tokenizer.get_vocab()
    wrong = next((token for token, id_ in other.items() if own.get(token) != id_), None)
    if wrong is not None:
        raise EntmtpError(
            f"the multi-token model cannot draft for this target: token {wrong!r} has id {own.get(wrong)} there and "
            f"{other[wrong]} here; choose the target that it was distilled from, or confadapt.lossless=[self]"
        )
