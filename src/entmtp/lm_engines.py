"""What answers the questions of `entmtp.lm_eval`: draft trees under a policy, or blocks of a self-distilled model.

An engine's `stream(ids, max_new_tokens, temperature)` yields (tokens, forwards): what was committed, and how many
target forwards it took, the prefill included. Plain decoding so makes one token a forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entmtp.config import Config, DecodingConfig, TargetConfig, compose
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.io import sha256_file, sha256_json
from entmtp.policy.schedulers import Policy

BLOCKS = ("mtp", "threshold", "static", "k_max")  # options of ours beside the configuration's


@dataclass
class TreeEngine:
    """Draft trees under a policy; plain decoding is the policy whose tree is empty."""

    decoder: Decoder
    policy: Policy
    decoding: DecodingConfig
    masked: int | None = None  # a token that is never said

    def stream(self, ids: list[int], max_new_tokens: int, temperature: float) -> Iterator[tuple[list[int], int]]:
        decoding = replace(self.decoding, max_new_tokens=max_new_tokens)
        if temperature:
            decoding = replace(decoding, mode="sample", temperature=temperature)
        elif decoding.mode == "sample":  # the request decides
            decoding = replace(decoding, mode="greedy")
        for step in self.decoder.stream(ids, self.policy, decoding, sha256_json(ids)):
            if step is None:
                yield [], 1
            else:
                yield step.tokens, int(step.nodes >= 0)  # the last root may need no forward


@dataclass
class BlockEngine:
    """ConfAdapt or static blocks of a self-distilled model. Greedy, and lossy but for blocks of one."""

    decoder: BlockDecoder
    rule: BlockRule

    @property
    def masked(self) -> int:
        return self.decoder.mask_id

    def stream(self, ids: list[int], max_new_tokens: int, temperature: float) -> Iterator[tuple[list[int], int]]:
        if temperature:
            raise EntmtpError(f"temperature={temperature}: blocks are decoded greedily")
        for step in self.decoder.stream(ids, self.rule, max_new_tokens):
            yield step.tokens, 1


def open_engine(options: dict[str, Any], max_length: int) -> TreeEngine | BlockEngine:
    """The engine that options (Hydra overrides and `BLOCKS`) ask for, with room for `max_length` positions.

    Raises EntmtpError for options that do not go together, an unfitted policy, or a model without a mask token.
    """
    import torch

    own = {key: options[key] for key in BLOCKS if key in options}
    overrides = [f"{key}={value}" for key, value in options.items() if key not in BLOCKS]
    config = compose(overrides)
    if config.threads:
        torch.set_num_threads(config.threads)
    if "mtp" in own:
        return _open_blocks(own, config, max_length)
    if own:
        raise EntmtpError(f"{', '.join(own)}: only for a self-distilled model, whose folder mtp= names")
    return _open_trees(config, overrides, max_length)


def _open_trees(config: Config, overrides: list[str], max_length: int) -> TreeEngine:
    from entmtp.generate import open_policy
    from entmtp.session import compose_heads, heads_folder, open_decoder, open_target, run_folder, target_folder
    from entmtp.target.fetch import fetch_target

    policy = open_policy(config)  # before the target: a missing fit is said at once
    if config.target.source != "folder":
        fetch_target(config.target, target_folder(config.target, config.resources))
    target = open_target(config.target, config.resources, config.dtype, config.device)
    heads = folder = None
    if config.policy.heads:
        rest = [item for item in overrides if not item.startswith("heads=")]
        heads = compose_heads(config, rest, config.policy.heads)
        folder = heads_folder(heads, config.target.name, config.resources, run_folder(config))
    length = min(max_length, target.max_positions)
    decoder = open_decoder(target, heads, folder, Decoder.room(length, 0, policy.max_nodes))
    return TreeEngine(decoder, policy, config.decoding)


def _open_blocks(own: dict[str, Any], config: Config, max_length: int) -> BlockEngine:
    from entmtp.target.load import load_target

    if "threshold" in own and "static" in own:
        raise EntmtpError("threshold= and static= exclude one another: ConfAdapt, or always as many tokens")
    if "static" in own:
        rule = BlockRule(int(own["static"]), None)
    else:
        rule = BlockRule(int(own.get("k_max", config.confadapt.k_max)), float(own.get("threshold", 0.9)))
    folder = _folded(own["mtp"], config)
    target = load_target(TargetConfig(source="folder", path=str(folder)), folder, config.dtype, config.device)
    mask_id = getattr(target.config, "mtp_mask_id", None)
    if mask_id is None:
        raise EntmtpError(f"mtp={own['mtp']}: its config.json names no mtp_mask_id, so it is no self-distilled model")
    length = min(max_length, target.max_positions)
    return BlockEngine(BlockDecoder(target, mask_id, Decoder.room(length, 0, BlockDecoder.rows(rule.k_max))), rule)


def _folded(given: str, config: Config) -> Path:
    """The multi-token model's folder; an adapter's is folded into the target beside it, once."""
    from entmtp.distill.adapter import TENSORS, apply_adapter
    from entmtp.session import target_folder
    from entmtp.target.fetch import fetch_target

    adapter = Path(given)
    if not (adapter / TENSORS).is_file():
        return adapter
    base = fetch_target(config.target, target_folder(config.target, config.resources))
    folder = Path(config.resources) / "targets" / f"{config.target.name}-mtp-{sha256_file(adapter / TENSORS)[:12]}"
    if not folder.is_dir():
        apply_adapter(base, adapter, folder)
    return folder
